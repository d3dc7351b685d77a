"""Where records are: an open-addressing table over rows in numpy. At most 64 bytes per record, all told.

    slots   u32 each, a power of two of them, at most 3/5 full after growth: the number of a row, or empty
    rows    what is known of a record, and 128 bits that stand for its key

Linear probing, many keys at a time: every step looks at one slot of each key that is not decided yet.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.errors import InvariantError

Tags = npt.NDArray[np.uint64]
"""n x 2: digests of keys."""
Rows = npt.NDArray[np.int64]
"""Numbers of rows; -1 for a key that is not there."""
Records = npt.NDArray[np.void]
"""Of `RECORD`."""

RECORD = np.dtype(
    [
        ("tag", "<u8", (2,)),
        ("checksum", "<u8"),
        ("segment", "<u4"),
        ("page", "<u4"),
        ("stored_length", "<u4"),
        ("raw_length", "<u4"),
        ("codec", "u1"),
        ("uses", "u1"),
    ],
    align=False,
)
"""What is needed to read a record and to know that it is the right one: the checksum covers the whole key."""

_EMPTY, _DELETED = 0, 2**32 - 1
"""Slots hold row + 1."""
_FULL, _ROOMY = 0.75, 0.6
"""Share of slots in use, deleted ones included, before growth; and without those, after it."""
_ROW_GROWTH = 1.2
_FEWEST = 64
_MOST_USES = 255
_NO_SEGMENT = 0
"""In rows that are free."""


def tags_of(keys: Sequence[bytes], seed: int) -> Tags:
    """About 0.2 us per key.

    :param seed: random, so that nobody can choose keys of his that look like another's.
    """
    digest = xxhash.xxh3_128_digest
    return np.frombuffer(b"".join([digest(key, seed) for key in keys]), "<u8").reshape(-1, 2)


class RecordIndex:
    """Records by tag. Not thread-safe: the tier's lock guards all of it."""

    def __init__(self) -> None:
        self._slots = np.zeros(_FEWEST, np.uint32)
        self._rows: Records = np.zeros(_FEWEST, RECORD)
        self._num_records = 0
        self._num_deleted = 0
        """Slots that are passed over."""
        self._num_rows = 0
        """Rows that were ever used; free ones among them are in `_free`."""
        self._free = np.empty(0, np.uint32)
        """A stack of rows to be used again."""
        self._num_free = 0

    def __len__(self) -> int:
        return self._num_records

    @property
    def nbytes(self) -> int:
        """Memory of all arrays."""
        return self._slots.nbytes + self._rows.nbytes + self._free.nbytes

    def find(self, tags: Tags) -> Rows:
        """The row of each tag. Valid until the index changes."""
        return self._probe(tags)[0]

    def records(self, rows: Rows) -> Records:
        """A copy of these rows, all of them there."""
        return self._rows[rows]

    def count_use(self, rows: Rows) -> None:
        """Notes a read of each row."""
        uses = self._rows["uses"]
        uses[rows] = np.minimum(uses[rows], _MOST_USES - 1) + 1

    def insert(self, records: Records) -> None:
        """Adds records whose tags are not there, each once."""
        if not len(records):
            return
        self._make_room(len(records))
        rows = self._take_rows(len(records))
        self._rows[rows] = records
        self._num_records += len(records)
        self._num_deleted -= self._place(self._slots, records["tag"], rows)

    def move(self, rows: Rows, segment: int, pages: npt.NDArray[np.int64], uses: npt.NDArray[np.uint8]) -> None:
        """The records are elsewhere now."""
        self._rows["segment"][rows] = segment
        self._rows["page"][rows] = pages
        self._rows["uses"][rows] = uses

    def remove(self, rows: Rows) -> None:
        """Takes out these rows, each once."""
        if not len(rows):
            return
        _, positions = self._probe(self._rows["tag"][rows])
        self._slots[positions] = _DELETED
        self._num_deleted += len(rows)
        self._num_records -= len(rows)
        self._rows["segment"][rows] = _NO_SEGMENT
        if self._num_free + len(rows) > len(self._free):
            grown = np.empty(max(_FEWEST, 2 * (self._num_free + len(rows))), np.uint32)
            grown[: self._num_free] = self._free[: self._num_free]
            self._free = grown
        self._free[self._num_free : self._num_free + len(rows)] = rows
        self._num_free += len(rows)

    @property
    def num_rows(self) -> int:
        """Those in use have smaller numbers. A record keeps its row."""
        return self._num_rows

    def live_between(self, start: int, stop: int) -> Rows:
        """The rows in use from `start` to `stop`."""
        live: Rows = np.flatnonzero(self._rows["segment"][start:stop] != _NO_SEGMENT) + start
        return live

    def in_segments(self, segments: Sequence[int]) -> Rows:
        """All rows of some segments. Looks at every row: some 10 ms per million."""
        live = self._live_rows()
        there: Rows = live[np.isin(self._rows["segment"][live], segments)]
        return there

    def check(self) -> None:
        """Raises `InvariantError` when the table does not add up. O(records)."""
        live = self._live_rows()
        if len(live) != self._num_records or len(np.unique(live)) != len(live):
            raise InvariantError(f"disk index: {len(live)} rows in slots, but {self._num_records} records")
        if self._num_rows - self._num_free != self._num_records:
            raise InvariantError("disk index: free rows are miscounted")
        if int((self._slots == _DELETED).sum()) != self._num_deleted:
            raise InvariantError("disk index: deleted slots are miscounted")
        if len(live) and (self.find(self._rows["tag"][live]) != live).any():
            raise InvariantError("disk index: a record is not found under its tag")

    def _live_rows(self) -> Rows:
        taken = self._slots[(self._slots != _EMPTY) & (self._slots != _DELETED)]
        rows: Rows = taken.astype(np.int64) - 1
        return rows

    def _probe(self, tags: Tags) -> tuple[Rows, Rows]:
        """Row and slot of each tag, -1 where it is not there."""
        rows = np.full(len(tags), -1, np.int64)
        positions = np.full(len(tags), -1, np.int64)
        mask = len(self._slots) - 1
        at = (tags[:, 0] & np.uint64(mask)).astype(np.int64)
        left = np.arange(len(tags))
        stored = self._rows["tag"]
        while left.size:
            here = at[left]
            slots = self._slots[here]
            found = slots.astype(np.int64) - 1
            occupied = (slots != _EMPTY) & (slots != _DELETED)
            same = occupied & (stored[np.where(occupied, found, 0)] == tags[left]).all(axis=1)
            rows[left[same]], positions[left[same]] = found[same], here[same]
            left = left[(slots != _EMPTY) & ~same]
            at[left] = (at[left] + 1) & mask
        return rows, positions

    @staticmethod
    def _place(slots: npt.NDArray[np.uint32], tags: Tags, rows: Rows) -> int:
        """Writes rows to slots that are free; how many of those were deleted ones."""
        mask = len(slots) - 1
        at = (tags[:, 0] & np.uint64(mask)).astype(np.int64)
        left = np.arange(len(rows))
        num_reused = 0
        while left.size:
            here, wanted = at[left], (rows[left] + 1).astype(np.uint32)
            before = slots[here]
            free = (before == _EMPTY) | (before == _DELETED)
            slots[here[free]] = wanted[free]  # of several that want the same slot, the last one gets it
            won = free & (slots[here] == wanted)
            num_reused += int((won & (before == _DELETED)).sum())
            left = left[~won]
            at[left] = (at[left] + 1) & mask
        return num_reused

    def _take_rows(self, number: int) -> Rows:
        again = min(number, self._num_free)
        self._num_free -= again
        rows = self._free[self._num_free : self._num_free + again].astype(np.int64)
        fresh = np.arange(self._num_rows, self._num_rows + number - again)
        self._num_rows += number - again
        return np.concatenate([rows, fresh])

    def _make_room(self, number: int) -> None:
        needed = self._num_rows + number - min(number, self._num_free)
        if needed > len(self._rows):
            grown = np.zeros(max(needed, int(len(self._rows) * _ROW_GROWTH)), RECORD)
            grown[: self._num_rows] = self._rows[: self._num_rows]
            self._rows = grown
        live = self._num_records + number
        if live + self._num_deleted <= _FULL * len(self._slots):
            return
        size = _FEWEST
        while live > _ROOMY * size:
            size *= 2
        rows = self._live_rows()
        self._slots = np.zeros(size, np.uint32)
        self._num_deleted = 0
        self._place(self._slots, self._rows["tag"][rows], rows)
