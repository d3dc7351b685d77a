"""Ports and sockets of a pool, and the wrong peers at either end of a connection."""

import contextlib
import re
import socket
import stat
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import ClosedError, ConfigError, KvtierError, UnauthenticatedError, UnavailableError
from kvtier.metrics import Metrics
from kvtier.testing.contract import read_blocks
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.pool.grpc_transport import GrpcTransport
from kvtier.tiers.pool.socket_transport import SocketTransport
from kvtier.tiers.pool.tier import PoolTransport
from kvtier_pool.service import PoolService
from pool_rig import (
    BLOCK_BYTES,
    BLUE,
    RED,
    TOKENS,
    WAIT_S,
    connect,
    dial,
    failed_calls,
    items,
    keys,
    payloads,
    pool_config,
    running_pool,
    until,
)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A pool for tests that leave it as it is."""
    with running_pool() as pool:
        yield pool.block[0]


def test_the_token_of_another_tenant_is_refused_by_the_engine(address: str) -> None:
    confused = SocketTransport(address, TOKENS["red"], BLUE)
    with pytest.raises(UnauthenticatedError, match="another tenant's"):
        confused.connect()
    confused.close()


def test_a_refused_token_is_a_miss_a_counter_and_one_line(address: str, caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    tier = connect(address, token="wrong", metrics=metrics, breaker=CircuitBreaker(3, 1000.0))
    for _ in range(10):
        assert tier.lookup(keys([0])) == [Status.MISS]
        assert tier.write(items([0])) == [WriteStatus.FAILED]
    assert len([r for r in caplog.records if "unauthenticated" in r.message]) == 1
    assert failed_calls(metrics, op="lookup", error="UnauthenticatedError") == 2
    assert failed_calls(metrics, op="lookup", error="BreakerOpen") == 8
    tier.close()


@pytest.mark.parametrize("token", ["", "two words", "ümlaut", "line\n"])
def test_a_token_that_cannot_be_one(token: str) -> None:
    with pytest.raises(ConfigError, match="printable ASCII"):
        SocketTransport("127.0.0.1:1", token, RED)


def test_connections_beyond_the_limit_are_refused_and_places_come_back() -> None:
    with running_pool(max_connections=2) as pool:
        first, second = dial(pool.block[0]), dial(pool.block[0], "blue")
        with pytest.raises(UnavailableError, match="max_connections: 2 are open"):
            dial(pool.block[0])
        first.close()

        def served() -> bool:
            with contextlib.suppress(UnavailableError):
                dial(pool.block[0]).close()
                return True
            return False

        until(served)
        second.close()


@pytest.mark.parametrize(
    ("scheme", "port", "named"),
    [
        ("block", "grpc", "looks like gRPC.*grpc:host:port"),
        ("block", "http", "is this what the pool calls `listen`"),
        ("grpc", "block", "gRPC is at the address `grpc_listen`"),
    ],
)
def test_the_wrong_port_is_named(scheme: str, port: str, named: str) -> None:
    with running_pool() as pool:
        address = {"grpc": pool.grpc[0], "http": pool.http, "block": pool.block[0]}[port]
        transport: PoolTransport = (
            SocketTransport(address, TOKENS["red"], RED) if scheme == "block" else GrpcTransport(address, TOKENS["red"])
        )
        with pytest.raises(KvtierError, match=named):
            transport.lookup(keys([0]), WAIT_S)
        transport.close()


def test_http_at_the_block_port_is_told(address: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(f"http://{address}/metrics", timeout=WAIT_S)
    assert b"`http_listen`" in error.value.read()


def test_a_server_that_never_speaks_is_a_miss() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        metrics = Metrics()
        tier = connect(f"127.0.0.1:{server.getsockname()[1]}", call_timeout_s=0.3, metrics=metrics)
        assert tier.lookup(keys([0])) == [Status.MISS]
        assert read_blocks(tier, keys([0]), BLOCK_BYTES) == [None]
        assert failed_calls(metrics, op="read", error="UnavailableError") == 1
        tier.close()


def test_names_are_resolved_and_unknown_ones_are_a_miss(address: str) -> None:
    transport = SocketTransport(f"localhost:{address.rpartition(':')[2]}", TOKENS["red"], RED)
    transport.connect()
    transport.close()
    with pytest.raises(ClosedError):
        transport.usage(WAIT_S)
    nobody = SocketTransport("no-such-host.invalid:7600", TOKENS["red"], RED)
    with pytest.raises(UnavailableError, match="no-such-host"):
        nobody.usage(WAIT_S)


def test_a_unix_socket_is_private_replaces_a_dead_one_and_goes_with_its_server(tmp_path: Path) -> None:
    path = tmp_path / "pool.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with running_pool(listen=(f"unix:{path}",)) as pool:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        tier = connect(pool.block[0])
        assert tier.write(items([0])) == [WriteStatus.STORED]
        with pytest.raises(ConfigError, match="lives there"), running_pool(listen=(f"unix:{path}",)):
            pass
        assert read_blocks(tier, keys([0]), BLOCK_BYTES) == payloads([0]), "the first one is still there"
        tier.close()
    assert list(tmp_path.iterdir()) == []
    path.write_text("precious")
    with pytest.raises(ConfigError, match="no socket"), running_pool(listen=(f"unix:{path}",)):
        pass
    assert path.read_text() == "precious"


def test_a_group_may_be_let_in(tmp_path: Path) -> None:
    with running_pool(listen=(f"unix:{tmp_path}/pool.sock",), socket_mode=0o660):
        assert stat.S_IMODE((tmp_path / "pool.sock").stat().st_mode) == 0o660


def test_a_port_in_use_is_a_clear_error(address: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(address)):
        PoolService(pool_config(listen=[address])).start()


def test_a_stop_waits_for_nobody_who_is_idle() -> None:
    with running_pool(shutdown_grace_s=1000.0) as pool:
        idle = connect(pool.block[0])
        assert idle.write(items([0])) == [WriteStatus.STORED]
        stuck = dial(pool.block[0])
    assert read_blocks(idle, keys([0]), BLOCK_BYTES) == [None]
    idle.close()
    stuck.close()
