"""What a tier process has lent to its engine, and which slabs the engine is told of."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.clock import MONOTONIC
from kvtier.codec.checksums import checksum
from kvtier.memory import memfd
from kvtier.memory.mapped_slab import MappedSlab
from kvtier.testing.contract import make_key, read_blocks
from kvtier.tiers.host.tier import HostTier
from kvtier.tiers.pool.tier import PoolTier
from kvtier.tiers.sidecar.lease_table import NO_LEASE, LeaseTable
from kvtier.tiers.sidecar.messages import NO_SLAB, unpack_numbers
from kvtier_pool.limits import PoolLimits
from kvtier_pool.service import Addresses
from pool_rig import (
    BLOCK_BYTES,
    MIB,
    connect,
    held_bytes,
    items,
    keys,
    payloads,
    running_pool,
    until,
)

pytestmark = pytest.mark.skipif(not memfd.available(), reason="shared memory needs Linux")
KEYS, PAYLOADS = keys(range(4)), payloads(range(4))


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[PoolTier]:
    with running_pool(512 * MIB, listen=(f"unix:{tmp_path}/pool.sock",)) as pool, filled(pool) as tier:
        yield tier


@contextlib.contextmanager
def filled(pool: Addresses) -> Iterator[PoolTier]:
    """A client of the pool, which has written blocks and read them, so that it has mapped them."""
    with contextlib.closing(connect(pool.block[0], shared_memory=True)) as tier:
        tier.write(items(range(4)))
        assert read_blocks(tier, KEYS, BLOCK_BYTES) == PAYLOADS
        yield tier


def test_slabs_are_ready_once_the_engine_says_so(tier: PoolTier) -> None:
    desk = LeaseTable()
    answer = desk.lease(tier, KEYS, BLOCK_BYTES)
    assert answer["lease"] == NO_LEASE
    (serial,) = unpack_numbers(answer["not_ready"])
    shared = desk.share(serial)
    assert shared is not None
    slab = MappedSlab.map(shared)
    assert desk.lease(tier, KEYS, BLOCK_BYTES)["lease"] == NO_LEASE, "not told yet"
    assert desk.note_mapped([serial, serial + 1]) == [serial + 1], "never heard of"
    answer = desk.lease(tier, [*KEYS, make_key("absent")], BLOCK_BYTES)
    assert unpack_numbers(answer["serials"]) == [serial] * 4 + [NO_SLAB]
    slots = unpack_numbers(answer["slots"])[:4]
    assert [bytes(slab.rows[slot][:BLOCK_BYTES]) for slot in slots] == PAYLOADS
    assert unpack_numbers(answer["generations"])[:4] == [slab.generation(slot) for slot in slots]
    checksums = [checksum(key, payload) for key, payload in zip(KEYS, PAYLOADS, strict=True)]
    assert unpack_numbers(answer["checksums"])[:4] == checksums
    assert 0 < answer["held_until_ms"] / 1000 - MONOTONIC() < PoolLimits().lease_s
    desk.release([answer["lease"]])
    desk.release([answer["lease"], NO_LEASE])
    tier.close()
    assert desk.note_mapped([serial]) == [serial]
    assert desk.share(serial) is None


def test_a_slab_that_the_engine_gave_up_is_not_ready(tier: PoolTier) -> None:
    desk = LeaseTable()
    (serial,) = unpack_numbers(desk.lease(tier, KEYS, BLOCK_BYTES)["not_ready"])
    desk.note_mapped([serial])
    desk.note_mapped([])
    assert desk.lease(tier, KEYS, BLOCK_BYTES)["lease"] == NO_LEASE


def test_a_loan_of_the_process_before_is_none_of_this_one(tmp_path: Path) -> None:
    """The engine still tells of its end; another thread's loan here goes on."""
    leases: list[int] = []
    listen = (f"unix:{tmp_path}/pool.sock",)
    with running_pool(512 * MIB, listen=listen) as pool, filled(pool) as tier:
        for desk in (LeaseTable(), LeaseTable()):
            desk.note_mapped(unpack_numbers(desk.lease(tier, KEYS, BLOCK_BYTES)["not_ready"]))
            leases.append(desk.lease(tier, KEYS, BLOCK_BYTES)["lease"])
        assert NO_LEASE not in leases
        assert leases[0] != leases[1]
        desk.release(leases[:1])
        assert held_bytes(pool) == 2 * 4 * BLOCK_BYTES
        desk.release(leases)
        until(lambda: held_bytes(pool) == 4 * BLOCK_BYTES)


def test_a_tier_that_does_not_lend() -> None:
    tier = HostTier(MIB, slab_bytes=64 * 1024)
    assert LeaseTable().lease(tier, KEYS, BLOCK_BYTES)["lease"] == NO_LEASE
    tier.close()
