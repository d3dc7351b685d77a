"""Blocks that a pool lends out of its memory: what is lent, to whom, and whether it still was what it said."""

import contextlib
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import pytest

from kvtier.clock import MONOTONIC
from kvtier.codec.checksums import checksum
from kvtier.errors import InvalidInputError
from kvtier.identity.keys import StoreKey, tenant_id
from kvtier.memory import memfd
from kvtier.memory.mapped_slab import MappedSlab
from kvtier.memory.slab_layout import SharedSlab
from kvtier.metrics import Metrics
from kvtier.testing.contract import make_key, read_blocks
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.common.per_tenant import PerTenant
from kvtier.tiers.lease import Lease, LeasingTier, SlotRef
from kvtier.tiers.pool.local_transport import LocalTransport
from kvtier.tiers.pool.shared_memory import link as memory_link
from kvtier.tiers.pool.shared_memory.link import MemoryLink
from kvtier.tiers.pool.shared_memory.session import Session
from kvtier.tiers.pool.tier import PoolTier
from kvtier_pool.limits import PoolLimits
from pool_rig import (
    BLOCK_BYTES,
    BLUE,
    MIB,
    RED,
    WAIT_S,
    connect,
    held_bytes,
    items,
    keys,
    payloads,
    running_pool,
    until,
)

pytestmark = pytest.mark.skipif(not memfd.available(), reason="shared memory needs Linux")
KEYS, PAYLOADS = keys(range(16)), payloads(range(16))


class Everything(set[int]):
    """Says of any slab that it is mapped."""

    def __contains__(self, serial: object) -> bool:
        return True


ALL = Everything([0])


LARGE = 512 * MIB
"""Memory of which a slab has several blocks. Hardly any of it is taken."""


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with running_pool(LARGE, listen=(f"unix:{tmp_path}/pool.sock", "127.0.0.1:0")) as pool:
        yield ",".join(pool.block)


@contextlib.contextmanager
def tier_at(address: str, tenant: str = "red", *, metrics: Metrics | None = None) -> Iterator[PoolTier]:
    tier = connect(address, tenant, shared_memory=True, metrics=metrics)
    with contextlib.closing(tier):
        yield tier


def are_leased(lease: Lease) -> list[bool]:
    """Ends the loan."""
    lease.release()
    return [place is not None for place in lease.places]


def lease_from(
    tier: LeasingTier, keys: Sequence[StoreKey], ready: Collection[int] = ALL, nbytes: int = BLOCK_BYTES
) -> Lease:
    lease = tier.lease(keys, nbytes, ready)
    assert lease is not None
    return lease


class Borrower:
    """Maps what it is offered."""

    def __init__(self, tier: PoolTier) -> None:
        self.tier = tier
        self.slabs: dict[int, MappedSlab] = {}

    def borrow(self, keys: Sequence[StoreKey]) -> Lease:
        read_blocks(self.tier, keys, BLOCK_BYTES)
        offered = lease_from(self.tier, keys, self.slabs)
        for serial, slab in offered.not_ready.items():
            shared = slab.share(WAIT_S)
            assert shared is not None
            assert not shared.writable
            self.slabs[serial] = MappedSlab.map(shared)
        offered.release()
        return lease_from(self.tier, keys, self.slabs)

    def bytes_of(self, place: SlotRef | None) -> bytes | None:
        return bytes(self.slabs[place.serial].rows[place.slot][:BLOCK_BYTES]) if place is not None else None

    def are_in_place(self, lease: Lease) -> list[bool]:
        """By their generations alone."""
        return [
            place is not None and self.slabs[place.serial].generation(place.slot) == place.generation
            for place in lease.places
        ]


def test_places_are_of_slabs_that_are_ready(address: str) -> None:
    metrics = Metrics()
    with tier_at(address) as writer, tier_at(address, metrics=metrics) as reader:
        writer.write(items(range(16)))
        absent = make_key("absent")
        first = lease_from(reader, [*KEYS, absent], ready=())
        assert (first.places, first.not_ready) == ([None] * 17, {}), "of what it has read from nothing yet"
        first.release()
        read_blocks(reader, KEYS[:1], BLOCK_BYTES)
        first = lease_from(reader, [*KEYS, absent], ready=())
        assert first.places == [None] * 17
        assert len(first.not_ready) == 1
        first.release()
        direct_reads = Borrower(reader)
        lease = direct_reads.borrow([*KEYS, absent])
        assert not lease.not_ready
        assert [direct_reads.bytes_of(place) for place in lease.places] == [*PAYLOADS, None]
        assert not any(slab.rows.flags.writeable for slab in direct_reads.slabs.values())
        assert direct_reads.are_in_place(lease) == [True] * 16 + [False]
        lease.release()
        moved = metrics.registry.get_sample_value("kvtier_path_bytes_total", {"path": "shm", "op": "read"})
        assert moved == (1 + 16 + 16) * BLOCK_BYTES, "what was lent counts like what was read, and once"


