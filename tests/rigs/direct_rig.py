"""An engine that notes which of its blocks came straight from the pool's memory, and can be held up in the copy."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from prometheus_client import CollectorRegistry

from build_rig import build, result
from hierarchy_rig import chain
from kvtier.build.engine_cache import EngineCache
from kvtier.device.kv import Blocks, Fence, HostMemoryKV
from kvtier.identity.keys import BlockKey
from kvtier.memory.arena import Arena
from kvtier.memory.slot_memory import SlotMemory
from kvtier.offload import JobResult
from pool_rig import TOKENS, WAIT_S, until

BLOCK_BYTES = 64 * 1024
NUM_BLOCKS = 16
KEYS = chain(NUM_BLOCKS)
Rows = npt.NDArray[np.uint8]


class Device(HostMemoryKV):
    """Notes where blocks come from. Copies of lent ones wait for `gate`."""

    def __init__(self, rows: Rows, *, verifies: bool) -> None:
        """:param verifies: whether it looks at lent blocks when they have arrived, as a GPU does."""
        super().__init__(rows)
        self.rows, self._verifies = rows, verifies
        self.num_verified = 0
        self.spoils: int | None = None
        """A device slot whose next lent block arrives with other bytes."""
        self.num_leased = self.num_by_arena = 0
        self.attached: list[SlotMemory] = []
        self.can_attach = True
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()

    def scatter_all(self, sources: Sequence[Blocks], *, after: Fence | None) -> float:
        if any(isinstance(blocks.memory, Arena) for blocks in sources):
            self.num_by_arena += sum(len(blocks.slots) for blocks in sources)
        else:
            assert all(blocks.memory in self.attached for blocks in sources)
            self.entered.set()
            assert self.gate.wait(WAIT_S)
            self.num_leased += sum(len(blocks.slots) for blocks in sources)
            waited_s = super().scatter_all(sources, after=after)
            if any(self.spoils in blocks.device_slots for blocks in sources):
                self.rows[self.spoils, -1] ^= 1
                self.spoils = None
            return waited_s
        return super().scatter_all(sources, after=after)

    def begin_verifying(self) -> bool:
        return self._verifies

    def wrong_blocks(
        self, device_slots: Sequence[int], prefixes: Sequence[bytes], checksums: Sequence[int]
    ) -> list[int]:
        self.num_verified += len(device_slots)
        sums = [
            xxhash.xxh3_64_intdigest(prefix + self.rows[slot].tobytes())
            for slot, prefix in zip(device_slots, prefixes, strict=True)
        ]
        return [i for i, (found, checksum) in enumerate(zip(sums, checksums, strict=True)) if found != checksum]

    def attach(self, memory: SlotMemory) -> bool:
        if isinstance(memory, Arena):
            return True
        if self.can_attach:
            self.attached.append(memory)
        return self.can_attach

    def detach(self, memory: SlotMemory) -> None:
        if memory in self.attached:
            self.attached.remove(memory)


class Engine:
    """An engine's cache over a `Device`."""

    def __init__(self, cache: EngineCache, device: Device, registry: CollectorRegistry) -> None:
        self.cache, self.device, self._registry = cache, device, registry

    def save(self) -> Rows:
        """All blocks to the pool; returns what they hold."""
        saved = self.device.rows.copy()
        assert not result(self.cache.hierarchy, self.start_save()).failed
        until(lambda: self.num_stored() >= NUM_BLOCKS)
        return saved

    def num_stored(self) -> float:
        """Blocks that the pool has taken from this engine."""
        return self.count("kvtier_tier_blocks_total", tier="pool", op="write", status="stored")

    def start_save(self) -> int | None:
        return self.cache.hierarchy.start_save(list(zip(KEYS, range(NUM_BLOCKS), strict=True)))

    def start_load(self) -> int:
        """To other slots than they were saved from."""
        self.device.rows[:] = 0
        self.device.num_leased = self.device.num_by_arena = 0
        return self.cache.hierarchy.start_load([(key, NUM_BLOCKS - 1 - i) for i, key in enumerate(KEYS)])

    def finish(self, job_id: int) -> JobResult:
        return result(self.cache.hierarchy, job_id)

    def load(self) -> JobResult:
        return self.finish(self.start_load())

    def load_from_pool(self) -> JobResult:
        self.cache.hierarchy.reset()
        return self.load()

    def load_blocks(self, blocks: Sequence[tuple[BlockKey, int]]) -> JobResult:
        """From the pool."""
        self.cache.hierarchy.reset()
        return self.finish(self.cache.hierarchy.start_load(blocks))

    def load_into_gate(self) -> int:
        """A load whose copy has begun, and waits for the device's gate."""
        self.cache.hierarchy.reset()
        self.device.gate.clear()
        self.device.entered.clear()
        job_id = self.start_load()
        assert self.device.entered.wait(WAIT_S)
        return job_id

    def get_ready(self) -> None:
        """Until the pool's memory is mapped here: loads until all is lent."""

        def is_leased() -> bool:
            loaded = self.load_from_pool()
            return self.device.num_leased == NUM_BLOCKS and not loaded.failed

        until(is_leased)

    def count(self, name: str, **labels: str) -> float:
        return self._registry.get_sample_value(name, labels) or 0.0


@contextlib.contextmanager
def engine(
    folder: Path, address: str, *, seed: int = 0, verifies: bool = False, verify_loads: str = "auto", **pool: Any
) -> Iterator[Engine]:
    rows = np.random.default_rng(seed).integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    device, registry = Device(rows, verifies=verifies), CollectorRegistry()
    cache = {"tokens_per_block": 1, "load_threads": 2, "load_deadline_s": WAIT_S, "verify_loads": verify_loads}
    sections = {"pool": {"address": address, **pool}, "cache": cache}
    with build(folder, device, registry=registry, token=TOKENS["red"], **sections) as built:
        yield Engine(built, device, registry)
    assert device.attached == [], "all is given back"


def is_right(engine: Engine, saved: Rows, loaded: JobResult) -> bool:
    """Whether what came is what was saved, and only that came."""
    rows = engine.device.rows[::-1]
    return all(np.array_equal(rows[i], saved[i]) for i in range(NUM_BLOCKS) if i not in loaded.failed)
