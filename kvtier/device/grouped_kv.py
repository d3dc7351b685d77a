"""KV of several groups of layers behind one number of slots, in host memory; `CudaKV` has groups of its own."""

from collections.abc import Sequence

from kvtier.device.kv import Blocks, DeviceKV, Fence, HostKV, MemoryUse
from kvtier.memory.arena import Arena
from kvtier.memory.slot_memory import SlotMemory


class GroupedKV(HostKV):
    """`DeviceKV` over those of all groups. A slot's group is its number divided by that of blocks."""

    def __init__(self, groups: Sequence[DeviceKV]) -> None:
        """:param groups: with as many blocks each. Where these are smaller than the largest, the rest is zeros."""
        self._groups = list(groups)

    @property
    def num_blocks(self) -> int:
        return sum(group.num_blocks for group in self._groups)

    @property
    def block_bytes(self) -> int:
        return max(group.block_bytes for group in self._groups)

    def fence(self) -> Fence | None:
        return self._groups[0].fence()

    def gather(
        self, device_slots: Sequence[int], arena: Arena, arena_slots: Sequence[int], *, after: Fence | None
    ) -> None:
        for group, (theirs, into) in zip(self._groups, self._by_group(device_slots, arena_slots), strict=True):
            if theirs:
                group.gather(theirs, arena, into, after=after)
                if group.block_bytes < self.block_bytes:  # or bytes of another block would be stored with this one
                    arena.rows[into, group.block_bytes : self.block_bytes] = 0

    def scatter(
        self, arena: SlotMemory, arena_slots: Sequence[int], device_slots: Sequence[int], *, after: Fence | None
    ) -> float:
        return self.scatter_all([Blocks(arena, arena_slots, device_slots)], after=after)

    def scatter_all(self, sources: Sequence[Blocks], *, after: Fence | None) -> float:
        waited_s = 0.0
        by_source = [self._by_group(blocks.device_slots, blocks.slots) for blocks in sources]
        for number, group in enumerate(self._groups):
            theirs = [
                Blocks(blocks.memory, slots, device_slots)
                for blocks, by_group in zip(sources, by_source, strict=True)
                for device_slots, slots in by_group[number : number + 1]
                if slots
            ]
            if theirs:
                waited_s += group.scatter_all(theirs, after=after)
        return waited_s

    @property
    def memory_use(self) -> MemoryUse:
        """None: nothing is staged or pinned."""
        return MemoryUse()

    def attach(self, memory: SlotMemory) -> bool:
        if all(group.attach(memory) for group in self._groups):
            return True
        self.detach(memory)
        return False

    def detach(self, memory: SlotMemory) -> None:
        for group in self._groups:
            group.detach(memory)

    def _by_group(self, device_slots: Sequence[int], arena_slots: Sequence[int]) -> list[tuple[list[int], list[int]]]:
        """Blocks of each group, and their arena slots."""
        num_blocks = self._groups[0].num_blocks
        found: list[tuple[list[int], list[int]]] = [([], []) for _ in self._groups]
        for device_slot, arena_slot in zip(device_slots, arena_slots, strict=True):
            group, block = divmod(device_slot, num_blocks)
            found[group][0].append(block)
            found[group][1].append(arena_slot)
        return found
