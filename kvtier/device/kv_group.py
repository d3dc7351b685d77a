"""The paged KV of one KV group on a CUDA device, and its way to and from a staging buffer there."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtier.errors import InvalidInputError
from kvtier_kernels.copies.block_copy import block_copy
from kvtier_kernels.copies.part_copy import Parts, part_copy
from kvtier_kernels.copies.quantised_copy import quantised_copy
from kvtier_kernels.records import RecordLayout

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class KVGroup:
    """Views, nothing is copied. A block is its parts, one after the other."""

    parts: tuple[Parts, ...]
    """A launch moves all parts of one of these: they have size and stride in common."""
    layout: RecordLayout | None
    places: Numbers
    """int64 `[3, num_parts]`: address of each part, bytes from a block to the next, bytes of a block."""

    @classmethod
    def of(cls, tensors: Sequence[Tensor], layout: RecordLayout | None) -> "KVGroup":
        """
        :param tensors: e.g. one per layer, each uint8 `[num_blocks, part_bytes]`, rows contiguous.
        :param layout: of each part and its record, as which it is staged. None: as it is.
        :raises InvalidInputError: tensors of another kind, or that do not fit together.
        """
        for part in tensors:
            if part.dim() != 2 or part.dtype != torch.uint8 or part.stride(1) != 1:
                raise InvalidInputError(
                    f"KV of shape {list(part.shape)}, {part.dtype}, strides {list(part.stride())}: "
                    "need a uint8 view of [num_blocks, part_bytes] with contiguous rows"
                )
        if len({(part.size(0), part.device) for part in tensors}) != 1:
            raise InvalidInputError(
                f"KV in {len(tensors)} parts of {[len(part) for part in tensors]} blocks: "
                "need the same of each, on one device"
            )
        if layout is not None and {part.size(1) for part in tensors} != {layout.page_bytes}:
            raise InvalidInputError(f"KV in parts of {tensors[0].size(1)} bytes: {layout} needs {layout.page_bytes}")
        alike = itertools.groupby(tensors, key=lambda tensor: (tensor.size(1), tensor.stride(0)))
        places = [(tensor.data_ptr(), tensor.stride(0), tensor.size(1)) for tensor in tensors]
        return cls(tuple(Parts.of(list(tensors)) for _, tensors in alike), layout, np.array(places).T)

    @property
    def num_blocks(self) -> int:
        return self.parts[0].tensors[0].size(0)

    @property
    def device(self) -> torch.device:
        return self.parts[0].tensors[0].device

    @property
    def block_bytes(self) -> int:
        """The size of a block where it is staged, and in host memory."""
        return sum(map(self._staged_bytes, self.parts))

    @property
    def least_part_bytes(self) -> int:
        """The size of the smallest part of a block on the device."""
        return int(self.places[2].min())

    def transfers(self, blocks: Numbers, slots: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """A transfer for each part of each block, where blocks are staged as they are.

        :param blocks: int64 `[n]`, like `slots`.
        :param slots: addresses in host memory, of which each block has one.
        :returns: their addresses on the device and in host memory, and sizes, int64 `[num_parts * n]` each.
        """
        starts, strides, sizes = self.places[:, :, None]
        device, host = starts + strides * blocks, slots + np.cumsum(sizes, axis=0) - sizes
        return device.ravel(), host.ravel(), np.broadcast_to(sizes, device.shape).ravel()

    def copy(self, blocks: Tensor, staging: Tensor, rows: Tensor, *, gather: bool) -> None:
        """Queues a copy of these blocks to these rows of `staging`, or the other way round, on the current stream.

        :param staging: uint8 `[num_rows, block_bytes or more]`.
        :param blocks: int64 `[n]` on the device, like `rows`; a pair of which one does not exist is not copied.
        """
        start = 0
        for parts in self.parts:
            stop = start + self._staged_bytes(parts)
            staged, start = staging[:, start:stop], stop
            if self.layout is not None:
                quantised_copy(parts, blocks, staged, rows, layout=self.layout, gather=gather)
            elif len(parts.tensors) > 1:
                part_copy(parts, blocks, staged, rows, gather=gather)
            elif gather:
                block_copy(parts.tensors[0], blocks, staged, rows)
            else:
                block_copy(staged, rows, parts.tensors[0], blocks)

    def _staged_bytes(self, parts: Parts) -> int:
        return parts.block_bytes if self.layout is None else len(parts.tensors) * self.layout.record_bytes
