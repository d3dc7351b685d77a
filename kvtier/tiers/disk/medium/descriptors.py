"""Open files of segments: as few as the process can spare, closed when nobody uses them."""

import contextlib
import threading
from collections.abc import Iterator

from kvtier.tiers.disk.medium.files import FileLayer


class _Open:
    """A descriptor. Fields are guarded by the owner's _lock."""

    __slots__ = ("doomed", "fd", "users")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 0
        self.doomed = False
        """Closed by its last user."""


class Descriptors:
    """Descriptors by segment number, the ones used longest ago closed first. Any thread.

    A descriptor that somebody uses is not closed under him: the next file could get its number.
    """

    def __init__(self, files: FileLayer, most: int = 128) -> None:
        """:param most: kept open at a time, beside those in use."""
        self._files = files
        self._most = most
        self._lock = threading.Lock()
        self._open: dict[int, _Open] = {}
        """Open descriptors by number of their segment, the one used longest ago first. Guarded by _lock."""

    def add(self, number: int, fd: int) -> None:
        """Takes over the descriptor of a file that was just made."""
        with self._lock:
            self._open[number] = _Open(fd)
            closing = self._surplus()
        self._close(closing)

    @contextlib.contextmanager
    def use(self, number: int, path: str) -> Iterator[int]:
        """The descriptor, opened when it is not. `OSError` when it cannot be."""
        with self._lock:
            entry = self._take(number)
        if entry is None:
            fd = self._files.open(path)
            with self._lock:
                entry = self._take(number)
                unused = fd if entry is not None else None  # somebody was faster
                if entry is None:
                    self._open[number] = entry = _Open(fd)
                    entry.users = 1
                closing = self._surplus()
            self._close([*closing, *([unused] if unused is not None else [])])
        try:
            yield entry.fd
        finally:
            with self._lock:
                entry.users -= 1
                last = entry.doomed and not entry.users
            if last:
                self._close([entry.fd])

    def forget(self, number: int) -> None:
        """Closes it, at the latest when its last user is done."""
        with self._lock:
            entry = self._open.pop(number, None)
            closing = self._doom(entry) if entry is not None else []
        self._close(closing)

    def close(self) -> None:
        """Closes all. Nobody uses any."""
        with self._lock:
            entries = list(self._open.values())
            self._open.clear()
        self._close([entry.fd for entry in entries])

    def _take(self, number: int) -> _Open | None:
        """Counts a user of an open descriptor; None when it is not open. Caller holds _lock."""
        entry = self._open.pop(number, None)
        if entry is not None:
            self._open[number] = entry  # used last
            entry.users += 1
        return entry

    def _surplus(self) -> list[int]:
        """Takes out the descriptors that are too many; returns what to close. Caller holds _lock."""
        closing: list[int] = []
        while len(self._open) > self._most:
            closing += self._doom(self._open.pop(next(iter(self._open))))
        return closing

    @staticmethod
    def _doom(entry: _Open) -> list[int]:
        entry.doomed = True
        return [] if entry.users else [entry.fd]

    def _close(self, descriptors: list[int]) -> None:
        for fd in descriptors:
            with contextlib.suppress(OSError):  # nothing is lost with it: writes have been answered already
                self._files.close(fd)
