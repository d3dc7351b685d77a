"""Counters and states of the tiers, handed over explicitly: nothing is registered by an import.

The hierarchy and the services have counters of their own beside them, on the same registry.

Names follow Prometheus: `_total` counts since the start of the process, `_seconds` are histograms.
Labels never carry tenants, keys or paths, so the number of series stays small.
"""

import threading
from functools import partial
from typing import Protocol
from weakref import WeakSet

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvtier.events import TierState

_BATCH_BUCKETS_S = (5e-6, 2e-5, 1e-4, 5e-4, 2e-3, 0.01, 0.05, 0.2, 1.0, 5.0, 30.0)


class Breaker(Protocol):
    """What says whether a neighbour is left alone."""

    @property
    def is_open(self) -> bool:
        """Whether it is, at the moment."""


class OpenBreakers:
    """Gauge `kvtier_open_breakers`, by tier: how many neighbours are left alone at a scrape. Any thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._gauge = Gauge(
            "kvtier_open_breakers",
            "Neighbours of a tier (a pool, servers of a Redis) that are left alone at the moment because they failed; "
            "their blocks miss",
            ["tier"],
            registry=registry,
        )
        self._lock = threading.Lock()
        self._of: dict[str, WeakSet[Breaker]] = {}
        """Guarded by _lock."""

    def watch(self, tier: str, breaker: Breaker) -> None:
        """Counts this one, too, for as long as somebody uses it."""
        with self._lock:
            if tier not in self._of:
                self._of[tier] = WeakSet()
                self._gauge.labels(tier).set_function(partial(self._count, tier))
            self._of[tier].add(breaker)

    def _count(self, tier: str) -> float:
        with self._lock:
            breakers = list(self._of[tier])
        return sum(breaker.is_open for breaker in breakers)


class Metrics:
    """Counters and the registry that exports them. One per process or per test; any thread.

    A change costs about 1 us, so hot paths keep the child that `labels(...)` returns.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """:param registry: where to register; a new one by default. Two `Metrics` cannot share one."""
        self.registry = registry if registry is not None else CollectorRegistry()
        self.tier_blocks = Counter(
            "kvtier_tier_blocks",
            "Blocks that a tier was asked for, by verb and answer (hit, miss, pending; stored, exists, full, ...). "
            "Blocks read from where they lie in its memory count as lease, too",
            ["tier", "op", "status"],
            registry=self.registry,
        )
        self.tier_bytes = Counter(
            "kvtier_tier_bytes",
            "Payload bytes of blocks read (hit) and written (stored)",
            ["tier", "op"],
            registry=self.registry,
        )
        self.tier_batch_seconds = Histogram(
            "kvtier_tier_batch_seconds",
            "Time of one batch call to a tier",
            ["tier", "op"],
            buckets=_BATCH_BUCKETS_S,
            registry=self.registry,
        )
        self.evicted_blocks = Counter(
            "kvtier_tier_evicted_blocks",
            "Blocks that a tier gave up to make room",
            ["tier"],
            registry=self.registry,
        )
        self.path_bytes = Counter(
            "kvtier_path_bytes",
            "Payload bytes to and from the cache pool by path (shm, unix, tcp, tls, grpc)",
            ["path", "op"],
            registry=self.registry,
        )
        self.corrupt_blocks = Counter(
            "kvtier_corrupt_blocks",
            "Stored blocks found torn, altered or in another's place; each was answered as a miss and dropped",
            ["tier"],
            registry=self.registry,
        )
        self.unopened_blocks = Counter(
            "kvtier_unopened_blocks",
            "Stored blocks that could not be opened, each answered as a miss, by why: altered (or a wrong key), plain, "
            "unknown_key, newer_key, changed_before (it was sealed)",
            ["tier", "reason"],
            registry=self.registry,
        )
        self.pins = Counter(
            "kvtier_pins",
            "Blocks that the cache pool was asked to pin, by answer (pinned, miss, full; not_offered: it has no pins)",
            ["tier", "status"],
            registry=self.registry,
        )
        self.disk_bytes = Counter(
            "kvtier_disk_record_bytes",
            "Bytes of records that a disk tier has written: new ones, and those moved to be kept (write amplification)",
            ["tier", "why"],
            registry=self.registry,
        )
        self.codec_bytes = Counter(
            "kvtier_codec_bytes",
            "Payload bytes that a tier packed for its medium, before the codec (raw) and behind it (stored)",
            ["tier", "codec", "form"],
            registry=self.registry,
        )
        self.torn_blocks = Counter(
            "kvtier_disk_torn_blocks",
            "Records found incomplete at start: they were being written when the process ended",
            ["tier"],
            registry=self.registry,
        )
        self.degraded = Counter(
            "kvtier_tier_degraded",
            "Times a failing medium made a tier read_only, or switched it off: while it hangs, or for good",
            ["tier", "state"],
            registry=self.registry,
        )
        self.tier_state = Gauge(
            "kvtier_tier_state",
            "1 for what a tier's medium lets it do (writable, read_only, off), 0 for the others",
            ["tier", "state"],
            registry=self.registry,
        )
        self.io_errors = Counter(
            "kvtier_io_errors",
            "Failed operations of a tier's medium by error name (ENOSPC, EIO, ...); each became a miss or a lost write",
            ["tier", "op", "error"],
            registry=self.registry,
        )
        self.open_breakers = OpenBreakers(self.registry)
        self.foreign_files = Counter(
            "kvtier_foreign_files",
            "Files in a tier's directory that kvtier did not make; left alone, and not counted against the capacity",
            ["tier"],
            registry=self.registry,
        )

    def set_state(self, tier: str, state: TierState) -> None:
        """Sets `tier_state`. A scrape at the same moment may see the one before, or none."""
        for other in TierState:
            self.tier_state.labels(tier, other.value).set(other is state)
