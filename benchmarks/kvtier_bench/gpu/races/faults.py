"""Races that are planted, to see that a suite finds them."""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from kvtier.device.cuda import CudaKV
from kvtier.device.kv import Blocks, DeviceKV, Fence, MemoryUse
from kvtier.device.layered_loads import LayeredLoads
from kvtier.memory.arena import Arena
from kvtier.memory.slot_memory import SlotMemory
from kvtier_bench.gpu.races.chip import Chip


class Fault(Enum):
    """A race that can be planted."""

    NONE = "none"
    EARLY_FENCE = "the fence is taken before the step that writes, not after it"
    NO_FENCE = "copies wait for no fence"
    LOADS_UNFENCED = "loads write to the device without waiting for the fence"
    NOT_AWAITED = "a load or save is reported before the device has done it"
    NO_FLUSH = "blocks are handed out while saves still read them"
    SHARED_STAGING = "a staging buffer is used again before its copy is over"
    STALE_STREAM = "the fence is taken on a stream that the engine has left"
    LAYERS_NOT_AWAITED = "layers are computed with before they have come"
    FENCE_BEFORE_LAYERS = "a fence is made before the layers that are still on their way"
    OLD_GENERATION = "blocks that were lent count though their place was given to others meanwhile"


class FaultyKV:
    """A `DeviceKV` that may have a fault of its fences."""

    def __init__(self, inner: DeviceKV, fault: Fault) -> None:
        self._inner, self._fault = inner, fault

    @property
    def num_blocks(self) -> int:
        return self._inner.num_blocks

    @property
    def block_bytes(self) -> int:
        return self._inner.block_bytes

    def fence(self) -> Fence | None:
        return None if self._fault is Fault.NO_FENCE else self._inner.fence()

    def gather(
        self, device_slots: Sequence[int], arena: Arena, arena_slots: Sequence[int], *, after: Fence | None
    ) -> None:
        self._inner.gather(device_slots, arena, arena_slots, after=after)

    def scatter(
        self, arena: SlotMemory, arena_slots: Sequence[int], device_slots: Sequence[int], *, after: Fence | None
    ) -> float:
        return self.scatter_all([Blocks(arena, arena_slots, device_slots)], after=after)

    def scatter_all(self, sources: Sequence[Blocks], *, after: Fence | None) -> float:
        return self._inner.scatter_all(sources, after=None if self._fault is Fault.LOADS_UNFENCED else after)

    def begin_verifying(self) -> bool:
        return self._inner.begin_verifying()

    def wrong_blocks(
        self, device_slots: Sequence[int], prefixes: Sequence[bytes], checksums: Sequence[int]
    ) -> list[int]:
        return self._inner.wrong_blocks(device_slots, prefixes, checksums)

    @property
    def memory_use(self) -> MemoryUse:
        return self._inner.memory_use

    def attach(self, memory: SlotMemory) -> bool:
        return self._inner.attach(memory)

    def detach(self, memory: SlotMemory) -> None:
        self._inner.detach(memory)


class FaultyCuda:
    """`torch.cuda` as `CudaKV` takes it, which may have a fault of its streams and events."""

    def __init__(self, chip: Chip, fault: Fault) -> None:
        self._cuda, self._fault = chip.cuda, fault
        self._first_stream = chip.cuda.current_stream(chip.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cuda, name)

    def current_stream(self, device: Any = None) -> Any:
        return self._first_stream if self._fault is Fault.STALE_STREAM else self._cuda.current_stream(device)

    def Event(self, **options: Any) -> Any:
        event = self._cuda.Event(**options)
        return _NotAwaited(event) if self._fault is Fault.NOT_AWAITED else event


class _NotAwaited:
    """An event that nobody waits for on the host, and which is taken for done when it is not."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def __getattr__(self, name: str) -> Any:
        return getattr(self._event, name)

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, _end: Any) -> float:
        return 0.0


class FaultyLoads:
    """`LayeredLoads` that nobody may have to wait for."""

    def __init__(self, inner: LayeredLoads, fault: Fault) -> None:
        self._inner, self._fault = inner, fault
        self.num_layers = inner.num_layers

    def scatter(self, blocks: Blocks, *, after: Fence | None, on_queued: Callable[[], None]) -> None:
        fenced = None if self._fault in (Fault.LOADS_UNFENCED, Fault.NO_FENCE) else after
        self._inner.scatter(blocks, after=fenced, on_queued=on_queued)

    def wait(self, layer: int) -> None:
        if self._fault is not Fault.LAYERS_NOT_AWAITED:
            self._inner.wait(layer)


def layered_loads(kv: CudaKV, num_layers: int, fault: Fault) -> FaultyLoads | None:
    """The loads by layer of the KV, if it has any. It is called before the first copy."""
    loads = kv.by_layer(num_layers)
    if fault is Fault.FENCE_BEFORE_LAYERS:
        kv._layered = None
    return None if loads is None else FaultyLoads(loads, fault)


def share_staging(kv: CudaKV) -> None:
    """Gives all lanes the staging memory of the first one. It is called before the first copy."""
    free, lanes = kv._lanes._free, []
    while not free.empty():
        lanes.append(free.get())
    for lane in lanes:
        lane.staging = lanes[0].staging
        free.put(lane)
