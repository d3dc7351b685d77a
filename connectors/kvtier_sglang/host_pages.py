"""Pages of SGLang's host memory as buffers that the pool reads into and writes from.

Three ways, by what a host pool offers:

- **direct**: a page is in a few pieces (keys and values of all layers: `page_first`, `page_first_direct`, `page_head`;
  one piece of latent attention; a state and its convolutions). Each piece is a block of the pool by itself, in a
  namespace of its own, so that it goes straight between the two memories, without a copy between. One block of all
  pieces would need a pool that gathers.
- **gathered**: a page is in a piece or two of each layer (`layer_first`). As blocks, these would be some dozens of keys
  for every page, so they are brought together in a staging buffer: one copy more, and one system call for a batch.
- **flat**: a host pool that does not say where its pages are hands out copies.
"""

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvtier.copy_ranges import Ranges, copy_from, copy_to
from kvtier.errors import ConfigError, InvalidInputError

MAX_PARTS = 8
"""Pieces of a page that are worth blocks of their own."""
_STAGING_BYTES = 32 << 20
_DIRECT_BYTES = 64 << 20
"""Of pages that are read or written at a time: what came in time counts, batch by batch."""
_Places = tuple[list[int], list[int]]
"""Addresses and sizes of pieces, all of one page, then all of the next."""


@dataclass(frozen=True, slots=True)
class Lent:
    """Buffers for some pages, until `give_back`."""

    buffers: list[list[memoryview]]
    """Of each page, its parts."""
    give_back: Callable[[], None]
    """Whoever has read into the buffers has the pages where SGLang looks for them, after this."""


class HostPages(Protocol):
    """The pages of one host pool. Any thread; `indices` are those of whole pages, page by page, as SGLang counts."""

    @property
    def kind(self) -> str:
        """Which of the three ways."""

    @property
    def part_bytes(self) -> tuple[int, ...]:
        """Of each part of a page."""

    @property
    def batch_pages(self) -> int:
        """Pages that can be lent at a time."""

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
    return DirectPages(host_pool, parts) if len(parts) <= MAX_PARTS else GatheredPages(host_pool, parts)


def page_size_of(host_pool: Any) -> int:
    """Indices of a page: more than the host pool's rows where several ranks share them."""
    return int(getattr(host_pool, "logical_page_size", None) or host_pool.page_size or 1)


