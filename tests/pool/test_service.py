"""The pool service as a process: its command line, its endpoints, its ends, and what clients see of them."""

import re
import signal
import socket
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvtier.cli.main import main
from kvtier.errors import ConfigError
from kvtier.metrics import Metrics
from kvtier.testing.blocks import make_key, read_blocks, summed
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier_pool.service import PoolService
from pool_grpc_rig import PAYLOADS, connect, items, running
from pool_rig import (
    BLOCK_BYTES,
    BLUE,
    MIB,
    TENANTS,
    WAIT_S,
    PoolProcess,
    failed_calls,
    pool_config,
    pool_process,
    until,
)
from suspending import suspended


def test_kill_minus_9_during_reads_is_misses_and_heals_by_itself() -> None:
    with pool_process() as pool:
        metrics = Metrics()
        tier = connect(pool.grpc, call_timeout_s=5.0, metrics=metrics)
        assert tier.write(items(16)) == [WriteStatus.STORED] * 16
        answers: list[list[bytes | None]] = []
        some_read, stop = threading.Event(), threading.Event()

        def keep_reading() -> None:
            while not stop.is_set():
                answers.append(read_blocks(tier, [make_key(i) for i in range(16)], BLOCK_BYTES))
                some_read.set()

        with ThreadPoolExecutor(1) as executor:
            reading = executor.submit(keep_reading)
            assert some_read.wait(WAIT_S)
            pool.process.kill()
            pool.process.wait(WAIT_S)
            until(lambda: answers[-1] == [None] * 16)
            stop.set()
            reading.result(WAIT_S)
        assert all(block in (None, PAYLOADS[i]) for answer in answers for i, block in enumerate(answer))
        assert answers[0] == list(PAYLOADS.values())
        assert failed_calls(metrics, op="read", error="UnavailableError") > 0

        restarted = pool.again()
        try:
            until(lambda: tier.write(items(1)) == [WriteStatus.STORED])
            assert read_blocks(tier, [make_key(0)], BLOCK_BYTES) == [PAYLOADS[0]]
        finally:
            restarted.kill()
        tier.close()


def open_breakers(metrics: Metrics) -> float | None:
    return metrics.registry.get_sample_value("kvtier_open_breakers", {"tier": "pool"})


