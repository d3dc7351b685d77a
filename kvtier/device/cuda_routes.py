"""The two ways of a batch of blocks between paged KV on a CUDA device and host memory, queued on a lane's stream."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from kvtier.device.batched_dma import BatchedDma
from kvtier.device.cuda_lanes import CopyStream
from kvtier.device.kv_group import KVGroup
from kvtier.device.pinned_memory import HostMemory
from kvtier.device.slot_batches import SlotBatch
from kvtier_kernels.copies.block_copy import block_copy

LEAST_PART_BYTES = 32 << 10
"""A transfer in a batch of them is worth while from here on. Below, a kernel is faster: vLLM 0.32 changes at 28 KiB."""
LEAST_DMA_BYTES = 1 << 20
"""A transfer asked for alone is worth while from here on: it takes 5 to 8 us of Python, in which PCIe 5.0 x16 moves
0.4 MB."""


class Route(Protocol):
    """A way to copy. Any lane's user may call it; nothing is done before the lane's stream gets there.

    `HostMemory.rows` are of blocks' size.
    """

    def gather(self, lane: CopyStream, batch: SlotBatch, host: HostMemory) -> None:
        """Blocks of the device to their slots in host memory."""

    def scatter(self, lane: CopyStream, batch: SlotBatch, host: HostMemory) -> None:
        """The other way round."""

    def warm(self, lane: CopyStream) -> None:
        """Gets ready for copies on this lane, without a byte copied: the memory may be in use."""

    def warm_for(self, lane: CopyStream, host: HostMemory) -> None:
        """Gets ready for copies on this lane with memory that has just been pinned."""


class Direct:
    """Straight between the parts of blocks and slots, by DMA alone: no staging, and no SM takes part."""

    def __init__(self, groups: Sequence[KVGroup], dma: BatchedDma) -> None:
        self._groups, self._dma = groups, dma

    def gather(self, lane: CopyStream, batch: SlotBatch, host: HostMemory) -> None:
        lane.wait_for_fence()
        device, in_host, sizes = self._transfers(batch, host)
        self._dma.copy(in_host, device, sizes, lane.stream.cuda_stream, from_host=False)

    def scatter(self, lane: CopyStream, batch: SlotBatch, host: HostMemory) -> None:
        lane.wait_for_fence()
        device, in_host, sizes = self._transfers(batch, host)
        self._dma.copy(device, in_host, sizes, lane.stream.cuda_stream, from_host=True)

    def scatter_layers(self, lane: CopyStream, batch: SlotBatch, host: HostMemory, num_layers: int) -> Iterator[int]:
        """Queues blocks of one part that consists of layers of equal size: the first layers of all blocks come first.

        Layers go together, one, then as many as there were before, and so on: to ask for a transfer takes half a
        microsecond, so with each layer by itself the last would be asked for in the middle of the load.

        :returns: an iterator that gives, when some layers are queued, how many these were.
        """
        lane.wait_for_fence()
        device, in_host, sizes = self._transfers(batch, host)
        layer_sizes, first = sizes // num_layers, 0
        while first < num_layers:
            count = min(max(1, first), num_layers - first)
            before = first * layer_sizes
            self._dma.copy(
                device + before, in_host + before, count * layer_sizes, lane.stream.cuda_stream, from_host=True
            )
            yield count
            first += count

    def warm(self, lane: CopyStream) -> None:
        pass

    def warm_for(self, lane: CopyStream, host: HostMemory) -> None:
        pass

    def _transfers(self, batch: SlotBatch, host: HostMemory) -> list[np.ndarray]:
        """Addresses on the device and in host memory, and sizes. None crosses a slot's end."""
        slots = host.rows.data_ptr() + batch.slots * host.rows.stride(0)
        by_group = [
            group.transfers(batch.blocks[batch.groups == number], slots[batch.groups == number])
            for number, group in enumerate(self._groups)
        ]
        return [np.concatenate(column) for column in zip(*by_group, strict=True)]


