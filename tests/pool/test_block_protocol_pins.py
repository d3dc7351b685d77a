"""The verbs of pins, as bytes: golden frames, refusals, pools and clients that know no pins, and anything at all."""

import contextlib
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from block_rig import GOLDEN, KEY, PAYLOAD, mutated, receive_exactly, receive_rest, recorded_pool, session, split_frames
from kvtier.metrics import Metrics
from kvtier.protocol.block import encode_head
from kvtier.protocol.retention import PinStatus
from kvtier.store.retention import RetentionLimits
from kvtier.testing.contract import make_key, summed
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.pool.socket_transport import SocketTransport
from kvtier.tiers.pool.tier import PoolTier
from kvtier_pool.limits import PoolLimits
from pool_rig import MIB, RED, TOKENS, WAIT_S, CoreRig, core_rig

HELLO = GOLDEN["hello"][0]
HOUR = RetentionLimits(max_s=3600.0, most_bytes=2 * MIB)
GROUP = {"namespace": bytes(16), "hashes": bytes(32)}

GOLDEN_PINS: dict[str, tuple[bytes, bytes]] = {
    "hello": (
        HELLO,
        bytes.fromhex(
            "4b5654464c000000000000000000000086a2696401a6726573756c74a26f6ba876657273696f6e739101a776657273696f"
            "6e01a674656e616e74c410edffbbe14de80b6021870359901ff95eaa6d61785f70696e5f6d73ce0036ee80"
        ),
    ),
    "write": GOLDEN["write"],
    "pin": (
        bytes.fromhex(
            "4b56544688000000000000000000000084a2696403a476657262a370696ea667726f7570739182a96e616d657370616365"
            "c4106e616d6573706163652d6e756d626572a6686173686573c440b9f5203fc6d1830b1a6f22021a18481651fda291c44b"
            "d281ddc44181c31fe0046a7bf456417edefb8676d0dacfd5c5b0dd0724fbd9a15c06d7a6d22c6e5b3c33a674746c5f6d73"
            "ce055d4a80"
        ),
        bytes.fromhex(
            "4b56544628000000000000000000000084a2696403a6726573756c74a26f6ba87374617475736573c4020100a674746c5f"
            "6d73ce0036ee80"
        ),
    ),
    "unpin": (
        bytes.fromhex(
            "4b5654467e000000000000000000000083a2696404a476657262a5756e70696ea667726f7570739182a96e616d65737061"
            "6365c4106e616d6573706163652d6e756d626572a6686173686573c440b9f5203fc6d1830b1a6f22021a18481651fda291"
            "c44bd281ddc44181c31fe0046a7bf456417edefb8676d0dacfd5c5b0dd0724fbd9a15c06d7a6d22c6e5b3c33"
        ),
        bytes.fromhex("4b5654461d000000000000000000000083a2696404a6726573756c74a26f6bac6e756d5f756e70696e6e656401"),
    ),
}
"""Request and answer of one conversation, in order. A day and more is asked for, an hour is given."""


def test_golden_conversation() -> None:
    """What clients and pools of version 1 say of pins. Changing it takes a new version."""
    with core_rig(pins=HOUR) as rig, session(rig) as client:
        for verb, (request, answer) in GOLDEN_PINS.items():
            client.sendall(request)
            assert receive_exactly(client, len(answer)) == answer, verb


def test_an_old_client_gets_the_answers_it_knows_from_a_pool_with_pins() -> None:
    with core_rig(pins=HOUR) as rig, session(rig) as client:
        client.sendall(HELLO)
        greeting = GOLDEN_PINS["hello"][1]
        assert receive_exactly(client, len(greeting)) == greeting  # which has a field more, to be ignored
        for verb, (request, answer) in GOLDEN.items():
            if verb != "hello":
                client.sendall(request)
                assert receive_exactly(client, len(answer)) == answer, verb


def test_the_client_sends_what_pools_with_pins_know(tmp_path: Path) -> None:
    with recorded_pool(tmp_path / "pool.sock", GOLDEN_PINS) as received:
        transport = SocketTransport(f"unix:{tmp_path}/pool.sock", TOKENS["red"], RED)
        keys = [KEY, make_key("absent")]
        assert transport._send([summed(KEY, PAYLOAD)], time.monotonic() + WAIT_S) == [WriteStatus.STORED]
        assert transport.pin(keys, 90_000_000, WAIT_S) == [PinStatus.PINNED, PinStatus.MISS]
        assert transport.unpin(keys, WAIT_S) == 1
        transport.close()
    assert received == [request for request, _ in GOLDEN_PINS.values()]


