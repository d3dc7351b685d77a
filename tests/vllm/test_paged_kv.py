"""Pages as bytes, whatever order vLLM keeps dimensions in."""

import pytest
import torch
from torch import Tensor

from kvtier.errors import ConfigError
from kvtier_vllm.kv.paged_kv import pages_of

BLOCKS, HEADS, TOKENS, WIDTH = 6, 2, 4, 8


def _filled(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape)


def _bytes_of(tensor: Tensor) -> bytes:
    """Sorted, because a page's order is its layout's affair."""
    return bytes(sorted(tensor.contiguous().view(torch.uint8).flatten().tolist()))


LAYOUTS = {
    "blocks first": _filled(BLOCKS, HEADS, TOKENS, WIDTH),
    "tokens before heads": _filled(BLOCKS, TOKENS, HEADS, WIDTH).transpose(1, 2),
    "padded pages": _filled(BLOCKS, 3 * HEADS * TOKENS * WIDTH)[:, : HEADS * TOKENS * WIDTH].unflatten(
        1, (HEADS, TOKENS, WIDTH)
    ),
    "a layer among others": _filled(BLOCKS, 3, HEADS, TOKENS, WIDTH)[:, 1],
    "a slice of a larger storage": _filled(2 * BLOCKS, HEADS, TOKENS, WIDTH)[BLOCKS:],
}


@pytest.mark.parametrize("layer", LAYOUTS.values(), ids=LAYOUTS)
def test_a_page_has_the_bytes_of_its_block(layer: Tensor) -> None:
    (pages,) = pages_of(layer, BLOCKS).pages
    assert (pages.shape[0], pages.dtype) == (BLOCKS, torch.uint8)
    for block in range(BLOCKS):
        assert _bytes_of(pages[block]) == _bytes_of(layer[block])


@pytest.mark.parametrize("layer", LAYOUTS.values(), ids=LAYOUTS)
def test_pages_are_views(layer: Tensor) -> None:
    layer = layer.detach()
    (pages,) = pages_of(layer, BLOCKS).pages
    before = layer.clone()
    kept = pages[3].clone()
    pages[3] = 0
    assert not layer[3].any()
    assert torch.equal(layer[[0, 1, 2, 4, 5]], before[[0, 1, 2, 4, 5]]), "a neighbour's bytes were written"
    pages[3] = kept
    assert torch.equal(layer, before)


def test_keys_and_values_apart() -> None:
    layer = _filled(2, BLOCKS, TOKENS, HEADS, WIDTH)
    keys, values = pages_of(layer, BLOCKS).pages
    for block in range(BLOCKS):
        assert _bytes_of(keys[block]) == _bytes_of(layer[0, block])
        assert _bytes_of(values[block]) == _bytes_of(layer[1, block])


def test_heads_apart() -> None:
    layer = _filled(HEADS, BLOCKS, TOKENS, WIDTH).transpose(0, 1)
    pages = pages_of(layer, BLOCKS).pages
    assert len(pages) == HEADS
    for head, rows in enumerate(pages):
        for block in range(BLOCKS):
            assert _bytes_of(rows[block]) == _bytes_of(layer[block, head])


def test_kernels_with_smaller_blocks() -> None:
    layer = _filled(3 * BLOCKS, HEADS, TOKENS, WIDTH)
    (pages,) = pages_of(layer, BLOCKS).pages
    for block in range(BLOCKS):
        assert _bytes_of(pages[block]) == _bytes_of(layer[3 * block : 3 * block + 3])


@pytest.mark.parametrize(
    "layer",
    [
        _filled(BLOCKS, HEADS, TOKENS, 2 * WIDTH)[..., :WIDTH],
        _filled(3 * BLOCKS, 2, HEADS, TOKENS, WIDTH)[:, 0],
        _filled(BLOCKS + 1, HEADS, TOKENS, WIDTH),
        _filled(BLOCKS),
    ],
    ids=["holes in a page", "smaller blocks that do not touch", "another number of blocks", "one dimension"],
)
def test_other_layouts_are_refused(layer: Tensor) -> None:
    with pytest.raises(ConfigError, match="not a layout"):
        pages_of(layer, BLOCKS)


def test_layouts_differ_and_numbers_of_blocks_do_not() -> None:
    described = {pages_of(layer, BLOCKS).layout for layer in LAYOUTS.values()}
    assert len(described) == 2, "only the order within a page counts"
    larger = _filled(2 * BLOCKS, HEADS, TOKENS, WIDTH)
    assert pages_of(larger, 2 * BLOCKS).layout == pages_of(LAYOUTS["blocks first"], BLOCKS).layout
    assert pages_of(larger.half(), 2 * BLOCKS).layout not in described
