"""Forgetting for good: tombstones in the log, so that no later start brings back what was discarded."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from kvtier.codec.stored_form import encode_header
from kvtier.events import EventKind
from kvtier.identity.keys import StoreKey, TenantId, tenant_of
from kvtier.tiers.common.event_queue import EventQueue
from kvtier.tiers.disk.log.format import Kind, purge_key
from kvtier.tiers.disk.log.segments import NO_EPOCH
from kvtier.tiers.disk.medium.health import MediumHealth
from kvtier.tiers.disk.medium.io_threads import IoThreads
from kvtier.tiers.disk.medium.watch import HangWatch
from kvtier.tiers.disk.operations.appending import SegmentLog
from kvtier.tiers.disk.reclaim.space import SpaceManager
from kvtier.tiers.disk.state.log_state import Claim, LogState
from kvtier.tiers.disk.state.tag_table import Tags

_MOST_AT_ONCE = 512
"""Tombstones in one extent."""
_ROWS_AT_ONCE = 8192
"""Looked at by a purge while nobody else can look: about 1 ms."""
_MOST_WAITING = 1 << 20
"""Tombstones that are not written yet, above which a discard forgets only what the index has: what it does not have can
be named without end, again and again, while the medium hangs."""
_PATIENCE_S = 2.0
"""Seconds to wait for writes under way, all together, where only the removal of what they write to can forget: a drive
that takes longer hangs."""

Place = tuple[StoreKey, int, int]
"""A key, and the segment and page of a record."""


class Tombstones:
    """Discards, purges, and drops of bad blocks. Any thread; raises nothing.

    What is forgotten misses at once. Tombstones are written on threads of their own, and waited for unless the medium
    hangs: then they are written when it answers again, and a process that ends before that has not forgotten for good.

    When a tombstone cannot be written, in a new segment either, the segments that hold the records go instead, whatever
    else is in them, and so do those of the tenant that are being written, as they may hold copies. A call waits for
    that, but not for a drive that hangs: then the last one to write removes the segment.
    """

    def __init__(  # noqa: PLR0913 - the parts that it is put together from
        self,
        state: LogState,
        log: SegmentLog,
        room: SpaceManager,
        events: EventQueue,
        health: MediumHealth,
        watch: HangWatch,
        threads: IoThreads,
    ) -> None:
        """:param threads: those that write tombstones, the owner's to close."""
        self._state = state
        self._log = log
        self._space = room
        self._events = events
        self._health = health
        self._watch = watch
        self._threads = threads

    def discard(self, keys: Sequence[StoreKey], tags: Tags) -> int:
        """Forgets records, and writes under way when they end; how many records were there."""
        state = self._state
        with state.lock:
            epoch = state.next_epoch()
            rows = state.index.find(tags)
            _, first = np.unique(rows, return_index=True)
            there = [int(index) for index in np.sort(first) if rows[index] >= 0]
            segments = set(state.index.records(rows[there])["segment"].tolist())
            state.take_out(rows[there])
            gone = [keys[index] for index in there]
            self._events.post(EventKind.REMOVED, gone)
            under_way = [claim for key in keys if (claim := state.pending.pop(key, None)) is not None]
            for claim in under_way:
                claim.discarded = epoch
            forgotten = gone + [claim.key for claim in under_way]
            if state.num_forgetting < _MOST_WAITING:
                forgotten += {key for key in keys if state.may_be_on_disk(key)} - set(forgotten)
            state.begin_forgetting(forgotten)
        if forgotten:
            self._in_background(tenant_of(forgotten[0]), partial(self._forget, forgotten, epoch, segments))
        return len(gone)

    def forget_late(self, tenant: TenantId, claims: Sequence[Claim], segment: int) -> None:
        """Records that were discarded while they were written are on disk now, in this segment."""
        # With the epochs of then: the keys may have been written again since.
        if not self._write(tenant, [c.key for c in claims], Kind.FORGET, [c.discarded for c in claims]):
            self._evict(tenant, [segment])
        self._space.drop_dead(tenant)

    def drop(self, places: Sequence[Place]) -> list[bool]:
        """Forgets records that turned out bad; False where the index has none at this place any more.

        Their tombstones are not synced: what is bad will not be better after a start.
        """
        state = self._state
        keys = [key for key, _, _ in places]
        tags = state.tags(keys)
        with state.lock:
            rows = state.index.find(tags)
            there = np.flatnonzero(rows >= 0)
            records = state.index.records(rows[there])
            wanted = np.array([place[1:] for place in places], np.int64).reshape(-1, 2)[there]
            same = there[(records["segment"] == wanted[:, 0]) & (records["page"] == wanted[:, 1])]
            _, first = np.unique(rows[same], return_index=True)
            epoch = state.next_epoch()
            state.take_out(rows[same[first]])
            gone = [keys[index] for index in same[first].tolist()]
            self._events.post(EventKind.REMOVED, gone)
            numbers = set(records["segment"].tolist())
            state.begin_forgetting(gone)
        if gone:
            self._in_background(tenant_of(gone[0]), partial(self._forget_bad, gone, epoch, numbers))
        dropped = np.zeros(len(places), bool)
        dropped[same] = True
        return dropped.tolist()

    def purge(self, tenant: TenantId) -> int:
        """Forgets everything of a tenant; how many records were there."""
        state = self._state
        with state.lock:
            epoch = state.next_epoch()
            if tenant not in state.segments and not state.has_writes(tenant):
                return 0
            state.purged[tenant] = epoch
            state.purging[tenant] += 1
            before, num_rows = state.segments.end_of(tenant), state.index.num_rows
        pages: dict[int, list[npt.NDArray[np.uint32]]] = {}
        try:
            for start in range(0, num_rows, _ROWS_AT_ONCE):
                with state.lock:
                    rows = state.rows_of(tenant, before, start, start + _ROWS_AT_ONCE)
                    records = state.index.records(rows)
                    state.take_out(rows)
                for number in np.unique(records["segment"]).tolist():
                    pages.setdefault(number, []).append(records["page"][records["segment"] == number])
        except BaseException:
            with state.lock:
                state.purging -= Counter([tenant])
            raise
        self._in_background(tenant, partial(self._finish_purge, tenant, epoch, pages))
        return sum(len(part) for parts in pages.values() for part in parts)

    def _in_background(self, tenant: TenantId, work: Callable[[], None]) -> None:
        """Raises nothing of its own. Returns when the work is done, or the medium hangs."""
        future = self._threads.submit(work, tenant)
        if not self._watch.wait([future]):
            future.result()

    def _forget(self, keys: Sequence[StoreKey], epoch: int, segments: Collection[int]) -> None:
        """Tombstones of this epoch, or without the segments that have the records."""
        try:
            for tenant, of_tenant in _by_tenant(keys).items():
                if not self._write(tenant, of_tenant, Kind.FORGET, [epoch] * len(of_tenant)):
                    self._evict(tenant, segments)
                self._space.drop_dead(tenant)
        finally:
            self._forgot(keys)

    def _forget_bad(self, keys: Sequence[StoreKey], epoch: int, segments: Collection[int]) -> None:
        """Writes tombstones like `_forget`, but for blocks that need not be forgotten at any price."""
        try:
            for tenant, of_tenant in _by_tenant(keys).items():
                if not self._write(tenant, of_tenant, Kind.FORGET, [epoch] * len(of_tenant), sync=False):
                    self._owe(tenant, segments)
                self._space.drop_dead(tenant)
        finally:
            self._forgot(keys)

    def _finish_purge(self, tenant: TenantId, epoch: int, pages: Mapping[int, list[npt.NDArray[np.uint32]]]) -> None:
        """Events, and a tombstone for all that is taken out, or without the segments that have it."""
        state = self._state
        try:
            for number, parts in pages.items():
                self._space.tell_of(number, np.concatenate(parts))
            if self._write(tenant, [purge_key(tenant)], Kind.PURGE, [epoch]):
                with state.lock:
                    state.purges_written[tenant] = max(epoch, state.purges_written.get(tenant, 0))
            else:
                self._evict(tenant, pages)
        finally:
            with state.lock:
                state.purging -= Counter([tenant])
        self._space.drop_dead(tenant)

    def _write(
        self, tenant: TenantId, keys: Sequence[StoreKey], kind: Kind, epochs: Sequence[int], *, sync: bool = True
    ) -> bool:
        """Tombstones at the end of the tenant's log; False when they could not be written."""
        for start in range(0, len(keys), _MOST_AT_ONCE):
            headers = [encode_header(key, b"") for key in keys[start : start + _MOST_AT_ONCE]]
            of_part = epochs[start : start + _MOST_AT_ONCE]
            # A failure retires the segment: the second time it is another file.
            if not any(self._append(tenant, headers, kind, of_part, sync=sync) for _ in range(2)):
                return False
        return True

    def _append(
        self, tenant: TenantId, headers: Sequence[bytes], kind: Kind, epochs: Sequence[int], *, sync: bool
    ) -> bool:
        num = len(headers)
        try:
            extent = self._log.reserve(tenant, num, 0, NO_EPOCH)
            if extent is None:
                return False
            stamps = [(epoch, kind) for epoch in epochs]
            landed = self._log.write(extent, headers, [b""] * num, stamps, sync_forgets=sync)
        except OSError as error:
            self._health.write_failed(error)
            return False
        with self._state.lock:
            to_seal = self._log.settle(extent, landed)
        self._log.seal(to_seal)
        return True

    def _forgot(self, keys: Sequence[StoreKey]) -> None:
        with self._state.lock:
            self._state.end_forgetting(keys)

    def _owe(self, tenant: TenantId, numbers: Iterable[int]) -> None:
        with self._state.lock:
            for segment in map(self._state.segments.find, numbers):
                if segment is not None and segment.id.tenant == tenant:
                    self._state.segments.owe(segment)

    def _evict(self, tenant: TenantId, numbers: Iterable[int]) -> None:
        """Removes those of these segments that are the tenant's, and those that may have more of what it forgets."""
        segments = self._state.segments
        with self._state.lock:
            going = sorted({*numbers, *segments.unsure_of(tenant)})
        busy: list[tuple[int, threading.Event]] = []
        for number in going:
            with self._state.lock:
                segment = segments.find(number)
                if segment is None or segment.id.tenant != tenant:
                    continue
                if segment.in_flight or segment.evicting:
                    busy.append((number, segments.doom(segment)))
                    continue
                segments.mark(segment)
            if not self._space.evict(segment):
                self._health.warn(f"segment {number} holds what was forgotten and cannot go: a start may find it")
        end_s = time.monotonic() + _PATIENCE_S
        for number, removed in busy:
            if not removed.wait(max(0.0, end_s - time.monotonic())):
                self._health.warn(f"segment {number} holds what was forgotten until a write to it ends")


def _by_tenant(keys: Sequence[StoreKey]) -> dict[TenantId, list[StoreKey]]:
    tenants: dict[TenantId, list[StoreKey]] = {}
    for key in keys:
        tenants.setdefault(tenant_of(key), []).append(key)
    return tenants
