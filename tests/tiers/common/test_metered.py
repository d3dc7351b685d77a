"""What the metering decorator counts, and what a tier's trouble does to counters and log."""

import logging

import pytest

from kvtier.metrics import Metrics
from kvtier.system.quiet_log import QuietLog
from kvtier.testing.contract import MakeTier, TierContract, make_key, summed
from kvtier.tiers.common.metered import Metered
from kvtier.tiers.host.tier import HostTier


class TestMeteredHost(TierContract):
    verifies = False

    @pytest.fixture
    def make_tier(self) -> MakeTier:
        return lambda capacity_bytes: Metered(HostTier(capacity_bytes), Metrics())


def test_blocks_bytes_and_batches_are_counted_by_answer() -> None:
    metrics = Metrics()
    tier = Metered(HostTier(2**20, name="memory"), metrics)
    a, b, c = (make_key(label) for label in "abc")
    tier.write([summed(a, bytes(100)), summed(b, bytes(200))])
    tier.write([summed(a, bytes(100)), summed(c, bytes(2**21))])
    tier.read([a, b, c], [memoryview(bytearray(100)), memoryview(bytearray(999)), memoryview(bytearray(1))])
    tier.lookup([a, c, c])
    tier.discard([a, c])

    def blocks(op: str, status: str) -> float | None:
        labels = {"tier": "memory", "op": op, "status": status}
        return metrics.registry.get_sample_value("kvtier_tier_blocks_total", labels)

    assert [blocks("write", s) for s in ("stored", "exists", "full", "failed")] == [2, 1, 1, 0]
    assert [blocks("read", s) for s in ("hit", "miss")] == [1, 2]
    assert [blocks("lookup", s) for s in ("hit", "miss", "pending")] == [1, 2, 0]
    assert blocks("discard", "hit") == 1
    for op, nbytes, num_batches in (("write", 300, 2), ("read", 100, 1)):
        labels = {"tier": "memory", "op": op}
        assert metrics.registry.get_sample_value("kvtier_tier_bytes_total", labels) == nbytes
        assert metrics.registry.get_sample_value("kvtier_tier_batch_seconds_count", labels) == num_batches


def test_two_metrics_share_nothing() -> None:
    one, other = Metrics(), Metrics()
    one.corrupt_blocks.labels("disk").inc()
    assert one.registry.get_sample_value("kvtier_corrupt_blocks_total", {"tier": "disk"}) == 1
    assert other.registry.get_sample_value("kvtier_corrupt_blocks_total", {"tier": "disk"}) is None


def test_a_quiet_log_says_what_it_held_back(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    log = QuietLog(logging.getLogger("quiet"), interval_s=30, clock=lambda: now)
    for i in range(5):
        log.warning(f"line {i}")
    now = 130.0
    log.warning("later")
    now = 160.0
    log.warning("last")
    assert caplog.messages == ["line 0", "later (4 more since the last line)", "last"]
