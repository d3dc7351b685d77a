"""How `make gpu` times: in turns, without launching, and beside an engine that is never idle."""

import pytest
import torch

from gpu_bench_rig import tiny
from kvtier.device.kv import Fence
from kvtier_bench.gpu.measuring import launch_latency, timing
from kvtier_bench.gpu.measuring.engine_steps import NeverIdle
from kvtier_bench.gpu.measuring.meanwhile import meanwhile
from kvtier_bench.gpu.measuring.setting import Setting
from kvtier_bench.gpu.measuring.timing import in_turns


def test_turns_alternate_until_the_time_is_over() -> None:
    order: list[str] = []
    now = [0.0]

    def measured(run: object) -> float:
        now[0] += 1
        run()  # type: ignore[operator]
        return now[0]

    setting = Setting(torch.device("cpu"), True, torch.float32, 4.5, clock=lambda: now[0])
    samples = in_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, setting, measured, rounds=100)
    assert order == ["a", "b"] * 4, "once to warm up; a third round had begun when the time was over"
    assert samples["a"].rounds_s == [1, 3, 5]
    assert samples["b"].calls_s == [2, 4, 6]


class EventsOfADevice:
    """`torch.cuda` as far as a clock takes it: a device that the host keeps waiting unless its head start is long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, launching_cycles: int) -> None:
        self.launching_cycles = launching_cycles
        self.slept: list[int] = []
        monkeypatch.setattr(torch.cuda, "_sleep", self.slept.append)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: self)
        monkeypatch.setattr(Setting, "on_cuda", property(lambda _: True))
        monkeypatch.setattr(timing, "_FLUSH_BYTES", 64)

    def record(self) -> None: ...

    def query(self) -> bool:
        return self.slept[-1] < self.launching_cycles

    def synchronize(self) -> None: ...

    def elapsed_time(self, _end: object) -> float:
        return 1000.0 if self.query() else 2.0


def test_launching_is_not_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much head start as launching takes; for what waits for the device itself, none is enough."""
    device = EventsOfADevice(monkeypatch, launching_cycles=5_000_000)
    runs: list[int] = []
    clock = timing.DeviceClock(tiny())
    assert clock.seconds(lambda: runs.append(1)) == 2e-3
    assert clock.seconds(lambda: runs.append(1)) == 2e-3
    assert len(device.slept) == len(runs) == 2 + 1 + 1, "found once, then known"
    device.launching_cycles = 1 << 40
    assert clock.seconds(lambda: None) == 1.0


def test_launches_that_were_under_way_are_counted() -> None:
    launches = [(0.0, 1.0), (2.0, 1.5), (3.9, 0.2), (4.0, 9.0)]
    assert launch_latency.during(launches, 3.0, 4.0) == [1.5, 0.2]


def test_an_engine_has_two_steps_queued_at_all_times(monkeypatch: pytest.MonkeyPatch) -> None:
    queued: list[int] = []
    notes: list[str] = []

    def step() -> None:
        queued.append(1)
        notes.append("step")

    class End:
        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            assert len(queued) == 2, "another one runs when this one has ended"
            queued.pop()

        def elapsed_time(self, _later: object) -> float:
            return 1000.0

    monkeypatch.setattr("kvtier_bench.gpu.measuring.engine_steps._event", lambda _: End())
    fences = [Fence() for _ in range(4)]
    made, left = iter(fences), iter([True, True, False])
    engine = NeverIdle(tiny(), step, 0.0, lambda: next(made))
    engine.run_while(lambda: next(left), before=lambda: notes.append("load"), after=lambda: notes.append("save"))
    assert notes == ["load", "step", "step", "save", *["load", "step", "save"] * 2]
    assert engine.steps_s == [1.0, 1.0]
    assert engine.processed is fences[2], "a load waits for the step that has ended, not for the one under way"


def test_what_goes_on_meanwhile_is_under_way_and_ends() -> None:
    moves: list[int] = []

    def move() -> int:
        moves.append(1)
        return 10

    with meanwhile(move) as speed:
        assert moves
    assert speed.result() > 0
    with meanwhile(lambda: 1 // 0) as failing:
        pass
    with pytest.raises(ZeroDivisionError):
        failing.result()
