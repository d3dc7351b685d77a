"""Blocks in the mapped memory of a pool that it was asked to keep where they are."""

from collections.abc import Sequence
from typing import NamedTuple

from kvtier.clock import MONOTONIC
from kvtier.identity.keys import StoreKey
from kvtier.memory.mapped_slab import MappedSlab
from kvtier.memory.slab_layout import SLAB_STRIDE
from kvtier.protocol.block import Verb
from kvtier.protocol.groups import group, require_count
from kvtier.protocol.shared_memory import PLACE
from kvtier.tiers.base import Status
from kvtier.tiers.pool.shared_memory.link import MemoryLink
from kvtier.tiers.pool.shared_memory.session import Session


class HeldBlock(NamedTuple):
    """A block in the pool's memory."""

    position: int
    """The block's index among those that were asked for."""
    slab: MappedSlab
    slot: int
    """The id of the block's slot."""
    generation: int
    checksum: int

    def is_in_place(self) -> bool:
        """Whether its slot holds it still. From `PartHold.held_until_s` on, that may change."""
        return self.slab.generation(self.slot) == self.generation


class PartHold:
    """Some blocks of a read, held together. One thread. Errors are those of `MemoryLink`; in any case `release` it.

    A hold lasts as long as the pool said, or until the connection ends. What keeps a late reader right is the
    generation of a slot, which changes before anybody may write there.
    """

    def __init__(self, link: MemoryLink, keys: Sequence[StoreKey], sizes: Sequence[int], deadline: float) -> None:
        """Asks the pool to hold what it has of these blocks in its memory.

        :param sizes: of their payloads; one of another size is not held.
        """
        self._link, self._deadline = link, deadline
        grouped = group(keys, sizes)
        self._order = grouped.order
        self._held_since = MONOTONIC()
        """When the hold was asked for: not later than when it begins by the pool's clock."""
        self._asked = link.send(Verb.ACQUIRE, {"groups": grouped.fields}, len(keys), deadline)
        self._session = self._asked.session
        self._places: list[tuple[int, tuple[int, int, int]]] = []
        """Index and `PLACE` of each block that is held."""
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
        self._places = list(zip(found, places, strict=True))
        self._link.map(self._session, {slot // SLAB_STRIDE for slot, _, _ in places}, self._deadline)

    def blocks(self) -> list[HeldBlock]:
        """The held blocks that lie in slabs that are mapped."""
        slabs = self._session.slabs
        mapped = ((i, place, slabs.get(place[0] // SLAB_STRIDE)) for i, place in self._places)
        return [HeldBlock(i, slab, *place) for i, place, slab in mapped if slab is not None]

    @property
    def session(self) -> Session:
        """The session that holds the blocks."""
        return self._session

    @property
    def held_until_s(self) -> float:
        """When the hold ends, by the monotonic clock. From then on the pool may do with the blocks what it likes."""
        return self._held_since + self._session.connection.lease_s

    def release(self) -> None:
        """Ends the hold: the pool may do with the blocks what it likes."""
        if not self._is_answered:
            self._session.abandon(self._asked, self._deadline)
        elif self._lease:
            self._session.tell(Verb.RELEASE, {"lease": self._lease}, self._deadline)
