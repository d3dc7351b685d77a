"""Listens to one engine's KV events, in order and without gaps."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from kvtier.clock import MONOTONIC
from kvtier.system.quiet_log import QuietLog
from kvtier_gateway.events.batches import events_in
from kvtier_gateway.events.block_names import BlockNames
from kvtier_gateway.routing.values import BlocksCleared, KvEvent

_REPLAY_S = 5.0
"""How long an engine may take for each message of a replay."""
_END = b"\xff" * 8
_HIGH_WATER = 100_000
"""Messages that wait for us; beyond, ZeroMQ drops them, and we see that by the numbers."""
_MOST_BYTES = 256 << 20
"""The bytes that one message may have."""
_PAUSE_S = 1.0
_SETTLED_S = 1.0
"""How long after a connection an engine surely knows what is subscribed."""
_AT_ONCE_S = 0.005
"""How long batches are taken without letting requests have their turn."""
_log = logging.getLogger(__name__)
OnEvent = Callable[[KvEvent], None]


class Subscription:
    """One engine's events. Event loop only.

    Whoever listens is told to forget everything where a gap cannot be closed: what an engine has is then learned anew,
    as blocks come and go.
    """

    def __init__(self, context: Any, endpoint: str, replay: str | None, names: BlockNames, on_event: OnEvent) -> None:
        """
        :param context: a `zmq.asyncio.Context`; stays the caller's.
        :param endpoint: of the engine's PUB socket.
        :param replay: of its ROUTER socket; None: gaps stay.
        :param names: of this engine's blocks; taken over.
        """
        self._context, self._endpoint, self._replay, self._on_event = context, endpoint, replay, on_event
        self._names = names
        self._warn = QuietLog(_log)
        self._next: int | None = None
        """The number of the next batch; None before the first."""
        self._last: int | None = None
        """The number that was published last, as far as it was heard when it was."""
        self.num_batches = self.num_gaps = 0

    async def run(self) -> None:
        """Listens until it is cancelled."""
        import zmq

        while True:
            with contextlib.closing(self._context.socket(zmq.SUB)) as socket:
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
                socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
                watching = asyncio.create_task(self._watch(socket.get_monitor_socket(zmq.EVENT_CONNECTED)))
                try:
                    socket.connect(self._endpoint)
                    socket.subscribe(b"")
                    await self._catch_up()
                    await self._listen(socket)
                except zmq.ZMQError as error:
                    self._warn.warning(f"KV events of {self._endpoint} cannot be listened to: {error}")
                finally:
                    watching.cancel()
                    socket.disable_monitor()
            await asyncio.sleep(_PAUSE_S)

    async def _watch(self, monitor: Any) -> None:
        """Begins anew with each connection after the first: another process may be there, whose numbers may go on where
        those of the one before have ended. Catches up once more a while after each connection: what an engine publishes
        before it knows of the subscription, and no batch follows, nobody would hear of."""
        is_first = is_settled = True
        while True:
            try:
                async with asyncio.timeout(None if is_settled else _SETTLED_S):
                    await monitor.recv_multipart()
            except TimeoutError:
                is_settled = True
                await self._catch_up()
                continue
            if not is_first:
                self._next = self._last = None
                self._forget()
            is_first = is_settled = False

    async def _listen(self, socket: Any) -> None:
        turn_ends_s = MONOTONIC() + _AT_ONCE_S
        while True:
            frames = await socket.recv_multipart()
            if len(frames) == 3:
                await self._take(int.from_bytes(frames[1], "big"), frames[2])
            if MONOTONIC() > turn_ends_s:
                await asyncio.sleep(0)
                turn_ends_s = MONOTONIC() + _AT_ONCE_S

    async def _take(self, number: int, batch: bytes) -> None:
        if self._last is not None and number <= self._last:  # the engine has begun anew
            self._next = None
            self._forget()
        self._last = number
        if self._next is None or number > self._next:
            await self._catch_up()
        if self._next is not None and number < self._next:
            return  # heard in a replay
        if self._next is not None and number > self._next:
            self.num_gaps += 1
            self._forget()
        self._believe(number, batch)

    def _believe(self, number: int, batch: bytes) -> None:
        self._next = number + 1
        self.num_batches += 1
        try:
            for event in events_in(batch, self._names):
                self._on_event(event)
        except ValueError as error:
            self._warn.warning(f"KV events of {self._endpoint}: {error}; what is on this engine is learned anew")
            self._forget()

    def _forget(self) -> None:
        self._names.cleared()
        self._on_event(BlocksCleared())

    async def _catch_up(self) -> None:
        """Asks for what was published since the last batch, or at all."""
        if self._replay is None:
            return
        import zmq

        with contextlib.closing(self._context.socket(zmq.DEALER)) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._replay)
            await socket.send_multipart([b"", (self._next or 0).to_bytes(8, "big")])
            try:
                while True:
                    async with asyncio.timeout(_REPLAY_S):
                        frames = await socket.recv_multipart()
                    number, batch = frames[-2], frames[-1]
                    if number == _END:
                        return
                    count = int.from_bytes(number, "big")
                    if self._next is None or count >= self._next:
                        self._believe(count, batch)
            except TimeoutError:
                self._warn.warning(f"KV events of {self._replay}: no replay in time; what was missed stays unknown")
