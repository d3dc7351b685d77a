"""Tiers in a process of their own do what tiers do, and what they know reaches the engine."""

import json
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
from prometheus_client import Counter
from prometheus_client.metrics import MetricWrapperBase

from aside_rig import BLOCK_BYTES, MIB, Heard, staged, start
from disk_rig import damage
from kvtier.errors import ClosedError, ConfigError, InvalidInputError, KvtierError
from kvtier.events import Event, EventKind, TierState
from kvtier.memory.arena import Arena
from kvtier.metrics import Metrics
from kvtier.testing.contract import MakeTier, TierContract, make_key, make_payload, summed
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.sidecar import SidecarTier
from kvtier.tiers.sidecar.event_relay import NOT_RELAYED, EventReceiver, EventSender


class TestDiskAside(TierContract):
    persistent = True

    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> MakeTier:
        return lambda capacity_bytes: staged("disk", json.dumps([str(tmp_path / "disk"), capacity_bytes]), "disk")


class TestMemoryAside(TierContract):
    verifies = False

    @pytest.fixture
    def make_tier(self) -> MakeTier:
        return lambda capacity_bytes: staged("memory", str(capacity_bytes), "memory")


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(64, BLOCK_BYTES, shared=True)
    yield arena
    arena.close()


def test_events_and_counters_reach_the_engine(tmp_path: Path, arena: Arena) -> None:
    """Before the answer that tells of the change, as from a tier in the engine."""
    heard, metrics = Heard(), Metrics()
    process = start(arena, "disk", json.dumps([str(tmp_path / "disk"), 2 * MIB]), on_event=heard, metrics=metrics)
    tier = SidecarTier("disk", process)
    keys = [make_key(i) for i in range(8)]
    for slot in range(8):
        arena.view(slot)[:] = make_payload(slot, BLOCK_BYTES)
    assert tier.write([summed(key, arena.view(i)) for i, key in enumerate(keys)]) == [WriteStatus.STORED] * 8
    assert heard.keys == set(keys)
    assert tier.discard(keys[:2]) == 2
    assert heard.keys == set(keys[2:])
    damage(tmp_path / "disk", keys[4])
    assert tier.read(keys, [arena.view(i) for i in range(8)]).count(Status.HIT) == 5
    process.close()
    assert metrics.registry.get_sample_value("kvtier_corrupt_blocks_total", {"tier": "disk"}) == 1
    assert heard.events[-1] == Event(EventKind.CLEARED, "disk"), "without its process nothing is known of the tier"


def test_every_metric_of_a_tier_reaches_the_engine_or_is_known_not_to() -> None:
    collectors = [metric for metric in vars(Metrics()).values() if isinstance(metric, MetricWrapperBase)]
    others = [metric for metric in collectors if not isinstance(metric, Counter)]
    names = {family.name for metric in others for family in metric.collect()}
    assert names == NOT_RELAYED, "a tier in a process of its own would not be heard: count, or say who tells the engine"


def test_what_a_folder_holds_is_known_from_the_start(tmp_path: Path, arena: Arena) -> None:
    keys = [make_key(i) for i in range(40)]
    with_blocks = DiskTier.open(tmp_path / "disk", 4 * MIB, reserve_bytes=0)
    with_blocks.write([summed(key, bytes(BLOCK_BYTES)) for key in keys])
    with_blocks.close()
    heard = Heard()
    process = start(arena, "disk", json.dumps([str(tmp_path / "disk"), 4 * MIB]), on_event=heard)
    assert heard.keys == set(keys)
    process.close()


