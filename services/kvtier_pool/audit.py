"""The audit log: who was let in or refused, and what operators did, as JSON lines. It holds nobody up."""

import contextlib
import json
import logging
import os
import queue
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO

from kvtier.clock import MONOTONIC, Clock
from kvtier.system.quiet_log import QuietLog
from kvtier_pool.metrics import PoolMetrics

_log = logging.getLogger(__name__)
_MOST_WAITING = 1024
"""Lines that wait to be written. More are lost, and counted."""
_WINDOW_S = 10.0
"""Seconds for which what repeats is counted before it gets another line."""
_MOST_WINDOWS = 256
"""Different things that are counted at a time, of each event: refusals leave logins theirs. What else repeats is
counted together."""
_NUM_OLD_FILES = 3
_TICK_S = 1.0
_MAX_TEXT = 300


@dataclass(slots=True)
class _Window:
    """One thing that may repeat. Guarded by the log's lock."""

    until_s: float
    count: int = 0
    fields: dict[str, object] = field(default_factory=dict)


class AuditLog:
    """Writes lines on a thread of its own. Any thread may note; that takes some microseconds, whatever the medium does.

    What repeats, such as refusals of one address for one reason, gets one line at once, and one every ten seconds that
    says how often it came. Lines that find the queue full are lost; the next line says how many, and a counter.
    Nobody passes secrets: a token is known by the first digits of its digest.
    """

    def __init__(
        self, file: Path | None, metrics: PoolMetrics, *, max_bytes: int = 16 << 20, clock: Clock = MONOTONIC
    ) -> None:
        """Opens nothing yet: see `start`.

        :param file: None: standard error.
        :param max_bytes: size of the file at which it is renamed to `.1`, the older ones to `.2` and `.3`.
        """
        self._file = file
        self._among = {"level": "info", "logger": __name__} if file is None else {}
        """What lines among those of the log have in common with them. Not changed."""
        self._max_bytes = max_bytes
        self._metrics = metrics
        self._clock = clock
        self._lines: queue.Queue[str | None] = queue.Queue(_MOST_WAITING)
        self._lock = threading.Lock()
        self._windows: defaultdict[str, dict[tuple[object, ...], _Window]] = defaultdict(dict)
        """What was noted lately and may repeat, by event and key. Guarded by _lock."""
        self._others: dict[str, int] = {}
        """How often each event came for which there was no window. Guarded by _lock."""
        self._num_lost = 0
        """Lines that found no room since the last one that did. Guarded by _lock."""
        self._thread = threading.Thread(target=self._run, name="kvtier-audit", daemon=True)

    def start(self) -> None:
        """Opens the file, and starts the thread. `OSError`: it cannot be written."""
        self._handler: logging.Handler = (
            _Stderr(self._metrics.audit_lost.inc)
            if self._file is None
            else _File(self._file, self._max_bytes, self._metrics.audit_lost.inc)
        )
        self._thread.start()

    def stop(self) -> None:
        """Writes what waits, for a second at the most. Idempotent; allowed without `start`."""
        if self._thread.ident is None or not self._thread.is_alive():
            return
        try:
            self._lines.put(None, timeout=1.0)
        except queue.Full:
            return
        self._thread.join(1.0)

    def note(self, event: str, **fields: object) -> None:
        """Has a line written for this event. Values are text, numbers, or lists of text. Never blocks."""
        try:
            self._lines.put_nowait(_line(event, fields, self._among))
        except queue.Full:
            self._metrics.audit_lost.inc()
            with self._lock:
                self._num_lost += 1

    def note_repeated(self, event: str, key: tuple[object, ...], **fields: object) -> None:
        """Notes an event that others can make happen as often as they like.

        :param key: what makes it the same as an earlier one.
        """
        with self._lock:
            windows = self._windows[event]
            window = windows.get(key)
            if window is not None:
                window.count += 1
                window.fields = fields
                return
            if len(windows) >= _MOST_WINDOWS:
                self._others[event] = self._others.get(event, 0) + 1
                return
            windows[key] = _Window(self._clock() + _WINDOW_S)
        self.note(event, **fields)

    def _run(self) -> None:
        is_over = False
        while not is_over:
            try:
                waiting = [self._lines.get(timeout=_TICK_S)]
            except queue.Empty:
                waiting = []
            # All that was noted comes before what has repeated since.
            waiting += [self._lines.get_nowait() for _ in range(self._lines.qsize())]
            is_over = None in waiting
            for line in waiting:
                self._write(line or "")
            self._sum_up(everything=is_over)
        while not self._lines.empty():
            self._write(self._lines.get_nowait() or "")
        self._handler.close()

    def _sum_up(self, *, everything: bool) -> None:
        """Writes what has repeated in windows that are over."""
        now_s = self._clock()
        due: list[tuple[str, dict[str, object]]] = []
        with self._lock:
            for event, windows in self._windows.items():
                for key in [key for key, window in windows.items() if everything or window.until_s <= now_s]:
                    window = windows.pop(key)
                    if window.count:
                        due.append((event, window.fields | {"repeated": window.count}))
                        windows[key] = _Window(now_s + _WINDOW_S)
                if event in self._others and len(windows) < _MOST_WINDOWS:
                    due.append((event, {"others": self._others.pop(event)}))
            if num_lost := self._num_lost:
                self._num_lost = 0
                due.append(("audit_lines_lost", {"count": num_lost}))
        for event, fields in due:
            self._write(_line(event, fields, self._among))

    def _write(self, line: str) -> None:
        if not line:
            return
        record = logging.LogRecord(__name__, logging.INFO, "", 0, "%s", (line,), None)
        try:
            self._handler.handle(record)
        except Exception:  # whatever happens to one line, the thread goes on to the next
            self._handler.handleError(record)


