"""The storage backend by itself: pages of SGLang's host pools into the cache pool and back, byte for byte."""

from dataclasses import replace

import pytest
import torch
from storage_rig import (
    ALONE,
    PAGE,
    CachePool,
    PoolHitPolicy,
    PoolName,
    count,
    digests,
    host_pool,
    indices,
    page_bytes,
    storage,
    transfer,
)

from kvtier.errors import ConfigError

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


@pytest.mark.parametrize(
    ("layout", "latent"),
    [*((layout, False) for layout in LAYOUTS), *((layout, True) for layout in LAYOUTS if layout != "page_head")],
)
def test_pages_come_back_at_other_places_of_another_engine(pool: CachePool, layout: str, latent: bool) -> None:
    keys = digests(6, start=1 + LAYOUTS.index(layout))
    mine, theirs = host_pool(layout, seed=1, latent=latent), host_pool(layout, latent=latent)
    config = replace(ALONE, is_mla_model=latent)
    with storage(pool, mine, config=config) as first, storage(pool, theirs, config=config) as second:
        assert second.batch_exists(keys) == 0
        assert first.batch_set_v1(keys, indices(3, 9, 1, 30, 7, 8)) == [True] * 6
        assert second.batch_exists(keys) == 6
        assert second.batch_get_v1(keys[:5], indices(4, 5, 6, 20, 2)) == [True] * 5
    for from_page, to_page in zip((3, 9, 1, 30, 7), (4, 5, 6, 20, 2), strict=True):
        assert page_bytes(mine, from_page) == page_bytes(theirs, to_page)
    untouched = [page for page in range(theirs.page_num) if page not in (4, 5, 6, 20, 2)]
    assert not any(any(page_bytes(theirs, page)) for page in untouched)


def test_a_gap_ends_a_hit_and_a_read(pool: CachePool) -> None:
    keys, mine, theirs = digests(5, start=11), host_pool(seed=2), host_pool()
    with storage(pool, mine) as first, storage(pool, theirs) as second:
        assert first.batch_set_v1([keys[0], keys[1], keys[3]], indices(0, 1, 3)) == [True] * 3
        assert second.batch_exists(keys) == 2
        got = second.batch_get_v1(keys, indices(0, 1, 2, 3, 4))
        assert got[:3] == [True, True, False]
        assert count(second, "query", "hit") == 2
        assert count(second, "query", "miss") == 3


def test_every_other_page_is_missing_and_written(pool: CachePool) -> None:
    keys = digests(10, start=24)
    for layout, seed in (("page_first", 24), ("layer_first", 25)):
        mine, theirs = host_pool(layout, seed=seed), host_pool(layout)
        with storage(pool, mine) as first, storage(pool, theirs) as second:
            assert first.batch_set_v1(keys[::2], indices(*range(0, 10, 2))) == [True] * 5
            assert first.batch_set_v1(keys, indices(*range(10))) == [True] * 10
            assert second.batch_get_v1(keys, indices(*range(10, 20))) == [True] * 10
        for page in range(10):
            assert page_bytes(mine, page) == page_bytes(theirs, page + 10)


def test_what_is_there_is_not_written_again(pool: CachePool) -> None:
    keys, mine = digests(4, start=12), host_pool(seed=3)
    with storage(pool, mine) as first, storage(pool, mine) as second:
        first.batch_set_v1(keys[:2], indices(0, 1))
        before = pool.num_written()
        assert second.batch_set_v1(keys, indices(0, 1, 2, 3)) == [True] * 4
        assert (count(second, "write", "exists"), count(second, "write", "stored")) == (2, 2)
        assert pool.num_written() - before == 2 * 2, "keys and values of two pages"


def test_engines_whose_bytes_differ_never_meet(pool: CachePool) -> None:
    keys, mine = digests(1, start=13), host_pool(seed=4)
    two = replace(ALONE, tp_size=2)
    others = [
        (mine, ALONE, {"model_revision": "2"}),
        (mine, ALONE, {"tenant": "blue"}),
        (mine, ALONE, {"interface_v1": 0}),
        (mine, two, {}),
        (mine, replace(two, tp_rank=1), {}),
        (mine, replace(ALONE, pp_size=2), {}),
        (mine, replace(ALONE, attn_cp_size=2), {}),
        (mine, replace(ALONE, model_name="other"), {}),
        (host_pool("layer_first"), ALONE, {}),
        (host_pool("page_head"), ALONE, {}),
        (host_pool("page_first_direct"), ALONE, {}),
        (host_pool(heads=4), ALONE, {}),
    ]
    with storage(pool, mine) as made:
        assert made.batch_set_v1(keys, indices(0)) == [True]
        assert made.batch_exists(keys) == 1
    for other, config, more in others:
        with storage(pool, other, config=config, **more) as made:
            assert made.batch_exists(keys) == 0, (config, more)
            assert made.batch_get_v1(keys, indices(0)) == [False]