def test_only_buffers_in_the_shared_memory(arena: Arena) -> None:
    process = start(arena, "memory", str(MIB))
    tier = SidecarTier("memory", process)
    foreign = memoryview(bytearray(BLOCK_BYTES))
    for view in (foreign, memoryview(b"x" * BLOCK_BYTES)):
        with pytest.raises(InvalidInputError, match="not in the memory"):
            tier.write([summed(make_key(0), view)])
    with pytest.raises(InvalidInputError, match="not in the memory"):
        tier.read([make_key(0)], [foreign])
    assert tier.write([summed(make_key(0), arena.view(63))]) == [WriteStatus.STORED], "the last bytes are in it"
    tier.close()
    process.close()
    process.close()
    with pytest.raises(ClosedError):
        tier.lookup([make_key(0)])


def test_what_keeps_the_tiers_from_opening_is_told(tmp_path: Path, arena: Arena) -> None:
    settings = json.dumps([str(tmp_path / "disk"), MIB])
    taken = DiskTier.open(tmp_path / "disk", MIB, reserve_bytes=0)
    with pytest.raises(ConfigError, match="disk"):
        start(arena, "disk", settings)
    taken.close()
    with pytest.raises(KvtierError, match="no_such"):
        start(arena, "no_such", settings)
    start(arena, "disk", settings).close()


def test_batches_larger_than_a_request(monkeypatch: pytest.MonkeyPatch, arena: Arena) -> None:
    monkeypatch.setattr("kvtier.tiers.sidecar.tier.MAX_BLOCKS", 3)
    process = start(arena, "memory", str(4 * MIB))
    tier = SidecarTier("memory", process)
    keys = [make_key(i) for i in range(8)]
    views = [arena.view(i) for i in range(8)]
    for i, view in enumerate(views):
        view[:] = make_payload(i, BLOCK_BYTES)
    assert tier.write([summed(*block) for block in zip(keys, views, strict=True)]) == [WriteStatus.STORED] * 8
    into = [arena.view(20 + i) for i in range(8)]
    assert tier.read(keys, into) == [Status.HIT] * 8
    assert [bytes(view) for view in into] == [make_payload(i, BLOCK_BYTES) for i in range(8)]
    assert tier.discard(keys) == 8
    process.close()


def test_news_are_applied_in_order() -> None:
    desk, heard, metrics = EventSender(Metrics()), Heard(), Metrics()
    reader = EventReceiver(heard, metrics)
    key = make_key(0)
    taken = []
    for kind in (EventKind.STORED, EventKind.REMOVED, EventKind.STORED):
        desk.on_event(Event(kind, "disk", (key,)))
        taken.append(desk.take())
    assert desk.take() == (0, b"")
    for news in (taken[2], taken[1]):
        reader.take(*news)
        assert not heard.events
    reader.take(*taken[0])
    assert [event.kind for event in heard.events] == [EventKind.STORED, EventKind.REMOVED, EventKind.STORED]
    reader.end()
    reader.take(4, taken[0][1])
    assert heard.events[-1].kind is EventKind.CLEARED, "late news of a process that is gone are ignored"


def test_the_state_of_a_tier_is_that_of_its_process() -> None:
    desk, heard, metrics = EventSender(Metrics()), Heard(), Metrics()
    reader = EventReceiver(heard, metrics)

    def states() -> list[float | None]:
        value = metrics.registry.get_sample_value
        return [value("kvtier_tier_state", {"tier": "disk", "state": state.value}) for state in TierState]

    kinds = [EventKind.READ_ONLY, EventKind.WRITABLE, EventKind.OFF]
    for kind, expected in zip(kinds, ([0, 1, 0], [1, 0, 0], [0, 0, 1]), strict=True):
        desk.on_event(Event(kind, "disk"))
        reader.take(*desk.take())
        assert states() == expected
    reader.end()
    assert states() == [1, 0, 0], "the next process begins anew"
    kinds += [EventKind.CLEARED, EventKind.WRITABLE]
    assert [event.kind for event in heard.events] == kinds


def test_garbled_news_are_refused() -> None:
    for packed in (b"\xc1", msgpack.packb([1]), msgpack.packb([[["stored", "disk", b"short"]], [], None])):
        with pytest.raises(InvalidInputError):
            EventReceiver(Heard(), Metrics()).take(1, packed)
