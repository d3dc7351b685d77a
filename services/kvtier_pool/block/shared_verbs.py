"""The verbs of the block protocol for clients on this host, which map the pool's memory: decode, call, encode."""

import os
import struct
from collections.abc import Callable, Sequence

from kvtier.protocol.block import Verb
from kvtier.protocol.shared_memory import WORD
from kvtier.tiers.base import Status, WriteStatus
from kvtier_pool.block.client_memory import ClientMemory
from kvtier_pool.block.client_scope import ClientScope
from kvtier_pool.block.request_context import RequestContext
from kvtier_pool.block.verbs import Handler


class SharedVerbs:
    """One connection's verbs for shared memory. Its thread only. Verbs that give something back are not answered."""

    def __init__(
        self, memory: ClientMemory, scope: ClientScope, max_held_bytes: Callable[[], int], told_bytes: int
    ) -> None:
        """
        :param max_held_bytes: what the client should hold at most, as shares are now.
        :param told_bytes: what HELLO has told it of that.
        """
        self._memory = memory
        self._scope = scope
        self._max_held_bytes = max_held_bytes
        self._told_bytes = told_bytes
        """What the client was told last. Own thread only."""

    def handlers(self) -> dict[str, Handler]:
        """The handlers of requests by verb, made anew."""
        return {
            Verb.ACQUIRE: self._acquire,
            Verb.RELEASE: self._release,
            Verb.PREPARE: self._prepare,
            Verb.COMMIT: self._commit,
            Verb.ABORT: self._abort,
            Verb.MAP: self._map,
        }

    def _acquire(self, request: RequestContext) -> None:
        keys, sizes = self._scope.blocks(request.request)
        lease, statuses, places = self._memory.acquire(keys, sizes)
        request.moved_bytes += _moved(sizes, statuses, Status.HIT)
        request.answer({"lease": lease, "statuses": statuses, "places": places, **self._news()})

    def _release(self, request: RequestContext) -> None:
        self._memory.release(request.request.number("lease"))

    def _prepare(self, request: RequestContext) -> None:
        keys, sizes = self._scope.blocks(request.request)
        write, statuses, slots = self._memory.prepare(keys, sizes)
        request.moved_bytes += _moved(sizes, statuses, WriteStatus.STORED)
        packed = struct.pack(f"<{len(slots)}Q", *slots)
        request.answer({"write": write, "statuses": statuses, "slots": packed, **self._news()})

    def _commit(self, request: RequestContext) -> None:
        checksums = [checksum for (checksum,) in request.request.records("checksums", WORD)]
        statuses = self._memory.commit(request.request.number("write"), checksums)
        request.answer({"statuses": bytes(statuses)})

    def _abort(self, request: RequestContext) -> None:
        self._memory.abort(request.request.number("write"))

    def _map(self, request: RequestContext) -> None:
        slab = self._memory.open_slab(request.request.number("slab"))
        if slab is None:
            request.answer({"num_slots": 0})
            return
        fields = {"num_slots": slab.num_slots, "slot_bytes": slab.slot_bytes, "writable": int(slab.writable)}
        try:
            request.answer(fields, descriptors=[slab.descriptor])
        finally:
            os.close(slab.descriptor)

    def _news(self) -> dict[str, int]:
        """How much the client should hold, when that is no longer what it was told: tenants come and go, and their
        shares change."""
        max_held_bytes = self._max_held_bytes()
        if max_held_bytes == self._told_bytes:
            return {}
        self._told_bytes = max_held_bytes
        return {"max_held_bytes": max_held_bytes}


def _moved(sizes: Sequence[int], statuses: bytes, done: int) -> int:
    """Bytes of the blocks that the client now reads or writes by itself."""
    num_done = statuses.count(done)
    if num_done == len(sizes):
        return sum(sizes)
    return sum(size for size, status in zip(sizes, statuses, strict=True) if status == done) if num_done else 0
