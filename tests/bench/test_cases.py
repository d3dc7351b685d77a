"""Benchmarks run and report; what they measure is not tested."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvtier.testing.blocks import make_key, summed
from kvtier.tiers.disk.tier import DiskTier
from kvtier_bench.cases.sealing import bench_sealing

NUMBER = (int, float)
SCHEMA: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "op": (str,),
    "payload_bytes": (int, type(None)),
    "batch": (int, type(None)),
    "gb_per_s": (*NUMBER, type(None)),
    "p50_us": (*NUMBER, type(None)),
    "p99_us": (*NUMBER, type(None)),
    "cpu_s_per_gib": (*NUMBER, type(None)),
    "floor": (str, type(None)),
    "ratio_to_floor": (*NUMBER, type(None)),
}
"""Fields of a case. Others may stand beside these."""
FLOORS = {"memcpy", "raw disk", "raw tcp", "raw unix", "one client", "cbor", "one group", "8 requests"}
SMALL = ["--payload-bytes", "4096", "--batch", "4"]


def run(*arguments: str, program: tuple[str, ...] = ("-m", "kvtier.cli.main")) -> Any:
    command = [sys.executable, *program, "bench", *arguments, "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert answer.returncode == 0, answer.stderr
    report = json.loads(answer.stdout)
    require_schema(report)
    return report


def require_schema(report: Any) -> None:
    assert report["hardware"]
    assert report["commit"]
    assert report["cases"]
    for case in report["cases"]:
        assert case.keys() >= SCHEMA.keys()
        for name, types in SCHEMA.items():
            assert isinstance(case[name], types), (name, case)
        assert case["gb_per_s"] is not None or case["p50_us"] is not None
        assert (case["floor"] is None) == (case["ratio_to_floor"] is None)
        assert case["floor"] is None or case["floor"] in FLOORS
        assert all(case[name] is None or case[name] > 0 for name in ("gb_per_s", "p50_us", "p99_us", "ratio_to_floor"))


@pytest.mark.parametrize(
    ("arguments", "cases"),
    [
        (["hash"], ["int32 buffer", "list", "cbor"]),
        (["block-pool"], ["allocate + free", "match", "match + acquire + free"]),
        (
            ["codec", "--payload-bytes", "4096"],
            ["raw in", "raw out", "lz4 in", "lz4 out", "planes-zstd in", "planes-zstd out"],
        ),
    ],
)
def test_a_benchmark_reports_json(arguments: list[str], cases: list[str]) -> None:
    assert [case["name"] for case in run(*arguments)["cases"]] == cases


def test_codecs_are_tried_on_the_blocks_of_a_disk_tier(tmp_path: Path) -> None:
    tier = DiskTier.open(tmp_path / "disk", 16 << 20, reserve_bytes=0)
    tier.write([summed(make_key(label), bytes([label]) * 8192) for label in range(5)])
    tier.close()
    report = run("codec", "--disk", str(tmp_path / "disk"))
    assert {(case["payload_bytes"], case["batch"]) for case in report["cases"]} == {(8192, 5)}
    assert any(note.startswith("lz4 packs") for note in report["notes"])


def test_a_disk_tier_that_is_not_there_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvtier.cli.main", "bench", "codec", "--disk", str(tmp_path / "nowhere")]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 2
    assert "--disk" in answer.stderr
    assert "Traceback" not in answer.stderr


LESS_IN_A_ROUND = (
    "import kvtier.cli.main, kvtier_bench.cases.paths as paths; "
    "paths._LOOKUPS_A_ROUND = 1; paths._ACQUIRES_A_ROUND = {1: 50, 128: 4}; kvtier.cli.main.main()"
)


def test_paths_are_held_against_floors(tmp_path: Path) -> None:
    """A memcpy and bare sockets; peers that are not prepared are left out, and it says so."""
    report = run("paths", *SMALL, "--rounds", "9", "--peers", str(tmp_path), program=("-c", LESS_IN_A_ROUND))
    cases = {(case["name"], case["op"], case["batch"]): case for case in report["cases"]}
    for path in ("unix", "tcp", "grpc"):
        for op in ("read", "write"):
            for batch in (1, 4):
                case = cases[path, op, batch]
                assert case["payload_bytes"] == 4096
                assert case["cpu_s_per_gib"] > 0
                assert case["floor"] == {"unix": "raw unix", "tcp": "raw tcp", "grpc": "raw tcp"}[path]
                assert case["rounds"] == 9
        assert cases[path, "lookup", 4096]["gb_per_s"] is None
    assert cases["raw tcp", "read", 4]["floor"] == "memcpy"
    if ("shm", "read", 4) in cases:
        assert cases["shm", "read", 4]["floor"] == "memcpy"
        assert {batch for name, op, batch in cases if op == "acquire"} == {1, 128}
    for peer in ("redis-py", "mooncake-tcp", "lmcache-shm"):
        assert any(note.startswith(f"Without {peer}: ") and "make peers" in note for note in report["notes"])


def test_tiers(tmp_path: Path) -> None:
    report = run("tiers", *SMALL, "--disk-dir", str(tmp_path), "--peers", str(tmp_path / "peers"))
    assert {case["name"] for case in report["cases"]} >= {"host", "disk", "pool"}
    assert {case["floor"] for case in report["cases"] if case["name"] == "disk"} == {"raw disk"}
    assert any(note.startswith("Without lmcache-disk: ") and "make peers" in note for note in report["notes"])
    assert not list(tmp_path.iterdir())


def test_windows_in_kv_groups_take_and_load_less() -> None:
    """Four of 26 layers need both windows of the prompt, and the others need one."""
    one, groups = (
        case["figures"] for case in run("windows", "--windows", "2", "--rounds", "1", "--threads", "1")["cases"][2:]
    )
    assert groups["loaded_mb"] < one["loaded_mb"] * 0.7
    assert groups["answering_mb"] < one["answering_mb"] * 0.7


def test_branches_share_their_prompt() -> None:
    arguments = ["branches", "--prompt-tokens", "64", "--answer-tokens", "2", "--rounds", "1"]
    computed = {case["op"]: case["figures"]["computed_prompt_tokens"] for case in run(*arguments)["cases"]}
    assert computed["one with n = 8"] == computed["one with n = 1"] == 64


def test_clients() -> None:
    report = run("clients", *SMALL, "--clients", "2", "--seconds", "0.1", "--path", "unix")
    assert [(case["name"], case["op"]) for case in report["cases"]] == [("unix", "read"), ("unix", "write")]
    for case in report["cases"]:
        assert case["floor"] == "one client"
        assert 0 < case["figures"]["slowest_to_mean"] <= 1
        assert case["figures"]["pool_rss_after_bytes"] > 0


def test_an_unknown_path_is_named() -> None:
    command = [sys.executable, "-m", "kvtier.cli.main", "bench", "clients", *SMALL, "--path", "udp"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 1
    assert "no path udp: there are " in answer.stderr


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Where a socket's path fits in, whatever runs the tests."""
    with tempfile.TemporaryDirectory(prefix="kvtier-") as folder:
        yield Path(folder)


