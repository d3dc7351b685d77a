"""Whether all is right before it is fast: every kernel once, then the kernels' own check, tests for a GPU, memcheck."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from kvtier.clock import MONOTONIC
from kvtier_bench.gpu.measuring.setting import Setting
from kvtier_bench.gpu.plants import planted
from kvtier_bench.measuring.report import Case

_MARGIN_S = 2.0
_SHARES = 8
"""Processes that check kernels. These take a second each to compile, some 200 of them in all."""
_SHARE_THREADS = 2
"""The threads of torch in each process: references are computed on the CPU, and more threads would only wait."""
_LONGEST_CHECK_S = 20.0
"""The longest time that one check takes, with compiling it and with what a tool makes of it."""
_SMOKE_KEYS, _ALL_KEYS = 1000, 3000
"""The number of keys of the longest sequence."""
_TINY_CHECKS = ["--most", "8", "--longest", "20"]
"""The checks that the interpreter does in three seconds."""
_TAIL_CHARACTERS = 2000
"""The most that is shown of the output of a check that failed otherwise than by a result."""
_SANITIZER = "compute-sanitizer"
_CUDA_HOMES = (Path("/usr/local"), Path("/opt"))
_TESTS = Path(__file__).parents[4] / "tests"
_TIME_WAS_OVER = 124
"""The exit status of what was stopped."""
_LONGEST_WARM_UP_S = 20.0


@dataclass(frozen=True, slots=True)
class _Found:
    """What checks have found."""

    passed: int
    failed: int
    failures: Sequence[str]
    """The failures in words, as far as there are any."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What checks have said."""

    code: int
    output: str

    def count(self, word: str) -> int:
        """The number of lines that begin with this word."""
        return len(re.findall(rf"^{word} ", self.output, re.M))

    @property
    def left_out(self) -> str:
        """What there was no time for, as far as `launch_all` has said it."""
        unfinished = re.findall(r"^begin (.*)", self.output, re.M)[self.count("ok") + self.count("FAILED") :]
        stopped = [f"stopped during {name}" for name in unfinished] if self.code == _TIME_WAS_OVER else []
        return ", ".join([*re.findall(r"^left out .*", self.output, re.M), *stopped])


def smoke(setting: Setting) -> Iterator[Case]:
    """One launch of every kernel, beside its reference."""
    if setting.on_cuda:  # alone, before many compile side by side; what is wrong with it, they will say
        _run([sys.executable, "-m", "kvtier_bench.gpu.parts.warm_up"], min(_LONGEST_WARM_UP_S, setting.left_s() / 2))
    yield _kernels(setting, "every kernel once", ["--once", "--longest", str(_SMOKE_KEYS)], "smoke")


def measure(setting: Setting) -> Iterator[Case]:
    """The three checks side by side, as they end: most of it is compiling, each process on a core of its own."""
    with ThreadPoolExecutor(3) as executor:
        for done in as_completed([executor.submit(check, setting) for check in (selfcheck, tests, memcheck)]):
            yield done.result()


def selfcheck(setting: Setting) -> Case:
    """What `python -m kvtier_kernels.selfcheck` does, in processes that each take a share, as far as the time goes."""
    return _kernels(setting, "selfcheck", ["--longest", str(_ALL_KEYS)], "checks")


def tests(setting: Setting) -> Case:
    """The tests that are skipped where there is no GPU, without the one that is the self-check again."""
    name = "tests/kernels/test_cuda.py"
    if not setting.on_cuda:
        return Case(name, "checks", detail="there is no CUDA device: not run")
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", str(_TESTS / "kernels" / "test_cuda.py")]
    command += ["--deselect", "tests/kernels/test_cuda.py::test_every_kernel_agrees_with_its_reference"]
    # Only those of pytest's plug-ins are loaded that these tests need: others there may not go with this pytest.
    command += ["-p", "pytest_timeout"]
    # Unbuffered, a line for each test: what is stopped comes to no summary.
    environ = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONUNBUFFERED": "1"}
    answer = _Answer(*_run(command, setting.left_s(), environ))
    results = re.findall(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)?(?: .*)?$", answer.output, re.M)
    failures = re.findall(r"^(?:FAILED|ERROR) .*", answer.output, re.M)  # the summary's, with reasons
    failed = [test for test, result in results if result in ("FAILED", "ERROR")]
    passed = sum(result == "PASSED" for _, result in results)
    is_stopped = answer.code == _TIME_WAS_OVER
    unfinished = [f"stopped during {test}" for test, result in results if is_stopped and not result]
    found = _Found(passed, len(failed), failures or failed)
    return _case(name, "checks", answer, found, left_out=", ".join(unfinished), is_late=is_stopped and not failed)


