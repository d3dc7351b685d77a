"""Blocks of a pool's mapped memory, lent on: see `kvtier.tiers.lease`."""

import math
from collections.abc import Callable, Container, Iterable, Sequence

from kvtier.clock import MONOTONIC
from kvtier.codec.checksums import checksum
from kvtier.identity.keys import StoreKey
from kvtier.memory.slab_layout import SLAB_STRIDE, SharedSlab
from kvtier.tiers.lease import MappableSlab, SlotRef
from kvtier.tiers.pool.shared_memory.hold import HeldBlock, PartHold
from kvtier.tiers.pool.shared_memory.link import MemoryLink
from kvtier.tiers.pool.shared_memory.session import Session


class PoolSlab:
    """`MappableSlab`: one of the pool's, which this process has mapped. Does not keep it mapped."""

    def __init__(self, link: MemoryLink, session: Session, number: int) -> None:
        """:param number: what the pool calls it, in this session."""
        self._link, self._session, self._number = link, session, number

    @property
    def has_ended(self) -> bool:
        """Whether nothing in the slab holds any more. It ends with its connection, too: the memory of a pool that has
        ended is nobody's."""
        slab = self._session.slabs.get(self._number)
        return self._session.has_ended or slab is None or not slab.in_use

    def share(self, timeout_s: float) -> SharedSlab | None:
        """A descriptor of the slab, for a process that is to map it; the caller closes it. None: the slab has ended.
        `OSError` or `KvtierError`: it cannot be had within the time."""
        return None if self.has_ended else self._link.fetch(self._session, self._number, MONOTONIC() + timeout_s)


class PoolLease:
    """`Lease` of blocks in the pool's memory."""

    def __init__(  # noqa: PLR0913 - one request of shared memory
        self,
        link: MemoryLink,
        keys: Sequence[StoreKey],
        nbytes: int,
        parts: Sequence[tuple[int, int]],
        *,
        ready: Container[int],
        deadline: float,
        verified: bool,
        on_end: Callable[[int], None],
    ) -> None:
        """Blocks until the pool has answered, and all that is to be lent is verified. Errors as of `MemoryLink`.

        :param parts: ranges of `keys` that are asked for in one message each. With none, nothing is lent.
        :param verified: see `LeasingTier.lease`.
        :param on_end: told how many bytes were lent.
        """
        self._nbytes, self._verified, self._on_end = nbytes, verified, on_end
        self.places: list[SlotRef | None] = [None] * len(keys)
        self.not_ready: dict[int, MappableSlab] = {}
        self.held_until_s = math.inf
        self._holds: list[PartHold] = []
        try:
            for start, stop in parts:
                self._holds.append(PartHold(link, keys[start:stop], [nbytes] * (stop - start), deadline))
            for (start, stop), hold in zip(parts, self._holds, strict=True):
                hold.await_places()
                self.held_until_s = min(self.held_until_s, hold.held_until_s)
                self._lease(hold, start, keys[start:stop], ready, deadline)
                self._offer(link, hold.session, {block.slot // SLAB_STRIDE for block in hold.blocks()}, ready)
            if not parts:
                session = link.session_by(deadline)
                self._offer(link, session, session.slabs, ready)
        except BaseException:
            self._release()
            raise

    def release(self) -> None:
        """Ends the loan, once, and says how many bytes were lent."""
        self._release()
        self._on_end(self._nbytes * (len(self.places) - self.places.count(None)))

    def _lease(
        self, hold: PartHold, first: int, keys: Sequence[StoreKey], ready: Container[int], deadline: float
    ) -> None:
        """Lends these blocks. One that is looked at and is not whole is not lent: the read that follows finds out, and
        has it dropped."""
        for block in hold.blocks():
            if MONOTONIC() > deadline:
                return
            slab = block.slab
            if slab.serial not in ready:
                continue
            if not self._verified or self._is_whole(block, keys[block.position]):
                place = SlotRef(slab.serial, block.slot % SLAB_STRIDE, block.generation, block.checksum)
                self.places[first + block.position] = place

    def _is_whole(self, block: HeldBlock, key: StoreKey) -> bool:
        return checksum(key, block.slab.slot(block.slot, self._nbytes)) == block.checksum

    def _offer(self, link: MemoryLink, session: Session, numbers: Iterable[int], ready: Container[int]) -> None:
        slabs = session.slabs
        for number in list(numbers):
            slab = slabs.get(number)
            if slab is not None and slab.serial not in ready:
                self.not_ready[slab.serial] = PoolSlab(link, session, number)

    def _release(self) -> None:
        for hold in self._holds:
            hold.release()
