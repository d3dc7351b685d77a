"""The server of /healthz and /metrics by itself."""

import errno
import socket
import socketserver
import threading

import pytest
from prometheus_client import CollectorRegistry

from kvtier_pool.http import StatusServer
from pool_rig import WAIT_S


def test_it_pauses_after_an_accept_that_failed_and_stops_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_pool.http._PAUSE_S", 3600.0)
    server, failed, num_tries = (
        StatusServer("127.0.0.1:0", CollectorRegistry(), lambda: None, list),
        threading.Event(),
        0,
    )

    def refuse(server: socketserver.TCPServer) -> None:
        nonlocal num_tries
        num_tries += 1
        failed.set()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socketserver.TCPServer, "get_request", refuse)
    server.start()
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port))):
        assert failed.wait(WAIT_S)
        server.stop()
    assert num_tries == 1
