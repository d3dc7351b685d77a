"""The server of /healthz and /metrics by itself."""

import contextlib
import errno
import socket
import socketserver
import threading
from collections.abc import Iterator

import pytest

from kvtier_pool.http import StatusServer
from pool_rig import WAIT_S, until


def no_metrics(authorization: str | None, peer: str) -> tuple[int, str, bytes]:
    return 404, "text/plain", b"no\n"


@contextlib.contextmanager
def connected() -> Iterator[socket.socket]:
    """A connection to a server that is well."""
    server = StatusServer("127.0.0.1:0", no_metrics, lambda: None, list)
    server.start()
    try:
        host, _, port = server.address.rpartition(":")
        with socket.create_connection((host, int(port)), WAIT_S) as connection:
            yield connection
    finally:
        server.stop()


def test_no_more_is_read_of_a_request_than_it_may_have() -> None:
    with connected() as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\n" + b"X-a: " + b"y" * (16 << 10))
        assert connection.recv(1000).startswith(b"HTTP/1.0 200 OK")


@pytest.mark.parametrize(("path", "status"), [("/healthz", b"200 OK"), ("/metrics", b"404 Not Found")])
def test_head_is_answered_as_get_without_the_text(path: str, status: bytes) -> None:
    with connected() as connection, connection.makefile("rb") as arriving:
        connection.sendall(f"HEAD {path} HTTP/1.1\r\n\r\n".encode())
        answer = arriving.read()
    assert answer.startswith(b"HTTP/1.0 " + status)
    assert answer.endswith(b"Content-Length: 3\r\n\r\n")


def test_a_request_has_its_time_however_it_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_pool.http._REQUEST_TIMEOUT_S", 0.2)

    def is_cut() -> bool:
        try:
            connection.sendall(b"y")
            return False
        except OSError:
            return True

    with connected() as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nX-a: ")
        until(is_cut)


def test_it_pauses_after_an_accept_that_failed_and_stops_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_pool.http._PAUSE_S", 3600.0)
    server, failed, num_tries = (
        StatusServer("127.0.0.1:0", no_metrics, lambda: None, list),
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
