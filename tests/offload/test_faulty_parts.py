"""The hierarchy over a tier with a bug, and over a device that is slow."""

import io
import json
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from hierarchy_rig import Held, Rig, chain, pool_tier
from kvtier.device.kv import Blocks, Fence, HostMemoryKV
from kvtier.identity.keys import StoreKey
from kvtier.system.logs import JsonLines, within_request
from kvtier.tiers.base import Status, Tier
from kvtier.tiers.host.tier import HostTier
from threads_rig import no_more_threads

pool = pytest.fixture(pool_tier)


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """What is logged, as JSON lines."""
    log, written = logging.getLogger("kvtier"), io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonLines())
    log.addHandler(handler)
    yield written
    log.removeHandler(handler)


class Misbehaving(Held):
    """A tier with a bug: it raises what tiers do not raise, or answers fewer than it was asked."""

    def __init__(self, inner: Tier, fault: str) -> None:
        super().__init__(inner)
        self.fault = fault

    def lookup(self, keys: Sequence[StoreKey]) -> list[Status]:
        return self._spoilt(super().lookup(keys), "lookup")

    def read(self, keys: Sequence[StoreKey], into: Sequence[memoryview]) -> list[Status]:
        return self._spoilt(super().read(keys, into), "read")

    def _spoilt(self, statuses: list[Status], verb: str) -> list[Status]:
        if self.fault == f"{verb} raises":
            raise ValueError("a bug")
        return statuses[1:] if self.fault == f"{verb} short" else statuses


@pytest.mark.parametrize("fault", ["lookup raises", "lookup short", "read raises", "read short"])
def test_a_tier_with_a_bug_is_a_tier_that_misses(pool: HostTier, fault: str, logged: io.StringIO) -> None:
    """A line of the log says so, and whose request it was, though other threads than the caller's ask tiers."""
    hashes, writer = chain(4), Rig(pool)
    writer.save(hashes, range(4))
    writer.settle()
    rig = Rig(Misbehaving(pool, fault))
    with within_request("r1"):
        assert rig.tiers_of(hashes) == (["MISS"] if fault.startswith("lookup") else ["pool"]) * 4
        loaded = rig.load(hashes, range(4))
    assert loaded.failed == (frozenset(range(4)) if fault.startswith("read") else frozenset())
    rig.settle()
    rig.close()
    writer.close()
    (line,) = map(json.loads, logged.getvalue().splitlines())
    assert (line["tier"], line["request_id"]) == ("pool", "r1")
    assert line["message"].startswith("looking up" if fault.startswith("lookup") else "loading")


class SlowDevice(HostMemoryKV):
    """Copies to it wait for `gate`."""

    def __init__(self, blocks: np.ndarray[Any, Any]) -> None:
        super().__init__(blocks)
        self.gate, self.entered = threading.Event(), threading.Event()

    def scatter_all(self, sources: Sequence[Blocks], *, after: Fence | None) -> float:
        self.entered.set()
        assert self.gate.wait(20)
        return super().scatter_all(sources, after=after)


def test_a_cancelled_load_keeps_its_device_slots_until_the_copy_is_over(pool: HostTier) -> None:
    """Else the next request's block would be overwritten with this one's."""
    hashes = chain(4)
    writer = Rig(pool)
    writer.save(hashes, range(4))
    writer.close()
    rig = Rig(pool)
    device = rig.mover._memory.device = SlowDevice(rig.device)
    job = rig.hierarchy.start_load([(h, i) for i, h in enumerate(hashes)])
    assert device.entered.wait(20)
    rig.hierarchy.cancel(job)
    for _ in range(20):
        assert rig.hierarchy.poll() == [], "the slots are still being written"
        rig.hierarchy.wait(0.005)
    device.gate.set()
    rig.result(job)
    rig.settle()
    rig.close()


def test_a_hierarchy_needs_no_thread_that_it_does_not_have(pool: HostTier) -> None:
    """Nothing is raised into the engine, and no job is lost, where the process may have no more threads."""
    hashes, rig = chain(4), Rig(pool)
    with no_more_threads():
        assert rig.tiers_of(hashes) == ["MISS"] * 4
        assert rig.save(hashes, range(4)) is not None
        assert rig.tiers_of(hashes) == ["host"] * 4
        assert not rig.load(hashes, range(4, 8)).failed
        rig.settle()
    assert pool.usage().num_blocks == 4
    rig.close()
