"""Blocks whose bytes lie in many pieces of memory, for copies that go from all of them or to all of them at once."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.memory.pages import copy_bytes

Grid = npt.NDArray[np.uint8]
"""`[groups, pieces, bytes]`, uint8: equal pieces at two distances, e.g. keys and values of every layer. Each piece is
contiguous."""


class Pieces:
    """Memory of one block: the pieces of all grids, one after the other, in C order.

    One copy moves many pieces. The memory is the caller's, which keeps it as long as this is used. Any thread.
    """

    __slots__ = ("_grids", "_nbytes")

    def __init__(self, grids: Sequence[Grid]) -> None:
        """:param grids: views of memory, none of them empty; nothing is copied."""
        self._grids = grids
        self._nbytes = sum(grid.nbytes for grid in grids)

    def __len__(self) -> int:
        return self._nbytes

    def batches(self, most_bytes: int) -> Iterator[Grid]:
        """All pieces in order, in grids of at most so many bytes, or of one group."""
        for grid in self._grids:
            step = max(1, most_bytes // (grid.nbytes // len(grid)))
            for start in range(0, len(grid), step):
                yield grid[start : start + step]

    def copied(self) -> memoryview:
        """The block's bytes together, in fresh memory."""
        whole = np.empty(self._nbytes, dtype=np.uint8).data
        self.copy_to(whole)
        return whole

    def copy_to(self, into: memoryview) -> None:
        """Copies the block's bytes over the front of `into`, one after the other."""
        for place, grid in self._with_places(np.frombuffer(into, dtype=np.uint8)):
            np.copyto(place, grid)

    def fill(self, source: memoryview) -> None:
        """Copies a whole block to where its pieces belong."""
        for place, grid in self._with_places(np.frombuffer(source, dtype=np.uint8)):
            np.copyto(grid, place)

    def _with_places(self, whole: npt.NDArray[np.uint8]) -> Iterator[tuple[Grid, Grid]]:
        """Each grid, and where its bytes are in the whole."""
        at = 0
        for grid in self._grids:
            yield whole[at : at + grid.nbytes].reshape(grid.shape), grid
            at += grid.nbytes


Payload = bytes | bytearray | memoryview | Pieces
"""What the cache pool's client writes."""
Target = memoryview | Pieces
"""What the cache pool's client reads into."""


def together(payload: Payload) -> bytes | bytearray | memoryview:
    """Returns the payload's bytes in one place: the payload itself, or a copy of its pieces."""
    return payload.copied() if isinstance(payload, Pieces) else payload


def copy_payload(into: memoryview, payload: Payload) -> None:
    """Copies all of `payload` over the front of `into`; releases the GIL."""
    if isinstance(payload, Pieces):
        payload.copy_to(into)
    else:
        copy_bytes(into, payload)


def landing(target: Target) -> memoryview:
    """Returns where bytes that come one by one may go: the target itself, or memory for `land` to copy from."""
    return np.empty(len(target), dtype=np.uint8).data if isinstance(target, Pieces) else target


def land(landed: memoryview, target: Target) -> None:
    """What has come is now where it belongs."""
    if isinstance(target, Pieces):
        target.fill(landed)
