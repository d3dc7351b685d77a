"""Buffers for pages of host pools: of SGLang's layouts, and of forms that others may have."""

import ctypes
import itertools

import not_reached  # noqa: F401  (before SGLang)
import pytest
import torch
from storage_rig import PAGE, host_pool, indices, page_bytes

from kvtier.errors import ConfigError, InvalidInputError
from kvtier.memory.pieces import Pieces, Target, land, together
from kvtier_sglang.host_pages import DirectPages, FlatPages, GatheredPages, pages_of


class Scattered:
    """A host pool of pages in pieces of several sizes, at distances of no order."""

    def __init__(self) -> None:
        self.page_size, self.size = 2, 8
        sizes = (24, 8, 8, 8, 40, 8, 8, 16, 8, 8)
        self.buffers = [torch.zeros(4, size, dtype=torch.uint8).random_() for size in sizes]

    def get_page_buffer_meta(self, places: torch.Tensor) -> tuple[list[int], list[int]]:
        pages = (places[:: self.page_size] // self.page_size).tolist()
        rows = [buffer[page] for page in pages for buffer in self.buffers]
        return [row.data_ptr() for row in rows], [len(row) for row in rows]

    def page(self, number: int) -> bytes:
        return b"".join(bytes(buffer[number].numpy()) for buffer in self.buffers)


def stored(buffer: Target) -> bytes:
    """What the pool has of it."""
    return bytes(together(buffer))


def test_each_layout_has_its_way() -> None:
    kinds = {layout: type(pages_of(host_pool(layout))) for layout in ("page_first", "page_head", "layer_first")}
    assert kinds == {"page_first": DirectPages, "page_head": DirectPages, "layer_first": GatheredPages}


def test_direct_buffers_are_host_memory_itself() -> None:
    pool = host_pool("page_first", seed=1)
    lent = pages_of(pool).lend_filled(indices(3))
    assert b"".join(stored(part) for part in lent.buffers[0]) == page_bytes(pool, 3)
    part = lent.buffers[0][0]
    assert isinstance(part, memoryview)
    part[:1] = bytes([part[0] ^ 255])
    assert page_bytes(pool, 3)[0] == part[0]


def test_pieces_of_any_sizes_and_places() -> None:
    """Buffers may be wherever torch has put them; then those of one page have other distances than another's."""
    pool = Scattered()
    pages = pages_of(pool)
    assert isinstance(pages, GatheredPages)
    with pytest.raises(InvalidInputError, match="otherwise"):
        pages.lend_filled(torch.tensor([2, 3]))
    for order in ((0, 3, 1, 2, 9, 8, 4, 5, 7, 6), range(10), range(9, -1, -1)):
        whole = torch.zeros(4, 10, 8, dtype=torch.uint8).random_()
        pool.buffers = [whole[:, i] for i in order]
        pages = pages_of(pool)
        lent = pages.lend_filled(torch.tensor([2, 3, 6, 7]))
        assert [stored(page[0]) for page in lent.buffers] == [pool.page(1), pool.page(3)], "in the pool's order"
        lent = pages.lend_empty(torch.tensor([0, 1]))
        land(memoryview(bytes(range(80))), lent.buffers[0][0])
        assert pool.page(0) == bytes(range(80))


def test_pieces_of_several_sizes() -> None:
    pool = Scattered()
    whole, ends = torch.zeros(4, 300, dtype=torch.uint8).random_(), [3, 10, 17, 40, 41, 60, 67, 74, 90, 91, 200]
    pool.buffers = [whole[:, start:end] for start, end in itertools.pairwise(ends)]
    pages = pages_of(pool)
    last = stored(pages.lend_filled(torch.tensor([6, 7])).buffers[0][0])
    assert last == pool.page(3)
    before = whole.clone()
    land(memoryview(last), pages.lend_empty(torch.tensor([2, 3])).buffers[0][0])
    assert pool.page(1) == last
    assert torch.equal(whole[:, :3], before[:, :3])
    assert torch.equal(whole[:, 200:], before[:, 200:]), "nothing beside the pieces"


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_a_page_is_stored_as_sglang_says_it_is(layout: str) -> None:
    """In the order of its addresses, which is the same in all engines."""
    pool = host_pool(layout, seed=3)
    addresses, sizes = pool.get_page_buffer_meta(indices(4))
    expected = b"".join(ctypes.string_at(address, size) for address, size in zip(addresses, sizes, strict=True))
    assert b"".join(map(stored, pages_of(pool).lend_filled(indices(4)).buffers[0])) == expected


def test_pools_without_addresses_hand_out_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = host_pool("page_first", seed=2)

    def refuse(_: torch.Tensor) -> None:
        raise NotImplementedError("not in this layout")

    monkeypatch.setattr(pool, "get_page_buffer_meta", refuse)
    pages = pages_of(pool)
    assert isinstance(pages, FlatPages)
    lent = pages.lend_filled(indices(5, 6))
    copies = [stored(page[0]) for page in lent.buffers]
    assert copies == [page_bytes(pool, 5), page_bytes(pool, 6)]
    lent = pages.lend_empty(indices(7))
    copy = lent.buffers[0][0]
    assert isinstance(copy, memoryview)
    copy[:] = copies[0]
    lent.give_back()
    assert page_bytes(pool, 7) == copies[0]
    monkeypatch.setattr(pool, "get_dummy_flat_data_page", lambda: refuse(torch.empty(0)))
    with pytest.raises(ConfigError, match="hands out no pages"):
        pages_of(pool)


@pytest.mark.parametrize("places", [torch.arange(PAGE - 1), torch.arange(-1, PAGE - 1), torch.arange(PAGE) + 10**9])
@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_places_outside_of_the_pool_are_refused(layout: str, places: torch.Tensor) -> None:
    with pytest.raises(InvalidInputError):
        pages_of(host_pool(layout)).lend_filled(places)


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_a_page_that_ends_outside_of_the_pool_is_refused(layout: str) -> None:
    pool = host_pool(layout)
    with pytest.raises(InvalidInputError):
        pages_of(pool).lend_filled(torch.full((PAGE,), pool.size - 1))


def test_keys_and_values_of_all_layers_are_one_copy() -> None:
    for latent, shape in ((False, (6, 2)), (True, (6, 1))):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvtier_sglang.host_pages.MAX_PARTS", 1)
            pages = pages_of(host_pool("layer_first", latent=latent))
        (pieces,) = pages.lend_filled(indices(2)).buffers[0]
        assert isinstance(pieces, Pieces)
        (grid,) = pieces.batches(1 << 40)
        assert grid.shape[:2] == shape
