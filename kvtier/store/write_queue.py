"""What memory has and one tier below has not got yet, and in which order it gets it. Bookkeeping only."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvtier.identity.keys import StoreKey, TenantId, tenant_of
from kvtier.store.fair_queue import FairQueue
from kvtier.store.fair_room import FairRoom
from kvtier.store.keys_in_turn import KeysInTurn
from kvtier.tiers.base import WriteStatus
from kvtier.tiers.host.pins import ReadPin

TAKEN = (WriteStatus.STORED, WriteStatus.EXISTS)
"""What a tier says of a block that it has from then on."""
_BATCHES_BETWEEN = 7
"""Batches of what is queued or owed before one of what was put off, while there is always more. Fewer: a tier spends
more of its time on blocks that nobody was promised. More: those stay in memory only for longer."""


class WriteQueue:
    """Blocks on their way down. Hold `changed` around every use; every method is O(keys it names).

    A block is in one of these places at most: queued or owed, then with a writer; or put off, left out, or declined.
    Only what is queued or with a writer is pinned in memory. Tenants are served in turns and share the room for what is
    pinned: see `FairQueue`, `FairRoom` and docs/adr/0031-fair-scheduling.md.
    """

    def __init__(self, room_bytes: int, on_pinned: Callable[[int], None]) -> None:
        """
        :param room_bytes: payload bytes that one tenant may have pinned while nobody else has any.
        :param on_pinned: told how many bytes are pinned whenever it has changed; must not block.
        """
        self.changed = threading.Condition()
        """Guards all fields. Notified by those who change what somebody may wait for."""
        self.works = True
        """Whether the tier took some of what it was last given."""
        self._fails = False
        """Whether the tier took nothing of what it was last given, and not for want of room."""
        self._without_room: set[TenantId] = set()
        """Tenants for whose blocks the tier had no room the last time: they are at their caps, or it is full."""
        self.closing = False
        """Whether what waits is written now, whatever the policy, and nothing more gets on its way."""
        self.entered = False
        """Whether memory has got a block since a writer last looked at the cold end."""
        self.num_written = 0
        self._on_pinned = on_pinned
        self._queued = FairQueue()
        self._owed = KeysInTurn()
        """Blocks to be written when memory is about to evict them, or at the end."""
        self._writing: dict[StoreKey, ReadPin | None] = {}
        """Blocks that are with a writer; None until the writer has its lease."""
        self._put_off = KeysInTurn()
        """Blocks in memory only, refused or crowded out, and worth another try."""
        self._num_batches = 0
        """Batches of other blocks that writers got since they last got what was put off."""
        self._left_out: set[StoreKey] = set()
        """Blocks in memory only, for good, since they came too late."""
        self._declined: set[StoreKey] = set()
        """Blocks in memory only, since the tier's admission kept them out when they were last used."""
        self._barred: Counter[StoreKey] = Counter()
        """Keys that are being discarded."""
        self._room = FairRoom(room_bytes)

    @property
    def pinned_bytes(self) -> int:
        """Payload bytes that cannot be evicted, queued and with writers."""
        return self._room.taken_bytes

    @property
    def num_waiting(self) -> int:
        """Number of blocks that are queued or owed."""
        return len(self._queued) + len(self._owed)

    @property
    def num_owed(self) -> int:
        return len(self._owed)

    @property
    def num_writing(self) -> int:
        return len(self._writing)

    @property
    def num_memory_only(self) -> int:
        """Number of blocks that were put off or left out."""
        return len(self._put_off) + len(self._left_out)

    @property
    def more_to_write(self) -> bool:
        """Whether a writer would find something, apart from what is owed and has become cold."""
        return bool(self._queued or (self._owed and self.closing) or self.is_time_for_put_off)

    @property
    def is_turn_of_put_off(self) -> bool:
        """Whether what was put off comes before what is queued or owed, which may never end."""
        return bool(self._put_off and self.works and self._num_batches >= _BATCHES_BETWEEN)

    @property
    def is_time_for_put_off(self) -> bool:
        """Whether what was put off has its turn, or nothing else is pinned: what found the queue full must not lengthen
        it."""
        return self.is_turn_of_put_off or bool(self._put_off and self.works and not self._writing)

    def is_full_for(self, tenant: TenantId) -> bool:
        """Whether as much of the tenant's is pinned as may be."""
        return self._room.is_full_for(tenant)

    def has_room(self, key: StoreKey, nbytes: int) -> bool:
        """Whether a block of so many bytes may be pinned that nobody was promised."""
        return self._room.fits(tenant_of(key), nbytes)

    def takes_of(self, tenant: TenantId) -> bool:
        """Whether the tier may be expected to take the tenant's blocks, though perhaps late. Without the lock, whether
        it was so a moment ago."""
        return not self._fails and tenant not in self._without_room

    def expect_success(self) -> None:
        """Gives the tier another chance."""
        self.works, self._fails = True, False

    def note_answers(self, answers: Mapping[StoreKey, WriteStatus]) -> None:
        """Notes what the tier said of the blocks that it was last given."""
        if not answers:
            return
        took = {tenant_of(key) for key, answer in answers.items() if answer in TAKEN}
        refused = {tenant_of(key) for key, answer in answers.items() if answer is WriteStatus.FULL}
        self._without_room = (self._without_room | refused) - took
        self.works = bool(took)
        if took or any(answer is not WriteStatus.FULL for answer in answers.values()):
            self._fails = not took

    def is_barred(self, key: StoreKey) -> bool:
        """Whether the block is being discarded."""
        return key in self._barred

    def is_on_its_way(self, key: StoreKey) -> bool:
        """Whether the block is queued or with a writer."""
        return key in self._queued or key in self._writing

    def push(self, key: StoreKey, lease: ReadPin) -> None:
        """Queues a block that is not on its way; `lease` is the queue's until somebody takes it out."""
        self._put_off.discard(key)
        self._declined.discard(key)
        self._queued.push(key, lease)
        self._note_pinned({key: lease})

    def owes(self, keys: Iterable[StoreKey]) -> bool:
        """Whether one of `keys` is owed."""
        return any(key in self._owed for key in keys)

    def owe(self, key: StoreKey) -> None:
        self._owed.add(key)
        self._declined.discard(key)

    def decline(self, key: StoreKey) -> None:
        self._declined.add(key)

    def declined(self, keys: Iterable[StoreKey]) -> list[StoreKey]:
        """The keys among `keys` whose blocks the tier's admission kept out."""
        return [key for key in keys if key in self._declined]

    def put_off(self, key: StoreKey) -> None:
        self._put_off.add(key)

    def leave_out(self, key: StoreKey) -> None:
        self._left_out.add(key)

    def take_queued(self, most: int) -> dict[StoreKey, ReadPin | None]:
        """Hands the queued blocks whose turn it is to a writer, with their leases."""
        batch: dict[StoreKey, ReadPin | None] = {**self._queued.take(most)}
        self._num_batches += bool(batch)
        self._writing.update(batch)
        return batch

    def take_owed(self, among: Iterable[StoreKey] | None, most: int) -> list[StoreKey]:
        """Hands owed blocks to a writer, who pins them: those of `among`, or any when that is None."""
        taken = self._owed.take(most, among=among, but=self._writing)
        self._num_batches += bool(taken)
        return self._hand_over(taken)

    def take_put_off(self, most: int) -> list[StoreKey]:
        """Hands blocks that were put off to a writer, who pins them."""
        self._num_batches = 0
        return self._hand_over(self._put_off.take(most))

    def pin(self, batch: dict[StoreKey, ReadPin | None]) -> None:
        """Notes the leases of blocks from `take_owed` or `take_put_off`; None: memory has the block no more."""
        self._writing.update(batch)
        self._note_pinned({key: lease for key, lease in batch.items() if lease is not None})

    def finish(self, key: StoreKey, lease: ReadPin | None) -> None:
        """Notes that the writer is done with the block."""
        del self._writing[key]
        if lease is not None:
            self._note_pinned({key: lease}, -1)

    def unpin(self) -> list[ReadPin]:
        """Puts off all that is queued of the tenant of whom most is pinned; the caller releases the leases."""
        most = max(self._queued.tenants, key=self._room.taken_by, default=None)
        leases = self._drain([most] if most is not None else [])
        for key in leases:
            self._put_off.add(key)
        return list(leases.values())

    def give_up(self) -> list[ReadPin]:
        """Forgets what waits, and leaves out what was put off; the caller releases the leases."""
        self._owed.clear()
        self._left_out.update(self._put_off)
        self._put_off.clear()
        return list(self._drain(self._queued.tenants).values())

    def bar(self, keys: set[StoreKey]) -> list[ReadPin]:
        """Keeps these blocks from their way until `unbar`; the caller releases the leases of those that waited."""
        self._barred.update(keys)
        leases = {key: self._queued.pop(key) for key in keys if key in self._queued}
        self._note_pinned(leases, -1)
        self.forget(keys)
        return list(leases.values())

    def unbar(self, keys: set[StoreKey]) -> None:
        self._barred -= Counter(keys)

    def is_writing(self, keys: set[StoreKey]) -> bool:
        """Whether one of `keys` is with a writer."""
        return not keys.isdisjoint(self._writing)

    def unpinned(self, keys: Sequence[StoreKey]) -> list[StoreKey]:
        """The keys among `keys` whose blocks the tier should have, and which the queue does not pin in memory."""
        return [key for key in keys if key in self._put_off or key in self._left_out or key in self._owed]

    def forget(self, keys: Iterable[StoreKey]) -> None:
        """Forgets that the tier lacks these blocks, none of which is queued."""
        for key in keys:
            self._owed.discard(key)
            self._put_off.discard(key)
            self._left_out.discard(key)
            self._declined.discard(key)

    def _hand_over(self, taken: list[StoreKey]) -> list[StoreKey]:
        for key in taken:
            self._owed.discard(key)
            self._put_off.discard(key)
        self._writing.update(dict.fromkeys(taken))
        return taken

    def _drain(self, tenants: Iterable[TenantId]) -> dict[StoreKey, ReadPin]:
        """Takes all of these tenants out of the queue."""
        leases = self._queued.pop_all(tenants)
        self._note_pinned(leases, -1)
        return leases

    def _note_pinned(self, leases: Mapping[StoreKey, ReadPin], sign: int = 1) -> None:
        """Counts leases that pin their blocks from now on or, with -1, do so no more."""
        for key, lease in leases.items():
            self._room.add(tenant_of(key), sign * len(lease.view))
        self._on_pinned(self._room.taken_bytes)
