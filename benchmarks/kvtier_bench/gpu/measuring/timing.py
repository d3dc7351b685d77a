"""How long the device takes, in turns, with what it had in its cache before gone."""

import time
from collections.abc import Callable, Mapping

import torch

from kvtier_bench.gpu.measuring.setting import Run, Setting
from kvtier_bench.measuring.rounds import Samples

_FLUSH_BYTES = 256 << 20
"""Several times the second-level cache of any chip (an H200 has 60 MB)."""
_HEAD_START_CYCLES, _MOST_HEAD_START_CYCLES = 1 << 20, 1 << 27
"""Cycles that hold up the device, for 0.5 ms to 70 ms, while the host launches all that is to be timed: launching is
not what is measured."""
_WAKING_CYCLES = 1 << 26
"""Cycles of a kernel that wakes the device, 30 ms or more: an idle device has a fifth of its clock for some time."""
_WARM_UPS = 2
"""Kernels are compiled, and libraries choose theirs, before anything counts."""


class DeviceClock:
    """Times calls by the device's own events: from when their first kernel may begin to when the last has ended.

    On CPU, by the wall. One thread. A call that waits for the device itself is measured by `wall_s`.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._flush = torch.zeros(_FLUSH_BYTES // 4 if setting.on_cuda else 0, device=setting.device)
        self._head_start_cycles = _HEAD_START_CYCLES

    def seconds(self, run: Run) -> float:
        """Returns the seconds of one call. Repeats it if the device began before the host had launched all of it."""
        if not self._setting.on_cuda:
            return self.wall_s(run)
        while True:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            # Read, not written: what is dirty in the cache would go to memory while the call is timed.
            self._flush.sum()
            torch.cuda._sleep(self._head_start_cycles)  # type: ignore[no-untyped-call]
            begin.record()
            run()
            end.record()
            began_too_early = begin.query()  # type: ignore[no-untyped-call]
            end.synchronize()
            if not began_too_early or self._head_start_cycles >= _MOST_HEAD_START_CYCLES:
                return float(begin.elapsed_time(end)) / 1e3
            self._head_start_cycles *= 4

    def wall_s(self, run: Run) -> float:
        """Returns the wall-clock seconds of one call and of all that it leaves to the device."""
        self._setting.synchronize()
        start = time.perf_counter()
        run()
        self._setting.synchronize()
        return time.perf_counter() - start


def in_turns(
    subjects: Mapping[str, Run], setting: Setting, measure: Callable[[Run], float], *, rounds: int | None = None
) -> dict[str, Samples]:
    """Rounds of all subjects, A B A B ..., so that they see the same clocks and temperatures; a sample each.

    Ends early, with at least one round, when the part's time is over.

    :param measure: `DeviceClock.seconds` or `DeviceClock.wall_s`.
    :param rounds: that count; what the setting says when None.
    """
    samples = {name: Samples() for name in subjects}
    for _ in range(1 if setting.tiny else _WARM_UPS):
        for run in subjects.values():
            run()
    if setting.on_cuda:
        torch.cuda._sleep(_WAKING_CYCLES)  # type: ignore[no-untyped-call]
    for number in range(rounds or setting.rounds):
        if number and setting.left_s() < 0:
            break
        for name, run in subjects.items():
            note(samples[name], measure(run))
    return samples


def note(samples: Samples, seconds: float) -> None:
    """One more round, of one call."""
    samples.rounds_s.append(seconds)
    samples.calls_s.append(seconds)
