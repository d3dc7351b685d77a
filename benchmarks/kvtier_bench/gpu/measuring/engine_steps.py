"""What an engine's steps do to a device, without an engine: attention and products of a prefill, over and over."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from kvtier.device.kv import Fence
from kvtier_bench.gpu.measuring.attending import prefilling
from kvtier_bench.gpu.measuring.setting import Run, Setting
from kvtier_bench.gpu.measuring.shapes import heads_of, paged

_QUEUED = 2
"""The step that runs, and the next one: what an engine has queued that schedules without waiting for results."""
_BUSY = 0.5
"""The share of a step that the engine's thread spends in Python. It waits for the rest of the step, without the GIL."""
_CALIBRATED = 8
"""Layers that are timed to know how many a step takes."""


def prefill_work(setting: Setting) -> Callable[[int], None]:
    """Queues so many layers' worth of what a prefill of 2,048 tokens after 16,384 does, on the current stream."""
    heads = heads_of(setting)
    new, cached = setting.size(2048, 5), setting.size(16_384, 11)
    attend = prefilling(setting, paged(setting, heads, num_seqs=1, new=new, cached=cached), heads)
    hidden, wide = setting.size(4096, 16), setting.size(14_336, 24)
    activations = torch.randn((new, hidden), dtype=setting.dtype, device=setting.device)
    up = torch.randn((hidden, wide), dtype=setting.dtype, device=setting.device)

    def work(num_layers: int) -> None:
        for _ in range(num_layers):
            attend()
            torch.matmul(torch.matmul(activations, up), up.T)

    return work


def step_of(setting: Setting, work: Callable[[int], None], seconds: float) -> Run:
    """A step of as many layers as take about so long on this device, at least one."""
    work(_CALIBRATED)  # kernels are compiled
    setting.synchronize()
    begin = time.perf_counter()
    work(_CALIBRATED)
    setting.synchronize()
    num_layers = max(1, round(seconds * _CALIBRATED / (time.perf_counter() - begin)))
    return lambda: work(num_layers)


class NeverIdle:
    """An engine whose device always has work queued on the engine's stream, and whose thread is busy with Python.

    The thread that calls it is the engine's; its current stream is the engine's stream. One thread.
    """

    def __init__(
        self, setting: Setting, step: Run, step_s: float, fence: Callable[[], Fence | None] = lambda: None
    ) -> None:
        """:param fence: of the mover's; called when a step has been queued."""
        self._setting, self._step, self._busy_s, self._fence = setting, step, _BUSY * step_s, fence
        self._ends: deque[tuple[Any, Fence | None]] = deque()
        self._last_end: Any = None
        self.processed: Fence | None = None
        """The fence behind the last step that has ended. Loads wait for it: no later step uses their device slots."""
        self.steps_s: list[float] = []
        """How long each step took on the device, from the end of the one before."""

    def queue_ahead(self) -> None:
        """Queues steps until two are queued."""
        while len(self._ends) < _QUEUED:
            self._step()
            self._ends.append((_event(self._setting), self._fence()))

    def run_while(
        self,
        wanted: Callable[[], bool],
        *,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Runs steps as long as it is wanted, at least one.

        :param before: called before a step is queued, as an engine asks for loads.
        :param after: called when a step has been queued, as an engine asks for saves of what it writes.
        """
        while True:
            before()
            self.queue_ahead()
            after()
            self._end_of_step()
            if not wanted():
                return

    def drain(self) -> None:
        """Ends the steps that are queued."""
        while self._ends:
            self._end_of_step()
        self._last_end = None  # the device is idle from now on

    def _end_of_step(self) -> None:
        end, fence = self._ends.popleft()
        until = time.perf_counter() + self._busy_s
        while time.perf_counter() < until and not end.query():
            sum(range(200))
        end.synchronize()
        if self._last_end is not None:
            self.steps_s.append(self._last_end.elapsed_time(end) / 1e3)
        self._last_end, self.processed = end, fence


class _HostEvent:
    """An event where there is no device: work is done when it has been called."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: "_HostEvent") -> float:
        """Milliseconds, as events of CUDA have them."""
        return (later._at_s - self._at_s) * 1e3


def _event(setting: Setting) -> Any:
    """An event that is recorded on the current stream. Waiting for it does not spin."""
    if not setting.on_cuda:
        return _HostEvent()
    event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
