"""Pins in a pool's core, driven at random: what it has promised to keep is there until it may go."""

import contextlib
from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis.stateful import invariant, rule

from clock_rig import StillClock
from kvtier.protocol.retention import PinStatus
from kvtier.store.retention import RetentionLimits
from kvtier.testing.contract import make_key
from kvtier.testing.states import NUM_LABELS, Store, StoreStateMachine, batches, store_settings
from kvtier.tiers.base import Status, WriteStatus
from pool_rig import RED, core_rig, keys


class PinnedStore:
    """A core with pins as a `Store`, and what it has promised to keep."""

    forgets_for_good = True

    def __init__(self, payload_bytes: int) -> None:
        self._payload_bytes = payload_bytes
        self._stack = contextlib.ExitStack()
        self.clock = StillClock()
        limits = RetentionLimits(max_s=100.0, most_bytes=128 * 1024, several_tenants=False)
        self.rig = self._stack.enter_context(core_rig(memory_bytes=512 * 1024, pins=limits, clock=self.clock))
        self.pinned: dict[int, float] = {}
        """Until when, by label."""

    def write(self, blocks: Sequence[tuple[int, bytes]]) -> list[WriteStatus]:
        return [self.rig.write(make_key(label), payload) for label, payload in blocks]

    def read(self, labels: Sequence[int]) -> list[bytes | None]:
        return self.rig.load(keys(labels), self._payload_bytes)

    def lookup(self, labels: Sequence[int]) -> list[Status]:
        return self.rig.core.lookup(keys(labels))

    def discard(self, labels: Sequence[int]) -> int:
        for label in labels:
            self.pinned.pop(label, None)
        return self.rig.core.discard(keys(labels))

    def pin(self, labels: Sequence[int], ttl_s: float) -> list[PinStatus]:
        statuses = self.rig.core.pin(RED, keys(labels), ttl_s)
        for label, status in zip(labels, statuses, strict=True):
            if status is PinStatus.PINNED:
                self.pinned[label] = max(self.pinned.get(label, 0.0), self.clock.now_s + min(ttl_s, 100.0))
            else:
                assert label not in self.pinned
        return statuses

    def unpin(self, labels: Sequence[int]) -> None:
        assert self.rig.core.unpin(keys(labels)) == len(set(labels) & self.pinned.keys())
        for label in labels:
            self.pinned.pop(label, None)

    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.rig.core.pins.end_due()
        self.pinned = {label: until_s for label, until_s in self.pinned.items() if until_s > self.clock.now_s}

    def num_blocks(self) -> int:
        return self.rig.core.usage(RED)[0].num_blocks

    def reopen(self) -> None:
        """There is no medium."""

    def check(self) -> None:
        self.rig.core.check()
        blocks, _, slab_bytes = self.rig.pinned()
        assert blocks == len(self.pinned)
        assert slab_bytes <= 128 * 1024

    def close(self) -> None:
        self._stack.close()


class PinMachine(StoreStateMachine):
    store: PinnedStore

    def make_store(self) -> Store:
        return PinnedStore(self.payload_bytes)

    @rule(batch=batches, ttl_s=st.sampled_from([1.0, 10.0, 1000.0]))
    def pin(self, batch: list[int], ttl_s: float) -> None:
        for label, status in zip(batch, self.store.pin(batch, ttl_s), strict=True):
            if status is PinStatus.MISS:
                self._missed(label)
            else:
                assert label in self.stored

    @rule(batch=batches)
    def unpin(self, batch: list[int]) -> None:
        self.store.unpin(batch)

    @rule(seconds=st.sampled_from([0.5, 5.0, 50.0]))
    def wait(self, seconds: float) -> None:
        self.store.wait(seconds)

    @rule()
    def fill(self) -> None:
        """All labels: more than there is room for."""
        for label in range(NUM_LABELS):
            self.write([label], 0)

    @invariant()
    def what_is_pinned_is_there(self) -> None:
        labels = sorted(self.store.pinned)
        assert self.store.read(labels) == [self.stored[label] for label in labels]


PinMachine.TestCase.settings = store_settings(50)
TestPinStates = PinMachine.TestCase
