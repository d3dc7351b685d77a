"""Tells where records are: rows in numpy, found by digests of their keys. At most 64 bytes per record, all told.

What it does for a batch costs the same however many records there are: no array is copied or built anew at once.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.errors import InvariantError
from kvtier.tiers.disk.state.tag_table import Rows, Tags, TagTable

Records = npt.NDArray[np.void]
"""An array of records of type `RECORD`."""

RECORD = np.dtype(
    [
        ("tag", "<u8", (2,)),
        ("checksum", "<u8"),
        ("segment", "<u4"),
        ("page", "<u4"),
        ("stored_length", "<u4"),
        ("raw_length", "<u4"),
        ("form", "u1"),
        ("key_id", "u1"),
        ("uses", "u1"),
    ],
    align=False,
)
"""What is needed to read a record and to know that it is the right one: the checksum covers the whole key. Form is the
codec and, 16 times, the version of its stored form, key id that of the key it is sealed with."""
VERSION_SHIFT, CODEC_MASK = 4, 15
"""The bit of `form` at which the version begins, and the mask of the codec."""

_FEWEST = 64
_ROW_GROWTH, _MOST_GROWTH = 10, 1 << 16
"""A tenth more rows at a time, and no more than 3 MiB of them."""
_MOST_USES = 255
_NO_SEGMENT = 0
"""The segment number in rows that are free."""


def tags_of(keys: Sequence[bytes], seed: int) -> Tags:
    """About 0.2 us per key.

    :param seed: random, so that nobody can choose keys of his that look like another's.
    """
    digest = xxhash.xxh3_128_digest
    return np.frombuffer(b"".join([digest(key, seed) for key in keys]), "<u8").reshape(-1, 2)


class RecordIndex:
    """Records by tag. Not thread-safe: the tier's lock guards all of it."""

    def __init__(self) -> None:
        self._table = TagTable()
        self._rows: Records = np.zeros(_FEWEST, RECORD)
        self._num_rows = 0
        """Rows that were ever used; free ones among them are in `_free`."""
        self._free = np.empty(0, np.uint32)
        """A stack of rows to be used again."""
        self._num_free = 0

    def __len__(self) -> int:
        return len(self._table)

    @property
    def nbytes(self) -> int:
        """Memory of all arrays."""
        return self._table.nbytes + self._rows.nbytes + self._free.nbytes

    def find(self, tags: Tags) -> Rows:
        """The row of each tag. Valid until the index changes."""
        return self._table.find(tags, self._rows["tag"])

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
        rows = self._take_rows(len(records))
        self._rows[rows] = records
        self._table.add(rows, self._rows["tag"])

    def move(self, rows: Rows, segment: int, pages: npt.NDArray[np.int64], uses: npt.NDArray[np.uint8]) -> None:
        """The records are elsewhere now."""
        self._rows["segment"][rows] = segment
        self._rows["page"][rows] = pages
        self._rows["uses"][rows] = uses

    def remove(self, rows: Rows) -> None:
        """Takes out these rows, each once."""
        if not len(rows):
            return
        self._table.remove(rows, self._rows["tag"])
        self._rows["segment"][rows] = _NO_SEGMENT
        if self._num_free + len(rows) > len(self._free):
            grown = np.empty(max(_FEWEST, 2 * (self._num_free + len(rows))), np.uint32)
            grown[: self._num_free] = self._free[: self._num_free]
            self._free = grown
        self._free[self._num_free : self._num_free + len(rows)] = rows
        self._num_free += len(rows)

    @property
    def num_rows(self) -> int:
        """A number above those of all rows that are in use. A record keeps its row."""
        return self._num_rows

    def live_between(self, start: int, stop: int) -> Rows:
        """The rows in use from `start` to `stop`."""
        live: Rows = np.flatnonzero(self._rows["segment"][start:stop] != _NO_SEGMENT) + start
        return live

    def in_segment(self, segment: int) -> Rows:
        """All rows of a segment. Looks at every row: some 10 ms per million."""
        there: Rows = np.flatnonzero(self._rows["segment"][: self._num_rows] == segment)
        return there

    def check(self) -> None:
        """Raises `InvariantError` when the table does not add up. O(records)."""
        live = self._table.rows()
        if len(live) != len(self) or len(np.unique(live)) != len(live):
            raise InvariantError(f"disk index: {len(live)} rows in slots, but {len(self)} records")
        if self._num_rows - self._num_free != len(self):
            raise InvariantError("disk index: free rows are miscounted")
        if not self._table.num_deleted_is_right():
            raise InvariantError("disk index: deleted slots are miscounted")
        if len(live) and (self.find(self._rows["tag"][live]) != live).any():
            raise InvariantError("disk index: a record is not found under its tag")

    def _take_rows(self, number: int) -> Rows:
        again = min(number, self._num_free)
        self._num_free -= again
        rows = self._free[self._num_free : self._num_free + again].astype(np.int64)
        self._make_rows(number - again)
        fresh = np.arange(self._num_rows, self._num_rows + number - again)
        self._num_rows += number - again
        return np.concatenate([rows, fresh])

    def _make_rows(self, number: int) -> None:
        """Room for so many that were never used."""
        needed = self._num_rows + number
        if needed > len(self._rows):
            more = min(len(self._rows) // _ROW_GROWTH, _MOST_GROWTH)
            # In place: large memory is mapped elsewhere, not copied. Nobody has a view of it: the lock is held.
            self._rows.resize(max(needed, len(self._rows) + more), refcheck=False)
