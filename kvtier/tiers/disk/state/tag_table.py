"""Row numbers by tag: an open-addressing table that grows a step at a time, so that nobody waits for all of it.

    slots   u32 each, a power of two of them, at most 3/5 full after growth: the number of a row + 1, or empty

Linear probing, many tags at a time: every step looks at one slot of each tag that is not decided yet. While it grows
there are two arrays: what is added moves some rows from the old one to the new one, and both are looked at.
"""

import numpy as np
import numpy.typing as npt

Tags = npt.NDArray[np.uint64]
"""n x 2: digests of keys."""
Rows = npt.NDArray[np.int64]
"""Numbers of rows; -1 for a key that is not there."""
_Slots = npt.NDArray[np.uint32]

_EMPTY, _DELETED = 0, 2**32 - 1
"""Slots hold row + 1."""
_FULL, _ROOMY = 0.75, 0.6
"""Share of slots in use, deleted ones included, before growth; and without those, after it."""
_FEWEST = 64
_STEP, _STEP_PER_ROW = 4096, 16
"""Slots of the old array that are emptied at a time: in all, and for each row that is added. It is empty before the new
one is full, which has room for 0.15 of its size then, unless it is much smaller than the old one."""


class TagTable:
    """Finds rows whose tags the caller has. Not thread-safe: the tier's lock guards all of it.

    `known` is the tag of every row, in all methods.
    """

    def __init__(self) -> None:
        self._slots: _Slots = np.zeros(_FEWEST, np.uint32)
        self._num_deleted = 0
        """Slots of `_slots` whose rows were removed, and which a search passes over."""
        self._num_rows = 0
        self._old: _Slots | None = None
        """The array that was in use before, as long as it has rows."""
        self._num_emptied = 0
        """Slots of `_old`, from the first on, that have no rows any more."""

    def __len__(self) -> int:
        return self._num_rows

    @property
    def nbytes(self) -> int:
        return self._slots.nbytes + (self._old.nbytes if self._old is not None else 0)

    def find(self, tags: Tags, known: Tags) -> Rows:
        """The row of each tag."""
        rows, _ = _probe(self._slots, tags, known)
        if self._old is not None:
            left = np.flatnonzero(rows < 0)
            rows[left], _ = _probe(self._old, tags[left], known)
        return rows

    def add(self, rows: Rows, known: Tags) -> None:
        """Adds rows whose tags are not there, each once."""
        self._make_room(len(rows), known)
        self._place(rows, known)
        self._num_rows += len(rows)

    def remove(self, rows: Rows, known: Tags) -> None:
        """Takes out rows that are there, each once."""
        tags = known[rows]
        found, at = _probe(self._slots, tags, known)
        here = found >= 0
        self._slots[at[here]] = _DELETED
        self._num_deleted += int(here.sum())
        if self._old is not None:
            self._old[_probe(self._old, tags[~here], known)[1]] = _DELETED
        self._num_rows -= len(rows)

    def rows(self) -> Rows:
        """All that are there. O(slots)."""
        rows = _rows_in(self._slots)
        return rows if self._old is None else np.concatenate([rows, _rows_in(self._old)])

    def num_deleted_is_right(self) -> bool:
        """Whether deleted slots are counted right, for a check. O(slots)."""
        return int((self._slots == _DELETED).sum()) == self._num_deleted

    def _make_room(self, number: int, known: Tags) -> None:
        step = _STEP + _STEP_PER_ROW * number
        self._empty_old(step, known)
        needed = self._num_rows + number
        if needed + self._num_deleted <= _FULL * len(self._slots):
            return
        self._empty_old(len(self._slots), known)
        size = _FEWEST
        while needed > _ROOMY * size:
            size *= 2
        self._old, self._num_emptied = self._slots, 0
        self._slots, self._num_deleted = np.zeros(size, np.uint32), 0
        self._empty_old(step, known)

    def _empty_old(self, num_slots: int, known: Tags) -> None:
        """Moves what is in the next so many slots of the old array, if there is one."""
        if self._old is None:
            return
        part = self._old[self._num_emptied : self._num_emptied + num_slots]
        rows = _rows_in(part)
        part[part != _EMPTY] = _DELETED  # what lies behind them is still found
        self._place(rows, known)
        self._num_emptied += len(part)
        if self._num_emptied == len(self._old):
            self._old = None

    def _place(self, rows: Rows, known: Tags) -> None:
        """Writes rows to slots that are free."""
        slots = self._slots
        mask = len(slots) - 1
        at = (known[rows, 0] & np.uint64(mask)).astype(np.int64)
        left = np.arange(len(rows))
        while left.size:
            here, wanted = at[left], (rows[left] + 1).astype(np.uint32)
            before = slots[here]
            free = (before == _EMPTY) | (before == _DELETED)
            slots[here[free]] = wanted[free]  # of several that want the same slot, the last one gets it
            won = free & (slots[here] == wanted)
            self._num_deleted -= int((won & (before == _DELETED)).sum())
            left = left[~won]
            at[left] = (at[left] + 1) & mask


def _probe(slots: _Slots, tags: Tags, known: Tags) -> tuple[Rows, Rows]:
    """Row and slot of each tag, -1 where it is not there."""
    rows = np.full(len(tags), -1, np.int64)
    positions = np.full(len(tags), -1, np.int64)
    mask = len(slots) - 1
    at = (tags[:, 0] & np.uint64(mask)).astype(np.int64)
    left = np.arange(len(tags))
    while left.size:
        here = at[left]
        values = slots[here]
        found = values.astype(np.int64) - 1
        occupied = (values != _EMPTY) & (values != _DELETED)
        same = occupied & (known[np.where(occupied, found, 0)] == tags[left]).all(axis=1)
        rows[left[same]], positions[left[same]] = found[same], here[same]
        left = left[(values != _EMPTY) & ~same]
        at[left] = (at[left] + 1) & mask
    return rows, positions


def _rows_in(slots: _Slots) -> Rows:
    taken = slots[(slots != _EMPTY) & (slots != _DELETED)]
    rows: Rows = taken.astype(np.int64) - 1
    return rows
