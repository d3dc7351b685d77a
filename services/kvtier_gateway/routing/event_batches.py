"""Batches of KV events as engines publish them (docs/kv-events.md): decoded, in order, and gaps noticed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgpack

from kvtier_gateway.routing.values import BlocksCleared, BlocksRemoved, BlocksStored, Key, KvEvent, Medium

MAX_AHEAD = 1024
"""Batches that are kept while what is missing before them is replayed."""
_KEY_BYTES = 8
_MEDIA = {medium.value: medium for medium in Medium} | {None: Medium.DEVICE}
"""Events without a medium are of the device: vLLM leaves out what is the default."""


class MalformedEventsError(ValueError):
    """A batch is not what docs/kv-events.md says. Its engine's blocks are unknown: treat it as one that left."""


def decode_batch(packed: bytes) -> list[KvEvent]:
    """The events of a batch that are about a device or host memory.

    :raises MalformedEventsError: it is no batch.
    """
    try:
        batch = msgpack.unpackb(packed, strict_map_key=False)
        return [event for fields in batch[1] if (event := _decoded(fields)) is not None]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, msgpack.UnpackException) as error:
        raise MalformedEventsError(f"a batch of KV events cannot be read: {error}") from error


def _decoded(fields: Mapping[str, Any]) -> KvEvent | None:
    kind = fields["type"]
    if kind == "AllBlocksCleared":
        return BlocksCleared()
    medium = _MEDIA.get(fields.get("medium"))
    if medium is None or kind not in ("BlockStored", "BlockRemoved"):
        return None
    keys = [_key(value) for value in fields["block_hashes"]]
    return BlocksStored(keys, medium) if kind == "BlockStored" else BlocksRemoved(keys, medium)


def _key(value: int | bytes) -> Key:
    if isinstance(value, bytes):
        return int.from_bytes(value[-_KEY_BYTES:], "big")
    return int(value) & 0xFFFF_FFFF_FFFF_FFFF


@dataclass(frozen=True, slots=True)
class Replay:
    """Ask the engine to send all batches from this number on again."""

    first: int


class BatchOrder:
    """The batches of one engine in the order of their numbers. The caller receives and asks; this says what to do.

    Batches count from 0 in every life of an engine. One that begins above 0, or leaves a number out, has to be asked
    for what is missing; what comes meanwhile is kept, up to 1,024 batches. Where the engine has none of it any more,
    what follows is taken as it comes: the index lacks blocks then, until they come and go again.
    """

    def __init__(self) -> None:
        self._next = 0
        self._ahead: dict[int, list[KvEvent]] = {}
        self.num_gaps = 0
        """How often something was missing: a counter."""

    def take(self, number: int, events: list[KvEvent]) -> tuple[list[KvEvent], Replay | None]:
        """A batch came. What to apply now, in order; and a replay to ask for, which is told once for each gap."""
        if number < self._next:
            if number > 0 or not _is_new_life(events):
                return [], None  # sent twice: by the replay, and before or after it
            self._next, self._ahead = 0, {}
        is_gap = number > self._next and not self._ahead
        if len(self._ahead) >= MAX_AHEAD:
            return self.give_up(), None
        self._ahead[number] = events
        self.num_gaps += is_gap
        return self._in_order(), Replay(self._next) if is_gap else None

    def give_up(self) -> list[KvEvent]:
        """The replay has ended, or nobody answered: what to apply although something before it is missing."""
        if self._ahead:
            self._next = min(self._ahead)
        return self._in_order()

    def _in_order(self) -> list[KvEvent]:
        ready: list[KvEvent] = []
        while self._next in self._ahead:
            ready += self._ahead.pop(self._next)
            self._next += 1
        return ready


def _is_new_life(events: Iterable[KvEvent]) -> bool:
    """An engine that starts tells first of all that it has nothing."""
    return any(isinstance(event, BlocksCleared) for event in events)
