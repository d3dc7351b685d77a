"""What `CudaKV` asks of CUDA, noted and not done; and a driver that does a batch of transfers at once."""

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from kvtier.device.batched_dma import PROTOTYPE
from kvtier.memory.arena import Arena

NUM_BLOCKS, BLOCK_BYTES = 12, 80
LANE_STREAM = 77


class Stream:
    cuda_stream = LANE_STREAM

    def __init__(self, cuda: "Notes") -> None:
        self._cuda = cuda

    def wait_event(self, event: "Event") -> None:
        self._cuda.note("wait", self, event.recorded_on)

    def synchronize(self) -> None:
        self._cuda.note("synchronize", self)


class Event:
    def __init__(self, cuda: "Notes", *, timed: bool = False) -> None:
        self._cuda, self._timed = cuda, timed
        self.recorded_on: Stream | None = None
        self.num_waited = 0
        """Streams that had been told to wait for an event, when this one was recorded."""

    def record(self, stream: Stream) -> None:
        assert self._cuda.current_device is not None, "it would be an event of the first device of all"
        self.recorded_on = stream
        self.num_waited = sum(note[0] == "wait" for note in self._cuda.notes)

    def synchronize(self) -> None:
        self._cuda.note("synchronize", self.recorded_on)

    def elapsed_time(self, end: "Event") -> float:
        """As if every wait took a quarter of a second, and all else no time."""
        assert self._timed
        assert end._timed
        return 250.0 * (end.num_waited - self.num_waited)


class Notes:
    """What `torch.cuda` would have been asked for, in order. Each thread has its own current device."""

    def __init__(self, register_status: int = 0) -> None:
        self.notes: list[tuple[Any, ...]] = []
        self.engine_stream = Stream(self)
        self.registered: dict[int, int] = {}
        self.flags: dict[int, int] = {}
        self._local = threading.local()
        self._register_status = register_status
        self.num_granted = 0
        """Registrations at a time that end well, whatever the status of others."""

    @property
    def current_device(self) -> torch.device | None:
        """None: nobody has said, and it is the first of all."""
        device: torch.device | None = getattr(self._local, "device", None)
        return device

    def note(self, what: str, stream: Stream | None, *more: Any) -> None:
        assert self.current_device is not None, "or it would be done for the first device of all"
        self.notes.append((what, stream, *more))

    def current_stream(self, _device: torch.device) -> Stream:
        return self.engine_stream

    def set_device(self, device: torch.device) -> None:
        assert self.current_device == device, "for the time of a copy only"

    def Stream(self, _device: torch.device) -> Stream:
        assert self.current_device is not None
        return Stream(self)

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> Event:
        return Event(self, timed=enable_timing)

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self._local.device = self.current_device, device
        yield
        self._local.device = before

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.note("enter", stream)
        yield
        self.note("leave", stream)

    def cudart(self) -> "Notes":
        return self

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert self.current_device is not None, "or it would be done for the first device of all"
        status = 0 if len(self.registered) < self.num_granted else self._register_status
        if status == 0:
            assert address not in self.registered
            self.registered[address] = num_bytes
            self.flags[address] = flags
        return status

    def cudaGetErrorString(self, status: int) -> str:
        return f"words for {status}"

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


class Transfers(NamedTuple):
    """A call of `cuMemcpyBatchAsync`."""

    targets: list[int]
    sources: list[int]
    sizes: list[int]
    order: int


class Driver:
    """libcuda, as far as `BatchedDma` knows it. A batch is done at the call, the last transfer first."""

    def __init__(
        self, cuda: Notes | None = None, *, find_status: int = 0, status: int = 0, garbles: bool = False
    ) -> None:
        """
        :param cuda: asked for the current device, without which the driver has no context.
        :param find_status: answered when the function is looked for; `status`, when it is called.
        """
        self.calls: list[Transfers] = []
        self.refuses = status != 0
        self._cuda, self._find_status, self._status, self._garbles = cuda, find_status, status, garbles
        self._function = PROTOTYPE(self._copy)

    def cuGetProcAddress_v2(self, name: bytes, address: Any, version: Any, flags: Any, answer: Any) -> int:
        assert (name, version.value, flags.value) == (b"cuMemcpyBatchAsync", 12080, 0)
        if self._find_status == 0:
            address._obj.value = ctypes.cast(self._function, ctypes.c_void_p).value
            answer._obj.value = 0
        return self._find_status

    def _copy(
        self, targets: int, sources: int, sizes: int, count: int, attributes: Any, first: Any, num_attributes: int,
        failed: Any, stream: int,
    ) -> int:  # fmt: skip
        if self._cuda is not None and self._cuda.current_device is None:
            return 201
        if num_attributes != 1 or first[0] != 0 or stream != LANE_STREAM or count < 1:
            return 1
        columns = [(ctypes.c_uint64 * count).from_address(column)[:] for column in (targets, sources, sizes)]
        self.calls.append(Transfers(*columns, attributes[0].source_access_order))
        if self._status:
            failed[0] = 3
            return self._status
        for target, source, size in reversed(list(zip(*columns, strict=True))):
            ctypes.memmove(target, source, size)
            if self._garbles:
                ctypes.memset(target, 0, 1 + size // 2)
        return 0


def random_rows(rows: int, row_bytes: int = BLOCK_BYTES, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8, generator=generator)


def filled_arena(num_slots: int, slot_bytes: int = BLOCK_BYTES) -> Arena:
    arena = Arena(num_slots, slot_bytes)
    np.copyto(arena.rows, random_rows(num_slots, slot_bytes, seed=1).numpy())
    return arena
