"""Blocks between a device and pinned host memory, beside one large copy: compared first, then timed."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from kvtier.device.kv import Blocks, DeviceKV
from kvtier.device.pinned_memory import pins_read_only
from kvtier.errors import KvtierError
from kvtier.memory import memfd
from kvtier.memory.arena import Arena
from kvtier_bench.gpu.measuring.comparing import require_close, require_equal
from kvtier_bench.gpu.measuring.layouts import DeviceBlocks, Layout, mover_of
from kvtier_bench.gpu.measuring.rows import Bar, held_to, row
from kvtier_bench.gpu.measuring.setting import Run, Setting
from kvtier_bench.gpu.measuring.timing import DeviceClock, in_turns
from kvtier_bench.measuring.report import Case

_MOVED_BYTES = 512 << 20
_RECORDS_COMPARED = 16
"""Blocks: the reference makes them on the CPU."""


def lends(setting: Setting) -> bool:
    """Whether memory that is mapped for reading can be pinned, as a pool's has to be. A part asks once."""
    return pins_read_only(setting.device)


def not_lent(op: str) -> Case:
    """Instead of the rows of lent memory, where there are none."""
    reason = "the driver does not pin what is mapped for reading (CUDA error 801 on many GPUs)"
    return Case("lent memory", op, detail=reason)


