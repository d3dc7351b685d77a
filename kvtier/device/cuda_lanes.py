"""What copies on a CUDA device work with: a stream for each of them at a time, staging memory, and fences."""

import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtier.device.kv import Fence

_LEAST_NUMBERS = 8192
"""64 KiB. A batch of 1024 blocks takes half of them at most."""


@dataclass(frozen=True, slots=True, eq=False)
class CudaFence(Fence):
    """An event on the stream that was the engine's when it was made."""

    event: Any


class CopyStream:
    """What one copy at a time works with. The thread that has it from `CopyStreams.run` is in its stream's context."""

    def __init__(self, device: torch.device, rows: int, row_bytes: int, cuda: Any) -> None:
        self.stream = cuda.Stream(device)
        self.staging = torch.empty((rows, row_bytes), dtype=torch.uint8, device=device)
        """uint8 `[rows, row_bytes]` on the device. Touched on `stream` only, which keeps its users apart."""
        room = max(4 * rows, _LEAST_NUMBERS)
        self._on_host = torch.empty(room, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._on_device = torch.empty(room, dtype=torch.int64, device=device)
        self._num_used = 0  # of both, by the present copy
        self._stalled, self._resumed = (cuda.Event(enable_timing=True) for _ in range(2))
        self._done = cuda.Event(blocking=True)
        self._after: CudaFence | None = None  # of the present copy, until its stream waits for it
        self._has_waited = False

    def begin(self, after: Fence | None) -> None:
        """A copy begins. The last one is done."""
        assert after is None or isinstance(after, CudaFence), f"a fence of another device: {after}"
        self._after, self._has_waited, self._num_used = after, False, 0

    def wait_for_fence(self) -> None:
        """What is queued from now on is done after everything before the copy's fence. The first call counts."""
        after, self._after = self._after, None
        if after is None:
            return
        self._stalled.record(self.stream)
        self.stream.wait_event(after.event)
        self._resumed.record(self.stream)
        self._has_waited = True

    def end(self) -> float:
        """Waits for the copy without holding the GIL. Gives the seconds that its stream waited for the fence."""
        self._done.record(self.stream)
        self._done.synchronize()
        return self._stalled.elapsed_time(self._resumed) / 1000 if self._has_waited else 0.0

    def to_device(self, numbers: npt.NDArray[np.int64]) -> Tensor:
        """Copies these int64 numbers to the device, for the present copy."""
        if self._num_used + numbers.size > self._on_host.numel():
            self.end()  # what was queued has read its numbers
            self._num_used = 0
        place = slice(self._num_used, self._num_used + numbers.size)
        self._num_used = place.stop
        self._on_host[place].numpy()[:] = numbers.ravel()
        self._on_device[place].copy_(self._on_host[place], non_blocking=True)
        return self._on_device[place].view(numbers.shape)


class CopyStreams:
    """Streams beside the engine's, each with staging memory. `run` may be called by any thread."""

    def __init__(self, device: torch.device, num_lanes: int, *, rows: int, row_bytes: int, cuda: Any) -> None:
        """:param cuda: where streams and events come from; a seam for tests on machines without a GPU."""
        self._device, self._cuda = device, cuda
        self._free: queue.SimpleQueue[CopyStream] = queue.SimpleQueue()  # its own lock; holds those not in use
        with cuda.device(device):
            for _ in range(num_lanes):
                self._free.put(CopyStream(device, rows, row_bytes, cuda))

    def fence(self) -> CudaFence:
        """A fence behind what the calling thread's current stream of the device holds."""
        with self._cuda.device(self._device):
            event = self._cuda.Event()
            event.record(self._cuda.current_stream(self._device))
        return CudaFence(event)

    def run(self, copy: Callable[[CopyStream], None], *, after: Fence | None) -> float:
        """Calls `copy` in the context of a lane's stream, once there is one that nobody uses; all is done on return.

        :param after: see `CopyStream.wait_for_fence`, which `copy` calls.
        :returns: the seconds that the stream waited for the fence.
        """
        lane = self._free.get()
        try:
            # The device is named: a thread that names none sets up another device's memory beside it.
            with self._cuda.device(self._device), self._cuda.stream(lane.stream):
                # What calls the driver itself needs the context, which `device` leaves alone on the first device.
                self._cuda.set_device(self._device)
                lane.begin(after)
                try:
                    copy(lane)
                finally:
                    waited_s = lane.end()  # after a failure too: the caller will give the slots to others
            return waited_s
        finally:
            self._free.put(lane)
