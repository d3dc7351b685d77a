"""What tests of the disk tier's log write and look for: small blocks, and pages that cannot be read."""

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from disk_rig import opened
from kvtier.identity.keys import tenant_id
from kvtier.metrics import Metrics
from kvtier.testing.blocks import make_key, make_payload, read_blocks, summed
from kvtier.tiers.base import Item
from kvtier.tiers.disk.log.format import PAGE
from kvtier.tiers.disk.medium.files import OsFiles

KIB, MIB = 2**10, 2**20
NBYTES = 5_000
BLUE = tenant_id("blue")


def block(label: object) -> Item[bytes]:
    return summed(make_key(label), make_payload(label, NBYTES))


def there(folder: Path, labels: Sequence[object], metrics: Metrics | None = None) -> list[bool]:
    """What a start finds, by what can be read; and never anything wrong."""
    with opened(folder, metrics=metrics) as tier:
        found = read_blocks(tier, [make_key(i) for i in labels], NBYTES)
    assert all(payload in (None, block(i)[1]) for i, payload in zip(labels, found, strict=True))
    return [payload is not None for payload in found]


def counted(metrics: Metrics, name: str) -> float:
    return metrics.registry.get_sample_value(name, {"tier": "disk"}) or 0.0


class BadPages(OsFiles):
    """Reads of some pages of one file fail, so many times."""

    def __init__(self, path: Path, is_bad: Callable[[int], bool], times: int = 10**6, code: int = errno.EIO) -> None:
        super().__init__(direct=False)
        self._inode, self._is_bad, self._left, self._code = path.stat().st_ino, is_bad, times, code

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        pages = range(offset, offset + sum(map(len, buffers)), PAGE)
        if self._left and os.fstat(fd).st_ino == self._inode and any(map(self._is_bad, pages)):
            self._left -= 1
            raise OSError(self._code, os.strerror(self._code))
        return super().read(fd, buffers, offset)
