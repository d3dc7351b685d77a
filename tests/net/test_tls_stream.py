"""`TlsStream` by itself: ends, deadlines, buffers of any size, and records that nobody sent."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvtier.net.tls import ServerTls, TlsStream
from kvtier.net.tls_errors import TlsError
from kvtier.testing.contract import make_payload
from pool_rig import MIB, WAIT_S
from tls_rig import Site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site.build(tmp_path_factory.mktemp("site"))


@contextlib.contextmanager
def streams(site: Site) -> Iterator[tuple[TlsStream, TlsStream, socket.socket]]:
    """A client's and a server's end after the handshake, and the socket under the server's end."""
    deadline = time.monotonic() + WAIT_S
    with socket.create_server(("127.0.0.1", 0)) as listening:
        connected = socket.create_connection(listening.getsockname(), WAIT_S)
        accepted, _ = listening.accept()
    raw = accepted.dup()
    server = ServerTls(site.files()).accept(accepted)
    thread = threading.Thread(target=server.shake_hands, args=(deadline,))
    thread.start()
    client = site.client().connect(connected, "127.0.0.1", deadline)
    thread.join(WAIT_S)
    try:
        yield client, server, raw
    finally:
        raw.close()
        client.close()
        server.close()


def test_shut_down_ends_a_wait_and_no_ciphertext_becomes_data(site: Site) -> None:
    with streams(site) as (client, server, _):
        into = memoryview(bytearray(100))
        found: list[int] = []
        waiting = threading.Thread(target=lambda: found.append(server.wait(into)))
        waiting.start()
        client.send([memoryview(b"first")], 0)
        waiting.join(WAIT_S)
        assert (found, bytes(into[:5])) == ([5], b"first")
        waiting = threading.Thread(target=lambda: found.append(server.wait(into)))
        waiting.start()
        server.shut_down()
        waiting.join(WAIT_S)
        assert found == [5, 0]
        with contextlib.suppress(OSError):
            client.send([memoryview(b"second")], 0)
        assert server.wait(into) == 0


@pytest.mark.parametrize("side", ["send", "receive"])
def test_deadlines_hold(site: Site, side: str) -> None:
    """Against a peer that moves a little at a time, records cut in pieces included."""
    with streams(site) as (client, server, _):
        stop = threading.Event()

        def dribble() -> None:
            scrap = memoryview(bytearray(1000))
            while not stop.wait(0.02):
                if side == "send":
                    server.receive([scrap], fill=False, deadline=time.monotonic() + WAIT_S)
                else:
                    server.send([scrap[:1]], 0)

        peer = threading.Thread(target=dribble)
        peer.start()
        buffer = memoryview(bytearray(64 * MIB))
        started = time.monotonic()
        if side == "receive":
            with pytest.raises(TimeoutError, match="in time"):
                client.receive([buffer], fill=True, deadline=started + 0.3)
        else:
            while client.send([buffer], 0):
                assert time.monotonic() < started + WAIT_S
            assert client.send([buffer], 0) == 0
        stop.set()
        peer.join(WAIT_S)


def test_sending_goes_on_where_a_full_socket_stopped_it(site: Site) -> None:
    """Small and large buffers, and a peer that reads only now and then."""
    with streams(site) as (client, server, _):
        sizes = [10, 3000, 700_000, 1, 1, 50, 16_384, 2_500_000, 2047, 2048] * 3
        sent = [make_payload(i, size) for i, size in enumerate(sizes)]
        received = [memoryview(bytearray(size)) for size in sizes]

        def receive() -> None:
            for buffer in received:
                time.sleep(0.02)
                server.receive([buffer], fill=True, deadline=time.monotonic() + WAIT_S)

        receiving = threading.Thread(target=receive)
        receiving.start()
        views, start = [memoryview(part) for part in sent], 0
        while start < len(views):
            count = client.send(views, start)
            while count and count >= len(views[start]):
                count -= len(views[start])
                start += 1
            if count:
                views[start] = views[start][count:]
        receiving.join(WAIT_S)
        assert received == sent


def test_a_connection_that_ends_within_a_record_is_an_end_and_no_data(site: Site) -> None:
    with streams(site) as (client, server, raw):
        client.send([memoryview(b"whole")], 0)
        into = memoryview(bytearray(10))
        assert server.receive([into], fill=False, deadline=time.monotonic() + WAIT_S) == 5
        raw.send(b"\x17\x03\x03\x00\x80partial")  # a record of 128 bytes
        raw.shutdown(socket.SHUT_WR)
        assert client.receive([into], fill=True, deadline=time.monotonic() + WAIT_S) == 0


def test_a_record_that_was_altered_is_an_error(site: Site) -> None:
    with streams(site) as (client, _, raw):
        raw.send(b"\x17\x03\x03\x00\x20" + b"x" * 32)
        with pytest.raises(TlsError, match="TLS failed"):
            client.receive([memoryview(bytearray(10))], fill=True, deadline=time.monotonic() + WAIT_S)
