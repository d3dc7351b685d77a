"""Device, host, pool, another process's host, its device: the bytes that arrive are those that left."""

import itertools
from collections.abc import Iterator

import pytest
from child_rig import Child, child
from engine_shape import LAYOUTS, PAGE_SIZES, Shape, kvtier, pages
from hicache_rig import engine
from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE

from cache_pool import CachePool

NUM_PAGES = 6
SHAPES = [
    *(Shape(page_size, layout) for layout in LAYOUTS for page_size in PAGE_SIZES),
    Shape(16, "layer_first", num_layers=12),
    *(Shape(16, layout, "latent", num_layers=12) for layout in LAYOUTS if layout != "page_head"),
    *(Shape(page_size, "layer_first", "latent", num_layers=12) for page_size in (1, 64)),
    *(Shape(16, layout, "swa") for layout in LAYOUTS),
    *(Shape(page_size, layout, "mamba") for layout in ("page_first", "page_first_direct") for page_size in (1, 16)),
]
"""Layouts are a matter of the anchor pool; the others have theirs in `test_kit` too. Pages of four layers of keys and
values are few enough pieces to be blocks by themselves, those of 12 are not."""


@pytest.fixture(scope="module")
def other_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    with child(tmp_path_factory.mktemp("child")) as running:
        yield running


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_another_process_stored_arrives(shape: Shape, pool: CachePool, other_process: Child) -> None:
    storage, tokens = kvtier(pool), pages(shape, 1, NUM_PAGES)
    assert other_process.call("produce", shape, storage, tokens=tokens, seed=1) == len(tokens)
    with engine(shape, storage) as here:
        assert here.fetch([*tokens, *pages(shape, 2, 2)], seed=1) == len(tokens)
        assert here.fetch(pages(shape, 3, 2)) == 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_another_process_gets_what_was_stored_here(shape: Shape, pool: CachePool, other_process: Child) -> None:
    storage, tokens = kvtier(pool), pages(shape, 4, NUM_PAGES)
    with engine(shape, storage) as here:
        here.compute(tokens, seed=2)
        here.store(tokens)
    assert other_process.call("consume", shape, storage, tokens=tokens, seed=2) == len(tokens)


@pytest.mark.parametrize("copying", [False, True], ids=["in place", "copying"])
def test_a_prompt_of_several_calls(pool: CachePool, copying: bool) -> None:
    """SGLang hands over at most so many pages in a call."""
    shape, storage = Shape(1, num_pages=2 * STORAGE_BATCH_SIZE + 8), kvtier(pool, copying=copying)
    tokens = pages(shape, 5 + copying, 2 * STORAGE_BATCH_SIZE + 3)
    with engine(shape, storage) as producer:
        producer.compute(tokens)
        producer.store(tokens)
    with engine(shape, storage) as consumer:
        assert consumer.fetch(tokens) == len(tokens)


def test_what_is_there_is_not_written_again(pool: CachePool) -> None:
    shape, storage = Shape(), kvtier(pool)
    tokens = pages(shape, 7, NUM_PAGES)
    written = [pool.num_written()]
    for num_pages in (NUM_PAGES // 2, NUM_PAGES):
        with engine(shape, storage) as producer:
            producer.compute(tokens[: num_pages * shape.page_size])
            producer.store(tokens[: num_pages * shape.page_size])
        written.append(pool.num_written())
    assert written[2] - written[1] == written[1] - written[0] > 0
    with engine(shape, storage) as consumer:
        assert consumer.fetch(tokens) == len(tokens)


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_latent_attention_is_written_by_one_rank_and_read_by_all(layout: str, pool: CachePool) -> None:
    """Through SGLang's own trees: its controllers say who writes."""
    zero, one = (Shape(layout=layout, kind="latent", num_layers=12, rank=rank, num_ranks=2) for rank in (0, 1))
    storage, tokens = kvtier(pool), pages(zero, 8, NUM_PAGES)
    written = [pool.num_written()]
    for shape in (one, zero):
        with engine(shape, storage) as producer:
            producer.compute(tokens, seed=8)
            producer.store(tokens)
            written.append(pool.num_written())
            assert producer.num_stored(tokens) == (len(tokens) if shape is zero else 0)
    assert [after - before for before, after in itertools.pairwise(written)] == [0, NUM_PAGES]
    for shape in (zero, one):
        with engine(shape, storage) as consumer:
            assert consumer.fetch([*tokens, *pages(shape, 9, 1)], seed=8) == len(tokens)
