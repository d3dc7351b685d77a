"""What a mover needs of a tier that lends its memory, so that blocks are copied from where they lie."""

from collections.abc import Collection, Sequence
from typing import Protocol, TypeVar

from kvtier.identity.keys import StoreKey
from kvtier.memory.slot_memory import SlotMemory


class LentBlocks(Protocol):
    """The blocks of one loan that lie in one memory."""

    @property
    def memory(self) -> SlotMemory: ...

    @property
    def indexes(self) -> Sequence[int]:
        """The place of each block among those that were asked for."""

    @property
    def slots(self) -> Sequence[int]:
        """The slots of the memory that the blocks are in, in the same order."""

    @property
    def checksums(self) -> Sequence[int]:
        """The checksum of each, in the same order, for the borrower to compare with. None: the tier has done that."""


class Loan(Protocol):
    """Blocks that may be copied from where they lie, until `Lender.end_read`."""

    @property
    def blocks(self) -> Sequence[LentBlocks]: ...


LoanT = TypeVar("LoanT", bound=Loan)


class Lender(Protocol[LoanT]):
    """Lends the blocks of one tier. Any thread."""

    def start_read(self, keys: Sequence[StoreKey], nbytes: int) -> LoanT | None:
        """Returns what the tier lends of these blocks now, to be ended in any case; None if it lends nothing.

        :param nbytes: the size of each block.
        """

    def end_read(self, loan: LoanT, wrong: Collection[int], /) -> Sequence[bool]:
        """Ends a loan, once. Returns for each block that was asked for whether what was copied is the block.

        :param wrong: indexes of blocks that have arrived with another checksum.
        """