def memcheck(setting: Setting) -> Case:
    """Small launches of every kernel under compute-sanitizer, where there is one: accesses outside of allocations."""
    tool = sanitizer()
    if tool is None or not setting.on_cuda:
        lacking = f"{_SANITIZER} was not found" if tool is None else "there is no CUDA device"
        return Case("memcheck", "checks", detail=f"{lacking}: not run")
    # Compilers that it starts are left alone, and so are calls that libraries make to see what the driver has.
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", "--launch-timeout", "0"]
    command += ["--target-processes", "application-only", "--report-api-errors", "no"]
    left_s = setting.left_s()
    # A time, not seconds: under the tool, starting alone takes many.
    command += [sys.executable, "-m", "kvtier_bench.gpu.parts.launch_all", _deadline(left_s)]
    # Each tensor an allocation of its own: inside torch's large ones, nothing is outside.
    environ = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": str(_SHARE_THREADS)}
    answer = _Answer(*_run(command, left_s, environ))
    errors = re.findall(r"ERROR SUMMARY: (\d+) error", answer.output)
    # What is stopped has no summary: compiling takes its time under the tool, which is no error.
    failed = sum(map(int, errors)) if errors else int(answer.code not in (0, _TIME_WAS_OVER))
    invalid = re.findall(r"^=+ Invalid .*|^FAILED .*", answer.output, re.M)
    is_late = answer.code == _TIME_WAS_OVER and not invalid
    return _case("memcheck", "checks", answer, _Found(answer.count("ok"), failed, invalid), is_late=is_late)


def sanitizer() -> str | None:
    """Returns the path of the sanitizer; None when there is none."""
    there = (str(path) for home in _CUDA_HOMES for path in sorted(home.glob(f"cuda*/bin/{_SANITIZER}")))
    return shutil.which(_SANITIZER) or next((path for path in there if os.access(path, os.X_OK)), None)


def _kernels(setting: Setting, name: str, options: Sequence[str], part: str) -> Case:
    """`launch_all` in processes that each take a share; in tiny size without a GPU, one that interprets."""
    left_s, environ = setting.left_s(), {"OMP_NUM_THREADS": str(_SHARE_THREADS)}
    num_shares = _SHARES
    if not setting.on_cuda:
        num_shares, options = 1, [*options, *_TINY_CHECKS]
        environ |= {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{_TESTS / 'rigs'}"}
    options = [*options, *(["--plant", part] if planted() == part else [])]

    def run(share: int) -> _Answer:
        command = [sys.executable, "-m", "kvtier_bench.gpu.parts.launch_all", _deadline(left_s)]
        return _Answer(*_run([*command, *options, "--share", str(share), str(num_shares)], left_s, environ))

    with ThreadPoolExecutor(num_shares) as executor:
        answers = list(executor.map(run, range(num_shares)))
    # What was merely stopped comes last: its status is told where no other is.
    codes = sorted((of.code for of in answers if of.code), key=lambda code: code == _TIME_WAS_OVER)
    both = _Answer(codes[0] if codes else 0, "\n".join(of.output for of in answers))
    failures = re.findall(r"^FAILED .*", both.output, re.M)
    left_out = "; ".join(filter(None, (of.left_out for of in answers)))
    is_late = not failures and (both.code == _TIME_WAS_OVER or (both.code == 0 and bool(left_out)))
    found = _Found(both.count("ok"), len(failures), failures)
    return _case(name, part, both, found, left_out=left_out, is_late=is_late)


def _case(
    name: str, op: str, answer: _Answer, found: _Found, *, left_out: str | None = None, is_late: bool = False
) -> Case:
    """
    :param left_out: instead of what the answer itself says.
    :param is_late: the time was over before its end, and that is no failure.
    """
    good = is_late or (answer.code == 0 and found.passed and not found.failed)
    detail = f"{found.passed} passed" if found.passed or not is_late else "left out: the time was over"
    if not good:
        reason = "; ".join(found.failures) or answer.output.strip()[-_TAIL_CHARACTERS:]
        detail = f"FAILED: {found.passed} passed, {found.failed} failed, exit status {answer.code}: {reason}"
    figures = {"passed": found.passed, "failed": found.failed, "exit_status": answer.code}
    beside = answer.left_out if left_out is None else left_out
    return Case(name, op, detail=", ".join(filter(None, (detail, beside))), figures=figures)


def _deadline(left_s: float) -> str:
    """The time after which no check begins, by the monotonic clock."""
    return str(MONOTONIC() + left_s - min(_LONGEST_CHECK_S, left_s / 3))


def _run(command: Sequence[str], left_s: float, environ: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit status, 124 when the time was over, and what it said.

    Then what it has started may run on, until this part ends, and is not waited for: hence a file, and no pipe.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(environ or {})}
        )
        try:
            code = process.wait(max(1.0, left_s - _MARGIN_S))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = _TIME_WAS_OVER
        output.seek(0)
        return code, output.read().decode(errors="replace")
