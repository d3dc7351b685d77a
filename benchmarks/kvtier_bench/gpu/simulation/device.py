"""What the streams of a simulated device hold, and in which order and time it is done.

Only two things are kept: the order within a stream, and that of events. Everything else is as late or as early as the
pace has it, which is how races come out.
"""

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from kvtier_bench.gpu.simulation.timeline import SimulationError, Timeline


class Engine(Enum):
    """The parts of a device that do work."""

    SMS = auto()
    """They do the work of several streams at a time."""
    TO_HOST = auto()
    """The copy engine to host memory does one copy at a time, and so does that of the other direction."""
    TO_DEVICE = auto()


@dataclass(slots=True, eq=False)
class Work:
    """A kernel or a copy. Guarded by the timeline's lock."""

    does: Callable[[], None]
    engine: Engine
    nbytes: int
    seconds: float | None
    """How long the work takes; the pace decides where it is None."""
    is_wanted: bool = False
    """Whether a thread waits for it, or for something behind it."""
    has_begun: bool = False


@dataclass(slots=True, eq=False)
class Marker:
    """The place in a stream at which an event was recorded. Guarded by the timeline's lock."""

    stream: "Stream"
    is_done: bool = False
    at_s: float = 0.0
    is_wanted: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    """Everything behind it in its stream waits for the marker."""

    marker: Marker
    is_wanted: bool = field(default=False, init=False)


@dataclass(slots=True, eq=False)
class Stream:
    """A stream of a simulated device. `SimulatedCuda` hands it out."""

    device: "Device"
    name: str
    held: "deque[Work | Marker | _Wait]" = field(default_factory=deque)
    """Everything that is queued, in order. Guarded by the timeline's lock."""
    ready: int | None = None
    """The turn of the work that is first now, among all first works of streams; None while there is none to begin.
    Guarded by the timeline's lock."""

    @property
    def cuda_stream(self) -> int:
        """The handle, as `torch.cuda.Stream` has it."""
        return id(self)

    def wait_event(self, event: "Event") -> None:
        if event.marker is not None:
            self.device.enqueue(self, _Wait(event.marker))

    def wait_stream(self, stream: "Stream") -> None:
        event = Event(self.device)
        event.record(stream)
        self.wait_event(event)

    def record_event(self) -> "Event":
        event = Event(self.device)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()


class Event:
    """An event that works as `torch.cuda.Event` does: a wait is for the recording that came last before it."""

    def __init__(self, device: "Device") -> None:
        self._device = device
        self.marker: Marker | None = None

    def record(self, stream: Stream) -> None:
        self.marker = Marker(stream)
        self._device.enqueue(stream, self.marker)

    def synchronize(self) -> None:
        if self.marker is not None:
            self._device.wait_for(self.marker)

    def elapsed_time(self, end: "Event") -> float:
        """The milliseconds between the two."""
        if self.marker is None or end.marker is None or not (self.marker.is_done and end.marker.is_done):
            raise SimulationError("elapsed_time of events that are not done")
        return (end.marker.at_s - self.marker.at_s) * 1e3


class Pace(Protocol):
    """The speed of a device."""

    waits_to_be_wanted: bool
    """Whether work begins only when a thread waits for it, or for something behind it."""

    def seconds(self, stream: Stream, work: Work) -> tuple[float, bool]:
        """How long the work takes, and whether its bytes are moved at its beginning instead of its end.

        It is called under the timeline's lock."""


class Device:
    """Runs what is enqueued as time goes on. Any thread."""

    def __init__(self, timeline: Timeline, pace: Pace) -> None:
        self.timeline, self.pace = timeline, pace
        self.streams: list[Stream] = []
        """The streams of the device. Changed under the timeline's lock."""
        self._busy: set[Engine] = set()
        """The copy engines that have work. Guarded by the timeline's lock."""
        self._turns = itertools.count()

    def new_stream(self, name: str) -> Stream:
        with self.timeline.lock:
            self.streams.append(Stream(self, name))
            return self.streams[-1]

    def launch(
        self,
        stream: Stream,
        does: Callable[[], None],
        *,
        engine: Engine = Engine.SMS,
        nbytes: int = 0,
        seconds: float | None = None,
    ) -> None:
        """Returns at once."""
        self.enqueue(stream, Work(does, engine, nbytes, seconds))

    def enqueue(self, stream: Stream, item: Work | Marker | _Wait) -> None:
        with self.timeline.lock:
            stream.held.append(item)
            self._begin_what_can()

    def wait_for(self, marker: Marker) -> None:
        """Blocks until everything before the marker is done."""
        with self.timeline.lock:
            self._want(marker)
            self._begin_what_can()
            self.timeline.wait_for(lambda: marker.is_done, f"an event on {marker.stream.name}")

    def synchronize(self) -> None:
        """Blocks until everything is done."""
        for stream in list(self.streams):
            stream.synchronize()

    def _want(self, marker: Marker) -> None:
        """Notes that the marker is waited for, and all that must be done before. The caller holds the lock."""
        if marker.is_done or marker.is_wanted:
            return
        marker.is_wanted = True
        for item in marker.stream.held:
            if isinstance(item, _Wait):
                self._want(item.marker)
            elif isinstance(item, Work):
                item.is_wanted = True
            elif item is marker:
                return

    def _begin_what_can(self) -> None:
        """Begins all work that nothing holds up. The caller holds the lock."""
        while True in [self._pass_markers(stream) for stream in self.streams]:
            pass
        ready = sorted((stream for stream in self.streams if stream.ready is not None), key=lambda s: s.ready or 0)
        for stream in ready:
            work = stream.held[0]
            assert isinstance(work, Work)
            if work.engine in self._busy or (self.pace.waits_to_be_wanted and not work.is_wanted):
                continue
            self._begin(stream, work)

    def _pass_markers(self, stream: Stream) -> bool:
        """Passes markers that are first in the stream. Gives whether there were any. The caller holds the lock."""
        changed = False
        while stream.held:
            first = stream.held[0]
            if isinstance(first, Work):
                if stream.ready is None and not first.has_begun:
                    stream.ready = next(self._turns)
                return changed
            if isinstance(first, Marker):
                first.is_done, first.at_s = True, self.timeline.now
            elif not first.marker.is_done:
                return changed
            stream.held.popleft()
            changed = True
        return changed

    def _begin(self, stream: Stream, work: Work) -> None:
        """The caller holds the lock."""
        seconds, moves_first = self.pace.seconds(stream, work)
        if work.seconds is not None:
            seconds = work.seconds
        work.has_begun, stream.ready = True, None
        if work.engine is not Engine.SMS:
            self._busy.add(work.engine)
        if moves_first:
            work.does()

        def end() -> None:
            if not moves_first:
                work.does()
            stream.held.popleft()
            self._busy.discard(work.engine)
            self._begin_what_can()

        self.timeline.at(seconds, end)
