"""What a segment holds that is worth keeping when it goes: written once more, in the open segment of its tenant."""

from collections.abc import Iterator

import numpy as np

from kvtier.codec.stored_form import parse_stored_header, verify
from kvtier.errors import CorruptBlockError
from kvtier.events import EventKind
from kvtier.metrics import Metrics
from kvtier.tiers.common.event_queue import EventQueue
from kvtier.tiers.disk.log.buffers import Buffers
from kvtier.tiers.disk.log.format import NO_ENTRIES, PAGE, Entries, Kind, header_bytes, keys_of, pages_of
from kvtier.tiers.disk.log.segments import Extent, Segment
from kvtier.tiers.disk.medium.health import MediumHealth
from kvtier.tiers.disk.state.log_state import LogState, tagged
from kvtier.tiers.disk.state.segment_files import SegmentFiles
from kvtier.tiers.disk.state.tag_table import Rows, Tags

_MOVE_BYTES = 4 << 20
"""Moved together."""
_MOVE_ENTRIES = 256


class Compactor:
    """Empties segments that are about to go. Any thread; raises nothing."""

    def __init__(  # noqa: PLR0913 - the parts that it is put together from
        self,
        state: LogState,
        files: SegmentFiles,
        buffers: Buffers,
        events: EventQueue,
        health: MediumHealth,
        metrics: Metrics,
        *,
        name: str,
        write_amplification: float,
    ) -> None:
        """:param write_amplification: bytes of records written, per byte that somebody asked to be written."""
        self._state = state
        self._files = files
        self._buffers = buffers
        self._events = events
        self._health = health
        self._evicted = metrics.evicted_blocks.labels(name)
        self._moved = metrics.disk_bytes.labels(name, "moved")
        self._moves_per_byte = write_amplification - 1

    def empty(self, segment: Segment, entries: Entries | None, *, keep: bool) -> Iterator[Segment]:
        """Forgets or moves all records of a marked segment. Gives each segment that is to be sealed now.

        :param entries: all that has landed in it; None when nobody knows.
        :param keep: move what was read since it was written, as far as there is room.
        """
        kept = self._hide(segment, entries, keep=keep)
        for part in _parts(kept):
            full = self._move(segment, part)
            if full is not None:
                yield full

    def write(
        self,
        extent: Extent,
        entries: Entries,
        payloads: "list[memoryview] | list[bytes]",
        tags: Tags | None = None,
        origin: Segment | None = None,
    ) -> tuple[bool, Segment | None]:
        """Writes entries anew; whether that worked, and what is to be sealed now.

        Records that are still found at `origin` are in their new place from now on.
        """
        headers = [header_bytes(entries, index) for index in range(len(entries))]
        stamps = [(int(epoch), Kind(kind)) for epoch, kind in zip(entries["epoch"], entries["kind"], strict=True)]
        landed = None
        try:
            landed = self._files.write(extent, headers, payloads, stamps)
        except OSError as error:
            self._health.write_failed(error)
        with self._state.lock:
            if landed is not None and tags is not None and origin is not None:
                self._adopt(extent.segment, origin, entries, landed, tags)
            return landed is not None, self._state.settle(extent, landed)

    def _hide(self, segment: Segment, entries: Entries | None, *, keep: bool) -> Entries:
        """Forgets the records of a segment but those that are worth moving; which these are, the best first."""
        records = entries[entries["kind"] == Kind.RECORD] if entries is not None else None
        tags = tagged(self._state, records)[1] if records is not None else None
        with self._state.lock:
            kept = np.empty(0, np.int64)
            if records is not None and tags is not None:
                rows = self._state.rows_at(segment.number, records, tags)
                if keep:
                    kept = self._worth_keeping(segment, records, rows)
                going = np.setdiff1d(np.flatnonzero(rows >= 0), kept)
                self._state.take_out(rows[going])
                self._events.post(EventKind.REMOVED, keys_of(records[going]))
                self._evicted.inc(len(going))
                if segment.num_live == len(kept):
                    worth: Entries = records[kept]
                    return worth
            # Without a readable footer nobody can say which keys these are.
            rows = self._state.index.in_segment(segment.number)
            self._state.take_out(rows)
            self._state.untold |= len(rows) > 0
            self._evicted.inc(len(rows))
            return NO_ENTRIES

    def _worth_keeping(self, segment: Segment, records: Entries, rows: Rows) -> Rows:
        """Indices of records that were read, most often first, as many as may be moved. Under the lock."""
        state = self._state
        allowed = self._moves_per_byte * state.new_bytes - state.moved_bytes
        there = np.flatnonzero(rows >= 0)
        uses = state.index.records(rows[there])["uses"]
        read = there[np.argsort(-uses.astype(np.int64), kind="stable")][: int((uses > 0).sum())]
        costs = np.cumsum(records["header"]["stored_length"][read].astype(np.int64))
        return read[costs <= min(allowed, segment.num_pages * PAGE // 2)]

    def _move(self, segment: Segment, records: Entries) -> Segment | None:
        """Writes records once more; forgets those that cannot be. What is to be sealed now."""
        keys, tags = tagged(self._state, records)
        full = None
        try:
            full = self._copy(segment, records, tags)
        except OSError as error:  # no memory for it
            self._health.note("move", error)
        with self._state.lock:
            rows = self._state.rows_at(segment.number, records, tags)
            lost = np.flatnonzero(rows >= 0)
            self._state.take_out(rows[lost])
            self._events.post(EventKind.REMOVED, [keys[index] for index in lost])
            self._evicted.inc(len(lost))
        return full

    def _copy(self, segment: Segment, records: Entries, tags: Tags) -> Segment | None:
        """Copies what records it can, to be found in their new place from then on; returns a segment to be sealed
        now."""
        state, tenant = self._state, segment.id.tenant
        num_pages = sum(map(pages_of, _lengths(records)))
        with self._buffers.lend(num_pages * PAGE) as memory:
            with state.lock:
                # Only what is still there now is taken: a later discard has a later epoch than the copies.
                alive = np.flatnonzero(state.rows_at(segment.number, records, tags) >= 0)
                if not len(alive) or state.purging[tenant]:
                    return None
                epoch = state.next_epoch()
                records, tags = records[alive], tags[alive]
                num_pages = sum(map(pages_of, _lengths(records)))
                extent = state.segments.take(tenant, len(records), num_pages, epoch)
            if extent is None:
                return None
            whole, payloads = self._load(segment, records, memory)
            copies = records[whole]
            copies["epoch"] = epoch
            worked, full = self.write(extent, copies, payloads, tags[whole], segment)
            if worked:
                self._moved.inc(sum(map(len, payloads)))
            return full

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
                self._health.note("read", error)
            except CorruptBlockError as error:
                self._health.corrupt(error)
            else:
                whole.append(index)
                payloads.append(pages[:length])
        return whole, payloads

    def _adopt(self, segment: Segment, origin: Segment, old: Entries, new: Entries, tags: Tags) -> None:
        """Points the index to the records where they lie now. Caller holds the lock."""
        state = self._state
        rows = state.rows_at(origin.number, old, tags)
        there = np.flatnonzero(rows >= 0)
        uses = state.index.records(rows[there])["uses"]
        state.index.move(rows[there], segment.number, new["page"][there], uses // 2)
        state.segments.count(origin, -len(there))
        state.segments.count(segment, len(there))
        state.moved_bytes += int(new["header"]["stored_length"].sum())


def _parts(records: Entries) -> Iterator[Entries]:
    """Cuts records into parts, each of which is moved in one write."""
    start = nbytes = 0
    for index, length in enumerate(_lengths(records)):
        if index > start and (nbytes + length > _MOVE_BYTES or index - start == _MOVE_ENTRIES):
            yield records[start:index]
            start, nbytes = index, 0
        nbytes += length
    if start < len(records):
        yield records[start:]


def _lengths(records: Entries) -> list[int]:
    """The lengths of the records' payloads as stored, in bytes."""
    return [int(length) for length in records["header"]["stored_length"]]
