"""Loads and saves beside an engine that never idles: their speed, and what the engine's steps lose by it.

The engine has two steps queued ahead on its stream, and its thread is busy with Python for half of each. Blocks are
moved by the mover that engines have, whose fences are made on that stream.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median

import torch

from kvtier.clock import MONOTONIC
from kvtier.identity.keys import NamespaceId
from kvtier.memory.arena import Arena
from kvtier.offload.inventory import InventoryLog
from kvtier.offload.mover import Mover, MoverTiers
from kvtier_bench.gpu.measuring.comparing import require_equal
from kvtier_bench.gpu.measuring.each import each
from kvtier_bench.gpu.measuring.engine_steps import NeverIdle, prefill_work, step_of
from kvtier_bench.gpu.measuring.host_copies import require_pinned
from kvtier_bench.gpu.measuring.layouts import DeviceBlocks, Layout, mover_of
from kvtier_bench.gpu.measuring.meanwhile import meanwhile
from kvtier_bench.gpu.measuring.mover_jobs import LOAD, SAVE, Answers, MoverJobs
from kvtier_bench.gpu.measuring.rows import Bar, held_to, median_s, row
from kvtier_bench.gpu.measuring.setting import Run, Setting
from kvtier_bench.gpu.measuring.timing import note
from kvtier_bench.gpu.parts.copies import block_copy_of
from kvtier_bench.measuring.report import Case
from kvtier_bench.measuring.rounds import Samples

_STEPS_S = (0.25, 0.06, 0.015)
"""A chunk of 8,192 tokens of prompt, one of 2,048, and decodes. The one that hurts most comes first."""
_LAYOUT = Layout("32 x 64 KiB", 32, 64 << 10)
_TINY_LAYOUT = Layout("4 x 1 KiB", 4, 1024)
_LINK_BYTES_PER_S = 50e9
"""Enough is asked for to keep a bus of this speed busy."""
_ROUNDS = 3
_WINDOW_S = 2.0
"""The time in which copies go on and on."""
_IDLE_JOBS = 3
_STEPS_TIMED = 8
_AHEAD = 2
"""How many steps are queued: what they write can be saved when they have ended."""
_LEAST_SHARE, _MOST_TIMES_IDLE = 0.5, 2.0


def measure(setting: Setting) -> Iterator[Case]:
    """2 GiB of blocks, idle and beside steps of 250, 60 and 15 ms; then a kernel that crosses the bus beside them."""
    layout = _TINY_LAYOUT if setting.tiny else _LAYOUT
    blocks = DeviceBlocks(setting, layout, setting.size(1024, 8))
    work = prefill_work(setting)
    arena = Arena(blocks.num_slots, layout.block_bytes)
    with contextlib.ExitStack() as stack:
        stack.callback(arena.close)
        device = stack.enter_context(mover_of(setting, blocks))
        device.attach(arena)
        namespace = NamespaceId(bytes(16))
        tiers = MoverTiers(by_name={}, inventory=InventoryLog([], namespace))
        mover = Mover(namespace=namespace, device=device, arena=arena, tiers=tiers)
        stack.callback(mover.close)
        copies = _Copies(setting, blocks, arena, mover)
        for kind in (SAVE, LOAD):
            copies.one_job(kind, None)
        require_pinned(setting, arena)
        steps_s = [0.001] if setting.tiny else _STEPS_S
        yield from each(
            setting,
            {f"copies {_beside(of)}": partial(_beside_steps, setting, copies, work, mover, of) for of in steps_s},
        )


def _beside(step_s: float) -> str:
    """Returns what rows of a report call steps of this length."""
    return f"beside steps of {step_s * 1e3:.0f} ms"


def _beside_steps(
    setting: Setting, copies: "_Copies", work: Callable[[int], None], mover: Mover, step_s: float
) -> Iterator[Case]:
    """Everything beside an engine whose steps take so long."""
    engine = NeverIdle(setting, step_of(setting, work, step_s), step_s, mover.fence)
    cases: dict[str, Callable[[], Iterator[Case]]] = {
        f"{kind}s {_beside(step_s)}": partial(_of_kind, kind, setting, copies, engine, step_s) for kind in (LOAD, SAVE)
    }
    crossing = f"a kernel that crosses the bus {_beside(step_s)}"
    yield from each(setting, {**cases, crossing: partial(_crossing, setting, engine, crossing)})


def _of_kind(kind: str, setting: Setting, copies: "_Copies", engine: NeverIdle, step_s: float) -> Iterator[Case]:
    """Times one job alone, then as many as the bus takes."""
    op, nbytes = _beside(step_s), copies.job_bytes
    idle, busy = Samples(), Samples()
    for _ in range(setting.size(_ROUNDS, 1)):
        note(idle, copies.one_job(kind, None))
        note(busy, copies.one_job(kind, engine))
    yield row(f"{kind} of {nbytes / 2**30:.1f} GiB, idle engine", op, idle, round_bytes=nbytes)
    case = row(f"{kind} of {nbytes / 2**30:.1f} GiB", op, busy, floor=("idle", idle), round_bytes=nbytes)
    latency = Bar("x an idle engine's time", median_s(busy) / median_s(idle), _MOST_TIMES_IDLE, at_most=True)
    yield held_to(case, latency, tiny=setting.tiny or step_s < _STEPS_S[0])
    idle_speed = copies.on_and_on(kind, None, step_s)
    alone_s = median(_steps(setting, engine))
    engine.steps_s.clear()
    speed = copies.on_and_on(kind, engine, step_s)
    steps = Samples(list(engine.steps_s), list(engine.steps_s))
    slower = 100 * (median(engine.steps_s) / alone_s - 1)
    figures = {"GB/s": speed / 1e9, "GB/s, idle engine": idle_speed / 1e9, "% slower steps": slower}
    shown = f"{speed / 1e9:,.1f} GB/s, {slower:,.1f} % slower steps"
    case = Case.of(f"{kind}s on and on", op, steps, unit="step", figures=figures, detail=shown)
    yield held_to(case, Bar("x an idle engine's", speed / idle_speed, _LEAST_SHARE), tiny=setting.tiny)


def _crossing(setting: Setting, engine: NeverIdle, op: str) -> Iterator[Case]:
    """`block_copy` of few programs to and from pinned memory, scattered blocks, on a stream of its own."""
    block_bytes = setting.size(640 << 10, 1024)
    count = setting.size(128 << 20, 8 * block_bytes) // block_bytes
    kv = torch.empty((2 * count, block_bytes), dtype=torch.uint8, device=setting.device).random_(0, 256)
    pinned = torch.zeros((count, block_bytes), dtype=torch.uint8, pin_memory=setting.on_cuda)
    order = torch.randperm(2 * count)[:count]
    blocks, rows = order.to(setting.device), torch.randperm(count).to(setting.device)
    copy_blocks = block_copy_of(setting)
    copies: dict[str, Run] = {
        "to pinned memory": lambda: copy_blocks(kv, blocks, pinned, rows),
        "from pinned memory": lambda: copy_blocks(pinned, rows, kv, blocks),
    }
    for name, copy in copies.items():
        move = _on_own_stream(setting, copy, count * block_bytes)
        move()
        require_equal("blocks that crossed", kv[blocks], pinned[rows.cpu()])
        alone = _steps(setting, engine)
        with meanwhile(move) as speed:
            steps_s = _steps(setting, engine)
        engine.drain()
        slower = 100 * (median(steps_s) / median(alone) - 1)
        figures = {"% slower steps": slower, "GB/s meanwhile": speed.result() / 1e9}
        yield Case.of(
            name, op, Samples(steps_s, steps_s), unit="step", figures=figures,
            detail=f"{slower:,.1f} % slower steps, {figures['GB/s meanwhile']:,.1f} GB/s meanwhile",
        )  # fmt: skip


def _on_own_stream(setting: Setting, copy: Run, nbytes: int) -> Callable[[], int]:
    """A function for a thread of its own: it copies, waits for the end, and gives the bytes of the copy."""
    if not setting.on_cuda:
        return lambda: (copy(), nbytes)[1]
    stream = torch.cuda.Stream(setting.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(setting.device))

    def move() -> int:
        with torch.cuda.device(setting.device), torch.cuda.stream(stream):
            copy()
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record()
        done.synchronize()
        return nbytes

    return move


def _steps(setting: Setting, engine: NeverIdle) -> list[float]:
    """The seconds of each of some steps."""
    engine.steps_s.clear()
    engine.run_while(_for_steps(setting.size(_STEPS_TIMED, 2)))
    return list(engine.steps_s)


def _for_steps(number: int) -> Callable[[], bool]:
    """A function that is true so many times."""
    left = itertools.count(number, -1)
    return lambda: next(left) > 0


def _time_of_all_queued(setting: Setting) -> Callable[[], float]:
    """A function for another thread, which returns the time when the device has done all that is queued now."""
    if not setting.on_cuda:
        return MONOTONIC
    end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    end.record()

    def wait() -> float:
        end.synchronize()
        return MONOTONIC()

    return wait


class _Copies:
    """What is measured, in the engine's thread."""

    def __init__(self, setting: Setting, blocks: DeviceBlocks, arena: Arena, mover: Mover) -> None:
        self._setting, self._blocks, self._arena = setting, blocks, arena
        self._device_slots: list[int] = torch.randperm(arena.num_slots).tolist()
        self._jobs = MoverJobs(mover, arena, self._device_slots)
        self.job_bytes: int = arena.rows.nbytes

    def one_job(self, kind: str, engine: NeverIdle | None) -> float:
        """Seconds until all has been copied; then everything is compared. A load begins when it is submitted, a save
        when its blocks are there.

        As in vLLM, a load's device slots were last used by a step that has ended: poison was written there before. The
        blocks to save are written by what the engine has queued last.

        :raises WrongResultError: a block is not where it should be.
        """
        if kind == LOAD:
            self._blocks.poison()
        if engine is not None:
            engine.run_while(_for_steps(1))
        if kind == SAVE:
            if engine is not None:
                engine.queue_ahead()
            self._blocks.fill()
        with Answers(self._jobs.mover) as answers, ThreadPoolExecutor(1) as watching:
            begun = watching.submit(_time_of_all_queued(self._setting)) if kind == SAVE else None
            begin_s = self._jobs.submit(kind, answers, loads_after=None if engine is None else engine.processed)
            if engine is not None:
                engine.run_while(lambda: answers.num_open > 0)
            taken_s = answers.wait() - max(begin_s, 0.0 if begun is None else begun.result())
        self._settle(engine)
        there = self._blocks.rows(self._device_slots)
        require_equal(f"blocks of a {kind}", there, torch.from_numpy(self._arena.rows))
        return taken_s

    def on_and_on(self, kind: str, engine: NeverIdle | None, step_s: float) -> float:
        """Bytes per second from the first answer to the last, where there is always more to copy."""
        num_jobs = 1 if self._setting.tiny else max(1, round(step_s * _LINK_BYTES_PER_S / self.job_bytes))
        num_waiting = _AHEAD * num_jobs if kind == SAVE and engine is not None else 0
        most_open = (num_jobs + num_waiting) * self._jobs.batches_per_job
        until = MONOTONIC() + (0.0 if self._setting.tiny else _WINDOW_S)
        with Answers(self._jobs.mover) as answers:

            def submit() -> None:
                if answers.num_open <= most_open:
                    for _ in range(num_jobs):
                        self._jobs.submit(kind, answers, loads_after=None if engine is None else engine.processed)

            if engine is None:
                for _ in range(_IDLE_JOBS):
                    self._jobs.submit(kind, answers)
            elif kind == LOAD:
                engine.run_while(lambda: MONOTONIC() < until, before=submit)
            else:
                engine.run_while(lambda: MONOTONIC() < until, after=submit)
            if engine is not None:
                engine.run_while(lambda: answers.num_open > 0)
            answers.wait()
            self._settle(engine)
            return answers.batches_per_s() * self._jobs.batch_bytes

    def _settle(self, engine: NeverIdle | None) -> None:
        if engine is not None:
            engine.drain()
        self._setting.synchronize()
