"""The blocks that benchmarks move: as many as a cache cannot hold, each with memory of its own, touched before."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from kvtier.codec.checksums import checksum
from kvtier.errors import KvtierError
from kvtier.identity.keys import NamespaceId, PrefixHasher, StoreKey, store_key, tenant_id
from kvtier.identity.namespace import Namespace
from kvtier.memory.buffers import ReadableBuffer
from kvtier.memory.pages import copy_bytes, map_memory
from kvtier.testing.blocks import TINY_NAMESPACE
from kvtier.tiers.base import Item, Status, WriteStatus
from kvtier_bench.measuring.rounds import Subject

TENANT = "bench"
NUM_SLOTS = 64
"""Distinct blocks in a round at the least: a copy between buffers that a cache holds flatters by four."""


class Moves(Protocol):
    """What is measured of a `Tier`."""

    def read(self, keys: Sequence[StoreKey], into: Sequence[memoryview]) -> list[Status]: ...

    def write(self, items: Sequence[Item[ReadableBuffer]]) -> list[WriteStatus]: ...

    def discard(self, keys: Sequence[StoreKey]) -> int: ...


class Rotation:
    """Random blocks, and memory to read each of them into. A round moves all of them once."""

    def __init__(self, payload_bytes: int, num_slots: int = NUM_SLOTS) -> None:
        self.payload_bytes = payload_bytes
        rng = np.random.default_rng(0)
        self.sources = [map_memory(payload_bytes, prefault=True) for _ in range(num_slots)]
        for source in self.sources:
            copy_bytes(source, rng.bytes(payload_bytes))
        self.into = [map_memory(payload_bytes, prefault=True) for _ in range(num_slots)]

    @property
    def nbytes(self) -> int:
        """The payload bytes of one round."""
        return self.payload_bytes * len(self.sources)

    def copies(self) -> list[float]:
        """The floor: what moving these bytes costs at the least."""
        seconds = []
        for into, source in zip(self.into, self.sources, strict=True):
            start = time.perf_counter()
            copy_bytes(into, source)
            seconds.append(time.perf_counter() - start)
        return seconds

    def fill(self, tier: Moves, label: str) -> None:
        """Makes the tier have all blocks."""
        keys = keys_of(len(self.sources), label)
        tier.discard(keys)
        _require_stored(tier.write(self._items(keys)))

    def reads(self, tier: Moves, label: str, batch: int, pids: tuple[int, ...]) -> Subject:
        """Reads of blocks that the tier was filled with, `batch` a call."""
        keys = keys_of(len(self.into), label)
        calls = [(keys[at : at + batch], self.into[at : at + batch]) for at in range(0, len(keys), batch)]

        def run() -> list[float]:
            seconds = []
            for keys, into in calls:
                start = time.perf_counter()
                statuses = tier.read(keys, into)
                seconds.append(time.perf_counter() - start)
                if set(statuses) != {Status.HIT}:
                    raise KvtierError("a read missed: the figures would mean nothing")
            return seconds

        return Subject(run, pids=pids)

    def writes(self, tier: Moves, label: str, batch: int, pids: tuple[int, ...]) -> Subject:
        """Writes, `batch` a call, of blocks that the tier was told to forget before the round."""
        keys = keys_of(len(self.sources), label)
        items = self._items(keys)
        calls = [items[at : at + batch] for at in range(0, len(items), batch)]

        def run() -> list[float]:
            seconds = []
            for call in calls:
                start = time.perf_counter()
                statuses = tier.write(call)
                seconds.append(time.perf_counter() - start)
                _require_stored(statuses)
            return seconds

        return Subject(run, prepare=lambda: tier.discard(keys), pids=pids)

    def _items(self, keys: Sequence[StoreKey]) -> list[Item[ReadableBuffer]]:
        return [(key, source, checksum(key, source)) for key, source in zip(keys, self.sources, strict=True)]


def namespace_of(payload_bytes: int) -> Namespace:
    """Returns the namespace of an engine without a model, with blocks of so many bytes."""
    return replace(TINY_NAMESPACE, dtype="bfloat16", kv_dtype="bfloat16", head_dim=payload_bytes // 64)


def keys_of(num_keys: int, label: str) -> list[StoreKey]:
    """Store keys of the benchmarks' tenant: the same for the same label, others for any other."""
    hashes = PrefixHasher(bytes(32), label, 1).hash_blocks(np.arange(num_keys, dtype=np.int32))
    return [store_key(tenant_id(TENANT), NamespaceId(bytes(16)), chain_hash) for chain_hash in hashes]


def repeated(call: Callable[[], object], times: int) -> Callable[[], list[float]]:
    """A round of the same call, several times."""

    def run() -> list[float]:
        seconds = []
        for _ in range(times):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return seconds

    return run


def _require_stored(statuses: Sequence[WriteStatus]) -> None:
    if set(statuses) != {WriteStatus.STORED}:
        names = ", ".join(sorted({status.name for status in statuses}))
        raise KvtierError(f"a write was refused ({names}): the figures would mean nothing")
