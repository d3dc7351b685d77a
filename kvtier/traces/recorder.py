"""Records what a cache is asked, beside its work: nobody waits for it, and what it cannot keep up with is dropped."""

import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kvtier.clock import MONOTONIC, Clock
from kvtier.errors import ConfigError
from kvtier.traces.records import FRAME_MAGIC, Disguise, Kind, dropped, frame, header

_log = logging.getLogger(__name__)
_FLUSH_S = 0.5
"""Seconds between two writes to the file: a kill loses at most so much of a trace."""
_KEYS_PER_FRAME = 65_536


class _Call(NamedTuple):
    kind: Kind
    time_s: float
    tenant: bytes
    nbytes: int
    keys: Sequence[bytes]


class _LargeEnoughError(OSError):
    """The file is as large as it may be."""


class TraceRecorder:
    """Writes a trace that `kvtier simulate` reads; see `kvtier.traces.records` for what is in it, and what is not.

    `record` is for any thread and never waits for the disk: calls are queued, and a thread of the recorder's own writes
    them down twice a second, 1 us a key. When the queue is full, calls are dropped and counted, in the trace too. When
    the file is full or the disk fails, the rest is dropped: recording harms nothing but the recording.
    """

    def __init__(
        self,
        path: Path,
        described: Mapping[str, str | int],
        *,
        max_bytes: int,
        max_queued_keys: int = 1 << 18,
        clock: Clock = MONOTONIC,
    ) -> None:
        """
        :param path: a trace that is there already is kept as `path` with `.old` behind it; anything else is refused.
        :param described: `source`, `policy`, and `capacity_blocks` or `capacity_bytes` of the cache.
        :param max_bytes: the size of the file; 1 GiB has about 130 million references.
        :param max_queued_keys: of which each takes as much memory as the key, some 100 bytes.
        """
        self._path = path
        self._described = dict(described)
        self._max_bytes = max_bytes
        self._max_queued_keys = max_queued_keys
        self._clock = clock
        self._disguise = Disguise()
        self._start_s = 0.0
        """Set by `start`, before any other thread knows the recorder."""
        self._lock = threading.Lock()
        """Held to queue and to take from the queue, for nothing else."""
        self._queue: deque[_Call] = deque()
        """Guarded by `_lock`, as are the next four."""
        self._num_queued_keys = 0
        """Keys in the queue, or taken from it and not yet written."""
        self._num_dropped = 0
        self._num_dropped_noted = 0
        """Dropped keys that the trace already says were dropped."""
        self._is_open = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-trace", daemon=True)
        self._num_bytes = 0
        """Size of the file. Written by the recorder's thread only, as the next three; read by any."""
        self._num_recorded = 0
        self._has_failed = False
        """Written before `_problem`."""
        self._problem: str | None = None

    @property
    def num_dropped(self) -> int:
        """Keys that were not recorded. Any thread."""
        return self._num_dropped

    @property
    def num_recorded(self) -> int:
        """Keys that are in the file. Any thread."""
        return self._num_recorded

    @property
    def num_bytes(self) -> int:
        """Size of the file. Any thread."""
        return self._num_bytes

    @property
    def problem(self) -> str | None:
        """Why nothing is written any more, before `close`; None while it is. Any thread."""
        return self._problem

    @property
    def has_failed(self) -> bool:
        """Whether the problem is one of the file, not that this is as large as it may be. Any thread."""
        return self._has_failed

    def start(self) -> None:
        """Opens the file and starts the thread; once. Raises `ConfigError` when the file cannot be written."""
        try:
            self._make_way()
            # Whatever somebody else puts there by now is neither waited for nor followed.
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_NOFOLLOW
            descriptor = os.open(self._path, flags, 0o600)
            self._file = open(descriptor, "wb", buffering=0)  # noqa: SIM115 - closed by the thread
        except OSError as error:
            raise ConfigError(
                f"trace {self._path}: cannot be written: {error.strerror}; "
                "name a file in a folder that is yours to write"
            ) from error
        self._start_s = self._clock()
        self._is_open = True
        self._thread.start()

    def record(self, kind: Kind, tenant: bytes, keys: Sequence[bytes], nbytes: int = 0) -> None:
        """Notes that something was done with these blocks of a tenant, in the order of their request.

        Any thread; 2 us, and 40 ns a key. Before `start` and after `close` it drops.

        :param nbytes: payload of each; 0 where it is unknown.
        """
        if not keys:
            return
        call = _Call(kind, self._clock() - self._start_s, tenant, nbytes, list(keys))
        with self._lock:
            if not self._is_open or self._num_queued_keys + len(keys) > self._max_queued_keys:
                self._num_dropped += len(keys)
            else:
                self._queue.append(call)
                self._num_queued_keys += len(keys)

    def close(self, timeout_s: float | None = None) -> None:
        """Writes down what is queued and closes the file. Idempotent.

        :param timeout_s: how long to wait for the disk; None: as long as that takes.
        """
        with self._lock:
            self._is_open = False
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _make_way(self) -> None:
        """Renames an earlier trace. `FileExistsError`: something else is there, which may be dear to somebody."""
        if self._path.is_fifo():  # whose opening would wait for a reader
            raise FileExistsError(errno.EEXIST, "a pipe is there")
        if self._path.is_file():
            with self._path.open("rb") as there:
                if not FRAME_MAGIC.startswith(there.read(len(FRAME_MAGIC))):
                    raise FileExistsError(errno.EEXIST, "a file is there that is no trace")
            self._path.replace(self._path.with_name(self._path.name + ".old"))

    def _run(self) -> None:
        try:
            with self._file:
                self._write(header(self._described))
                while not self._stopping.wait(_FLUSH_S):
                    self._flush()
                self._flush()
        except OSError as error:
            self._has_failed = not isinstance(error, _LargeEnoughError)
            self._problem = error.strerror or str(error)
            _log.warning("trace %s: recording ends: %s", self._path, error)
        finally:
            self._give_up()
        if self._num_dropped:
            _log.warning("trace %s: %d keys were not recorded", self._path, self._num_dropped)

    def _flush(self) -> None:
        while calls := self._take():
            self._write(b"".join(self._disguise.record(*call) for call in calls))
            num_keys = sum(len(call.keys) for call in calls)
            self._num_recorded += num_keys
            with self._lock:
                self._num_queued_keys -= num_keys
        with self._lock:
            num_new = self._num_dropped - self._num_dropped_noted
            self._num_dropped_noted = self._num_dropped
        if num_new:
            self._write(dropped(num_new))

    def _take(self) -> list[_Call]:
        """Calls of about `_KEYS_PER_FRAME` keys."""
        calls: list[_Call] = []
        num_keys = 0
        with self._lock:
            while self._queue and num_keys < _KEYS_PER_FRAME:
                calls.append(self._queue.popleft())
                num_keys += len(calls[-1].keys)
        return calls

    def _write(self, records: bytes) -> None:
        """A frame in one piece. Raises `OSError` where the disk fails, or the file would be larger than it may be."""
        data = frame(records)
        if self._num_bytes + len(data) > self._max_bytes:
            raise _LargeEnoughError(f"the file may have {self._max_bytes:,} bytes")
        while data:
            num_written = self._file.write(data)
            self._num_bytes += num_written
            data = data[num_written:]

    def _give_up(self) -> None:
        """Nothing is queued from now on, and what is queued is dropped."""
        with self._lock:
            self._is_open = False
            self._num_dropped += self._num_queued_keys
            self._num_queued_keys = 0
            self._queue.clear()
