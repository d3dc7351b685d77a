"""Which blocks were evicted not long ago: one that is written again was missed, and is worth keeping."""

import numpy as np
import numpy.typing as npt

from kvtier.tiers.disk.state.tag_table import Tags

_FEWEST = 1 << 16
"""A quarter of a MiB."""


class EvictedTags:
    """The tags of as many blocks as the index has had at most, a few forgotten. Not thread-safe: the tier's lock
    guards it.

    Four bytes for each place of a table that has one place per tag: what comes later overwrites what was there. A few
    array operations per batch. Now and then it says of a block that it was there which never was, once in 4 billion.
    """

    def __init__(self) -> None:
        self._prints: npt.NDArray[np.uint32] = np.zeros(_FEWEST, np.uint32)
        """What tags look like, each at its place; 0: none."""

    @property
    def nbytes(self) -> int:
        """Memory of the table."""
        return self._prints.nbytes

    def note(self, tags: Tags, num_records: int) -> None:
        """These are evicted, from an index that has so many."""
        if num_records > len(self._prints):
            self._prints = np.zeros(1 << num_records.bit_length(), np.uint32)
        self._prints[self._places(tags)] = _prints_of(tags)

    def have(self, tags: Tags) -> npt.NDArray[np.bool_]:
        """Which of these were evicted not long ago."""
        found: npt.NDArray[np.bool_] = self._prints[self._places(tags)] == _prints_of(tags)
        return found

    def _places(self, tags: Tags) -> npt.NDArray[np.uint64]:
        places: npt.NDArray[np.uint64] = tags[:, 1] & np.uint64(len(self._prints) - 1)
        return places


def _prints_of(tags: Tags) -> npt.NDArray[np.uint32]:
    return (tags[:, 1] >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
