"""Moving blocks between a CUDA device and arena slots: one kernel and few large copies per batch.

Blocks lie anywhere on the device, slots anywhere in the arena. A kernel brings the blocks together in a staging
buffer on the device, and runs of adjacent slots are then one DMA each; on the way up the other way round. Where runs
are short, a second kernel reaches the arena over the bus instead: a thread that asked for that many DMAs would keep
the interpreter from the engine's.
"""

import contextlib
import itertools
import queue
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvtier.errors import InvalidInputError
from kvtier.pinned_memory import HostMemory, PinnedMemory
from kvtier.tiers.lending import SlotMemory
from kvtier.transfer import Arena, Blocks, MemoryUse
from kvtier_kernels.block_copy import block_copy
from kvtier_kernels.part_copy import Parts, part_copy
from kvtier_kernels.quantised_copy import quantised_copy
from kvtier_kernels.records import RecordLayout

_LEAST_DMA_BYTES = 1 << 20
"""On average. To ask for a DMA takes 5 to 8 us of Python, in which a PCIe 5.0 x16 link moves 0.4 MB. Reckoned."""

Pairs = list[tuple[int, int]]
"""(arena slot, device slot), by arena slot."""


@dataclass(frozen=True, slots=True)
class _Lane:
    """What one copy at a time works with."""

    stream: Any
    staging: Tensor
    """uint8 `[blocks, block_bytes]` on the device. Touched on `stream` only, which keeps its users apart."""
    staging_rows: Tensor
    """int64 0, 1, 2, ... on the device."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Adjacent staging rows that belong into adjacent arena slots."""

    staging_row: int
    arena_slot: int
    length: int


