"""What `CudaKV` asks of `torch.cuda`, answered by a simulated device. Its memory is ordinary CPU memory."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from kvtier_bench.gpu.simulation.device import Device, Engine, Pace
from kvtier_bench.gpu.simulation.device import Event as SimulatedEvent
from kvtier_bench.gpu.simulation.device import Stream as SimulatedStream
from kvtier_bench.gpu.simulation.timeline import Timeline

_REGISTERED, _ALREADY_REGISTERED, _NOT_REGISTERED, _NOT_SUPPORTED = 0, 712, 713, 801
_HOST_REGISTER_READ_ONLY = 8


class SimulatedCuda:
    """One GPU of several, as one rank has it: a thread that has not chosen it by `device` works on another's."""

    pins_read_only = True
    """Whether memory that is mapped for reading can be pinned. Many GPUs cannot."""

    def __init__(
        self,
        timeline: Timeline,
        pace: Pace,
        *,
        launch_s: Callable[[], float] | None = None,
    ) -> None:
        """:param launch_s: what a launch by an actor takes on the host, during which other actors go on."""
        self.timeline, self._device = timeline, Device(timeline, pace)
        self._launch_s = launch_s
        self.moves_bytes = True
        """Whether copies copy. They take their time in any case: memory that nobody has touched needs no more."""
        self._default = self._device.new_stream("default")
        self._here = threading.local()
        self._pinned: dict[int, int] = {}
        """The sizes of all pinned ranges in bytes, by address. Guarded by the timeline's lock."""
        self.problems: list[str] = []
        """Every misuse that a real device would answer with an error, or with a context on another GPU. Guarded by the
        timeline's lock."""

    # As in torch.cuda

    def Stream(self, device: object = None, **_options: Any) -> SimulatedStream:
        return self._device.new_stream(f"stream {len(self._device.streams)}")

    def Event(self, **_options: Any) -> SimulatedEvent:
        return SimulatedEvent(self._device)

    def current_stream(self, device: object = None) -> SimulatedStream:
        stream: SimulatedStream = getattr(self._here, "stream", self._default)
        return stream

    def synchronize(self, device: object = None) -> None:
        self._device.synchronize()

    @contextlib.contextmanager
    def device(self, device: object) -> Iterator[None]:
        before = self.has_device, self.has_context
        self._here.has_device = True
        try:
            yield
        finally:
            self._here.has_device, self._here.has_context = before

    def set_device(self, device: object) -> None:
        self._here.has_device = self._here.has_context = True

    @contextlib.contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        self._require_device("enters a stream")
        before = self.current_stream()
        self._here.stream = stream
        try:
            yield
        finally:
            self._here.stream = before

    def cudart(self) -> "SimulatedCuda":
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self._require_device("pins memory")
        if flags & _HOST_REGISTER_READ_ONLY and not self.pins_read_only:
            return _NOT_SUPPORTED
        with self.timeline.lock:
            if address in self._pinned:
                return _ALREADY_REGISTERED
            self._pinned[address] = nbytes
            return _REGISTERED

    def cudaGetErrorString(self, status: int) -> str:
        return f"error {status} of a simulated device"

    def cudaHostUnregister(self, address: int) -> int:
        self._require_device("unpins memory")
        with self.timeline.lock:
            return _REGISTERED if self._pinned.pop(address, None) is not None else _NOT_REGISTERED

    # For those who put work on streams

    @property
    def has_device(self) -> bool:
        """Whether the calling thread has chosen its rank's GPU."""
        return getattr(self._here, "has_device", False)

    @property
    def has_context(self) -> bool:
        """Whether the driver's library knows the GPU as well: it hears of it from `set_device` alone."""
        return getattr(self._here, "has_context", False)

    @property
    def runs_work(self) -> bool:
        """Whether the calling thread is doing queued work, in which tensors are read and written at once."""
        return getattr(self._here, "runs_work", False)

    def launch(self, does: Callable[[], None], *, nbytes: int = 0, seconds: float | None = None) -> None:
        """Queues a kernel on the device's own memory, on the calling thread's stream."""
        self._enqueue(does, Engine.SMS, nbytes, seconds)

    def launch_copy(self, does: Callable[[], None], source: int, target: int, nbytes: int) -> None:
        """Queues a copy between these addresses. Pinned memory is the host's, all other memory the device's.

        A copy that finds memory no longer pinned when its turn comes is noted as a problem.
        """
        ranges = [found for address in (source, target) if (found := self._range_of(address)) is not None]
        engine = Engine.SMS
        if ranges:
            engine = Engine.TO_DEVICE if self._range_of(target) is None else Engine.TO_HOST

        def checked() -> None:
            if any(self._pinned.get(address) != size for address, size in ranges):
                self.problems.append("memory was unpinned under a copy")
            does()

        self._enqueue(checked, engine, nbytes, None)

    def _enqueue(self, does: Callable[[], None], engine: Engine, nbytes: int, seconds: float | None) -> None:
        self._require_device("launches")
        if self._launch_s is not None and self.timeline.is_actor:
            self.timeline.sleep(self._launch_s())

        def run() -> None:
            self._here.runs_work = True
            try:
                does()
            finally:
                self._here.runs_work = False

        self._device.launch(
            self.current_stream(), run if self.moves_bytes else _nothing, engine=engine, nbytes=nbytes, seconds=seconds
        )

    def _range_of(self, address: int) -> tuple[int, int] | None:
        with self.timeline.lock:
            return next((r for r in self._pinned.items() if r[0] <= address < r[0] + r[1]), None)

    def _require_device(self, what: str) -> None:
        if not self.has_device:
            name = threading.current_thread().name
            with self.timeline.lock:
                self.problems.append(f"thread {name} {what} outside of device(...): a context on GPU 0")


def _nothing() -> None:
    pass
