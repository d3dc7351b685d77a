"""The verbs of the block protocol for clients on this host, which map the pool's memory: decode, call, encode."""

import os
import struct

from kvtier.wire.block import Verb
from kvtier.wire.shared_memory import WORD
from kvtier_pool.block_verbs import Handler
from kvtier_pool.caller import Caller
from kvtier_pool.exchange import Exchange
from kvtier_pool.shared_memory import ClientMemory


class SharedVerbs:
    """One connection's. Its thread only. Those that give something back are not answered."""

    def __init__(self, memory: ClientMemory, caller: Caller) -> None:
        self._memory = memory
        self._caller = caller
        self.handlers: dict[str, Handler] = {
            Verb.ACQUIRE: self._acquire,
            Verb.RELEASE: self._release,
            Verb.PREPARE: self._prepare,
            Verb.COMMIT: self._commit,
            Verb.ABORT: self._abort,
            Verb.MAP: self._map,
        }
        """By verb."""

    def _acquire(self, exchange: Exchange) -> None:
        lease, statuses, places = self._memory.acquire(*self._caller.blocks(exchange.request))
        exchange.answer({"lease": lease, "statuses": statuses, "places": places})

    def _release(self, exchange: Exchange) -> None:
        self._memory.release(exchange.request.number("lease"))

    def _prepare(self, exchange: Exchange) -> None:
        write, statuses, slots = self._memory.prepare(*self._caller.blocks(exchange.request))
        exchange.answer({"write": write, "statuses": statuses, "slots": struct.pack(f"<{len(slots)}Q", *slots)})

    def _commit(self, exchange: Exchange) -> None:
        checksums = [checksum for (checksum,) in exchange.request.records("checksums", WORD)]
        statuses = self._memory.commit(exchange.request.number("write"), checksums)
        exchange.answer({"statuses": bytes(statuses)})

    def _abort(self, exchange: Exchange) -> None:
        self._memory.abort(exchange.request.number("write"))

    def _map(self, exchange: Exchange) -> None:
        slab = self._memory.open_slab(exchange.request.number("slab"))
        if slab is None:
            exchange.answer({"num_slots": 0})
            return
        fields = {"num_slots": slab.num_slots, "slot_bytes": slab.slot_bytes, "writable": int(slab.writable)}
        try:
            exchange.answer(fields, descriptors=[slab.descriptor])
        finally:
            os.close(slab.descriptor)
