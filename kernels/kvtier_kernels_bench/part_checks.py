"""Whether all is right before it is fast: the kernels' own check, the tests for machines with a GPU, memcheck."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from kvtier.bench.report import Case
from kvtier.clock import MONOTONIC

_MARGIN_S = 2.0
_SHARES = 8
"""Processes of the self-check. Kernels take a second each to compile, 165 of them in all."""
_SHARE_THREADS = 2
"""Of torch, in each of them: references are computed on the CPU, and all cores for each would only wait for another."""
_LONGEST_CHECK_S = 20.0
"""Of one under memcheck: compiling it, and what the tool makes of it."""
_TAIL_CHARACTERS = 2000
"""Of what a check has said that failed otherwise than by a result."""
_SANITIZER = "compute-sanitizer"
_CUDA_HOMES = (Path("/usr/local"), Path("/opt"))


def measure(left_s: float) -> Iterator[Case]:
    """All three side by side, as they end: most of it is compiling, each process on a core of its own."""
    with ThreadPoolExecutor(3) as executor:
        for done in as_completed([executor.submit(check, left_s) for check in (selfcheck, tests, memcheck)]):
            yield done.result()


def selfcheck(left_s: float) -> Case:
    """`python -m kvtier_kernels.selfcheck`, in processes that each take a share."""

    def run(share: int) -> tuple[int, str]:
        command = [sys.executable, "-m", "kvtier_kernels.selfcheck", str(share), str(_SHARES)]
        return _run(command, left_s, {"OMP_NUM_THREADS": str(_SHARE_THREADS)})

    with ThreadPoolExecutor(_SHARES) as executor:
        codes, outputs = zip(*executor.map(run, range(_SHARES)), strict=True)
    code, output = max(codes, key=abs), "\n".join(outputs)
    lines = output.splitlines()
    passed, failed = (sum(line.startswith(word) for line in lines) for word in ("ok ", "FAILED"))
    return _case("selfcheck", code, passed, failed, [line for line in lines if line.startswith("FAILED")], output)


def tests(left_s: float) -> Case:
    """The tests that are skipped where there is no GPU, without the one that is the self-check again."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_kernels_cuda.py"]
    command += ["--deselect", "tests/test_kernels_cuda.py::test_every_kernel_agrees_with_its_reference"]
    # Of pytest's plug-ins only what these tests need: others that are installed there may not go with this pytest.
    command += ["-p", "pytest_timeout"]
    code, output = _run(command, left_s, {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    passed, failed = (sum(map(int, re.findall(rf"(\d+) {word}", output))) for word in ("passed", "failed"))
    return _case("tests/test_kernels_cuda.py", code, passed, failed, re.findall(r"^FAILED .*", output, re.M), output)


def memcheck(left_s: float) -> Case:
    """Small launches of every kernel under compute-sanitizer, where there is one: accesses outside of allocations."""
    tool = sanitizer()
    if tool is None:
        return Case("memcheck", "checks", detail=f"{_SANITIZER} was not found: not run")
    # Compilers that it starts are left alone, and so are calls that libraries make to see what the driver has.
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", "--launch-timeout", "0"]
    command += ["--target-processes", "application-only", "--report-api-errors", "no"]
    # A time, not seconds: under the tool, starting alone takes many.
    deadline = MONOTONIC() + left_s - _LONGEST_CHECK_S
    command += [sys.executable, "-m", "kvtier_kernels_bench.launch_all", str(deadline)]
    # Each tensor an allocation of its own: inside torch's large ones, nothing is outside.
    environ = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": str(_SHARE_THREADS)}
    code, output = _run(command, left_s, environ)
    launched = len(re.findall(r"^ok ", output, re.M))
    errors = re.findall(r"ERROR SUMMARY: (\d+) error", output)
    failed = sum(map(int, errors)) if errors else int(code != 0)
    left_out = "".join(re.findall(r"^left out .*", output, re.M))
    invalid = re.findall(r"^=+ Invalid .*", output, re.M)
    return _case("memcheck", code, launched, failed, invalid, output, left_out=left_out)


def sanitizer() -> str | None:
    """Where it is."""
    there = (str(path) for home in _CUDA_HOMES for path in sorted(home.glob(f"cuda*/bin/{_SANITIZER}")))
    return shutil.which(_SANITIZER) or next((path for path in there if os.access(path, os.X_OK)), None)


def _case(
    name: str, code: int, passed: int, failed: int, failures: Sequence[str], output: str, *, left_out: str = ""
) -> Case:
    good = code == 0 and passed and not failed
    reason = "; ".join(failures) or output.strip()[-_TAIL_CHARACTERS:]
    detail = f"{passed} passed" if good else f"FAILED: {passed} passed, {failed} failed, exit status {code}: {reason}"
    figures = {"passed": passed, "failed": failed, "exit_status": code}
    return Case(name, "checks", detail=", ".join(filter(None, (detail, left_out))), figures=figures)


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
            code = 124
        output.seek(0)
        return code, output.read().decode(errors="replace")
