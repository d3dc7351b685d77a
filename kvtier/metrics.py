"""Counters and states of the tiers, handed over explicitly: nothing is registered by an import.

The hierarchy and the services have counters of their own beside them, on the same registry.

Names follow Prometheus: `_total` counts since the start of the process, `_seconds` are histograms.
Labels never carry tenants, keys or paths, so the number of series stays small.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol
from weakref import WeakSet

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtier.errors import KvtierError, SealFault
from kvtier.events import TierState

_BATCH_BUCKETS_S = (5e-6, 2e-5, 1e-4, 5e-4, 2e-3, 0.01, 0.05, 0.2, 1.0, 5.0, 30.0)


_OF_NEIGHBOURS = [
    (op, error)
    for op in ("lookup", "read", "write")
    for error in ("BreakerOpen", "UnavailableError", "UnauthenticatedError")
]
_KNOWN_ERRORS = {
    "disk": [("write", "ENOSPC"), ("write", "EIO"), ("read", "EIO"), ("any", "ETIMEDOUT")],
    "pool": [
        *_OF_NEIGHBOURS,
        *((op, "TierProcess") for op in ("lookup", "read", "write")),
        *(("probe", error) for error in ("UnavailableError", "UnauthenticatedError")),
    ],
    "redis": _OF_NEIGHBOURS,
}
"""What is to be expected of a tier, by its name: operations, and the errors that they end with. There are others."""


class Breaker(Protocol):
    """What says whether a neighbour is left alone."""

    @property
    def is_open(self) -> bool:
        """Whether it is, at the moment."""


class Usage(Protocol):
    """How full a tier is: `kvtier.tiers.base.Usage`."""

    @property
    def num_blocks(self) -> int:
        """The number of blocks that the tier holds."""

    @property
    def used_bytes(self) -> int:
        """What they take."""

    @property
    def capacity_bytes(self) -> int:
        """What the tier may take."""


OPEN_BREAKERS, _HELD, _USED, _CAPACITY = LEVELS = (
    "kvtier_open_breakers",
    "kvtier_tier_held_blocks",
    "kvtier_tier_used_bytes",
    "kvtier_tier_capacity_bytes",
)
"""The gauges of `TierLevels`; each has the label `tier`."""
LEVELS_HELP = {
    OPEN_BREAKERS: "Neighbours of a tier (a pool, servers of a Redis) that are left alone at the moment because they "
    "failed; their blocks miss",
    _HELD: "Blocks that a tier holds",
    _USED: "Bytes that a tier's blocks take",
    _CAPACITY: "Bytes that a tier may take",
}
Levels = dict[tuple[str, str], float]
"""Values of gauges by name and tier."""


class TierLevels(Collector):
    """Gauges of tiers that are asked at a scrape, or that another process has told of (`LEVELS`). Any thread.

    A scrape takes as long as the answers do: only tiers that answer without a network may be watched for their usage.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        """Registers itself."""
        self._lock = threading.Lock()
        self._breakers: dict[str, WeakSet[Breaker]] = {}
        """Guarded by _lock, like the rest."""
        self._usages: dict[str, Callable[[], Usage]] = {}
        self._told: Levels = {}
        """What the process that has the tiers last said."""
        registry.register(self)

    def watch_breaker(self, tier: str, breaker: Breaker) -> None:
        """Counts this breaker of the tier, too, for as long as somebody uses it."""
        with self._lock:
            self._breakers.setdefault(tier, WeakSet()).add(breaker)

    def forget_breaker(self, tier: str, breaker: Breaker) -> None:
        """Counts it no more, whoever still has it: its neighbour is none any longer."""
        with self._lock:
            self._breakers[tier].discard(breaker)

    def watch_usage(self, tier: str, ask: Callable[[], Usage]) -> None:
        """Asks for the tier's usage from now on. A `KvtierError` of `ask` leaves the tier out of that scrape."""
        with self._lock:
            self._usages[tier] = ask

    def take(self, told: Levels) -> None:
        """Takes over what another process says of its tiers, in place of what it said before; nothing: it is gone."""
        with self._lock:
            # Its breakers are gone with it, but the series goes on.
            self._told = {key: 0.0 for key in self._told if key[0] == OPEN_BREAKERS} | told

    def values(self) -> Levels:
        """Asks all tiers how full they are, and counts the open breakers."""
        with self._lock:
            values = dict(self._told)
            breakers = [(tier, breaker) for tier, of_tier in self._breakers.items() for breaker in of_tier]
            values |= {(OPEN_BREAKERS, tier): values.get((OPEN_BREAKERS, tier), 0.0) for tier in self._breakers}
            usages = dict(self._usages)
        for tier, breaker in breakers:
            values[OPEN_BREAKERS, tier] += breaker.is_open
        for tier, ask in usages.items():
            with contextlib.suppress(KvtierError):
                usage = ask()
                values |= {
                    (_HELD, tier): usage.num_blocks,
                    (_USED, tier): usage.used_bytes,
                    (_CAPACITY, tier): usage.capacity_bytes,
                }
        return values

    def collect(self) -> Iterator[Metric]:
        """Yields the gauges for one scrape."""
        families = {name: GaugeMetricFamily(name, text, labels=["tier"]) for name, text in LEVELS_HELP.items()}
        for (name, tier), value in self.values().items():
            families[name].add_metric([tier], value)
        yield from families.values()