def host_copies(setting: Setting, layout: Layout, *, least: float, with_lent: bool) -> Iterator[Case]:
    """Half of the device's blocks, anywhere, to and from an arena's slots, adjacent and scattered, and lent memory.

    By the wall, with all that a mover's thread does. What is lent is the arena mapped once more, for reading, as a
    pool's memory is.

    :param least: the bar, as a share of the speed of one large copy.
    :param with_lent: whether lent memory takes part.
    """
    count = setting.size(_MOVED_BYTES, 4 * layout.block_bytes) // layout.block_bytes
    device = DeviceBlocks(setting, layout, -(-2 * count // layout.num_groups))
    with contextlib.ExitStack() as stack:
        arena = Arena(count, layout.block_bytes, shared=True)
        stack.callback(arena.close)
        mover = stack.enter_context(mover_of(setting, device))
        lent = stack.enter_context(lent_by(arena, mover)) if with_lent else None
        copies = _Copies(setting, device, mover, arena, lent)
        copies.compare()
        require_pinned(setting, arena)
        for op, subjects in (("device to pinned host", copies.down()), ("pinned host to device", copies.up())):
            samples = in_turns(subjects, setting, DeviceClock(setting).wall_s)
            for name, of in samples.items():
                case = row(
                    name,
                    f"{op}, {layout.name}",
                    of,
                    floor=("one copy", samples["one copy"]),
                    round_bytes=count * layout.block_bytes,
                    payload_bytes=layout.block_bytes,
                    batch=count,
                )
                bar = Bar("x one copy", case.ratio_to_floor or 0.0, least)
                yield case if name == "one copy" else held_to(case, bar, tiny=setting.tiny)


class _Copies:
    """What is compared and timed. Fences are taken in the thread that copies: it is the engine's, too."""

    def __init__(
        self, setting: Setting, device: DeviceBlocks, mover: DeviceKV, arena: Arena, lent: "LentSlots | None"
    ) -> None:
        self._setting, self._device, self._mover = setting, device, mover
        self._arena, self._lent = arena, lent
        count = arena.num_slots
        self._blocks: list[int] = torch.randperm(device.num_slots)[:count].tolist()
        self._adjacent, self._scattered = list(range(count)), torch.randperm(count).tolist()
        pinned = torch.empty(arena.rows.shape, dtype=torch.uint8, pin_memory=setting.on_cuda)
        there = torch.empty(arena.rows.shape, dtype=torch.uint8, device=setting.device)
        self._copy_down: Run = lambda: pinned.copy_(there, non_blocking=True)
        self._copy_up: Run = lambda: there.copy_(pinned, non_blocking=True)

    def down(self) -> dict[str, Run]:
        """The copies to host memory that are timed, by name."""
        return {
            "one copy": self._copy_down,
            "gather, adjacent slots": lambda: self._gather(self._adjacent),
            "gather, scattered slots": lambda: self._gather(self._scattered),
        }

    def up(self) -> dict[str, Run]:
        """The copies to the device that are timed, by name."""
        subjects: dict[str, Run] = {"one copy": self._copy_up}
        for name, memory in self._memories().items():
            subjects[f"{name}, adjacent slots"] = partial(self._scatter, memory, self._adjacent)
            subjects[f"{name}, scattered slots"] = partial(self._scatter, memory, self._scattered)
        return subjects

    def compare(self) -> None:
        """Down to poisoned slots, and up to poisoned blocks, each way once.

        :raises WrongResultError: bytes differ.
        """
        for slots in (self._adjacent, self._scattered):
            before = self._device.rows(self._blocks)
            self._arena.rows[:] = 0xA5
            self._gather(slots)
            self._compare_down(slots)
            for memory in self._memories().values():
                self._device.poison()
                self._scatter(memory, slots)
                self._compare_up(before)

    def _memories(self) -> dict[str, "Arena | LentSlots"]:
        """What blocks come from, by what is called so in the rows."""
        return {"scatter": self._arena} | ({} if self._lent is None else {"lent": self._lent})

    def _compare_down(self, slots: Sequence[int]) -> None:
        is_exact = self._device.layout.codec is None
        number = len(slots) if is_exact else _RECORDS_COMPARED
        got = torch.from_numpy(self._arena.rows)[slots[:number]]
        expected = self._device.in_host_memory(self._blocks[:number])
        require_equal("blocks in host memory", got, expected)

    def _compare_up(self, before: torch.Tensor) -> None:
        got = self._device.rows(self._blocks)
        if self._device.layout.codec is None:
            require_equal("blocks on the device", got, before)
            return
        # To records and back: the nearest of 16 values in 2^n, of numbers up to 6 or so.
        got, before = got.view(torch.bfloat16), before.view(torch.bfloat16)
        require_close("blocks on the device", got, before, most=1 / 16)

    def _gather(self, slots: Sequence[int]) -> None:
        self._mover.gather(self._blocks, self._arena, slots, after=self._mover.fence())

    def _scatter(self, memory: "Arena | LentSlots", slots: Sequence[int]) -> None:
        self._mover.scatter_all([Blocks(memory, slots, self._blocks)], after=self._mover.fence())


@dataclass(frozen=True, eq=False)
class LentSlots:
    """A `kvtier.memory.slot_memory.SlotMemory` that is mapped for reading."""

    rows: npt.NDArray[np.uint8]

    @property
    def num_slots(self) -> int:
        return len(self.rows)

    @property
    def slot_bytes(self) -> int:
        return int(self.rows.shape[1])


def map_to_lend(arena: Arena) -> LentSlots:
    """A shared arena's memory once more, for reading."""
    descriptor = memfd.reopen_read_only(arena.descriptor)
    try:
        memory = memfd.map_descriptor(descriptor, arena.rows.nbytes, writable=False)
    finally:
        os.close(descriptor)
    return LentSlots(np.frombuffer(memory, dtype=np.uint8).reshape(arena.rows.shape))


@contextlib.contextmanager
def lent_by(arena: Arena, mover: DeviceKV) -> Iterator[LentSlots]:
    """A shared arena's memory as a pool lends its own, attached to the mover.

    :raises KvtierError: it cannot be.
    """
    lent = map_to_lend(arena)
    if not mover.attach(lent):
        raise KvtierError("memory that is mapped for reading could not be pinned")
    try:
        yield lent
    finally:
        mover.detach(lent)


def require_pinned(setting: Setting, arena: Arena) -> None:
    """:raises KvtierError: a mover could not pin it, which costs most of its speed."""
    if setting.on_cuda and not torch.from_numpy(arena.rows).is_pinned():
        raise KvtierError("the arena is not pinned: the figures would mean nothing")