class Staged:
    """Copies by way of the lane's staging buffer: a kernel between there and the blocks, large transfers over the bus.

    Runs of adjacent slots are a transfer each. Where these are short, a second kernel reaches host memory over the bus
    instead.
    """

    def __init__(self, groups: Sequence[KVGroup], dma: BatchedDma | None) -> None:
        """:param dma: None: transfers are asked for one by one."""
        self._groups, self._dma = groups, dma

    @property
    def least_bytes(self) -> int:
        """The least average size of runs that are not left to a kernel."""
        return LEAST_DMA_BYTES if self._dma is None else LEAST_PART_BYTES

    def gather(self, lane: CopyStream, batch: SlotBatch, host: HostMemory) -> None:
        lane.wait_for_fence()
        for piece in batch.pieces(lane.staging.size(0)):
            self._stage(piece, lane, gather=True)
            self._cross(piece, lane, host, gather=True)

    def scatter(self, lane: CopyStream, batch: SlotBatch, host: HostMemory) -> None:
        for piece in batch.pieces(lane.staging.size(0)):
            self._cross(piece, lane, host, gather=False)
            lane.wait_for_fence()
            self._stage(piece, lane, gather=False)

    def warm(self, lane: CopyStream) -> None:
        """Compiles the kernels; the first copy of a lane would also take memory."""
        no_block = lane.to_device(np.array([-1]))
        for group in self._groups:
            for gather in (True, False):
                group.copy(no_block, lane.staging, no_block, gather=gather)

    def warm_for(self, lane: CopyStream, host: HostMemory) -> None:
        """Compiles the kernels now: beside pinning, a second is little, and later a load would wait for it."""
        if lane.staging.size(1) >= self.least_bytes:  # a run is no shorter than a block
            return
        no_block = lane.to_device(np.array([-1]))
        block_copy(host.rows, no_block, lane.staging, no_block)
        if host.is_writable:
            block_copy(lane.staging, no_block, host.rows, no_block)

    def _stage(self, piece: SlotBatch, lane: CopyStream, *, gather: bool) -> None:
        """Copies between these blocks and the first rows of the lane's staging buffer."""
        rows = np.argsort(piece.groups, kind="stable")
        on_device = lane.to_device(np.stack([piece.blocks[rows], rows]))
        ends = np.searchsorted(piece.groups[rows], np.arange(len(self._groups) + 1))
        for group, start, stop in zip(self._groups, ends, ends[1:], strict=False):
            if start < stop:
                blocks, their_rows = on_device[:, start:stop]
                group.copy(blocks, lane.staging, their_rows, gather=gather)

    def _cross(self, piece: SlotBatch, lane: CopyStream, host: HostMemory, *, gather: bool) -> None:
        """Copies between the first rows of the lane's staging buffer and these slots."""
        starts, lengths = piece.runs(host.chunk_slots, adjacent=host.rows.is_contiguous())
        row_bytes = lane.staging.size(1)
        if host.is_pinned and len(piece) * row_bytes < len(starts) * self.least_bytes:
            slots, rows = lane.to_device(np.stack([piece.slots, np.arange(len(piece))]))
            if gather:
                block_copy(lane.staging, rows, host.rows, slots)
            else:
                block_copy(host.rows, slots, lane.staging, rows)
        elif self._dma is not None:
            staged = lane.staging.data_ptr() + starts * row_bytes
            in_host = host.rows.data_ptr() + piece.slots[starts] * host.rows.stride(0)
            targets, sources = (in_host, staged) if gather else (staged, in_host)
            self._dma.copy(targets, sources, lengths * row_bytes, lane.stream.cuda_stream, from_host=not gather)
        else:
            runs = zip(starts.tolist(), piece.slots[starts].tolist(), lengths.tolist(), strict=True)
            for start, slot, length in runs:
                staged_run, host_run = lane.staging[start : start + length], host.rows[slot : slot + length]
                into, source = (host_run, staged_run) if gather else (staged_run, host_run)
                into.copy_(source, non_blocking=True)
