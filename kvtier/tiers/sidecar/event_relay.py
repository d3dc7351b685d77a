"""What happens in a tier process and the engine must hear of: events of tiers, and what counters have gained.

News are numbered and ride on answers. Answers come back through many threads; what they bring is applied in the order
of the numbers, so that an engine's picture of a tier never goes back in time.
"""

import threading
from collections import deque
from collections.abc import Iterator

import msgpack
from prometheus_client import Counter

from kvtier.clock import MONOTONIC, Clock
from kvtier.errors import InvalidInputError
from kvtier.events import Event, EventKind, EventSink, TierState
from kvtier.metrics import Levels, Metrics
from kvtier.tiers.sidecar.messages import MAX_BLOCKS, pack_keys, unpack_keys

_COUNT_EVERY_S = 0.05
"""Reading all counters takes 0.1 ms or so."""
_STATES = {EventKind(state.value): state for state in TierState}
_Gains = list[tuple[str, list[str], float]]
"""Counter, labels, what was added."""


class EventSender:
    """The tier process's end: gathers. Any thread; `on_event` does not block."""

    def __init__(self, metrics: Metrics, clock: Clock = MONOTONIC) -> None:
        """:param metrics: of the tiers in this process; counters and levels are reported, histograms are not."""
        self._counters, self._levels = _counters(metrics), metrics.levels
        self._clock = clock
        self._lock = threading.Lock()
        self._events: deque[Event] = deque()
        """Guarded by _lock, like the rest."""
        self._reported: dict[tuple[str, tuple[str, ...]], float] = {}
        self._told: Levels = {}
        """The levels as they were told last."""
        self._counted_at: float | None = None
        self._number = 0
        """The number of the news taken last; the first news have number 1."""

    def on_event(self, event: Event) -> None:
        """Notes a change of a tier's content."""
        with self._lock:
            self._events.append(event)

    def take(self, *, all_counts: bool = False) -> tuple[int, bytes]:
        """Number and content of what is new; 0 when nothing is. Some is left for the next time when it is much.

        :param all_counts: read the counters even if that was done a moment ago.
        """
        with self._lock:
            is_due = all_counts or self._is_due()
            events, gains = self._some_events(), self._gains() if is_due else []
            levels = self._changed_levels() if is_due else None
            if not events and not gains and levels is None:
                return 0, b""
            self._number += 1
            packed: bytes = msgpack.packb([events, gains, levels])
            return self._number, packed

    def _some_events(self) -> list[tuple[str, str, bytes]]:
        """The oldest events, packed. Caller holds _lock."""
        taken: list[tuple[str, str, bytes]] = []
        num_keys = 0
        while self._events and num_keys < MAX_BLOCKS:
            event = self._events.popleft()
            num_keys += 1 + len(event.keys)
            taken.append((event.kind.value, event.tier, pack_keys(event.keys)))
        return taken

    def _is_due(self) -> bool:
        """Whether counters and levels were read long enough ago. Caller holds _lock."""
        now = self._clock()
        if self._counted_at is not None and now - self._counted_at < _COUNT_EVERY_S:
            return False
        self._counted_at = now
        return True

    def _changed_levels(self) -> list[tuple[str, str, float]] | None:
        """All levels by name and tier; None where they are as they were told. Caller holds _lock."""
        levels = self._levels.values()
        if levels == self._told:
            return None
        self._told = levels
        return [(name, tier, value) for (name, tier), value in levels.items()]

    def _gains(self) -> _Gains:
        """Caller holds _lock."""
        gains: _Gains = []
        for name, counter in self._counters.items():
            for labels, value in _values(counter):
                gain = value - self._reported.get((name, labels), 0.0)
                if gain:
                    self._reported[name, labels] = value
                    gains.append((name, list(labels), gain))
        return gains


class EventReceiver:
    """The engine's end for one tier process: applies. Any thread."""

    def __init__(self, on_event: EventSink, metrics: Metrics) -> None:
        """
        :param on_event: called in the order of the changes; must not block.
        :param metrics: its counters gain what those of the same name in the tier process gain, and it has their states
            and levels.
        """
        self._on_event = on_event
        self._metrics = metrics
        self._counters = _counters(metrics)
        self._lock = threading.Lock()
        """Held while `on_event` is called, which takes no lock but its own: nothing else keeps the order."""
        self._early: dict[int, bytes] = {}
        """News that came before others with a lower number. Guarded by _lock, like the rest."""
        self._next = 1
        self._tiers: set[str] = set()
        """Names of the tiers that had events."""
        self._degraded: set[str] = set()
        """Names of the tiers that cannot do everything now."""
        self._over = False

    def take(self, number: int, packed: bytes) -> None:
        """Applies the news of an answer, and those that waited for them."""
        with self._lock:
            if self._over:
                return
            self._early[number] = packed
            while (ready := self._early.pop(self._next, None)) is not None:
                self._next += 1
                self._apply(ready)

    def end(self) -> None:
        """The process is gone: nothing of its tiers is known any more, and what still comes from it is ignored."""
        with self._lock:
            self._over = True
            self._metrics.levels.take({})
            for tier in sorted(self._tiers):
                self._on_event(Event(EventKind.CLEARED, tier))
            for tier in sorted(self._degraded):  # the next process begins anew
                self._note(Event(EventKind.WRITABLE, tier))

    def _apply(self, packed: bytes) -> None:
        """Caller holds _lock."""
        try:
            events, gains, levels = msgpack.unpackb(packed)
            for kind, tier, keys in events:
                self._tiers.add(tier)
                self._note(Event(EventKind(kind), tier, tuple(unpack_keys(keys))))
            for name, labels, gain in gains:
                (self._counters[name].labels(*labels) if labels else self._counters[name]).inc(gain)
            if levels is not None:
                self._metrics.levels.take({(name, tier): float(value) for name, tier, value in levels})
        except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
            raise InvalidInputError(f"news of the tier process: {error!r}") from error

    def _note(self, event: Event) -> None:
        """Caller holds _lock."""
        if event.kind in _STATES:
            self._metrics.set_state(event.tier, _STATES[event.kind])
            (self._degraded.discard if event.kind is EventKind.WRITABLE else self._degraded.add)(event.tier)
        self._on_event(event)


NOT_RELAYED = frozenset({"kvtier_tier_batch_seconds", "kvtier_tier_state"})
"""Metrics of tiers that are no counters. `Metered` takes the time in the engine; events tell it the states."""


def _counters(metrics: Metrics) -> dict[str, Counter]:
    """The counters of `metrics` by name. What is neither a counter nor in `NOT_RELAYED` would stay silent in a process
    of its own."""
    return {
        family.name: counter
        for counter in vars(metrics).values()
        if isinstance(counter, Counter)
        for family in counter.describe()
    }


def _values(counter: Counter) -> Iterator[tuple[tuple[str, ...], float]]:
    """Labels, in the order in which they were declared, and value of each child."""
    for family in counter.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                yield tuple(sample.labels.values()), sample.value