def test_a_stopped_pool_costs_one_deadline_each_until_the_breaker_opens(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvtier")
    with pool_process() as pool:
        metrics = Metrics()
        breaker = CircuitBreaker(2, 0.05)
        tier = connect(pool.grpc, call_timeout_s=0.7, metrics=metrics, breaker=breaker)
        patient = connect(pool.grpc)
        assert patient.write(items(2)) == [WriteStatus.STORED] * 2
        patient.close()
        with suspended(pool.process.pid):
            for _ in range(5):
                assert read_blocks(tier, [make_key(0)], BLOCK_BYTES) == [None]
            assert tier.write(items(4)) == [WriteStatus.FAILED] * 4
            assert failed_calls(metrics, op="read", error="UnavailableError") == 2
            assert failed_calls(metrics, op="read", error="BreakerOpen") == 3
            assert failed_calls(metrics, op="write", error="BreakerOpen") == 1
            assert open_breakers(metrics) == 1
            until(lambda: failed_calls(metrics, op="probe", error="UnavailableError") >= 2)
            assert tier.lookup([make_key(0)]) == [Status.MISS]
            assert failed_calls(metrics, op="lookup", error="BreakerOpen") == 1
        until(lambda: read_blocks(tier, [make_key(0), make_key(1)], BLOCK_BYTES) == [PAYLOADS[0], PAYLOADS[1]])
        assert failed_calls(metrics, op="read", error="UnavailableError") == 2
        assert open_breakers(metrics) == 0
        assert [r.message.split(":")[1].strip() for r in caplog.records if r.name == "kvtier.tiers.pool.tier"] == [
            "left alone for now, everything misses",
            "answers again",
        ]
        tier.close()


def test_sigterm_drains_to_disk_and_a_restart_serves_the_bytes(tmp_path: Path) -> None:
    disk = (f"--disk-dir={tmp_path / 'disk'}", "--disk-bytes=64MiB")
    with pool_process(*disk, grpc_listen=f"unix:{tmp_path}/pool.sock") as pool:
        tier = connect(pool.grpc)
        assert tier.write(items(16)) == [WriteStatus.STORED] * 16
        tier.close()
        code, log = pool.terminate()
        assert code == 0
        assert re.search(r"drained: \d+ blocks written to disk, 0 abandoned", log)
    with pool_process(*disk) as pool:
        tier = connect(pool.grpc)
        assert tier.lookup([make_key(i) for i in range(16)]) == [Status.HIT] * 16
        assert read_blocks(tier, [make_key(i) for i in range(16)], BLOCK_BYTES) == list(PAYLOADS.values())
        tier.close()


def test_a_config_file_with_a_flag_that_wins(tmp_path: Path) -> None:
    (digest,) = [digest for digest, name in TENANTS.items() if name == "blue"]
    (tmp_path / "blue.sha256").write_text(digest + "\n")
    config = tmp_path / "pool.toml"
    config.write_text(
        '[tenants.blue]\ntoken_sha256 = ["file:blue.sha256"]\n'
        '[pool_service]\nlisten = ["127.0.0.1:0"]\ngrpc_listen = ["256.0.0.1:1"]\n'
        'http_listen = "127.0.0.1:0"\nmemory_bytes = "8MiB"\n'
    )
    pool = PoolProcess([f"--config={config}", "--grpc-listen=127.0.0.1:0"])
    pool.start()
    try:
        tier = connect(pool.grpc, "blue")
        assert tier.write([summed(make_key("a", tenant=BLUE), b"x")]) == [WriteStatus.STORED]
        assert tier.usage().capacity_bytes == 8 * MIB
        tier.close()
    finally:
        pool.kill()


def test_healthz_metrics_and_no_torch() -> None:
    with pool_process() as pool:
        tier = connect(pool.grpc)
        tier.write(items(3))
        tier.close()
        with urllib.request.urlopen(f"http://{pool.http}/healthz", timeout=WAIT_S) as answer:
            assert (answer.status, answer.read()) == (200, b"ok\n")
        with urllib.request.urlopen(f"http://{pool.http}/metrics", timeout=WAIT_S) as answer:
            text = answer.read().decode()
        assert 'kvtier_pool_written_blocks_total{status="stored"} 3.0' in text
        assert 'kvtier_pool_calls_total{code="OK",verb="Write"} 1.0' in text
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://{pool.http}/", timeout=WAIT_S)
        libraries = {Path(m.path).name for m in psutil.Process(pool.process.pid).memory_maps()}
        assert not [name for name in libraries if name.startswith("libtorch")]


@pytest.mark.parametrize("key", ["listen", "grpc_listen", "http_listen"])
def test_a_port_in_use_is_told_with_its_key(key: str) -> None:
    with running() as address:
        other = "grpc_listen" if key == "listen" else "listen"
        taken: dict[str, Any] = {other: ["127.0.0.1:0"], key: address if key == "http_listen" else [address]}
        said = rf"pool_service\.{key}: cannot listen on .?{re.escape(address)}"
        with pytest.raises(ConfigError, match=said):
            PoolService(pool_config(**taken)).start()


def test_a_pool_that_nobody_could_reach_does_not_start() -> None:
    with pytest.raises(ConfigError, match=r"pool_service\.listen: no address, and none in pool_service\.grpc_listen"):
        PoolService(pool_config(listen=[], grpc_listen=[])).start()


def test_a_pool_does_not_take_the_grpc_socket_of_another(tmp_path: Path) -> None:
    mine = f"unix:{tmp_path}/grpc.sock"
    with running(grpc_listen=(mine,)) as address:
        with pytest.raises(ConfigError, match="a server lives there"), running(grpc_listen=(mine,)):
            pass
        tier = connect(address)
        assert tier.write(items(1)) == [WriteStatus.STORED]
        tier.close()
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(f"{tmp_path}/grpc.sock")
    dead.close()
    with running(grpc_listen=(mine,)):
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "token_sha256"),
        (["--tenant", "red"], "NAME=SHA256"),
        (["--tenant", "red=abc"], "64 lower-case hex"),
        (["--tenant", f"red={'0' * 64}", "--memory-bytes", "lots"], "memory_bytes"),
        (["--tenant", f"red={'0' * 64}", "--listen", "256.0.0.1:99999"], "256.0.0.1:99999"),
        (["--tenant", f"red={'0' * 64}", "--listen", "127.0.0.1:0", "--http-listen", "nowhere"], "nowhere"),
    ],
)
def test_a_wrong_command_line_says_what_to_do(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["kvtier", "pool", "serve", *arguments])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with pytest.raises(SystemExit) as exit_:
            main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert exit_.value.code == 1
    assert message in capsys.readouterr().err
