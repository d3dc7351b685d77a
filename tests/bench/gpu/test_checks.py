"""The part `checks` of `make gpu`: what it makes of what the self-check, pytest and the sanitizer say, and of time."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvtier_bench.gpu.measuring.setting import Setting
from kvtier_bench.gpu.parts import checks as part_checks
from kvtier_bench.gpu.parts import launch_all

ROOT = Path(__file__).parents[3]


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Setting:
    """A GPU, as far as this part asks for one; ten seconds are left."""
    monkeypatch.setattr(Setting, "on_cuda", property(lambda _: True))
    return Setting(torch.device("cpu"), False, torch.bfloat16, 10.0, clock=lambda: 0.0)


@pytest.mark.parametrize(
    ("code", "output", "good"),
    [
        (0, "begin prefix_prefill\nok prefix_prefill \nbegin kv_write\nok kv_write \n", True),
        (1, "begin prefix_prefill\nok prefix_prefill \nbegin kv_write\nFAILED kv_write bits differ\n", False),
        (124, "begin prefix_prefill\nok prefix_prefill \nbegin kv_write\n", True),
        (124, "begin a\nFAILED a bits differ\nbegin kv_write\n", False),
        (0, "left out 2 checks of 2\n", True),
        (0, "begin a\nok a \nleft out 2 checks of 3\n", True),
        (0, "", False),
    ],
)
def test_the_selfchecks_answer_is_read(
    monkeypatch: pytest.MonkeyPatch, on_cuda: Setting, code: int, output: str, good: bool
) -> None:
    monkeypatch.setattr(part_checks, "_SHARES", 1)
    monkeypatch.setattr(part_checks, "_run", lambda *_: (code, output))
    case = part_checks.selfcheck(on_cuda)
    assert case.detail.startswith("FAILED") != good
    if code == 1:
        assert "kv_write bits differ" in case.detail
    if code == 124:
        assert "stopped during kv_write" in case.detail


@pytest.mark.parametrize(
    ("answers", "detail"),
    [
        ([(0, "begin a\nok a \n"), (124, "begin b\n")], "1 passed, stopped during b"),
        (
            [(0, "left out 3 checks of 3\n"), (124, "begin b\n")],
            "left out: the time was over, left out 3 checks of 3; stopped during b",
        ),
        ([(-11, "begin a\n"), (124, "begin b\n")], "FAILED: 0 passed, 0 failed, exit status -11"),
    ],
)
def test_what_takes_too_long_is_left_out(
    monkeypatch: pytest.MonkeyPatch, on_cuda: Setting, answers: list[tuple[int, str]], detail: str
) -> None:
    """Compiling takes as long as it takes: that alone is no failure of a kernel."""
    monkeypatch.setattr(part_checks, "_SHARES", len(answers))
    monkeypatch.setattr(part_checks, "_run", lambda command, *_: answers[int(command[-2])])
    assert part_checks.selfcheck(on_cuda).detail.startswith(detail)


TESTED = "tests/x.py::a PASSED  [ 20%]\ntests/x.py::b[1, by c] PASSED [ 40%]\n"


@pytest.mark.parametrize(
    ("code", "output", "detail"),
    [
        (0, TESTED + "2 passed in 20.1s\n", "2 passed"),
        (1, TESTED + "tests/x.py::y FAILED [ 60%]\nFAILED tests/x.py::y - boom\n", "FAILED: 2 passed, 1 failed"),
        (1, TESTED + "tests/x.py::y ERROR [ 60%]\n", "FAILED: 2 passed, 1 failed, exit status 1: tests/x.py::y"),
        (0, "tests/x.py::a SKIPPED (no CUDA) [ 50%]\n4 skipped in 1s\n", "FAILED: 0 passed"),
        (124, TESTED + "tests/x.py::d[2, by c] ", "2 passed, stopped during tests/x.py::d[2, by c]"),
        (124, TESTED + "tests/x.py::y FAILED [ 60%]\ntests/x.py::d ", "FAILED: 2 passed, 1 failed"),
        (124, "collecting ... ", "left out: the time was over"),
    ],
)
def test_pytests_answer_is_read(
    monkeypatch: pytest.MonkeyPatch, on_cuda: Setting, code: int, output: str, detail: str
) -> None:
    """Line by line: what is stopped comes to no summary."""
    monkeypatch.setattr(part_checks, "_run", lambda *_: (code, output))
    assert part_checks.tests(on_cuda).detail.startswith(detail)


def test_one_kernel_is_compiled_before_many_are(monkeypatch: pytest.MonkeyPatch, on_cuda: Setting) -> None:
    """Side by side, each process would read torch from disk and build Triton's stub of the driver."""
    modules: list[str] = []

    def run(command: list[str], *_: object) -> tuple[int, str]:
        modules.append(command[2].rpartition(".")[2])
        return 0, "ok some of it\n"

    monkeypatch.setattr(part_checks, "_run", run)
    (case,) = part_checks.smoke(on_cuda)
    assert modules == ["warm_up", *["launch_all"] * part_checks._SHARES]
    assert case.detail == f"{part_checks._SHARES} passed"


def test_pytest_begins_whatever_plugins_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_cuda: Setting
) -> None:
    (tmp_path / "broken.py").write_text("raise ImportError('made for another pytest')\n")
    metadata = tmp_path / "broken-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[pytest11]\nbroken = broken\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.chdir(ROOT)
    case = part_checks.tests(replace(on_cuda, deadline_s=250.0))
    assert "made for another pytest" not in case.detail
    assert case.figures["exit_status"] == 0


