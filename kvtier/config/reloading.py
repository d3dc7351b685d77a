"""Reads the configuration again while a service runs: on SIGHUP, on request, and when its files have changed."""

import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from kvtier.clock import MONOTONIC
from kvtier.config.config import Config
from kvtier.errors import KvtierError

_LOOK_S = 1.0
"""Seconds between two looks whether files have changed."""
_HANGS_S = 10.0
"""Seconds that a look or a reading takes where a file system does not answer: a pipe is given up sooner."""
_log = logging.getLogger(__name__)


class Reloaded(Protocol):
    """A service that can take another configuration while it runs."""

    name: str
    """The name of the service, for the log."""
    what: str
    """What of the configuration it takes, for the log: a plural."""

    def files(self, config: Config) -> Iterable[Path]:
        """The files that a change of is to be noticed."""

    def take(self, config: Config) -> None:
        """Takes what it may of this configuration. Raises `KvtierError`, and changes nothing, where it cannot."""

    def note(self, event: str, **fields: str) -> None:
        """Hears of `reload` and of `reload_refused`, each with `why`, and the latter with `problem`."""


class Reloader:
    """Gives a service the configuration as it is now. What is wrong with it changes nothing. Any thread, but for
    `look`."""

    def __init__(self, service: Reloaded, config: Config, read_again: Callable[[], Config]) -> None:
        """
        :param config: what the service has now.
        :param read_again: the configuration as it is now.
        """
        self._service = service
        self._read_again = read_again
        self._lock = threading.Lock()
        """One at a time reads and gives."""
        self._taken = self._seen = {file: _stamp(file) for file in service.files(config)}
        """The files as they were before they were read last, guarded by _lock, and at the last look. Replaced as a
        whole."""

    def reload(self, why: str) -> str | None:
        """Reads it and gives it to the service; what is wrong with it, which is in the log, too. None: nothing is.

        :param why: for the log.
        """
        service = self._service
        with self._lock:
            before = {file: _stamp(file) for file in self._taken}
            try:
                config = self._read_again()
                # Files that it names and that are no good yet are looked at, too.
                before |= {file: _stamp(file) for file in service.files(config) if file not in before}
                service.take(config)
            except KvtierError as error:
                self._taken = before
                _log.error("%s: %s stay as they are: %s", why, service.what, error)
                service.note("reload_refused", why=why, problem=str(error))
                return str(error)
            except Exception as error:
                self._taken = before
                _log.exception("%s: %s stay as they are", why, service.what)
                service.note("reload_refused", why=why, problem=type(error).__name__)
                return f"{type(error).__name__}, see the {service.name}'s log"
            self._taken = {file: before[file] for file in service.files(config)}
        service.note("reload", why=why)
        _log.info("%s: the %s has the %s of the configuration now", why, service.name, service.what)
        return None

    def look(self) -> None:
        """Reads the configuration if a file of it has changed and then been left alone since the last look: who writes
        one step by step is not disturbed. Raises nothing. One thread."""
        taken = self._taken
        found = {file: _stamp(file) for file in taken}
        if found == self._seen and found != taken:
            self.reload("the configuration has changed")
        self._seen = found


class ReloadThread:
    """Looks with a `Reloader` again and again, and reloads when asked, on a thread of its own: a file may be a pipe
    that nobody writes into, or lie on a file system that hangs, and the service waits for neither. Any thread."""

    def __init__(self, reloader: Reloader) -> None:
        self._reloader = reloader
        self._asked, self._hung_up, self._ending = threading.Event(), threading.Event(), threading.Event()
        self._looking_since_s: float | None = None
        """When the thread has begun to look or to read. Written whole, by the thread alone."""
        self._is_told = False
        """Whether somebody has been told that this takes too long. `tell_of_hang` only."""
        self._thread = threading.Thread(target=self._run, name="kvtier-reload", daemon=True)

    def start(self) -> None:
        """Begins to look. Once."""
        self._thread.start()

    def hang_up(self) -> None:
        """Has the configuration read at once: SIGHUP has come. No signal handler: it takes a lock."""
        self._hung_up.set()
        self._asked.set()

    def stop(self) -> None:
        """Has no more of it read. Does not wait for what is being read."""
        self._ending.set()
        self._asked.set()

    def tell_of_hang(self) -> None:
        """Logs once that the files do not answer, and once that they do again. One thread calls it every second."""
        since_s = self._looking_since_s
        if since_s is None or MONOTONIC() - since_s < _HANGS_S:
            if self._is_told:
                self._is_told = False
                _log.info("the files of the configuration answer again")
        elif not self._is_told:
            self._is_told = True
            _log.warning(
                "the files of the configuration have not answered for %g s: a changed configuration, and revoked keys "
                "in it, are taken when they do; see the file system that they are on",
                _HANGS_S,
            )

    def _run(self) -> None:
        while not self._ending.is_set():
            self._looking_since_s = MONOTONIC()
            if self._hung_up.is_set():
                self._hung_up.clear()  # before the configuration is read: a later change comes with another signal
                self._reloader.reload("SIGHUP")
            self._reloader.look()
            self._looking_since_s = None
            if self._asked.wait(_LOOK_S):
                self._asked.clear()


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """What tells whether a file has changed; None of one that cannot be looked at."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
