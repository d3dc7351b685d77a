"""What the planner learns of computing, on a device that computes while the host goes on. All times are virtual."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from clock_rig import StillClock
from engine_rig import TOKENS_PER_BLOCK, EngineRig, MakeRig, rigs
from kvtier.offload.planner import BlockStatus, FetchIfFaster
from kvtier.tiers.base import Status
from kvtier_engine.model.llama import Chunk
from kvtier_engine.model.paged_kv import PagedKV, allocate_kv
from kvtier_engine.scheduling.metrics import EngineMetrics
from kvtier_engine.scheduling.scheduler import Scheduler, SchedulerSettings
from tiny_model import CONFIG, prompt

make_rig = pytest.fixture(rigs)

LAUNCH_S = 0.010
BLOCK_S = 0.00051
"""Seconds that computing one block of a prompt takes."""
BATCH_TOKENS = 1024
CHUNK_S = BATCH_TOKENS / TOKENS_PER_BLOCK * BLOCK_S
CPU, META = torch.device("cpu"), torch.device("meta")
"""Tensors without memory stand for those of CUDA."""


class _Device:
    """Computes one step after the other; `forward` waits for it only where it is `synchronous`."""

    def __init__(self, clock: StillClock, *, synchronous: bool) -> None:
        self._clock, self._synchronous = clock, synchronous
        self._busy_until_s = 0.0
        self.busy_s = 0.0

    def forward(self, chunks: Sequence[Chunk], _kv: PagedKV) -> Any:
        self._clock.now_s += LAUNCH_S
        seconds = sum(len(chunk.token_ids) for chunk in chunks) / TOKENS_PER_BLOCK * BLOCK_S
        self._busy_until_s = max(self._busy_until_s, self._clock.now_s) + seconds
        self.busy_s += seconds
        if self._synchronous:
            self.wait()
        return [_Row(self.wait) for _ in chunks]

    def wait(self) -> None:
        self._clock.now_s = max(self._clock.now_s, self._busy_until_s)


class _Row:
    """Logits that are there when somebody looks at them."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def argmax(self) -> Tensor:
        self._wait()
        return torch.tensor(1)


class _Timed:
    """An engine over such a device, and what it told the planner."""

    def __init__(self, rig: EngineRig, device: torch.device) -> None:
        self.rig, self.clock, registry = rig, StillClock(), CollectorRegistry()
        self.model = _Device(self.clock, synchronous=device == CPU)
        kv = allocate_kv(CONFIG, rig.kv.num_blocks, TOKENS_PER_BLOCK, torch.float32, device)
        self.metrics = EngineMetrics(registry)
        settings = SchedulerSettings(max_batch_tokens=BATCH_TOKENS)
        rig.scheduler = Scheduler(self.model, kv, rig.cache, self.metrics, settings, self.clock)
        self.booked: list[tuple[list[int], float]] = []
        note_computed = rig.cache.note_computed

        def note(num_tokens: Sequence[int], seconds: float) -> None:
            self.booked.append((list(num_tokens), seconds))
            note_computed(num_tokens, seconds)

        rig.cache.note_computed = note  # type: ignore[method-assign]

    @property
    def speeds(self) -> Any:
        assert self.rig.hierarchy is not None
        return self.rig.hierarchy._directory.speeds

    def total(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(f"kvtier_engine_{name}_seconds_total") or 0.0


@pytest.mark.parametrize("device", [META, CPU], ids=["asynchronous", "synchronous"])
def test_the_planner_learns_what_computing_takes(make_rig: MakeRig, device: torch.device) -> None:
    """Prompts of five chunks, of which only the last one is waited for."""
    timed = _Timed(make_rig(num_blocks=2000, num_slots=16), device)
    for seed in range(6):
        timed.rig.ask(prompt(5 * BATCH_TOKENS - 7, seed=seed), max_tokens=1)
        assert timed.speeds.computing_s() == pytest.approx(BLOCK_S, rel=0.1), f"after {seed + 1} prompts"
    timed.speeds.fetch_begins("disk", 100)
    timed.speeds.fetch_ends("disk", 100, num_there=100, seconds=100 * 1.5 * BLOCK_S)
    statuses = [BlockStatus(Status.HIT, "disk")] * 64
    assert FetchIfFaster(timed.speeds).blocks_to_fetch(statuses) == 64, "in less than twice the time"
    assert timed.total("forward") == pytest.approx(timed.model.busy_s, rel=0.1)
    assert timed.total("forward") <= timed.total("step")


def test_steps_up_to_a_sample_are_booked_as_one(make_rig: MakeRig) -> None:
    timed = _Timed(make_rig(num_blocks=2000, num_slots=16), META)
    timed.rig.ask(prompt(3 * BATCH_TOKENS), max_tokens=2)
    (prefill, prefill_s), (decode, decode_s) = timed.booked
    assert (prefill, decode) == ([BATCH_TOKENS] * 3, [1])
    assert prefill_s == pytest.approx(LAUNCH_S + 3 * CHUNK_S)
    assert decode_s == pytest.approx(LAUNCH_S + BLOCK_S / TOKENS_PER_BLOCK)


def test_on_cpu_each_step_is_booked_by_itself(make_rig: MakeRig) -> None:
    timed = _Timed(make_rig(num_blocks=2000, num_slots=16), CPU)
    timed.rig.ask(prompt(3 * BATCH_TOKENS), max_tokens=2)
    assert [num_tokens for num_tokens, _ in timed.booked] == [[BATCH_TOKENS]] * 3 + [[1]]
    assert [seconds for _, seconds in timed.booked[:3]] == pytest.approx([LAUNCH_S + CHUNK_S] * 3)


def test_time_in_which_nothing_was_to_be_computed_does_not_count(make_rig: MakeRig) -> None:
    """A prompt is given up after its first chunk, and the next one comes much later."""
    timed = _Timed(make_rig(num_blocks=2000, num_slots=16), META)
    rig = timed.rig
    given_up = rig.add(prompt(3 * BATCH_TOKENS), max_tokens=1)
    rig.run_until(rig.step)
    rig.scheduler.cancel(given_up)
    rig.run()
    assert not rig.step()
    timed.clock.now_s += 60.0
    rig.ask(prompt(2 * BATCH_TOKENS, seed=1), max_tokens=1)
    ((num_tokens, seconds),) = timed.booked
    assert num_tokens == [BATCH_TOKENS] * 2
    assert seconds == pytest.approx(LAUNCH_S + 2 * CHUNK_S)
