"""What requests are answered with for which a tenant asks too fast: misses and THROTTLED, without any work.

These are answers and no errors, so that a client is not led to believe that the pool fails, and does not connect anew.
"""

from kvtier.identity.keys import CHAIN_HASH_BYTES
from kvtier.protocol.block import MAX_FRAME_BLOCKS, MAX_FRAME_PAYLOAD_BYTES, Fields, Verb
from kvtier.protocol.groups import windows
from kvtier.protocol.retention import PinStatus
from kvtier.tiers.base import Status, WriteStatus
from kvtier_pool.block.client_memory import NOTHING_HELD
from kvtier_pool.block.client_scope import ClientScope
from kvtier_pool.block.request_context import RequestContext
from kvtier_pool.block.verbs import Handler
from kvtier_pool.rates import Pace

_SCRATCH_BYTES = 256 << 10


class RefusedVerbs:
    """The verbs of one connection for as long as its tenant asks too fast. Its thread only.

    Others are carried out all the same: what gives something back, and what is rare.
    """

    def __init__(self, scope: ClientScope, pace: Pace) -> None:
        self._scope = scope
        self._pace = pace

    def handlers(self) -> dict[str, Handler]:
        """The handlers of requests by verb, made anew."""
        return {
            Verb.LOOKUP: self._lookup,
            Verb.READ: self._read,
            Verb.WRITE: self._write,
            Verb.PIN: self._pin,
            Verb.ACQUIRE: self._acquire,
            Verb.PREPARE: self._prepare,
        }

    def _lookup(self, request: RequestContext) -> None:
        misses = bytes([Status.MISS]) * len(self._scope.keys(request.request))
        request.answer({"statuses": misses, "throttled": 1})

    def _read(self, request: RequestContext) -> None:
        _, sizes = self._scope.blocks(request.request)
        for start, stop in windows(sizes, MAX_FRAME_PAYLOAD_BYTES, MAX_FRAME_BLOCKS):
            request.answer({"statuses": bytes([Status.MISS]) * (stop - start), "headers": b""})
        request.answer({"statuses": b"", "headers": b""})

    def _write(self, request: RequestContext) -> None:
        """Receives the payload to nowhere: it is on its way already. Whoever sends more and more of it is cut off."""
        self._pace.refuse(request.payload_bytes)
        request.moved_bytes = 0
        blocks = self._scope.announced(request.request, request.payload_bytes)
        scratch = memoryview(bytearray(min(_SCRATCH_BYTES, request.payload_bytes)))
        for start, stop in windows(blocks.sizes, MAX_FRAME_PAYLOAD_BYTES, MAX_FRAME_BLOCKS):
            whole, rest = divmod(sum(blocks.sizes[start:stop]), max(1, len(scratch)))
            request.next_piece()([scratch] * whole + [scratch[:rest]])
        request.answer({"statuses": bytes([WriteStatus.THROTTLED]) * len(blocks.sizes)})

    def _pin(self, request: RequestContext) -> None:
        misses = bytes([PinStatus.MISS]) * len(self._scope.keys(request.request))
        request.answer({"statuses": misses, "ttl_ms": request.request.number("ttl_ms")})

    def _acquire(self, request: RequestContext) -> None:
        keys, _ = self._scope.blocks(request.request)
        misses = bytes([Status.MISS]) * len(keys)
        request.answer({"lease": NOTHING_HELD, "statuses": misses, "places": b""})

    def _prepare(self, request: RequestContext) -> None:
        keys, _ = self._scope.blocks(request.request)
        throttled = bytes([WriteStatus.THROTTLED]) * len(keys)
        request.answer({"write": NOTHING_HELD, "statuses": throttled, "slots": b""})


def asked_bytes(verb: str, request: Fields, payload_bytes: int) -> int:
    """The payload bytes that a request brings or asks for, before anybody knows what is there. O(groups)."""
    if verb not in (Verb.READ, Verb.ACQUIRE, Verb.PREPARE):
        return payload_bytes
    return sum(
        group.number("payload_bytes") * (len(group.data("hashes")) // CHAIN_HASH_BYTES)
        for group in request.maps("groups")
    )
