"""File operations, each of them watched: one that takes too long is a medium that hangs."""

from collections.abc import Sequence

from kvtier.tiers.disk.medium.files import FileLayer
from kvtier.tiers.disk.medium.watch import HangWatch


class WatchedFiles:
    """A `FileLayer` like the one inside. Any thread."""

    def __init__(self, inner: FileLayer, watch: HangWatch) -> None:
        self._inner = inner
        self._watch = watch

    @property
    def direct(self) -> bool:
        return self._inner.direct

    def create(self, path: str, nbytes: int) -> int:
        with self._watch.operation("create"):
            return self._inner.create(path, nbytes)

    def open(self, path: str, *, writable: bool = True) -> int:
        with self._watch.operation("open"):
            return self._inner.open(path, writable=writable)

    def size(self, path: str) -> int:
        with self._watch.operation("size"):
            return self._inner.size(path)

    def is_named(self, fd: int, path: str) -> bool:
        with self._watch.operation("is_named"):
            return self._inner.is_named(fd, path)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        with self._watch.operation("write"):
            self._inner.write(fd, buffers, offset)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._watch.operation("read"):
            return self._inner.read(fd, buffers, offset)

    def truncate(self, fd: int, nbytes: int) -> None:
        with self._watch.operation("truncate"):
            self._inner.truncate(fd, nbytes)

    def sync(self, fd: int) -> None:
        with self._watch.operation("sync"):
            self._inner.sync(fd)

    def sync_folder(self, directory: str) -> None:
        with self._watch.operation("sync_folder"):
            self._inner.sync_folder(directory)

    def close(self, fd: int) -> None:
        with self._watch.operation("close"):
            self._inner.close(fd)

    def remove(self, path: str) -> None:
        with self._watch.operation("remove"):
            self._inner.remove(path)

    def free_bytes(self, directory: str) -> int:
        with self._watch.operation("free_bytes"):
            return self._inner.free_bytes(directory)
