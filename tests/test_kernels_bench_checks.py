"""The part `checks` of `make gpu`: what it makes of what the self-check, pytest and the sanitizer say, and of time."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from kvtier_kernels_bench import launch_all, part_checks

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("code", "output", "good"),
    [
        (0, "ok     prefix_prefill\nok     kv_write\nall passed\n", True),
        (1, "ok     prefix_prefill\nFAILED kv_write: bits differ\n1 failed\n", False),
        (124, "ok     prefix_prefill\n", False),
        (2, "no CUDA device: nothing was checked\n", False),
    ],
)
def test_the_selfchecks_answer_is_read(monkeypatch: pytest.MonkeyPatch, code: int, output: str, good: bool) -> None:
    monkeypatch.setattr(part_checks, "_run", lambda *_: (code, output))
    case = part_checks.selfcheck(10.0)
    assert case.detail.startswith("FAILED") != good
    if code == 1:
        assert "kv_write: bits differ" in case.detail


def test_pytests_answer_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for code, output, good in (
        (0, "....\n4 passed in 20.1s\n", True),
        (1, "FAILED tests/x.py::y - boom\n1 failed, 3 passed in 2s\n", False),
        (0, "4 skipped in 1s\n", False),
    ):
        monkeypatch.setattr(part_checks, "_run", lambda *_, answer=(code, output): answer)
        case = part_checks.tests(10.0)
        assert case.detail.startswith("FAILED") != good


def test_pytest_begins_whatever_plugins_are_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text("raise ImportError('made for another pytest')\n")
    metadata = tmp_path / "broken-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[pytest11]\nbroken = broken\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.chdir(ROOT)
    case = part_checks.tests(250.0)
    assert "made for another pytest" not in case.detail
    assert case.figures["exit_status"] == 0


def test_every_kernel_has_its_turn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["decode splits 1", "decode splits 5", "write", "decode splits 9", "copy 1", "copy 2"]
    now = [0.0]

    def check() -> str:
        now[0] += 1
        return ""

    monkeypatch.setattr(launch_all, "all_checks", lambda *_: [(name, check) for name in names])
    monkeypatch.setattr(launch_all, "MONOTONIC", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert launch_all.main(3.5) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ok decode splits 1 ", "ok write ", "ok copy 1 ", "ok decode splits 5 ", "left out 2 checks of 6",
    ]  # fmt: skip


def test_the_sanitizer_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "cuda-13.0" / "bin" / "compute-sanitizer"
    monkeypatch.setenv("PATH", str(tool.parent))
    monkeypatch.setattr(part_checks, "_CUDA_HOMES", (tmp_path,))
    assert part_checks.sanitizer() is None
    tool.parent.mkdir(parents=True)
    tool.touch(0o755)
    assert part_checks.sanitizer() == str(tool)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert part_checks.sanitizer() == str(tool)


def test_memcheck_ends_in_time_and_says_what_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_checks, "sanitizer", lambda: "/bin/compute-sanitizer")
    commands: list[list[str]] = []

    def run(command: list[str], *_: object) -> tuple[int, str]:
        commands.append(command)
        return 0, "ok a \nleft out 5 checks of 6\n========= ERROR SUMMARY: 0 errors\n"

    monkeypatch.setattr(part_checks, "_run", run)
    monkeypatch.setattr(part_checks, "MONOTONIC", lambda: 1000.0)
    assert part_checks.memcheck(130.0).detail == "1 passed, left out 5 checks of 6"
    assert 1000.0 < float(commands[0][-1]) < 1130.0, "however long starting takes"


def test_memcheck_is_left_out_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_checks, "sanitizer", lambda: None)
    case = part_checks.memcheck(10.0)
    assert case.detail.endswith("not run")
    monkeypatch.setattr(part_checks, "sanitizer", lambda: "/bin/compute-sanitizer")
    for summary, good in ((0, True), (3, False)):
        output = f"ok a \nok b \n========= ERROR SUMMARY: {summary} errors\n"
        monkeypatch.setattr(part_checks, "_run", lambda *_, answer=(9 if summary else 0, output): answer)
        case = part_checks.memcheck(10.0)
        assert case.detail.startswith("FAILED") != good
        assert case.figures["passed"] == 2


def test_checks_run_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(part_checks._SHARES + 1)
    shares = []

    def run(command: list[str], *_: object) -> tuple[int, str]:
        if "kvtier_kernels.selfcheck" in command:
            shares.append(command[-2:])
        together.wait(20)
        return 0, "ok     some of it\n1 passed in 1s\n"

    monkeypatch.setattr(part_checks, "_run", run)
    monkeypatch.setattr(part_checks, "sanitizer", lambda: None)
    found = {case.name: case.detail for case in part_checks.measure(10.0)}
    assert found.keys() == {"selfcheck", "tests/test_kernels_cuda.py", "memcheck"}
    assert sorted(shares) == [[str(share), str(part_checks._SHARES)] for share in range(part_checks._SHARES)]
    assert found["selfcheck"] == f"{part_checks._SHARES} passed"


def test_a_share_that_fails_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], *_: object) -> tuple[int, str]:
        return (-11, "ok     some of it\n") if command[-2] == "1" else (0, "ok     some of it\n")

    monkeypatch.setattr(part_checks, "_run", run)
    assert part_checks.selfcheck(10.0).detail.startswith("FAILED: 8 passed, 0 failed, exit status -11")


def test_a_check_that_hangs_is_stopped() -> None:
    code, output = part_checks._run([sys.executable, "-uc", "print('ok 1'); import time; time.sleep(60)"], 4.0)
    assert code == 124
    assert output.startswith("ok 1")


def test_what_a_check_has_started_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that is stopped leaves the process that it watched, with its output open."""
    started = tmp_path / "started"
    script = f"sleep 600 & echo $! > {started}.new; mv {started}.new {started}; wait"
    wait_for_end = subprocess.Popen.wait

    def wait(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is None:
            return wait_for_end(process)
        while not started.exists():
            time.sleep(0.01)
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    assert part_checks._run(["sh", "-c", script], 4.0)[0] == 124
    os.kill(int(started.read_text()), signal.SIGKILL)  # raises when it is over
