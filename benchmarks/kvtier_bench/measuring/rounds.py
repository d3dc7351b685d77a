"""How benchmarks measure: cases in turn, round by round, with the CPU time of every process that takes part."""

import ctypes
import math
import os
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

from kvtier.errors import KvtierError

_Name = TypeVar("_Name", bound=Hashable)

NUM_ROUNDS = 9
"""The least number of rounds: below it, a median says little."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds over several rounds, or a ratio of such."""

    median_s: float
    min_s: float
    max_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread":
        return cls(median(seconds), min(seconds), max(seconds))


@dataclass(frozen=True, slots=True)
class Subject:
    """Something to measure."""

    run: Callable[[], Sequence[float]]
    """Runs one round; gives the seconds of each call in it."""
    prepare: Callable[[], object] | None = None
    """Runs before each round; neither timed nor counted."""
    pids: tuple[int, ...] = field(default_factory=lambda: (os.getpid(),))
    """Processes whose CPU time counts."""


@dataclass(slots=True)
class Samples:
    """What one subject took. Filled by `in_turn`."""

    rounds_s: list[float] = field(default_factory=list)
    """Seconds in calls, round by round."""
    calls_s: list[float] = field(default_factory=list)
    """Seconds of each call."""
    rounds_cpu_s: list[float] = field(default_factory=list)
    """User and system time, round by round."""

    @property
    def cpu_s(self) -> float:
        """User and system time over all rounds."""
        return sum(self.rounds_cpu_s)

    def extend(self, more: "Samples") -> None:
        """Takes in further rounds of the same."""
        self.rounds_s += more.rounds_s
        self.calls_s += more.calls_s
        self.rounds_cpu_s += more.rounds_cpu_s

    def scaled(self, factor: float) -> "Samples":
        """Returns these times multiplied by `factor`: the times of one item, where a call handles many."""
        return Samples(
            *([seconds * factor for seconds in of] for of in (self.rounds_s, self.calls_s, self.rounds_cpu_s))
        )


def timed(run: Callable[[], object]) -> Callable[[], list[float]]:
    """A round of a single call."""

    def round_of_one() -> list[float]:
        start = time.perf_counter()
        run()
        return [time.perf_counter() - start]

    return round_of_one


def in_turn(subjects: Mapping[_Name, Subject], *, rounds: int = NUM_ROUNDS, label: str) -> dict[_Name, Samples]:
    """Runs the subjects in turn, A B A B ..., after one round that is not counted.

    Interleaving keeps a ratio honest on a machine whose speed drifts: pair by pair, both saw the same.
    """
    samples = {name: Samples() for name in subjects}
    clocks = {pid: process_clock(pid) for subject in subjects.values() for pid in subject.pids}
    with progress(label, 1 + rounds) as advance:
        for counted in [False] + [True] * rounds:
            for name, subject in subjects.items():
                if subject.prepare is not None:
                    subject.prepare()
                before = sum(clocks[pid]() for pid in subject.pids)
                calls = subject.run()
                if counted:
                    samples[name].rounds_cpu_s.append(sum(clocks[pid]() for pid in subject.pids) - before)
                    samples[name].rounds_s.append(sum(calls))
                    samples[name].calls_s.extend(calls)
            advance()
    return samples


def interleave(cases: dict[str, Callable[[], None]], *, rounds: int = NUM_ROUNDS, label: str) -> dict[str, list[float]]:
    """`in_turn` for cases that are one call each. Seconds per case and round."""
    subjects = {name: Subject(timed(run)) for name, run in cases.items()}
    return {name: samples.rounds_s for name, samples in in_turn(subjects, rounds=rounds, label=label).items()}


def ratios(slower: Sequence[float], faster: Sequence[float]) -> Spread:
    """`slower / faster`, pair by pair."""
    return Spread.of([a / b for a, b in zip(slower, faster, strict=True)])


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the percentile by nearest rank, which is a value that was measured."""
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]


def process_clock(pid: int) -> Callable[[], float]:
    """User and system seconds of a process, all of its threads, finer than the 10 ms of /proc."""
    clock_id = ctypes.c_int()
    error = ctypes.CDLL(None).clock_getcpuclockid(ctypes.c_int(pid), ctypes.byref(clock_id))
    if error:
        raise KvtierError(f"no CPU clock of process {pid}: {os.strerror(error)}")
    return lambda: time.clock_gettime(clock_id.value)


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[], None]]:
    """Shows progress on standard error; it is drawn between rounds only, since a thread that draws would be measured as
    well."""
    with Progress(console=Console(stderr=True), auto_refresh=False) as progress:
        task = progress.add_task(label, total=total)
        progress.refresh()

        def advance() -> None:
            progress.advance(task)
            progress.refresh()

        yield advance