class CudaKV:
    """`DeviceKV` for KV on a CUDA device. `gather` and `scatter` may be called from several threads at a time.

    Copies run on streams of their own, beside the engine's kernels, and start when what the engine's stream held at
    the call is done: they see what it wrote, and overwrite nothing that it still reads. The caller waits without
    holding the GIL.
    """

    def __init__(
        self,
        *parts: Tensor,
        layout: RecordLayout | None = None,
        staging_bytes: int = 32 * 2**20,
        num_lanes: int = 3,
        cuda: Any = torch.cuda,
    ) -> None:
        """Call it in the engine's thread: the stream that is current there is taken for the engine's.

        Allocates `num_lanes * staging_bytes` on the device, and compiles the kernels: a second or two, the first time.

        :param parts: of all blocks, e.g. one per layer, each uint8 `[num_blocks, part_bytes]` on the device, rows
            contiguous: views, nothing is copied. A block is its parts, one after the other.
        :param layout: of each part and its record: blocks are quantised on their way down, and restored on their way
            up. In the arena, a block is then the records of its parts. None moves them as they are.
        :param staging_bytes: of one lane; larger batches go in several parts. At least one block is taken.
        :param num_lanes: copies at a time; more callers wait. One per thread of the mover lets none wait.
        :param cuda: where streams and events come from; a seam for tests on machines without a GPU.
        """
        for part in parts:
            if part.dim() != 2 or part.dtype != torch.uint8 or part.stride(1) != 1:
                raise InvalidInputError(
                    f"KV of shape {list(part.shape)}, {part.dtype}, strides {list(part.stride())}: "
                    "need a uint8 view of [num_blocks, part_bytes] with contiguous rows"
                )
        if len({(part.size(0), part.device) for part in parts}) != 1:
            raise InvalidInputError(
                f"KV in {len(parts)} parts of {[len(part) for part in parts]} blocks: "
                "need the same of each, on one device"
            )
        if layout is not None and {part.size(1) for part in parts} != {layout.page_bytes}:
            raise InvalidInputError(f"KV in parts of {parts[0].size(1)} bytes: {layout} needs {layout.page_bytes}")
        self._parts, self._layout, self._cuda = _alike(parts), layout, cuda
        self._num_blocks, self._device = parts[0].size(0), parts[0].device
        self._block_bytes = sum(map(self._arena_bytes, self._parts))
        self._engine_stream = cuda.current_stream(self._device)
        self._lanes: queue.SimpleQueue[_Lane] = queue.SimpleQueue()  # its own lock; holds those not in use
        rows = max(1, min(staging_bytes // self.block_bytes, self.num_blocks))
        self._staging_bytes = num_lanes * rows * self.block_bytes
        for _ in range(num_lanes):
            self._lanes.put(self._new_lane(rows))
        self._memory = PinnedMemory(self._device, cuda, on_pinned=self._compile_crossing)
        with self._lane() as lane:
            no_block = lane.staging_rows[:1] - 1
            for gather in (True, False):
                self._copy(no_block, lane, gather=gather)

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def block_bytes(self) -> int:
        """Of a block in the arena."""
        return self._block_bytes

    def gather(self, device_slots: Sequence[int], arena: Arena, arena_slots: Sequence[int]) -> None:
        """Device to arena, `device_slots[i]` to `arena_slots[i]`. On return the bytes are in the arena."""
        pairs, host = self._checked(Blocks(arena, arena_slots, device_slots)), self._rows_of(arena)
        with self._lane() as lane:
            for part in _parts(pairs, lane.staging.size(0)):
                self._copy(self._on_device(device_slot for _, device_slot in part), lane, gather=True)
                self._cross(part, lane, host, gather=True)

    def scatter(self, arena: SlotMemory, arena_slots: Sequence[int], device_slots: Sequence[int]) -> None:
        """Arena to device. On return the engine's next forward pass sees the bytes."""
        self.scatter_all([Blocks(arena, arena_slots, device_slots)])

    def scatter_all(self, sources: Sequence[Blocks]) -> None:
        """The same at once from several memories, arenas or attached."""
        pairs = [self._checked(blocks) for blocks in sources]
        hosts = [self._rows_of(blocks.memory) for blocks in sources]
        with self._lane() as lane:
            for theirs, host in zip(pairs, hosts, strict=True):
                for part in _parts(theirs, lane.staging.size(0)):
                    self._cross(part, lane, host, gather=False)
                    self._copy(self._on_device(device_slot for _, device_slot in part), lane, gather=False)

    @property
    def memory_use(self) -> MemoryUse:
        """Without memory that another `CudaKV` has pinned."""
        return MemoryUse(self._staging_bytes, self._memory.pinned_bytes, self._memory.pinning_s)

    def attach(self, memory: SlotMemory) -> bool:
        """Pins memory. False: the system does not let us, which is logged."""
        return self._memory.attach(memory)

    def detach(self, memory: SlotMemory) -> None:
        """Unpins it. No copy from there is under way, and none will come, not even by another `CudaKV`."""
        self._memory.detach(memory)

    def close(self) -> None:
        """Unpins all that this one pinned. Call it when no copy is under way and none will come, not even by another
        `CudaKV` with the same memory. Idempotent."""
        self._memory.close()

    def _copy(self, device_slots: Tensor, lane: _Lane, *, gather: bool) -> None:
        """Between these blocks and the first rows of the lane's staging buffer, on its stream."""
        rows, start = lane.staging_rows[: device_slots.size(0)], 0
        for parts in self._parts:
            staging = lane.staging[:, start : start + self._arena_bytes(parts)]
            start += self._arena_bytes(parts)
            if self._layout is not None:
                quantised_copy(parts, device_slots, staging, rows, layout=self._layout, gather=gather)
            elif len(parts.tensors) > 1:
                part_copy(parts, device_slots, staging, rows, gather=gather)
            elif gather:
                block_copy(parts.tensors[0], device_slots, staging, rows)
            else:
                block_copy(staging, rows, parts.tensors[0], device_slots)

    def _cross(self, part: Pairs, lane: _Lane, host: HostMemory, *, gather: bool) -> None:
        """Between the first rows of the lane's staging buffer and these arena slots, on its stream."""
        runs = list(_runs(part, host.chunk_slots, adjacent=host.rows.is_contiguous()))
        if host.is_pinned and len(part) * self.block_bytes < len(runs) * _LEAST_DMA_BYTES:
            staged = lane.staging, lane.staging_rows[: len(part)]
            slots = host.rows, self._on_device(arena_slot for arena_slot, _ in part)
            block_copy(*staged, *slots) if gather else block_copy(*slots, *staged)
            return
        for run in runs:
            staged_run, host_run = _staged(lane, run), _host_run(host.rows, run)
            into, source = (host_run, staged_run) if gather else (staged_run, host_run)
            into.copy_(source, non_blocking=True)

    def _arena_bytes(self, parts: Parts) -> int:
        """Of what a block has in these parts, in the arena."""
        return parts.block_bytes if self._layout is None else len(parts.tensors) * self._layout.record_bytes

    def _new_lane(self, rows: int) -> _Lane:
        return _Lane(
            stream=self._cuda.Stream(self._device),
            staging=torch.empty((rows, self.block_bytes), dtype=torch.uint8, device=self._device),
            staging_rows=torch.arange(rows, device=self._device),
        )

    @contextlib.contextmanager
    def _lane(self) -> Iterator[_Lane]:
        """A lane for this caller, its stream behind the engine's and current. Everything is done when it ends."""
        lane = self._lanes.get()
        try:
            written = self._cuda.Event()
            written.record(self._engine_stream)
            lane.stream.wait_event(written)
            done = self._cuda.Event(blocking=True)
            with self._cuda.stream(lane.stream):
                try:
                    yield lane
                finally:
                    # After a failure too: the caller will give the slots to others.
                    done.record(lane.stream)
                    done.synchronize()
        finally:
            self._lanes.put(lane)

    def _checked(self, blocks: Blocks) -> Pairs:
        """The kernel leaves out slots that do not exist, and so does a slice of a tensor, without a word."""
        for name, slots, number in (
            ("device", blocks.device_slots, self.num_blocks),
            ("arena", blocks.slots, blocks.memory.num_slots),
        ):
            for slot in slots:
                if not 0 <= slot < number:
                    raise InvalidInputError(f"{name} slot {slot}: there are {number}")
        return sorted(zip(blocks.slots, blocks.device_slots, strict=True))

    def _on_device(self, slots: Iterable[int]) -> Tensor:
        return torch.tensor(list(slots), dtype=torch.int64).to(self._device, non_blocking=True)

    def _rows_of(self, memory: SlotMemory) -> HostMemory:
        """The memory, a block's bytes of each slot, pinned if the system lets us."""
        host = self._memory.of(memory)
        return replace(host, rows=host.rows[:, : self.block_bytes])

    def _compile_crossing(self, host: HostMemory) -> None:
        """Beside the time that pinning takes, a second is little; later a load would wait for it."""
        if self.block_bytes >= _LEAST_DMA_BYTES:  # a run is no shorter than a block
            return
        rows = host.rows[:, : self.block_bytes]
        with self._lane() as lane:
            no_block = lane.staging_rows[:1] - 1
            block_copy(rows, no_block, lane.staging, no_block)
            if host.is_writable:
                block_copy(lane.staging, no_block, rows, no_block)


def _alike(tensors: Sequence[Tensor]) -> list[Parts]:
    """Those that follow one another and have size and stride in common: a launch moves all of them."""
    groups = itertools.groupby(tensors, key=lambda tensor: (tensor.size(1), tensor.stride(0)))
    return [Parts.of(list(group)) for _, group in groups]


def _parts(pairs: Pairs, most: int) -> Iterator[Pairs]:
    for start in range(0, len(pairs), most):
        yield pairs[start : start + most]


def _runs(part: Pairs, chunk_slots: int, *, adjacent: bool) -> Iterator[_Run]:
    """:param adjacent: the end of a slot is the start of the next; otherwise each is a run of its own."""
    start = 0
    for end in range(1, len(part) + 1):
        is_next = end < len(part) and part[end][0] == part[end - 1][0] + 1 and part[end][0] % chunk_slots
        if not adjacent or not is_next:
            yield _Run(start, part[start][0], end - start)
            start = end


def _host_run(host: Tensor, run: _Run) -> Tensor:
    return host[run.arena_slot : run.arena_slot + run.length]


def _staged(lane: _Lane, run: _Run) -> Tensor:
    return lane.staging[run.staging_row : run.staging_row + run.length]
