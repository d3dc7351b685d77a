"""An engine's disk with an admission: what is offered to it when, and how often."""

from collections.abc import Iterator

import pytest

from hierarchy_rig import BLOCK_BYTES, NAMESPACE, TENANT, Rig, chain, until
from kvtier.identity.keys import BlockKey, rank_keys, tenant_id
from kvtier.offload import Block, DirectorySettings, InventoryLog
from kvtier.offload.index import BlockIndex
from kvtier.offload.messages import Inventory
from kvtier.policies.admission_text import parse_admission
from kvtier.tiers.base import Status
from kvtier.tiers.common.write_policy import WritePolicy
from kvtier.tiers.host.tier import HostTier

DISK_BYTES = 2**22


class Engine:
    """An engine with a disk that has this admission."""

    def __init__(self, admission: str, policy: WritePolicy = WritePolicy.WRITE_THROUGH, pool: HostTier | None = None):
        inventory = InventoryLog([TENANT], NAMESPACE)
        self.disk = HostTier(DISK_BYTES, slab_bytes=2**16, name="disk", on_event=inventory.on_event)
        settings = DirectorySettings(
            tier_policies={"disk": policy},
            tier_admissions={"disk": parse_admission(admission, DISK_BYTES)},
            block_bytes=BLOCK_BYTES,
        )
        self.rig = Rig(pool, local=self.disk, inventory=inventory, settings=settings)

    def full(self, blocks: list[Block]) -> None:
        self.rig.hierarchy.save_full(blocks)
        self.rig.settle()

    def on_disk(self, keys: list[BlockKey]) -> list[bool]:
        return [status is Status.HIT for status in self.disk.lookup(rank_keys(keys, NAMESPACE))]

    def declined(self, condition: str) -> float:
        return self.rig.counter("tier_declined_blocks", tier="disk", condition=condition)

    def close(self) -> None:
        self.rig.close()
        self.disk.close()


@pytest.fixture
def pool() -> Iterator[HostTier]:
    tier = HostTier(DISK_BYTES, slab_bytes=2**16, name="pool")
    yield tier
    tier.close()


def placed(keys: list[BlockKey], first_slot: int = 0) -> list[Block]:
    return [(key, first_slot + i) for i, key in enumerate(keys)]


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
def test_the_second_use_lands_on_disk(policy: WritePolicy) -> None:
    engine, keys = Engine("second-use", policy), chain(6)
    engine.full(placed(keys))
    assert engine.on_disk(keys) == [False] * 6
    assert engine.declined("second-use") == 6
    engine.rig.load(keys[:2], [10, 11])
    engine.rig.hierarchy.note_hits(placed(keys[2:3], 2))
    engine.rig.settle()
    engine.rig.close()
    assert engine.on_disk(keys) == [True] * 3 + [False] * 3
    engine.disk.close()
    assert engine.declined("second-use") == 6
    assert engine.rig.counter("evicted_unwritten", tier="disk") == 0


def test_a_hit_on_the_device_and_one_in_host_memory_are_uses() -> None:
    engine, keys = Engine("frequency:3"), chain(3)
    engine.full(placed(keys))
    for _ in range(2):
        assert engine.on_disk(keys) == [False] * 3
        engine.rig.load(keys[:1], [10])
        engine.rig.hierarchy.note_hits(placed(keys[1:2], 1))
        engine.rig.settle()
    assert engine.on_disk(keys) == [True, True, False]
    engine.close()


def test_a_load_from_the_pool_is_one_use(pool: HostTier) -> None:
    keys = chain(4)
    writer = Rig(pool)
    writer.hierarchy.save_full(placed(keys))
    writer.settle()
    writer.close()
    engine = Engine("second-use", pool=pool)
    assert engine.rig.load(keys, range(4)).tiers == ("pool",) * 4
    engine.rig.settle()
    assert engine.on_disk(keys) == [False] * 4
    assert engine.declined("second-use") == 4
    assert engine.rig.load(keys[:2], range(2)).tiers == ("host",) * 2
    engine.rig.settle()
    assert engine.on_disk(keys) == [True, True, False, False]
    engine.close()


def test_blocks_of_one_batch_are_a_run() -> None:
    engine, keys, others = Engine("min-run:4"), chain(5), chain(3, seed=1)
    engine.full(placed(keys))
    engine.full(placed(others, 5))
    assert (engine.on_disk(keys), engine.on_disk(others)) == ([True] * 5, [False] * 3)
    engine.close()


def test_a_tenants_share_is_what_the_disk_has_of_it() -> None:
    engine = Engine(f"tenant-share:{10 * BLOCK_BYTES / DISK_BYTES}")
    for seed in range(4):
        engine.full(placed(chain(4, seed=seed)))
        until(lambda: engine.rig.hierarchy.poll() or True)
    assert sum(sum(engine.on_disk(chain(4, seed=seed))) for seed in range(4)) == 10
    assert engine.declined("tenant-share") == 6
    engine.close()


def test_a_forgotten_block_is_offered_no_more() -> None:
    engine, keys = Engine("second-use"), chain(4)
    engine.full(placed(keys))
    engine.rig.hierarchy.reset()
    engine.rig.hierarchy.note_hits(placed(keys))
    engine.rig.settle()
    assert engine.on_disk(keys) == [False] * 4
    assert engine.declined("second-use") == 4
    engine.close()


def test_an_index_counts_the_first_ranks_blocks_of_each_tenant() -> None:
    index = BlockIndex(4, 2, ["disk"], lambda key: None)
    red, blue = tenant_id("red"), tenant_id("blue")
    of_red, of_blue = ([tenant + bytes([i]) * 32 for i in range(4)] for tenant in (red, blue))

    def apply(rank: int, added: list[bytes], removed: list[bytes], *, cleared: bool = False) -> tuple[int, int]:
        index.apply(rank, Inventory("disk", cleared, added, removed))
        return index.num_blocks_of(red, "disk"), index.num_blocks_of(blue, "disk")

    assert apply(0, [*of_red, *of_blue[:2]], []) == (4, 2)
    assert apply(1, of_red, []) == (4, 2), "another rank's"
    assert apply(0, of_red[:2], [of_blue[0], of_blue[3]]) == (4, 1), "known already, or never there"
    assert apply(0, of_blue[:3], [], cleared=True) == (0, 3)
