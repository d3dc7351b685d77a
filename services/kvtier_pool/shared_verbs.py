"""The verbs of the block protocol for clients on this host, which map the pool's memory: decode, call, encode."""

import os
import struct
from collections.abc import Callable, Sequence

from kvtier.errors import InvalidInputError
from kvtier.keys import StoreKey
from kvtier.wire.block import Fields, Verb
from kvtier_pool.shared_memory import ClientMemory

SHARED_VERBS = frozenset((Verb.ACQUIRE, Verb.RELEASE, Verb.PREPARE, Verb.COMMIT, Verb.ABORT, Verb.MAP))
_CHECKSUM_BYTES = 8
Answer = tuple[dict[str, object], list[int]]
"""Fields of the answer, and descriptors that go with it: to be closed once sent."""
Blocks = Callable[[Fields], tuple[list[StoreKey], list[int]]]
"""Keys and payload lengths of a request's groups, checked against the limits."""


class SharedVerbs:
    """One connection's. Its thread only."""

    def __init__(self, memory: ClientMemory, blocks: Blocks) -> None:
        self._memory = memory
        self._blocks = blocks
        self.handlers: dict[str, Callable[[Fields], Answer | None]] = {
            Verb.ACQUIRE: self._acquire,
            Verb.RELEASE: self._release,
            Verb.PREPARE: self._prepare,
            Verb.COMMIT: self._commit,
            Verb.ABORT: self._abort,
            Verb.MAP: self._map,
        }
        """By verb; None is no answer."""

    def _acquire(self, request: Fields) -> Answer:
        keys, sizes = self._blocks(request)
        lease, statuses, places = self._memory.acquire(keys, sizes)
        return {"lease": lease, "statuses": statuses, "places": places}, []

    def _release(self, request: Fields) -> None:
        self._memory.release(request.number("lease"))

    def _prepare(self, request: Fields) -> Answer:
        keys, sizes = self._blocks(request)
        write, statuses, slots = self._memory.prepare(keys, sizes)
        return {"write": write, "statuses": statuses, "slots": struct.pack(f"<{len(slots)}Q", *slots)}, []

    def _commit(self, request: Fields) -> Answer:
        statuses = self._memory.commit(request.number("write"), _checksums(request.data("checksums")))
        return {"statuses": bytes(statuses)}, []

    def _abort(self, request: Fields) -> None:
        self._memory.abort(request.number("write"))

    def _map(self, request: Fields) -> Answer:
        slab = self._memory.open_slab(request.number("slab"))
        if slab is None:
            return {"num_slots": 0}, []
        fields: dict[str, object] = {
            "num_slots": slab.num_slots,
            "slot_bytes": slab.slot_bytes,
            "writable": int(slab.writable),
        }
        return fields, [slab.descriptor]


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _checksums(data: bytes) -> Sequence[int]:
    if len(data) % _CHECKSUM_BYTES:
        raise InvalidInputError(f"checksums of {len(data)} bytes: need a multiple of {_CHECKSUM_BYTES}")
    return struct.unpack(f"<{len(data) // _CHECKSUM_BYTES}Q", data)
