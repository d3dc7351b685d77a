"""Blocks that a tier lends: they are read where they lie, by a process that maps the tier's memory.

A borrower maps memory first (`SlotMemory`), which takes time, and says which of it is ready. A loan names places in
that memory alone. While it lasts the places keep their blocks; should they not, their generations say so. So what is
made of a block counts only if its place had the same generation afterwards, and the loan was not over.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from kvtier.identity.keys import StoreKey
from kvtier.memory.slab_layout import SharedSlab


class MappableSlab(Protocol):
    """Memory of a tier that another process may map. Any thread."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing in the slab holds any more; memory that stays mapped is lost to the tier."""

    def share(self, timeout_s: float) -> SharedSlab | None:
        """A descriptor of the slab, for a process that is to map it; the caller closes it. None: the slab has ended.

        `OSError` or `KvtierError`: not to be had within the time.
        """


class SlotRef(NamedTuple):
    """The place in which a block lies."""

    serial: int
    """The serial number of the slab that the block lies in."""
    slot: int
    """The number of the block's slot in its slab."""
    generation: int
    """The generation of what the slot holds; it changes before anybody may write to the slot."""
    checksum: int
    """The checksum that the block's writer gave it: see `kvtier.codec.checksums`."""


class Lease(Protocol):
    """Blocks that are lent, until `release`. One thread at a time."""

    @property
    def places(self) -> Sequence[SlotRef | None]:
        """The place of each block, in order; None for blocks not lent."""

    @property
    def held_until_s(self) -> float:
        """When the loan ends, in seconds of the monotonic clock. What is read later counts for nothing."""

    @property
    def not_ready(self) -> Mapping[int, MappableSlab]:
        """Slabs that are worth mapping, by their serial numbers; none of those that the borrower said were ready."""

    def release(self) -> None:
        """Ends the loan, once."""


@runtime_checkable
class LeasingTier(Protocol):
    """A tier that lends. Any thread."""

    def lease(
        self, keys: Sequence[StoreKey], nbytes: int, ready: Collection[int], *, verified: bool = True
    ) -> Lease | None:
        """Lends what the tier has of these blocks in memory. None: it lends nothing now, for any reason; `read` them.

        :param verified: whether the tier looks at every byte first, and lends what its checksum says is whole. Without,
            the borrower does that, where the bytes have arrived.
        :param nbytes: of each payload; others are not lent.
        :param ready: serials of slabs that the caller has mapped. With none, it is told what it might map.
        """
