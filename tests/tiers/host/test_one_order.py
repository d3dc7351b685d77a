"""A tenant's blocks in one order of eviction: whatever their sizes and writers, memory goes to what is used."""

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvtier.codec.checksums import checksum
from kvtier.identity.keys import StoreKey, tenant_id
from kvtier.memory import memfd
from kvtier.testing.contract import make_key, make_payload, read_blocks, summed
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.host.pins import ReadPin
from kvtier.tiers.host.relocation import Relocation
from kvtier.tiers.host.slab import OWN_PROCESS, Slab
from kvtier.tiers.host.slots import WriteSlot
from kvtier.tiers.host.tier import BLOCK_OVERHEAD_BYTES, HostTier
from sweeps import IN_FULL

KIB = 1024
MIB = 1024 * KIB
RED = tenant_id("red")
shared_memory = pytest.mark.skipif(not memfd.available(), reason="shared memory needs Linux")


class IdealCache:
    """One LRU over as many bytes, without slabs."""

    def __init__(self, capacity_bytes: int, overhead_bytes: int) -> None:
        self._capacity_bytes, self._overhead_bytes = capacity_bytes, overhead_bytes
        self._blocks: OrderedDict[StoreKey, int] = OrderedDict()
        self._used_bytes = 0

    def use(self, key: StoreKey, nbytes: int) -> bool:
        """Whether the block is there; it is afterwards."""
        if key in self._blocks:
            self._blocks.move_to_end(key)
            return True
        cost = nbytes + self._overhead_bytes
        while self._used_bytes + cost > self._capacity_bytes:
            self._used_bytes -= self._blocks.popitem(last=False)[1]
        self._blocks[key] = cost
        self._used_bytes += cost
        return False


def put(tier: HostTier, key: StoreKey, nbytes: int, writer: int = OWN_PROCESS) -> WriteStatus:
    """Stores a block whose bytes are of no interest."""
    slot = tier.prepare(key, nbytes, writer=writer)
    if isinstance(slot, WriteSlot):
        tier.commit(slot, 0)
        return WriteStatus.STORED
    return slot


def use(tier: HostTier, key: StoreKey) -> bool:
    leases = tier.acquire([key])
    tier.release(leases)
    return leases != [None]


