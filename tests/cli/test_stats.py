"""`kvtier stats` tells what real processes say of themselves, and takes nonsense for what it is."""

import io
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

from kvtier.cli.stats.asking import Places
from kvtier.cli.stats.facts import facts_of
from kvtier.cli.stats.report import print_report
from kvtier.cli.stats.requested import ENGINE, POOL, SGLANG, VLLM
from kvtier.cli.stats.samples import Samples, fetch, metrics_url, parse
from kvtier.config import token_sha256
from kvtier.device.kv import MemoryUse
from kvtier.errors import ClosedError, ConfigError, InvalidInputError, UnavailableError
from kvtier.events import TierState
from kvtier.metrics import Metrics
from kvtier.offload import HierarchyMetrics
from kvtier.store.metrics import StoreMetrics
from kvtier.tiers.base import Usage
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.common.gauges import MemoryGauges, RankMemory
from kvtier_bench.measuring.blocks import Rotation, keys_of
from kvtier_bench.processes.pool_process import pool_process
from kvtier_engine.scheduling.metrics import EngineMetrics
from kvtier_engine.scheduling.request import Completion

MIB = 1 << 20


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "kvtier.cli.main", "stats", *arguments]
    environ = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ)


def page_of(registry: CollectorRegistry) -> Samples:
    return parse(generate_latest(registry).decode(), source="a test")


