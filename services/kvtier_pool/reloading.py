"""Reads the configuration again while a pool runs: on SIGHUP, on request, and when its files have changed."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from kvtier.config import Config
from kvtier.errors import KvtierError
from kvtier_pool.service import PoolService

_log = logging.getLogger(__name__)


class Reloader:
    """Gives a pool the tenants of its configuration as it is now. What is wrong with it changes nothing. Any thread,
    but for `look`."""

    def __init__(self, service: PoolService, config: Config, read_again: Callable[[], Config]) -> None:
        """
        :param config: what the pool has now.
        :param read_again: the configuration as it is now.
        """
        self._service = service
        self._read_again = read_again
        self._lock = threading.Lock()
        """One at a time reads and gives."""
        self._taken = self._seen = {file: _stamp(file) for file in config.pool_files()}
        """The files as they were before they were read last, guarded by _lock, and at the last look. Replaced as a
        whole."""

    def reload(self, why: str) -> str | None:
        """Reads it and gives it to the pool; what is wrong with it, which is in the log, too. None: nothing is.

        :param why: for the log.
        """
        with self._lock:
            before = {file: _stamp(file) for file in self._taken}
            try:
                config = self._read_again()
                # Those that it names and that are no good yet are looked at, too.
                before |= {file: _stamp(file) for file in config.pool_files() if file not in before}
                self._service.set_tenants(config)
            except KvtierError as error:
                self._taken = before
                _log.error("%s: tenants, tokens and shares stay as they are: %s", why, error)
                self._service.audit.note("reload_refused", why=why, problem=str(error))
                return str(error)
            except Exception as error:
                self._taken = before
                _log.exception("%s: tenants, tokens and shares stay as they are", why)
                self._service.audit.note("reload_refused", why=why, problem=type(error).__name__)
                return f"{type(error).__name__}, see the pool's log"
            self._taken = {file: before[file] for file in config.pool_files()}
        self._service.audit.note("reload", why=why)
        _log.info("%s: the pool has the tenants, tokens and shares of the configuration now", why)
        return None

    def look(self) -> None:
        """Reads the configuration if a file of it has changed and then been left alone since the last look: who writes
        one step by step is not disturbed. Ends connections whose tokens have expired. Raises nothing. One thread."""
        taken = self._taken
        found = {file: _stamp(file) for file in taken}
        if found == self._seen and found != taken:
            self.reload("the configuration has changed")
        self._seen = found
        if num_ended := self._service.end_stale():
            _log.info("%d connections ended: their tokens have expired", num_ended)


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """What tells whether a file has changed; None of one that cannot be looked at."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
