"""Pages of SGLang's host memory as buffers that the pool reads into and writes from.

Three ways, by what a host pool offers:

- **direct**: a page is in a few pieces (keys and values of all layers: `page_first`, `page_first_direct`, `page_head`;
  one piece of latent attention; a state and its convolutions). Each piece is a block of the pool by itself, in a
  namespace of its own, so that it goes straight between the two memories, without a copy between. One block of all
  pieces would need a pool that gathers.
- **gathered**: a page is in a piece or two of each layer (`layer_first`). As blocks, these would be some dozens of keys
  for every page, so all are one block, which the pool's client brings together while it copies.
- **flat**: a host pool that does not say where its pages are hands out copies.
"""

import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvtier.errors import ConfigError, InvalidInputError
from kvtier.memory.pieces import Pieces, Target

MAX_PARTS = 8
"""Pieces of a page that are worth blocks of their own."""
_COPIED_BYTES = 32 << 20
"""What copies of pages take at a time."""
_BATCH_BYTES = 64 << 20
"""The bytes of pages that are read or written at a time without a copy: what came in time counts, batch by batch."""
_DIRECT, _GATHERED, _FLAT = "direct", "gathered", "flat"
_Places = tuple[list[int], list[int]]
"""Addresses and sizes of pieces, all of one page, then all of the next."""


@dataclass(frozen=True, slots=True)
class Lent:
    """Buffers for some pages, until `give_back`."""

    buffers: Sequence[Sequence[Target]]
    """The buffers of each page, one for each of its parts."""
    give_back: Callable[[], None]
    """Puts what was read into the buffers where SGLang looks for the pages, and gives the buffers back."""


