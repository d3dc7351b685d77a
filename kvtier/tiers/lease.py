"""Blocks that a tier lends: they are read where they lie, by a process that maps the tier's memory.

Who borrows maps memory first (`SlotMemory`), which takes time, and says which of it is ready. A loan names places in
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
        """Nothing in it holds any more, and memory that stays mapped is lost to the tier."""

    def share(self, timeout_s: float) -> SharedSlab | None:
        """For a process that is to map it; the descriptor is the caller's to close. None: it has ended.

        `OSError` or `KvtierError`: not to be had within the time.
        """


class SlotRef(NamedTuple):
    """Where a block lies."""

    serial: int
    """Of its slab."""
    slot: int
    """In the slab."""
    generation: int
    """Of what the slot holds: it changes before anybody may write there."""


class Lease(Protocol):
    """Blocks that are lent, until `release`. One thread at a time."""

    @property
    def places(self) -> Sequence[SlotRef | None]:
        """Of each block; None for those not lent. Verified against their keys."""

    @property
    def held_until_s(self) -> float:
        """By the monotonic clock. What is read later counts for nothing."""

    @property
    def not_ready(self) -> Mapping[int, MappableSlab]:
        """By serial: slabs that are worth mapping, none of those that were said to be ready."""

    def release(self) -> None:
        """Ends the loan, once."""


@runtime_checkable
class LeasingTier(Protocol):
    """A tier that lends. Any thread."""

    def lease(self, keys: Sequence[StoreKey], nbytes: int, ready: Collection[int]) -> Lease | None:
        """What it has of these blocks in memory. None: it lends nothing now, for whatever reason; `read` them.

        :param nbytes: of each payload; others are not lent.
        :param ready: serials of slabs that the caller has mapped. With none, it is told what it might map.
        """
