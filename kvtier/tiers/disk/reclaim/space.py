"""Making room: whole segments go, oldest first, and what was read since it was written is moved, within bounds."""

import errno
import logging
import secrets

import numpy as np
import numpy.typing as npt

from kvtier.events import EventKind
from kvtier.identity.keys import TenantId
from kvtier.tiers.common.event_queue import EventQueue
from kvtier.tiers.disk.log.format import NO_ENTRIES, NONCE_BYTES, PAGE, Entries, Kind, SegmentId
from kvtier.tiers.disk.log.segments import Extent, Segment
from kvtier.tiers.disk.medium.health import MediumHealth
from kvtier.tiers.disk.reclaim.compaction import Compactor
from kvtier.tiers.disk.state.log_state import LogState, tagged
from kvtier.tiers.disk.state.segment_files import SegmentFiles

_log = logging.getLogger(__name__)
_MOST_FORGET_BYTES = 64 << 10
_MOST_STUCK = 3
"""Segments that could not be removed, before a call gives up: what is in them is not found any more."""
_MOST_OWN = 16
"""Segments of a tenant that go for one file of it, if they make room for that. A tenant whose cap was lowered may have
thousands, which take milliseconds each, and others want to write meanwhile."""


class SpaceManager:
    """Keeps the folder within its capacity. Any thread; raises `OSError` where it says so."""

    def __init__(  # noqa: PLR0913 - the parts that it is put together from
        self,
        state: LogState,
        files: SegmentFiles,
        compactor: Compactor,
        events: EventQueue,
        health: MediumHealth,
        *,
        capacity_bytes: int,
        reserve_bytes: int,
    ) -> None:
        self._state = state
        self._files = files
        self._compactor = compactor
        self._events = events
        self._health = health
        self._capacity_bytes = capacity_bytes
        self._reserve_bytes = reserve_bytes
        self.most_bytes = capacity_bytes
        """What files may take, by the capacity and by what the file system last had. Changed under the state's lock."""
        self._is_squeezed = False
        """Whether the file system leaves less than half of the capacity. Changed under the state's lock."""
        self._forget_bytes = min(_MOST_FORGET_BYTES, capacity_bytes // 16 // PAGE * PAGE)
        """Bytes for tombstones alone: what was forgotten must be so at once, whatever is to be evicted."""

    def set_aside(self, tenant: TenantId, num_pages: int) -> bool:
        """Room for a file of the tenant, evicting what must go; False when there is not enough for it. `OSError`.

        A tenant whose cap was lowered loses some segments, more than the file takes, until it is within its cap.
        For a file that is larger than the cap nothing else goes.
        """
        num_stuck = num_own = 0
        with self._state.lock:
            had_bytes = self._state.segments.taken_bytes_of(tenant)
        while num_stuck < _MOST_STUCK:
            free_bytes = self._files.free_bytes()
            with self._state.lock:
                limit = self._limit(free_bytes)
                if num_pages * PAGE > limit:
                    self._warn_of_no_room(num_pages * PAGE, limit)
                    return False
                is_larger = num_pages * PAGE > self._state.segments.most_bytes_of(tenant)
                nbytes = 0 if is_larger else num_pages * PAGE
                over = self._state.segments.exceeds_cap(tenant, nbytes)
                if num_own >= _MOST_OWN and self._state.segments.taken_bytes_of(tenant) + nbytes <= had_bytes:
                    over = False
                if is_larger and not over:
                    return False
                if not over and self._state.segments.used_bytes + num_pages * PAGE <= limit:
                    self._state.segments.set_aside(num_pages * PAGE)
                    return True
                victim = self._own_victim(tenant) if over else self._victim(tenant)
                num_own += over
            if victim is not None:
                num_stuck += not self._give_up(victim)
            elif over or not self.drop_all_dead():
                return False
        # A failed write like others: a file system that has become read-only is left alone before all is hidden.
        raise OSError(errno.EIO, f"{num_stuck} segments that were to make room cannot be removed")

    def set_aside_for_forgets(self, num_pages: int) -> bool:
        """Takes room for a file of tombstones without evicting: some is theirs alone. False if there is too little."""
        with self._state.lock:
            if self._state.segments.used_bytes + num_pages * PAGE > self._capacity_bytes:
                return False
            self._state.segments.set_aside(num_pages * PAGE)
            return True

    def evict_ahead(self, tenant: TenantId, num_pages: int) -> None:
        """Makes room for the tenant's next file while the open segments have room for what is worth keeping. Raises
        nothing."""
        num_own = 0
        while num_own < _MOST_OWN:
            try:
                free_bytes = self._files.free_bytes()
            except OSError as error:
                self._health.note("free_bytes", error)
                return
            with self._state.lock:
                limit = self._limit(free_bytes)
                # What the open segment will take counts: it is full when the file is wanted.
                over = self._state.segments.exceeds_cap(
                    tenant, num_pages * PAGE + self._state.segments.spare_bytes_of(tenant)
                )
                fits = num_pages * PAGE > limit or self._state.segments.used_bytes + num_pages * PAGE <= limit
                if fits and not over:
                    return
                victim = self._own_victim(tenant) if over else self._victim(tenant)
                num_own += over
            if victim is None or not self._give_up(victim, keep=True):
                return

    def shrink(self, tenant: TenantId) -> bool:
        """Removes the oldest segment of a tenant that is above its cap; False: it is not, or nothing can be removed
        now. Raises nothing."""
        with self._state.lock:
            victim = self._own_victim(tenant) if self._state.segments.exceeds_cap(tenant, 0) else None
        return victim is not None and self._give_up(victim)

    def fit(self) -> None:
        """Evicts what exceeds the capacity, at the start. What cannot be removed stays. Raises nothing."""
        num_stuck = 0
        while True:
            with self._state.lock:
                surplus = self._state.segments.used_bytes - self._capacity_bytes
                victim = self._victim() if surplus > 0 and num_stuck < _MOST_STUCK else None
            if victim is None:
                break
            num_stuck += not self._give_up(victim)
        if surplus > 0:
            _log.warning(
                "%d bytes above the capacity cannot be removed: nothing is written to the disk tier before they are",
                surplus,
            )

    def make(self, tenant: TenantId, num_pages: int, num_entries: int, payload_pages: int, epoch: int) -> Extent:
        """The first extent of a new segment, the tenant's open one, in room that was set aside.

        After an `OSError` that room is given back.
        """
        state = self._state
        made: Segment | None = None
        try:
            while made is None:
                with state.lock:
                    number, now = state.segments.next_number(), state.epoch
                segment = Segment(SegmentId(number, tenant, secrets.token_bytes(NONCE_BYTES)), num_pages)
                try:
                    self._files.make(segment, now)
                except FileExistsError:  # somebody else's, with a name like ours
                    continue
                made = segment
        finally:
            with state.lock:
                if made is None:
                    state.segments.set_aside(-num_pages * PAGE)
                else:
                    state.segments.add(made, from_aside=True)
                    extent = state.segments.extend(made, num_entries, payload_pages, epoch)
        return extent

    def evict(self, segment: Segment, *, keep: bool = False) -> bool:
        """Removes a segment that the caller has marked, or all of it but tombstones that are still needed.

        False when it is still there as a whole, and no longer marked; none of its records is found then either.

        :param keep: move what was read since it was written to the tenant's open segment, as far as there is room.
        """
        entries = self._entries(segment)
        for full in self._compactor.empty(segment, entries, keep=keep):
            self.finish(full)
        with self._state.lock:
            needed = self._needed_forgets(segment, entries)
        gone = self._remove(segment) if needed is not None and not len(needed) else self._compact(segment, needed)
        self.drop_dead(segment.id.tenant)
        return gone

    def finish(self, segment: Segment) -> None:
        """Seals a segment that `LogState.to_seal` gave, or removes it if something in it must not come back."""
        self._files.seal(segment)
        with self._state.lock:
            doomed = segment.doomed and not segment.in_flight and not segment.evicting
            if doomed:
                self._state.segments.mark(segment)
            empty = not segment.num_live
        if doomed:
            self.evict(segment)
        elif empty:
            self.drop_dead(segment.id.tenant)

    def tell_of(self, number: int, pages: npt.NDArray[np.uint32]) -> None:
        """Events for records of a segment at these pages, which were taken out, as far as its file can still be read.

        For the others, see `LogState.untold`.
        """
        with self._state.lock:
            segment = self._state.segments.find(number)
        entries = self._entries(segment) if segment is not None else None
        if entries is None:
            entries = NO_ENTRIES
        records = entries[(entries["kind"] == Kind.RECORD) & np.isin(entries["page"], pages)]
        keys, tags = tagged(self._state, records)
        with self._state.lock:
            self._state.untold |= len(records) < len(pages)
            gone = self._state.index.find(tags) < 0  # not written again meanwhile
            self._events.post(EventKind.REMOVED, [keys[index] for index in np.flatnonzero(gone)])

    def drop_dead(self, tenant: TenantId) -> None:
        """Removes the tenant's segments that nobody needs any more."""
        while True:
            with self._state.lock:
                dead = self._state.next_dead(tenant)
            if dead is None or not self._remove(dead):
                return

    def drop_all_dead(self) -> bool:
        """`drop_dead` of all tenants; whether that made room."""
        with self._state.lock:
            before, tenants = self._state.segments.used_bytes, {s.id.tenant for s in self._state.segments}
        for tenant in tenants:
            self.drop_dead(tenant)
        with self._state.lock:
            return self._state.segments.used_bytes < before

    def _limit(self, free_bytes: int) -> int:
        """What files may take, given what the file system had free a moment ago. Under the lock."""
        used = self._state.segments.used_bytes
        of_system = used + free_bytes - self._reserve_bytes
        self.most_bytes = max(1, min(self._capacity_bytes, of_system))
        is_squeezed = of_system < self._capacity_bytes // 2
        if is_squeezed and not self._is_squeezed:
            self._health.squeezed(self.most_bytes, self._capacity_bytes)
        self._is_squeezed = is_squeezed
        return min(self._capacity_bytes - self._forget_bytes, of_system)

    def _warn_of_no_room(self, nbytes: int, limit: int) -> None:
        most = self._capacity_bytes - self._forget_bytes
        if nbytes > most:
            self._health.warn(
                f"no room for a file of {nbytes:,} bytes: the tier has {self._capacity_bytes:,}, of which {most:,} are "
                "for blocks; give it more for blocks of this size"
            )
            return
        self._health.warn(
            f"no room for {nbytes:,} bytes: the capacity is {self._capacity_bytes:,}, of which {limit:,} can be had, "
            f"since {self._reserve_bytes:,} bytes of the file system are left to others"
        )

    def _victim(self, borrower: TenantId | None = None) -> Segment | None:
        """Chooses what is to give room, for `_give_up`. Caller holds the lock."""
        segments = self._state.segments
        roomiest = segments.roomiest(self._capacity_bytes)
        if roomiest is not None:  # nobody loses anything by a cut
            segments.retire(roomiest.id.tenant)
            return self._state.to_seal(roomiest)
        victim = segments.victim(borrower)
        return segments.mark(victim) if victim is not None else None

    def _own_victim(self, tenant: TenantId) -> Segment | None:
        """What the tenant is to give because it may have no more, for `_give_up`. Caller holds the lock."""
        victim = self._state.segments.own_victim(tenant)
        return self._state.segments.mark(victim) if victim is not None else None

    def _give_up(self, victim: Segment, *, keep: bool = False) -> bool:
        """Cuts what `_victim` gave, or removes it; False when it is still there as a whole."""
        if victim.evicting:
            return self.evict(victim, keep=keep)
        self.finish(victim)
        return True

    def _entries(self, segment: Segment) -> Entries | None:
        """None when they cannot be read."""
        try:
            entries = self._files.entries(segment)
        except OSError as error:
            with self._state.lock:
                if self._state.segments.find(segment.number) is None:  # evicted meanwhile
                    return NO_ENTRIES
            self._health.note("read", error)
            return None
        if entries is None:
            self._health.warn(f"the footer of segment {segment.number} is damaged: evicted without events")
        return entries

    def _needed_forgets(self, segment: Segment, entries: Entries | None) -> Entries | None:
        """Tombstones for records that may be on disk elsewhere, or soon; None: nobody knows. Under the lock."""
        state, tenant = self._state, segment.id.tenant
        if not state.needs_forgets(segment):
            return NO_ENTRIES
        if entries is None:
            return None
        first = max(state.first_epoch(tenant, segment) + 1, state.purges_written.get(tenant, 0))
        needed: Entries = entries[(entries["kind"] != Kind.RECORD) & (entries["epoch"] >= first)]
        return needed

    def _compact(self, segment: Segment, forgets: Entries | None) -> bool:
        """Leaves these tombstones and nothing else of a marked segment; it is no longer marked."""
        num_pages = 0
        try:
            if forgets is not None:
                num_pages = self._files.compact(segment, forgets)
        except OSError as error:
            self._health.note("compact", error)
        with self._state.lock:
            if num_pages:
                self._state.segments.compacted(segment, num_pages, len(forgets) if forgets is not None else 0)
            else:
                self._state.segments.stuck(segment)
        if not num_pages:
            self._health.warn(f"segment {segment.number} stays: tombstones in it are needed, and cannot be kept alone")
        return num_pages > 0

    def _remove(self, segment: Segment) -> bool:
        try:
            gone = self._files.remove(segment)
        except OSError:  # counted and logged
            with self._state.lock:
                self._state.segments.stuck(segment)
            return False
        with self._state.lock:
            if gone:
                self._state.segments.gone(segment)
            else:
                self._state.segments.emptied(segment)
        return True
