"""How much slower prefill is while the whole cache spills to pinned memory."""

import contextlib
import itertools
from collections.abc import Iterator

import torch

from kvtier.device.kv import DeviceKV, Fence
from kvtier.memory.arena import Arena
from kvtier_bench.gpu.measuring.comparing import require_equal
from kvtier_bench.gpu.measuring.engine_steps import prefill_work
from kvtier_bench.gpu.measuring.host_copies import require_pinned
from kvtier_bench.gpu.measuring.layouts import DeviceBlocks, Layout, mover_of
from kvtier_bench.gpu.measuring.meanwhile import meanwhile
from kvtier_bench.gpu.measuring.rows import Bar, held_to, median_s, row
from kvtier_bench.gpu.measuring.setting import Setting
from kvtier_bench.gpu.measuring.timing import DeviceClock, note
from kvtier_bench.measuring.report import Case
from kvtier_bench.measuring.rounds import Samples

_BATCH_BLOCKS = 64
_MOST_SLOWER = 5.0
"""The most that a prefill may be slower, in per cent."""


def measure(setting: Setting) -> Iterator[Case]:
    """A layer's attention and products over 2,048 new tokens after 16,384, some times over, alone and beside a spill.

    The spill copies every block of an 8 GiB cache to pinned memory, 64 blocks a call, and begins again at its end, for
    as long as the prefill takes. Its fence is of the engine's stream, from before the prefill was queued there.
    """
    layout = Layout("contiguous blocks", 1, setting.size(2 << 20, 4096))
    blocks = DeviceBlocks(setting, layout, setting.size(4096, 8))
    clock, work, num_layers = DeviceClock(setting), prefill_work(setting), setting.size(64, 1)
    arena = Arena(blocks.num_slots, layout.block_bytes)
    with contextlib.closing(arena), mover_of(setting, blocks) as mover:
        spill = _Spill(mover, arena)
        work(num_layers)
        spill.once()
        require_equal("blocks that were spilled", blocks.rows(range(blocks.num_slots)), torch.from_numpy(arena.rows))
        require_pinned(setting, arena)
        alone, beside = Samples(), Samples()
        speeds = []
        for _ in range(setting.rounds):
            note(alone, clock.seconds(lambda: work(num_layers)))
            spill.fence = mover.fence()
            with meanwhile(spill.next_batch) as speed:
                note(beside, clock.seconds(lambda: work(num_layers)))
            speeds.append(speed.result())
            if setting.left_s() < 0:
                break
        # Before memory is given back, which takes time as well.
        op = f"prefill while {arena.rows.nbytes / 2**30:,.1f} GiB spill"
        yield from _rows(setting, op, alone, beside, sorted(speeds)[len(speeds) // 2])


def _rows(setting: Setting, op: str, alone: Samples, beside: Samples, speed: float) -> Iterator[Case]:
    yield row("alone", op, alone)
    slower = 100 * (median_s(beside) / median_s(alone) - 1)
    case = row("beside the spill", op, beside, floor=("alone", alone), figures={"GB/s spilled meanwhile": speed / 1e9})
    yield held_to(case, Bar("% slower", slower, _MOST_SLOWER, at_most=True), tiny=setting.tiny)


class _Spill:
    """Copies blocks to host memory."""

    def __init__(self, mover: DeviceKV, arena: Arena) -> None:
        self._mover, self._arena = mover, arena
        self._starts = itertools.cycle(range(0, arena.num_slots, _BATCH_BLOCKS))
        self.fence: Fence | None = None
        """The fence behind what has written the blocks; of the engine's thread."""

    def once(self) -> None:
        """Everything, once: what the first copy costs besides is over then."""
        self.fence = self._mover.fence()
        for _ in range(0, self._arena.num_slots, _BATCH_BLOCKS):
            self.next_batch()

    def next_batch(self) -> int:
        """Copies the next batch and gives its bytes."""
        start = next(self._starts)
        slots = range(start, min(start + _BATCH_BLOCKS, self._arena.num_slots))
        self._mover.gather(slots, self._arena, slots, after=self.fence)
        return len(slots) * self._arena.slot_bytes
