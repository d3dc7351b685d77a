"""Tenants of one pool never meet, whichever way they come: by TCP, a Unix socket, its shared memory, or gRPC."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import InvalidInputError
from kvtier.metrics import Metrics
from kvtier.testing.contract import make_key, make_payload, read_blocks, summed
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.pool.access import PoolAccess, open_transport
from kvtier.tiers.pool.tier import PoolTier
from pool_rig import BLOCK_BYTES, BLUE, RED, TOKENS, connect, running_pool

ONE, OTHER = make_payload(1, BLOCK_BYTES), make_payload(2, BLOCK_BYTES)


@pytest.fixture(params=["tcp", "unix", "shared memory", "grpc"])
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, bool]]:
    """The address of a pool of the test's own; whether its memory is to be mapped."""
    with running_pool(listen=("127.0.0.1:0", f"unix:{tmp_path}/pool.sock")) as pool:
        tcp, unix = pool.block
        addresses = {"tcp": tcp, "unix": unix, "shared memory": unix, "grpc": f"grpc:{pool.grpc[0]}"}
        yield addresses[request.param], request.param == "shared memory"


def test_tenants_never_meet(way: tuple[str, bool]) -> None:
    address, shared_memory = way
    red = connect(address, shared_memory=shared_memory)
    blue = connect(address, "blue", shared_memory=shared_memory)
    key_of_red, key_of_blue = make_key("meet", tenant=RED), make_key("meet", tenant=BLUE)
    assert red.write([summed(key_of_red, ONE)]) == [WriteStatus.STORED]
    assert blue.lookup([key_of_blue]) == [Status.MISS]
    assert read_blocks(blue, [key_of_blue], BLOCK_BYTES) == [None]
    assert blue.discard([key_of_blue]) == 0
    assert blue.usage().num_blocks == 0
    assert blue.write([summed(key_of_blue, OTHER)]) == [WriteStatus.STORED]
    assert read_blocks(red, [key_of_red], BLOCK_BYTES) == [ONE]
    assert read_blocks(blue, [key_of_blue], BLOCK_BYTES) == [OTHER]
    with pytest.raises(InvalidInputError, match="another tenant"):
        red.lookup([key_of_blue])
    red.close()
    blue.close()


def test_red_credentials_do_not_reach_blue_whatever_the_keys_say(way: tuple[str, bool]) -> None:
    """A client that lies about its tenant: it never meets blue's blocks, and a header in blue's name is refused."""
    address, shared_memory = way
    key = make_key("lie", tenant=BLUE)
    access = PoolAccess(addresses=[address], tenant=RED, token=TOKENS["red"], shared_memory=shared_memory)
    metrics = Metrics()
    transport = open_transport(access, metrics, connect_ahead=False)
    liar = PoolTier(transport, BLUE, metrics=metrics, breaker=CircuitBreaker(100, 1.0))
    honest = connect(address, "blue", shared_memory=shared_memory)
    # In mapped memory no header names a tenant: what the liar writes is red's.
    own = [ONE] if shared_memory else [None]
    assert liar.write([summed(key, ONE)]) == [WriteStatus.STORED if shared_memory else WriteStatus.FAILED]
    assert honest.lookup([key]) == [Status.MISS]
    assert honest.write([summed(key, OTHER)]) == [WriteStatus.STORED]
    assert liar.lookup([key]) == [Status.HIT if shared_memory else Status.MISS]
    assert read_blocks(liar, [key], BLOCK_BYTES) == own
    assert liar.discard([key]) == int(shared_memory)
    assert read_blocks(honest, [key], BLOCK_BYTES) == [OTHER]
    liar.close()
    honest.close()
