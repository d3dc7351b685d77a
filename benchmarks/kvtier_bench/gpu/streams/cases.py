"""Loads and saves as engines ask for them, and how long they take."""

from dataclasses import dataclass

from kvtier_bench.gpu.streams.devices import Fences
from kvtier_bench.gpu.streams.worker import Model, Worker, keys_of, worker

LLAMA_8B = Model("8B", num_layers=32, page_bytes=64 << 10)
LLAMA_70B_RANK = Model("70B, one rank of 8", num_layers=80, page_bytes=8 << 10)
_TOKENS_PER_BLOCK = 16
_BEFORE = 3
"""How many steps the engine has queued before anything is asked for."""


@dataclass(frozen=True, slots=True)
class LoadTime:
    """The time of one load beside steps."""

    seconds: float
    """The time from the request for the load until everything was on the device."""
    told_s: float
    """What the planner hears that the tier took."""
    gb_per_s: float


@dataclass(frozen=True, slots=True)
class SaveRate:
    """The speed of saves beside steps."""

    gb_per_s: float
    """The speed while copies were under way."""
    steps_behind: float | None = None
    """How many steps' blocks were not saved when the last step but one was over: those of the last two, at least."""
    num_dropped: int = 0
    """The number of blocks that there was no room for."""


def load_from_host(model: Model, *, num_tokens: int, step_s: float, fences: Fences) -> LoadTime:
    """Loads a prompt that is in the arena."""
    num_blocks = num_tokens // _TOKENS_PER_BLOCK
    with worker(model, num_blocks=num_blocks, num_slots=2 * num_blocks, step_s=step_s, fences=fences) as engine:
        _fill_arena(engine, num_blocks)
        return _load(engine, num_blocks)


def load_from_pool(model: Model, *, num_tokens: int, step_s: float, fences: Fences) -> LoadTime:
    """Loads a prompt that the pool lends."""
    num_blocks = num_tokens // _TOKENS_PER_BLOCK
    with worker(model, num_blocks=num_blocks, num_slots=64, step_s=step_s, fences=fences) as engine:
        return _load(engine, num_blocks)


def save_prefill(model: Model, *, tokens_per_s: float, step_s: float, num_steps: int, fences: Fences) -> SaveRate:
    """Saves what each step computes."""
    per_step = int(tokens_per_s * step_s) // _TOKENS_PER_BLOCK
    num_blocks = per_step * (num_steps + 1)
    with worker(model, num_blocks=num_blocks, num_slots=2 * num_blocks, step_s=step_s, fences=fences) as engine:
        dropped = 0
        for number in range(num_steps):
            blocks = range(number * per_step, (number + 1) * per_step)
            dropped += max(0, per_step - engine.directory.room_for_saves)
            engine.directory.start_save(list(zip(keys_of(blocks), blocks, strict=True)))
            engine.step()
        behind = (per_step * num_steps - sum(copy.num_blocks for copy in engine.device.copies)) / per_step
        return SaveRate(engine.device.gb_per_s(), behind, dropped)


def spill(model: Model, *, num_bytes: int, step_s: float, fences: Fences) -> SaveRate:
    """Saves much at once that was computed long ago."""
    num_blocks = num_bytes // model.block_bytes
    with worker(model, num_blocks=num_blocks, num_slots=2 * num_blocks, step_s=step_s, fences=fences) as engine:
        for _ in range(_BEFORE):
            engine.step()
        job = engine.directory.start_save(list(zip(keys_of(range(num_blocks)), range(num_blocks), strict=True)))
        while not any(result.job_id == job for result in engine.step()):
            pass
        return SaveRate(engine.device.gb_per_s())


def _fill_arena(engine: Worker, num_blocks: int) -> None:
    job = engine.directory.start_save(list(zip(keys_of(range(num_blocks)), range(num_blocks), strict=True)))
    assert job is not None
    engine.idle_until_over(job)
    engine.device.copies.clear()


def _load(engine: Worker, num_blocks: int) -> LoadTime:
    for _ in range(_BEFORE):
        engine.step()
    begin = engine.now
    job = engine.directory.start_load(list(zip(keys_of(range(num_blocks)), range(num_blocks), strict=True)))
    while not (ended := [result for result in engine.step() if result.job_id == job]):
        pass
    assert not ended[0].failed
    seconds = max(copy.end_s for copy in engine.device.copies) - begin
    return LoadTime(seconds, engine.told_s, num_blocks * engine.device.block_bytes / seconds / 1e9)
