"""`KvtierStorage`: SGLang's interface to storage backends, over the cache pool."""

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from kvtier.build.tiers import shared_tier
from kvtier.config import Config
from kvtier.errors import ConfigError
from kvtier.memory.pieces import Payload, Target
from kvtier.metrics import Metrics
from kvtier.system.logs import set_up_logs_within
from kvtier.system.quiet_log import QuietLog
from kvtier.tiers.base import TierOf
from kvtier_sglang import compat
from kvtier_sglang.copied_pages import CopiedPages
from kvtier_sglang.hits import usable_prefix
from kvtier_sglang.host_pages import page_size_of
from kvtier_sglang.identity import model_digest
from kvtier_sglang.metrics import StorageStats
from kvtier_sglang.page_keys import PageKeys
from kvtier_sglang.page_store import PageStore
from kvtier_sglang.pending_pages import PendingPages
from kvtier_sglang.pools import HostPools, StoredPool
from kvtier_sglang.settings import load_settings

_log = logging.getLogger(__name__)
_OWED_S = 120.0
"""How long a page waits for a pool that does not take it: a restart, with some room."""
_T = TypeVar("_T")
_Move = Callable[[StoredPool, Sequence[str], torch.Tensor, float], list[bool]]
"""Pages of a pool, their indices, and until when to begin."""


