"""The verbs of the block protocol for all clients, wherever they are: decode, call `Store`, encode."""

from collections.abc import Callable, Mapping, Sequence

from kvtier.codec.stored_form import Header
from kvtier.identity.keys import StoreKey
from kvtier.protocol.arriving import CHECKSUM, ArrivingBlock, receive_blocks
from kvtier.protocol.block import MAX_FRAME_BLOCKS, MAX_FRAME_PAYLOAD_BYTES, Verb
from kvtier.protocol.groups import windows
from kvtier.store.store import Store
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.host.slots import WriteSlot
from kvtier_pool.block.client_scope import ClientScope
from kvtier_pool.block.request_context import RequestContext
from kvtier_pool.requests import pin_ttl_ms

_PIECE_BYTES = 2 << 20
"""The bytes of a piece of the payloads that come in: with many writers, fewer turns of the interpreter's lock and of
the cores count for more than the processor's second-level cache."""
_ALL_SENT = {"statuses": b"", "headers": b""}
"""The last answer to a read."""
Handler = Callable[[RequestContext], None]
"""Serves one request."""


class BlockVerbs:
    """The verbs that one connection's requests are served with. Its thread only."""

    def __init__(self, core: Store, scope: ClientScope, max_block_bytes: int) -> None:
        """:param max_block_bytes: of one payload that is written; a longer one is FULL."""
        self._core = core
        self._scope = scope
        self._max_block_bytes = max_block_bytes

    def handlers(self) -> dict[str, Handler]:
        """The handlers of requests by verb, made anew: kept here, they and this object would keep each other alive."""
        handlers: dict[str, Handler] = {
            Verb.LOOKUP: self._lookup,
            Verb.READ: self._read,
            Verb.WRITE: self._write,
            Verb.DISCARD: self._discard,
            Verb.USAGE: self._usage,
        }
        if self._core.max_pin_s:
            handlers |= {Verb.PIN: self._pin, Verb.UNPIN: self._unpin}
        return handlers

    def _lookup(self, request: RequestContext) -> None:
        keys, writes = self._scope.keys(request.request), request.request.has("writes")
        statuses = bytearray()
        for part in request.parts(keys):
            statuses += bytes(self._core.lookup(part, counts=not writes))
        offers = {"checksums_behind": 1} if writes else {}
        request.answer({"statuses": bytes(statuses), **offers})

    def _discard(self, request: RequestContext) -> None:
        keys = self._scope.keys(request.request)
        request.answer({"num_discarded": sum(self._core.discard(part) for part in request.parts(keys))})

    def _usage(self, request: RequestContext) -> None:
        tiers = [
            {
                "name": share.tier,
                "num_blocks": share.num_blocks,
                "used_bytes": share.used_bytes,
                "capacity_bytes": share.capacity_bytes,
                "used_percent": share.used_percent,
            }
            for share in self._core.usage(self._scope.tenant)
        ]
        request.answer({"tiers": tiers})

    def _pin(self, request: RequestContext) -> None:
        ttl_ms = pin_ttl_ms(request.request.number("ttl_ms"), self._core.max_pin_s)
        statuses = self._core.pin(self._scope.tenant, self._scope.keys(request.request), ttl_ms / 1000)
        request.answer({"statuses": bytes(statuses), "ttl_ms": ttl_ms})

    def _unpin(self, request: RequestContext) -> None:
        request.answer({"num_unpinned": self._core.unpin(self._scope.keys(request.request))})

    def _read(self, request: RequestContext) -> None:
        """Sends the blocks piece by piece, straight from where they lie; the last answer says that this was all. It
        goes out with the last piece: each system call gives the interpreter up, and waits to have it back."""
        keys, sizes = self._scope.blocks(request.request)
        if not keys:
            request.answer(_ALL_SENT)
        for start, stop in windows(sizes, MAX_FRAME_PAYLOAD_BYTES, MAX_FRAME_BLOCKS):
            with self._core.read(keys[start:stop], sizes[start], len(keys)) as found:
                blocks = [block for block in found if block is not None]
                fields = {
                    "statuses": bytes(Status.MISS if block is None else Status.HIT for block in found),
                    "headers": b"".join(block.header for block in blocks),
                }
                is_last = stop == len(keys)
                if is_last:
                    self._core.touch(keys)
                request.answer(fields, [block.payload for block in blocks], then=_ALL_SENT if is_last else None)

    def _write(self, request: RequestContext) -> None:
        blocks = self._scope.announced(request.request, request.payload_bytes)
        statuses: list[WriteStatus] = []
        try:
            for start, stop in windows(blocks.sizes, MAX_FRAME_PAYLOAD_BYTES, MAX_FRAME_BLOCKS):
                statuses += self._take(request, blocks.headers(start, stop), len(blocks.sizes))
        finally:
            stored = [place for place, status in enumerate(statuses) if status is WriteStatus.STORED]
            self._core.touch([blocks.key(place) for place in stored])
        request.answer({"statuses": bytes(statuses)})

    def _take(self, request: RequestContext, headers: Sequence[Header], run_blocks: int) -> list[WriteStatus]:
        """Receives these payloads straight into memory's slots; what the pool does not take goes nowhere.

        What has come is kept, whatever becomes of the rest.

        :param run_blocks: how many blocks the request brings.
        """
        outcomes: list[WriteSlot | WriteStatus] = []
        arrived: dict[int, int] = {}
        """Checksums of those that are what their headers say, by place."""
        behind = request.request.has("checksums_behind")
        try:
            for header in headers:
                outcomes.append(self._begin(header))
            first_copies = _first_copies(headers, outcomes)
            arriving = [
                ArrivingBlock.wanted(i, header, outcome.view, checksum_behind=behind)
                if isinstance(outcome, WriteSlot)
                else ArrivingBlock(i, header.stored_length + (CHECKSUM.size if behind else 0))
                for i, (header, outcome) in enumerate(zip(headers, outcomes, strict=True))
            ]
            for block in receive_blocks(request.next_piece(), arriving, _PIECE_BYTES):
                slot = outcomes[block.tag]
                if isinstance(slot, WriteSlot) and block.fault is None:
                    arrived[block.tag] = block.checksum
                elif isinstance(slot, WriteSlot):
                    outcomes[block.tag] = self._core.abort_write(slot)
        finally:
            self._commit(arrived, outcomes, run_blocks)
            statuses = [self._core.abort_write(o) if isinstance(o, WriteSlot) else o for o in outcomes]
        for i, first in first_copies.items():
            if statuses[first] is not WriteStatus.STORED:
                statuses[i] = statuses[first]
        return statuses

    def _commit(self, arrived: Mapping[int, int], outcomes: list[WriteSlot | WriteStatus], run_blocks: int) -> None:
        """Puts statuses in place of the slots that stand at the places in `arrived`, which has their checksums."""
        slots = [slot for i in arrived if isinstance(slot := outcomes[i], WriteSlot)]
        statuses = self._core.commit_all(slots, list(arrived.values()), run_blocks)
        for i, status in zip(arrived, statuses, strict=True):
            outcomes[i] = status

    def _begin(self, header: Header) -> WriteSlot | WriteStatus:
        if header.stored_length > self._max_block_bytes:
            return WriteStatus.FULL
        return self._core.begin_write(self._scope.tenant, header.key, header.stored_length)


def _first_copies(headers: Sequence[Header], outcomes: Sequence[WriteSlot | WriteStatus]) -> dict[int, int]:
    """Places of blocks that exist only because these headers name them twice, each with that of its first copy."""
    if WriteStatus.EXISTS not in outcomes:
        return {}
    arriving: dict[StoreKey, int] = {}
    copies: dict[int, int] = {}
    for i, (header, outcome) in enumerate(zip(headers, outcomes, strict=True)):
        if isinstance(outcome, WriteSlot):
            arriving[header.key] = i
        elif outcome is WriteStatus.EXISTS and header.key in arriving:
            copies[i] = arriving[header.key]
    return copies
