"""Several addresses of one pool: the best that works carries the calls."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, UnauthenticatedError, UnavailableError
from kvtier.identity.keys import StoreKey
from kvtier.metrics import Metrics
from kvtier.net.certificates import TlsFiles
from kvtier.net.tls import ClientTls
from kvtier.testing.blocks import summed
from kvtier.testing.contract import make_key, make_payload, read_blocks
from kvtier.tiers.base import Status, Tier, WriteStatus
from kvtier.tiers.pool.access import PoolAccess, open_transport
from kvtier.tiers.pool.paths_transport import PathsTransport
from kvtier.tiers.pool.socket_transport import SocketTransport
from pool_contract import OverPool
from pool_rig import BLOCK_BYTES, MIB, RED, TOKENS, WAIT_S, connect, running_pool

ITEMS = [summed(make_key(i), make_payload(i, BLOCK_BYTES)) for i in range(4)]
KEYS = [key for key, _, _ in ITEMS]
PAYLOADS = [payload for _, payload, _ in ITEMS]


class TestOverTheSecondWay(OverPool):
    """The Unix socket that engines would like best is not there."""

    @contextlib.contextmanager
    def opened(self, capacity_bytes: int, folder: Path) -> Iterator[Tier]:
        with running_pool(capacity_bytes) as pool:
            addresses = f"grpc:{pool.grpc[0]},{pool.block[0]},unix:{folder}/absent.sock"
            with contextlib.closing(connect(addresses)) as tier:
                yield tier


def moved(metrics: Metrics) -> dict[str, float]:
    """Bytes read by path."""
    paths = ("shm", "unix", "tcp", "grpc")
    found = {p: metrics.registry.get_sample_value("kvtier_path_bytes_total", {"path": p, "op": "read"}) for p in paths}
    return {path: nbytes for path, nbytes in found.items() if nbytes}


@pytest.mark.parametrize("best", ["shm", "unix", "tcp", "grpc"])
def test_the_best_way_that_works_is_taken_whatever_the_order_of_addresses(tmp_path: Path, best: str) -> None:
    unix = f"unix:{tmp_path}/pool.sock"
    metrics = Metrics()
    with running_pool(32 * MIB, listen=("127.0.0.1:0", unix), shared_memory=best == "shm") as pool:
        tcp, grpc = pool.block[0], f"grpc:{pool.grpc[0]}"
        addresses = {"grpc": [grpc], "tcp": [grpc, tcp]}.get(best, [grpc, unix, tcp])
        tier = connect(",".join(addresses), metrics=metrics, shared_memory=True)
        assert tier.write(ITEMS) == [WriteStatus.STORED] * 4
        assert read_blocks(tier, KEYS, BLOCK_BYTES) == PAYLOADS
        assert moved(metrics) == {best: 4 * BLOCK_BYTES}
        tier.close()


def test_a_way_that_comes_back_is_taken_again(tmp_path: Path) -> None:
    now_s = 100.0
    path, metrics = f"unix:{tmp_path}/pool.sock", Metrics()
    with running_pool(32 * MIB) as pool:
        addresses = (path, pool.block[0])
        paths = [(a, SocketTransport(a, TOKENS["red"], RED, metrics=metrics)) for a in addresses]
        transport = PathsTransport(paths, clock=lambda: now_s)
        assert transport.write(ITEMS, WAIT_S) == [WriteStatus.STORED] * 4
        with running_pool(32 * MIB, listen=(path,)) as other:
            assert other.block == (path,)
            assert transport.lookup(KEYS, WAIT_S) == [Status.HIT] * 4  # the first way is passed over for a while
            now_s += 10.0
            assert transport.lookup(KEYS, WAIT_S) == [Status.MISS] * 4  # the other pool: it is the first way's
        assert transport.lookup(KEYS, WAIT_S) == [Status.HIT] * 4
        transport.close()


def test_without_any_way_calls_fail_and_each_is_tried() -> None:
    transport = open_transport(
        PoolAccess(["127.0.0.1:1", "grpc:127.0.0.1:2", "unix:/nowhere/pool.sock"], RED, TOKENS["red"]),
        Metrics(),
        connect_ahead=False,
    )
    for _ in range(2):
        with pytest.raises(UnavailableError):
            transport.lookup(KEYS, WAIT_S)
    with pytest.raises(UnavailableError):
        list(transport.read(KEYS, [memoryview(bytearray(BLOCK_BYTES)) for _ in KEYS], WAIT_S))
    transport.close()


def test_a_refusal_is_raised_when_no_other_way_works() -> None:
    with running_pool(32 * MIB) as pool:
        access = PoolAccess([pool.block[0], f"grpc:{pool.grpc[0]}"], RED, "wrong-token")
        transport = open_transport(access, Metrics(), connect_ahead=False)
        with pytest.raises(UnauthenticatedError):
            transport.lookup(KEYS, WAIT_S)
        transport.close()


def test_without_a_token_the_unix_socket_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    unix = "unix:/run/kvtier/pool.sock"
    with pytest.raises(ConfigError, match=r"pool\.sock needs the tenant's token: set it, or add a TCP address"):
        open_transport(PoolAccess([unix], RED, None), Metrics(), connect_ahead=False)
    tls = ClientTls(TlsFiles(certificate=Path("cert.pem"), key=Path("key.pem"), ca=Path("ca.pem")), None)
    access = PoolAccess([unix, "127.0.0.1:1"], RED, None, tls=tls)
    open_transport(access, Metrics(), connect_ahead=False).close()
    assert f"{unix} is not used" in caplog.text


def test_addresses_that_are_none() -> None:
    with pytest.raises(ConfigError, match="host:port or unix:/path"):
        open_transport(PoolAccess(["nowhere"], RED, TOKENS["red"]), Metrics(), connect_ahead=False)


def test_a_read_that_fails_in_the_middle_is_not_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_after_one(keys: list[StoreKey], into: list[memoryview], timeout_s: float) -> Iterator[tuple[int, None]]:
        yield 0, None
        raise UnavailableError("gone in the middle")

    with running_pool(32 * MIB) as pool:
        first, second = (SocketTransport(pool.block[0], TOKENS["red"], RED) for _ in range(2))
        monkeypatch.setattr(first, "read", fail_after_one)
        transport = PathsTransport([("first", first), ("second", second)])
        blocks = transport.read(KEYS, [memoryview(bytearray(BLOCK_BYTES)) for _ in KEYS], WAIT_S)
        assert next(iter(blocks)) == (0, None)
        with pytest.raises(UnavailableError, match="in the middle"):
            list(blocks)
        transport.close()