class DirectPages:
    """Host memory itself."""

    kind = "direct"

    def __init__(self, host_pool: Any, part_bytes: Sequence[int]) -> None:
        """:param host_pool: the caller's, as long as anything is lent."""
        self._pool = host_pool
        self.part_bytes = tuple(part_bytes)
        self.batch_pages = max(1, _DIRECT_BYTES // sum(part_bytes))

    def lend_filled(self, indices: torch.Tensor) -> Lent:
        """See `HostPages`."""
        addresses, sizes = _places(self._pool, indices, self.part_bytes)
        views = [_view(address, size) for address, size in zip(addresses, sizes, strict=True)]
        num_parts = len(self.part_bytes)
        return Lent([views[start : start + num_parts] for start in range(0, len(views), num_parts)], _nothing)

    def lend_empty(self, indices: torch.Tensor) -> Lent:
        """See `HostPages`."""
        return self.lend_filled(indices)


class GatheredPages:
    """Copies in staging buffers, which are made when needed and kept."""

    kind = "gathered"

    def __init__(self, host_pool: Any, piece_bytes: Sequence[int]) -> None:
        """:param piece_bytes: of each piece of a page."""
        self._pool, self._piece_bytes = host_pool, tuple(piece_bytes)
        self.part_bytes: tuple[int, ...] = (sum(piece_bytes),)
        self.batch_pages = max(1, _STAGING_BYTES // self.part_bytes[0])
        self._idle: SimpleQueue[npt.NDArray[np.uint8]] = SimpleQueue()

    def lend_filled(self, indices: torch.Tensor) -> Lent:
        """See `HostPages`."""
        staging = self._take()
        pieces = self._pieces(indices)
        staged = self._staged(staging, pieces)
        if not copy_from(pieces, staged):
            _copy_each(pieces, staged)
        return Lent(self._buffers(staging, indices), lambda: self._idle.put(staging))

    def lend_empty(self, indices: torch.Tensor) -> Lent:
        """See `HostPages`."""
        staging = self._take()
        pieces = self._pieces(indices)

        def scatter() -> None:
            staged = self._staged(staging, pieces)
            if not copy_to(pieces, staged):
                _copy_each(staged, pieces)
            self._idle.put(staging)

        return Lent(self._buffers(staging, indices), scatter)

    def _take(self) -> npt.NDArray[np.uint8]:
        with suppress(Empty):
            return self._idle.get_nowait()
        return np.zeros(self.batch_pages * self.part_bytes[0], dtype=np.uint8)

    def _pieces(self, indices: torch.Tensor) -> Ranges:
        return np.array(_places(self._pool, indices, self._piece_bytes), dtype=np.uint64).T.copy()

    def _staged(self, staging: npt.NDArray[np.uint8], pieces: Ranges) -> Ranges:
        """The places of these pieces in a staging buffer: one after the other."""
        staged = pieces.copy()
        staged[:, 0] = staging.ctypes.data + np.cumsum(pieces[:, 1]) - pieces[:, 1]
        return staged

    def _buffers(self, staging: npt.NDArray[np.uint8], indices: torch.Tensor) -> list[list[memoryview]]:
        size, whole = self.part_bytes[0], staging.data
        num_pages = len(indices) // page_size_of(self._pool)
        return [[whole[start : start + size]] for start in range(0, num_pages * size, size)]


class FlatPages:
    """The host pool's own copies."""

    kind = "flat"

    def __init__(self, host_pool: Any) -> None:
        self._pool = host_pool
        blank: torch.Tensor = host_pool.get_dummy_flat_data_page()
        self.part_bytes: tuple[int, ...] = (blank.nbytes,)
        self.batch_pages = max(1, _STAGING_BYTES // self.part_bytes[0])

    def lend_filled(self, indices: torch.Tensor) -> Lent:
        """See `HostPages`."""
        pages = [self._pool.get_data_page(index, flat=True) for index in self._firsts(indices)]
        return Lent([[tensor_bytes(page.contiguous())] for page in pages], _nothing)

    def lend_empty(self, indices: torch.Tensor) -> Lent:
        """See `HostPages`."""
        firsts = self._firsts(indices)
        pages = [self._pool.get_dummy_flat_data_page() for _ in firsts]

        def put() -> None:
            for index, page in zip(firsts, pages, strict=True):
                self._pool.set_from_flat_data_page(index, page)

        return Lent([[tensor_bytes(page)] for page in pages], put)

    def _firsts(self, indices: torch.Tensor) -> list[int]:
        _require_indices(self._pool, indices)
        return [int(index) for index in indices[:: page_size_of(self._pool)].tolist()]


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, which it keeps alive."""
    view: npt.NDArray[np.uint8] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return view.data


def _places(host_pool: Any, indices: torch.Tensor, piece_bytes: Sequence[int]) -> _Places:
    """Of the pieces of these pages. `InvalidInputError`: the host pool says what it did not say of its first page."""
    _require_indices(host_pool, indices)
    addresses, sizes = host_pool.get_page_buffer_meta(indices)
    num_pages = len(indices) // page_size_of(host_pool)
    if len(addresses) != num_pages * len(piece_bytes) or list(sizes) != list(piece_bytes) * num_pages:
        raise InvalidInputError(f"{len(addresses)} pieces of {num_pages} pages: {len(piece_bytes)} each were expected")
    return addresses, sizes


def _require_indices(host_pool: Any, indices: torch.Tensor) -> None:
    """Raises `InvalidInputError` for indices that are outside of the host pool, or of a part of a page."""
    if len(indices) % page_size_of(host_pool):
        raise InvalidInputError(f"{len(indices)} indices: pages have {page_size_of(host_pool)}")
    size = int(getattr(host_pool, "logical_size", None) or host_pool.size)
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < size:
        raise InvalidInputError(f"indices from {int(indices.min())} to {int(indices.max())} of {size}")


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview(_bytes_type(nbytes).from_address(address)).cast("B")


@lru_cache(maxsize=64)
def _bytes_type(nbytes: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    return ctypes.c_ubyte * nbytes


def _copy_each(source: Ranges, into: Ranges) -> None:
    """Where the system does not copy many ranges at once."""
    for (origin, nbytes), (target, _) in zip(source.tolist(), into.tolist(), strict=True):
        ctypes.memmove(target, origin, nbytes)


def _nothing() -> None:
    """What is lent is host memory itself."""
