"""Files of a disk tier that stand still for as long as a test wants."""

import threading
from collections.abc import Sequence
from typing import Any

from kvtier.tiers.disk.medium.files import FileLayer, OsFiles

_WAIT_S = 20.0
"""Never reached when the code works."""


class GatedFiles:
    """Real files whose reads and writes wait for a gate. Counts what passes since `begin`."""

    def __init__(self, inner: FileLayer | None = None) -> None:
        self._inner = inner or OsFiles(direct=False)
        self.may_write = threading.Event()
        self.may_read = threading.Event()
        self.writing = threading.Semaphore(0)
        """Released whenever a write has come to its gate."""
        self.reading = threading.Semaphore(0)
        self.read_bytes = 0
        """Guarded by _lock."""
        self._lock = threading.Lock()
        self.may_write.set()
        self.may_read.set()

    def begin(self) -> None:
        """What a start has read does not count."""
        self.reading, self.writing, self.read_bytes = threading.Semaphore(0), threading.Semaphore(0), 0

    def __getattr__(self, name: str) -> Any:
        """All other operations are those of the files inside."""
        return getattr(self._inner, name)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        self.writing.release()
        assert self.may_write.wait(_WAIT_S)
        self._inner.write(fd, buffers, offset)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            self.read_bytes += sum(map(len, buffers))
        self.reading.release()
        assert self.may_read.wait(_WAIT_S)
        return self._inner.read(fd, buffers, offset)
