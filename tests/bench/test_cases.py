"""Benchmarks run and report; what they measure is not tested."""

import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvtier.cli.options import require_writable
from kvtier.cli.plot import Bar, write_bars
from kvtier.errors import ConfigError, KvtierError
from kvtier.testing.blocks import make_key, summed
from kvtier.tiers.disk.tier import DiskTier
from kvtier_bench.cases.sealing import bench_sealing
from kvtier_bench.measuring.report import Case, report
from kvtier_bench.measuring.rounds import Samples, Spread, Subject, in_turn, percentile, process_clock, timed
from kvtier_bench.processes.peers import start_peers

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
"""Of a case. Others may stand beside these."""
FLOORS = {"memcpy", "raw disk", "raw tcp", "raw unix", "one client", "cbor", "one group", "8 requests"}
SMALL = ["--payload-bytes", "4096", "--batch", "4"]


def run(*arguments: str) -> Any:
    command = [sys.executable, "-m", "kvtier.cli.main", "bench", *arguments, "--json"]
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


def test_paths_are_held_against_floors(tmp_path: Path) -> None:
    """A memcpy and bare sockets; peers that are not prepared are left out, and it says so."""
    report = run("paths", *SMALL, "--rounds", "9", "--peers", str(tmp_path))
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
    one, groups = (case["figures"] for case in run("windows", "--windows", "4", "--rounds", "1")["cases"][2:])
    assert groups["loaded_mb"] < one["loaded_mb"] / 2
    assert groups["answering_mb"] < one["answering_mb"] / 2


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


def test_subjects_take_turns() -> None:
    order: list[str] = []
    subjects = {
        name: Subject(timed(lambda name=name: order.append(name)), prepare=lambda name=name: order.append(f"({name})"))
        for name in "ab"
    }
    samples = in_turn(subjects, rounds=9, label="turns")
    assert order == ["(a)", "a", "(b)", "b"] * 10
    assert all(len(of.rounds_s) == len(of.calls_s) == 9 for of in samples.values())


def test_a_percentile_was_measured() -> None:
    values = [float(i) for i in range(1, 101)]
    assert (percentile(values, 50), percentile(values, 99), percentile(values[:9], 99)) == (50.0, 99.0, 9.0)


def test_cpu_time_of_another_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            clock = process_clock(busy.pid)
            deadline = time.monotonic() + 30
            while clock() < 0.05 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert 0.05 <= clock() < 30
        finally:
            busy.kill()
    with pytest.raises(KvtierError, match=r"no CPU clock of process \d+"):
        process_clock(busy.pid)


def test_ratios_compare_the_same_round() -> None:
    """The machine was half as fast in the second round: the ratio does not show it."""
    ours, floor = Samples([2.0, 4.0], [2.0, 4.0], [2.0, 4.0]), Samples([1.0, 2.0], [1.0, 2.0], [1.0, 2.0])
    case = Case.of("ours", "read", ours, floor=("floor", floor), beside={"peer": ours}, round_bytes=3 * 10**9)
    assert case.ratio_to_floor == 0.5
    assert case.ratio_spread == (0.5, 0.5)
    assert case.beside == {"peer": Spread(1.0, 1.0, 1.0)}
    assert case.gb_per_s == 1.0
    assert case.cpu_s_per_gib == pytest.approx(6.0 / (6 * 10**9 / 2**30))


def test_a_peer_is_told_round_by_round(tmp_path: Path) -> None:
    """redis-py against a real server, with this Python in place of an environment that `make peers` made."""
    environment = tmp_path / "redis"
    (environment / "bin").mkdir(parents=True)
    (environment / "prepared.json").write_text('{"redis": "8.1.0"}')
    python = environment / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    with ExitStack() as stack:
        peers, notes = start_peers([4096, 8], environments=tmp_path, logs=tmp_path, stack=stack)
        assert [peer.kind.name for peer in peers] == ["redis-py"]
        assert [note.split(":")[0] for note in notes] == ["redis-py", "Without mooncake-tcp", "Without lmcache-shm"]
        (redis,) = peers
        for op in ("read", "write"):
            samples = in_turn(redis.subjects(op, 2), rounds=9, label=op)  # type: ignore[arg-type]
            assert all(len(of.calls_s) == 9 * 4 for of in samples.values())
        pids = redis.pids
    await_end(pids)


