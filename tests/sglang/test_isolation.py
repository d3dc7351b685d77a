"""Engines that differ in anything that bytes or privacy depend on never share blocks in one pool."""

import dataclasses

import pytest
from engine_shape import Shape, Storage, kvtier, pages
from hicache_rig import engine

from cache_pool import CachePool

SHAPE = Shape(num_pages=40)
TOKENS = pages(SHAPE, 1, 6)


@pytest.fixture(scope="module")
def filled_pool(pool: CachePool) -> CachePool:
    """Has the same tokens with two salts and without, each with bytes of its own."""
    with engine(SHAPE, kvtier(pool)) as producer:
        for seed, salt in enumerate((None, "one", "two")):
            producer.compute(TOKENS, salt=salt, seed=seed)
            producer.store(TOKENS, salt=salt)
    return pool


def test_two_salts_never_meet(filled_pool: CachePool) -> None:
    with engine(SHAPE, kvtier(filled_pool)) as consumer:
        for seed, salt in enumerate((None, "one", "two")):
            assert consumer.fetch(TOKENS, salt=salt, seed=seed) == len(TOKENS)
        assert consumer.fetch(TOKENS, salt="three") == 0


def require_nothing_found(pool: CachePool, shape: Shape, storage: Storage) -> None:
    num_read = pool.num_read()
    with engine(shape, storage) as stranger:
        for salt in (None, "one"):
            assert stranger.fetch(TOKENS, salt=salt) == 0
    assert pool.num_read() == num_read


def test_two_tenants_never_meet(filled_pool: CachePool) -> None:
    """Not even with the same secret and the same salt; and each has its own of the same name."""
    blue = kvtier(filled_pool, "blue")
    require_nothing_found(filled_pool, SHAPE, blue)
    with engine(SHAPE, blue) as producer:
        producer.compute(TOKENS, seed=7)
        producer.store(TOKENS)
    for storage, seed in ((blue, 7), (kvtier(filled_pool), 0)):
        with engine(SHAPE, storage) as consumer:
            assert consumer.fetch(TOKENS, seed=seed) == len(TOKENS)


@pytest.mark.parametrize(
    "difference",
    [
        {"layout": "layer_first"},
        {"layout": "page_first_direct"},
        {"layout": "page_head"},
        {"page_size": 4},
        {"num_layers": 6},
        {"kind": "swa"},
        {"dtype": "float16"},
        {"num_ranks": 2},
        {"num_ranks": 2, "rank": 1},
    ],
    ids=lambda difference: ", ".join(f"{name} {value}" for name, value in difference.items()),
)
def test_other_bytes_never_meet(filled_pool: CachePool, difference: dict[str, object]) -> None:
    shape = dataclasses.replace(SHAPE, **difference)  # type: ignore[arg-type]
    require_nothing_found(filled_pool, shape, kvtier(filled_pool))


def test_two_ranks_keep_a_share_each(filled_pool: CachePool) -> None:
    ranks = [dataclasses.replace(SHAPE, num_ranks=2, rank=rank) for rank in range(2)]
    storage = kvtier(filled_pool)
    for seed, shape in enumerate(ranks, start=11):
        with engine(shape, storage) as producer:
            producer.compute(TOKENS, seed=seed)
            producer.store(TOKENS)
    for seed, shape in enumerate(ranks, start=11):
        with engine(shape, storage) as consumer:
            assert consumer.fetch(TOKENS, seed=seed) == len(TOKENS)


def test_other_weights_never_meet(filled_pool: CachePool) -> None:
    require_nothing_found(filled_pool, SHAPE, kvtier(filled_pool, model_revision="tuned"))


def test_another_secret_never_meets(filled_pool: CachePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_SECRET", "another secret of more than sixteen bytes")
    require_nothing_found(filled_pool, SHAPE, kvtier(filled_pool))
