"""What `kvtier stats` makes of the figures of engines and pools."""

import io

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

from kvtier.cli.stats.facts import facts_of
from kvtier.cli.stats.report import print_report
from kvtier.cli.stats.requested import ENGINE, POOL, SGLANG, VLLM
from kvtier.cli.stats.samples import Samples, parse
from kvtier.device.kv import MemoryUse
from kvtier.errors import ClosedError
from kvtier.events import TierState
from kvtier.metrics import Metrics
from kvtier.offload import HierarchyMetrics
from kvtier.store.metrics import StoreMetrics
from kvtier.tiers.base import Usage
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.common.gauges import MemoryGauges, RankMemory
from kvtier_engine.scheduling.completion import Completion
from kvtier_engine.scheduling.compute_times import Computed
from kvtier_engine.scheduling.metrics import EngineMetrics

MIB = 1 << 20


def page_of(registry: CollectorRegistry) -> Samples:
    return parse(generate_latest(registry).decode(), source="a test")


def test_an_engine() -> None:
    registry = CollectorRegistry()
    engine, tiers = EngineMetrics(registry), Metrics(registry)
    hierarchy = HierarchyMetrics(tiers)
    engine.prompt_tokens.inc(1000)
    engine.cached_tokens.labels("device").inc(300)
    engine.cached_tokens.labels("pool").inc(450)
    engine.ttft_seconds.observe(0.1)
    engine.ttft_seconds.observe(0.3)
    engine.cold_ttft_seconds.observe(0.3)
    engine.book(Computed((150, 50, 1), 0.201, is_pure=True))
    engine.book(Computed((900,), 99.0, is_pure=False))
    tiers.tier_blocks.labels("pool", "lookup", "hit").inc(30)
    tiers.tier_blocks.labels("pool", "lookup", "miss").inc(10)
    tiers.tier_blocks.labels("pool", "read", "hit").inc(28)
    tiers.tier_blocks.labels("pool", "read", "miss").inc(2)
    tiers.tier_bytes.labels("pool", "read").inc(2e9)
    tiers.tier_batch_seconds.labels("pool", "read").observe(0.5)
    tiers.path_bytes.labels("shm", "read").inc(2e9)
    tiers.io_errors.labels("pool", "read", "BreakerOpen").inc(3)
    tiers.corrupt_blocks.labels("disk").inc()
    tiers.pins.labels("pool", "not_offered").inc(5)
    tiers.set_state("disk", TierState.READ_ONLY)
    hierarchy.device_evictions.labels("clean").inc(7)
    tiers.levels.watch_usage("disk", lambda: Usage(3, 30, 100))
    MemoryGauges(registry, lambda: RankMemory(4 * MIB, 2 * MIB, MemoryUse(MIB, 6 * MIB, 0.5)))
    facts = facts_of(page_of(registry))
    assert facts is not None
    assert (facts.kind, facts.hit_rate.share) == (ENGINE, 0.75)
    first, saved = facts.first_token, facts.saved
    assert (first.all_s, first.cold_s, first.hit_s) == (pytest.approx(0.2), pytest.approx(0.3), pytest.approx(0.1))
    assert saved is not None
    assert (saved.tokens, saved.seconds) == (750, pytest.approx(750 * 0.2 / 200))
    pool, disk = facts.tiers["pool"], facts.tiers["disk"]
    assert (pool.looked_up, pool.found, disk.looked_up) == (40, 30, None)
    assert (pool.read_hits, pool.read_misses, pool.read_bytes_per_s) == (28, 2, 4e9)
    assert (pool.errors, pool.used_bytes) == ({"read BreakerOpen": 3}, None)
    assert (disk.held_blocks, disk.used_bytes, disk.capacity_bytes) == (3, 30, 100)
    assert (pool.state, disk.state) == (None, "read_only")
    assert facts.paths["shm"].bytes_by_op == {"read": 2e9}
    assert facts.device_evictions == {"clean": 7}
    assert facts.memory_bytes == {"arena": 4 * MIB, "leased": 2 * MIB, "pinned": 6 * MIB, "staging": MIB}
    assert (facts.pinned, facts.pins) == (None, {"not_offered": 5})
    assert facts.trouble == {"blocks of disk found damaged; each was a miss": 1}


def test_a_completion_counts() -> None:
    """What the engine counts is what is read here."""
    registry = CollectorRegistry()
    EngineMetrics(registry).count(
        Completion(
            token_ids=(1, 2), finish_reason="length", num_prompt_tokens=10, cached_by_tier={"host": 4}, ttft_s=0.5
        ),
        num_answer_tokens=2,
    )
    facts = facts_of(page_of(registry))
    assert facts is not None
    assert facts.hit_rate.by_tier == {"host": 4}
    assert (facts.first_token.hit_s, facts.first_token.cold_s) == (0.5, None)
    assert facts.requests == {"length": 1}


