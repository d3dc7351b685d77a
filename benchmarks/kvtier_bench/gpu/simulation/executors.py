"""Thread pools whose threads are actors of a timeline."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest import mock

from kvtier.offload.mover import fetcher, threads
from kvtier_bench.gpu.simulation.timeline import Timeline


class ActingExecutor(ThreadPoolExecutor):
    """Each task begins some time after it was due, and time stands still while one of them runs."""

    def __init__(self, num_threads: int, name: str, *, timeline: Timeline, delay_s: Callable[[], float]) -> None:
        super().__init__(num_threads, name)
        self._num_threads, self._timeline, self._delay_s = num_threads, timeline, delay_s
        self._num_open = 0
        """The number of tasks that have not ended. Guarded by the timeline's lock."""

    def submit(self, does: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        with self._timeline.lock:
            self._num_open += 1
            if self._num_open <= self._num_threads:
                self._timeline.begin_acting()
            delay_s = self._delay_s()  # here, since the order in which threads begin is the system's
        return super().submit(self._run, delay_s, does, *args, **options)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._timeline.outside():
            super().shutdown(wait, cancel_futures=cancel_futures)

    def _run(self, delay_s: float, does: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            with self._timeline.taking_over():
                self._timeline.sleep(delay_s)
                return does(*args, **options)
        finally:
            with self._timeline.lock:
                self._num_open -= 1
                if self._num_open < self._num_threads:  # else its thread goes on with the next one
                    self._timeline.end_acting()


@contextlib.contextmanager
def acting_movers(timeline: Timeline, delay_s: Callable[[], float]) -> Iterator[None]:
    """Makes threads of new movers actors within the context, and has movers tell the time by the timeline.

    :param delay_s: how long a task waits before it begins; called for each.
    """

    def executor(num_threads: int, name: str) -> ActingExecutor:
        return ActingExecutor(num_threads, name, timeline=timeline, delay_s=delay_s)

    with (
        mock.patch.object(threads, "started_threads", executor),
        mock.patch.object(fetcher, "MONOTONIC", timeline.clock),
    ):
        yield
