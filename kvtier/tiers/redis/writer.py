"""Writing blocks to a Redis: payloads go to the socket out of the memory they lie in."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.clock import MONOTONIC
from kvtier.codec.stored_form import parse_stored_header
from kvtier.identity.keys import StoreKey
from kvtier.memory.buffers import ReadableBuffer
from kvtier.tiers.base import WriteStatus
from kvtier.tiers.common.packer import BlockPacker
from kvtier.tiers.redis.answers import ReplyError
from kvtier.tiers.redis.commands import exists, part_names, set_value
from kvtier.tiers.redis.servers import RedisServers, each

_OOM = frozenset({"OOM"})


@dataclass(frozen=True, slots=True)
class _Block:
    """In its stored form."""

    place: int
    head: bytes
    parts: list[memoryview]
    """The payload as stored, cut; at least one, which may be empty."""
    names: list[bytes]
    """Of the parts after the first."""


class BlockWriter:
    """One batch of writes. One thread."""

    def __init__(
        self,
        items: Sequence[tuple[StoreKey, ReadableBuffer]],
        names: Sequence[bytes],
        *,
        packer: BlockPacker,
        ttl_ms: int,
        max_value_bytes: int,
    ) -> None:
        self.statuses = [WriteStatus.FAILED] * len(items)
        """Filled as it goes: what is in it when the write fails holds nevertheless."""
        self.num_moved = 0
        """Blocks that nobody answered for, because a Cluster was moving them."""
        self.refusal = ""
        """What a server said that was full."""
        self.to_drop: list[bytes] = []
        """Names of parts of blocks that did not become whole."""
        self._items, self._names = items, names
        self._packer = packer
        self._ttl_ms = ttl_ms
        self._max_value_bytes = max_value_bytes

    def write(self, servers: RedisServers, timeout_s: float) -> None:
        """Blocks up to `timeout_s`; raises as `RedisServers.exchange` does.

        What is there already is found out first: that costs a round trip, and saves packing and sending.
        """
        deadline = MONOTONIC() + timeout_s
        absent = self._absent(servers, timeout_s)
        blocks = [self._encoded(place) for place in absent]
        large = [block for block in blocks if block.names]
        if large:
            whole = self._write_parts(servers, large, deadline - MONOTONIC())
            blocks = [block for block in blocks if not block.names or block.place in whole]
        if blocks:
            self._write_firsts(servers, blocks, deadline - MONOTONIC())

    def _absent(self, servers: RedisServers, timeout_s: float) -> list[int]:
        absent: list[int] = []

        def take(place: int, answer: object) -> None:
            if answer:
                self.statuses[place] = WriteStatus.EXISTS
            else:
                absent.append(place)

        def pack(places: Sequence[int]) -> list[bytes]:
            return [b"".join([exists(self._names[place]) for place in places])]

        self.num_moved += len(servers.exchange(self._names, pack, each(take), timeout_s))
        return sorted(absent)

    def _encoded(self, place: int) -> _Block:
        key, payload = self._items[place]
        head, payload_as_stored = self._packer.encode(key, payload)
        stored = memoryview(payload_as_stored)
        step = self._max_value_bytes
        parts = [stored[start : start + step] for start in range(0, len(stored) or 1, step)]
        names = part_names(self._names[place], parse_stored_header(head).checksum, len(parts)) if len(parts) > 1 else []
        return _Block(place, head, parts, names)

    def _write_parts(self, servers: RedisServers, blocks: Sequence[_Block], timeout_s: float) -> set[int]:
        """The parts after the first, last to first. Gives the places of the blocks that have all of them now."""
        parts = [(block, i) for block in blocks for i in reversed(range(len(block.names)))]
        names = [block.names[i] for block, i in parts]
        lacking: dict[int, WriteStatus] = {}

        def pack(places: Sequence[int]) -> list[ReadableBuffer]:
            return [
                buffer
                for block, i in (parts[place] for place in places)
                for buffer in set_value(block.names[i], [block.parts[i + 1]], self._ttl_ms, anew=False)
            ]

        def take(place: int, answer: object) -> None:
            if isinstance(answer, ReplyError):
                self.refusal = str(answer)
                lacking[parts[place][0].place] = WriteStatus.FULL

        moved = servers.exchange(names, pack, each(take, _OOM), timeout_s)
        on_the_move = {parts[place][0].place for place in moved}
        self.num_moved += len(on_the_move)
        lacking |= dict.fromkeys(on_the_move, WriteStatus.FAILED)
        for place, status in lacking.items():
            self.statuses[place] = status
        whole = [block for block in blocks if block.place not in lacking]
        needed = {name for block in whole for name in block.names}  # a batch may name a key twice
        self.to_drop += [name for block in blocks for name in block.names if name not in needed]
        return {block.place for block in whole}

    def _write_firsts(self, servers: RedisServers, blocks: Sequence[_Block], timeout_s: float) -> None:
        """What makes blocks readable."""

        def pack(places: Sequence[int]) -> list[ReadableBuffer]:
            return [
                buffer
                for block in (blocks[place] for place in places)
                for buffer in set_value(self._names[block.place], [block.head, block.parts[0]], self._ttl_ms, anew=True)
            ]

        def take(place: int, answer: object) -> None:
            if isinstance(answer, ReplyError):
                self.refusal = str(answer)
                status = WriteStatus.FULL
            else:
                status = WriteStatus.EXISTS if answer is None else WriteStatus.STORED
            self.statuses[blocks[place].place] = status

        names = [self._names[block.place] for block in blocks]
        self.num_moved += len(servers.exchange(names, pack, each(take, _OOM), timeout_s))
