"""HTTP servers with TLS on an event loop, and clients that do not speak it."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from certificates import Authority
from kvtier.net import serving_tls
from kvtier.net.certificates import TlsFiles
from kvtier.system.quiet_log import QuietLog

_WAIT_S = 20.0
uvloop.run(asyncio.sleep(0))
"""The first loop of uvloop's in a process leaves a pipe open."""


@pytest.fixture(autouse=True)
def _every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    log = QuietLog(logging.getLogger(serving_tls.__name__), interval_s=0.0)
    monkeypatch.setattr(serving_tls, "_strangers", log)


async def _served(files: TlsFiles, client: Callable[[tuple[str, int]], bytes]) -> bytes:
    """What a client in another thread hears of a server that answers everything with one word."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"served")
        await writer.drain()
        writer.close()

    context = serving_tls.serving_context(files)
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context, ssl_handshake_timeout=_WAIT_S)
    async with server:
        return await asyncio.to_thread(client, server.sockets[0].getsockname()[:2])


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


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_client_that_asks_in_the_clear_hears_what_is_spoken(
    tmp_path: Path, run: Callable[[Any], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    ca = Authority(tmp_path)
    pair = ca.issue("server", "127.0.0.1")
    files = TlsFiles(certificate=pair.certificate, key=pair.key)

    def over_tls(address: tuple[str, int]) -> bytes:
        context = ssl.create_default_context(cafile=ca.certificate)
        with (
            socket.create_connection(address, _WAIT_S) as plain,
            context.wrap_socket(plain, server_hostname=address[0]) as connection,
        ):
            connection.sendall(b"?")
            return _until_end(connection)

    assert run(_served(files, over_tls)) == b"served"
    assert not caplog.records
    heard = run(_served(files, _in_the_clear))
    assert heard.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert heard.endswith(b"\r\n\r\nthis port speaks HTTPS: ask https://\n")
    assert "a client made no TLS connection: TLS failed: HTTP_REQUEST" in caplog.text
    assert b"served" not in run(_served(files, _garbage))
    assert "WRONG_VERSION_NUMBER" in caplog.text or "RECORD" in caplog.text
