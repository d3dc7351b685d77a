"""One part of a read from the mapped memory of a pool: held, copied and released together.

A part waits for the pool only before its first copy: while it is copied, the pool finds the blocks of the next one.
"""

from collections.abc import Callable, Sequence
from functools import partial

from kvtier.clock import MONOTONIC
from kvtier.codec.checksums import checksum, copy_checked
from kvtier.errors import CorruptBlockError
from kvtier.identity.keys import StoreKey
from kvtier.memory.pieces import Target
from kvtier.tiers.pool.carriage import share
from kvtier.tiers.pool.carried import Incoming, helper_of
from kvtier.tiers.pool.sealed_blocks import SealedTarget
from kvtier.tiers.pool.shared_memory.hold import HeldBlock, PartHold
from kvtier.tiers.pool.shared_memory.link import MemoryLink

_Copied = tuple[CorruptBlockError | None, float]
"""What is wrong with a block, and when it was copied."""


class ReadPart:
    """Some blocks of a read. One thread. Errors are those of `MemoryLink`; whatever happens, `release` it."""

    def __init__(
        self, link: MemoryLink, keys: Sequence[StoreKey], into: Sequence[Incoming], part: slice, deadline: float
    ) -> None:
        """Asks the pool to hold what it has of these blocks in its memory.

        :param part: of the batch of `keys` and `into`.
        """
        self._first = part.start
        self._keys, self._into = keys[part], into[part]
        self._deadline = deadline
        self._hold = PartHold(link, self._keys, [len(buffer) for buffer in self._into], deadline)

    def await_places(self) -> None:
        """Blocks until the pool has answered, and maps what it said."""
        self._hold.await_places()

    def copy(self) -> list[tuple[int, CorruptBlockError | None]]:
        """Place in the batch of each block that is whole, or broken. Ends early when there is no time left.

        All that can be is done before the first copy or after the last: a copy leaves nothing else in the processor's
        caches, and the same lines cost three times as much between two of them.
        """
        held = self._hold.blocks()
        sources = [block.slab.slot(block.slot, len(self._into[block.position])) for block in held]
        copies = [self._copying(block, source) for block, source in zip(held, sources, strict=True)]
        copied = share(copies, helper_of(self._into[0]), lambda copy: copy[1] > self._deadline)
        held_until_s = self._hold.held_until_s
        return [
            (self._first + held[i].position, fault)
            for i, (fault, at) in copied
            if held[i].is_in_place() and at < held_until_s
        ]

    def _copying(self, block: HeldBlock, source: memoryview) -> Callable[[], _Copied]:
        """What copies a block. A sealed one is opened on the way."""
        into = self._into[block.position]
        if isinstance(into, SealedTarget):
            return partial(self._open, block, source, into.opening(source, is_shared=True))
        return partial(self._copy, block, source, into)

    def _copy(self, block: HeldBlock, source: memoryview, into: Target) -> _Copied:
        is_whole = copy_checked(self._keys[block.position], into, source) == block.checksum
        return None if is_whole else CorruptBlockError("checksum mismatch in shared memory"), MONOTONIC()

    def _open(self, block: HeldBlock, source: memoryview, opening: Callable[[], CorruptBlockError | None]) -> _Copied:
        fault = opening()
        opened_at = MONOTONIC()
        if fault is not None and checksum(self._keys[block.position], source) != block.checksum:
            fault = CorruptBlockError("checksum mismatch in shared memory")
        return fault, opened_at

    def release(self) -> None:
        """The pool may do with the blocks what it likes."""
        self._hold.release()
