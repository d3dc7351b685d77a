"""The pool tier over gRPC, at a real service: the contract, tenants, batches, and what does not come from a pool."""

import contextlib
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvtier.metrics import Metrics
from kvtier.testing.contract import make_key, make_payload, read_blocks, summed
from kvtier.tiers.base import Status, Tier, Usage, WriteStatus
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.pool import grpc_transport
from kvtier.tiers.pool.grpc_transport import GrpcTransport
from kvtier.tiers.pool.tier import PoolTier
from pool_contract import OverPool, run_states
from pool_grpc_rig import PAYLOADS, connect, items, running
from pool_rig import BLOCK_BYTES, MIB, RED, TOKENS, failed_calls


class TestPoolTier(OverPool):
    @contextlib.contextmanager
    def opened(self, capacity_bytes: int, folder: Path) -> Iterator[Tier]:
        with running(capacity_bytes) as address, contextlib.closing(connect(address)) as tier:
            yield tier


class TestPoolTierStates:
    def test_states(self) -> None:
        with running(2 * MIB) as address:
            run_states(lambda: connect(address))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A service for tests that leave it as it is; each uses labels of its own."""
    with running() as address:
        yield address


def test_a_refused_token_is_a_miss_a_counter_and_one_line(address: str, caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    tier = connect(address, token="wrong", metrics=metrics, breaker=CircuitBreaker(3, 1000.0))
    for _ in range(10):
        assert tier.lookup([make_key(0)]) == [Status.MISS]
        assert tier.write(items(1)) == [WriteStatus.FAILED]
    assert len([r for r in caplog.records if "UNAUTHENTICATED" in r.message]) == 1
    assert failed_calls(metrics, op="lookup", error="UnauthenticatedError") == 2
    assert failed_calls(metrics, op="lookup", error="BreakerOpen") == 8
    tier.close()


def test_large_batches_are_split(address: str) -> None:
    tier = connect(address, max_batch_bytes=3 * BLOCK_BYTES)
    batch = [summed(make_key(("split", i)), PAYLOADS[i]) for i in range(16)]
    assert tier.write(batch) == [WriteStatus.STORED] * 16
    assert read_blocks(tier, [key for key, _, _ in batch], BLOCK_BYTES) == list(PAYLOADS.values())
    tier.close()


@pytest.mark.parametrize("nbytes", [1, MIB, 2 * MIB + 5])
def test_blocks_of_any_size(address: str, nbytes: int) -> None:
    tier = connect(address)
    payload = make_payload(nbytes, nbytes)
    assert tier.write([summed(make_key(("size", nbytes)), payload)]) == [WriteStatus.STORED]
    assert read_blocks(tier, [make_key(("size", nbytes))], nbytes) == [payload]
    tier.close()


def test_a_block_of_no_bytes_is_refused(address: str) -> None:
    tier = connect(address)
    assert tier.write([summed(make_key("nothing"), b"")]) == [WriteStatus.FAILED]
    tier.close()


def test_a_server_that_is_no_pool_is_a_miss() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        metrics = Metrics()
        tier = connect(f"127.0.0.1:{server.getsockname()[1]}", call_timeout_s=0.3, metrics=metrics)
        assert tier.lookup([make_key(0)]) == [Status.MISS]
        assert read_blocks(tier, [make_key(0)], BLOCK_BYTES) == [None]
        assert tier.usage() == Usage(0, 0, 0)
        assert failed_calls(metrics, op="read", error="UnavailableError") == 1
        tier.close()


def test_damage_on_the_way_is_a_miss_and_a_counter(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block arrives with a flipped bit and the second under the third one's header."""
    receive = grpc_transport._receive

    def damaged(stream: Iterator[bytes], into: Sequence[memoryview]) -> Iterator[tuple[int, bytes]]:
        headers = dict(receive(stream, into))
        into[0][100] ^= 4
        headers[1] = headers[2]
        yield from headers.items()

    monkeypatch.setattr(grpc_transport, "_receive", damaged)
    metrics = Metrics()
    transport = GrpcTransport(address, TOKENS["red"])
    tier = PoolTier(transport, RED, metrics=metrics, breaker=CircuitBreaker(3, 1.0))
    batch = [summed(make_key(("damage", i)), PAYLOADS[i]) for i in range(3)]
    tier.write(batch)
    assert read_blocks(tier, [key for key, _, _ in batch], BLOCK_BYTES) == [None, None, PAYLOADS[2]]
    assert metrics.registry.get_sample_value("kvtier_corrupt_blocks_total", {"tier": "pool"}) == 2
    tier.close()
