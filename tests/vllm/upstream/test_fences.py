"""A device that runs behind: what loads and saves come after, under vLLM's own scheduler."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from stepping_rank import BLOCK, Rank
from stepping_rig import Engine
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from kvtier.device.kv import DeviceKV, Fence
from kvtier.memory.arena import Arena
from kvtier.memory.slot_memory import SlotMemory

Start = Callable[..., Engine]
MODES = pytest.mark.parametrize("mode", [{}, {"async_scheduling": True}], ids=["plain", "asynchronous"])


class StepFence(Fence):
    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        """Forward passes queued before it."""


@dataclass(frozen=True)
class Copy:
    kind: str
    device_blocks: frozenset[int]
    num_before: int
    """Forward passes before its fence."""
    num_queued: int
    """Forward passes when it ended."""


class LateDevice:
    """Notes what copies wait for, and which device blocks every forward pass uses."""

    def __init__(self, rank: Rank) -> None:
        self._inner: DeviceKV = rank.mover._memory.device
        self.block_bytes = self._inner.block_bytes
        self.used: list[set[int]] = []
        """By each forward pass."""
        self.copies: list[Copy] = []
        rank.mover._memory.device = self
        compute, model = rank.model.run, rank.model

        def run(output: SchedulerOutput) -> ModelRunnerOutput:
            result = compute(output)
            if output.total_num_scheduled_tokens:
                tables = (model._running[request_id].blocks for request_id in output.num_scheduled_tokens)
                self.used.append(set().union(*tables))
            return result

        rank.model.run = run  # type: ignore[method-assign]

    def fence(self) -> Fence:
        return StepFence(len(self.used))

    def gather(
        self, device_slots: Sequence[int], arena: Arena, arena_slots: Sequence[int], *, after: Fence | None
    ) -> None:
        self._inner.gather(device_slots, arena, arena_slots, after=None)
        self._note("save", device_slots, after)

    def scatter(
        self, arena: SlotMemory, arena_slots: Sequence[int], device_slots: Sequence[int], *, after: Fence | None
    ) -> float:
        self._inner.scatter(arena, arena_slots, device_slots, after=None)
        self._note("load", device_slots, after)
        return 0.0

    def _note(self, kind: str, device_slots: Sequence[int], after: Fence | None) -> None:
        assert isinstance(after, StepFence)
        self.copies.append(Copy(kind, frozenset(device_slots), after.num_steps, len(self.used)))

    def require_order(self) -> None:
        """No forward pass that a load does not wait for uses its device blocks until it ends."""
        for copy in self.copies:
            if copy.kind == "load":
                for number in range(copy.num_before, copy.num_queued):
                    assert not copy.device_blocks & self.used[number], (copy, number)


def churn(engine: Engine) -> None:
    """Prompts that come again, on a device that holds three of them; aborts, preemptions, a reset while some run."""
    random = np.random.default_rng(4)
    for turn in range(60):
        request_id = engine.ask(
            int(random.integers(8)), int(random.integers(20, 150)), max_tokens=int(random.integers(2, 40))
        )
        for _ in range(int(random.integers(1, 12))):
            engine.step()
        if turn % 7 == 3 and not engine.requests[request_id].is_finished():
            engine.abort(request_id)
        if turn % 20 == 11:
            with contextlib.suppress(RuntimeError):  # raised when all are preempted, for blocks that are freed late
                engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.finish()


@MODES
def test_loads_come_after_all_that_used_their_blocks(start: Start, mode: dict[str, bool]) -> None:
    engine = start(num_blocks=28, **mode)
    device = LateDevice(engine.ranks[0])
    churn(engine)
    assert engine.num_preemptions, "blocks of running requests were taken away"
    loads = [copy for copy in device.copies if copy.kind == "load"]
    assert len(loads) > 10
    device.require_order()
    engine.require_right_answers()


@pytest.mark.parametrize("frees_late", [True, False])
def test_loads_do_not_wait_for_the_step_that_is_under_way(start: Start, frees_late: bool) -> None:
    """While one request decodes, another one loads: behind the last step that was processed, not behind the one that
    the device has at work. Where vLLM gives blocks away earlier than that, behind all."""
    engine = start(async_scheduling=True)
    engine.scheduler.defer_block_free = frees_late
    device = LateDevice(engine.ranks[0])
    engine.ask(1, 10 * BLOCK)
    engine.finish()
    engine.forget_device()
    decoding = engine.ask(2, 20, max_tokens=200)
    for _ in range(20):
        engine.step()
    again = engine.ask(1, 10 * BLOCK)
    queued = len(device.used)
    engine.until(lambda: engine.requests[again].is_finished(), "it is answered")
    assert not engine.requests[decoding].is_finished()
    (load,) = (copy for copy in device.copies if copy.kind == "load")
    assert load.num_before == (queued - 1 if frees_late else queued)
    engine.finish()
    engine.require_right_answers()


@MODES
def test_saves_come_after_the_step_that_wrote_their_blocks(start: Start, mode: dict[str, bool]) -> None:
    engine = start(**mode)
    device = LateDevice(engine.ranks[0])
    engine.ask(1, 10 * BLOCK, max_tokens=3 * BLOCK)
    engine.finish()
    saves = [copy for copy in device.copies if copy.kind == "save"]
    assert sum(len(copy.device_blocks) for copy in saves) >= 12
    for copy in saves:
        first_use = {
            block: next(n for n, used in enumerate(device.used) if block in used) for block in copy.device_blocks
        }
        assert copy.num_before > max(first_use.values())
