"""Publishes batches over ZeroMQ as vLLM does: PUB for what happens, ROUTER for what a subscriber has missed.

A message is `topic, sequence number (8 bytes, big endian), batch`. A subscriber that sends the second
socket an empty frame and a number gets all batches from that one on that are still kept, each after an empty frame, and
then `END_OF_REPLAY`.
"""

import contextlib
import logging
import socket
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from kvtier.config.events import EventsConfig
from kvtier.errors import ConfigError
from kvtier_engine.events.event_form import END_OF_REPLAY

if TYPE_CHECKING:
    import zmq

_INBOX = "inproc://kvtier-events"
_END = b""
"""What stands in place of a batch once the last one is sent."""
_CLOSE_S = 2.0
"""What the last batches get at the end of the process."""
_LINGER_MS = 200
_MOST_ASKERS, _REPLAYED_AT_ONCE = 64, 256
_REPLAY_TICK_MS = 5
"""How often an asker that has no room is tried again."""
log = logging.getLogger(__name__)


class EventPublisher:
    """`publish` and `has_room` are for the engine's thread; the sockets belong to a thread of their own.

    Nobody waits for a subscriber: what it does not take is dropped for it alone, and it sees a gap in the numbers.
    """

    def __init__(self, config: EventsConfig) -> None:
        """Binds, and starts the thread.

        :param config: with an endpoint.
        :raises ConfigError: pyzmq is not installed, or an endpoint cannot be bound.
        """
        try:
            import zmq
        except ImportError as error:
            raise ConfigError(
                "events.endpoint: needs pyzmq: in a checkout of kvtier, pip install '.[events]'"
            ) from error
        self._zmq, self._context, self._topic = zmq, zmq.Context(), config.topic.encode()
        self._most_bytes, self._num_bytes = int(config.replay_bytes), 0
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        """What can be replayed, by number. Publisher's thread only, as are `_askers` and the sockets but `_outbox`."""
        self._askers: dict[bytes, int] = {}
        """The number of the next batch for each listener that wants batches again, by its identity."""
        try:
            self._inbox, self._outbox = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
            # The waiting batches are half here, half there.
            self._inbox.set_hwm(max(1, config.queue_batches // 2))
            self._outbox.set_hwm(max(1, config.queue_batches // 2))
            self._inbox.bind(_INBOX)
            self._outbox.connect(_INBOX)
            self._publications = self._bound(zmq.PUB, "endpoint", config.endpoint or "", config.queue_batches)
            self._replays = None
            if config.replay_endpoint is not None:
                self._replays = self._bound(zmq.ROUTER, "replay_endpoint", config.replay_endpoint, config.queue_batches)
                self._replays.setsockopt(zmq.ROUTER_MANDATORY, 1)  # says when an asker has no room
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._next_number = 0
        """Engine's thread only."""
        self._thread = threading.Thread(target=self._run, name="kvtier-events", daemon=True)
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """Whether the next batch will be taken: not while too many wait for the publishing thread."""
        return bool(self._outbox.poll(0, self._zmq.POLLOUT))

    def publish(self, batch: bytes) -> None:
        """Queues a batch under the next number. Only where it `has_room`; does not block."""
        self._outbox.send_multipart([self._next_number.to_bytes(8, "big"), batch], self._zmq.NOBLOCK)
        self._next_number += 1

    def close(self) -> None:
        """Sends what is queued, within two seconds, and ends. Idempotent."""
        if self._outbox.closed:
            return
        self._outbox.setsockopt(self._zmq.SNDTIMEO, int(1000 * _CLOSE_S))
        with contextlib.suppress(self._zmq.Again):
            self._outbox.send(_END)
        self._thread.join(_CLOSE_S)
        self._outbox.close(linger=0)
        if not self._thread.is_alive():
            self._context.destroy(linger=_LINGER_MS)

    def _bound(self, kind: int, key: str, endpoint: str, queue_batches: int) -> "zmq.Socket[bytes]":
        if _is_served(endpoint):  # ZeroMQ would take the path away from who listens there
            raise ConfigError(f"events.{key}: somebody listens on {endpoint} already; choose another one")
        bound = self._context.socket(kind)
        bound.setsockopt(self._zmq.IPV6, 1)
        bound.set_hwm(queue_batches)
        try:
            bound.bind(endpoint)
        except self._zmq.ZMQError as error:
            raise ConfigError(f"events.{key}: cannot listen on {endpoint}: {error}; choose another one") from error
        log.info("KV events: %s is %s", key, bound.getsockopt_string(self._zmq.LAST_ENDPOINT))
        return bound

    def _run(self) -> None:
        poller = self._zmq.Poller()
        for each in (self._inbox, self._replays):
            if each is not None:
                poller.register(each, self._zmq.POLLIN)
        wait_ms: int | None = None
        while True:
            ready = dict(poller.poll(wait_ms))
            if self._inbox in ready:
                message = self._inbox.recv_multipart()
                if message == [_END]:
                    return
                self._send(*message)
            if self._replays is not None:
                if self._replays in ready:
                    self._take_asker(self._replays)
                have_room = [self._replay(self._replays, asker) for asker in tuple(self._askers)]
                wait_ms = None if not self._askers else 0 if any(have_room) else _REPLAY_TICK_MS

    def _send(self, number: bytes, batch: bytes) -> None:
        self._publications.send_multipart([self._topic, number, batch])  # drops for those that are too slow
        self._kept[int.from_bytes(number, "big")] = batch
        self._num_bytes += len(batch)
        while self._num_bytes > self._most_bytes:
            self._num_bytes -= len(self._kept.popitem(last=False)[1])

    def _take_asker(self, replays: "zmq.Socket[bytes]") -> None:
        asker, *rest = replays.recv_multipart()
        if len(rest) == 2 and not rest[0] and len(rest[1]) == len(END_OF_REPLAY):
            if asker in self._askers or len(self._askers) < _MOST_ASKERS:
                self._askers[asker] = int.from_bytes(rest[1], "big")
        else:
            log.debug("a replay was asked for with frames that are no number")

    def _replay(self, replays: "zmq.Socket[bytes]", asker: bytes) -> bool:
        """Sends some of what an asker wants; more when others had their turn. False where it had no room for all."""
        number, end = max(self._askers.pop(asker), next(iter(self._kept), 0)), next(reversed(self._kept), -1) + 1
        stop = min(number + _REPLAYED_AT_ONCE, end)
        try:
            while number < stop:
                message = [asker, b"", self._topic, number.to_bytes(8, "big"), self._kept[number]]
                replays.send_multipart(message, self._zmq.NOBLOCK, copy=False)
                number += 1
            if number >= end:
                replays.send_multipart([asker, b"", b"", END_OF_REPLAY, b""], self._zmq.NOBLOCK)
                return True
        except self._zmq.Again:
            self._askers[asker] = number
            return False
        except self._zmq.ZMQError:  # it has gone
            return True
        self._askers[asker] = number
        return True


def _is_served(endpoint: str) -> bool:
    """Whether a process listens at this path, if it is one."""
    if not endpoint.startswith("ipc:///"):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(endpoint.removeprefix("ipc://")) == 0