def test_a_peer_that_does_not_start_is_left_out(tmp_path: Path) -> None:
    environment = tmp_path / "redis"
    (environment / "bin").mkdir(parents=True)
    (environment / "prepared.json").write_text("{}")
    python = environment / "bin" / "python"
    python.write_text("#!/bin/sh\necho out of luck >&2\nexit 3\n")
    python.chmod(0o755)
    with ExitStack() as stack:
        peers, notes = start_peers([4096, 8], environments=tmp_path, logs=tmp_path, stack=stack)
    assert not peers
    assert notes[0] == "Without redis-py: ended: out of luck."


def await_end(pids: Sequence[int]) -> None:
    deadline = time.monotonic() + 60
    while running := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, running
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


BARS = [Bar("shm <&>", 12.0, "12 GB/s", "shm", heading="read"), Bar("lookup", 3.0, "3 ms", scale="ms")]


def test_a_picture_in_svg(tmp_path: Path) -> None:
    write_bars(tmp_path / "bars.svg", BARS, title="Paths", caption="hardware")
    text = (tmp_path / "bars.svg").read_text()
    assert text.startswith("<svg ")
    assert "shm &lt;&amp;&gt;" in text


def test_a_picture_in_png(tmp_path: Path) -> None:
    write_bars(tmp_path / "bars.png", BARS, title="Paths", caption="hardware")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvtier.cli.main", "bench", "hash", "--plot", str(tmp_path / "bars.gif")]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 1
    assert "name a file that ends in .svg or .png" in answer.stderr


@pytest.mark.parametrize(
    "command",
    [
        *(["-m", "kvtier.cli.main", "bench", name, "--plot"] for name in ("paths", "tiers", "ttft")),
        ["-m", "kvtier.cli.main", "demo", "--plot"],
        [str(Path(__file__).parents[1] / "soak" / "soak.py"), "--json"],
    ],
    ids=" ".join,
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    command: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "nowhere" / "x.svg"
    answer = subprocess.run([sys.executable, *command, str(path)], capture_output=True, text=True, timeout=60)
    assert answer.returncode in (1, 2)
    assert f"{command[-1]} {path}: cannot be written: No such file or directory; name a file in" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert answer.stdout == ""


def test_asking_whether_a_file_can_be_written_changes_nothing(tmp_path: Path) -> None:
    there, dangling = tmp_path / "there", tmp_path / "dangling"
    there.write_text("earlier figures")
    dangling.symlink_to("target")
    for path in (there, dangling, tmp_path / "new", Path(os.devnull)):
        require_writable("--plot", path)
    assert there.read_text() == "earlier figures"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "there"]


def test_no_file_to_write(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    for name in ("", "circle", "n" * 300, "circle/x", "nul\0"):
        with pytest.raises(ConfigError, match=r"--plot .*: cannot be written: "):
            require_writable("--plot", tmp_path / name)


def test_figures_are_told_before_json_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk that standard output is redirected to does not lose them."""
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(full, write_through=True))
        with pytest.raises(OSError):
            report("Title", [Case("ours", "read", gb_per_s=1.25)], as_json=True)
    assert "1.25" in capsys.readouterr().err


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
        while not (pools := pids_of(str(short_folder), "pool.sock")):
            assert bench.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        bench.terminate()
        assert bench.wait(60) == 128 + signal.SIGTERM
    finally:
        bench.kill()
        bench.wait()
    assert not list(short_folder.iterdir())
    await_end(pools)


def pids_of(folder: str, socket_name: str) -> list[int]:
    """Processes that were told of a folder, once its socket is there."""
    if not list(Path(folder).glob(f"*/{socket_name}")):
        return []
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(folder in word for word in process.info["cmdline"] or ()):
            found.append(process.pid)
    return found


def test_sealing_is_measured_beside_plain_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    bench_sealing(json=True, payload_bytes=4096, rounds=2)
    cases = json.loads(capsys.readouterr().out)["cases"]
    assert {case["op"] for case in cases} == {"read", "write"}
    assert [case["floor"] for case in cases] == [None, "plain"] * (len(cases) // 2)
    assert {case["name"].split(",")[0] for case in cases} >= {"tcp", "stored form"}
