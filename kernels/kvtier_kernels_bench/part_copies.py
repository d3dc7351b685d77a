"""Blocks on the device and to pinned host memory, each beside one plain copy of as many bytes."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtier.bench.report import Case
from kvtier.bench.rounds import Samples
from kvtier.errors import KvtierError
from kvtier.tiers import memfd
from kvtier.transfer import Arena, Blocks, DeviceKV, HostMemoryKV
from kvtier_kernels.reference import block_copy_reference
from kvtier_kernels_bench.rows import row
from kvtier_kernels_bench.setting import Run, Setting
from kvtier_kernels_bench.timing import DeviceClock, in_turns

_BLOCK_BYTES = (2 << 20, 256 << 10)
_TINY_BLOCK_BYTES = (4096, 1024)


def block_sizes(setting: Setting) -> tuple[int, ...]:
    return _TINY_BLOCK_BYTES if setting.tiny else _BLOCK_BYTES


def on_device(setting: Setting) -> Iterator[Case]:
    """`block_copy` of scattered blocks, beside one copy of as many. GB/s of payload: each byte is read and written."""
    for block_bytes in block_sizes(setting):
        yield from _on_device(setting, block_bytes)


def to_host(setting: Setting) -> Iterator[Case]:
    """`CudaKV` between scattered device blocks and arena slots, beside one large copy to and from pinned memory.

    By the wall, with all that a mover's thread does. Slots are adjacent, as in a fresh arena, and scattered. What is
    lent is the same memory mapped once more, for reading, as a pool's is.
    """
    for block_bytes in block_sizes(setting):
        yield from _to_host(setting, block_bytes)
    for block_bytes in block_sizes(setting) if setting.on_cuda else ():
        yield from _by_kernel(setting, block_bytes)


def _on_device(setting: Setting, block_bytes: int) -> Iterator[Case]:
    copy_blocks = _block_copy(setting)
    count = setting.size(1 << 30, 4 * block_bytes) // block_bytes
    source, target = (_bytes(setting, 2 * count, block_bytes) for _ in range(2))
    source_rows, target_rows = (torch.randperm(2 * count)[:count].to(setting.device) for _ in range(2))
    subjects: dict[str, Run] = {
        "block_copy": lambda: copy_blocks(source, source_rows, target, target_rows),
        "plain copy": lambda: target[:count].copy_(source[:count]),
    }
    samples = in_turns(subjects, setting, DeviceClock(setting).seconds)
    yield from _rows("device to device", samples, "plain copy", count, block_bytes)


def _to_host(setting: Setting, block_bytes: int) -> Iterator[Case]:
    count = setting.size(512 << 20, 4 * block_bytes) // block_bytes
    kv = _bytes(setting, 2 * count, block_bytes)
    blocks, adjacent = torch.randperm(2 * count)[:count].tolist(), range(count)
    scattered = torch.randperm(count).tolist()
    pinned = torch.empty((count, block_bytes), dtype=torch.uint8, pin_memory=setting.on_cuda)
    clock, arena = DeviceClock(setting), Arena(count, block_bytes, shared=True)
    with contextlib.closing(arena), moved_by(setting, kv) as mover, lent_by(arena, mover) as lent:
        down: dict[str, Run] = {
            "one copy": lambda: pinned.copy_(kv[:count], non_blocking=True),
            "gather, adjacent slots": lambda: mover.gather(blocks, arena, adjacent, after=mover.fence()),
            "gather, scattered slots": lambda: mover.gather(blocks, arena, scattered, after=mover.fence()),
        }
        up: dict[str, Run] = {
            "one copy": lambda: kv[:count].copy_(pinned, non_blocking=True),
            "scatter, adjacent slots": lambda: mover.scatter(arena, adjacent, blocks, after=mover.fence()),
            "scatter, scattered slots": lambda: mover.scatter(arena, scattered, blocks, after=mover.fence()),
            "lent, adjacent slots": lambda: mover.scatter_all([Blocks(lent, adjacent, blocks)], after=mover.fence()),
            "lent, scattered slots": lambda: mover.scatter_all([Blocks(lent, scattered, blocks)], after=mover.fence()),
        }
        for op, subjects in (("device to pinned host", down), ("pinned host to device", up)):
            samples = in_turns(subjects, setting, clock.wall_s)
            require_pinned(setting, arena)
            yield from _rows(op, samples, "one copy", count, block_bytes)


def _by_kernel(setting: Setting, block_bytes: int) -> Iterator[Case]:
    """The same without copies: a kernel of few programs reaches pinned memory over the bus."""
    from kvtier_kernels.block_copy import block_copy

    count = setting.size(512 << 20, 4 * block_bytes) // block_bytes
    kv = _bytes(setting, 2 * count, block_bytes)
    pinned = torch.empty((count, block_bytes), dtype=torch.uint8, pin_memory=True)
    blocks = torch.randperm(2 * count)[:count].to(setting.device)
    slots = torch.randperm(count).to(setting.device)
    for op, subjects in (
        (
            "device to pinned host, by a kernel",
            {
                "one copy": lambda: pinned.copy_(kv[:count], non_blocking=True),
                "block_copy": lambda: block_copy(kv, blocks, pinned, slots),
            },
        ),
        (
            "pinned host to device, by a kernel",
            {
                "one copy": lambda: kv[:count].copy_(pinned, non_blocking=True),
                "block_copy": lambda: block_copy(pinned, slots, kv, blocks),
            },
        ),
    ):
        samples = in_turns(subjects, setting, DeviceClock(setting).seconds)
        yield from _rows(op, samples, "one copy", count, block_bytes)


def _rows(op: str, samples: dict[str, Samples], floor: str, count: int, block_bytes: int) -> Iterator[Case]:
    for name, of in samples.items():
        yield row(
            name,
            op,
            of,
            floor=(floor, samples[floor]),
            round_bytes=count * block_bytes,
            payload_bytes=block_bytes,
            batch=count,
        )


def _block_copy(setting: Setting) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """On CPU its reference, since Triton's interpreter does not take its masks as they are."""
    if not setting.on_cuda:
        return block_copy_reference
    from kvtier_kernels.block_copy import block_copy

    return block_copy


