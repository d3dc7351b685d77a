"""The simulated device keeps what streams and events promise, and nothing else."""

import threading
from collections.abc import Iterator

import pytest
import torch

from kvtier_bench.gpu.simulation.cuda import SimulatedCuda
from kvtier_bench.gpu.simulation.device import Stream, Work
from kvtier_bench.gpu.simulation.executors import ActingExecutor
from kvtier_bench.gpu.simulation.launches import simulated_launches
from kvtier_bench.gpu.simulation.timeline import SimulationError, Timeline


class Slow:
    """A second for each byte."""

    def __init__(self, *, waits_to_be_wanted: bool = False) -> None:
        self.waits_to_be_wanted = waits_to_be_wanted

    def seconds(self, _stream: Stream, work: Work) -> tuple[float, bool]:
        return float(work.nbytes), False


@pytest.fixture
def cuda() -> Iterator[SimulatedCuda]:
    cuda = SimulatedCuda(Timeline(), Slow())
    with cuda.device(0):
        yield cuda


def test_a_stream_keeps_its_order_and_others_do_not_wait(cuda: SimulatedCuda) -> None:
    done: list[str] = []
    other = cuda.Stream()
    cuda.launch(lambda: done.append("first"), seconds=3)
    cuda.launch(lambda: done.append("second"), seconds=1)
    with cuda.stream(other):
        cuda.launch(lambda: done.append("other"), seconds=2)
    assert done == []
    cuda.synchronize()
    assert done == ["other", "first", "second"]
    assert cuda.timeline.now == 4


def test_a_wait_is_for_what_was_recorded_before_it(cuda: SimulatedCuda) -> None:
    done: list[str] = []
    other, event = cuda.Stream(), cuda.Event()
    other.wait_event(event)  # which nobody has recorded
    cuda.launch(lambda: done.append("first"), seconds=2)
    event.record(cuda.current_stream())
    other.wait_event(event)
    cuda.launch(lambda: done.append("second"), seconds=2)
    event.record(cuda.current_stream())
    with cuda.stream(other):
        cuda.launch(lambda: done.append("other"), seconds=1)
    other.synchronize()
    assert (done, cuda.timeline.now) == (["first", "other"], 3)
    event.synchronize()
    assert (done, cuda.timeline.now) == (["first", "other", "second"], 4)


def test_each_direction_does_one_copy_at_a_time(cuda: SimulatedCuda) -> None:
    host, device = torch.zeros(64, dtype=torch.uint8), torch.ones(64, dtype=torch.uint8)
    assert cuda.cudaHostRegister(host.data_ptr(), 64, 0) == 0
    streams = [cuda.Stream() for _ in range(3)]
    with simulated_launches(cuda):
        for stream, (target, source) in zip(streams, [(host, device), (host, device), (device, host)], strict=True):
            with cuda.stream(stream):
                target[:5].copy_(source[:5], non_blocking=True)
    assert not host.any()
    streams[2].synchronize()
    assert cuda.timeline.now == 5
    streams[1].synchronize()
    assert cuda.timeline.now == 10
    assert host.sum() == 5


def test_nothing_is_done_before_somebody_wants_it() -> None:
    cuda = SimulatedCuda(Timeline(), Slow(waits_to_be_wanted=True))
    done: list[str] = []
    with cuda.device(0):
        first, second = cuda.Stream(), cuda.Stream()
        for stream, name in ((first, "first"), (second, "second")):
            with cuda.stream(stream):
                cuda.launch(lambda name=name: done.append(name), nbytes=1)  # type: ignore[misc]
        cuda.timeline.sleep(10)
        assert done == []
        second.wait_stream(first)
        event = second.record_event()
        with cuda.stream(second):
            cuda.launch(lambda: done.append("later"), nbytes=1)
        event.synchronize()
    assert sorted(done) == ["first", "second"]


def test_a_wait_for_nothing_ends_with_an_error(cuda: SimulatedCuda) -> None:
    first, second = cuda.Stream(), cuda.Stream()
    with pytest.raises(SimulationError, match="nothing can happen"):
        cuda.timeline.wait_for(lambda: first is second, "never")


def test_misuse_is_noted() -> None:
    """A thread that has not chosen its GPU, and memory that is unpinned under a copy."""
    cuda = SimulatedCuda(Timeline(), Slow())
    host = torch.zeros(8, dtype=torch.uint8)
    with cuda.stream(cuda.Stream()):
        pass
    assert [problem.split("outside")[0] for problem in cuda.problems] == ["thread MainThread enters a stream "]
    cuda.problems.clear()
    with cuda.device(0):
        cuda.cudaHostRegister(host.data_ptr(), 8, 0)
        cuda.launch_copy(lambda: None, host.data_ptr(), 0, 8)
        cuda.cudaHostUnregister(host.data_ptr())
        cuda.synchronize()
    assert cuda.problems == ["memory was unpinned under a copy"]


def test_time_stands_still_while_a_thread_of_a_pool_runs() -> None:
    """Tasks begin in the order of their delays, whatever the system does, and time goes on only when all wait."""
    timeline, begun = Timeline(), []
    delays = iter([3.0, 1.0, 2.0])
    gate = threading.Event()

    def task(name: str) -> None:
        begun.append((name, timeline.now))
        if name == "b":
            gate.wait(10)
        timeline.sleep(10)

    with timeline.acting():
        executor = ActingExecutor(3, "test", timeline=timeline, delay_s=lambda: next(delays))
        tasks = [executor.submit(task, name) for name in "abc"]
        threading.Timer(0.05, gate.set).start()
        timeline.sleep(20)
        assert begun == [("b", 1), ("c", 2), ("a", 3)]
        assert all(task.done() for task in tasks)
        assert timeline.now == 20
        executor.shutdown()
