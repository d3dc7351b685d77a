"""Making room: whole segments go, oldest first; what was read since it was written is written again, within bounds."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvtier.codec import parse_stored_header, verify
from kvtier.errors import CorruptBlockError
from kvtier.events import EventKind
from kvtier.keys import TenantId
from kvtier.metrics import Metrics
from kvtier.tiers.disk_log.books import Books, tagged
from kvtier.tiers.disk_log.buffers import Buffers
from kvtier.tiers.disk_log.format import NO_ENTRIES, PAGE, Entries, Kind, header_bytes, keys_of, pages_of
from kvtier.tiers.disk_log.index import Rows, Tags
from kvtier.tiers.disk_log.segment_files import SegmentFiles
from kvtier.tiers.disk_log.segments import NO_EPOCH, Extent, Segment
from kvtier.tiers.disk_log.trouble import Trouble
from kvtier.tiers.outbox import Outbox

_MOVE_BYTES = 4 << 20
"""Moved together."""
_MOVE_ENTRIES = 256
_MOST_STUCK = 3
"""Segments that could not be removed, before a write gives up."""


class Room:
    """Keeps the folder within its capacity. Any thread; raises `OSError` where it says so."""

    def __init__(
        self,
        books: Books,
        files: SegmentFiles,
        buffers: Buffers,
        outbox: Outbox,
        trouble: Trouble,
        metrics: Metrics,
        *,
        name: str,
        capacity_bytes: int,
        reserve_bytes: int,
        write_amplification: float,
    ) -> None:
        """:param write_amplification: bytes of records written, per byte that somebody asked to be written."""
        self._books = books
        self._files = files
        self._buffers = buffers
        self._outbox = outbox
        self._trouble = trouble
        self._evicted = metrics.evicted_blocks.labels(name)
        self._moved = metrics.disk_bytes.labels(name, "moved")
        self._capacity_bytes = capacity_bytes
        self._reserve_bytes = reserve_bytes
        self._moves_per_byte = write_amplification - 1

    def set_aside(self, nbytes: int) -> bool:
        """Counts room for a file as used, evicting what must go; False when there is not enough. `OSError`."""
        tried: set[int] = set()
        while True:
            free_bytes = self._files.free_bytes()
            with self._books.lock:
                limit = self._limit(free_bytes)
                segments = self._books.segments
                if nbytes > limit:
                    break
                if segments.used_bytes + nbytes <= limit:
                    segments.set_aside(nbytes)
                    return True
                victim = segments.victim(tried) if len(tried) < _MOST_STUCK else None
            if victim is None:
                return False
            if not self.evict(victim):
                tried.add(victim.number)
        self._trouble.warn(
            f"no room for {nbytes:,} bytes: the capacity is {self._capacity_bytes:,}, of which {limit:,} can be had, "
            f"since {self._reserve_bytes:,} bytes of the file system are left to others"
        )
        return False

    def evict_ahead(self, nbytes: int) -> None:
        """Makes room for the next file while the open segments have room for what is worth keeping. Raises nothing."""
        tried: set[int] = set()
        while True:
            try:
                free_bytes = self._files.free_bytes()
            except OSError as error:
                self._trouble.note("free_bytes", error)
                return
            with self._books.lock:
                limit, segments = self._limit(free_bytes), self._books.segments
                if segments.used_bytes + nbytes <= limit or nbytes > limit:
                    return
                victim = segments.victim(tried) if len(tried) < _MOST_STUCK else None
            if victim is None:
                return
            if not self.evict(victim, keep=True):
                tried.add(victim.number)

    def evict(self, segment: Segment, *, keep: bool = False) -> bool:
        """Removes a segment that the caller has marked; False when it is still there, and no longer marked.

        :param keep: move what was read since it was written to the tenant's open segment, as far as there is room.
        """
        entries = self._entries(segment)
        if not self._carry_forgets(segment, entries):
            self._spare(segment)
            return False
        kept = self._hide(segment, entries, keep=keep)
        for part in _parts(kept):
            self._move(segment, part)
        return self._remove(segment)

    def tell_of(self, segment: Segment, pages: npt.NDArray[np.uint32]) -> None:
        """Events for records at these pages, which were taken out. None where the footer cannot be read."""
        entries = self._entries(segment)
        if entries is None:
            return
        records = entries[(entries["kind"] == Kind.RECORD) & np.isin(entries["page"], pages)]
        keys, tags = tagged(self._books, records)
        with self._books.lock:
            gone = self._books.index.find(tags) < 0  # not written again meanwhile
            self._outbox.post(EventKind.REMOVED, [keys[index] for index in np.flatnonzero(gone)])

    def drop_dead(self, tenant: TenantId) -> None:
        """Removes the tenant's segments that nobody needs any more."""
        while True:
            with self._books.lock:
                dead = self._books.next_dead(tenant)
            if dead is None or not self._remove(dead):
                return

    def _limit(self, free_bytes: int) -> int:
        """What all files may take, given what the file system had free a moment ago. Under the lock."""
        used = self._books.segments.used_bytes
        return min(self._capacity_bytes, used + free_bytes - self._reserve_bytes)

    def _entries(self, segment: Segment) -> Entries | None:
        """None when they cannot be read."""
        try:
            entries = self._files.entries(segment)
        except OSError as error:
            with self._books.lock:
                if self._books.segments.find(segment.number) is None:  # evicted meanwhile
                    return NO_ENTRIES
            self._trouble.note("read", error)
            return None
        if entries is None:
            self._trouble.warn(f"the footer of segment {segment.number} is damaged: evicted without events")
        return entries

    def _carry_forgets(self, segment: Segment, entries: Entries | None) -> bool:
        """Writes tombstones that are still needed once more, elsewhere."""
        tenant = segment.id.tenant
        with self._books.lock:
            first = self._books.first_epoch(tenant, segment)
            if segment.last_forget <= first:
                return True
            needed = NO_ENTRIES
            if entries is not None:
                needed = entries[(entries["kind"] != Kind.RECORD) & (entries["epoch"] > first)]
            extent = self._books.segments.take(tenant, len(needed), 0, NO_EPOCH) if len(needed) else None
        if extent is None:
            self._trouble.warn(f"segment {segment.number} stays: its tombstones are needed and have no other place")
            return False
        return self._write(extent, needed, [b""] * len(needed)) is not None

    def _hide(self, segment: Segment, entries: Entries | None, *, keep: bool) -> Entries:
        """Forgets the records of a segment but those that are worth moving; which these are, the best first."""
        records = entries[entries["kind"] == Kind.RECORD] if entries is not None else None
        tags = tagged(self._books, records)[1] if records is not None else None
        with self._books.lock:
            kept = np.empty(0, np.int64)
            if records is not None and tags is not None:
                rows = self._books.rows_at(segment.number, records, tags)
                if keep:
                    kept = self._worth_keeping(segment, records, rows)
                going = np.setdiff1d(np.flatnonzero(rows >= 0), kept)
                self._books.take_out(rows[going])
                self._outbox.post(EventKind.REMOVED, keys_of(records[going]))
                self._evicted.inc(len(going))
                if segment.num_live == len(kept):
                    worth: Entries = records[kept]
                    return worth
            # Without a readable footer nobody can say which keys these are.
            rows = self._books.index.in_segments([segment.number])
            self._books.take_out(rows)
            self._evicted.inc(len(rows))
            return NO_ENTRIES

    def _worth_keeping(self, segment: Segment, records: Entries, rows: Rows) -> Rows:
        """Indices of records that were read, most often first, as many as may be moved. Under the lock."""
        books = self._books
        allowed = self._moves_per_byte * books.new_bytes - books.moved_bytes
        there = np.flatnonzero(rows >= 0)
        uses = books.index.records(rows[there])["uses"]
        read = there[np.argsort(-uses.astype(np.int64), kind="stable")][: int((uses > 0).sum())]
        costs = np.cumsum(records["header"]["stored_length"][read].astype(np.int64))
        return read[costs <= min(allowed, segment.num_pages * PAGE // 2)]

    def _move(self, segment: Segment, records: Entries) -> None:
        """Writes records once more, in the open segment of their tenant; forgets those that cannot be."""
        keys, tags = tagged(self._books, records)
        try:
            self._copy(segment, records, tags)
        except OSError as error:  # no memory for it
            self._trouble.note("move", error)
        with self._books.lock:
            rows = self._books.rows_at(segment.number, records, tags)
            lost = np.flatnonzero(rows >= 0)
            self._books.take_out(rows[lost])
            self._outbox.post(EventKind.REMOVED, [keys[index] for index in lost])
            self._evicted.inc(len(lost))

    def _copy(self, segment: Segment, records: Entries, tags: Tags) -> None:
        """Those that could be copied are found in their new place afterwards."""
        books, num_pages = self._books, sum(map(pages_of, _lengths(records)))
        with self._buffers.lend(num_pages * PAGE) as memory:
            with books.lock:
                # Those that are still there now: a later discard has a later epoch than their copies.
                alive = np.flatnonzero(books.rows_at(segment.number, records, tags) >= 0)
                if not len(alive):
                    return
                epoch = books.next_epoch()
                records, tags = records[alive], tags[alive]
                num_pages = sum(map(pages_of, _lengths(records)))
                extent = books.segments.take(segment.id.tenant, len(records), num_pages, epoch)
            if extent is None:
                return
            whole, payloads = self._load(segment, records, memory)
            copies = records[whole]
            copies["epoch"] = epoch
            if self._write(extent, copies, payloads, tags[whole], segment) is not None:
                self._moved.inc(sum(map(len, payloads)))

    def _load(self, segment: Segment, records: Entries, memory: memoryview) -> tuple[list[int], list[memoryview]]:
        """Indices and payloads of the records that are what was stored."""
        whole, payloads, at = [], [], 0
        for index, length in enumerate(_lengths(records)):
            pages = memory[at : at + pages_of(length) * PAGE]
            at += len(pages)
            header = parse_stored_header(header_bytes(records, index))
            try:
                if self._files.read(segment.number, [pages] if pages else [], int(records["page"][index])) < length:
                    raise CorruptBlockError("the file ends early")
                verify(header, header.key, pages[:length])
            except OSError as error:
                self._trouble.note("read", error)
            except CorruptBlockError as error:
                self._trouble.corrupt(error)
            else:
                whole.append(index)
                payloads.append(pages[:length])
        return whole, payloads

    def _write(
        self,
        extent: Extent,
        entries: Entries,
        payloads: "list[memoryview] | list[bytes]",
        tags: Tags | None = None,
        origin: Segment | None = None,
    ) -> Entries | None:
        """Writes entries anew; None when that failed. Records that are still found at `origin` are here from now on."""
        headers = [header_bytes(entries, index) for index in range(len(entries))]
        kinds = [Kind(kind) for kind in entries["kind"]]
        landed = None
        try:
            landed = self._files.write(extent, headers, payloads, entries["epoch"].tolist(), kinds)
        except OSError as error:
            self._trouble.write_failed(error)
        with self._books.lock:
            if landed is not None and tags is not None and origin is not None:
                self._adopt(extent.segment, origin, entries, landed, tags)
            to_seal = self._books.settle(extent, landed)
        if to_seal is not None:
            self._files.seal(to_seal)
        return landed

    def _adopt(self, segment: Segment, origin: Segment, old: Entries, new: Entries, tags: Tags) -> None:
        """Under the lock."""
        books = self._books
        rows = books.rows_at(origin.number, old, tags)
        there = np.flatnonzero(rows >= 0)
        uses = books.index.records(rows[there])["uses"]
        books.index.move(rows[there], segment.number, new["page"][there], uses // 2)
        origin.num_live -= len(there)
        segment.num_live += len(there)
        books.moved_bytes += int(new["header"]["stored_length"].sum())

    def _spare(self, segment: Segment) -> None:
        """It stays after all."""
        with self._books.lock:
            segment.evicting = False
            to_seal = self._books.to_seal(segment)
        if to_seal is not None:
            self._files.seal(to_seal)

    def _remove(self, segment: Segment) -> bool:
        if not self._files.remove(segment):
            with self._books.lock:
                segment.evicting = False
            return False
        with self._books.lock:
            self._books.segments.gone(segment)
        return True


def _parts(records: Entries) -> Iterator[Entries]:
    """Cut so that each is moved in one write."""
    start = nbytes = 0
    for index, length in enumerate(_lengths(records)):
        if index > start and (nbytes + length > _MOVE_BYTES or index - start == _MOVE_ENTRIES):
            yield records[start:index]
            start, nbytes = index, 0
        nbytes += length
    if start < len(records):
        yield records[start:]


def _lengths(records: Entries) -> list[int]:
    """Of the payloads as stored."""
    return [int(length) for length in records["header"]["stored_length"]]
