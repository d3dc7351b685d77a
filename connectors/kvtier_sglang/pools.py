"""The host pools of an engine whose pages are kept, each under the namespaces of what its bytes are."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName

from kvtier.errors import ConfigError, InvalidInputError
from kvtier_sglang import compat
from kvtier_sglang.host_pages import FlatPages, HostPages, Lent, PageForm, flat_form, page_size_of, pages_of
from kvtier_sglang.identity import namespaces_of
from kvtier_sglang.page_kinds import PageKind
from kvtier_sglang.page_store import Lend

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredPool:
    """One host pool of SGLang, and what its pages are kept as."""

    name: str
    host_pool: Any
    is_writer: bool
    """False where another rank writes the same."""
    pages: HostPages | None
    """The pages of this host pool. None: other host pools hold the bytes."""
    kind: PageKind | None
    """The kind of `pages`. None: other host pools hold the bytes."""

    def lender(self, num_pages: int, indices: torch.Tensor | None, *, filled: bool) -> Lend:
        """Buffers for the pages that these indices name, some at a time. `InvalidInputError`: not as many as pages."""
        assert self.pages is not None
        pages, page_size = self.pages, page_size_of(self.host_pool)
        if indices is None or len(indices) != num_pages * page_size:
            raise InvalidInputError(f"{0 if indices is None else len(indices)} indices of {num_pages} pages")
        rows = indices.detach().cpu().reshape(num_pages, page_size)

        def lend(places: Sequence[int]) -> Lent:
            some = rows[list(places)].flatten()
            return pages.lend_filled(some) if filled else pages.lend_empty(some)

        return lend

    def blank_page(self) -> torch.Tensor:
        """Returns an empty page, as the host pool makes them for copies."""
        page: torch.Tensor = self.host_pool.get_dummy_flat_data_page()
        return page


class HostPools:
    """All host pools that SGLang has registered. Registered before they are used; read by any thread."""

    def __init__(self, config: HiCacheStorageConfig, model: bytes, *, is_zero_copy: bool) -> None:
        """
        :param model: digest of all that decides KV besides the pools' form.
        :param is_zero_copy: False: KV comes and goes as copies of pages.
        """
        self._config, self._model, self._is_zero_copy = config, model, is_zero_copy
        self._pools: dict[str, StoredPool] = {}
        """Written whole."""

    @property
    def anchor(self) -> StoredPool:
        """The pool of KV. `InvalidInputError`: none yet."""
        anchor = self._pools.get(str(PoolName.KV))
        if anchor is None:
            raise InvalidInputError("no host pool is registered")
        return anchor

    def get(self, name: str) -> StoredPool | None:
        """None: not registered, or its pages cannot be had."""
        return self._pools.get(name)

    def add(self, name: str, host_pool: Any) -> None:
        """Registers a pool; SGLang does that of KV twice. `ConfigError`: its pages cannot be had, or never all."""
        known = self._pools.get(name)
        if known is not None and known.host_pool is host_pool:
            return
        self._require_all_written(name, host_pool)
        pages: HostPages | None = None
        if not compat.holds_no_bytes(host_pool):
            is_copied = name == PoolName.KV and not self._is_zero_copy
            pages = FlatPages(host_pool) if is_copied else pages_of(host_pool)
        is_mine = self._config.is_storage_writer or not self._is_replicated(host_pool)
        kind = None if pages is None else self._kind(name, host_pool, pages.form)
        self._pools[name] = StoredPool(name, host_pool, is_mine, pages, kind)
        if pages is not None and kind is not None:
            _log.info(
                "kvtier keeps pages of host pool %s in namespace %s, %s, %s bytes each",
                name, kind.namespaces[0].hex(), pages.form.kind, "+".join(map(str, kind.part_bytes)),
            )  # fmt: skip

    def add_side_pool(self, name: str, host_pool: Any) -> None:
        """Registers a pool beside KV: one whose pages cannot be had is never there, and so is all that needs it.

        `ConfigError`: they can be had, but not all of them are ever written.
        """
        self._require_all_written(name, host_pool)
        try:
            self.add(name, host_pool)
        except ConfigError as error:
            _log.error("nothing is found that needs host pool %s: %s", name, str(error))

    def flat_kind(self, nbytes: int) -> PageKind:
        """Returns the kind of copies of whole pages of KV, that long."""
        anchor = self.anchor
        return self._kind(anchor.name, anchor.host_pool, flat_form(nbytes))

    def _require_all_written(self, name: str, host_pool: Any) -> None:
        """Raises `ConfigError` for a pool that is each rank's own, where SGLang has only some of the ranks write it."""
        config = self._config
        some_write = config.is_mla_model and config.tp_size > config.dcp_size and not compat.is_written_by_all(name)
        if some_write and not compat.holds_no_bytes(host_pool) and not self._is_replicated(host_pool):
            raise ConfigError(
                f"each of the {config.tp_size} tensor-parallel ranks has its own share in host pool {name} "
                f"({type(host_pool).__name__}), and beside latent attention SGLang has the first rank alone write it: "
                "nothing would ever hit. Leave out speculative decoding with such a draft model, or this backend"
            )

    def _is_replicated(self, host_pool: Any) -> bool:
        return compat.is_replicated(host_pool, is_mla_model=self._config.is_mla_model)

    def _kind(self, name: str, host_pool: Any, form: PageForm) -> PageKind:
        namespaces = namespaces_of(host_pool, name, form, self._config, self._model)
        return PageKind(name, tuple(each.id for each in namespaces), form.part_bytes, form.batch_pages)
