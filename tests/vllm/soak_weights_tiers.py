"""Everything that is in an engine's tiers, read back."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry
from vllm_rig import BLOCK

import disk_rig
from kvtier.build.tiers import shared_tier
from kvtier.identity.keys import NamespaceId, StoreKey
from kvtier.metrics import Metrics
from kvtier.tiers.base import Status, Tier
from kvtier_vllm.settings import load_settings

Values = npt.NDArray[np.float32]
"""The values of one block: of each layer after the other, as they lie in memory."""
_WORKER = "0-0"
"""The folder of the engine's only worker, on its disk."""
_AT_ONCE = 64


def are_equal(one: Values, other: Values) -> bool:
    """But for rounding: what is computed at once, and in which order, may differ."""
    return one.shape == other.shape and bool(np.allclose(one, other, rtol=1e-3, atol=1e-3))


@dataclass
class Found:
    """Blocks by key, whichever tiers they are in."""

    payloads: dict[StoreKey, Values] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    """By tier. Host memory is looked through several times."""
    num_unequal: int = 0
    """Blocks that differ from what was found under their key before."""

    def add(self, tier: str, key: StoreKey, payload: "memoryview | bytearray") -> None:
        values = np.frombuffer(bytes(payload), dtype=np.float32)
        self.counts[tier] += 1
        self.num_unequal += not are_equal(self.payloads.setdefault(key, values), values)


def read_host(found: Found, scheduler: Any, worker: Any) -> None:
    """The arena of a connector that has no step under way: all that can be read there."""
    memory = worker._mover._memory
    for key, entry in scheduler._work.cache.directory._index.slots._visible.items():
        if entry.ready:
            (store_key,) = memory.store_keys([key])
            found.add("host", store_key, memory.view(entry.slot))


def read_disk(found: Found, folder: Path, block_bytes: int) -> None:
    """Notes what the disk folder of an engine that has ended holds."""
    with disk_rig.opened(folder / _WORKER, 4 << 30) as tier:
        _read(found, "disk", tier, disk_rig.places(folder / _WORKER), block_bytes)


def read_pool(
    found: Found, extra: Mapping[str, Any], namespace: NamespaceId, keys: Iterable[StoreKey], block_bytes: int
) -> None:
    """Notes which of these blocks the pool holds.

    :param extra: the settings of an engine.
    """
    with shared_tier(load_settings(extra, BLOCK), [namespace], Metrics(CollectorRegistry())) as shared:
        assert shared is not None
        _read(found, "pool", shared.tier, keys, block_bytes)


def _read(found: Found, name: str, tier: Tier, keys: Iterable[StoreKey], block_bytes: int) -> None:
    wanted = list(keys)
    for start in range(0, len(wanted), _AT_ONCE):
        some = wanted[start : start + _AT_ONCE]
        there = [key for key, status in zip(some, tier.lookup(some), strict=True) if status is Status.HIT]
        into = [memoryview(bytearray(block_bytes)) for _ in there]
        for key, status, payload in zip(there, tier.read(there, into), into, strict=True):
            assert status is Status.HIT, f"{name} has a block, and does not give it"
            found.add(name, key, payload)