def test_without_a_gpu_only_kernels_are_checked() -> None:
    setting = Setting(torch.device("cpu"), True, torch.float32, 10.0, clock=lambda: 0.0)
    assert part_checks.tests(setting).detail == "there is no CUDA device: not run"
    assert part_checks.memcheck(setting).detail.endswith("not run")


def test_every_kernel_has_its_turn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["decode splits 1", "decode splits 5", "write", "decode splits 9", "copy 1", "copy 2"]
    now = [0.0]

    def check() -> str:
        now[0] += 1
        return ""

    def said(*options: str) -> list[str]:
        now[0] = 0.0
        assert launch_all.main(list(options)) == 0
        lines = capsys.readouterr().out.splitlines()
        begun = [line.removeprefix("begin ") for line in lines if line.startswith("begin ")]
        assert [line.removeprefix("ok ").strip() for line in lines if line.startswith("ok ")] == begun
        return [line for line in lines if not line.startswith("begin ")]

    monkeypatch.setattr(launch_all, "all_checks", lambda *_: [(name, check) for name in names])
    monkeypatch.setattr(launch_all, "MONOTONIC", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert said("3.5") == [
        "ok decode splits 1 ", "ok write ", "ok copy 1 ", "ok decode splits 5 ", "left out 2 checks of 6",
    ]  # fmt: skip
    assert said("9", "--once") == ["ok decode splits 1 ", "ok write ", "ok copy 1 "]
    assert said("9", "--once", "--share", "1", "2") == ["ok write "]
    assert said("9", "--most", "1") == ["ok decode splits 1 "]


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


def test_memcheck_ends_in_time_and_says_what_it_left_out(monkeypatch: pytest.MonkeyPatch, on_cuda: Setting) -> None:
    monkeypatch.setattr(part_checks, "sanitizer", lambda: "/bin/compute-sanitizer")
    commands: list[list[str]] = []

    def run(command: list[str], *_: object) -> tuple[int, str]:
        commands.append(command)
        return 0, "begin a\nok a \nleft out 5 checks of 6\n========= ERROR SUMMARY: 0 errors\n"

    monkeypatch.setattr(part_checks, "_run", run)
    monkeypatch.setattr(part_checks, "MONOTONIC", lambda: 1000.0)
    assert part_checks.memcheck(replace(on_cuda, deadline_s=130.0)).detail == "1 passed, left out 5 checks of 6"
    assert 1000.0 < float(commands[0][-1]) < 1130.0, "however long starting takes"


@pytest.mark.parametrize(
    ("code", "output", "detail"),
    [
        (0, "begin a\nok a \nbegin b\nok b \n========= ERROR SUMMARY: 0 errors\n", "2 passed"),
        (9, "begin a\nok a \n========= Invalid __global__ read\n========= ERROR SUMMARY: 3 errors\n", "FAILED"),
        (124, "begin a\nok a \nbegin b\n", "1 passed, stopped during b"),
        (124, "begin a\nok a \n========= Invalid __global__ read\nbegin b\n", "FAILED"),
        (124, "begin a\n", "left out: the time was over, stopped during a"),
        (1, "begin a\nok a \nbegin b\nFAILED b bits differ\n========= ERROR SUMMARY: 0 errors\n", "FAILED"),
    ],
)
def test_memchecks_answer_is_read(
    monkeypatch: pytest.MonkeyPatch, on_cuda: Setting, code: int, output: str, detail: str
) -> None:
    """What is compiled when the time is over is no error; a wrong access before is."""
    monkeypatch.setattr(part_checks, "sanitizer", lambda: "/bin/compute-sanitizer")
    monkeypatch.setattr(part_checks, "_run", lambda *_: (code, output))
    assert part_checks.memcheck(on_cuda).detail.startswith(detail)


def test_memcheck_is_left_out_where_it_is_not(monkeypatch: pytest.MonkeyPatch, on_cuda: Setting) -> None:
    monkeypatch.setattr(part_checks, "sanitizer", lambda: None)
    assert part_checks.memcheck(on_cuda).detail == "compute-sanitizer was not found: not run"


def test_checks_run_side_by_side(monkeypatch: pytest.MonkeyPatch, on_cuda: Setting) -> None:
    together = threading.Barrier(part_checks._SHARES + 1)
    shares = []

    def run(command: list[str], *_: object) -> tuple[int, str]:
        if "kvtier_bench.gpu.parts.launch_all" in command:
            shares.append(command[-2:])
        together.wait(20)
        return 0, "ok some of it\n1 passed in 1s\n"

    monkeypatch.setattr(part_checks, "_run", run)
    monkeypatch.setattr(part_checks, "sanitizer", lambda: None)
    found = {case.name: case.detail for case in part_checks.measure(on_cuda)}
    assert found.keys() == {"selfcheck", "tests/kernels/test_cuda.py", "memcheck"}
    assert sorted(shares) == [[str(share), str(part_checks._SHARES)] for share in range(part_checks._SHARES)]
    assert found["selfcheck"] == f"{part_checks._SHARES} passed"


def test_a_share_that_fails_is_not_lost(monkeypatch: pytest.MonkeyPatch, on_cuda: Setting) -> None:
    def run(command: list[str], *_: object) -> tuple[int, str]:
        return {"1": -11, "2": 124}.get(command[-2], 0), "ok some of it\n"

    monkeypatch.setattr(part_checks, "_run", run)
    assert part_checks.selfcheck(on_cuda).detail.startswith("FAILED: 8 passed, 0 failed, exit status -11")


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
