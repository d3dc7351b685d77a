"""Connections of those who have not said who they are, at every port of a pool: they keep nobody else out."""

import contextlib
import socket
import ssl
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvtier.errors import LimitExceededError, UnavailableError
from kvtier.testing.contract import make_key
from kvtier.tiers.base import Status
from kvtier.tiers.pool.grpc_transport import GrpcTransport
from kvtier.tiers.pool.tier import PoolTransport
from pool_rig import TOKENS, WAIT_S, running_pool, until
from tls_rig import Site, transport

HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
NO_SETTINGS = b"\0\0\0\4\0\0\0\0\0"


@contextlib.contextmanager
def silent(address: str, count: int, says: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections that are open and wait."""
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(count):
            opened.append(stack.enter_context(socket.create_connection((host, int(port)), WAIT_S)))
            opened[-1].sendall(says)
        yield opened


def is_cut(connection: socket.socket) -> bool:
    """Waits for it, whatever is said before."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(1 << 10):
            pass
    return True


@contextlib.contextmanager
def engines(address: str, site: Site | None, count: int) -> Iterator[list[PoolTransport]]:
    """With a connection each, over which they have said who they are; of two tenants in turn."""
    with contextlib.ExitStack() as stack:
        opened = []
        for tenant in islice(cycle(TOKENS), count):
            engine = transport(address, site.client() if site else None, tenant=tenant, token=TOKENS[tenant])
            stack.callback(engine.close)
            assert engine.lookup([make_key("absent")], WAIT_S) == [Status.MISS]
            opened.append(engine)
        yield opened


@pytest.mark.parametrize("tls", [False, True])
def test_silent_ones_make_way_for_engines_and_engines_for_nobody(
    tmp_path: Path, tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier_pool.block.session._HELLO_S", 3 * WAIT_S)
    site = Site.build(tmp_path) if tls else None
    with site.pool(max_connections=3) if site else running_pool(max_connections=3) as pool:
        says = b"\x16\x03\x01\x02\x00" if tls else b"KVTF"
        with silent(pool.block[0], 3, says) as strangers, engines(pool.block[0], site, 3) as inside:
            assert all(map(is_cut, strangers))
            with silent(pool.block[0], 5, says) as more:
                assert all(map(is_cut, more)), "there is no place for them"
                for engine in inside:
                    assert engine.lookup([make_key("absent")], WAIT_S) == [Status.MISS]
                with pytest.raises(UnavailableError, match="max_connections"), engines(pool.block[0], site, 1):
                    pass


@pytest.mark.parametrize("tls", [False, True])
def test_the_oldest_connection_to_the_http_port_makes_way(
    tmp_path: Path, tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier_pool.http._MAX_CONNECTIONS", 3)
    site = Site.build(tmp_path) if tls else None
    context = ssl.create_default_context(cafile=str(site.ca.certificate)) if site else None
    says = b"\x16\x03\x01" if tls else b"GET /hea"
    with site.pool() if site else running_pool() as pool, silent(pool.http, 5, says) as strangers:
        assert all(map(is_cut, strangers[:2]))
        with urllib.request.urlopen(
            f"{'https' if tls else 'http'}://{pool.http}/healthz", timeout=WAIT_S, context=context
        ) as answer:
            assert answer.read() == b"ok\n"
        assert is_cut(strangers[2])


def test_the_http_port_may_be_of_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with (
        running_pool(http_listen="[::1]:0") as pool,
        urllib.request.urlopen(f"http://{pool.http}/healthz", timeout=WAIT_S) as answer,
    ):
        assert answer.read() == b"ok\n"


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    with contextlib.suppress(ConnectionResetError):
        while True:
            try:
                if not connection.recv(1 << 10):
                    return False
            except BlockingIOError:
                return True
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="connections of gRPC are looked at in /proc")
def test_who_makes_no_call_of_grpc_makes_way_for_whoever_comes() -> None:
    with (
        running_pool(max_connections=4) as pool,
        grpc.insecure_channel(pool.grpc[0], options=[("grpc.use_local_subchannel_pool", 1)]) as channel,
    ):
        metadata = (("authorization", f"Bearer {TOKENS['red']}"),)
        channel.unary_unary("/kvtier.pool.v1.Pool/Usage")(b"", metadata=metadata, timeout=WAIT_S)
        listens = channel.unary_stream("/kvtier.pool.v1.Pool/Events")(b"", metadata=metadata)
        with silent(pool.grpc[0], 40, HTTP2_PREFACE + NO_SETTINGS) as strangers:
            until(lambda: sum(map(is_open, strangers)) <= 4)
            with contextlib.closing(GrpcTransport(pool.grpc[0], TOKENS["blue"])) as engine:

                def answers() -> bool:
                    with contextlib.suppress(UnavailableError):  # too many at this very moment
                        return engine.lookup([make_key("absent")], WAIT_S) == [Status.MISS]
                    return False

                until(answers)
        assert listens.is_active(), "a connection with a call of a tenant stays"
        listens.cancel()


@pytest.mark.parametrize("says", [HTTP2_PREFACE, HTTP2_PREFACE + NO_SETTINGS])
def test_who_makes_no_call_of_grpc_makes_way_in_time(says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_pool.grpc.server._HANDSHAKE_S", 0.2)
    monkeypatch.setattr("kvtier_pool.grpc.server._IDLE_S", 0.1)
    with running_pool(max_connections=2) as pool, silent(pool.grpc[0], 2, says) as strangers:
        assert all(map(is_cut, strangers))
        with contextlib.closing(GrpcTransport(pool.grpc[0], TOKENS["red"])) as engine:

            def answers() -> bool:
                # Whoever begins a call in the very moment in which an idle connection is closed hears of that, or over
                # the next connection that the one place is still the old one's.
                with contextlib.suppress(UnavailableError, LimitExceededError):
                    return engine.lookup([make_key("absent")], WAIT_S) == [Status.MISS]
                return False

            until(answers)
            time.sleep(0.2)
            until(answers)


@pytest.mark.parametrize("verb", ["/kvtier.pool.v1.Pool/Lookup", "/grpc.health.v1.Health/Check"])
def test_calls_of_strangers_that_send_no_message_keep_nobody_out(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_pool.grpc.health._REQUEST_S", 0.1)
    may_end = threading.Event()
    with running_pool(num_threads=5) as pool, grpc.insecure_channel(pool.grpc[0]) as channel:
        calls = [channel.stream_stream(verb)(iter(may_end.wait, True), timeout=2 * WAIT_S) for _ in range(20)]
        try:
            assert all(call.code() is not grpc.StatusCode.DEADLINE_EXCEEDED for call in calls)
            with contextlib.closing(GrpcTransport(pool.grpc[0], TOKENS["red"])) as engine:
                assert engine.lookup([make_key("absent")], WAIT_S) == [Status.MISS]
        finally:
            may_end.set()


def test_health_checks_that_never_say_what_they_ask_keep_two_threads_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_pool.grpc.health._REQUEST_S", 3600.0)
    may_end = threading.Event()
    with running_pool(num_threads=5) as pool, grpc.insecure_channel(pool.grpc[0]) as channel:
        silent_check = channel.stream_stream("/grpc.health.v1.Health/Check")
        try:
            calls = [silent_check(iter(may_end.wait, True)) for _ in range(8)]
            until(lambda: sum(call.is_active() for call in calls) == 2)
            with contextlib.closing(GrpcTransport(pool.grpc[0], TOKENS["red"])) as engine:
                assert engine.lookup([make_key("absent")], WAIT_S) == [Status.MISS]
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        finally:
            may_end.set()
