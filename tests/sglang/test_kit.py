"""SGLang's own test kit with kvtier as its storage: every page size and layout, every kind of component, both modes."""

from array import array
from collections.abc import Iterator

import pytest
import torch
from engine_shape import LAYOUTS, PAGE_SIZES, Shape, kvtier, pages
from hicache_rig import Kit, kits
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.test.kits.unified_radix_cache.fixtures import match_prefix

from cache_pool import CachePool

STATE_LAYOUTS = ("page_first", "page_first_direct")
"""Layouts that SGLang has for the states of Mamba layers."""
SHAPES = [
    *(Shape(page_size, layout, kind) for kind in ("full", "swa") for layout in LAYOUTS for page_size in PAGE_SIZES),
    *(Shape(page_size, layout, "mamba") for layout in STATE_LAYOUTS for page_size in PAGE_SIZES),
]
HANDLE = CacheRequestHandle("request", 0)
NUM_PAGES = 6


@pytest.fixture(params=SHAPES, ids=str)
def kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    with kits(request.param) as kit:
        yield kit


def test_what_a_producer_stores_a_consumer_prefetches(kit: Kit, pool: CachePool) -> None:
    storage, sequence = kvtier(pool), pages(kit.shape, 1, NUM_PAGES)
    expected_keys, expected_values = kit._l3_produce(storage, sequence, marker=7)
    cache, allocator, requests = kit._l3_consumer(storage)
    kit._consume_prefetch(cache, [*sequence, *pages(kit.shape, 2, 1)], HANDLE)
    match = match_prefix(cache, sequence)
    assert match.host_hit_length == len(sequence)
    kit._load_back_node(cache, match.best_match_node, kit._make_req(requests))
    keys, values = kit._snapshot_full_kv(allocator, cache.path_device_indices(match.best_match_node))
    assert torch.equal(keys, expected_keys)
    assert torch.equal(values, expected_values)
    cache.sanity_check()


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.kind != "mamba"], ids=str)
def test_without_a_cache_in_host_memory(shape: Shape, pool: CachePool) -> None:
    """SGLang's `buffer_only`: pages pass through host memory, and what was read is given to a request at once."""
    with kits(shape) as kit:
        storage, sequence = kvtier(pool), pages(shape, 3, NUM_PAGES)
        _, (expected_keys, expected_values) = kit._produce_buffer_l3(storage, sequence, marker=9)
        cache, allocator, _ = kit._build_buffer_hicache_fixture(storage)
        cache.prefetch_from_storage(HANDLE, cache.root_node_handle(), array("q", sequence), None, None)
        kit._run_prefetch_to_completion(cache, HANDLE)
        match = match_prefix(cache, sequence)
        assert match.device_prefix_len == len(sequence)
        keys, values = kit._snapshot_full_kv(allocator, cache.path_device_indices(match.last_device_node))
        assert torch.equal(keys, expected_keys)
        assert torch.equal(values, expected_values)
        cache.sanity_check()


@pytest.mark.parametrize("kind", ["full", "swa"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_sibling_has_published_the_head_meanwhile(page_size: int, kind: str, pool: CachePool) -> None:
    """A check of the kit's own."""
    shape = Shape(page_size, kind=kind)
    with kits(shape) as kit:
        kit._assert_sibling_head_is_trimmed(kvtier(pool), pages(shape, 4, NUM_PAGES), window_sized=False)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_full_attention_is_still_on_the_device(page_size: int, pool: CachePool) -> None:
    """A check of the kit's own: only the sliding window is read."""
    shape = Shape(page_size, kind="swa")
    with kits(shape) as kit:
        storage, sequence = kvtier(pool), pages(shape, 5, NUM_PAGES)
        kit._produce_buffer_l3(storage, sequence, marker=9)
        kit._assert_masked_full_is_reused(storage, sequence, live_tail=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_through_the_interface_that_copies(layout: str, pool: CachePool) -> None:
    with kits(Shape(layout=layout)) as kit:
        storage, sequence = kvtier(pool, copying=True), pages(kit.shape, 6, NUM_PAGES)
        expected_keys, expected_values = kit._l3_produce(storage, sequence, marker=7)
        cache, allocator, requests = kit._l3_consumer(storage)
        kit._consume_prefetch(cache, sequence, HANDLE)
        match = match_prefix(cache, sequence)
        assert match.host_hit_length == len(sequence)
        kit._load_back_node(cache, match.best_match_node, kit._make_req(requests))
        keys, values = kit._snapshot_full_kv(allocator, cache.path_device_indices(match.best_match_node))
        assert torch.equal(keys, expected_keys)
        assert torch.equal(values, expected_values)
