"""Clients that take nothing or send nothing for too long are cut, whatever else they hold."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from kvtier.clock import MONOTONIC
from kvtier_gateway.metrics import GatewayMetrics

_LOOKS = 4
"""Looks in the time that a client has."""


class Stall:
    """One wait for a client after the other. Event loop only; costs 0.1 us."""

    __slots__ = ("request", "since_s")

    def __init__(self, request: web.BaseRequest) -> None:
        self.request = request
        self.since_s: float | None = None

    def begin(self) -> None:
        """The client has to do something from now on."""
        self.since_s = MONOTONIC()

    def end(self) -> None:
        """It has done it."""
        self.since_s = None


class Stalls:
    """Looks at all waits now and then: a timer for each would cost more than what is sent. Event loop only."""

    def __init__(self, timeout_s: float, metrics: GatewayMetrics) -> None:
        """:param timeout_s: how long a client may take."""
        self._timeout_s, self._metrics = timeout_s, metrics
        self._watched: set[Stall] = set()

    @contextmanager
    def watched(self, request: web.BaseRequest) -> Iterator[Stall]:
        """A client that is waited for within."""
        stall = Stall(request)
        self._watched.add(stall)
        try:
            yield stall
        finally:
            self._watched.discard(stall)

    async def run(self) -> None:
        """Cuts those that take too long, until it is cancelled."""
        while True:
            await asyncio.sleep(self._timeout_s / _LOOKS)
            latest_s = MONOTONIC() - self._timeout_s
            for stall in list(self._watched):
                transport = stall.request.transport
                if stall.since_s is not None and stall.since_s < latest_s and transport is not None:
                    self._metrics.stalled.inc()
                    transport.abort()