@contextlib.contextmanager
def moved_by(setting: Setting, kv: Tensor) -> Iterator[DeviceKV]:
    """What moves blocks of `kv`, uint8 `[num_blocks, block_bytes]`, to host memory: as an engine has it there."""
    if not setting.on_cuda:
        yield HostMemoryKV(kv.numpy())
        return
    from kvtier.transfer_cuda import CudaKV

    mover = CudaKV([kv])
    try:
        yield mover
    finally:
        mover.close()


@dataclass(frozen=True, eq=False)
class LentSlots:
    """A `kvtier.tiers.lending.SlotMemory` that is mapped for reading."""

    rows: npt.NDArray[np.uint8]

    @property
    def num_slots(self) -> int:
        return len(self.rows)

    @property
    def slot_bytes(self) -> int:
        return int(self.rows.shape[1])


@contextlib.contextmanager
def lent_by(arena: Arena, mover: DeviceKV) -> Iterator[LentSlots]:
    """A shared arena's memory as a pool lends its own, attached to the mover.

    :raises KvtierError: it cannot be.
    """
    descriptor = memfd.reopen_read_only(arena.descriptor)
    try:
        memory = memfd.map_descriptor(descriptor, arena.rows.nbytes, writable=False)
    finally:
        os.close(descriptor)
    lent = LentSlots(np.frombuffer(memory, dtype=np.uint8).reshape(arena.rows.shape))
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


def _bytes(setting: Setting, count: int, block_bytes: int) -> Tensor:
    return torch.randint(0, 256, (count, block_bytes), dtype=torch.uint8, device=setting.device)
