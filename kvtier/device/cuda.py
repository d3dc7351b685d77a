"""Moving blocks between a CUDA device and slots in host memory, beside the engine's kernels."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtier.codec.checksums import PREFIX_BYTES
from kvtier.device.batched_dma import BatchedDma
from kvtier.device.cuda_lanes import CopyStream, CopyStreams
from kvtier.device.cuda_routes import LEAST_PART_BYTES, Direct, Route, Staged
from kvtier.device.device_check import DeviceCheck
from kvtier.device.kv import Blocks, Fence, MemoryUse
from kvtier.device.kv_group import KVGroup
from kvtier.device.layered_loads import LayeredLoads
from kvtier.device.pinned_memory import HostMemory, PinnedMemory
from kvtier.device.slot_batches import SlotBatch
from kvtier.device.staging import lanes_within
from kvtier.errors import DeviceFaultError, InvalidInputError
from kvtier.memory.arena import Arena
from kvtier.memory.slot_memory import SlotMemory
from kvtier_kernels.records import RecordLayout

_log = logging.getLogger(__name__)


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
        checks_loads: bool = False,
        cuda: Any = torch.cuda,
        driver: Any = None,
    ) -> None:
        """Chooses a route. Where blocks are staged, this takes `staging_bytes` of the device, and compiles the kernels:
        a second or two, the first time.

        :param groups: KV groups, mostly one: the parts of all blocks, e.g. one per layer, each uint8
            `[num_blocks, part_bytes]` on the device, rows contiguous: views, nothing is copied. A block is its parts,
            one after the other. Groups have as many blocks each: device slot `group * num_blocks + block` is a block
            of this one. Where its blocks are smaller than another group's, zeros follow in the arena.
        :param layout: of each part and its record: blocks are quantised on their way down, and restored on their way
            up. In the arena, a block is then the records of its parts. None moves them as they are.
        :param staging_bytes: of all lanes; larger batches go in several pieces.
        :param num_lanes: copies at a time; more callers wait. One per thread of the mover lets none wait. Fewer where
            `staging_bytes` hold no block for each.
        :param checks_loads: whether checksums of a sample of the blocks that are copied to the device are compared with
            those of the bytes in host memory. A copy that brings others raises `DeviceFaultError`. Not with `layout`.
        :param cuda: where streams and events come from; a seam for tests on machines without a GPU.
        :param driver: the driver's library; another seam. None: that of the system.
        :raises InvalidInputError: tensors of another kind, or that do not fit together.
        :raises ConfigError: `staging_bytes` hold no block at all.
        """
        self._groups = [KVGroup.of(tensors, layout) for tensors in groups]
        if len({(group.num_blocks, group.device) for group in self._groups}) != 1:
            raise InvalidInputError(
                f"KV groups of {[group.num_blocks for group in self._groups]} blocks: need one group or more, and the "
                "same of each, on one device"
            )
        self._device, self._cuda = self._groups[0].device, cuda
        self._block_bytes = max(group.block_bytes for group in self._groups)
        self._route = _route(self._groups, _batches(self._device, cuda, driver))
        rows = 0
        if not isinstance(self._route, Direct):
            num_lanes = lanes_within(staging_bytes, block_bytes=self.block_bytes, num_copies=num_lanes)
            rows = min(staging_bytes // num_lanes // self.block_bytes, self.num_blocks)
        self._staging_bytes = num_lanes * rows * self.block_bytes
        self._lanes = CopyStreams(self._device, num_lanes, rows=rows, row_bytes=self.block_bytes, cuda=cuda)
        self._layered: LayeredLoads | None = None  # set once, by the engine's thread before the first copy
        self._memory = PinnedMemory(self._device, cuda, on_pinned=self._warm_for)
        self._checks: list[DeviceCheck] = []
        """The check of each group; none where nothing is checked. Set once, before any copy."""
        self._checks_loads, self._num_lanes = checks_loads, num_lanes
        if self._device.type == "cuda":  # what the lanes have just been given may have been used on other streams
            torch.cuda.synchronize(self._device)
        for _ in range(num_lanes):  # each has its turn
            self._lanes.run(self._route.warm, after=None)
        if checks_loads:
            self._make_checks()

    @property
    def num_blocks(self) -> int:
        """The number of blocks of all groups together."""
        return len(self._groups) * self._groups[0].num_blocks

    @property
    def block_bytes(self) -> int:
        """The size of a block in the arena."""
        return self._block_bytes

    def fence(self) -> Fence:
        """A fence behind what the calling thread's current stream of the device holds: call it in the engine's thread.

        The stream then also waits for all loads by layer, for their device slots may be somebody else's by now.
        """
        if self._layered is not None:
            self._layered.wait_for_all()
        return self._lanes.fence()

    def by_layer(self, num_layers: int) -> LayeredLoads | None:
        """Loads whose layers the engine waits for one by one. Called once, in the engine's thread, before any copy.

        None: blocks are staged, or a layer of a block is too small for a transfer of its own.

        :param num_layers: of a block, which is one part of as many equal layers, one after the other.
        """
        route, (group, *others) = self._route, self._groups
        layer_bytes, rest = divmod(self.block_bytes, num_layers)
        is_one_part = not others and group.least_part_bytes == group.block_bytes
        if not isinstance(route, Direct) or not is_one_part or rest or layer_bytes < LEAST_PART_BYTES:
            return None

        def queue_layers(blocks: Blocks, after: Fence | None, announce: Callable[[Sequence[Any]], None]) -> None:
            batch, host = self._checked(blocks)

            def copy(lane: CopyStream) -> None:
                events: list[Any] = []
                for count in route.scatter_layers(lane, batch, host, num_layers):
                    event = self._cuda.Event()
                    event.record(lane.stream)
                    events += [event] * count
                announce(events)

            self._lanes.run(copy, after=after)

        self._layered = LayeredLoads(self._device, num_layers, queue_layers, cuda=self._cuda)
        return self._layered

    def gather(
        self, device_slots: Sequence[int], arena: Arena, arena_slots: Sequence[int], *, after: Fence | None
    ) -> None:
        """Device to arena, `device_slots[i]` to `arena_slots[i]`. On return the bytes are in the arena."""
        batch, host = self._checked(Blocks(arena, arena_slots, device_slots))
        self._lanes.run(lambda lane: self._route.gather(lane, batch, host), after=after)
        for number, group in enumerate(self._groups):
            if group.block_bytes < self.block_bytes:  # or bytes of another block would be stored with this one
                arena.rows[batch.slots[batch.groups == number], group.block_bytes : self.block_bytes] = 0

    def scatter(
        self, arena: SlotMemory, arena_slots: Sequence[int], device_slots: Sequence[int], *, after: Fence | None
    ) -> float:
        """Arena to device. On return the bytes are on the device. Gives the seconds that it waited for the fence."""
        return self.scatter_all([Blocks(arena, arena_slots, device_slots)], after=after)

    def scatter_all(self, sources: Sequence[Blocks], *, after: Fence | None) -> float:
        """Copies blocks of several memories, arenas or attached, at once. Returns the seconds that it waited for the
        fence."""
        batches = [self._checked(blocks) for blocks in sources]

        def copy(lane: CopyStream) -> None:
            for batch, host in batches:
                self._route.scatter(lane, batch, host)
            for batch, host in batches:
                self._check(batch, host)

        return self._lanes.run(copy, after=after)

    def begin_verifying(self) -> bool:
        """Compiles the kernels, and takes 4 MiB of the device for each lane.

        False: blocks are not the same bytes in host memory, their parts are no whole words, or there is no room.
        """
        is_same = all(of.layout is None and of.block_bytes == self.block_bytes for of in self._groups)
        if not is_same or not all(DeviceCheck.can_check(of.parts, prefix_bytes=PREFIX_BYTES) for of in self._groups):
            return False
        try:
            if not self._checks:
                self._make_checks()
            for _ in range(self._num_lanes):  # each has its turn
                self._lanes.run(lambda _: self._checks[0].get_ready(), after=None)
        except torch.OutOfMemoryError:
            _log.warning("blocks that a pool lends are verified on the host: the device has no room left to do it")
            return False
        return True

    def wrong_blocks(
        self, device_slots: Sequence[int], prefixes: Sequence[bytes], checksums: Sequence[int]
    ) -> list[int]:
        """Which blocks are others on the device than their writers summed: places in `device_slots`, in order."""
        groups, blocks = np.divmod(np.asarray(device_slots, dtype=np.int64), self._groups[0].num_blocks)
        wrong: list[int] = []

        def look(_: CopyStream) -> None:
            for number, check in enumerate(self._checks):
                places = np.flatnonzero(groups == number).tolist()
                if places:
                    found = check.mismatches(
                        blocks[places].tolist(),
                        [prefixes[place] for place in places],
                        [checksums[place] for place in places],
                    )
                    wrong.extend(places[index] for index in found)

        self._lanes.run(look, after=None)
        return sorted(wrong)

    @property
    def memory_use(self) -> MemoryUse:
        """Host memory that is attached, and what of the device copies are staged in. Any thread."""
        return MemoryUse(self._staging_bytes, self._memory.pinned_bytes, self._memory.pinning_s)

    def attach(self, memory: SlotMemory) -> bool:
        """Pins memory. False: the system does not let us, which is logged."""
        return self._memory.attach(memory)

    def detach(self, memory: SlotMemory) -> None:
        """Unpins it. No copy from or to it is under way, and none will come."""
        self._memory.detach(memory)

    def close(self) -> None:
        """Unpins all. Call it when no copy is under way and none will come. Idempotent."""
        self._memory.close()

    def _make_checks(self) -> None:
        self._lanes.run(lambda _: self._checks.extend(DeviceCheck(group.parts) for group in self._groups), after=None)

    def _check(self, batch: SlotBatch, host: HostMemory) -> None:
        """Waits for the current lane's copy, if a sample of it is to be checked. Raises `DeviceFaultError`.

        Lent memory may change meanwhile, which is no fault: what is read-only here is not checked.
        """
        if not self._checks_loads or not host.is_writable:
            return
        for number, check in enumerate(self._checks):
            of_group = batch.groups == number
            wrong = check.wrong(host.rows.numpy(), batch.slots[of_group].tolist(), batch.blocks[of_group].tolist())
            if wrong:
                raise DeviceFaultError(
                    f"of {len(batch)} blocks, {len(wrong)} that were looked at have other bytes on the device than in "
                    "host memory: the bus, the device's memory or the driver is at fault, or somebody else writes there"
                )

    def _checked(self, blocks: Blocks) -> tuple[SlotBatch, HostMemory]:
        """What to copy. A kernel leaves out slots that do not exist, without a word; a transfer reads or writes there.

        The memory comes with a block's bytes of each slot, pinned if the system lets us.
        """
        batch = SlotBatch.of(blocks, num_groups=len(self._groups), blocks_per_group=self._groups[0].num_blocks)
        return batch, self._rows_of(self._memory.of(blocks.memory))

    def _rows_of(self, host: HostMemory) -> HostMemory:
        if host.rows.size(1) < self.block_bytes:
            raise InvalidInputError(f"blocks of {self.block_bytes} bytes in slots of {host.rows.size(1)}")
        return replace(host, rows=host.rows[:, : self.block_bytes])

    def _warm_for(self, host: HostMemory) -> None:
        self._lanes.run(lambda lane: self._route.warm_for(lane, self._rows_of(host)), after=None)


def _route(groups: Sequence[KVGroup], dma: BatchedDma | None) -> Route:
    """Straight between blocks and host memory where every part of a block is worth a transfer of its own."""
    least = min(group.least_part_bytes for group in groups)
    if dma is not None and least >= LEAST_PART_BYTES and all(group.layout is None for group in groups):
        _log.info("KV is copied straight between its pages, of %d bytes or more, and host memory, in batches", least)
        return Direct(groups, dma)
    _log.info(
        "KV is copied by way of staging memory on the device (pages of %d bytes or more); transfers are asked for %s",
        least, "in batches" if dma is not None else "one by one: for batches, the driver must be of CUDA 12.8",
    )  # fmt: skip
    return Staged(groups, dma)


def _batches(device: torch.device, cuda: Any, driver: Any) -> BatchedDma | None:
    """What asks for transfers in batches, once it was seen to work."""
    if driver is None and device.type != "cuda":
        return None
    dma = BatchedDma.of_driver(driver)
    if dma is None:
        return None
    with cuda.device(device):
        stream = cuda.Stream(device)
        with cuda.stream(stream):
            return dma if dma.works(device, stream) else None
