"""Runs parts one after the other, each in a process of its own, and keeps what each has given."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.bench.report import Case
from kvtier.clock import MONOTONIC, Clock
from kvtier_kernels_bench.parts import GRACE_S, Part
from kvtier_kernels_bench.rows import unpack

_LEAST_S = 8.0
"""Below, a part would only start."""
_TAIL_CHARACTERS = 4000
"""Of what a part has said: enough for a traceback of each of its threads."""
_SAID_LINES = 8
"""Of it that are shown at once."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one part."""

    part: str
    seconds: float
    cases: tuple[Case, ...]
    """All that it had given when it ended, however it did."""
    problem: str = ""
    """Empty when it ended well."""
    said: str = ""
    """The end of what it wrote, warnings say: one without a problem may have something to tell as well."""

    @property
    def failed(self) -> bool:
        return bool(self.problem) or any(case.detail.startswith("FAILED") for case in self.cases)


def run_parts(
    parts: Sequence[Part],
    *,
    total_s: float,
    tiny: bool = False,
    child: str = "kvtier_kernels_bench.child",
    say: Callable[[str], None] = print,
    clock: Clock = MONOTONIC,
) -> Iterator[Outcome]:
    """An outcome per part, as they end.

    :param total_s: for all of them: later parts have less than their budgets, or are left out.
    :param child: the module that runs one part; a seam for tests.
    :param say: takes lines of progress.
    """
    begin = clock()
    for number, part in enumerate(parts, 1):
        budget_s = min(part.budget_s, total_s - (clock() - begin) - GRACE_S)
        if budget_s < _LEAST_S and budget_s < part.budget_s:
            say(f"[{number}/{len(parts)}] {part.name}: left out, the time is over")
            yield Outcome(part.name, 0.0, (), "left out: the time was over")
            continue
        say(f"[{number}/{len(parts)}] {part.name}: at most {budget_s:.0f} s")
        outcome = _run(part, budget_s, [child, *(["--tiny"] if tiny else [])], clock)
        say(f"    {len(outcome.cases)} rows in {outcome.seconds:.1f} s {outcome.problem}".rstrip())
        for line in outcome.said.splitlines()[-_SAID_LINES:]:
            say(f"    {line}")
        yield outcome


def _run(part: Part, budget_s: float, child: Sequence[str], clock: Clock) -> Outcome:
    begin = clock()
    with tempfile.TemporaryDirectory() as folder:
        rows, log = Path(folder) / "rows", Path(folder) / "log"
        rows.touch()
        command = [sys.executable, "-m", child[0], part.name, str(rows), str(budget_s), *child[1:]]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # what it has started ends with it
            )
            problem = ""
            try:
                code = process.wait(budget_s + GRACE_S)
                problem = "" if code == 0 else f"exit status {code}"
            except subprocess.TimeoutExpired:
                problem = f"killed after {budget_s + GRACE_S:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said = log.read_text(errors="replace").strip()[-_TAIL_CHARACTERS:]
        return Outcome(part.name, clock() - begin, tuple(_cases(rows)), problem, said)


def _cases(rows: Path) -> Iterator[Case]:
    for line in rows.read_text().splitlines():
        with contextlib.suppress(ValueError):  # the last one, of a part that was killed while it wrote
            yield unpack(line)
