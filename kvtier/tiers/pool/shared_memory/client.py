"""The cache pool's memory, mapped: blocks are copied straight out of it and into it, without the pool's doing.

Over one connection to a pool on this host go only messages: which blocks, where they lie, that they are released. A
lease lasts as long as the pool said; what was copied counts only when it still held after the copy, when the slot has
the generation that it had before, and when the checksum is the writer's. `docs/block-protocol.md` has the messages.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice

from kvtier.errors import CorruptBlockError
from kvtier.identity.keys import StoreKey
from kvtier.protocol.block import Verb
from kvtier.protocol.groups import group, windows
from kvtier.protocol.shared_memory import PLACE
from kvtier.tiers.base import Item, WriteStatus
from kvtier.tiers.pool.carried import Incoming, Outgoing
from kvtier.tiers.pool.connection import PoolConnection
from kvtier.tiers.pool.shared_memory.lease import PoolLease
from kvtier.tiers.pool.shared_memory.link import MemoryLink
from kvtier.tiers.pool.shared_memory.read import ReadPart
from kvtier.tiers.pool.shared_memory.write import WritePart

_SHARE = 8
"""What part of all that a client may hold one thread takes at a time, so that others can hold blocks, too. A thread
holds two: one that is copied, and one that the pool prepares meanwhile."""
_PART_BYTES = 64 << 20
"""Some milliseconds of copying."""
_LEAST_FIRST_BYTES = 4 << 20
"""A smaller first part saves less than its messages cost, most of all where the pool's threads wait for each other."""
_PART_BLOCKS = 1024
"""Blocks in one message."""
_MOST_LENT = 2
"""Parts of a batch, as many as a thread holds that copies."""


class PoolMemory:
    """Reads and writes blocks in the memory of a pool on this host. Any thread. Errors are those of `MemoryLink`.

    Reading has a connection of its own: a write may have to wait while the pool makes memory for it.
    """

    def __init__(self, connect: Callable[[float], PoolConnection]) -> None:
        """:param connect: opens a connection over a Unix socket by a deadline; called when one is needed."""
        self._reads = MemoryLink(connect)
        self._writes = MemoryLink(connect)

    def read(
        self, keys: Sequence[StoreKey], into: Sequence[Incoming], deadline: float
    ) -> Iterator[tuple[int, CorruptBlockError | None]]:
        """Copies blocks out of the pool's memory, and yields (index, None) for each that has come, or why it is not
        that block. What is not in memory at this moment, or comes too late, is not yielded."""
        parts: deque[ReadPart] = deque()
        try:
            for start, stop in self._ranges(self._reads, [len(buffer) for buffer in into], deadline):
                parts.append(ReadPart(self._reads, keys, into, slice(start, stop), deadline))
                if len(parts) > 1:
                    yield from parts[0].copy()
                    parts.popleft().release()
                parts[-1].await_places()
            if parts:
                yield from parts[0].copy()
        finally:
            for part in parts:
                part.release()

    def write(self, items: Sequence[Item[Outgoing]], deadline: float) -> list[WriteStatus]:
        """Copies blocks into the pool's memory; a status per block, in order. FAILED: the block was not tried any more,
        or there was no room that is mapped."""
        parts: list[WritePart] = []
        try:
            for start, stop in self._ranges(self._writes, [len(payload) for _, payload, _ in items], deadline):
                parts.append(WritePart(self._writes, items[start:stop], deadline))
                if len(parts) > 1:
                    parts[-2].copy()
                parts[-1].await_room()
            if parts:
                parts[-1].copy()
            return [status for part in parts for status in part.finish()]
        except BaseException:
            for part in parts:
                part.abandon()
            raise

    def lease(
        self,
        keys: Sequence[StoreKey],
        nbytes: int,
        ready: Collection[int],
        deadline: float,
        *,
        verified: bool,
        on_end: Callable[[int], None],
    ) -> PoolLease:
        """Holds blocks in the pool's memory and says where they lie. A large batch is not lent to its end: others can
        hold blocks, too.

        :param verified: see `LeasingTier.lease`.
        :param on_end: told how many bytes were lent well.
        """
        windows = self._windows([nbytes] * len(keys), self._most_bytes(self._reads, deadline))
        # Where nothing is ready, nothing is held in vain: the pool would count it as read, and order its blocks by it.
        parts = list(islice(windows, _MOST_LENT)) if ready else []
        return PoolLease(
            self._reads, keys, nbytes, parts, ready=ready, deadline=deadline, verified=verified, on_end=on_end
        )

    def acquire(self, keys: Sequence[StoreKey], sizes: Sequence[int], deadline: float) -> tuple[int, int]:
        """Holds blocks in place and copies nothing: (lease, how many are there). For measurements."""
        _, answer = self._reads.ask(Verb.ACQUIRE, {"groups": group(keys, sizes).fields}, len(keys), deadline)
        return answer.number("lease"), len(answer.data("places")) // PLACE.size

    def release(self, lease: int, deadline: float) -> None:
        """Ends a lease of `acquire`."""
        self._reads.session_by(deadline).tell(Verb.RELEASE, {"lease": lease}, deadline)

    def close(self) -> None:
        """Gives everything back to the pool and unmaps it. Idempotent."""
        self._reads.close()
        self._writes.close()

    def _ranges(self, link: MemoryLink, sizes: Sequence[int], deadline: float) -> Iterator[tuple[int, int]]:
        """The parts of a batch. The first one is small, since nothing can be copied while the pool prepares it."""
        most = self._most_bytes(link, deadline)
        first = min(most, max(most // _SHARE, _LEAST_FIRST_BYTES))
        for _, begun in islice(self._windows(sizes, first), 1):
            yield 0, begun
            for start, stop in self._windows(sizes[begun:], most):
                yield begun + start, begun + stop

    def _most_bytes(self, link: MemoryLink, deadline: float) -> int:
        """The most payload bytes of a part of a batch."""
        return min(link.session_by(deadline).connection.max_held_bytes // _SHARE, _PART_BYTES)

    def _windows(self, sizes: Sequence[int], most_bytes: int) -> Iterator[tuple[int, int]]:
        return windows(sizes, most_bytes, _PART_BLOCKS)