class KvtierStorage(HiCacheStorage):
    """Pages of SGLang's KV in the cache pool, found again by every engine that computes the same bytes.

    SGLang calls from one thread for queries, one for reads and one for writes. No call begins a transfer after half of
    `pool.call_timeout_s`, which each has for itself, and `cache.lookup_deadline_s` for its question; none raises. What
    fails is a miss, or a page that waits to be written again. Nobody touches SGLang's memory after a call. Once the
    model has other weights than those that its namespaces are of, all calls fail.

    A page that was written is True when the pool has it or when a copy waits for the pool; False when it is given up.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        """Called by SGLang. Does not wait for the pool.

        :param kwargs: nothing that matters here.
        :raises ConfigError: another SGLang, or a configuration that cannot be.
        """
        settings = load_settings(storage_config.extra_config or {})
        config = settings.config
        set_up_logs_within(config.log.level, config.log.format)
        keys = PageKeys(config)
        metrics = Metrics()
        self._stats = StorageStats(metrics, collects=storage_config.enable_storage_metrics)
        self._num_notes = compat.num_notes()
        """The number of SGLang's notes up to which the weights are those of `model`. Written whole: any thread."""
        model = model_digest(settings, storage_config.model_name)
        self._pools = HostPools(storage_config, model, is_zero_copy=settings.is_zero_copy)
        self._failed = QuietLog(_log)
        patience_s = config.pool.call_timeout_s / 2
        self._lock = threading.Lock()
        self._is_closed = False
        """Changed under _lock."""
        with contextlib.ExitStack() as stack:
            questions = config.pool.model_copy(update={"call_timeout_s": settings.question_s})
            queries = _open(stack, config.model_copy(update={"pool": questions}), metrics)
            data = _open(stack, config, metrics)
            self._store = PageStore(keys, queries=queries, data=data, stats=self._stats, patience_s=patience_s)
            self._owed = PendingPages(
                self._store.write_owed,
                capacity_bytes=config.host_bytes(),
                keep_s=_OWED_S,
                on_settled=lambda outcome: self._stats.count("any", "write", outcome),
            )
            self._copies = CopiedPages(self._store, self._pools, self._owed)
            stack.callback(lambda: self._owed.close(patience_s))
            self._stack = stack.pop_all()

    @property
    def metrics(self) -> Any:
        """The registry of all that is counted here."""
        return self._stats.registry

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """:raises ConfigError: pages of this host pool cannot be had."""
        super().register_mem_pool_host(mem_pool_host)
        self._pools.add(str(PoolName.KV), mem_pool_host)
        self._stats.begin(str(PoolName.KV))

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """One whose pages cannot be had is never there; it is logged."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._pools.add_side_pool(str(host_pool_name), host_pool)
        self._stats.begin(str(host_pool_name))

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many pages are there from the first one on without a gap."""
        return self._safely("query", len(keys), 0, lambda: self._present_prefix(keys))

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """How much of the prompt all pools together have, and where each ends. One round trip."""
        return self._safely(
            "query", len(keys), PoolTransferResult.empty(), lambda: self._usable(keys, pool_transfers or [])
        )

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Reads pages into the host pool. The first False ends it: pages after that are not read."""
        return self._of_anchor("read", self._read, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Writes pages of the host pool that the pool does not have."""
        return self._of_anchor("write", self._write, keys, host_indices)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """`batch_get_v1` of several pools."""
        return self._each("read", transfers, self._read)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """`batch_set_v1` of several pools."""
        return self._each("write", transfers, self._write)

    def get(self, key: str, target_location: Any | None = None, target_sizes: Any | None = None) -> torch.Tensor | None:
        """Copies a page into a tensor, a new one if none is given."""
        got: torch.Tensor | None = self.batch_get([key], None if target_location is None else [target_location])[0]
        return got

    def batch_get(
        self, keys: list[str], target_locations: Any | None = None, target_sizes: Any | None = None
    ) -> list[torch.Tensor | None]:
        """Copies pages into tensors. The first None ends it."""
        nothing: list[torch.Tensor | None] = [None] * len(keys)
        return self._safely("read", len(keys), nothing, lambda: self._copies.read(keys, target_locations))

    def set(
        self, key: str, value: Any | None = None, target_location: Any | None = None, target_sizes: Any | None = None
    ) -> bool:
        """Writes a page that is in a tensor."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Writes pages that are in tensors; whether all are kept."""
        return self._safely("write", len(keys), False, lambda: all(self._copies.write(keys, values or [])))

    def exists(self, key: str) -> bool:
        """Whether a page is there, by whichever way it was written."""
        return self._safely("query", 1, False, lambda: self._copies.is_there(key))

    def clear(self) -> None:
        """Has the pool forget what this process has written or found there. Other engines miss it, too."""

        def forget() -> None:
            self._owed.forget()
            self._store.clear()

        self._safely("clear", 0, None, forget)

    def get_stats(self) -> StorageMetrics:
        """What was transferred since the last call, for SGLang's own metrics."""
        self._stats.note_waiting(self._owed.waiting_bytes)
        self._stats.note_levels()
        return self._stats.drain()

    def flush(self, timeout_s: float) -> bool:
        """Waits until the pool has what waits for it; False: not in time."""
        return self._owed.flush(timeout_s)

    def close(self) -> None:
        """Writes what waits, begun within half of `pool.call_timeout_s`, and ends all connections. Idempotent."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if not was_closed:
            try:
                self._stack.close()
            except Exception:
                _log.exception("closing failed")

    def _safely(self, op: str, num_pages: int, failed: _T, call: Callable[[], _T]) -> _T:
        """What SGLang's threads are given: an answer, whatever happens."""
        if self._is_closed:
            return failed
        try:
            if op != "clear":
                self._require_same_weights()
            return call()
        except Exception as error:
            if not self._is_closed:
                self._failed.warning(f"a {op} of {num_pages} pages failed: {type(error).__name__}: {error}")
                _log.debug("%s failed", op, exc_info=True)
                self._stats.count("any", op, "refused", num_pages)
            return failed

    def _require_same_weights(self) -> None:
        num_notes = compat.num_notes()
        if compat.have_weights_changed(since=self._num_notes):
            raise ConfigError("the weights have changed, and what is in the pool is of those before")
        self._num_notes = num_notes

    def _present_prefix(self, keys: Sequence[str]) -> int:
        pool = self._pools.anchor
        present = self._store.present([(pool.kind, keys)])[0] if pool.kind is not None else []
        num_pages = _leading(present)
        self._stats.count(pool.name, "query", "hit", num_pages)
        self._stats.count(pool.name, "query", "miss", len(keys) - num_pages)
        self._stats.note_query(len(keys), num_pages, page_size_of(pool.host_pool))
        return num_pages

    def _usable(self, keys: Sequence[str], transfers: Sequence[PoolTransfer]) -> PoolTransferResult:
        pools = [self._pools.anchor, *(self._pools.get(str(transfer.name)) for transfer in transfers)]
        asked = [(pool.kind, keys) for pool in pools if pool is not None and pool.kind is not None]
        answers = iter(self._store.present(asked))
        present = [
            next(answers) if pool is not None and pool.kind is not None else [pool is not None] * len(keys)
            for pool in pools
        ]
        result = usable_prefix(present[0], [(each, there) for each, there in zip(transfers, present[1:], strict=True)])
        self._stats.count("all", "query", "hit", result.kv_hit_pages)
        self._stats.count("all", "query", "miss", len(keys) - result.kv_hit_pages)
        self._stats.note_query(len(keys), result.kv_hit_pages, page_size_of(self._pools.anchor.host_pool))
        return result

    def _of_anchor(self, op: str, move: _Move, keys: Sequence[str], indices: torch.Tensor) -> list[bool]:
        begin_by = self._store.begin_by()
        return self._safely(
            op, len(keys), [False] * len(keys), lambda: move(self._pools.anchor, keys, indices, begin_by)
        )

    def _each(self, op: str, transfers: Sequence[PoolTransfer], move: _Move) -> dict[str, list[bool]]:
        begin_by = self._store.begin_by()
        results: dict[str, list[bool]] = {}
        for transfer in transfers:
            failed = [False] * len(transfer.keys or ())
            moved = self._safely(op, len(failed), failed, partial(self._of_pool, transfer, move, begin_by))
            results.setdefault(transfer.name, []).extend(moved)
        return results

    def _of_pool(self, transfer: PoolTransfer, move: _Move, begin_by: float) -> list[bool]:
        pool, keys = self._pools.get(str(transfer.name)), transfer.keys or []
        return [False] * len(keys) if pool is None else move(pool, keys, transfer.host_indices, begin_by)

    def _read(self, pool: StoredPool, keys: Sequence[str], indices: torch.Tensor, begin_by: float) -> list[bool]:
        if pool.kind is None:
            return [True] * len(keys)
        got = self._store.read(pool.kind, keys, pool.lender(len(keys), indices, filled=False), begin_by)
        if pool is self._pools.anchor:
            self._stats.note_read(len(keys), _leading(got), page_size_of(pool.host_pool))
        return got

    def _write(self, pool: StoredPool, keys: Sequence[str], indices: torch.Tensor, begin_by: float) -> list[bool]:
        if pool.kind is None or not pool.is_writer:
            return [True] * len(keys)
        lend = pool.lender(len(keys), indices, filled=True)
        return self._store.write(pool.kind, keys, lend, begin_by, self._owed)


def _leading(present: Sequence[bool]) -> int:
    return next((i for i, there in enumerate(present) if not there), len(present))


def _open(stack: contextlib.ExitStack, config: Config, metrics: Metrics) -> TierOf[Payload, Target]:
    shared = stack.enter_context(shared_tier(config, [], metrics))
    assert shared is not None, "pool.address is there"
    return shared.tier