def test_sigterm_ends_a_benchmark_and_its_pool(short_folder: Path) -> None:
    command = [sys.executable, "-m", "kvtier.cli.main", "bench", "clients", *SMALL, "--clients", "2", "--seconds", "60"]
    bench = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(short_folder)}, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (pools := processes_of(str(short_folder), "pool.sock")):
            assert bench.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        bench.terminate()
        assert bench.wait(60) == 128 + signal.SIGTERM
    finally:
        bench.kill()
        bench.wait()
    assert not list(short_folder.iterdir())
    assert psutil.wait_procs(pools, timeout=60)[1] == []


def processes_of(folder: str, socket_name: str) -> list[psutil.Process]:
    """Processes that were told of a folder, once its socket is there."""
    if not list(Path(folder).glob(f"*/{socket_name}")):
        return []
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(folder in word for word in process.info["cmdline"] or ()):
            found.append(process)
    return found


def test_sealing_is_measured_beside_plain_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    bench_sealing(json=True, payload_bytes=4096, rounds=2)
    cases = json.loads(capsys.readouterr().out)["cases"]
    assert {case["op"] for case in cases} == {"read", "write"}
    assert [case["floor"] for case in cases] == [None, "plain"] * (len(cases) // 2)
    assert {case["name"].split(",")[0] for case in cases} >= {"tcp", "stored form"}
