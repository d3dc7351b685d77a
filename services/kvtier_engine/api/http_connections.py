"""How many clients may be connected at a time: so many that files, tiers and new requests still find a descriptor."""

import asyncio
import logging

from uvicorn.protocols.http.h11_impl import H11Protocol

from kvtier.clock import MONOTONIC

BACKLOG = 128
"""Clients that wait to be accepted. asyncio accepts as many in a row, before any of them can be refused, and logs as
many errors when descriptors run out."""
_MOST_CONNECTIONS = 1024
_SECONDS_BETWEEN_WARNINGS = 60.0

log = logging.getLogger(__name__)


def bounded_protocol(open_files: int) -> type[H11Protocol]:
    """uvicorn's protocol, for its `http` setting; connections that are too many are closed at once.

    uvicorn's own `limit_concurrency` keeps idle connections open and refuses everybody's requests instead.

    :param open_files: how many descriptors the process may have; connections get half, and at most 1,024.
    """
    most = min(_MOST_CONNECTIONS, open_files // 2)

    class BoundedProtocol(H11Protocol):
        warned_at = -_SECONDS_BETWEEN_WARNINGS  # event loop only

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > most:
                transport.abort()
                self._warn()

        @classmethod
        def _warn(cls) -> None:
            if MONOTONIC() - cls.warned_at >= _SECONDS_BETWEEN_WARNINGS:
                cls.warned_at = MONOTONIC()
                log.warning("%d clients are connected: more are refused; raise the limit on open files, if low", most)

    return BoundedProtocol
