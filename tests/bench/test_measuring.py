"""What benchmarks measure with: turns, percentiles, ratios of pairs, processor time, and peers beside."""

import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from kvtier.errors import KvtierError
from kvtier_bench.measuring.report import Case
from kvtier_bench.measuring.rounds import Samples, Spread, Subject, in_turn, percentile, process_clock, timed
from kvtier_bench.processes.peers import start_peers


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
        processes = [psutil.Process(pid) for pid in redis.pids]
    assert psutil.wait_procs(processes, timeout=60)[1] == []


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
