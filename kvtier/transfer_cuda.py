"""Moving blocks between a CUDA device and arena slots: one kernel and few large copies per batch.

Blocks lie anywhere on the device, slots anywhere in the arena. A kernel brings the blocks together in a staging
buffer on the device, and runs of adjacent slots are then one DMA each; on the way up the other way round. Where runs
are short, a second kernel reaches the arena over the bus instead: a thread that asked for that many DMAs would keep
the interpreter from the engine's.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtier.cuda_lanes import Lane, Lanes
from kvtier.errors import InvalidInputError
from kvtier.kv_group import KVGroup
from kvtier.pinned_memory import HostMemory, PinnedMemory
from kvtier.slot_batches import SlotBatch
from kvtier.tiers.lending import SlotMemory
from kvtier.transfer import Arena, Blocks, Fence, MemoryUse
from kvtier_kernels.block_copy import block_copy
from kvtier_kernels.records import RecordLayout

_LEAST_DMA_BYTES = 1 << 20
"""On average. To ask for a DMA takes 5 to 8 us of Python, in which a PCIe 5.0 x16 link moves 0.4 MB. Reckoned."""


class CudaKV:
    """`DeviceKV` for KV on a CUDA device. Copies may be asked for by several threads at a time.

    They run on streams of their own, beside the engine's kernels. The engine's thread marks with `fence` what they have
    to come after; what a copy does without touching the KV does not wait for it. The caller waits without holding the
    GIL.
    """

    def __init__(
        self,
        *groups: Sequence[Tensor],
        layout: RecordLayout | None = None,
        staging_bytes: int = 96 * 2**20,
        num_lanes: int = 3,
        cuda: Any = torch.cuda,
    ) -> None:
        """Allocates `staging_bytes` on the device, and compiles the kernels: a second or two, the first time.

        :param groups: KV groups, mostly one: the parts of all blocks, e.g. one per layer, each uint8
            `[num_blocks, part_bytes]` on the device, rows contiguous: views, nothing is copied. A block is its parts,
            one after the other. Groups have as many blocks each: device slot `group * num_blocks + block` is a block
            of this one. Where its blocks are smaller than another group's, zeros follow in the arena.
        :param layout: of each part and its record: blocks are quantised on their way down, and restored on their way
            up. In the arena, a block is then the records of its parts. None moves them as they are.
        :param staging_bytes: of all lanes; larger batches go in several pieces. At least one block per lane is taken.
        :param num_lanes: copies at a time; more callers wait. One per thread of the mover lets none wait.
        :param cuda: where streams and events come from; a seam for tests on machines without a GPU.
        :raises InvalidInputError: tensors of another kind, or that do not fit together.
        """
        self._groups = [KVGroup.of(tensors, layout) for tensors in groups]
        if len({(group.num_blocks, group.device) for group in self._groups}) != 1:
            raise InvalidInputError(
                f"KV groups of {[group.num_blocks for group in self._groups]} blocks: need one group or more, and the "
                "same of each, on one device"
            )
        self._device = self._groups[0].device
        self._block_bytes = max(group.block_bytes for group in self._groups)
        rows = max(1, min(staging_bytes // num_lanes // self.block_bytes, self.num_blocks))
        self._staging_bytes = num_lanes * rows * self.block_bytes
        self._lanes = Lanes(self._device, num_lanes, rows=rows, row_bytes=self.block_bytes, cuda=cuda)
        self._memory = PinnedMemory(self._device, cuda, on_pinned=self._compile_crossing)
        for _ in range(num_lanes):  # each in turn: its first copy would also be the first to take memory
            self._lanes.run(self._compile, after=None)

    @property
    def num_blocks(self) -> int:
        """Of all groups together."""
        return len(self._groups) * self._groups[0].num_blocks

    @property
    def block_bytes(self) -> int:
        """Of a block in the arena."""
        return self._block_bytes

    def fence(self) -> Fence:
        """Behind what the calling thread's current stream of the device holds: call it in the engine's thread."""
        return self._lanes.fence()

    def gather(
        self, device_slots: Sequence[int], arena: Arena, arena_slots: Sequence[int], *, after: Fence | None
    ) -> None:
        """Device to arena, `device_slots[i]` to `arena_slots[i]`. On return the bytes are in the arena."""
        batch, host = self._checked(Blocks(arena, arena_slots, device_slots)), self._rows_of(arena)

        def copy(lane: Lane) -> None:
            lane.wait_for_fence()
            for piece in batch.pieces(lane.staging.size(0)):
                self._stage(piece, lane, gather=True)
                self._cross(piece, lane, host, gather=True)

        self._lanes.run(copy, after=after)

    def scatter(
        self, arena: SlotMemory, arena_slots: Sequence[int], device_slots: Sequence[int], *, after: Fence | None
    ) -> float:
        """Arena to device. On return the bytes are on the device. Gives the seconds that it waited for the fence."""
        return self.scatter_all([Blocks(arena, arena_slots, device_slots)], after=after)

    def scatter_all(self, sources: Sequence[Blocks], *, after: Fence | None) -> float:
        """The same at once from several memories, arenas or attached."""
        batches = [(self._checked(blocks), self._rows_of(blocks.memory)) for blocks in sources]

        def copy(lane: Lane) -> None:
            for batch, host in batches:
                for piece in batch.pieces(lane.staging.size(0)):
                    self._cross(piece, lane, host, gather=False)
                    lane.wait_for_fence()
                    self._stage(piece, lane, gather=False)

        return self._lanes.run(copy, after=after)

    @property
    def memory_use(self) -> MemoryUse:
        return MemoryUse(self._staging_bytes, self._memory.pinned_bytes, self._memory.pinning_s)

    def attach(self, memory: SlotMemory) -> bool:
        """Pins memory. False: the system does not let us, which is logged."""
        return self._memory.attach(memory)

    def detach(self, memory: SlotMemory) -> None:
        """Unpins it. No copy from or to there is under way, and none will come."""
        self._memory.detach(memory)

    def close(self) -> None:
        """Unpins all. Call it when no copy is under way and none will come. Idempotent."""
        self._memory.close()

    def _stage(self, piece: SlotBatch, lane: Lane, *, gather: bool) -> None:
        """Between these blocks and the first rows of the lane's staging buffer."""
        rows = np.argsort(piece.groups, kind="stable")
        on_device = lane.to_device(np.stack([piece.blocks[rows], rows]))
        ends = np.searchsorted(piece.groups[rows], np.arange(len(self._groups) + 1))
        for group, start, stop in zip(self._groups, ends, ends[1:], strict=False):
            if start < stop:
                blocks, their_rows = on_device[:, start:stop]
                group.copy(blocks, lane.staging, their_rows, gather=gather)

    def _cross(self, piece: SlotBatch, lane: Lane, host: HostMemory, *, gather: bool) -> None:
        """Between the first rows of the lane's staging buffer and these arena slots."""
        starts, lengths = piece.runs(host.chunk_slots, adjacent=host.rows.is_contiguous())
        if host.is_pinned and len(piece) * self.block_bytes < len(starts) * _LEAST_DMA_BYTES:
            slots, rows = lane.to_device(np.stack([piece.slots, np.arange(len(piece))]))
            if gather:
                block_copy(lane.staging, rows, host.rows, slots)
            else:
                block_copy(host.rows, slots, lane.staging, rows)
            return
        for start, slot, length in zip(starts.tolist(), piece.slots[starts].tolist(), lengths.tolist(), strict=True):
            staged_run, host_run = lane.staging[start : start + length], host.rows[slot : slot + length]
            into, source = (host_run, staged_run) if gather else (staged_run, host_run)
            into.copy_(source, non_blocking=True)

    def _checked(self, blocks: Blocks) -> SlotBatch:
        """The kernel leaves out slots that do not exist, and so does a slice of a tensor, without a word."""
        return SlotBatch.of(blocks, num_groups=len(self._groups), blocks_per_group=self._groups[0].num_blocks)

    def _rows_of(self, memory: SlotMemory) -> HostMemory:
        """The memory, a block's bytes of each slot, pinned if the system lets us."""
        host = self._memory.of(memory)
        return replace(host, rows=host.rows[:, : self.block_bytes])

    def _compile(self, lane: Lane) -> None:
        """Has the kernels ready for a lane, without a byte copied: the memory may be in use."""
        no_block = lane.to_device(np.array([-1]))
        for group in self._groups:
            for gather in (True, False):
                group.copy(no_block, lane.staging, no_block, gather=gather)

    def _compile_crossing(self, host: HostMemory) -> None:
        """Beside the time that pinning takes, a second is little; later a load would wait for it."""
        if self.block_bytes >= _LEAST_DMA_BYTES:  # a run is no shorter than a block
            return

        def compile_both_ways(lane: Lane) -> None:
            no_block, rows = lane.to_device(np.array([-1])), host.rows[:, : self.block_bytes]
            block_copy(rows, no_block, lane.staging, no_block)
            if host.is_writable:
                block_copy(lane.staging, no_block, rows, no_block)

        self._lanes.run(compile_both_ways, after=None)
