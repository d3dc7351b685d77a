"""The state machine that drives every tier drives the hierarchy: all tiers as one, in the background, over faults."""

import errno
from collections import Counter
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
from hypothesis.stateful import initialize, invariant, precondition, rule

from hierarchy_rig import BLOCK_BYTES, until
from hierarchy_store import HASHES, HierarchyStore
from kvtier.offload import DirectorySettings
from kvtier.testing.blocks import make_packable_payload
from kvtier.testing.states import StoreStateMachine, batches, store_settings
from kvtier.tiers.base import WriteStatus
from kvtier.tiers.common.write_policy import WritePolicy
from sweeps import IN_FULL

FAULTS = {"write": errno.ENOSPC, "create": errno.EIO, "read": errno.EMFILE, "remove": errno.EROFS}


class HierarchyStateMachine(StoreStateMachine):
    """Adds what runs in the background, beside all else that the machine does."""

    payload_bytes = BLOCK_BYTES
    packable = True
    store: HierarchyStore

    @initialize(num_batches=st.integers(min_value=0, max_value=5))
    def fill(self, num_batches: int) -> None:
        """More than the arena holds, each used often enough for any policy, so that all tiers have something to hit."""
        for start in range(0, 6 * num_batches, 6):
            batch = list(range(start, start + 6))
            self.write(batch, version=0)
            self.read(batch)
            self.read(batch)

    @rule(batch=batches, full=st.booleans())
    def start_write(self, batch: list[int], full: bool) -> None:
        blocks = [(label, self.payload(label)) for label in batch]
        self.written.update(batch)
        self.stored.update(blocks)
        if blocks:
            self.store.start_write(blocks, full=full)

    @rule(batch=batches)
    def start_read(self, batch: list[int]) -> None:
        self.store.start_read(batch)

    @precondition(lambda self: self.written)
    @rule(data=st.data(), give_up=st.booleans())
    def start_read_what_was_written(self, data: st.DataObject, give_up: bool) -> None:
        """With `give_up`, cancelled before a tier below answers: the slots are used for something else at once."""
        if give_up:
            self.store.stall()
        self.store.start_read(self.draw_written(data))
        if give_up:
            self.store.cancel_all()
            self.poll()

    @rule()
    def poll(self) -> None:
        self.store.poll()

    @rule()
    def finish(self) -> None:
        self.store.finish()

    @rule()
    def cancel_loads(self) -> None:
        self.store.cancel_all()

    @rule(batch=batches)
    def cancel_a_lookup(self, batch: list[int]) -> None:
        hierarchy = self.store.rig.hierarchy
        hierarchy.cancel_lookup(hierarchy.start_lookup([HASHES[label] for label in batch]))

    @rule()
    def reset(self) -> None:
        self.store.rig.hierarchy.reset()

    @rule(op=st.sampled_from(sorted(FAULTS)), times=st.integers(min_value=1, max_value=4))
    def the_disk_will_fail(self, op: str, times: int) -> None:
        self.store.files.fail_next(op, FAULTS[op], times)

    @rule(probability=st.sampled_from([0.0, 0.3]), batch=batches)
    def the_disk_fails_by_chance_and_the_pool_by_key(self, probability: float, batch: list[int]) -> None:
        self.store.files.fail_by_chance(probability)
        self.store.pool.broken = {HASHES[label] for label in batch}

    @rule()
    def the_tiers_below_stall(self) -> None:
        self.store.stall()

    @invariant()
    def loads_brought_what_was_saved(self) -> None:
        for label, block in self.store.loaded:
            assert block == self.stored[label]
        self.store.loaded.clear()

    @invariant()
    def what_comes_and_goes_is_noted(self) -> None:
        assert self.store.listen() == self.store.readable()


def settings_for(policy: WritePolicy) -> DirectorySettings:
    return DirectorySettings(
        batch_blocks=3, host_policy=policy, tier_policies={"disk": policy, "pool": policy}, write_back_blocks=3
    )


@pytest.mark.parametrize(
    ("policy", "leases"), [*((policy, False) for policy in WritePolicy), (WritePolicy.WRITE_THROUGH, True)]
)
def test_states_against_a_dict(tmp_path: Path, policy: WritePolicy, leases: bool) -> None:
    settings = settings_for(policy)
    hits: Counter[str] = Counter()
    leased: Counter[str] = Counter()

    class Machine(HierarchyStateMachine):
        def make_store(self) -> HierarchyStore:
            return HierarchyStore(tmp_path / "disk", settings, leases=leases)

        def teardown(self) -> None:
            try:
                self.store.finish()
                self.loads_brought_what_was_saved()
            finally:
                hits.update(self.store.hits)
                if self.store.leased is not None:
                    leased.update(leased=self.store.leased.num_leased, taken_back=self.store.leased.num_taken_back)
                super().teardown()

    # The same 30 each time: among others there may be none in which a lease is taken back.
    few = hypothesis.settings(store_settings(max_examples=30, num_steps=40), derandomize=True)
    Machine.TestCase.settings = store_settings(max_examples=300, num_steps=40) if IN_FULL else few
    Machine.TestCase().runTest()
    assert hits["host"] > 0, "a machine that never hits proves nothing"
    assert not leases or leased["leased"] > leased["taken_back"] > 0


@pytest.mark.parametrize("policy", WritePolicy)
def test_what_the_machine_drives_hits_every_tier(tmp_path: Path, policy: WritePolicy) -> None:
    store = HierarchyStore(tmp_path / "disk", settings_for(policy))
    blocks = [(label, make_packable_payload(label, BLOCK_BYTES)) for label in range(5)]
    payloads = [payload for _, payload in blocks]
    assert store.write(blocks) == [WriteStatus.STORED] * 5
    for tier in ("host", "host", "disk", "pool"):
        if tier == "disk":
            store.reopen()
        elif tier == "pool":
            store.rig.hierarchy.reset()
            until(lambda: store.rig.tiers_of(HASHES[:5]) == ["pool"] * 5 or None)
        assert store.read(range(5)) == payloads
        assert store.hits.pop(tier) == 5
    store.close()