@dataclass(frozen=True, slots=True)
class PageForm:
    """What a page is in the pool: engines in which it differs never meet."""

    kind: str
    """Which of the three ways."""
    piece_bytes: tuple[int, ...]
    """The bytes of each piece of a page, in the host pool's own order, in which they are stored."""
    part_bytes: tuple[int, ...]
    """The bytes of each block that a page is stored as: a piece, or all pieces."""

    @property
    def batch_pages(self) -> int:
        """Pages in one transfer."""
        most = _COPIED_BYTES if self.kind == _FLAT else _BATCH_BYTES
        return max(1, most // max(1, sum(self.part_bytes)))


class HostPages(Protocol):
    """The pages of one host pool. Any thread; `indices` are those of whole pages, page by page, as SGLang counts."""

    @property
    def form(self) -> PageForm:
        """What pages are in the pool."""

    def lend_filled(self, indices: torch.Tensor) -> Lent:
        """Buffers with the pages' bytes, to write from."""

    def lend_empty(self, indices: torch.Tensor) -> Lent:
        """Buffers to read into."""


def pages_of(host_pool: Any) -> HostPages:
    """How pages of this host pool are best reached. `ConfigError`: in no way."""
    try:
        addresses, sizes = host_pool.get_page_buffer_meta(torch.arange(page_size_of(host_pool), dtype=torch.int64))
    except (NotImplementedError, ValueError):
        # In this layout, or ever; copies may be had nevertheless.
        try:
            return FlatPages(host_pool)
        except NotImplementedError as error:
            raise ConfigError(f"{type(host_pool).__name__} hands out no pages to store: {error}") from error
    parts = [int(size) for size in sizes]
    if not parts or len(addresses) != len(parts):
        raise ConfigError(f"{type(host_pool).__name__} names {len(addresses)} places and {len(parts)} sizes of a page")
    return DirectPages(host_pool, parts) if len(parts) <= MAX_PARTS else GatheredPages(host_pool, addresses, parts)


def page_size_of(host_pool: Any) -> int:
    """Indices of a page: more than the host pool's rows where several ranks share them."""
    return int(getattr(host_pool, "logical_page_size", None) or host_pool.page_size or 1)


class DirectPages:
    """Host memory itself."""

    def __init__(self, host_pool: Any, part_bytes: Sequence[int]) -> None:
        """:param host_pool: the caller's, as long as anything is lent."""
        self._pool = host_pool
        self.form = PageForm(_DIRECT, tuple(part_bytes), tuple(part_bytes))

    def lend_filled(self, indices: torch.Tensor) -> Lent:
        """Lends the host memory of these pages itself, to write from: nothing is copied."""
        addresses, sizes = _places(self._pool, indices, self.form.piece_bytes)
        views = [_view(address, size) for address, size in zip(addresses, sizes, strict=True)]
        num_parts = len(self.form.part_bytes)
        return Lent([views[start : start + num_parts] for start in range(0, len(views), num_parts)], _nothing)

    def lend_empty(self, indices: torch.Tensor) -> Lent:
        """Lends the host memory of these pages itself, to read into: nothing is copied."""
        return self.lend_filled(indices)


class GatheredPages:
    """Host memory itself, in pieces."""

    def __init__(self, host_pool: Any, addresses: Sequence[int], piece_bytes: Sequence[int]) -> None:
        """:param addresses: of the pieces of any page; where the others' are is asked for when it matters."""
        self._pool, self.form = host_pool, PageForm(_GATHERED, tuple(piece_bytes), (sum(piece_bytes),))
        self._offsets = np.array(addresses, dtype=np.int64) - addresses[0]
        self._grids = tuple(_grids(self._offsets.tolist(), piece_bytes))

    def lend_filled(self, indices: torch.Tensor) -> Lent:
        """Lends the pieces of these pages in host memory, to write from: nothing is copied."""
        pages = (Pieces([grid.of_page(page) for grid in self._grids]) for page in self._pages(indices))
        return Lent([[page] for page in pages], _nothing)

    def lend_empty(self, indices: torch.Tensor) -> Lent:
        """Lends the pieces of these pages in host memory, to read into: nothing is copied."""
        return self.lend_filled(indices)

    def _pages(self, indices: torch.Tensor) -> list[int]:
        """Returns the address of each page's first piece. `InvalidInputError`: its other pieces lie elsewhere than
        expected."""
        addresses, _ = _places(self._pool, indices, self.form.piece_bytes)
        pieces = np.array(addresses, dtype=np.int64).reshape(-1, len(self._offsets))
        if not (pieces == pieces[:, :1] + self._offsets).all():
            raise InvalidInputError("pieces of pages lie otherwise than those of the first page")
        return list(map(int, pieces[:, 0]))


class _Grid(NamedTuple):
    """Groups of pieces of one size: keys and values of every layer, or just the layers."""

    shape: tuple[int, int, int]
    """Groups, pieces of each, bytes of each."""
    steps: tuple[int, int]
    """The bytes from one group to the next, and from one piece of a group to the next; in any direction."""
    first: int
    """The bytes from the page's first piece to the grid's first one; `lowest` counts from there, too."""
    lowest: int
    span_bytes: int
    """The bytes from `lowest` to the end of the grid's last piece."""

    @classmethod
    def of(cls, offsets: Sequence[int], num_groups: int, num_pieces: int, nbytes: int) -> "_Grid":
        """:param offsets: of the pieces from the first one on."""
        ours = offsets[: num_groups * num_pieces]
        group_step = offsets[num_pieces] - offsets[0] if num_groups > 1 else 0
        step = offsets[1] - offsets[0] if num_pieces > 1 else 0
        lowest = min(ours)
        return cls((num_groups, num_pieces, nbytes), (group_step, step), ours[0], lowest, max(ours) + nbytes - lowest)

    def of_page(self, page: int) -> npt.NDArray[np.uint8]:
        """:param page: address of its first piece."""
        memory = _view(page + self.lowest, self.span_bytes)
        return np.ndarray(self.shape, np.uint8, memory, self.first - self.lowest, (*self.steps, 1))


def _grids(offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[_Grid]:
    """Divides the pieces of a page, in order, into as few grids as may be."""
    while offsets:
        num_alike = next((i for i, size in enumerate(sizes) if size != sizes[0]), len(sizes))
        alike = offsets[:num_alike]
        num_pieces = _run([[offset] for offset in alike])
        num_groups = _run([alike[at : at + num_pieces] for at in range(0, num_alike - num_pieces + 1, num_pieces)])
        if num_groups == 1:  # a batch of copies is made of groups
            num_groups, num_pieces = num_pieces, 1
        yield _Grid.of(offsets, num_groups, num_pieces, sizes[0])
        offsets, sizes = offsets[num_groups * num_pieces :], sizes[num_groups * num_pieces :]


def _run(groups: Sequence[Sequence[int]]) -> int:
    """How many of these, from the first one on, follow one another at equal distances as they are."""
    steps = [{b - a for a, b in zip(one, other, strict=True)} for one, other in itertools.pairwise(groups)]
    is_one = [len(step) == 1 and step == steps[0] for step in steps]
    return 1 + next((i for i, one in enumerate(is_one) if not one), len(steps))


class FlatPages:
    """The host pool's own copies."""

    def __init__(self, host_pool: Any) -> None:
        self._pool = host_pool
        blank: torch.Tensor = host_pool.get_dummy_flat_data_page()
        self.form = flat_form(blank.nbytes)

    def lend_filled(self, indices: torch.Tensor) -> Lent:
        """Lends copies of these pages, to write from."""
        pages = [self._pool.get_data_page(index, flat=True) for index in self._firsts(indices)]
        return Lent([[tensor_bytes(page.contiguous())] for page in pages], _nothing)

    def lend_empty(self, indices: torch.Tensor) -> Lent:
        """Lends blank pages to read into; `give_back` copies them into the host pool."""
        firsts = self._firsts(indices)
        pages = [self._pool.get_dummy_flat_data_page() for _ in firsts]

        def put() -> None:
            for index, page in zip(firsts, pages, strict=True):
                self._pool.set_from_flat_data_page(index, page)

        return Lent([[tensor_bytes(page)] for page in pages], put)

    def _firsts(self, indices: torch.Tensor) -> list[int]:
        _require_indices(self._pool, indices)
        return [int(index) for index in indices[:: page_size_of(self._pool)].tolist()]


def flat_form(nbytes: int) -> PageForm:
    """Returns the form of pages that are copied as a whole, each so long."""
    return PageForm(_FLAT, (nbytes,), (nbytes,))


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, which it keeps alive."""
    view: npt.NDArray[np.uint8] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return view.data


def _places(host_pool: Any, indices: torch.Tensor, piece_bytes: Sequence[int]) -> _Places:
    """Returns addresses and sizes of the pieces of these pages. `InvalidInputError`: not the pieces of the first
    page."""
    _require_indices(host_pool, indices)
    addresses, sizes = host_pool.get_page_buffer_meta(indices)
    num_pages = len(indices) // page_size_of(host_pool)
    if len(addresses) != num_pages * len(piece_bytes) or list(sizes) != list(piece_bytes) * num_pages:
        raise InvalidInputError(f"{len(addresses)} pieces of {num_pages} pages: {len(piece_bytes)} each were expected")
    return addresses, sizes


def _require_indices(host_pool: Any, indices: torch.Tensor) -> None:
    """Raises `InvalidInputError` for pages that are outside of the host pool, or indices of a part of one."""
    page_size = page_size_of(host_pool)
    if len(indices) % page_size:
        raise InvalidInputError(f"{len(indices)} indices: pages have {page_size}")
    if not len(indices):
        return
    size = int(getattr(host_pool, "logical_size", None) or host_pool.size)
    # A page goes on from its first index, whatever the others say.
    first, last = int(indices.min()), max(int(indices.max()), int(indices[::page_size].max()) + page_size - 1)
    if not 0 <= first <= last < size:
        raise InvalidInputError(f"indices from {first} to {last} of {size}")


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview(_bytes_type(nbytes).from_address(address)).cast("B")


@lru_cache(maxsize=64)
def _bytes_type(nbytes: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    return ctypes.c_ubyte * nbytes


def _nothing() -> None:
    """What is lent is host memory itself."""