def test_salts_of_the_configuration_part_engines(pool: CachePool) -> None:
    keys, mine = digests(1, start=14), host_pool(seed=5)
    salted = {"red": {"secret": "env:KV_SECRET", "token": "env:RED_TOKEN", "salt": "b"}}
    with storage(pool, mine) as one, storage(pool, mine, tenants=salted) as other:
        one.batch_set_v1(keys, indices(0))
        assert (one.batch_exists(keys), other.batch_exists(keys)) == (1, 0)


def test_latent_attention_is_written_by_one_rank_and_read_by_all(pool: CachePool) -> None:
    keys, mine, theirs = digests(2, start=15), host_pool(seed=6, latent=True), host_pool(latent=True)
    ranks = [replace(ALONE, is_mla_model=True, tp_size=2, tp_rank=rank) for rank in (0, 1)]
    with storage(pool, mine, config=ranks[0]) as zero, storage(pool, theirs, config=ranks[1]) as one:
        assert one.batch_set_v1(keys, indices(0, 1)) == [True, True], "nothing is amiss"
        assert zero.batch_exists(keys) == 0, "and nothing was written"
        zero.batch_set_v1(keys, indices(0, 1))
        assert one.batch_get_v1(keys, indices(4, 5)) == [True, True]
    assert page_bytes(mine, 1) == page_bytes(theirs, 5)


def test_states_beside_latent_attention_are_each_ranks_own(pool: CachePool) -> None:
    """SGLang has every rank write those."""
    keys, latent, states = digests(1, start=16), host_pool(latent=True), host_pool(seed=7)
    ranks = [replace(ALONE, is_mla_model=True, tp_size=2, tp_rank=rank) for rank in (0, 1)]
    own = (PoolName.MAMBA, states)
    with storage(pool, latent, own, config=ranks[0]) as zero, storage(pool, latent, own, config=ranks[1]) as one:
        written = [transfer(PoolName.MAMBA, keys, 0)]
        assert zero.batch_set_v2(written) == {PoolName.MAMBA: [True]}
        assert zero.batch_get_v2(written) == {PoolName.MAMBA: [True]}
        assert one.batch_get_v2(written) == {PoolName.MAMBA: [False]}
        assert one.batch_set_v2(written) == {PoolName.MAMBA: [True]}
        assert one.batch_get_v2(written) == {PoolName.MAMBA: [True]}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_draft_model_with_heads_beside_latent_attention_is_refused(pool: CachePool, rank: int) -> None:
    """SGLang would have it written by the first rank alone, and ask all of them for it."""
    latent, drafts = host_pool(latent=True), (PoolName.DRAFT, host_pool())
    config = replace(ALONE, is_mla_model=True, tp_size=2, tp_rank=rank)
    with pytest.raises(ConfigError, match="host pool draft"), storage(pool, latent, drafts, config=config):
        pass
    with storage(pool, latent, (PoolName.DRAFT, host_pool(latent=True)), config=config):
        pass
    with storage(pool, latent, drafts, config=replace(config, tp_size=1, tp_rank=0)) as made:
        written = [transfer(PoolName.DRAFT, digests(1, start=41), 0)]
        assert made.batch_set_v2(written) == made.batch_get_v2(written) == {PoolName.DRAFT: [True]}


def test_a_hit_is_what_all_pools_have(pool: CachePool) -> None:
    keys, kv, swa, indexer = digests(6, start=17), host_pool(seed=8), host_pool(seed=9), host_pool(seed=10)
    every, last = PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES
    with storage(pool, kv, (PoolName.SWA, swa), (PoolName.INDEXER, indexer)) as made:
        made.batch_set_v1(keys[:5], indices(0, 1, 2, 3, 4))
        made.batch_set_v2([transfer(PoolName.SWA, [keys[1], keys[2], keys[4]], 1, 2, 4)])
        made.batch_set_v2([transfer(PoolName.INDEXER, keys[:4], 0, 1, 2, 3)])
        window = transfer(PoolName.SWA, keys[:2], policy=last)
        result = made.batch_exists_v2(keys, [window])
        assert (result.kv_hit_pages, result.restorable_prefix_pages) == (3, [3]), "a window of two pages"
        assert result.extra_pool_hit_pages == {PoolName.KV: 5, PoolName.SWA: 3}
        result = made.batch_exists_v2(keys, [transfer(PoolName.SWA, keys[:1], policy=last)])
        assert (result.kv_hit_pages, result.restorable_prefix_pages) == (5, [2, 3, 5])
        result = made.batch_exists_v2(keys, [transfer(PoolName.INDEXER, keys, policy=every), window])
        assert (result.kv_hit_pages, result.restorable_prefix_pages) == (3, [3])
        result = made.batch_exists_v2(keys, [transfer(PoolName.MAMBA, keys, policy=last)])
        assert (result.kv_hit_pages, result.restorable_prefix_pages) == (0, []), "a pool that nobody registered"
        assert made.batch_exists_v2(keys).kv_hit_pages == 5
        got = made.batch_get_v2([transfer(PoolName.SWA, keys[1:3], 20, 21), transfer(PoolName.INDEXER, keys[:1], 22)])
        assert got == {PoolName.SWA: [True, True], PoolName.INDEXER: [True]}
    assert page_bytes(swa, 21) == page_bytes(swa, 2)
    assert page_bytes(indexer, 22) == page_bytes(indexer, 0)


