"""Forgetting for good: tombstones in the log, so that no later start brings back what was discarded."""

from collections.abc import Sequence

import numpy as np

from kvtier.codec import encode_header
from kvtier.events import EventKind
from kvtier.keys import TENANT_ID_BYTES, StoreKey, TenantId
from kvtier.tiers.disk_log.appending import SegmentLog
from kvtier.tiers.disk_log.books import Books, Claim
from kvtier.tiers.disk_log.format import Kind, purge_key
from kvtier.tiers.disk_log.index import Tags
from kvtier.tiers.disk_log.room import Room
from kvtier.tiers.disk_log.segments import NO_EPOCH
from kvtier.tiers.disk_log.trouble import Trouble
from kvtier.tiers.outbox import Outbox

_MOST_AT_ONCE = 512
"""Tombstones in one extent."""


class Forgetter:
    """Discards, purges, and drops of bad blocks. Any thread; raises nothing.

    When a tombstone cannot be written, the segments that hold the records go instead, whatever else is in them.
    """

    def __init__(self, books: Books, log: SegmentLog, room: Room, outbox: Outbox, trouble: Trouble) -> None:
        self._books = books
        self._log = log
        self._room = room
        self._outbox = outbox
        self._trouble = trouble

    def discard(self, keys: Sequence[StoreKey], tags: Tags) -> int:
        """Forgets records, and writes under way when they end; how many records were there."""
        books = self._books
        with books.lock:
            epoch = books.next_epoch()
            rows = books.index.find(tags)
            _, first = np.unique(rows, return_index=True)
            there = [int(index) for index in np.sort(first) if rows[index] >= 0]
            segments = set(books.index.records(rows[there])["segment"].tolist())
            books.take_out(rows[there])
            gone = [keys[index] for index in there]
            self._outbox.post(EventKind.REMOVED, gone)
            under_way = [claim for key in keys if (claim := books.pending.pop(key, None)) is not None]
            for claim in under_way:
                claim.discarded = epoch
        forgotten = gone + [claim.key for claim in under_way]
        for tenant, of_tenant in _by_tenant(forgotten).items():
            if not self._write(tenant, of_tenant, Kind.FORGET, [epoch] * len(of_tenant)):
                self._evict(segments)
            self._room.drop_dead(tenant)
        return len(gone)

    def forget_late(self, tenant: TenantId, claims: Sequence[Claim]) -> None:
        """Records that were discarded while they were written are on disk now."""
        # With the epochs of then: the keys may have been written again since.
        if not self._write(tenant, [c.key for c in claims], Kind.FORGET, [c.discarded for c in claims]):
            with self._books.lock:
                segments = {segment.number for segment in self._books.segments.of(tenant)}
            self._evict(segments)
        self._room.drop_dead(tenant)

    def drop(self, key: StoreKey, segment: int, page: int) -> bool:
        """Forgets a record that turned out bad; False when the index has none at this place any more."""
        books = self._books
        tags = books.tags([key])
        with books.lock:
            rows = books.index.find(tags)
            if rows[0] < 0:
                return False
            record = books.index.records(rows)[0]
            if (record["segment"], record["page"]) != (segment, page):
                return False
            epoch = books.next_epoch()
            books.take_out(rows)
            self._outbox.post(EventKind.REMOVED, [key])
        tenant = TenantId(key[:TENANT_ID_BYTES])
        self._write(tenant, [key], Kind.FORGET, [epoch])
        self._room.drop_dead(tenant)
        return True

    def purge(self, tenant: TenantId) -> int:
        """Forgets everything of a tenant; how many records were there."""
        books = self._books
        with books.lock:
            epoch = books.next_epoch()
            for claim in [claim for claim in books.claims if claim.key[:TENANT_ID_BYTES] == tenant]:
                claim.discarded = epoch
                if books.pending.get(claim.key) is claim:
                    del books.pending[claim.key]
            segments = books.segments.of(tenant)
            # At once, as discards do: what is still found may be moved, and its copy would be later than this.
            rows = books.index.in_segments([segment.number for segment in segments])
            records = books.index.records(rows)
            books.take_out(rows)
        if not segments:
            return 0
        for segment in segments:
            self._room.tell_of(segment, records["page"][records["segment"] == segment.number])
        if not self._write(tenant, [purge_key(tenant)], Kind.PURGE, [epoch]):
            self._evict({segment.number for segment in segments})
        self._room.drop_dead(tenant)
        return len(rows)

    def _write(self, tenant: TenantId, keys: Sequence[StoreKey], kind: Kind, epochs: Sequence[int]) -> bool:
        """Tombstones at the end of the tenant's log; False when they could not be written."""
        for start in range(0, len(keys), _MOST_AT_ONCE):
            part = keys[start : start + _MOST_AT_ONCE]
            of_part = epochs[start : start + _MOST_AT_ONCE]
            headers = [encode_header(key, b"") for key in part]
            try:
                extent = self._log.reserve(tenant, len(part), 0, NO_EPOCH)
                if extent is None:
                    return False
                landed = self._log.write(extent, headers, [b""] * len(part), of_part, [kind] * len(part))
            except OSError as error:
                self._trouble.write_failed(error)
                return False
            with self._books.lock:
                to_seal = self._log.settle(extent, landed)
            self._log.seal(to_seal)
        return True

    def _evict(self, numbers: "set[int]") -> None:
        """Removes whole segments, and with them what must not come back."""
        for number in sorted(numbers):
            with self._books.lock:
                segment = self._books.segments.find(number)
                if segment is None or segment.in_flight or segment.evicting:
                    continue
                self._books.segments.mark(segment)
            self._room.evict(segment)


def _by_tenant(keys: Sequence[StoreKey]) -> dict[TenantId, list[StoreKey]]:
    tenants: dict[TenantId, list[StoreKey]] = {}
    for key in keys:
        tenants.setdefault(TenantId(key[:TENANT_ID_BYTES]), []).append(key)
    return tenants
