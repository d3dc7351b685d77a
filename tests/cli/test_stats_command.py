"""`kvtier stats` as users run it: what it prints of real processes, and of others that answer or do not."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvtier.cli.stats.facts import facts_of
from kvtier.cli.stats.requested import POOL
from kvtier.cli.stats.samples import fetch
from kvtier.config import token_sha256
from kvtier.device.kv import MemoryUse
from kvtier.events import TierState
from kvtier.metrics import Metrics
from kvtier.tiers.base import Usage
from kvtier.tiers.common.gauges import MemoryGauges, RankMemory
from kvtier_bench.measuring.blocks import Rotation, keys_of
from kvtier_bench.processes.pool_process import pool_process
from kvtier_engine.scheduling.metrics import EngineMetrics

MIB = 1 << 20


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "kvtier.cli.main", "stats", *arguments]
    environ = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ)


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
        words = run("--url", f"http://{pool.http}", "--url", "127.0.0.1:1")
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
    assert words.returncode == 1, "not all that were named have answered"
    assert "http://127.0.0.1:1/metrics does not answer" in words.stderr
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
    assert "disk is off: its log says why" in answer.stdout
    assert "disk packs: 1.0 GiB raw (1.00 to 1), 1.0 GiB lz4 (2.00 to 1)" in answer.stdout
    assert "memory: arena 64.0 GiB, leased 3.0 GiB, pinned 67.0 GiB, staging 1.0 MiB" in answer.stdout
    assert "redis packs" not in answer.stdout
    assert "…" not in answer.stdout
    assert all(len(line) <= 80 for line in answer.stdout.splitlines())


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
