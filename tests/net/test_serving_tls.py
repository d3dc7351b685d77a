"""HTTP servers with TLS on an event loop, and clients that do not speak it."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop

from certificates import Authority
from kvtier.net import serving_tls, tls_listener
from kvtier.net.certificates import TlsFiles
from kvtier.net.tls_listener import TlsListener
from kvtier.system.quiet_log import QuietLog

_WAIT_S = 20.0
uvloop.run(asyncio.sleep(0))
"""The first loop of uvloop's in a process leaves a pipe open."""


@pytest.fixture(autouse=True)
def _every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    log = QuietLog(logging.getLogger(serving_tls.__name__), interval_s=0.0)
    monkeypatch.setattr(serving_tls, "_strangers", log)
    monkeypatch.setattr(tls_listener, "_log", log)


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    pair = Authority(tmp_path).issue("server", "127.0.0.1")
    return TlsFiles(certificate=pair.certificate, key=pair.key, ca=None)


async def _served(files: TlsFiles, client: Callable[[tuple[str, int]], bytes]) -> bytes:
    """What a client in another thread hears of a server that answers everything with one word."""

    class Answering(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert transport.get_extra_info("sslcontext") is not None
            self.transport = cast(asyncio.Transport, transport)

        def data_received(self, data: bytes) -> None:
            self.transport.write(b"served")
            self.transport.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listener = TlsListener(listening, serving_tls.serving_context(files), Answering)
        address = listening.getsockname()[:2]
        try:
            return await asyncio.to_thread(client, address)
        finally:
            await listener.close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address, _WAIT_S).close()


def _until_end(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(4096), b""))


def _in_the_clear(address: tuple[str, int]) -> bytes:
    with socket.create_connection(address, _WAIT_S) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        heard = connection.recv(4096)
        assert connection.sendall(b"GET /more HTTP/1.1\r\n\r\n") is None
        return heard + _until_end(connection)


def _garbage(address: tuple[str, int]) -> bytes:
    with socket.create_connection(address, _WAIT_S) as connection:
        connection.sendall(b"\x00" * 64)
        try:
            return _until_end(connection)
        except ConnectionResetError:
            return b""


def _over_tls(address: tuple[str, int]) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(address, _WAIT_S) as plain,
        context.wrap_socket(plain, server_hostname=address[0]) as connection,
    ):
        connection.sendall(b"?")
        return _until_end(connection)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_silent_clients_keep_nobody_out(
    files: TlsFiles, run: Callable[[Any], bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One too many cuts the one that has been silent for the longest time, and none is silent for ever."""
    monkeypatch.setattr(tls_listener, "_MOST_HANDSHAKES", 8)
    monkeypatch.setattr(tls_listener, "_HANDSHAKE_S", 1.0)

    def among_silent_ones(address: tuple[str, int]) -> bytes:
        with contextlib.ExitStack() as stack:
            silent = [stack.enter_context(socket.create_connection(address, _WAIT_S)) for _ in range(40)]
            heard = _over_tls(address)
            for connection in silent:
                with contextlib.suppress(ConnectionResetError):
                    assert connection.recv(1) == b""
            return heard + _over_tls(address)

    assert run(_served(files, among_silent_ones)) == b"servedserved"
    assert "8 clients are connected without a TLS handshake: the oldest ones are cut" in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_request_in_one_piece_with_the_end_of_a_handshake(files: TlsFiles, run: Callable[[Any], bytes]) -> None:
    def in_one_piece(address: tuple[str, int]) -> bytes:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        arrived, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
        end = context.wrap_bio(arrived, sent)
        with socket.create_connection(address, _WAIT_S) as connection:

            def done(step: Callable[[], bytes | None]) -> bytes | None:
                while True:
                    with contextlib.suppress(ssl.SSLWantReadError):
                        return step()
                    connection.sendall(sent.read())
                    more = connection.recv(1 << 16)
                    assert more
                    arrived.write(more)

            done(end.do_handshake)
            end.write(b"?")
            return done(end.read) or b""

    assert run(_served(files, in_one_piece)) == b"served"


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_client_that_asks_in_the_clear_hears_what_is_spoken(
    files: TlsFiles, run: Callable[[Any], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    assert run(_served(files, _over_tls)) == b"served"
    assert not caplog.records
    heard = run(_served(files, _in_the_clear))
    assert heard.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert heard.endswith(b"\r\n\r\nthis port speaks HTTPS: ask https://\n")
    assert "a client made no TLS connection: TLS failed: HTTP_REQUEST" in caplog.text
    assert b"served" not in run(_served(files, _garbage))
    assert "WRONG_VERSION_NUMBER" in caplog.text or "RECORD" in caplog.text
