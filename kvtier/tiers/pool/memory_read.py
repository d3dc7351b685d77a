"""One part of a read from the mapped memory of a pool: held, copied and released together.

A part waits for the pool only before its first copy: while it is copied, the pool finds the blocks of the next one.
"""

from collections.abc import Iterator, Sequence

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
        places = list(PLACE.iter_unpack(answer.data("places")))
        require_count(len(places), len(found))
        self._hits = list(zip(found, places, strict=True))
        self._link.map(self._session, {slot // SLAB_STRIDE for slot, _, _ in places}, self._deadline)

    def copy(self) -> Iterator[tuple[int, CorruptBlockError | None]]:
        """Place in the batch of each block that is whole, or broken. `TimeoutError`: no time left."""
        held_until = self._held_since + self._session.connection.lease_s
        for i, (slot, generation, checksum) in self._hits:
            slab = self._session.slabs.get(slot // SLAB_STRIDE)
            if slab is None:
                continue
            copied = copy_checked(self._keys[i], self._into[i], slab.slot(slot, len(self._into[i])))
            now = MONOTONIC()
            if slab.generation(slot) == generation and now < held_until:
                whole = copied == checksum
                yield self._first + i, None if whole else CorruptBlockError("checksum mismatch in shared memory")
            if now > self._deadline:
                raise TimeoutError("no time left to copy")

    def release(self) -> None:
        """The pool may do with the blocks what it likes."""
        if not self._is_answered:
            self._session.abandon(self._asked, self._deadline)
        elif self._lease:
            self._session.tell(Verb.RELEASE, {"lease": self._lease}, self._deadline)
