"""KV of several groups behind one number of slots: copies reach the group that a slot is of."""

from collections.abc import Sequence

import numpy as np

from kvtier.device.grouped_kv import GroupedKV
from kvtier.device.kv import Blocks, Fence, HostMemoryKV
from kvtier.memory.arena import Arena
from kvtier.memory.slot_memory import SlotMemory

NUM_BLOCKS, LARGE, SMALL = 6, 64, 48


class Group(HostMemoryKV):
    def __init__(self, rows: np.ndarray, *, can_attach: bool = True) -> None:
        super().__init__(rows)
        self._can_attach = can_attach
        self.attached: list[SlotMemory] = []
        self.calls = 0

    def scatter_all(self, sources: Sequence[Blocks], *, after: Fence | None) -> float:
        self.calls += 1
        return super().scatter_all(sources, after=after)

    def attach(self, memory: SlotMemory) -> bool:
        if self._can_attach:
            self.attached.append(memory)
        return self._can_attach

    def detach(self, memory: SlotMemory) -> None:
        if memory in self.attached:
            self.attached.remove(memory)


def test_blocks_of_several_memories_reach_their_groups_in_one_call_each() -> None:
    random = np.random.default_rng(0)
    rows = [np.zeros((NUM_BLOCKS, width), dtype=np.uint8) for width in (LARGE, SMALL, LARGE)]
    groups = [Group(each) for each in rows]
    arenas = [Arena(4, LARGE), Arena(3, LARGE + 64)]
    for arena in arenas:
        arena.rows[:] = random.integers(1, 256, arena.rows.shape, dtype=np.uint8)
    sources = [Blocks(arenas[0], [0, 3, 2], [1, NUM_BLOCKS + 5, 4]), Blocks(arenas[1], [2, 1], [NUM_BLOCKS, 0])]
    GroupedKV(groups).scatter_all(sources, after=None)
    expected = [np.zeros_like(each) for each in rows]
    for arena, slots, device_slots in sources:
        for slot, device_slot in zip(slots, device_slots, strict=True):
            group, block = divmod(device_slot, NUM_BLOCKS)
            expected[group][block] = arena.rows[slot, : expected[group].shape[1]]
    for number, each in enumerate(rows):
        assert np.array_equal(each, expected[number])
    assert [group.calls for group in groups] == [1, 1, 0]


def test_memory_is_attached_to_all_groups_or_to_none() -> None:
    memory = Arena(2, LARGE)
    for failing in (None, 0, 1, 2):
        groups = [Group(np.zeros((2, LARGE), dtype=np.uint8), can_attach=number != failing) for number in range(3)]
        kv = GroupedKV(groups)
        assert kv.attach(memory) == (failing is None)
        assert [len(group.attached) for group in groups] == [1 if failing is None else 0] * 3
        kv.detach(memory)
        assert not any(group.attached for group in groups)
