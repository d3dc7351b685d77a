"""Connections that have ended: their buffers are free at once, without a look for garbage, which is late."""

import gc
import socket
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from block_rig import GOLDEN, receive_frame
from kvtier.clock import MONOTONIC
from kvtier.net.address import Address, open_connection
from kvtier.protocol.block_socket import FrameSocket
from kvtier_pool.block.client_memory import ClientMemory
from kvtier_pool.block.session import BlockSession
from pool_rig import WAIT_S, running_pool, until


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("says", [b"", GOLDEN["hello"][0]], ids=["silent", "greeted"])
@pytest.mark.parametrize("path", ["tcp", "unix"])
@pytest.mark.usefixtures("no_collector")
def test_a_connection_that_has_ended_leaves_nothing_behind(
    tmp_path: Path, path: str, says: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: weakref.WeakSet[BlockSession | FrameSocket | ClientMemory] = weakref.WeakSet()
    for kind in (BlockSession, FrameSocket, ClientMemory):
        original = kind.__init__

        def noted(self, *args, _original=original, **named):  # type: ignore[no-untyped-def]
            seen.add(self)
            _original(self, *args, **named)

        monkeypatch.setattr(kind, "__init__", noted)
    with running_pool(listen=["127.0.0.1:0", f"unix:{tmp_path}/pool"]) as pool:
        address = Address.parse(pool.block[0 if path == "tcp" else 1])
        with open_connection(address, MONOTONIC() + WAIT_S) as connection:
            connection.settimeout(WAIT_S)
            connection.sendall(says)
            if says:
                receive_frame(connection)
            until(lambda: len(seen) >= 2)
            connection.shutdown(socket.SHUT_RDWR)
        until(lambda: not seen)
