"""An engine of one rank whose device never idles, with the directory and the mover that it would have."""

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from kvtier.device.cuda import CudaKV
from kvtier.device.kv import Fence
from kvtier.identity.keys import BlockKey, NamespaceId
from kvtier.metrics import Metrics
from kvtier.offload import (
    OTHER_COPIES,
    Directory,
    DirectorySettings,
    HierarchyMetrics,
    InventoryLog,
    JobResult,
    Mover,
    MoverTiers,
)
from kvtier.offload import loads as loads_module
from kvtier.offload.messages import Loaded
from kvtier.offload.mover import copy_queue
from kvtier.offload.mover import threads as mover_threads
from kvtier.tiers.host.tier import HostTier
from kvtier_bench.gpu.simulation.cuda import SimulatedCuda
from kvtier_bench.gpu.simulation.driver import SimulatedDriver
from kvtier_bench.gpu.simulation.executors import acting_movers
from kvtier_bench.gpu.simulation.launches import simulated_launches
from kvtier_bench.gpu.simulation.timeline import Timeline
from kvtier_bench.gpu.streams.devices import Fences, LendingPool, TimedKV
from kvtier_bench.gpu.streams.pace import BusPace, Speeds
from kvtier_bench.gpu.streams.reserved import ReservedArena, reserved_pages

POOL = "pool"
_AHEAD = 2
"""How many steps are queued: the one that runs, and the next."""
_LOAD_THREADS = 4
_STAGING_BYTES = 192 << 20
_START_S = 50e-6
"""The time until a thread has begun what it is given."""
_COPY_BYTES, _COPY_BLOCKS = 128 << 20, 1024
"""The most that a message moves between device and host memory, as in `kvtier.build.engine_cache`."""
_LOAN_BYTES = 64 << 20
"""The most that a message moves of what a pool lends."""
_FORMER_LOAN_BLOCKS = 32
"""The most blocks of a loan at the time when fences were made at a batch's turn."""
_NAMESPACE = NamespaceId(bytes(16))


@dataclass(frozen=True, slots=True)
class Model:
    """A block of 16 tokens in one rank of a model."""

    name: str
    num_layers: int
    page_bytes: int
    """The size of a layer's page."""

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.page_bytes


class Worker:
    """Queues steps of equal length, each when the oldest is over, and hands over messages in between. One thread."""

    def __init__(
        self,
        cuda: SimulatedCuda,
        directory: Directory,
        mover: Mover,
        device: TimedKV,
        *,
        step_s: float,
        engine_s: float,
        fences: Fences,
    ) -> None:
        self.directory, self.device = directory, device
        self._cuda, self._mover, self._fences = cuda, mover, fences
        self._step_s, self._engine_s = step_s, engine_s
        self._steps: deque[tuple[Fence | None, Any]] = deque()
        """The start and the end of each step that is queued."""
        self.told_s = 0.0
        """The seconds that loads took, as the planner was told."""

    @property
    def now(self) -> float:
        return self._cuda.timeline.now

    def step(self) -> list[JobResult]:
        """Queues a step, hands over what the directory has for the mover, and waits for the oldest step's end."""
        self._cuda.timeline.sleep(self._engine_s)
        start = self._mover.fence()
        self._cuda.launch(lambda: None, seconds=self._step_s)
        end = self._cuda.Event()
        end.record(self._cuda.current_stream())
        self._steps.append((start, end))
        loads_after = self._steps[0][0] if self._fences is Fences.AT_PROCESSED_STEP else None
        self._mover.submit(self.directory.take_messages(), loads_after=loads_after)
        while len(self._steps) >= _AHEAD:
            self._steps.popleft()[1].synchronize()
        return self._poll()

    def idle_until_over(self, job: int) -> None:
        """Queues no step until the job is over."""
        self._mover.submit(self.directory.take_messages())
        while not any(result.job_id == job for result in self._poll()):
            self._cuda.timeline.sleep(1e-3)
            self._mover.submit(self.directory.take_messages())

    def _poll(self) -> list[JobResult]:
        answers = self._mover.poll()
        self.told_s += sum(message.seconds for message in answers if isinstance(message, Loaded))
        self.directory.deliver(0, answers)
        return self.directory.poll()


@contextlib.contextmanager
def worker(
    model: Model, *, num_blocks: int, num_slots: int, step_s: float, fences: Fences, speeds: Speeds | None = None
) -> Iterator[Worker]:
    """A worker for the calling thread. Its pool lends every block with a key of `keys_of`."""
    speeds = speeds or Speeds()
    timeline = Timeline()
    cuda = SimulatedCuda(timeline, BusPace(speeds), launch_s=lambda: speeds.launch_s)
    block_bytes = model.block_bytes
    settings = DirectorySettings(
        copy_batch_blocks=min(_COPY_BYTES // block_bytes, _COPY_BLOCKS),
        loan_blocks=_FORMER_LOAN_BLOCKS if fences is Fences.AT_ITS_TURN else _LOAN_BYTES // block_bytes,
        borrows=True,
        load_deadline_s=1e6,
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(acting_movers(timeline, lambda: _START_S))
        if fences is Fences.AT_ITS_TURN:
            # Copies from and to host memory had one thread then, and were of one batch each; loans had one size.
            stack.enter_context(mock.patch.object(mover_threads, "_HOST_LOADS", 1))
            stack.enter_context(mock.patch.object(mover_threads, "_SAVES", 1))
            stack.enter_context(mock.patch.object(copy_queue, "_MOST_BYTES", 0))
            stack.enter_context(mock.patch.object(loads_module, "_MANY_LOANS", num_blocks))
        stack.enter_context(simulated_launches(cuda))
        stack.enter_context(timeline.acting())
        stack.enter_context(cuda.device(None))
        cuda.set_device(None)
        kv = CudaKV(
            reserved_pages(num_blocks, num_parts=model.num_layers, part_bytes=model.page_bytes),
            staging_bytes=_STAGING_BYTES,
            num_lanes=_LOAD_THREADS + OTHER_COPIES,
            cuda=cuda,
            driver=SimulatedDriver(cuda, splits=False, transfer_s=speeds.transfer_s),
        )
        stack.callback(kv.close)
        cuda.moves_bytes = False  # from now on: the driver was tried out before
        device = TimedKV(kv, timeline, speeds, fences, num_at_a_time=mover_threads._SAVES)
        arena = ReservedArena(num_slots, block_bytes)
        device.attach(arena)
        pool = HostTier(2**22, slab_bytes=2**16, name=POOL)
        stack.callback(pool.close)
        mover = Mover(
            namespace=_NAMESPACE,
            device=device,
            arena=arena,
            tiers=MoverTiers(
                by_name={},
                inventory=InventoryLog([], _NAMESPACE),
                lenders={POOL: LendingPool(num_blocks, block_bytes, device, timeline, speeds)},
            ),
            num_load_threads=_LOAD_THREADS,
        )
        stack.callback(mover.close)
        directory = Directory(
            namespaces=[_NAMESPACE],
            num_slots=num_slots,
            local_tiers=[],
            shared=pool,
            metrics=HierarchyMetrics(Metrics()),
            settings=settings,
            clock=timeline.clock,
        )
        stack.callback(directory.close)
        yield Worker(cuda, directory, mover, device, step_s=step_s, engine_s=speeds.engine_s, fences=fences)


def keys_of(numbers: Sequence[int]) -> list[BlockKey]:
    """Block keys, which say where the pool has the blocks."""
    return [BlockKey(number.to_bytes(48, "big")) for number in numbers]
