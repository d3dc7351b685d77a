"""Runs parts one after the other, each in a process of its own, and keeps what each has given."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.clock import MONOTONIC, Clock
from kvtier_bench.gpu.run.journal import Journal, Outcome
from kvtier_bench.gpu.run.parts import GRACE_S, Part
from kvtier_bench.gpu.run.tied import command_tied_to

_LEAST_S = 8.0
"""The least time for a part: with less, it would only start."""
_TAIL_CHARACTERS = 4000
"""The end of a part's output that is kept: enough for a traceback of each of its threads."""
_SAID_LINES = 8
"""The lines of it that are shown at once."""


@dataclass(frozen=True, slots=True)
class Run:
    """What all parts of a run have in common."""

    journal: Journal
    facts: Mapping[str, Any]
    """What figures depend on: noted with every part."""
    total_s: float
    """The time for all parts: later ones have less than their budgets, or are left out."""
    tiny: bool = False
    plant: str = ""
    """The part that is to fail, since what it measures is made wrong on purpose."""
    child: str = "kvtier_bench.gpu.run.child"
    """The module that runs one part; a seam for tests."""
    say: Callable[[str], None] = print
    """Takes lines of progress."""
    clock: Clock = MONOTONIC


def run_parts(run: Run, parts: Sequence[Part]) -> Iterator[Outcome]:
    """An outcome per part, as they end. Its rows are in the journal as soon as they are known."""
    begin = run.clock()
    for number, part in enumerate(parts, 1):
        budget_s = min(part.budget_s, run.total_s - (run.clock() - begin) - GRACE_S)
        if budget_s < _LEAST_S and budget_s < part.budget_s:
            run.say(f"[{number}/{len(parts)}] {part.name}: left out, the time is over")
            yield Outcome(part.name, 0.0, (), "left out: the time was over", facts=run.facts)
            continue
        run.say(f"[{number}/{len(parts)}] {part.name}: at most {budget_s:.0f} s")
        outcome = _run(run, part, budget_s)
        run.say(f"    {len(outcome.cases)} rows in {outcome.seconds:.1f} s {outcome.problem}".rstrip())
        for line in outcome.said.splitlines()[-_SAID_LINES:]:
            run.say(f"    {line}")
        yield outcome


def _without_paths(said: str) -> str:
    """Returns the output without the folders of the checkout and of Python: results are kept where others read them."""
    folders = {Path.cwd(), Path(sys.prefix), Path(sys.base_prefix)}
    for folder in sorted(map(str, folders), key=len, reverse=True):
        said = said.replace(f"{folder}/", "")
    return said


def _run(run: Run, part: Part, budget_s: float) -> Outcome:
    begin = run.clock()
    run.journal.begin(part.name, run.facts)
    command = [sys.executable, "-m", run.child, part.name, str(run.journal.path), str(budget_s)]
    command += ["--tiny"] if run.tiny else []
    command += ["--plant"] if part.name == run.plant else []
    with tempfile.TemporaryFile() as log:
        problem = _wait_for(command, log.fileno(), budget_s + GRACE_S)
        log.seek(0)
        said = _without_paths(log.read().decode(errors="replace").strip())[-_TAIL_CHARACTERS:]
    run.journal.end(part.name, seconds=run.clock() - begin, problem=problem, said=said)
    return next(outcome for outcome in run.journal.outcomes() if outcome.part == part.name)


def _wait_for(command: Sequence[str], log: int, patience_s: float) -> str:
    """What went wrong; nothing when it ended well. What it has started ends with it."""
    process = subprocess.Popen(
        command_tied_to(os.getpid(), command), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        code = process.wait(patience_s)
        return "" if code == 0 else f"exit status {code}"
    except subprocess.TimeoutExpired:
        return f"killed after {patience_s:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