def test_a_pool_counts_what_was_looked_up_and_missed() -> None:
    """Engines do not read what they did not find: reads alone would always hit. And each tier's figures agree."""
    registry = CollectorRegistry()
    StoreMetrics(registry).count_looked_up({"memory": 60, "disk": 10}, 100)
    tiers = Metrics(registry)
    for tier in ("memory", "disk"):
        tiers.set_state(tier, TierState.WRITABLE)
    tiers.disk_bytes.labels("disk", "new").inc(59_351_040)
    tiers.levels.watch_breaker("redis", CircuitBreaker(1, 1.0))
    tiers.io_errors.labels("redis", "read", "BreakerOpen").inc()
    facts = facts_of(page_of(registry))
    assert facts is not None
    assert (facts.kind, facts.hit_rate.way, facts.hit_rate.asked, facts.hit_rate.share) == (POOL, "looked up", 100, 0.7)
    assert facts.hit_rate.by_tier == {"memory": 60, "disk": 10}
    assert (facts.tiers["memory"].found, facts.tiers["memory"].looked_up) == (60, 100), "each lookup begins there"
    assert list(facts.tiers) == ["memory", "disk", "redis"]
    assert (facts.tiers["disk"].bytes_written, facts.tiers["redis"].bytes_written) == (59_351_040, None)
    assert (facts.tiers["redis"].open_breakers, facts.tiers["disk"].open_breakers) == (0, None)


VLLM_PAGE = """
vllm:num_requests_running{engine="0"} 2.0
vllm:prompt_tokens_total{engine="0"} 1000.0
vllm:prompt_tokens_cached_by_source_total{engine="0",source="device"} 100.0
vllm:prompt_tokens_cached_by_source_total{engine="0",source="external_unspecified"} 300.0
vllm:time_to_first_token_seconds_sum{engine="0"} 4.0
vllm:time_to_first_token_seconds_count{engine="0"} 8.0
vllm:request_prefill_time_seconds_sum{engine="0"} 3.0
vllm:kvtier_loaded_blocks_total{engine="0",tier="pool"} 18.0
vllm:kvtier_failed_blocks_total{engine="0"} 1.0
vllm:kvtier_memory_bytes{engine="0",kind="arena"} 1048576.0
vllm:kvtier_tier_blocks_total{engine="0",op="lookup",status="hit"} 6.0
vllm:kvtier_tier_blocks_total{engine="0",op="lookup",status="miss"} 2.0
vllm:kvtier_tier_io_errors_total{engine="0",op="read",error="BreakerOpen"} 4.0
"""
SGLANG_PAGE = """
sglang:num_queue_reqs 3.0
sglang:prompt_tokens_total 1000.0
sglang:cached_tokens_total{cache_source="storage"} 250.0
kvtier_sglang_pages_total{op="read",pool="kv",status="hit"} 16.0
"""


def test_vllm_and_sglang_are_engines() -> None:
    """What they do not tell is not told here, either: it is not 0."""
    facts = facts_of(parse(VLLM_PAGE, source="a test"))
    assert facts is not None
    assert (facts.kind, facts.hit_rate.share, facts.hit_rate.by_tier) == (VLLM, 0.4, {"device": 100, "pool": 300})
    assert (facts.first_token.all_s, facts.first_token.cold_s) == (0.5, None)
    assert facts.saved is not None
    assert (facts.saved.tokens, facts.saved.seconds) == (400, 2.0)
    assert facts.waiting == {"requests running": 2}
    assert facts.memory_bytes == {"arena": MIB}
    pool = facts.tiers["pool"]
    assert (pool.looked_up, pool.found, pool.read_hits, pool.errors) == (8, 6, 18, {"read BreakerOpen": 4})
    assert facts.trouble == {"blocks offered that could not be loaded, and were computed": 1}
    printed = io.StringIO()
    print_report(Console(file=printed), "somewhere", facts)
    assert "Saved: 400 tokens were not computed, about 2,000 ms of computing." in printed.getvalue()
    facts = facts_of(parse(SGLANG_PAGE, source="a test"))
    assert facts is not None
    assert (facts.kind, facts.hit_rate.share, facts.hit_rate.by_tier) == (SGLANG, 0.25, {"pool": 250})
    assert (facts.pages, facts.first_token.all_s, facts.tiers) == ({"read hit": 16}, None, {})


def test_a_closed_tier_is_left_out_of_a_scrape() -> None:
    def closed() -> Usage:
        raise ClosedError("tier disk is closed")

    registry = CollectorRegistry()
    levels = Metrics(registry).levels
    levels.watch_usage("disk", closed)
    levels.watch_usage("host", lambda: Usage(1, 2, 3))
    samples = page_of(registry)
    assert samples.value("kvtier_tier_used_bytes", tier="disk") is None
    assert samples.value("kvtier_tier_used_bytes", tier="host") == 2
