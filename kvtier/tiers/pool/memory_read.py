"""One part of a read from the mapped memory of a pool: held, copied and released together.

A part waits for the pool only before its first copy: while it is copied, the pool finds the blocks of the next one.
"""

from collections.abc import Sequence

from kvtier.clock import MONOTONIC
from kvtier.codec import copy_checked
from kvtier.errors import CorruptBlockError
from kvtier.keys import StoreKey
from kvtier.pieces import Target
from kvtier.tiers.base import Status
from kvtier.tiers.pool.groups import group, require_count
from kvtier.tiers.pool.memory_link import MemoryLink
from kvtier.tiers.slab import SLAB_STRIDE
from kvtier.wire.block import Verb
from kvtier.wire.shared_memory import PLACE

_Place = tuple[int, int, int]
"""Slot id, generation, checksum."""


class ReadPart:
    """Some blocks of a read. One thread. Errors are those of `MemoryLink`; whatever happens, `release` it."""

    def __init__(
        self, link: MemoryLink, keys: Sequence[StoreKey], into: Sequence[Target], part: slice, deadline: float
    ) -> None:
        """Asks the pool to hold what it has of these blocks in its memory.

        :param part: of the batch of `keys` and `into`.
        """
        self._link = link
        self._first = part.start
        self._keys, self._into = keys[part], into[part]
        self._deadline = deadline
        grouped = group(self._keys, [len(buffer) for buffer in self._into])
        self._order = grouped.order
        self._held_since = MONOTONIC()
        """Not later than by the pool's clock."""
        self._asked = link.send(Verb.ACQUIRE, {"groups": grouped.fields}, len(self._keys), deadline)
        self._session = self._asked.session
        self._hits: list[tuple[int, _Place]] = []
        """Place in the part and place in memory of each block that is held."""
        self._is_answered = False
        self._lease = 0

    def await_places(self) -> None:
        """Blocks until the pool has answered, and maps what it said."""
        self._session, answer = self._link.receive_first(self._asked, self._deadline)
        self._is_answered = True
        self._lease = answer.number("lease")
        statuses = answer.data("statuses")
        require_count(len(statuses), len(self._order))
        found = [i for i, status in zip(self._order, statuses, strict=True) if status == Status.HIT]
        places = answer.records("places", PLACE)
        require_count(len(places), len(found))
        self._hits = list(zip(found, places, strict=True))
        self._link.map(self._session, {slot // SLAB_STRIDE for slot, _, _ in places}, self._deadline)

    def copy(self) -> list[tuple[int, CorruptBlockError | None]]:
        """Place in the batch of each block that is whole, or broken. Ends early when there is no time left.

        All that can be is done before the first copy or after the last: a copy leaves nothing else in the processor's
        caches, and the same lines cost three times as much between two of them.
        """
        slabs = self._session.slabs
        mapped = [(i, place, slabs.get(place[0] // SLAB_STRIDE)) for i, place in self._hits]
        found = [(i, place, slab) for i, place, slab in mapped if slab is not None]
        sources = [slab.slot(place[0], len(self._into[i])) for i, place, slab in found]
        copied: list[tuple[int, float]] = []
        """Checksum of each, and when it was copied."""
        for (i, _, _), source in zip(found, sources, strict=True):
            copied.append((copy_checked(self._keys[i], self._into[i], source), MONOTONIC()))
            if copied[-1][1] > self._deadline:
                break
        held_until = self._held_since + self._session.connection.lease_s
        return [
            (self._first + i, None if copy == checksum else CorruptBlockError("checksum mismatch in shared memory"))
            for (i, (slot, generation, checksum), slab), (copy, at) in zip(found, copied, strict=False)
            if slab.generation(slot) == generation and at < held_until
        ]

    def release(self) -> None:
        """The pool may do with the blocks what it likes."""
        if not self._is_answered:
            self._session.abandon(self._asked, self._deadline)
        elif self._lease:
            self._session.tell(Verb.RELEASE, {"lease": self._lease}, self._deadline)
