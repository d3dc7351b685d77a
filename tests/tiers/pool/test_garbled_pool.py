"""A pool on this host whose answers make no sense: an engine misses, and hears nothing of it."""

import struct
from pathlib import Path

import pytest

from kvtier.identity.keys import StoreKey
from kvtier.memory import memfd
from kvtier.metrics import Metrics
from kvtier.protocol.block import Fields, Verb
from kvtier.protocol.block_socket import FrameSocket
from kvtier.testing.blocks import TENANT, make_key, summed
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.pool.access import PoolAccess, open_transport
from kvtier.tiers.pool.tier import PoolTier
from memory_link_rig import WAIT_S, Pool, answer

pytestmark = pytest.mark.skipif(not memfd.available(), reason="shared memory needs Linux")
HITS, PLACES, SLOTS = b"\1\1", struct.pack("<6Q", *range(6)), struct.pack("<2Q", 0, 1)
KEYS: list[StoreKey] = [make_key(0), make_key(1)]
ACQUIRED = [
    {"statuses": HITS + b"\1", "places": PLACES},
    {"statuses": HITS, "places": PLACES[:-1]},
    {"statuses": HITS, "places": PLACES[:24]},
    {"statuses": HITS, "places": PLACES + PLACES},
    {"statuses": HITS},
    {"statuses": "11", "places": PLACES},
]
PREPARED = [
    {"statuses": bytes(3), "slots": SLOTS},
    {"statuses": bytes(1), "slots": SLOTS},
    {"statuses": bytes(2), "slots": SLOTS[:-1]},
    {"statuses": bytes(2), "slots": SLOTS[:8]},
    {"statuses": b"\0\xff", "slots": SLOTS},
    {"statuses": bytes(2)},
]


@pytest.mark.parametrize("garbled", range(6))
def test_calls_miss(tmp_path: Path, garbled: int) -> None:
    asked: list[str] = []

    def serve(frames: FrameSocket, request: Fields) -> None:
        asked.append(request.text("verb"))
        if asked[-1] == Verb.ACQUIRE:
            answer(frames, request, lease=7, **ACQUIRED[garbled])
        elif asked[-1] == Verb.PREPARE:
            answer(frames, request, write=7, **PREPARED[garbled])
        elif asked.count(Verb.LOOKUP) == 1 and asked[-1] == Verb.LOOKUP:  # what comes before a write
            answer(frames, request, statuses=bytes(len(KEYS)))
        else:
            answer(frames, request)  # without what belongs there

    pool = Pool(tmp_path / "pool.sock", serve)
    metrics = Metrics()
    access = PoolAccess(addresses=[pool.address], tenant=TENANT, token="token")
    transport = open_transport(access, metrics, connect_ahead=False)
    tier = PoolTier(transport, TENANT, metrics=metrics, breaker=CircuitBreaker(100, 1.0), call_timeout_s=WAIT_S)
    try:
        assert tier.write([summed(key, bytes(4096)) for key in KEYS]) == [WriteStatus.FAILED] * 2
        assert tier.read(KEYS, [memoryview(bytearray(4096)) for _ in KEYS]) == [Status.MISS] * 2
        assert tier.lookup(KEYS) == [Status.MISS] * 2
        assert (Verb.PREPARE in asked, Verb.WRITE in asked, Verb.READ in asked) == (True, True, True)
    finally:
        tier.close()
        pool.close()
