"""What listens and is no Redis, or nobody at all: a miss in time."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtier.metrics import Metrics
from kvtier.testing.contract import read_blocks
from kvtier.tiers.base import Status, WriteStatus
from redis_rig import (
    BLOCK_BYTES,
    KEYS,
    MIB,
    WAIT_S,
    all_errors,
    connect,
    errors,
    items,
)


@contextlib.contextmanager
def stranger(greeting: bytes, after: bytes = b"") -> Iterator[str]:
    """Something that listens and is no Redis: the URL that leads there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop = threading.Event()

        def talk() -> None:
            kept = []
            while True:
                connection, _ = listener.accept()
                if stop.is_set():
                    connection.close()
                    break
                kept.append(connection)
                with contextlib.suppress(OSError):
                    connection.sendall(greeting)
                    connection.recv(65536)
                    connection.sendall(after)
            for connection in kept:
                connection.close()

        with ThreadPoolExecutor(1) as executor:
            talking = executor.submit(talk)
            yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
            stop.set()
            socket.create_connection(listener.getsockname()[:2]).close()
            talking.result(WAIT_S)


@pytest.mark.parametrize("password", [None, "correct horse battery"])
@pytest.mark.parametrize(
    ("greeting", "after"),
    [
        (b"", b""),
        (b"SSH-2.0-OpenSSH_9.2\r\n", b""),
        (b"", b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"),
        (b"", b"+OK\r\n" * 1000),
        (b"", b"$999999999999\r\n" + bytes(3 * MIB)),
        (b"", b"$" + b"9" * 5000 + b"\r\n"),
        (b"\x00" * 100, b""),
        (b"", b"-\xff\xfe not UTF-8\r\n"),
        (b"", b"*2000000000\r\n"),
        (b"", b"*100000\r\n" * 100),
        (b"", b"*1\r\n" * 200_000 + b":1\r\n"),
        (b"", b"%1\r\n*0\r\n:1\r\n"),
    ],
)
def test_what_is_no_redis_is_a_miss_in_time(greeting: bytes, after: bytes, password: str | None) -> None:
    metrics = Metrics()
    with stranger(greeting, after) as url:
        tier = connect(url, password=password, metrics=metrics, call_timeout_s=0.5, connect_timeout_s=0.3)
        assert tier.lookup(KEYS[:1]) == [Status.MISS]
        assert read_blocks(tier, KEYS[:1], BLOCK_BYTES) == [None]
        assert len(all_errors(metrics)) == 2
        tier.close()


def test_a_server_that_answers_byte_by_byte_costs_a_deadline() -> None:
    """Each byte comes in time, and the answer never does."""
    stop = threading.Event()

    def talk(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            while not stop.is_set():
                asked = connection.recv(65536)
                if b"EXISTS" not in asked:
                    connection.sendall(b"+PONG\r\n" if b"PING" in asked else b"+OK\r\n")
                    continue
                connection.sendall(b"+")
                while not stop.wait(0.01):
                    connection.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as executor:
        talking = executor.submit(talk, listener)
        metrics = Metrics()
        tier = connect(f"redis://127.0.0.1:{listener.getsockname()[1]}", metrics=metrics, call_timeout_s=0.5)
        began = time.monotonic()
        assert tier.lookup(KEYS[:1]) == [Status.MISS]
        assert time.monotonic() - began < WAIT_S / 4
        assert errors(metrics, "lookup", "UnavailableError") == 1
        tier.close()
        stop.set()
        talking.result(WAIT_S)


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:1",
        "redis://no-such-host.invalid",
        "redis+cluster://no-such-host.invalid",
        "unix:///no/such/socket",
        "rediss://127.0.0.1:1?ca=/no/such/file",
    ],
)
def test_nobody_there_is_a_miss(url: str) -> None:
    metrics = Metrics()
    tier = connect(url, metrics=metrics, connect_timeout_s=2.0)
    assert tier.lookup(KEYS[:1]) == [Status.MISS]
    assert tier.write(items(1)) == [WriteStatus.FAILED]
    assert errors(metrics, "lookup", "UnavailableError") == 1
    tier.close()
