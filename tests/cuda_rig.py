"""What `CudaKV` asks of CUDA, noted and not done."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from kvtier.transfer import Arena

NUM_BLOCKS, BLOCK_BYTES = 12, 80


class Stream:
    def __init__(self, notes: list[tuple[Any, ...]]) -> None:
        self._notes = notes

    def wait_event(self, event: "Event") -> None:
        self._notes.append(("wait", self, event.recorded_on))


class Event:
    def __init__(self, notes: list[tuple[Any, ...]]) -> None:
        self._notes = notes
        self.recorded_on: Stream | None = None

    def record(self, stream: Stream) -> None:
        self.recorded_on = stream

    def synchronize(self) -> None:
        self._notes.append(("synchronize", self.recorded_on))

    def elapsed_time(self, _end: "Event") -> float:
        return 0.0


class Notes:
    """What `torch.cuda` would have been asked for, in order."""

    def __init__(self, register_status: int = 0) -> None:
        self.notes: list[tuple[Any, ...]] = []
        self.engine_stream = Stream(self.notes)
        self.registered: dict[int, int] = {}
        self.flags: dict[int, int] = {}
        self.current_device: torch.device | None = None
        self._register_status = register_status
        self.num_granted = 0
        """Registrations at a time that end well, whatever the status of others."""

    def current_stream(self, _device: torch.device) -> Stream:
        return self.engine_stream

    def Stream(self, _device: torch.device) -> Stream:
        return Stream(self.notes)

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> Event:
        return Event(self.notes)

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.current_device = device
        yield
        self.current_device = None

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.notes.append(("enter", stream))
        yield
        self.notes.append(("leave", stream))

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


def random_rows(rows: int, row_bytes: int = BLOCK_BYTES, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8, generator=generator)


def filled_arena(num_slots: int, slot_bytes: int = BLOCK_BYTES) -> Arena:
    arena = Arena(num_slots, slot_bytes)
    np.copyto(arena.rows, random_rows(num_slots, slot_bytes, seed=1).numpy())
    return arena
