"""What tests of forgetting do to a disk tier: discard, purge, and stop it in the middle."""

import threading
from collections.abc import Callable, Sequence

from kvtier.identity.keys import StoreKey, TenantId
from kvtier.testing.blocks import TENANT, make_key, make_payload, summed
from kvtier.tiers.base import Item, Status
from kvtier.tiers.disk.medium.files import OsFiles
from kvtier.tiers.disk.tier import DiskTier

WAIT_S = 20
SMALL = 4096

Forget = Callable[[DiskTier, Sequence[StoreKey]], object]


def items(labels: Sequence[object], nbytes: int = SMALL) -> list[Item[bytes]]:
    return [summed(make_key(label), make_payload(label, nbytes)) for label in labels]


def found(tier: DiskTier, labels: Sequence[object]) -> int:
    return tier.lookup([make_key(label) for label in labels]).count(Status.HIT)


def discard(tier: DiskTier, keys: Sequence[StoreKey]) -> object:
    return tier.discard(keys)


def purge(tier: DiskTier, keys: Sequence[StoreKey]) -> object:
    return tier.purge(TenantId(keys[0][: len(TENANT)]))


class Held(OsFiles):
    """Stops in one operation, before or after it, until the test goes on."""

    def __init__(self, op: str, *, after: bool = False) -> None:
        super().__init__(direct=False)
        self._op, self._after = op, after
        self.armed = self.reached = False
        self._arrived, self.go_on = threading.Event(), threading.Event()

    def wait_until_reached(self) -> None:
        assert self._arrived.wait(WAIT_S)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        with self._held("write" if offset else ""):
            super().write(fd, buffers, offset)

    def truncate(self, fd: int, nbytes: int) -> None:
        with self._held("" if nbytes else "cut"):
            super().truncate(fd, nbytes)

    def _held(self, op: str) -> "_Hold":
        mine = op == self._op and self.armed
        self.armed &= not mine
        return _Hold(self, before=mine and not self._after, after=mine and self._after)

    def hold(self) -> None:
        self._arrived.set()
        assert self.go_on.wait(WAIT_S)


class _Hold:
    def __init__(self, files: Held, *, before: bool, after: bool) -> None:
        self._files, self._before, self._after = files, before, after

    def __enter__(self) -> None:
        if self._before:
            self._files.hold()

    def __exit__(self, *_: object) -> None:
        if self._after:
            self._files.hold()
