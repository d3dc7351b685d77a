"""Events in the order of the changes, delivered without any lock held."""

import logging
import threading
from collections import deque
from collections.abc import Iterable

from kvtier.events import ABOUT_TIERS, Event, EventKind, EventSink
from kvtier.identity.keys import StoreKey

_log = logging.getLogger(__name__)


class EventQueue:
    """`post` under the tier's lock, next to the change; `flush` after the lock was released.

    One thread at a time delivers. Another that flushes meanwhile returns at once and its events are
    delivered by the first, so an event may reach the sink shortly after the call that caused it. What
    a sink raises is logged, not passed on: the change has happened.
    """

    def __init__(self, tier: str, sink: EventSink) -> None:
        """:param tier: the name in the events."""
        self._tier = tier
        self._sink = sink
        self._lock = threading.Lock()
        self._events: deque[Event] = deque()
        """Posted, not delivered. Guarded by _lock."""
        self._delivering = False
        """A thread is in `flush`. Guarded by _lock."""

    def post(self, kind: EventKind, keys: Iterable[StoreKey] = ()) -> None:
        """Queues one event, unless it is about no key at all."""
        event = Event(kind, self._tier, tuple(keys))
        if event.keys or kind in ABOUT_TIERS:
            with self._lock:
                self._events.append(event)

    def flush(self) -> None:
        """Delivers what is queued. Hold no lock."""
        with self._lock:
            if self._delivering or not self._events:
                return
            self._delivering = True
        while (event := self._next()) is not None:
            try:
                self._sink(event)
            except Exception:
                _log.exception("event sink of tier %s failed", self._tier, extra={"tier": self._tier})

    def _next(self) -> Event | None:
        with self._lock:
            if self._events:
                return self._events.popleft()
            self._delivering = False
            return None