def test_the_methods_that_copy(pool: CachePool) -> None:
    keys, mine = digests(3, start=18), host_pool(seed=11)
    pages = [mine.get_data_page(page * PAGE) for page in range(3)]
    with storage(pool, mine, interface_v1=0) as made:
        assert made.set(keys[0], pages[0])
        assert made.batch_set(keys[1:], pages[1:])
        assert made.exists(keys[2])
        assert made.batch_exists(keys) == 3
        fetched = made.batch_get(keys, [mine.get_dummy_flat_data_page() for _ in keys])
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(fetched, pages, strict=True))
        one = made.get(keys[1])
        assert one is not None
        assert torch.equal(one.view(torch.uint8), pages[1].view(torch.uint8))
        scattered = torch.empty((one.numel(), 2), dtype=one.dtype)[:, 0]
        assert made.get(keys[1], scattered) is scattered
        assert torch.equal(scattered.contiguous().view(torch.uint8), pages[1].view(torch.uint8))
        missing = digests(1, start=19)[0]
        assert made.get(missing) is None
        assert not made.exists(missing)
        assert made.get("no digest") is None


def test_names_that_are_no_digests_are_names_all_the_same(pool: CachePool) -> None:
    mine = host_pool(seed=12)
    page = mine.get_data_page(0)
    with storage(pool, mine) as made:
        for name in ("a page", "A" * 64, "z" * 64, ""):
            assert not made.exists(name)
            assert made.set(name, page)
            assert made.exists(name)
        assert not made.exists("a" * 64)


def test_statistics_are_given_once(pool: CachePool) -> None:
    keys, mine = digests(3, start=20), host_pool(seed=13)
    with storage(pool, mine) as made:
        made.batch_set_v1(keys, indices(0, 1, 2))
        made.batch_get_v1(keys[:2], indices(0, 1))
        stats = made.get_stats()
        assert (stats.backup_pgs, stats.prefetch_pgs) == ([3], [2])
        assert all(speed > 0 for speed in (*stats.backup_bandwidth, *stats.prefetch_bandwidth))
        again = made.get_stats()
        assert (again.backup_pgs, again.prefetch_pgs, again.backup_bandwidth) == ([], [], [])


def test_clear_forgets_what_this_engine_has_seen(pool: CachePool) -> None:
    keys, mine = digests(4, start=21), host_pool(seed=14)
    with storage(pool, mine) as first, storage(pool, mine) as second:
        first.batch_set_v1(keys[:2], indices(0, 1))
        second.batch_set_v1(keys[2:], indices(2, 3))
        second.clear()
        assert first.batch_exists(keys) == 2
        assert first.batch_exists(keys[2:]) == 0
        first.clear()
        assert second.batch_exists(keys) == 0


def test_clear_forgets_the_latest_of_many(pool: CachePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_sglang.page_store._MAX_SEEN", 2)
    keys, mine = digests(4, start=42), host_pool(seed=42)
    with storage(pool, mine) as first:
        assert all(first.batch_set_v1(keys, indices(0, 1, 2, 3)))
        first.clear()
        assert first.batch_exists(keys) == 2
        assert first.batch_exists(keys[2:]) == 0


def test_calls_of_several_transfers(pool: CachePool, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, missing = digests(31, start=22), digests(1, start=23)
    monkeypatch.setattr("kvtier_sglang.host_pages._COPIED_BYTES", 100_000)
    monkeypatch.setattr("kvtier_sglang.host_pages._BATCH_BYTES", 100_000)
    for layout in ("layer_first", "page_first"):
        mine, theirs = host_pool(layout, seed=15), host_pool(layout)
        with storage(pool, mine) as first, storage(pool, theirs) as second:
            kind = second._pools.anchor.kind
            assert kind is not None
            assert 1 < kind.batch_pages < 31
            assert all(first.batch_set_v1(keys, indices(*range(31))))
            some = [*keys[:20], *missing, *keys[20:30]]
            got = second.batch_get_v1(some, indices(*range(31)))
            assert got[:21] == [True] * 20 + [False]
        for page in range(20):
            assert page_bytes(mine, page) == page_bytes(theirs, page)
        assert not any(page_bytes(theirs, 30)), "what is behind a gap is not read"
