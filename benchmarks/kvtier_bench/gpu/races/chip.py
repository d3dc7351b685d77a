"""The device on which a suite's engine runs: a GPU, or a simulated one in virtual time."""

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Any, Protocol
from unittest import mock

import torch

from kvtier.device import cuda, cuda_lanes, cuda_routes
from kvtier_bench.gpu.races.paces import RacePace
from kvtier_bench.gpu.simulation.cuda import SimulatedCuda
from kvtier_bench.gpu.simulation.driver import SimulatedDriver
from kvtier_bench.gpu.simulation.executors import acting_movers
from kvtier_bench.gpu.simulation.launches import simulated_launches
from kvtier_bench.gpu.simulation.timeline import Timeline

_CYCLES_PER_S = 1.7e9
"""The clock of the GPU, roughly: a delay serves its purpose when it is half as long, too."""
_PAUSE_S = 1e-3
_MUCH_BYTES = 1 << 40


class Chip(Protocol):
    """A device as the engine's thread uses it; no other thread calls it."""

    cuda: Any
    """`torch.cuda`, or what stands for it."""
    device: torch.device
    driver: Any
    """The driver's library as `CudaKV` takes it; None is that of the system."""

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Has the calling thread work on this device within the context."""

    def begin_round(self) -> None:
        """Tells that a round begins, from which on everything may be faster or slower."""

    def launch(self, does: Callable[[], None]) -> None:
        """Queues on the current stream what `does` asks torch for."""

    def hold_up(self, seconds: float) -> None:
        """Keeps the current stream busy."""

    def capture(self, does: Callable[[], None]) -> Callable[[], None]:
        """Captures a CUDA graph. Each call of the result queues on the current stream what `does` would."""

    @property
    def problems(self) -> frozenset[str]:
        """Everything done until now that a device forbids, as far as this one sees it."""

    def pause(self) -> None:
        """Lets other threads go on, for a millisecond at most."""

    def clock(self) -> float:
        """The time in seconds."""


class Gpu:
    """`Chip` on the GPU that torch has current."""

    def __init__(self, device: torch.device) -> None:
        self.cuda: Any = torch.cuda
        self.device, self.driver = device, None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with torch.cuda.device(self.device):
            yield

    def begin_round(self) -> None:
        pass

    def launch(self, does: Callable[[], None]) -> None:
        does()

    def hold_up(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * _CYCLES_PER_S))  # type: ignore[no-untyped-call]

    def capture(self, does: Callable[[], None]) -> Callable[[], None]:
        aside = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(aside):
            does()  # libraries set themselves up
        aside.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # movers may be copying
            does()
        return graph.replay

    @property
    def problems(self) -> frozenset[str]:
        return frozenset()

    def pause(self) -> None:
        time.sleep(_PAUSE_S / 10)

    def clock(self) -> float:
        return time.monotonic()


class Way(Enum):
    """How blocks are to cross the bus."""

    DIRECT = auto()
    """Batches of transfers go straight between pages and host memory."""
    STAGED = auto()
    """Batches of transfers go to and from a staging buffer."""
    BY_KERNEL = auto()
    """A kernel copies between a staging buffer and host memory."""
    ONE_BY_ONE = auto()
    """Transfers go to and from a staging buffer with a call for each, as where the driver is old."""


class SimulatedChip:
    """`Chip` in virtual time. The same seed takes the same course."""

    def __init__(self, seed: int, way: Way) -> None:
        """:param way: the one that `CudaKV` is made to choose. Its own choice depends on sizes, here small."""
        self._timeline = Timeline(seed)
        self._pace = RacePace(random.Random(seed))
        self._random = random.Random(seed)
        self.simulated = SimulatedCuda(self._timeline, self._pace, launch_s=self._some_delay_s)
        self.cuda: Any = self.simulated
        self.device = torch.device("cpu")
        self.driver: Any = None if way is Way.ONE_BY_ONE else SimulatedDriver(self.simulated, splits=True)
        self._way = way

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        least_part_bytes = 1 if self._way is Way.STAGED else _MUCH_BYTES
        with (
            mock.patch.object(cuda, "LEAST_PART_BYTES", 1 if self._way is Way.DIRECT else _MUCH_BYTES),
            mock.patch.object(cuda_routes, "LEAST_PART_BYTES", least_part_bytes),
            mock.patch.object(cuda_routes, "LEAST_DMA_BYTES", 1),
            mock.patch.object(cuda_lanes, "_LEAST_NUMBERS", 1),
            simulated_launches(self.simulated),
            acting_movers(self._timeline, self._some_delay_s),
            self._timeline.acting(),
            self.simulated.device(self.device),
        ):
            self.simulated.set_device(self.device)
            yield

    def begin_round(self) -> None:
        with self._timeline.lock:
            self._pace.begin_round()

    def launch(self, does: Callable[[], None]) -> None:
        self.simulated.launch(does)

    def hold_up(self, seconds: float) -> None:
        self.simulated.launch(lambda: None, seconds=seconds)

    def capture(self, does: Callable[[], None]) -> Callable[[], None]:
        return lambda: self.launch(does)

    @property
    def problems(self) -> frozenset[str]:
        return frozenset(self.simulated.problems)

    def pause(self) -> None:
        self._timeline.sleep(_PAUSE_S * self._random.random())

    def clock(self) -> float:
        return self._timeline.clock()

    def _some_delay_s(self) -> float:
        """How long a thread of the host is held up."""
        return self._pace.delay_s()