def test_a_client_asks_nothing_of_an_old_pool_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An unknown verb would cost the connection, and count against the pool."""
    old = {verb: GOLDEN[verb] for verb in ("hello", "write")}
    metrics, breaker = Metrics(), CircuitBreaker(1, 1000.0)
    with recorded_pool(tmp_path / "pool.sock", old, times=4) as received, caplog.at_level(logging.WARNING):
        transport = SocketTransport(f"unix:{tmp_path}/pool.sock", TOKENS["red"], RED)
        tier = PoolTier(transport, RED, metrics=metrics, breaker=breaker)
        assert [tier.pin([KEY, make_key("absent")], 60.0) for _ in range(2)] == [0, 0]
        assert tier.unpin([KEY]) == 0
        assert transport._send([summed(KEY, PAYLOAD)], time.monotonic() + WAIT_S) == [WriteStatus.STORED]
        tier.close()
    assert received == [old["hello"][0]] * 4 + [old["write"][0]]
    assert metrics.registry.get_sample_value("kvtier_pins_total", {"tier": "pool", "status": "not_offered"}) == 4
    assert len([r for r in caplog.records if "pins no blocks" in r.message]) == 1


def pin(**changes: object) -> bytes:
    return encode_head({"id": 7, "verb": "pin", "groups": [GROUP], "ttl_ms": 1} | changes)


@pytest.mark.parametrize(
    ("sent", "result", "message"),
    [
        (pin(ttl_ms=0), "invalid", "ttl_ms must be from 1"),
        (pin(ttl_ms=-1), "invalid", "ttl_ms must be an integer from 0"),
        (pin(ttl_ms=1.5), "invalid", "ttl_ms must be an integer from 0"),
        (pin(ttl_ms=None), "invalid", "ttl_ms must be an integer from 0"),
        (pin(groups=None), "invalid", "groups must be list"),
        (pin(groups=[GROUP | {"hashes": bytes(33)}]), "invalid", "hashes of 33"),
        (pin(groups=[GROUP | {"hashes": bytes(32 * 5)}]), "limit_exceeded", "max_batch_blocks: 5"),
        (encode_head({"id": 7, "verb": "pin", "groups": [GROUP], "ttl_ms": 1}, 3), "invalid", "payload of 3"),
        (encode_head({"id": 7, "verb": "unpin"}), "invalid", "groups must be list"),
        (encode_head({"id": 7, "verb": "unpin", "groups": [GROUP] * 5}), "limit_exceeded", "max_batch_blocks: 5"),
    ],
)
def test_what_makes_no_sense_is_refused(sent: bytes, result: str, message: str) -> None:
    with core_rig(pins=HOUR) as rig:
        with session(rig, PoolLimits(max_batch_blocks=4)) as client:
            client.sendall(HELLO + sent)
            last = split_frames(receive_rest(client))[-1]
        assert (last.text("result"), rig.count("kvtier_pool_pinned_blocks")) == (result, 0)
        assert message in last.text("message")


@pytest.mark.parametrize("limits", [None, RetentionLimits(most_bytes=MIB), RetentionLimits(max_s=60.0)])
def test_a_pool_without_pins_does_not_know_the_verbs(limits: RetentionLimits | None) -> None:
    with core_rig(pins=limits) as rig:
        for verb in ("pin", "unpin"):
            with session(rig) as client:
                client.sendall(HELLO + encode_head({"id": 7, "verb": verb, "groups": [GROUP], "ttl_ms": 1}))
                greeting, last = split_frames(receive_rest(client))
            assert not greeting.has("max_pin_ms")
            assert f"{verb!r} is not known here" in last.text("message")


@pytest.fixture(scope="module")
def module_rig() -> Iterator[CoreRig]:
    with core_rig(pins=HOUR) as rig:
        yield rig


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(sent=mutated(b"".join(request for request, _ in GOLDEN_PINS.values()), start=len(HELLO)))
def test_any_bytes_pin_no_more_than_they_say(module_rig: CoreRig, sent: bytes) -> None:
    rig = module_rig
    with session(rig, PoolLimits(max_batch_blocks=100)) as client:
        with contextlib.suppress(ConnectionError):  # closed already
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
        split_frames(receive_rest(client))
    assert rig.core.lookup([KEY]) != [Status.PENDING]
    assert rig.count("kvtier_pool_pinned_blocks") <= 1
    rig.core.check()
    rig.core.discard([KEY])
    assert rig.count("kvtier_pool_pinned_blocks") == 0
