"""A router as it listens to KV events: a subscriber that asks for what it has missed, and believes what it is told."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import zmq

GPU, CPU, STORAGE = MEDIA = ("GPU", "CPU", "STORAGE")
_PATIENCE_MS = 20_000
_END = b"\xff" * 8


class Listener:
    """One thread. The index is in `blocks`: medium -> hash -> (parent, tokens)."""

    def __init__(self, folder: Path) -> None:
        """Joins; hears nothing yet. Keep the folder's path short."""
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.subscribe("")
        self._events.connect(endpoint(folder))
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.setsockopt(zmq.RCVTIMEO, _PATIENCE_MS)
        self._replay.connect(replay_endpoint(folder))
        self.blocks: dict[str, dict[int, tuple[int | None, tuple[int, ...]]]] = {medium: {} for medium in MEDIA}
        self.num_removed = dict.fromkeys(MEDIA, 0)
        self.num_cleared = 0
        self.gaps: list[int] = []
        """Numbers that were missing although they were asked for."""
        self.next_number = 0

    def hear(self) -> "Listener":
        """Takes what was published, by its number, and asks for what is missing before it, or may be."""
        while self._events.poll(0):
            _, number, batch = self._events.recv_multipart()
            if int.from_bytes(number, "big") > self.next_number:
                self.catch_up()
            self._take(number, batch)
        return self

    def catch_up(self) -> "Listener":
        """Asks for all that was published since what it has heard last."""
        self._replay.send_multipart([b"", self.next_number.to_bytes(8, "big")])
        while True:
            _, _, number, batch = self._replay.recv_multipart()
            if number == _END:
                return self
            self._take(number, batch)

    def await_next(self) -> "Listener":
        """Waits for something new, and takes it."""
        assert self._events.poll(_PATIENCE_MS), "no events"
        return self.hear()

    def leading(self, tokens: Sequence[int], size: int) -> list[str]:
        """Where the leading blocks of a prompt are: of each the fastest medium, found by tokens, as routers do."""
        where: list[str] = []
        parent: int | None = None
        for start in range(0, (len(tokens) - 1) // size * size, size):
            wanted = parent, tuple(tokens[start : start + size])
            found = next(
                ((medium, each) for medium in MEDIA for each, known in self.blocks[medium].items() if known == wanted),
                None,
            )
            if found is None:
                break
            where.append(found[0])
            parent = found[1]
        return where

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _take(self, number: bytes, batch: bytes) -> None:
        count = int.from_bytes(number, "big")
        if count < self.next_number:
            return
        self.gaps += range(self.next_number, count)
        self.next_number = count + 1
        _, events, rank = msgpack.unpackb(batch)
        assert rank == 0
        for event in events:
            self._believe(event)

    def _believe(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.num_cleared += 1
            for blocks in self.blocks.values():
                blocks.clear()
        elif event["type"] == "BlockRemoved":
            for each in event["block_hashes"]:
                del self.blocks[event["medium"]][each]
                self.num_removed[event["medium"]] += 1
        else:
            size, parent = event["block_size"], event["parent_block_hash"]
            assert len(event["token_ids"]) == size * len(event["block_hashes"])
            for number, each in enumerate(event["block_hashes"]):
                tokens = tuple(event["token_ids"][number * size : (number + 1) * size])
                assert each not in self.blocks[event["medium"]], "told twice"
                self.blocks[event["medium"]][each] = (parent, tokens)
                parent = each


def endpoint(folder: Path) -> str:
    return f"ipc://{folder}/events"


def replay_endpoint(folder: Path) -> str:
    return f"ipc://{folder}/replay"
