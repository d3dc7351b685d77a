"""One tier process from its parent's side: start, calls, and an end that is certain."""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvtier.clock import MONOTONIC
from kvtier.errors import KvtierError, UnavailableError
from kvtier.memory.slab_layout import SharedSlab
from kvtier.net.stream import PlainStream
from kvtier.protocol.block import Fields, trace_field
from kvtier.protocol.block_socket import FrameSocket
from kvtier.system.logs import Format, current_request_id, effective_level
from kvtier.tiers.sidecar.event_relay import EventReceiver
from kvtier.tiers.sidecar.messages import Verb, channel, error_for

_END_S = 5.0
"""Seconds from the end of the control socket to the end of the process, when nothing is wrong."""
_SIGN_OF_LIFE_S = 2.0
"""Seconds for the cheapest request there is, before one that may take its time."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """What engine and tier process both map."""

    descriptor: int
    """A memfd; open for as long as processes may be started."""
    memory: memoryview
    """All of it, writable."""


class ChildProcess:
    """Any thread. A call that gets no good answer kills the process: it may not be trusted with memory any more.

    Each thread that is in a call has a channel of its own, so that an answer wakes up only whom it is for.
    """

    def __init__(self, news: EventReceiver, hidden_environ: Collection[str] = ()) -> None:
        """Starts the process, which serves when `open` was answered.

        The thread that calls this must live as long as the process: the process dies with it.

        :param hidden_environ: names of variables that it does not inherit.
        """
        self._news = news
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = _spawn(theirs, hidden_environ)
            self._pid_descriptor = _pidfd(self._process)
            """Signals that go by it meet no other process with the same id. Guarded by _lock; closed with `_ended`."""
        except OSError:
            ours.close()
            raise
        self._control = channel(ours)
        """Guarded by _lock: frames that carry descriptors, and the end."""
        self._lock = threading.Lock()
        self._idle: list[FrameSocket] = []
        """Channels for the next call, the one used last at the end. Guarded by _lock."""
        self._ended = threading.Event()
        """Set when no thread of the process runs any more."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def open(
        self, shared: SharedMemory, factory: str, settings: str, timeout_s: float, log_format: Format = "text"
    ) -> None:
        """Hands over the memory, has the tiers made, and hears what they hold. `KvtierError`: it cannot be.

        :param log_format: of what the process logs, from the level on that this process has.
        """
        deadline = MONOTONIC() + timeout_s
        memory = {"memory_bytes": len(shared.memory)}
        try:
            self._control.send_frame(memory, deadline=deadline, descriptors=[shared.descriptor])
        except OSError as error:
            raise UnavailableError(f"tier process {self.pid} did not start: {error}") from error
        logs = {"log_level": effective_level(), "log_format": log_format}
        request = {"factory": factory, "settings": settings.encode(), **logs}
        self.call(Verb.OPEN, request, deadline)
        while self.call(Verb.NEWS, {}, deadline).number("news_number"):
            pass

    def call(self, verb: Verb, fields: Mapping[str, object], deadline: float, *, uses_memory: bool = False) -> Fields:
        """The answer to a request. Raises what the tier raised, or `UnavailableError` when no answer came in time.

        :param uses_memory: raises `UnavailableError` only when the process has ended, so that nobody reads or writes
            the blocks of this request any more. The kernel may take its time over a process that hangs in a disk.
        """
        try:
            frames = self._take_channel(deadline)
            try:
                frames.send_frame(
                    {"verb": verb, **fields, **trace_field(), "request_id": current_request_id()}, deadline=deadline
                )
                answer, _ = frames.receive_head(deadline=deadline)
                number, error = answer.number("news_number"), answer.text("error")
                if number:
                    self._news.take(number, answer.data("news"))
            except BaseException:
                frames.close()
                raise
        except (OSError, KvtierError) as failure:
            self.kill()
            if uses_memory:
                self._ended.wait()
            raise UnavailableError(f"tier process {self.pid}: {verb}: {failure}") from failure
        self._give_back(frames)
        if error:
            raise error_for(error, answer.text("message"))
        return answer

    def fetch_slab(self, serial: int, deadline: float) -> SharedSlab | None:
        """A slab that blocks are lent from, its descriptor the caller's to close. None: it is gone, or cannot be
        had now.

        Raises as `call`. Seldom: over a channel of its own, since the others take no descriptors.
        """
        ours, theirs = socket.socketpair()
        stream = PlainStream(ours, takes_descriptors=True)
        frames = FrameSocket(stream)
        try:
            with theirs:
                self._hand_over(theirs, deadline)
            frames.send_frame({"verb": Verb.SHARE, "serial": serial}, deadline=deadline)
            answer, _ = frames.receive_head(deadline=deadline)
            if not (num_slots := answer.number("num_slots")):
                return None
            slot_bytes, descriptor = answer.number("slot_bytes"), stream.take_descriptor()
            if descriptor is None:  # it has come, but this process may not have so many: no fault of the other's
                return None
            return SharedSlab(descriptor, writable=False, slot_bytes=slot_bytes, num_slots=num_slots)
        except (OSError, KvtierError) as failure:
            self.kill()
            raise UnavailableError(f"tier process {self.pid}: {Verb.SHARE}: {failure}") from failure
        finally:
            frames.close()

    def kill(self) -> None:
        """SIGKILL. Returns at once."""
        with self._lock:
            if self._ended.is_set():
                return
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                signal.pidfd_send_signal(self._pid_descriptor, signal.SIGKILL)

    def wait(self) -> int:
        """Blocks until no thread of the process runs any more; returns its exit status. One thread, once.

        `end_news` comes after it.
        """
        status = self._process.wait()
        with self._lock:
            self._ended.set()
            idle, self._idle = self._idle, []
            for frames in (*idle, self._control):
                frames.close()
            os.close(self._pid_descriptor)
        return status

    def end_news(self) -> None:
        """Takes back what the tiers told of their content."""
        self._news.end()

    def close(self, timeout_s: float) -> None:
        """Closes the tiers, which waits for what they are doing, and ends the process. `wait` then returns."""
        try:
            # One that hangs does not get the time that one gets which is busy.
            self.call(Verb.NEWS, {}, MONOTONIC() + min(timeout_s, _SIGN_OF_LIFE_S))
            self.call(Verb.CLOSE, {}, MONOTONIC() + timeout_s)
        except KvtierError as error:
            # As text: whoever keeps log records would keep all that the error has passed, and the memory with it.
            _log.warning("%s; what was not written yet is forgotten", str(error))
        with self._lock:
            if not self._ended.is_set():
                self._control.shut_down()
        if not self._ended.wait(_END_S):
            self.kill()

    def _take_channel(self, deadline: float) -> FrameSocket:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        ours, theirs = socket.socketpair()
        frames = channel(ours)
        with theirs:
            try:
                self._hand_over(theirs, deadline)
            except BaseException:
                frames.close()
                raise
        return frames

    def _hand_over(self, theirs: socket.socket, deadline: float) -> None:
        """Gives the process the other end of a channel."""
        with self._lock:
            if self._ended.is_set():
                raise UnavailableError("it has ended")
            # A few bytes, for which there is always room: the lock is not held for long.
            self._control.send_frame({}, deadline=deadline, descriptors=[theirs.fileno()])

    def _give_back(self, frames: FrameSocket) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._idle.append(frames)
                return
        frames.close()


def _spawn(control: socket.socket, hidden_environ: Collection[str]) -> "subprocess.Popen[bytes]":
    environ = {name: value for name, value in os.environ.items() if name not in hidden_environ}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "kvtier.tiers.sidecar.process", str(control.fileno()), str(os.getpid())],
        pass_fds=[control.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # The modules that we have, wherever they came from.
        env={**environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )


def _pidfd(process: "subprocess.Popen[bytes]") -> int:
    """Raises `OSError` where the kernel has none (before 5.3); the process has ended then."""
    try:
        return os.pidfd_open(process.pid)
    except OSError:
        process.kill()
        process.wait()
        raise