def test_what_is_lent_is_held_until_it_is_released(tmp_path: Path) -> None:
    with (
        running_pool(32 * MIB, listen=(f"unix:{tmp_path}/pool.sock",)) as pool,
        tier_at(pool.block[0]) as tier,
    ):
        tier.write(items(range(16)))
        lease = lease_from(tier, KEYS)
        assert held_bytes(pool) == 16 * BLOCK_BYTES
        lease.release()
        until(lambda: held_bytes(pool) == 0)


def test_a_block_of_another_length_is_not_lent(address: str) -> None:
    with tier_at(address) as tier:
        tier.write(items(range(2)))
        for nbytes in (BLOCK_BYTES // 2, 2 * BLOCK_BYTES):
            assert lease_from(tier, KEYS[:2], nbytes=nbytes).places == [None, None]


def test_a_broken_block_is_not_lent_and_who_reads_it_has_it_dropped(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer goes on writing to a slot that it has committed."""
    written: list[MappedSlab] = []
    map_slab = memory_link._map
    monkeypatch.setattr(memory_link, "_map", lambda shared: written.append(map_slab(shared)) or written[-1])
    metrics = Metrics()
    with tier_at(address) as writer, tier_at(address, metrics=metrics) as reader:
        writer.write(items(range(4)))
        (slab,) = written
        assert slab.writable
        place = next(i for i in range(slab.num_slots) if bytes(slab.slot(i, BLOCK_BYTES)) == PAYLOADS[2])
        slab.slot(place, BLOCK_BYTES)[BLOCK_BYTES - 1] ^= 1
        lease = lease_from(reader, KEYS[:4])
        assert are_leased(lease) == [True, True, False, True]
        unseen = reader.lease(KEYS[:4], BLOCK_BYTES, ALL, verified=False)
        assert unseen is not None
        sums = [checksum(key, payload) for key, payload in zip(KEYS[:4], PAYLOADS, strict=False)]
        assert [place.checksum for place in unseen.places if place is not None] == sums, "for the borrower to compare"
        unseen.release()
        assert read_blocks(reader, KEYS[2:3], BLOCK_BYTES) == [None]
        assert metrics.registry.get_sample_value("kvtier_corrupt_blocks_total", {"tier": "pool"}) == 1


@pytest.mark.parametrize("is_over", [True, False], ids=["lease over", "lease runs"])
def test_a_block_that_went_meanwhile(is_over: bool, tmp_path: Path) -> None:
    """While it is held its slot is not given away. Once the lease is over it counts no more, gone or not."""
    limits = PoolLimits(lease_s=0.1 if is_over else 60.0, max_held_bytes=8 * MIB)
    listen = (f"unix:{tmp_path}/pool.sock",)
    with running_pool(8 * MIB, listen=listen, limits=limits) as pool, tier_at(pool.block[0]) as tier:
        tier.write(items(range(8)))
        direct_reads = Borrower(tier)
        lease = direct_reads.borrow(KEYS[:8])
        assert None not in lease.places
        if is_over:
            until(lambda: held_bytes(pool) == 0)
        tier.discard(KEYS[:8])
        tier.write(items(range(100, 260)))
        found = [direct_reads.bytes_of(place) for place in lease.places]
        assert (found == PAYLOADS[:8]) == (not is_over)
        assert all(direct_reads.are_in_place(lease)) == (not is_over)
        assert (MONOTONIC() < lease.held_until_s) == (not is_over)
        lease.release()


def test_blocks_that_were_given_away_because_the_connection_broke(tmp_path: Path) -> None:
    """The lease would run on for long, but the pool has heard that nobody holds it."""
    limits = PoolLimits(lease_s=60.0, max_held_bytes=8 * MIB)
    with (
        running_pool(8 * MIB, listen=(f"unix:{tmp_path}/pool.sock",), limits=limits) as pool,
        tier_at(pool.block[0]) as tier,
        tier_at(pool.block[0]) as other,
    ):
        other.write(items(range(8)))
        direct_reads = Borrower(tier)
        lease = direct_reads.borrow(KEYS[:8])
        assert isinstance(tier._transport, LocalTransport)
        tier._transport.memory._reads.session_by(time.monotonic() + WAIT_S).end()
        until(lambda: held_bytes(pool) == 0)
        other.discard(KEYS[:8])
        other.write(items(range(100, 260)))
        assert [direct_reads.bytes_of(place) for place in lease.places] != PAYLOADS[:8]
        whole = direct_reads.are_in_place(lease)
        lease.release()
        assert not all(whole)
        for is_whole, place, payload in zip(whole, lease.places, PAYLOADS, strict=False):
            assert not is_whole or direct_reads.bytes_of(place) == payload


def test_threads_that_map_a_slab_at_once_have_it_as_one(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine would map it twice, and pin it twice, and have one of the two for nothing."""
    map_slab, meanwhile = memory_link._map, list[Lease]()

    def slowly(shared: SharedSlab) -> MappedSlab:
        monkeypatch.setattr(memory_link, "_map", map_slab)
        meanwhile.append(lease_from(tier, KEYS[:4]))
        return map_slab(shared)

    with tier_at(address) as tier:
        tier.write(items(range(4)))
        monkeypatch.setattr(memory_link, "_map", slowly)
        lease = lease_from(tier, KEYS[:4])
        assert None not in lease.places
        assert lease.places == meanwhile[0].places
        assert are_leased(lease) == are_leased(meanwhile[0]) == [True] * 4


def test_a_slab_that_is_mapped_when_its_connection_has_ended(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that was killed has not said of its memory that it is in use no more."""
    fetch = MemoryLink.fetch

    def late(link: MemoryLink, session: Session, number: int, deadline: float) -> SharedSlab | None:
        fetched = fetch(link, session, number, deadline)
        session.end()
        assert session.watcher is not None
        session.watcher.join()  # it ends the session once more
        return fetched

    with tier_at(address) as tier:
        tier.write(items(range(4)))
        monkeypatch.setattr(MemoryLink, "fetch", late)
        slabs = list(lease_from(tier, KEYS[:4], ready=[0]).not_ready.values())
        assert [slab.has_ended for slab in slabs] == [True]
        assert [slab.share(WAIT_S) for slab in slabs] == [None]


def test_tenants_never_meet(address: str) -> None:
    blue_keys = keys(range(4), tenant=BLUE)
    with tier_at(address) as red, tier_at(address, "blue") as blue:
        red.write(items(range(4)))
        assert lease_from(blue, blue_keys).places == [None] * 4
        with pytest.raises(InvalidInputError, match="another tenant"):
            blue.lease(KEYS[:4], BLOCK_BYTES, ALL)
        both = PerTenant("pool", {RED: red, BLUE: blue})
        assert are_leased(lease_from(both, KEYS[:4])) == [True] * 4
        assert both.lease([KEYS[0], blue_keys[0]], BLOCK_BYTES, ALL) is None, "read, each from its own"
        with pytest.raises(InvalidInputError, match="not connected for"):
            both.lease(keys([1], tenant=tenant_id("green")), BLOCK_BYTES, ALL)


def test_over_a_network_nothing_is_lent(address: str) -> None:
    with contextlib.closing(connect(address.split(",")[1])) as tier:
        tier.write(items(range(2)))
        assert tier.lease(KEYS[:2], BLOCK_BYTES, ALL) is None
    with contextlib.closing(connect(address, shared_memory=False)) as tier:
        assert tier.lease(KEYS[:2], BLOCK_BYTES, ALL) is None


def test_a_large_batch_is_not_lent_to_its_end(tmp_path: Path) -> None:
    """Others can hold blocks, too."""
    limits = PoolLimits(max_held_bytes=32 * BLOCK_BYTES)
    listen = (f"unix:{tmp_path}/pool.sock",)
    with running_pool(32 * MIB, listen=listen, limits=limits) as pool, tier_at(pool.block[0]) as tier:
        tier.write(items(range(16)))
        assert are_leased(lease_from(tier, KEYS)) == [True] * 8 + [False] * 8


def test_a_pool_that_cannot_be_reached_lends_nothing(tmp_path: Path) -> None:
    with tier_at(f"unix:{tmp_path}/nobody.sock") as tier:
        assert tier.lease(KEYS, BLOCK_BYTES, ALL) is None


def test_a_loan_outlives_its_pool_and_its_tier(tmp_path: Path) -> None:
    listen = (f"unix:{tmp_path}/pool.sock",)
    with running_pool(LARGE, listen=listen) as pool, tier_at(pool.block[0]) as tier:
        tier.write(items(range(4)))
        first, second = lease_from(tier, KEYS[:4]), lease_from(tier, KEYS[:4])
        slabs = lease_from(tier, KEYS[:4], ready=()).not_ready
        assert [slab.has_ended for slab in slabs.values()] == [False]
        tier.close()
        first.release()
        assert [slab.has_ended for slab in slabs.values()] == [True]
        assert [slab.share(WAIT_S) for slab in slabs.values()] == [None]
    second.release()


def test_a_pool_that_is_left_alone_is_asked_to_lend_nothing(address: str) -> None:
    breaker = CircuitBreaker(1, 1000.0)
    tier = connect(address, shared_memory=True, breaker=breaker)
    with contextlib.closing(tier):
        tier.write(items(range(4)))
        assert tier.lease(KEYS[:4], BLOCK_BYTES, ALL) is not None
        breaker.failure()
        assert tier.lease(KEYS[:4], BLOCK_BYTES, ALL) is None