@pytest.mark.parametrize(
    ("sizes", "num_writers", "num_requests_per_life"),
    [
        ([4 * KIB], 1, None),
        ([4 * KIB, 12 * KIB, 60 * KIB, 1 * KIB], 3, None),
        ([2 * KIB + 64 * i for i in range(100)], 1, None),
        pytest.param([16 * KIB, 64 * KIB], 4, None, marks=shared_memory, id="clients"),
        pytest.param([16 * KIB, 64 * KIB], 2, 3000, marks=shared_memory, id="clients that come and go"),
    ],
)
@pytest.mark.parametrize("overhead_bytes", [0, BLOCK_OVERHEAD_BYTES] if IN_FULL else [BLOCK_OVERHEAD_BYTES])
def test_hits_are_those_of_one_cache(
    sizes: Sequence[int], num_writers: int, num_requests_per_life: int | None, overhead_bytes: int
) -> None:
    """Within two points of a hundred, on a Zipf trace whose favourites change."""
    capacity_bytes, num_blocks, num_requests = 16 * MIB, 12_000, 30_000
    rng = random.Random(7)
    blocks = [(make_key(i), rng.choice(sizes), rng.randrange(num_writers)) for i in range(num_blocks)]
    ranks = rng.choices(range(num_blocks), [1 / (rank + 1) ** 0.9 for rank in range(num_blocks)], k=num_requests)
    tier = HostTier(
        capacity_bytes,
        shared=num_requests_per_life is not None,
        prefault=False,
        block_overhead_bytes=overhead_bytes,
    )
    ideal = IdealCache(capacity_bytes, overhead_bytes)
    num_hits = num_ideal = 0
    for request, rank in enumerate(ranks):
        key, nbytes, writer = blocks[(rank + request // 10_000 * 500) % num_blocks]
        if num_requests_per_life is not None:
            life, age = divmod(request, num_requests_per_life)
            writer += 1 + life * num_writers
            if not age:
                for gone in range(1 + (life - 1) * num_writers, 1 + life * num_writers):
                    tier.retire_writer(gone)
        num_ideal += ideal.use(key, nbytes)
        if use(tier, key):
            num_hits += 1
        else:
            assert put(tier, key, nbytes, writer) is WriteStatus.STORED
        if not request % 5000:
            tier.check()
    tier.check()
    tier.close()
    assert num_ideal / num_requests - num_hits / num_requests < 0.02


def test_a_second_length_gets_the_memory_that_the_first_does_not_use() -> None:
    tier = HostTier(16 * MIB, prefault=False)
    for i in range(4096):
        assert put(tier, make_key(("old", i)), 4 * KIB) is WriteStatus.STORED
    new = [make_key(("new", i)) for i in range(600)]
    for key in new:
        assert put(tier, key, 24 * KIB) is WriteStatus.STORED
    assert tier.lookup(new).count(Status.HIT) > 580
    tier.check()


def test_tiny_blocks_are_charged_what_they_cost() -> None:
    tier = HostTier(MIB, prefault=False, block_overhead_bytes=BLOCK_OVERHEAD_BYTES)
    for i in range(4000):
        assert put(tier, make_key(i), 1) is WriteStatus.STORED
    assert 0.67 * MIB < tier.usage().num_blocks * (64 + BLOCK_OVERHEAD_BYTES) <= MIB
    tier.check()


class Interrupted:
    """Has something happen while blocks are being copied, once for each relocation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_relocations = 0
        self.meanwhile: Callable[[Relocation], None] = lambda relocation: None
        copy = Relocation.copy

        def copy_late(relocation: Relocation, made: Slab | None) -> None:
            self.num_relocations += 1
            self.meanwhile(relocation)
            copy(relocation, made)

        monkeypatch.setattr(Relocation, "copy", copy_late)


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Interrupted:
    return Interrupted(monkeypatch)


@pytest.fixture
def sparse(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostTier]:
    """A tier that is full of blocks of 4 KiB, in slabs of eight, every second of which is warm."""
    monkeypatch.setattr("kvtier.tiers.host.slab_sizes._LEAST_PART", 8)
    tier = HostTier(256 * KIB)
    for i in range(64):
        assert tier.write([summed(make_key(i), make_payload(i, 4 * KIB))]) == [WriteStatus.STORED]
    for i in range(0, 64, 2):
        assert use(tier, make_key(i))
    yield tier
    tier.check()
    tier.close()


WARM = range(0, 64, 2)


def kept(tier: HostTier) -> list[int]:
    """Which of the blocks of `sparse` are there, all of them with the right bytes."""
    there = [i for i in range(64) if tier.lookup([make_key(i)]) == [Status.HIT]]
    assert read_blocks(tier, [make_key(i) for i in there], 4 * KIB) == [make_payload(i, 4 * KIB) for i in there]
    return there


def test_blocks_of_a_slab_that_is_emptied_are_there_all_the_while(sparse: HostTier, interrupted: Interrupted) -> None:
    seen: list[list[int]] = []
    interrupted.meanwhile = lambda relocation: seen.append(kept(sparse))
    assert sparse.write([summed(make_key("large"), make_payload("large", 32 * KIB))]) == [WriteStatus.STORED]
    assert interrupted.num_relocations == 1
    assert seen == [kept(sparse)]
    assert set(WARM) <= set(seen[0])
    assert len(seen[0]) == 56
    assert read_blocks(sparse, [make_key("large")], 32 * KIB) == [make_payload("large", 32 * KIB)]


def test_what_is_read_in_a_slab_that_is_emptied_stays_where_it_is(sparse: HostTier, interrupted: Interrupted) -> None:
    leases: list[ReadPin | None] = []

    def read(relocation: Relocation) -> None:
        moving = [entry.key for _, entry in relocation._moving]
        if not leases:
            leases.extend(sparse.acquire(moving[:1], touch=False))

    interrupted.meanwhile = read
    assert sparse.write([summed(make_key("large"), make_payload("large", 32 * KIB))]) == [WriteStatus.STORED]
    assert interrupted.num_relocations == 2, "the first slab could not be given back"
    payloads = [make_payload(i, 4 * KIB) for i in WARM]
    assert all(lease is not None and lease.view in payloads for lease in leases)
    assert set(WARM) & set(kept(sparse)) == set(WARM)
    sparse.release(leases)


def test_what_is_discarded_while_it_moves_is_gone(sparse: HostTier, interrupted: Interrupted) -> None:
    gone: list[StoreKey] = []

    def discard(relocation: Relocation) -> None:
        gone.extend(entry.key for _, entry in relocation._moving)
        assert sparse.discard(gone) == len(gone)
        sparse.check()

    interrupted.meanwhile = discard
    assert sparse.write([summed(make_key("large"), make_payload("large", 32 * KIB))]) == [WriteStatus.STORED]
    assert interrupted.num_relocations == 1
    assert gone
    assert sparse.lookup(gone) == [Status.MISS] * len(gone)
    assert sparse.lookup([make_key("large")]) == [Status.HIT]


def test_nothing_is_left_of_a_writer_that_goes_while_its_blocks_move(
    monkeypatch: pytest.MonkeyPatch, interrupted: Interrupted
) -> None:
    """Not the slab either that they were to be moved to, when nobody wants them any more."""
    monkeypatch.setattr("kvtier.tiers.host.slab_sizes._LEAST_PART", 32)
    tier = HostTier(256 * KIB, prefault=False)
    blocks = [make_key(i) for i in range(64)]
    for key in blocks:
        assert put(tier, key, 4 * KIB, 1) is WriteStatus.STORED
    for key in blocks[::2]:
        assert use(tier, key)

    def leave(relocation: Relocation) -> None:
        tier.retire_writer(1)
        tier.discard(blocks)

    interrupted.meanwhile = leave
    assert put(tier, make_key("large"), 32 * KIB) is WriteStatus.STORED
    assert interrupted.num_relocations == 1
    assert tier.usage().num_blocks == 1
    tier.check()
    tier.close()


def test_a_tier_that_is_closed_while_blocks_move(sparse: HostTier, interrupted: Interrupted) -> None:
    interrupted.meanwhile = lambda relocation: sparse._slots.clear()
    sparse._slots.prepare(make_key("large"), 32 * KIB)
    assert interrupted.num_relocations == 1


@shared_memory
def test_what_dead_writers_left_is_moved_to_slabs_that_nobody_maps(interrupted: Interrupted) -> None:
    tier = HostTier(16 * MIB, shared=True)
    left = [make_key(("left", i)) for i in range(220)]
    for key in left:
        slot = tier.prepare(key, 64 * KIB, writer=1)
        assert isinstance(slot, WriteSlot)
        slot.view[:] = payload = make_payload(key, 64 * KIB)
        tier.commit(slot, checksum(key, payload))
    tier.retire_writer(1)
    for key in left[::3]:
        assert use(tier, key)
    for i in range(120):
        assert put(tier, make_key(i), 16 * KIB, writer=2) is WriteStatus.STORED
        tier.check()
    assert interrupted.num_relocations
    warm = left[::3]
    leases = tier.acquire(warm)
    assert all(
        lease is not None and lease.view == make_payload(key, 64 * KIB) for key, lease in zip(warm, leases, strict=True)
    )
    own = [slab for tenant in tier._slots.memory.tenants() for slab in tenant.slabs() if slab.writer == OWN_PROCESS]
    assert own
    assert not any(slab.retired for slab in own)
    tier.release(leases)
    tier.close()


@shared_memory
def test_writers_that_come_and_go_leave_descriptors_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each leaves a block in a slab of its own."""
    monkeypatch.setattr("kvtier.tiers.host.slab_sizes.open_files_limit", lambda: 100)
    tier = HostTier(64 * MIB, shared=True, prefault=False)
    for writer in range(1, 200):
        assert put(tier, make_key(writer), 64, writer=writer) is WriteStatus.STORED
        tier.retire_writer(writer)
    assert sum(1 for tenant in tier._slots.memory.tenants() for _ in tenant.slabs()) <= 26
    assert tier.lookup([make_key(writer) for writer in range(100, 200)]).count(Status.HIT) > 90
    tier.check()
    tier.close()


@shared_memory
def test_slots_that_are_abandoned_are_nobodys_again() -> None:
    tier = HostTier(4 * MIB, shared=True)
    assert put(tier, make_key("kept"), 64 * KIB, writer=1) is WriteStatus.STORED
    slots = [tier.prepare(make_key(i), 64 * KIB, writer=1) for i in range(3)]
    held = [slot for slot in slots if isinstance(slot, WriteSlot)]
    assert len(held) == 3
    tier.abandon(held[:2])
    tier.abandon(held[:2])
    tier.check()
    assert tier.lookup([make_key(i) for i in range(3)]) == [Status.MISS, Status.MISS, Status.PENDING]
    tier.commit(held[2], 0)
    assert tier.lookup([make_key("kept"), make_key(2)]) == [Status.HIT] * 2
    lost = {slot.slot for slot in held[:2]}
    for i in range(10, 200):
        slot = tier.prepare(make_key(i), 64 * KIB, writer=1)
        assert isinstance(slot, WriteSlot)
        assert slot.slot not in lost
        tier.commit(slot, 0)
    tier.check()
    tier.close()


def test_readers_in_every_slab_do_not_have_all_other_blocks_evicted(sparse: HostTier) -> None:
    leases = sparse.acquire([make_key(i) for i in range(0, 64, 8)], touch=False)
    large = [make_key(("large", i)) for i in range(20)]
    assert {put(sparse, key, 32 * KIB) for key in large} == {WriteStatus.FULL}
    assert len(kept(sparse)) >= 40
    assert put(sparse, make_key("small"), 4 * KIB) is WriteStatus.STORED
    sparse.release(leases)
    assert put(sparse, large[0], 32 * KIB) is WriteStatus.STORED


def test_as_many_lengths_as_there_are_slabs() -> None:
    """No lane has two slabs, so none can be emptied into another one."""
    tier = HostTier(4 * MIB, prefault=False)
    for i in range(3000):
        assert put(tier, make_key(i), 1 * KIB + 64 * (i % 1200)) is WriteStatus.STORED
    assert tier.usage().used_bytes > 2 * MIB
    tier.check()
