"""Appending to the log: room in a tenant's open segment, or in a new one."""

from collections.abc import Sequence
from concurrent.futures import Future

from kvtier.identity.keys import TenantId
from kvtier.memory.buffers import ReadableBuffer
from kvtier.tiers.disk.log.format import PAGE, Entries
from kvtier.tiers.disk.log.segments import Extent, Segment, segment_pages, share_bytes
from kvtier.tiers.disk.reclaim.space import SpaceManager
from kvtier.tiers.disk.state.log_state import LogState
from kvtier.tiers.disk.state.segment_files import SegmentFiles, Stamp

SMALLEST_SEGMENT_BYTES = 4 * PAGE


class SegmentLog:
    """The end of the log, of all tenants. Any thread."""

    def __init__(
        self,
        state: LogState,
        files: SegmentFiles,
        room: SpaceManager,
        segment_bytes: int,
        capacity_bytes: int,
    ) -> None:
        """:param segment_bytes: of a new segment, unless one extent needs more, or the capacity asks for less."""
        self._state = state
        self._files = files
        self._space = room
        self.segment_bytes = max(
            SMALLEST_SEGMENT_BYTES, min(segment_bytes // PAGE * PAGE, share_bytes(capacity_bytes, 1))
        )
        """The size of the largest segments, but for those that one extent makes larger."""
        self._capacity_bytes = capacity_bytes
        self._opening: dict[TenantId, Future[bool]] = {}
        """Segments being made, by tenant; True once made. Other threads wait. Guarded by the books' lock."""

    def reserve(self, tenant: TenantId, num_entries: int, payload_pages: int, epoch: int) -> Extent | None:
        """Room at the end of the tenant's log; None when there is none. `OSError`.

        The caller writes the extent and gives it back, by `settle` or `abandon`.
        """
        while True:
            with self._state.lock:
                extent = self._state.segments.take(tenant, num_entries, payload_pages, epoch)
                if extent is not None:
                    return extent
                opening = self._opening.get(tenant)
                if opening is None:
                    mine = self._opening[tenant] = Future()
            if opening is not None:
                if not opening.result() and payload_pages:
                    return None
                continue  # tombstones find room where others do not
            try:
                extent = self._open(tenant, num_entries, payload_pages, epoch)
            finally:
                with self._state.lock:
                    del self._opening[tenant]
                mine.set_result(extent is not None)
            if extent is not None:
                self._space.evict_ahead(tenant, extent.segment.num_pages)
            return extent

    def write(
        self,
        extent: Extent,
        headers: Sequence[bytes],
        payloads: Sequence[ReadableBuffer],
        stamps: Sequence[Stamp],
        *,
        sync_forgets: bool = True,
    ) -> Entries:
        """Writes an extent in one write, and returns the entries as they stand there. After an error the extent has
        been given back."""
        try:
            return self._files.write(extent, headers, payloads, stamps, sync_forgets=sync_forgets)
        except BaseException:
            self._abandon(extent)
            raise

    def settle(self, extent: Extent, landed: Entries) -> Segment | None:
        """Gives an extent back after what was written was published; returns what to `seal` when the lock is released.
        Caller holds the lock."""
        return self._state.settle(extent, landed)

    def seal(self, segment: Segment | None) -> None:
        """What `settle` or `LogState.to_seal` gave."""
        if segment is not None:
            self._space.finish(segment)

    def retire_all(self) -> None:
        """Seals what can be sealed of what is open."""
        with self._state.lock:
            for segment in self._state.segments:
                if not segment.sealed and not segment.retired:
                    self._state.segments.retire(segment.id.tenant)
            sealing = [s for s in self._state.segments if self._state.to_seal(s) is not None]
        for segment in sealing:
            self._space.finish(segment)

    def _abandon(self, extent: Extent) -> None:
        """What could not be written leaves a gap; the segment takes no more, since its place may be bad."""
        with self._state.lock:
            if not extent.segment.retired:
                self._state.segments.retire(extent.segment.id.tenant)
            to_seal = self._state.settle(extent, None)
        self.seal(to_seal)

    def _open(self, tenant: TenantId, num_entries: int, payload_pages: int, epoch: int) -> Extent | None:
        """The first extent of a new segment; None when there is no room for one."""
        self._files.require_owned()
        state = self._state
        with state.lock:
            full = state.segments.retire(tenant)
            to_seal = state.to_seal(full) if full is not None else None
            wanted_bytes = state.segments.wanted_bytes(tenant, self._capacity_bytes)
        self.seal(to_seal)
        if not payload_pages:
            pages = segment_pages(SMALLEST_SEGMENT_BYTES, num_entries, 0)
            if pages is not None and self._space.set_aside_for_forgets(pages):
                return self._space.make(tenant, pages, num_entries, 0, epoch)
        for wanted in (max(SMALLEST_SEGMENT_BYTES, min(self.segment_bytes, wanted_bytes)), 0):
            pages = segment_pages(wanted, num_entries, payload_pages)
            if pages is not None and self._space.set_aside(tenant, pages):
                return self._space.make(tenant, pages, num_entries, payload_pages, epoch)
        return None
