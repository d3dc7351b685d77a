"""A tenant's secret is replaced while a pool runs: what was saved before is found, and moves under the new secret."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from build_rig import SECRET, build, result
from hierarchy_rig import until
from kvtier.build.engine_cache import EngineCache
from kvtier.offload import PreviousKeys
from pool_rig import TOKENS, pool_process

NEW = "n" * 32
TOKENS_OF_PROMPT = np.arange(16 * 8, dtype=np.int32)
LATER, EARLIER = "2999-01-31T00:00:00Z", "2020-01-31T00:00:00+02:00"


class Engine:
    """One whose blocks are all of one prompt."""

    def __init__(self, cache: EngineCache, registry: CollectorRegistry) -> None:
        self._cache, self._registry = cache, registry
        self.keys = cache.hashers["red"].hash_blocks(TOKENS_OF_PROMPT)

    def save(self) -> None:
        blocks = [(key, i) for i, key in enumerate(self.keys)]
        assert not result(self._cache.hierarchy, self._cache.hierarchy.start_save(blocks)).failed

    def load(self, slots: Sequence[int]) -> list[str]:
        """Looks for the prompt, loads what is there, and says from which tiers it came."""
        previous = [
            PreviousKeys(each, lambda num, each=each: each.hasher.hash_blocks(TOKENS_OF_PROMPT)[:num])
            for each in self._cache.hashers["red"].previous
        ]
        ticket = self._cache.hierarchy.start_lookup(self.keys, previous)
        statuses = until(lambda: self._cache.hierarchy.poll_lookup(ticket))
        hits = [(key, slot) for key, slot, s in zip(self.keys, slots, statuses, strict=False) if s.tier]
        if hits:
            assert not result(self._cache.hierarchy, self._cache.hierarchy.start_load(hits)).failed
        return [s.tier for s in statuses]

    @property
    def num_moved(self) -> float:
        return self._registry.get_sample_value("kvtier_previous_secret_blocks_total") or 0.0


@contextmanager
def engine(folder: Path, device: np.ndarray, red: dict[str, object], **sections: Any) -> Iterator[Engine]:
    registry = CollectorRegistry()
    environ = {"NEW": NEW}
    with build(folder, device, registry=registry, token=TOKENS["red"], red=red, environ=environ, **sections) as cache:
        yield Engine(cache, registry)


@pytest.mark.parametrize("tier", ["pool", "disk"])
def test_a_rotation_of_the_secret_loses_nothing(tmp_path: Path, tier: str, caplog: pytest.LogCaptureFixture) -> None:
    device = np.random.default_rng(1).integers(0, 256, (32, 4096), dtype=np.uint8)
    rotated: dict[str, object] = {"secret": "env:NEW"}

    def previous(retire_at: str) -> dict[str, object]:
        return {**rotated, "previous_secrets": [{"secret": "env:SECRET", "retire_at": retire_at}]}

    with pool_process() as pool:
        below: dict[str, Any] = {"pool": {"address": pool.block}}
        if tier == "disk":
            below = {"disk": {"directory": "blocks", "capacity_bytes": "16MiB"}}
        with engine(tmp_path, device, {}, **below) as old:
            old.save()
        with engine(tmp_path, device, previous(EARLIER), **below) as late:
            assert late.load(range(8, 16)) == [""] * 8
        assert "tenants.red.previous_secrets[0]: its retire_at has passed" in caplog.text
        with engine(tmp_path, device, previous(LATER), **below) as moving:
            assert moving.keys != old.keys
            assert moving.load(range(8, 16)) == [tier] * 8
            assert moving.num_moved == 8
            assert moving.load(range(8, 16)) == ["host"] * 8
        with engine(tmp_path, device, rotated, **below) as moved:
            assert moved.load(range(16, 24)) == [tier] * 8, "they were saved under the new secret"
            assert moved.num_moved == 0
    assert np.array_equal(device[8:16], device[:8])
    assert np.array_equal(device[16:24], device[:8])
    assert SECRET not in caplog.text
    assert NEW not in caplog.text