@contextmanager
def answering(body: bytes, code: int = 200) -> Iterator[str]:
    """A server that gives the same answer to everything."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def test_a_pool_that_is_used(tmp_path: Path) -> None:
    with pool_process(tmp_path, 64 * MIB) as pool, ExitStack() as stack:
        tier = pool.tier("tcp", stack)
        rotation = Rotation(4096, 8)
        rotation.fill(tier, "there")
        rotation.reads(tier, "there", 8, ()).run()
        tier.read(keys_of(8, "absent"), rotation.into)
        assert tier.pin(keys_of(9, "there"), 60.0) == 8
        before = facts_of(fetch(f"http://{pool.http}/metrics"))
        tier.lookup([*keys_of(8, "there"), *keys_of(24, "absent")])
        answer = run("--url", pool.http, "--json")
        assert answer.returncode == 0, answer.stderr
        (source,) = json.loads(answer.stdout)["sources"]
        words = run("--url", f"http://{pool.http}")
    assert source["url"] == f"http://{pool.http}/metrics"
    assert source["kind"] == POOL
    rate = source["hit_rate"]
    assert rate == {"unit": "blocks", "way": "looked up", "asked": 32, "by_tier": {"memory": 8}, "share": 0.25}
    assert before is not None
    assert (before.hit_rate.way, before.hit_rate.share) == ("read", 0.5), "nobody has looked up"
    assert source["written"] == {"stored": 8}
    assert source["ttft_mean_s"] is None
    assert source["calls"]["block"]["read"] == 2
    assert source["moved_bytes"] == {"sent": 8 * 4096, "received": 8 * 4096}
    assert source["pins"] == {"pinned": 8, "miss": 1}
    pinned = source["pinned"]
    assert (pinned["blocks"], pinned["payload_bytes"]) == (8, 8 * 4096)
    assert words.returncode == 0
    assert "Hit rate: 25.0% of 32 blocks looked up (memory 25.0%)." in words.stdout
    assert f"pinned now: 8 blocks, 32.0 KiB in slabs of {pinned['slab_bytes'] / 1024:.1f} KiB" in words.stdout
    assert "blocks to be pinned, by answer: miss 1, pinned 8" in words.stdout


def test_a_pool_that_nobody_asked_yet(tmp_path: Path) -> None:
    config = tmp_path / "kvtier.toml"
    with pool_process(tmp_path, 64 * MIB) as pool:
        config.write_text(f'[pool_service]\nhttp_listen = "{pool.http}"\n[engine]\nlisten = "127.0.0.1:0"\n')
        answer = run("--config", str(config))
    assert answer.returncode == 0, answer.stderr
    assert "nobody has asked for blocks yet" in answer.stdout


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
    engine.cold_prompt_tokens.inc(200)
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
    assert (saved.tokens, saved.seconds) == (750, pytest.approx(750 * 0.3 / 200))
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


def test_a_pipe_gets_every_word() -> None:
    """In the 80 columns that a pipe has, with every tier and path at once and large figures."""
    registry = CollectorRegistry()
    tiers = Metrics(registry)
    EngineMetrics(registry)
    tiers.set_state("disk", TierState.OFF)
    for codec, stored in (("raw", 2**30), ("lz4", 2**29), ("planes-zstd", 0)):
        tiers.codec_bytes.labels("disk", codec, "raw").inc(2**30 if stored else 0)
        tiers.codec_bytes.labels("disk", codec, "stored").inc(stored)
        tiers.codec_bytes.labels("redis", codec, "raw").inc(2**30 if codec == "raw" else 0)
        tiers.codec_bytes.labels("redis", codec, "stored").inc(2**30 if codec == "raw" else 0)
    names = ("memory", "disk", "redis", "pool")
    for tier in names:
        tiers.tier_blocks.labels(tier, "read", "hit").inc(123_456_789)
        for op in ("read", "write"):
            tiers.tier_bytes.labels(tier, op).inc(1023.4 * 2**30)
            tiers.tier_batch_seconds.labels(tier, op).observe(10.0)
    for path in ("shm", "unix", "tcp", "grpc"):
        for op in ("read", "write"):
            tiers.path_bytes.labels(path, op).inc(1023.4 * 2**30)
    MemoryGauges(registry, lambda: RankMemory(64 << 30, 3 << 30, MemoryUse(MIB, 67 << 30, 0.5)))
    for tier in names:
        tiers.levels.watch_usage(tier, lambda: Usage(3, 1 << 40, 1 << 41))
    with answering(generate_latest(registry)) as address:
        answer = run("--url", address)
    assert answer.returncode == 0, answer.stderr
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in answer.stdout.splitlines() if "│" in line]
    assert ["blocks read", *["123,456,789"] * 4] in rows
    assert not any(row[0] == "evicted" for row in rows), "nobody tells"
    assert ["written at", *["109.89 GB/s"] * 4] in rows
    assert ["read", *["1,023.4 GiB"] * 4] in rows
    assert ["full", *["50%"] * 4] in rows
    assert "disk is off: its medium fails" in answer.stdout
    assert "disk packs: 1.0 GiB raw (1.00 to 1), 1.0 GiB lz4 (2.00 to 1)" in answer.stdout
    assert "memory: arena 64.0 GiB, leased 3.0 GiB, pinned 67.0 GiB, staging 1.0 MiB" in answer.stdout
    assert "redis packs" not in answer.stdout
    assert "…" not in answer.stdout
    assert all(len(line) <= 80 for line in answer.stdout.splitlines())


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


def test_json_on_failure_and_a_pool_that_asks_for_a_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("of-an-observer-0123456789")
    config = tmp_path / "kvtier.toml"
    digest = token_sha256(token.read_text())
    settings = ['metrics_access = "observer"', "[observers.grafana]", f'token_sha256 = ["{digest}"]']
    with pool_process(tmp_path, 64 * MIB, settings) as pool:
        config.write_text(f'[pool_service]\nhttp_listen = "{pool.http}"\n')
        refused = run("--config", str(config), "--json")
        answer = run("--config", str(config), "--json", "--token", f"file:{token}")
    assert refused.returncode == 1
    said = json.loads(refused.stdout)
    assert said["sources"] == []
    (problem,) = said["problems"]
    assert "401" in problem
    assert "metrics_access = observer" in problem
    assert answer.returncode == 0, answer.stderr
    assert len(json.loads(answer.stdout)["sources"]) == 1
    assert json.loads(answer.stdout)["problems"] == [], "a pool's file: nobody looks for an engine"


def test_a_token_does_not_go_in_the_clear(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("of-an-observer-0123456789")
    places = Places(None, ["pool.example:7602"], None, f"file:{tmp_path}/token")
    (heard,) = places.ask()
    assert "in the clear" in (heard.problem or "")


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


def test_nobody_answers() -> None:
    answer = run("--url", "127.0.0.1:1")
    assert answer.returncode == 1
    assert "http://127.0.0.1:1/metrics does not answer" in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        (b"<html>hello</html>", 200, "no metrics page"),
        (b"", 404, "answers 404"),
        (b"up 1\n", 200, "neither an engine nor a pool"),
        (b"#" * (17 * MIB), 200, "more than"),
    ],
)
def test_somebody_else_answers(body: bytes, code: int, words: str) -> None:
    with answering(body, code) as address:
        answer = run("--url", address)
    assert answer.returncode == 1
    assert words in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (b"-ERR unknown command\r\n", "does not answer"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "does not answer"),
        (
            b"HTTP/1.1 400 Bad Request\r\nContent-Length: 99\r\n\r\nthis is\x1b another port",
            "400 Bad Request: this is another",
        ),
        (b"HTTP/1.1 400 Bad Request\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "is it an engine or a pool"),
    ],
)
def test_something_else_that_listens(reply: bytes, words: str) -> None:
    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(reply)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(UnavailableError, match=words):
            fetch(metrics_url(f"127.0.0.1:{listening.getsockname()[1]}"))
        thread.join()


@pytest.mark.parametrize("text", ["file:///etc/passwd", "ftp://host:1", "http://", "127.0.0.1:0", "host:port", ""])
def test_places_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="name an engine or a pool"):
        metrics_url(text)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("host:7602", "http://host:7602/metrics"),
        ("http://host:7602/", "http://host:7602/metrics"),
        ("https://host/other", "https://host/other"),
        ("[::1]:7602", "http://[::1]:7602/metrics"),
    ],
)
def test_places(text: str, url: str) -> None:
    assert metrics_url(text) == url


def test_nonsense_is_no_page() -> None:
    with pytest.raises(InvalidInputError, match="no metrics page"):
        parse("{]", source="it")
