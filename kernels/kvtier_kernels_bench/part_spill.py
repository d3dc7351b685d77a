"""How much slower prefill is while the whole cache spills to pinned memory."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from kvtier.bench.report import Case
from kvtier.bench.rounds import Samples
from kvtier.clock import MONOTONIC
from kvtier.transfer import Arena, DeviceKV
from kvtier_kernels_bench.attending import prefilling
from kvtier_kernels_bench.part_copies import moved_by, require_pinned
from kvtier_kernels_bench.rows import median_s, row
from kvtier_kernels_bench.setting import Run, Setting
from kvtier_kernels_bench.shapes import heads_of, paged
from kvtier_kernels_bench.timing import DeviceClock, note

_PATIENCE_S = 30.0


def measure(setting: Setting) -> Iterator[Case]:
    """A layer's attention and products over 2,048 new tokens after 16,384, some times over, alone and beside a spill.

    The spill copies every block of an 8 GiB cache to pinned memory, 64 blocks a call, and begins again at its end, for
    as long as the prefill takes.
    """
    block_bytes = setting.size(2 << 20, 4096)
    count = setting.size(4096, 8)
    kv = torch.zeros((count, block_bytes), dtype=torch.uint8, device=setting.device)
    clock, prefill = DeviceClock(setting), _prefill(setting)
    arena = Arena(count, block_bytes)
    with contextlib.closing(arena), contextlib.ExitStack() as stack:
        mover = stack.enter_context(moved_by(setting, kv))
        spill = _Spill(mover, arena, count)
        prefill()
        spill.once()
        require_pinned(setting, arena)
        alone, beside = Samples(), Samples()
        speeds = []
        for _ in range(setting.rounds):
            note(alone, clock.seconds(prefill))
            with spill.running() as speed:
                note(beside, clock.seconds(prefill))
            speeds.append(speed.result())
            if setting.left_s() < 0:
                break
        # Before memory is given back, which takes time as well.
        yield from _rows(f"prefill while {count * block_bytes / 2**30:,.1f} GiB spill", alone, beside, speeds)


def _rows(op: str, alone: Samples, beside: Samples, speeds: list[float]) -> Iterator[Case]:
    yield row("alone", op, alone)
    yield row(
        "beside the spill",
        op,
        beside,
        floor=("alone", alone),
        figures={
            "% slower": 100 * (median_s(beside) / median_s(alone) - 1),
            "GB/s spilled meanwhile": sorted(speeds)[len(speeds) // 2] / 1e9,
        },
    )


def _prefill(setting: Setting) -> Run:
    """Some layers' worth of what a prefill does: half a second or so."""
    heads = heads_of(setting)
    new, cached, num_layers = setting.size(2048, 5), setting.size(16_384, 11), setting.size(64, 1)
    batch = paged(setting, heads, num_seqs=1, new=new, cached=cached)
    attend = prefilling(setting, batch, heads)
    hidden, wide = setting.size(4096, 16), setting.size(14_336, 24)
    activations = torch.randn((new, hidden), dtype=setting.dtype, device=setting.device)
    up = torch.randn((hidden, wide), dtype=setting.dtype, device=setting.device)

    def run() -> None:
        for _ in range(num_layers):
            attend()
            torch.matmul(torch.matmul(activations, up), up.T)

    return run


class _Spill:
    """Copies blocks to host memory in a thread of its own, as a mover does."""

    def __init__(self, mover: DeviceKV, arena: Arena, count: int) -> None:
        self._mover, self._arena, self._count = mover, arena, count
        self._stop = threading.Event()
        self._under_way = threading.Event()

    def once(self) -> None:
        """Everything, once: what the first copy costs besides is over then."""
        for start in range(0, self._count, 64):
            self._move(start)

    @contextlib.contextmanager
    def running(self) -> Iterator[Future[float]]:
        """While inside, blocks are on their way; gives their bytes per second, known afterwards.

        That raises what the copies raised.
        """
        self._stop.clear()
        self._under_way.clear()
        with ThreadPoolExecutor(1, "kvtier-bench-spill") as executor:
            speed = executor.submit(self._run)
            try:
                self._under_way.wait(_PATIENCE_S)
                yield speed
            finally:
                self._stop.set()

    def _run(self) -> float:
        begin, num_moved = MONOTONIC(), 0
        try:
            while not self._stop.is_set():
                for start in range(0, self._count, 64):
                    num_moved += self._move(start)
                    self._under_way.set()
                    if self._stop.is_set():
                        break
        finally:
            self._under_way.set()  # nobody need wait for what has failed
        return num_moved * self._mover.block_bytes / max(MONOTONIC() - begin, 1e-9)

    def _move(self, start: int) -> int:
        slots = range(start, min(start + 64, self._count))
        self._mover.gather(slots, self._arena, slots, after=None)
        return len(slots)