def _line(event: str, fields: Mapping[str, object], among: Mapping[str, str]) -> str:
    """:param among: what every line has beside its event and its fields."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    cut = {name: value[:_MAX_TEXT] if isinstance(value, str) else value for name, value in fields.items()}
    about = {"message": event, "event": event} if among else {"event": event}
    return json.dumps({"time": now} | dict(among) | about | {n: value for n, value in cut.items() if value is not None})


class _Stderr(logging.StreamHandler[IO[str]]):
    """Standard error. What fails is counted; a line of the log about it would go the same way."""

    def __init__(self, on_lost: Callable[[], None]) -> None:
        self._on_lost = on_lost
        super().__init__(sys.stderr)

    def handleError(self, record: logging.LogRecord) -> None:
        self._on_lost()


class _File(RotatingFileHandler):
    """A file that only its owner reads. What fails is counted, and a line of the log, twice a minute at most.

    Each line goes to the file that has the name then: what logrotate has moved, or somebody removed, gets no more.
    """

    def __init__(self, path: Path, max_bytes: int, on_lost: Callable[[], None]) -> None:
        self._quiet = QuietLog(_log)
        self._on_lost = on_lost
        super().__init__(path, maxBytes=max_bytes, backupCount=_NUM_OLD_FILES, encoding="utf-8")

    def _open(self) -> IO[str]:  # type: ignore[override]
        return open(self.baseFilename, "a", encoding="utf-8", opener=_private)

    def emit(self, record: logging.LogRecord) -> None:
        """`logging`'s; about 3 us more, on the log's own thread."""
        if self.stream is not None and self._has_moved(self.stream):
            self.close()  # the next one is opened by the handler, and what fails there is handled as all else
        super().emit(record)

    def close(self) -> None:
        """Lets go of the file, which holds this line up no more than the next: what the medium refused of earlier ones,
        and refuses again, was counted then."""
        with contextlib.suppress(OSError, ValueError):
            super().close()

    def _has_moved(self, stream: IO[str]) -> bool:
        if stream.closed:  # a rotation that failed has left it so
            return True
        try:
            named, written = os.stat(self.baseFilename), os.fstat(stream.fileno())
        except OSError:  # removed, or in a folder that is gone: a new one is made if that can be
            return True
        return (named.st_dev, named.st_ino) != (written.st_dev, written.st_ino)

    def handleError(self, record: logging.LogRecord) -> None:
        self._on_lost()
        self._quiet.warning(f"the audit log {self.baseFilename} cannot be written: {sys.exc_info()[1]}")


def require_writable(file: Path) -> None:
    """Makes the file where there is none, for its owner alone. `OSError`: it cannot be written, or is a pipe that
    nobody reads, which would hold up whoever opens it."""
    os.close(_private(str(file), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
