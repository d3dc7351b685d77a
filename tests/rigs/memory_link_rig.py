"""A pool on this host that says what a test wants."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvtier.net.stream import PlainStream
from kvtier.protocol.block import Fields
from kvtier.protocol.block_socket import FrameSocket
from kvtier.testing.blocks import TENANT

WAIT_S = 10.0
Serve = Callable[[FrameSocket, Fields], None]


def greet(frames: FrameSocket) -> None:
    hello, _ = frames.receive_head(deadline=time.monotonic() + WAIT_S)
    greeting = {"versions": [1], "version": 1, "tenant": TENANT, "lease_ms": 1000, "max_held_bytes": 1 << 20}
    answer(frames, hello, **greeting)


def answer(frames: FrameSocket, request: Fields, descriptors: tuple[int, ...] = (), **fields: object) -> None:
    header = {"id": request.number("id"), "result": "ok", **fields}
    frames.send_frame(header, deadline=time.monotonic() + WAIT_S, descriptors=descriptors)


class Pool:
    """A pool that says what a test wants, over every connection in turn."""

    def __init__(self, path: Path, serve: Serve) -> None:
        self._serve = serve
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self.address = f"unix:{path}"
        self.num_connections = 0
        self._connections: list[FrameSocket] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with ThreadPoolExecutor() as threads, contextlib.suppress(OSError):
            while True:
                connected, _ = self._listener.accept()
                self.num_connections += 1
                frames = FrameSocket(PlainStream(connected))
                self._connections.append(frames)
                threads.submit(self._converse, frames)

    def _converse(self, frames: FrameSocket) -> None:
        with contextlib.suppress(OSError):
            greet(frames)
            while frames.wait():
                request, _ = frames.receive_head(deadline=time.monotonic() + WAIT_S)
                self._serve(frames, request)
        frames.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for frames in self._connections:
            frames.shut_down()
        self._thread.join(WAIT_S)
        self._listener.close()
        assert not self._thread.is_alive()
