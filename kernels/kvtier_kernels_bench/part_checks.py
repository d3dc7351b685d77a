"""Whether all is right before it is fast: the kernels' own check, the tests for machines with a GPU, memcheck."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from kvtier.bench.report import Case

_MARGIN_S = 2.0
_SHARES = 8
"""Processes of the self-check. Kernels take a second each to compile, 165 of them in all."""
_SANITIZER = "compute-sanitizer"
_SANITIZER_HOMES = (Path("/usr/local/cuda/bin"), Path("/opt/cuda/bin"))


def measure(left_s: float) -> Iterator[Case]:
    """All three side by side, as they end: most of it is compiling, each process on a core of its own."""
    with ThreadPoolExecutor(3) as executor:
        for done in as_completed([executor.submit(check, left_s) for check in (selfcheck, tests, memcheck)]):
            yield done.result()


def selfcheck(left_s: float) -> Case:
    """`python -m kvtier_kernels.selfcheck`, in processes that each take a share."""

    def run(share: int) -> tuple[int, str]:
        return _run([sys.executable, "-m", "kvtier_kernels.selfcheck", str(share), str(_SHARES)], left_s)

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
    code, output = _run(command, left_s)
    passed, failed = (sum(map(int, re.findall(rf"(\d+) {word}", output))) for word in ("passed", "failed"))
    return _case("tests/test_kernels_cuda.py", code, passed, failed, re.findall(r"^FAILED .*", output, re.M), output)


def memcheck(left_s: float) -> Case:
    """Small launches of every kernel under compute-sanitizer, where there is one: accesses outside of allocations."""
    tool = sanitizer()
    if tool is None:
        return Case("memcheck", "checks", detail=f"{_SANITIZER} was not found: not run")
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m"]
    command += ["kvtier_kernels_bench.launch_all", str(int(left_s - 3 * _MARGIN_S))]
    # Each tensor an allocation of its own: inside torch's large ones, nothing is outside.
    code, output = _run(command, left_s, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    launched = len(re.findall(r"^ok ", output, re.M))
    errors = re.findall(r"ERROR SUMMARY: (\d+) error", output)
    failed = sum(map(int, errors)) if errors else int(code != 0)
    return _case("memcheck", code, launched, failed, re.findall(r"^=+ Invalid .*", output, re.M), output)


def sanitizer() -> str | None:
    """Where it is."""
    there = (shutil.which(_SANITIZER), *(str(home / _SANITIZER) for home in _SANITIZER_HOMES))
    return next((path for path in there if path and os.access(path, os.X_OK)), None)


def _case(name: str, code: int, passed: int, failed: int, failures: Sequence[str], output: str) -> Case:
    good = code == 0 and passed and not failed
    reason = "; ".join(failures) or output.strip()[-300:]
    detail = f"{passed} passed" if good else f"FAILED: {passed} passed, {failed} failed, exit status {code}: {reason}"
    return Case(name, "checks", detail=detail, figures={"passed": passed, "failed": failed, "exit_status": code})


def _run(command: Sequence[str], left_s: float, environ: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit status, 124 when the time was over, and what it said."""
    timeout_s = max(1.0, left_s - _MARGIN_S)
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env={**os.environ, **(environ or {})},
        )
    except subprocess.TimeoutExpired as expired:
        said = expired.stdout or b""
        return 124, said if isinstance(said, str) else said.decode(errors="replace")
    return done.returncode, done.stdout
