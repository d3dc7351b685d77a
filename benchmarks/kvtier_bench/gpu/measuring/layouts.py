"""How blocks of KV lie on a device, as engines have them, and what moves them to host memory there."""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtier.device.kv import DeviceKV, HostMemoryKV
from kvtier.device.quantised import QuantisedHostKV
from kvtier_bench.gpu.measuring.setting import Setting
from kvtier_kernels.quantise_reference import to_records
from kvtier_kernels.records import LossyCodec, RecordLayout

_HEAD_DIM = 128


@dataclass(frozen=True, slots=True)
class Layout:
    """Blocks of so many parts, one per layer, say, each a page of its own."""

    name: str
    num_parts: int
    part_bytes: int
    num_groups: int = 1
    """KV groups: each has as many parts of its own, and blocks of its own."""
    codec: LossyCodec | None = None
    """The codec in whose records blocks lie in host memory."""

    @property
    def records(self) -> RecordLayout | None:
        """The layout of each part's records. None: parts lie in host memory as they are."""
        if self.codec is None:
            return None
        return RecordLayout(self.codec, torch.bfloat16, _HEAD_DIM, self.part_bytes // 2 // _HEAD_DIM)

    @property
    def block_bytes(self) -> int:
        """The number of bytes that a block takes in host memory."""
        return self.num_parts * (self.part_bytes if self.records is None else self.records.record_bytes)


class DeviceBlocks:
    """Random blocks on the device. One thread."""

    def __init__(self, setting: Setting, layout: Layout, num_blocks: int) -> None:
        """:param num_blocks: of each group."""
        self.layout, self.num_blocks = layout, num_blocks
        self._elements = 2 if layout.codec is not None else 1
        shape = (layout.num_groups, layout.num_parts, num_blocks, layout.part_bytes)
        self.bytes = torch.empty(shape, dtype=torch.uint8, device=setting.device)
        """`[groups, parts, blocks, part_bytes]`."""
        self.fill()

    @property
    def num_slots(self) -> int:
        """The number of device slots, those of the first group first."""
        return self.layout.num_groups * self.num_blocks

    def fill(self) -> None:
        """New random contents; numbers of a usual size where they will be quantised."""
        if self.layout.codec is None:
            self.bytes.random_(0, 256)
        else:
            self.bytes.view(torch.bfloat16).normal_()

    def poison(self) -> None:
        """What is in no block, and no number."""
        self.bytes.fill_(0xFF)

    def groups(self) -> list[Sequence[Tensor]]:
        """Parts of each group, as movers take them: views."""
        return [group.unbind() for group in self.bytes]

    def rows(self, slots: Sequence[int]) -> Tensor:
        """Fresh: `[slots, num_parts * part_bytes]`, the blocks with these device slots."""
        wide = self.bytes.transpose(1, 2).flatten(0, 1)
        return wide[torch.tensor(list(slots), device=wide.device)].flatten(1)

    def in_host_memory(self, slots: Sequence[int]) -> Tensor:
        """What these blocks are there: their bytes, or their records by the reference. On the CPU."""
        rows, records = self.rows(slots).cpu(), self.layout.records
        if records is None:
            return rows
        return to_records(rows.view(-1, self.layout.part_bytes), records).view(len(rows), -1)


def mover_of(setting: Setting, blocks: DeviceBlocks) -> AbstractContextManager[DeviceKV]:
    """What moves them."""
    return moved_by(setting, blocks.groups(), blocks.layout.records)


@contextlib.contextmanager
def moved_by(
    setting: Setting, groups: Sequence[Sequence[Tensor]], records: RecordLayout | None = None
) -> Iterator[DeviceKV]:
    """What moves blocks between device and host memory: as an engine has it there.

    Without a GPU there is one group, and one part where blocks are quantised.

    :param groups: parts of each, uint8 `[num_blocks, part_bytes]`.
    """
    if setting.on_cuda:
        from kvtier.device.cuda import CudaKV

        mover = CudaKV(*groups, layout=records)
        try:
            yield mover
        finally:
            mover.close()
        return
    (parts,) = groups
    if records is None:
        yield HostMemoryKV(*(part.numpy() for part in parts))
    else:
        (part,) = parts
        yield QuantisedHostKV(part, records)
