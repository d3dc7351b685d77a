"""What memory has and one tier below has not got yet, and in which order it gets it. Bookkeeping only."""

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from kvtier.identity.keys import TENANT_ID_BYTES, StoreKey, TenantId
from kvtier.tiers.base import WriteStatus
from kvtier.tiers.host.pins import ReadPin

TAKEN = (WriteStatus.STORED, WriteStatus.EXISTS)
"""What a tier says of a block that it has from then on."""


class WriteQueue:
    """Blocks on their way down. Hold `changed` around every use; every method is O(keys it names).

    A block is in one of these places at most: queued or owed, then with a writer; or put off, left out, or declined.
    Only what is queued or with a writer is pinned in memory.
    """

    def __init__(self, on_pinned: Callable[[int], None]) -> None:
        """:param on_pinned: told `pinned_bytes` whenever it has changed; must not block."""
        self.changed = threading.Condition()
        """Guards all fields. Notified by those who change what somebody may wait for."""
        self.works = True
        """The tier took some of what it was last given."""
        self._fails = False
        """The tier took nothing of what it was last given, and not for want of room."""
        self._without_room: set[TenantId] = set()
        """Tenants for whose blocks the tier had no room the last time: they are at their caps, or it is full."""
        self.closing = False
        """What waits is written now, whatever the policy, and nothing more gets on its way."""
        self.entered = False
        """Memory has got a block since a writer last looked at the cold end."""
        self.num_written = 0
        self._on_pinned = on_pinned
        self._queued: dict[StoreKey, ReadPin] = {}
        """Oldest first."""
        self._owed: dict[StoreKey, None] = {}
        """Blocks to be written when memory is about to evict them, or at the end. Oldest first."""
        self._writing: dict[StoreKey, ReadPin | None] = {}
        """Blocks that are with a writer; None until the writer has its lease."""
        self._put_off: dict[StoreKey, None] = {}
        """Blocks in memory only, refused or crowded out, and worth another try. Oldest first."""
        self._left_out: set[StoreKey] = set()
        """Blocks in memory only, for good, since they came too late."""
        self._declined: set[StoreKey] = set()
        """Blocks in memory only, since the tier's admission kept them out when they were last used."""
        self._barred: Counter[StoreKey] = Counter()
        """Keys that are being discarded."""
        self.pinned_bytes = 0
        """Payload bytes that cannot be evicted, queued and with writers. Only this class writes it."""

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
    def is_time_for_put_off(self) -> bool:
        """Only when nothing else is pinned: what found the queue full must not lengthen it."""
        return bool(self._put_off and self.works and not self._writing)

    def takes_of(self, tenant: TenantId) -> bool:
        """Whether the tier may be expected to take the tenant's blocks, though perhaps late."""
        return not self._fails and tenant not in self._without_room

    def expect_success(self) -> None:
        """The tier is given another chance."""
        self.works, self._fails = True, False

    def note_answers(self, answers: Mapping[StoreKey, WriteStatus]) -> None:
        """Notes what the tier said of the blocks that it was last given."""
        if not answers:
            return
        took = {_tenant_of(key) for key, answer in answers.items() if answer in TAKEN}
        refused = {_tenant_of(key) for key, answer in answers.items() if answer is WriteStatus.FULL}
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
        self._put_off.pop(key, None)
        self._declined.discard(key)
        self._queued[key] = lease
        self._add_pinned(len(lease.view))

    def owes(self, keys: Iterable[StoreKey]) -> bool:
        """Whether one of `keys` is owed."""
        return any(key in self._owed for key in keys)

    def owe(self, key: StoreKey) -> None:
        self._owed[key] = None
        self._declined.discard(key)

    def decline(self, key: StoreKey) -> None:
        self._declined.add(key)

    def declined(self, keys: Iterable[StoreKey]) -> list[StoreKey]:
        """The keys among `keys` whose blocks the tier's admission kept out."""
        return [key for key in keys if key in self._declined]

    def put_off(self, key: StoreKey) -> None:
        self._put_off[key] = None

    def leave_out(self, key: StoreKey) -> None:
        self._left_out.add(key)

    def take_queued(self, most: int) -> dict[StoreKey, ReadPin | None]:
        """Hands the oldest queued blocks to a writer, with their leases."""
        batch: dict[StoreKey, ReadPin | None] = {
            key: self._queued.pop(key) for key in list(itertools.islice(self._queued, most))
        }
        self._writing.update(batch)
        return batch

    def take_owed(self, among: Iterable[StoreKey] | None, most: int) -> list[StoreKey]:
        """Hands owed blocks to a writer, who pins them: those of `among`, or any when that is None."""
        owed = self._owed if among is None else (key for key in among if key in self._owed)
        return self._hand_over(itertools.islice((key for key in owed if key not in self._writing), most))

    def take_put_off(self, most: int) -> list[StoreKey]:
        """Hands blocks that were put off to a writer, who pins them. Oldest first."""
        return self._hand_over(itertools.islice(self._put_off, most))

    def pin(self, batch: dict[StoreKey, ReadPin | None]) -> None:
        """What `take_owed` or `take_put_off` gave has these leases; None: memory has it no more."""
        self._writing.update(batch)
        self._add_pinned(sum(len(lease.view) for lease in batch.values() if lease is not None))

    def finish(self, key: StoreKey, lease: ReadPin | None) -> None:
        """The writer is done with the block."""
        del self._writing[key]
        if lease is not None:
            self._add_pinned(-len(lease.view))

    def unpin(self) -> list[ReadPin]:
        """Puts off all that is queued; the caller releases the leases."""
        self._put_off.update(dict.fromkeys(self._queued))
        return self._drain_queued()

    def give_up(self) -> list[ReadPin]:
        """Forgets what waits, and leaves out what was put off; the caller releases the leases."""
        self._owed.clear()
        self._left_out.update(self._put_off)
        self._put_off.clear()
        return self._drain_queued()

    def bar(self, keys: set[StoreKey]) -> list[ReadPin]:
        """None of these blocks gets on its way until `unbar`; the caller releases the leases of those that waited."""
        self._barred.update(keys)
        leases = [self._queued.pop(key) for key in keys & self._queued.keys()]
        self._add_pinned(-sum(len(lease.view) for lease in leases))
        self.forget(keys)
        return leases

    def unbar(self, keys: set[StoreKey]) -> None:
        self._barred -= Counter(keys)

    def is_writing(self, keys: set[StoreKey]) -> bool:
        """Whether one of `keys` is with a writer."""
        return not keys.isdisjoint(self._writing)

    def unpinned(self, keys: Sequence[StoreKey]) -> list[StoreKey]:
        """The keys among `keys` whose blocks the tier should have, and which the queue does not pin in memory."""
        return [key for key in keys if key in self._put_off or key in self._left_out or key in self._owed]

    def forget(self, keys: Iterable[StoreKey]) -> None:
        """These blocks are not missed by the tier any more. Not for what is queued."""
        for key in keys:
            self._owed.pop(key, None)
            self._put_off.pop(key, None)
            self._left_out.discard(key)
            self._declined.discard(key)

    def _hand_over(self, keys: Iterator[StoreKey]) -> list[StoreKey]:
        taken = list(keys)
        for key in taken:
            self._owed.pop(key, None)
            self._put_off.pop(key, None)
        self._writing.update(dict.fromkeys(taken))
        return taken

    def _drain_queued(self) -> list[ReadPin]:
        leases = list(self._queued.values())
        self._queued.clear()
        self._add_pinned(-sum(len(lease.view) for lease in leases))
        return leases

    def _add_pinned(self, nbytes: int) -> None:
        self.pinned_bytes += nbytes
        self._on_pinned(self.pinned_bytes)


def _tenant_of(key: StoreKey) -> TenantId:
    return TenantId(key[:TENANT_ID_BYTES])