class Metrics:
    """Counters and the registry that exports them. One per process or per test; any thread.

    A change costs about 1 us, so hot paths keep the child that `labels(...)` returns.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """:param registry: where to register; a new one by default. Two `Metrics` cannot share one."""
        self.registry = registry if registry is not None else CollectorRegistry()
        self._lock = threading.Lock()
        self._with_state: set[str] = set()
        """Tiers that have a state. Guarded by _lock."""
        counter = partial(Counter, registry=self.registry)
        self.tier_blocks = counter(
            "kvtier_tier_blocks",
            "Blocks that a tier was asked for, by verb and answer (hit, miss, pending; stored, exists, full, ...). "
            "Blocks read from where they lie in its memory count as lease, too. Of a pool's tiers, a block counts once "
            "for a client's lookup or read, and only in tiers that were asked because none above had it",
            ["tier", "op", "status"],
        )
        self.tier_bytes = counter(
            "kvtier_tier_bytes", "Payload bytes of blocks read (hit) and written (stored)", ["tier", "op"]
        )
        self.tier_batch_seconds = Histogram(
            "kvtier_tier_batch_seconds",
            "Time of one batch call to a tier",
            ["tier", "op"],
            buckets=_BATCH_BUCKETS_S,
            registry=self.registry,
        )
        self.evicted_blocks = counter("kvtier_tier_evicted_blocks", "Blocks that a tier gave up to make room", ["tier"])
        self.path_bytes = counter(
            "kvtier_path_bytes",
            "Payload bytes to and from the cache pool by path (shm, unix, tcp, tls, grpc)",
            ["path", "op"],
        )
        self.path_seconds = counter(
            "kvtier_path_seconds", "Time of the calls that moved those bytes, added up over all threads", ["path", "op"]
        )
        self.corrupt_blocks = counter(
            "kvtier_corrupt_blocks",
            "Stored blocks found torn, altered or in another's place; each was answered as a miss and dropped",
            ["tier"],
        )
        self.unopened_blocks = counter(
            "kvtier_unopened_blocks",
            "Stored blocks that could not be opened, each answered as a miss, by why: altered (or a wrong key), plain, "
            "unknown_key, newer_key, changed_before (it was sealed)",
            ["tier", "reason"],
        )
        self.pins = counter(
            "kvtier_pins",
            "Blocks that the cache pool was asked to pin, by answer (pinned, miss, full; not_offered: it has no pins)",
            ["tier", "status"],
        )
        self.disk_bytes = counter(
            "kvtier_disk_record_bytes",
            "Bytes of records that a disk tier has written: new ones, and those moved to be kept (write amplification)",
            ["tier", "why"],
        )
        self.codec_bytes = counter(
            "kvtier_codec_bytes",
            "Payload bytes that a tier packed for its medium, before the codec (raw) and behind it (stored)",
            ["tier", "codec", "form"],
        )
        self.torn_blocks = counter(
            "kvtier_disk_torn_blocks",
            "Records found incomplete at start: they were being written when the process ended",
            ["tier"],
        )
        self.degraded = counter(
            "kvtier_tier_degraded",
            "Times a failing medium made a tier read_only, or switched it off: while it hangs, or for good",
            ["tier", "state"],
        )
        self.tier_state = Gauge(
            "kvtier_tier_state",
            "1 for what a tier's medium lets it do (writable, read_only, off), 0 for the others",
            ["tier", "state"],
            registry=self.registry,
        )
        self.io_process_restarts = counter(
            "kvtier_io_process_restarts", "Tier processes that ended or were ended and had to be replaced"
        )
        self.io_errors = counter(
            "kvtier_io_errors",
            "Failed operations of a tier's medium by error name (ENOSPC, EIO, ...); each became a miss or a lost write",
            ["tier", "op", "error"],
        )
        self.levels = TierLevels(self.registry)
        self.foreign_files = counter(
            "kvtier_foreign_files",
            "Files in a tier's directory that kvtier did not make; left alone, and not counted against the capacity",
            ["tier"],
        )

    def begin(self, tier: str) -> None:
        """Makes the samples of what may go wrong with a tier, so that they read 0 before anything has."""
        self.corrupt_blocks.labels(tier)
        self.evicted_blocks.labels(tier)
        if tier in _KNOWN_ERRORS:
            for fault in SealFault:
                self.unopened_blocks.labels(tier, fault.value)
        if tier == "disk":
            self._begin_disk(tier)
        for op, error in _KNOWN_ERRORS.get(tier, ()):
            self.io_errors.labels(tier, op, error)

    def set_state(self, tier: str, state: TierState) -> None:
        """Sets `tier_state`. A scrape at the same moment may see the one before, or none."""
        with self._lock:
            self._set_state(tier, state)

    def _begin_disk(self, tier: str) -> None:
        for state in (TierState.READ_ONLY, TierState.OFF):
            self.degraded.labels(tier, state.value)
        for why in ("new", "moved"):
            self.disk_bytes.labels(tier, why)
        self.torn_blocks.labels(tier)
        self.foreign_files.labels(tier)
        with self._lock:
            if tier not in self._with_state:
                self._set_state(tier, TierState.WRITABLE)

    def _set_state(self, tier: str, state: TierState) -> None:
        """Caller holds _lock."""
        self._with_state.add(tier)
        for other in TierState:
            self.tier_state.labels(tier, other.value).set(other is state)
