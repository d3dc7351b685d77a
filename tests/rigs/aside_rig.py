"""Tiers for the tier process, and what tests share around it."""

import contextlib
import json
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from kvtier.events import Event, EventSink, ignore_event
from kvtier.identity.keys import StoreKey
from kvtier.memory.arena import Arena
from kvtier.memory.buffers import ReadableBuffer
from kvtier.metrics import Metrics
from kvtier.tiers.base import Item, Status, Tier, Usage, WriteStatus
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.host.tier import HostTier
from kvtier.tiers.sidecar import ProcessSettings, SharedMemory, SidecarTier, TierProcess

MIB = 1 << 20
BLOCK_BYTES = 16 * 1024
PATIENCE_S = 20.0


def disk(settings: str, on_event: EventSink, metrics: Metrics) -> list[Tier]:
    """A disk tier in the folder that the settings name."""
    folder, capacity_bytes = json.loads(settings)
    return [DiskTier.open(folder, capacity_bytes, reserve_bytes=0, on_event=on_event, metrics=metrics)]


def held_disk(settings: str, on_event: EventSink, metrics: Metrics) -> list[Tier]:
    """A disk tier that takes its time to open: until a file is gone that the settings name."""
    folder, capacity_bytes, held = json.loads(settings)
    while Path(held).exists():
        time.sleep(0.01)
    return disk(json.dumps([folder, capacity_bytes]), on_event, metrics)


def memory(settings: str, on_event: EventSink, metrics: Metrics) -> list[Tier]:
    """Memory of the process itself: forgotten when it ends."""
    return [HostTier(int(settings), slab_bytes=64 * 1024, name="memory", on_event=on_event)]


def scribbling(settings: str, on_event: EventSink, metrics: Metrics) -> list[Tier]:
    return [Scribbling(Path(settings))]


class Scribbling(HostTier):
    """Reads write to their buffers without an end, as long as a file is there."""

    def __init__(self, held: Path) -> None:
        super().__init__(MIB, slab_bytes=64 * 1024, name="scribbling")
        self._held = held

    def read(self, keys: Sequence[StoreKey], into: Sequence[memoryview]) -> list[Status]:
        turn = 0
        while self._held.exists():
            turn += 1
            for buffer in into:
                np.copyto(np.frombuffer(buffer, dtype=np.uint8), turn % 251)
        return super().read(keys, into)


class Staged:
    """A tier through the tier process for callers with memory of their own: copies to and from the shared one."""

    def __init__(self, process: TierProcess, tier: SidecarTier, arena: Arena) -> None:
        self._process, self._tier, self._arena = process, tier, arena
        self._stages: queue.SimpleQueue[int] = queue.SimpleQueue()
        for stage in range(arena.num_slots):
            self._stages.put(stage)

    @property
    def name(self) -> str:
        return self._tier.name

    def lookup(self, keys: Sequence[StoreKey]) -> list[Status]:
        return self._tier.lookup(keys)

    def read(self, keys: Sequence[StoreKey], into: Sequence[memoryview]) -> list[Status]:
        with self._stage() as memory:
            places = list(_cut(memory, [len(buffer) for buffer in into]))
            statuses = self._tier.read(keys, places)
            for buffer, place in zip(into, places, strict=True):
                buffer[:] = place
            return statuses

    def write(self, items: Sequence[Item[ReadableBuffer]]) -> list[WriteStatus]:
        with self._stage() as memory:
            places = list(_cut(memory, [len(payload) for _, payload, _ in items]))
            for (_, payload, _), place in zip(items, places, strict=True):
                place[:] = payload
            return self._tier.write(
                [(key, place, checksum) for (key, _, checksum), place in zip(items, places, strict=True)]
            )

    def discard(self, keys: Sequence[StoreKey]) -> int:
        return self._tier.discard(keys)

    def usage(self) -> Usage:
        return self._tier.usage()

    def check(self) -> None:
        self._tier.check()

    def close(self) -> None:
        self._tier.close()
        self._process.close()
        self._arena.close()

    @contextlib.contextmanager
    def _stage(self) -> Iterator[memoryview]:
        stage = self._stages.get(timeout=PATIENCE_S)
        try:
            # A closed tier refuses by itself; its memory may be gone.
            yield memoryview(bytearray(self._arena.slot_bytes)) if self._closed() else self._arena.view(stage)
        finally:
            self._stages.put(stage)

    def _closed(self) -> bool:
        return self._arena._rows is None


def _cut(memory: memoryview, sizes: Sequence[int]) -> Iterator[memoryview]:
    start = 0
    for size in sizes:
        yield memory[start : start + size]
        start += size


def staged(factory: str, settings: str, name: str, *, num_stages: int = 5, stage_bytes: int = 10 * MIB) -> Staged:
    """Starts a process."""
    arena = Arena(num_stages, stage_bytes, shared=True)
    process = start(arena, factory, settings)
    return Staged(process, SidecarTier(name, process), arena)


def start(
    arena: Arena,
    factory: str,
    settings: str,
    *,
    on_event: EventSink = ignore_event,
    metrics: Metrics | None = None,
    call_timeout_s: float = 10.0,
    close_timeout_s: float = 20.0,
) -> TierProcess:
    return TierProcess(
        SharedMemory(arena.descriptor, arena.memory),
        ProcessSettings(
            factory=f"aside_rig:{factory}",
            settings=settings,
            call_timeout_s=call_timeout_s,
            close_timeout_s=close_timeout_s,
        ),
        on_event=on_event,
        metrics=metrics or Metrics(),
    )


class Heard:
    """What events said is there."""

    def __init__(self) -> None:
        self.keys: set[StoreKey] = set()
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if event.kind.value == "cleared":
            self.keys.clear()
        elif event.kind.value == "stored":
            self.keys.update(event.keys)
        else:
            self.keys.difference_update(event.keys)


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)
