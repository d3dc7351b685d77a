"""How much of a prompt several pools have together: as SGLang's own backend sees it, over whatever there may be."""

import random
from dataclasses import replace
from pathlib import Path

import not_reached  # noqa: F401  (before SGLang)
import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolHitPolicy, PoolName, PoolTransfer
from storage_rig import ALONE

from kvtier_sglang.hits import usable_prefix

NUM_PAGES = 6
KEYS = [f"page{i}" for i in range(NUM_PAGES)]
POLICIES = (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES)


@pytest.mark.parametrize("seed", range(40))
def test_as_sglangs_own_backend_says(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    files = HiCacheFile(replace(ALONE, extra_config={}), file_path=str(tmp_path))

    def present(name: PoolName | None) -> list[bool]:
        there = [chance.random() < 0.8 for _ in KEYS]
        for key in (key for key, is_there in zip(KEYS, there, strict=True) if is_there):
            assert files.set(key if name is None else files._log_key(name, key), torch.zeros(1))
        return there

    kv = present(None)
    side_pools = [
        (PoolTransfer(name, keys=KEYS[: chance.randint(0, 3)], hit_policy=chance.choice(POLICIES)), present(name))
        for name in chance.sample([PoolName.SWA, PoolName.MAMBA, PoolName.INDEXER], chance.randint(0, 3))
    ]
    expected = files.batch_exists_v2(KEYS, [transfer for transfer, _ in side_pools])
    found = usable_prefix(kv, side_pools)
    assert found.kv_hit_pages == expected.kv_hit_pages
    assert found.restorable_prefix_pages == expected.restorable_prefix_pages
    # SGLang's looks at no further pool when nothing is usable any more.
    assert found.extra_pool_hit_pages.items() >= expected.extra_pool_hit_pages.items()


def test_a_second_form_of_pages_limits_nothing_and_is_not_promised() -> None:
    blocks = PoolTransfer(PoolName.DEEPSEEK_V4_C4, keys=KEYS, hit_policy=PoolHitPolicy.BLOCK_GROUPS)
    result = usable_prefix([True] * 4 + [False] * 2, [(blocks, [False] * NUM_PAGES)])
    assert (result.kv_hit_pages, result.extra_pool_hit_pages) == (4, {PoolName.KV: 4})
