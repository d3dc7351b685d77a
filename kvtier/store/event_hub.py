"""Events of the tiers, to the streams of their tenants."""

import threading
from collections import deque
from dataclasses import dataclass

from kvtier.errors import LimitExceededError, UnavailableError
from kvtier.events import Event
from kvtier.identity.keys import TenantId


@dataclass(frozen=True, slots=True)
class EventBatch:
    """What a stream has not seen yet. `lost` keys were dropped before `events`."""

    events: tuple[Event, ...]
    lost: int


class Subscription:
    """One tenant's stream. `wait` is for one reader; the rest is for any thread."""

    def __init__(self, hub: "EventHub", tenant: TenantId, buffer: int) -> None:
        self.tenant = tenant
        self._hub = hub
        self._buffer = buffer
        self._changed = threading.Condition()
        self._events: deque[Event] = deque()  # guarded by _changed
        self._num_buffered = 0  # guarded by _changed; size of _events
        self._lost = 0  # guarded by _changed
        self._closed = False  # guarded by _changed

    def wait(self) -> EventBatch | None:
        """Blocks until there is something to tell; None when the subscription was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._lost or self._closed)
            if self._closed:
                return None
            batch = EventBatch(tuple(self._events), self._lost)
            self._events.clear()
            self._num_buffered = self._lost = 0
            return batch

    def push(self, event: Event) -> None:
        """Adds an event; drops the oldest ones when the buffer is full. Does not block."""
        with self._changed:
            self._events.append(event)
            self._num_buffered += _size(event)
            while self._num_buffered > self._buffer:
                size = _size(self._events.popleft())
                self._num_buffered -= size
                self._lost += size
            self._changed.notify()

    def close(self) -> None:
        """Ends the stream; `wait` returns None at once. Idempotent."""
        self._hub.forget(self)
        with self._changed:
            self._closed = True
            self._changed.notify()


class EventHub:
    """Hands every event to the subscriptions of its tenant, and to nobody else."""

    def __init__(self, *, max_streams: int, buffer: int) -> None:
        """
        :param max_streams: subscriptions at a time.
        :param buffer: keys kept per subscription.
        """
        self._max_streams = max_streams
        self._buffer = buffer
        self._lock = threading.Lock()
        self._subscriptions: tuple[Subscription, ...] = ()  # replaced under _lock, read without
        self._closed = False  # guarded by _lock

    def subscribe(self, tenant: TenantId) -> Subscription:
        """Events from now on. `LimitExceededError` when all streams are taken, `UnavailableError` after `close`."""
        with self._lock:
            if self._closed:
                raise UnavailableError("the pool is shutting down")
            if len(self._subscriptions) >= self._max_streams:
                raise LimitExceededError(f"max_event_streams: {self._max_streams} are open already; retry later")
            subscription = Subscription(self, tenant, self._buffer)
            self._subscriptions += (subscription,)
            return subscription

    def publish(self, event: Event) -> None:
        """An `EventSink`: splits the event by tenant. Costs nothing when nobody listens."""
        for subscription in self._subscriptions:
            keys = tuple(key for key in event.keys if key.startswith(subscription.tenant))
            if keys or not event.keys:
                subscription.push(Event(event.kind, event.tier, keys))

    def forget(self, subscription: Subscription) -> None:
        """Stops feeding `subscription`. Idempotent."""
        with self._lock:
            self._subscriptions = tuple(s for s in self._subscriptions if s is not subscription)

    def close(self) -> None:
        """Ends all streams and takes no new ones. Idempotent."""
        with self._lock:
            self._closed = True
            subscriptions = self._subscriptions
        for subscription in subscriptions:
            subscription.close()


def _size(event: Event) -> int:
    return max(1, len(event.keys))
