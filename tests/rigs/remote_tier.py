"""What stands below a pool, somewhere else."""

import threading
from collections.abc import Iterable, Iterator, Sequence

from kvtier.identity.keys import StoreKey
from kvtier.memory.buffers import ReadableBuffer
from kvtier.tiers.base import Item, Status, WriteStatus
from kvtier.tiers.host.tier import HostTier
from pool_rig import MIB, WAIT_S, items
from wrapped_tier import WrappedTier


class RemoteTier(WrappedTier):
    """Outlives the pools over it, as a Redis does. It can fail, and its writes hang unless `may_write` is set."""

    def __init__(self) -> None:
        super().__init__(HostTier(64 * MIB, name="redis"))
        self.fails = False
        self.may_write = threading.Event()
        self.may_write.set()

    def fill(self, labels: Iterable[object]) -> None:
        self.inner.write(items(labels))

    def lookup(self, keys: Sequence[StoreKey]) -> list[Status]:
        return [Status.MISS] * len(keys) if self.fails else super().lookup(keys)

    def read(self, keys: Sequence[StoreKey], into: Sequence[memoryview]) -> list[Status]:
        return [Status.MISS] * len(keys) if self.fails else super().read(keys, into)

    def write(self, items: Sequence[Item[ReadableBuffer]]) -> list[WriteStatus]:
        assert self.may_write.wait(WAIT_S)
        return [WriteStatus.FAILED] * len(items) if self.fails else super().write(items)

    def close(self) -> None:
        """The pool's end is not the server's."""


def remote_tier() -> Iterator[RemoteTier]:
    """For a fixture: sound and closed at the end."""
    tier = RemoteTier()
    yield tier
    tier.inner.check()
    tier.inner.close()
