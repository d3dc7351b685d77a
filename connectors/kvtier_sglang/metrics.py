"""What the backend did: counters of our own, and what SGLang collects from storage backends."""

import threading
from collections import deque

from prometheus_client import Counter, Gauge
from sglang.srt.observability.metrics_collector import StorageMetrics

from kvtier.build.tiers import POOL
from kvtier.clock import MONOTONIC
from kvtier.metrics import LEVELS_HELP, OPEN_BREAKERS, Metrics
from kvtier.offload import PrefixTokens
from kvtier.system.process_metrics import build_info

_LOOK_S = 1.0
_OF_POOLS = {
    "query": ("hit", "miss"),
    "read": ("hit", "miss", "previous"),
    "write": ("stored", "exists", "owed", "dropped"),
}
"""What may come of the pages of a pool, by what SGLang asks for."""
_OF_NO_POOL = [
    *(("all", "query", status) for status in ("hit", "miss")),
    *(("any", "write", status) for status in ("retried", "dropped")),
    *(("any", op, "refused") for op in ("query", "read", "write", "clear")),
]
"""What is counted for no single pool: what the name stands for, what SGLang asks for, and what comes of it."""
_MAX_SAMPLES = 1024
"""Batches between two looks of SGLang, which looks at every step."""


class StorageStats:
    """Counts pages. Any thread. In SGLang's processes, `--enable-metrics` shows the counters beside its own."""

    def __init__(self, metrics: Metrics, *, collects: bool) -> None:
        """
        :param metrics: those of the tier, whose registry the counters join.
        :param collects: whether anybody drains the samples.
        """
        self.registry = metrics.registry
        self._pages = Counter(
            "kvtier_sglang_pages",
            "Pages by what SGLang asked for (query, read, write) and what came of it: hit, miss; stored, exists, owed "
            "(tried again later), retried (and stored), dropped (not stored, or given up); refused (not understood); "
            "previous: of those that were read, under a previous secret",
            ["pool", "op", "status"],
            registry=self.registry,
        )
        self._waiting = Gauge(
            "kvtier_sglang_waiting_bytes",
            "Bytes of pages that the cache pool has not taken yet",
            registry=self.registry,
            multiprocess_mode="livesum",
        )
        self._prefix = PrefixTokens(self.registry)
        self._prefix.begin([POOL])
        for pool, op, status in _OF_NO_POOL:
            self._pages.labels(pool, op, status)
        self._levels, self._look_at_s = metrics.levels, 0.0
        # Not on the registry, which has the same names for those who read it here: SGLang's server reads files.
        self._breakers = Gauge(
            OPEN_BREAKERS, LEVELS_HELP[OPEN_BREAKERS], ["tier"], registry=None, multiprocess_mode="livesum"
        )
        self._breakers.labels(POOL).set(0)
        build_info(self.registry, multiprocess_mode="livemax")
        self._collects = collects
        self._lock = threading.Lock()
        self._samples: dict[str, deque[tuple[int, float]]] = {
            op: deque(maxlen=_MAX_SAMPLES) for op in ("read", "write")
        }
        """Pages and GB/s of batches since the last drain. Guarded by _lock."""

    def begin(self, pool: str) -> None:
        """Makes the samples of a pool's pages, so that they read 0 before any came."""
        for op, statuses in _OF_POOLS.items():
            for status in statuses:
                self._pages.labels(pool, op, status)

    def count(self, pool: str, op: str, status: str, amount: int = 1) -> None:
        """Counts pages."""
        if amount:
            self._pages.labels(pool, op, status).inc(amount)

    def note_query(self, num_asked: int, num_found: int, page_tokens: int) -> None:
        """A request asked for pages; the first ones were there without a gap."""
        self._prefix.note_lookup(num_asked, [POOL] * num_found, num_found, page_tokens)

    def note_read(self, num_asked: int, num_read: int, page_tokens: int) -> None:
        """Pages of keys and values were to be read, and the first ones have come."""
        self._prefix.note_load([POOL] * num_asked, num_read, page_tokens)

    def note_levels(self) -> None:
        """Sets the gauges that nobody asks for here, once a second at most."""
        if MONOTONIC() >= self._look_at_s:
            self._look_at_s = MONOTONIC() + _LOOK_S
            self._breakers.labels(POOL).set(self._levels.values().get((OPEN_BREAKERS, POOL), 0.0))

    def note_waiting(self, nbytes: int) -> None:
        """Sets the gauge."""
        self._waiting.set(nbytes)

    def sample(self, op: str, num_pages: int, nbytes: int, seconds: float) -> None:
        """Notes a batch that was read or written."""
        if self._collects and num_pages and seconds > 0:
            with self._lock:
                self._samples[op].append((num_pages, nbytes / seconds / 1e9))

    def drain(self) -> StorageMetrics:
        """What was noted since the last call, as SGLang takes it."""
        with self._lock:
            read, written = (list(self._samples[op]) for op in ("read", "write"))
            for samples in self._samples.values():
                samples.clear()
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in read],
            backup_pgs=[pages for pages, _ in written],
            prefetch_bandwidth=[speed for _, speed in read],
            backup_bandwidth=[speed for _, speed in written],
        )
