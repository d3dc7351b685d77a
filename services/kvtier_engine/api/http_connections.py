"""How many clients may be connected at a time: so many that files, tiers and new requests still find a descriptor."""

import asyncio
import logging
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from kvtier.net.serving_tls import note_without_tls
from kvtier.system.quiet_log import QuietLog

BACKLOG = 128
"""Clients that wait to be accepted. asyncio accepts as many in a row, before any of them can be refused, and logs as
many errors when descriptors run out."""
_MOST_CONNECTIONS = 1024

log = logging.getLogger(__name__)


def bounded_protocol(open_files: int) -> type[H11Protocol]:
    """uvicorn's protocol, for its `http` setting. A connection too many cuts the one that has been idle for the longest
    time, or is cut itself where all have a request.

    uvicorn's own `limit_concurrency` keeps idle connections open and refuses everybody's requests instead.

    :param open_files: how many descriptors the process may have; connections get half, and at most 1,024.
    """
    most = min(_MOST_CONNECTIONS, open_files // 2)

    class BoundedProtocol(H11Protocol):
        """Event loop only."""

        by_idleness: ClassVar[dict["BoundedProtocol", None]] = {}
        """Open connections in the order in which they came, or ended their last request."""
        quiet: ClassVar[QuietLog] = QuietLog(log)

        @property
        def is_idle(self) -> bool:
            """Whether no request of it is being answered."""
            return self.cycle is None or self.cycle.response_complete

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.by_idleness[self] = None
            if len(self.by_idleness) > most:
                cut = next((each for each in self.by_idleness if each.is_idle), self)
                del self.by_idleness[cut]
                cut.transport.abort()
                self.quiet.warning(
                    f"{most} clients of the engine are connected: idle ones are cut, or new ones refused"
                )

        def data_received(self, data: bytes) -> None:
            if self.scheme == "http" and not self.headers:
                note_without_tls(data)
            super().data_received(data)

        def _unsupported_upgrade_warning(self) -> None:
            """uvicorn's, which recommends a library for WebSockets: here such a request is answered as any other."""

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self in self.by_idleness:
                del self.by_idleness[self]
                self.by_idleness[self] = None

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self.by_idleness.pop(self, None)

    return BoundedProtocol
