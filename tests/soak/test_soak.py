"""Ten seconds of `make soak`, and that it would find something."""

import random
from pathlib import Path

from kvtier.identity.keys import tenant_id
from kvtier.testing.blocks import make_key, summed
from kvtier.tiers.host.tier import HostTier
from pool_rig import MIB
from soak_client import Client, ClientPlan, Counts, payload_of, size_of
from soak_processes import Sample
from soak_rig import Faults, Soak


def test_a_short_soak_finds_nothing(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    soak = Soak(tmp_path, seed=seed, seconds=10.0)
    stormy = Faults(kill_client_s=1.5, stop_client_s=1.5, kill_pool_s=3.0, restart_pool_s=5.0)
    report = soak.run(stormy, Faults(kill_client_s=2.0, stop_client_s=2.0), print)
    assert report.problems == []
    assert {kind for _, kind in report.faults} == {"kill_client", "stop_client", "kill_pool", "restart_pool"}


def test_wrong_bytes_are_noticed() -> None:
    plan = ClientPlan(address="", shared_memory=False, tenant="red", token="", seed=0, num_labels=4, log="")
    tier, counts = HostTier(8 * MIB), Counts()
    right, torn, foreign = [make_key(label, tenant=tenant_id("red")) for label in range(3)]
    payload = bytearray(payload_of("red", 1))
    payload[len(payload) // 2] ^= 1
    tier.write(
        [summed(right, payload_of("red", 0)), summed(torn, bytes(payload)), summed(foreign, payload_of("blue", 2))]
    )
    Client(plan, tier, 0, counts).read([0, 1, 2, 3])
    assert counts.now() == {"read_hit": 3, "read_miss": 1, "mismatched": 2}
    assert size_of(1) == len(payload)
    tier.close()


def test_growth_is_noticed(tmp_path: Path) -> None:
    soak = Soak(tmp_path, seed=0, seconds=100.0)
    soak.report.samples = [
        Sample(pool=0, at_s=at, memory_bytes=int(100 + at) * MIB, slab_bytes=0, descriptors=10, threads=int(at))
        for at in range(100)
    ]
    soak.look_at_growth(calm_from_s=50.0)
    assert [problem.split(" grew")[0] for problem in soak.report.problems] == ["threads"]
    soak.report.samples = [
        Sample(pool=0, at_s=at, memory_bytes=int(at) * 10 * MIB, slab_bytes=0, descriptors=10, threads=9)
        for at in range(100)
    ]
    soak.look_at_growth(calm_from_s=50.0)
    assert len(soak.report.problems) == 2
    soak.report.samples = [
        Sample(pool=0, at_s=at, memory_bytes=MIB, slab_bytes=0, descriptors=60 if at == 90 else 10, threads=9)
        for at in range(100)
    ]
    soak.look_at_growth(calm_from_s=50.0)
    assert len(soak.report.problems) == 2, "a burst is no growth"
