"""One part of a write to the mapped memory of a pool: prepared, copied and committed together.

A part waits for the pool only before its first copy: while it is copied, the pool prepares the next part and commits
the one before.
"""

import struct
from collections.abc import Callable, Sequence
from functools import partial

from kvtier.clock import MONOTONIC
from kvtier.memory.pieces import Payload, copy_payload
from kvtier.memory.slab_layout import SLAB_STRIDE
from kvtier.protocol.block import Verb
from kvtier.protocol.groups import group, require_count
from kvtier.protocol.shared_memory import WORD
from kvtier.tiers.base import Item, WriteStatus
from kvtier.tiers.pool.carriage import share
from kvtier.tiers.pool.carried import Outgoing, helper_of
from kvtier.tiers.pool.sealed_blocks import SealedPayload
from kvtier.tiers.pool.shared_memory.link import MemoryLink
from kvtier.tiers.pool.shared_memory.session import Request


class WritePart:
    """Some blocks of a write. One thread. Errors are those of `MemoryLink`; after any of them only `abandon`."""

    def __init__(self, link: MemoryLink, items: Sequence[Item[Outgoing]], deadline: float) -> None:
        """Asks the pool for room."""
        self._link = link
        self._items = items
        self._deadline = deadline
        grouped = group([key for key, _, _ in items], [len(payload) for _, payload, _ in items])
        self._order = grouped.order
        self._asked = link.send(Verb.PREPARE, {"groups": grouped.fields}, len(items), deadline)
        self._session = self._asked.session
        self._is_answered = False
        self._write = 0
        """The id of the write; 0 while nothing is prepared, or nothing any more."""
        self._places: list[tuple[int, int]] = []
        """The place in the part, and the slot id, of each block that has room."""
        self._committed: Request | None = None
        self._statuses = [WriteStatus.FAILED] * len(items)

    def await_room(self) -> None:
        """Blocks until the pool has answered, and maps what it said."""
        self._session, answer = self._link.receive_first(self._asked, self._deadline)
        self._is_answered = True
        self._write = answer.number("write")
        outcomes = answer.members("statuses", WriteStatus)
        require_count(len(outcomes), len(self._order))
        prepared: list[int] = []
        for i, outcome in zip(self._order, outcomes, strict=True):
            if outcome is WriteStatus.STORED:
                prepared.append(i)
            else:
                self._statuses[i] = outcome
        slots = [slot for (slot,) in answer.records("slots", WORD)]
        require_count(len(slots), len(prepared))
        self._places = list(zip(prepared, slots, strict=True))
        self._link.map(self._session, {slot // SLAB_STRIDE for slot in slots}, self._deadline)

    def copy(self) -> None:
        """Copies while there is time, and has the pool make readable what was copied."""
        targets: list[tuple[memoryview, Item[Outgoing]]] = []
        for i, slot in self._places:
            slab = self._session.slabs.get(slot // SLAB_STRIDE)
            if slab is None or not slab.writable:
                break
            targets.append((slab.slot(slot, len(self._items[i][1])), self._items[i]))
        copies = [self._copying(target, item) for target, item in targets]
        helper = helper_of(self._items[0][1])
        checksums: list[int] = []
        for i, checksum in share(copies, helper, lambda checksum: checksum is None):
            if checksum is None or i > len(checksums):  # the other thread had time for what comes after
                break
            checksums.append(checksum)
        self._places = self._places[: len(checksums)]
        if checksums:
            fields = {"write": self._write, "checksums": struct.pack(f"<{len(checksums)}Q", *checksums)}
            self._committed = self._session.send(Verb.COMMIT, fields, len(checksums), self._deadline)
        elif self._write:
            self._session.tell(Verb.ABORT, {"write": self._write}, self._deadline)
        self._write = 0

    def _copying(self, place: memoryview, item: Item[Outgoing]) -> Callable[[], int | None]:
        """What copies a block and returns its checksum, None without time. A sealed one is sealed on the way."""
        _, payload, checksum = item
        if isinstance(payload, SealedPayload):
            return partial(self._seal, payload.sealing_to(place))
        return partial(self._copy, place, payload, checksum)

    def _copy(self, place: memoryview, payload: Payload, checksum: int) -> int | None:
        if MONOTONIC() > self._deadline:
            return None
        copy_payload(place, payload)
        return checksum

    def _seal(self, sealing: Callable[[], int]) -> int | None:
        return None if MONOTONIC() > self._deadline else sealing()

    def finish(self) -> list[WriteStatus]:
        """Blocks until the pool has answered. A status per block; FAILED: not copied."""
        if self._committed is not None:
            committed = self._session.receive(self._committed, self._deadline).members("statuses", WriteStatus)
            require_count(len(committed), len(self._places))
            for (i, _), status in zip(self._places, committed, strict=True):
                self._statuses[i] = status
        return self._statuses

    def abandon(self) -> None:
        """Gives back what is prepared and will not be committed."""
        if not self._is_answered:
            self._session.abandon(self._asked, self._deadline)
        elif self._write:
            self._session.tell(Verb.ABORT, {"write": self._write}, self._deadline)
