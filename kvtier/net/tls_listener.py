"""Accepts connections for a server of an event loop, and makes their TLS handshakes: bounded in number and in time."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable

from kvtier.system.open_files import open_files_limit
from kvtier.system.quiet_log import QuietLog

_HANDSHAKE_S = 5.0
_MOST_HANDSHAKES = 256
_PAUSE_S = 0.1
"""How long nobody is accepted after a failure: most often there are no descriptors left."""
_log = QuietLog(logging.getLogger(__name__))


class TlsListener:
    """Hands connections to a server once their handshakes are made. Event loop only.

    Whoever connects and sends nothing holds a descriptor for some seconds at the most. One such connection too many
    cuts the one that has waited for the longest time: an honest handshake takes milliseconds.
    """

    def __init__(
        self, listening: socket.socket, context: ssl.SSLContext, server: Callable[[], asyncio.BaseProtocol]
    ) -> None:
        """Begins. At most 256 handshakes are made at a time, for an eighth of the process's descriptors.

        :param listening: is closed by `close`.
        :param server: makes the protocol that a connection has from its handshake on.
        """
        listening.setblocking(False)
        self._listening, self._context, self._server = listening, context, server
        self._most = max(1, min(_MOST_HANDSHAKES, open_files_limit() // 8))
        self._handshakes: dict[asyncio.Task[None], None] = {}
        """They are in the order in which they began."""
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    async def close(self) -> None:
        """Accepts no more connections, closes the socket for them, and gives up those without TLS. Idempotent."""
        tasks = [self._accepting, *self._handshakes]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        self._listening.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._listening)
            except OSError as error:
                _log.warning(f"no client can be accepted: {error}")
                await asyncio.sleep(_PAUSE_S)
                continue
            if len(self._handshakes) >= self._most:
                oldest = next(iter(self._handshakes))
                del self._handshakes[oldest]
                oldest.cancel()
                _log.warning(f"{self._most} clients are connected without a TLS handshake: the oldest ones are cut")
            task = loop.create_task(self._shake_hands(accepted))
            self._handshakes[task] = None
            task.add_done_callback(lambda ended: self._handshakes.pop(ended, None))
            await asyncio.sleep(0)  # or the accepted socket would have no owner when its task is cancelled

    async def _shake_hands(self, accepted: socket.socket) -> None:
        with contextlib.suppress(OSError):  # told by the context; or the client has gone, or takes too long
            await asyncio.get_running_loop().connect_accepted_socket(
                self._server, accepted, ssl=self._context, ssl_handshake_timeout=_HANDSHAKE_S
            )
