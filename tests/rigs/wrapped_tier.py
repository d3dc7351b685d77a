"""A tier around another one, for tests that hold up or break some of its verbs."""

from collections.abc import Sequence

from kvtier.identity.keys import StoreKey
from kvtier.memory.buffers import ReadableBuffer
from kvtier.tiers.base import Item, Status, Tier, Usage, WriteStatus


class WrappedTier:
    """Passes everything on."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner

    @property
    def name(self) -> str:
        return self.inner.name

    def lookup(self, keys: Sequence[StoreKey]) -> list[Status]:
        return self.inner.lookup(keys)

    def read(self, keys: Sequence[StoreKey], into: Sequence[memoryview]) -> list[Status]:
        return self.inner.read(keys, into)

    def write(self, items: Sequence[Item[ReadableBuffer]]) -> list[WriteStatus]:
        return self.inner.write(items)

    def discard(self, keys: Sequence[StoreKey]) -> int:
        return self.inner.discard(keys)

    def usage(self) -> Usage:
        return self.inner.usage()

    def check(self) -> None:
        self.inner.check()

    def close(self) -> None:
        self.inner.close()
