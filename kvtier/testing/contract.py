"""What every tier must do. Subclass `TierContract` in a test file; needs pytest and hypothesis.

class TestMyTier(TierContract):
    @pytest.fixture
    def make_tier(self) -> MakeTier:
        return lambda capacity_bytes: MyTier(capacity_bytes)

TestMyTierStates = tier_state_machine(lambda capacity_bytes: MyTier(capacity_bytes)).TestCase
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from kvtier.errors import ClosedError, InvalidInputError
from kvtier.identity.keys import NamespaceId, StoreKey, TenantId, tenant_id
from kvtier.memory.buffers import ReadableBuffer
from kvtier.testing.blocks import TENANT, make_key, make_payload, payload_maker, read_blocks, summed
from kvtier.testing.states import tier_state_machine
from kvtier.tiers.base import Item, Status, Tier, WriteStatus

__all__ = [
    "MakeTier",
    "TierContract",
    "make_key",
    "make_payload",
    "read_blocks",
    "summed",
    "tier_state_machine",
]

MakeTier = Callable[[int], Tier]
"""Makes an open tier of about so many bytes of payload. Called again, it may reopen the same medium."""

_WAIT_S = 30.0
"""Bound on everything a test waits for; never reached when the tier works."""


class TierContract:
    """Subclass, override `make_tier`, and set the knobs where the defaults do not fit.

    Every test ends with `check()` and `close()`.
    """

    payload_bytes = 16 * 1024
    capacity_bytes = 2 * 2**20
    """Room for at least half as many payload bytes, beside the tier's own overhead."""
    tenants: tuple[TenantId, TenantId] = (TENANT, tenant_id("blue"))
    """Two tenants that the tier serves. Equal for a tier that serves one only."""
    persistent = False
    """Content survives `close` and a second `make_tier`."""
    evicts = True
    """Makes room by itself; False for a tier that answers FULL instead."""
    verifies = True
    """Holds what it reads against its writer's checksum; False where its bytes never leave this process."""
    packs = False
    """May take less space than the payloads have, which can be packed then."""

    @pytest.fixture
    def make_tier(self) -> MakeTier:
        raise NotImplementedError("override make_tier in the subclass")

    @pytest.fixture
    def tier(self, make_tier: MakeTier) -> Iterator[Tier]:
        tier = make_tier(self.capacity_bytes)
        yield tier
        tier.check()
        tier.close()

    def key(self, label: object) -> StoreKey:
        return make_key(label, tenant=self.tenants[0])

    def payload(self, label: object) -> bytes:
        return payload_maker(self.packs)(label, self.payload_bytes)

    def store(self, tier: Tier, labels: Sequence[object]) -> list[WriteStatus]:
        return tier.write([summed(self.key(label), self.payload(label)) for label in labels])

    def load(self, tier: Tier, labels: Sequence[object]) -> list[bytes | None]:
        return read_blocks(tier, [self.key(label) for label in labels], self.payload_bytes)

    def test_empty_batches(self, tier: Tier) -> None:
        assert tier.lookup([]) == []
        assert tier.read([], []) == []
        assert tier.write([]) == []
        assert tier.discard([]) == 0

    def test_unknown_keys_miss(self, tier: Tier) -> None:
        keys = [self.key(i) for i in range(3)]
        assert tier.lookup(keys) == [Status.MISS] * 3
        assert self.load(tier, range(3)) == [None] * 3
        assert tier.discard(keys) == 0

    def test_written_blocks_read_back_byte_for_byte_in_batch_order(self, tier: Tier) -> None:
        assert self.store(tier, range(16)) == [WriteStatus.STORED] * 16
        order = [7, "absent", 0, 15, 3]
        assert self.load(tier, order) == [None if i == "absent" else self.payload(i) for i in order]
        keys = [self.key(i) for i in order]
        assert tier.lookup(keys) == [Status.HIT, Status.MISS, Status.HIT, Status.HIT, Status.HIT]

    def test_payloads_may_be_any_readable_buffer(self, tier: Tier) -> None:
        payload = self.payload("a")
        padded = memoryview(b"xyz" + payload + b"xyz")[3:-3]
        items: list[Item[ReadableBuffer]]
        items = [
            summed(self.key("a"), payload),
            summed(self.key("b"), bytearray(payload)),
            summed(self.key("c"), padded),
        ]
        assert tier.write(items) == [WriteStatus.STORED] * 3
        assert read_blocks(tier, [key for key, _, _ in items], self.payload_bytes) == [payload] * 3

    def test_the_buffer_is_the_callers_again_after_write(self, tier: Tier) -> None:
        buffer = bytearray(self.payload("a"))
        tier.write([summed(self.key("a"), buffer)])
        buffer[:] = bytes(len(buffer))
        assert self.load(tier, ["a"]) == [self.payload("a")]

    def test_what_does_not_match_its_writers_checksum_is_a_miss(self, tier: Tier) -> None:
        if not self.verifies:
            return
        key, payload, checksum = summed(self.key("a"), self.payload("a"))
        changed = bytes([payload[0] ^ 1]) + payload[1:]
        assert tier.write([(key, changed, checksum)])[0] in (WriteStatus.STORED, WriteStatus.FAILED)
        assert self.load(tier, ["a"]) == [None]
        assert self.store(tier, ["a"]) == [WriteStatus.STORED]
        assert self.load(tier, ["a"]) == [payload]

    def test_an_existing_key_keeps_its_bytes(self, tier: Tier) -> None:
        self.store(tier, ["a"])
        assert tier.write([summed(self.key("a"), self.payload("other"))]) == [WriteStatus.EXISTS]
        assert self.load(tier, ["a"]) == [self.payload("a")]

    def test_a_key_twice_in_one_batch(self, tier: Tier) -> None:
        assert self.store(tier, ["a", "a"]) == [WriteStatus.STORED, WriteStatus.EXISTS]
        assert self.load(tier, ["a", "a"]) == [self.payload("a")] * 2
        assert tier.discard([self.key("a")] * 2) == 1

    @pytest.mark.parametrize("difference", [-1, 1])
    def test_another_length_is_a_miss(self, tier: Tier, difference: int) -> None:
        self.store(tier, ["a"])
        assert read_blocks(tier, [self.key("a")], self.payload_bytes + difference) == [None]
        assert self.load(tier, ["a"]) == [self.payload("a")]

    def test_as_many_buffers_as_keys(self, tier: Tier) -> None:
        with pytest.raises(InvalidInputError):
            tier.read([self.key("a")], [])

    def test_discarded_keys_miss_and_can_be_written_again(self, tier: Tier) -> None:
        self.store(tier, ["a", "b"])
        assert tier.discard([self.key("a"), self.key("absent")]) == 1
        assert tier.lookup([self.key("a"), self.key("b")]) == [Status.MISS, Status.HIT]
        assert self.load(tier, ["a", "b"]) == [None, self.payload("b")]
        assert self.store(tier, ["a"]) == [WriteStatus.STORED]
        assert self.load(tier, ["a"]) == [self.payload("a")]

    def test_tenants_do_not_meet(self, tier: Tier) -> None:
        red, blue = self.tenants
        if red == blue:
            return
        tier.write([summed(make_key("a", tenant=red), self.payload("red"))])
        assert tier.lookup([make_key("a", tenant=blue)]) == [Status.MISS]
        assert tier.write([summed(make_key("a", tenant=blue), self.payload("blue"))]) == [WriteStatus.STORED]
        keys = [make_key("a", tenant=red), make_key("a", tenant=blue)]
        assert read_blocks(tier, keys, self.payload_bytes) == [self.payload("red"), self.payload("blue")]

    def test_namespaces_do_not_meet_and_have_lengths_of_their_own(self, tier: Tier) -> None:
        other = make_key("a", tenant=self.tenants[0], namespace=NamespaceId(b"namespace-other!"))
        small = payload_maker(self.packs)("small", self.payload_bytes // 2)
        self.store(tier, ["a"])
        assert tier.lookup([other]) == [Status.MISS]
        assert tier.write([summed(other, small)]) == [WriteStatus.STORED]
        assert read_blocks(tier, [other], len(small)) == [small]
        assert self.load(tier, ["a"]) == [self.payload("a")]

    def test_usage_counts_blocks_and_stays_in_bounds(self, tier: Tier) -> None:
        self.store(tier, range(8))
        usage = tier.usage()
        assert usage.num_blocks == 8
        assert usage.used_bytes >= (4 if self.packs else 8) * self.payload_bytes
        assert not usage.capacity_bytes or usage.used_bytes <= usage.capacity_bytes
        tier.discard([self.key(i) for i in range(8)])
        assert tier.usage().num_blocks == 0
        assert tier.usage().used_bytes == 0

    def test_a_flood_is_answered_within_capacity(self, tier: Tier) -> None:
        num_blocks = 4 * self.capacity_bytes // self.payload_bytes
        for start in range(0, num_blocks, 8):
            statuses = self.store(tier, range(start, start + 8))
            assert set(statuses) <= {WriteStatus.STORED, WriteStatus.FULL}
            assert WriteStatus.STORED in statuses or not self.evicts
            tier.check()
            usage = tier.usage()
            assert not usage.capacity_bytes or usage.used_bytes <= usage.capacity_bytes
        loaded = self.load(tier, range(num_blocks))
        assert all(block in (None, self.payload(i)) for i, block in enumerate(loaded))
        assert sum(block is not None for block in loaded) * self.payload_bytes >= self.capacity_bytes // 2
        assert None in loaded
        if self.evicts:
            assert self.load(tier, [num_blocks - 8]) != [None]

    def test_content_after_reopening(self, make_tier: MakeTier) -> None:
        tier = make_tier(self.capacity_bytes)
        self.store(tier, range(8))
        tier.close()
        tier = make_tier(self.capacity_bytes)
        loaded = self.load(tier, range(8))
        assert all(block in (None, self.payload(i)) for i, block in enumerate(loaded))
        if self.persistent:
            assert None not in loaded
            assert self.store(tier, [3]) == [WriteStatus.EXISTS]
        tier.check()
        tier.close()

    def test_writers_of_the_same_keys_store_each_once(self, tier: Tier) -> None:
        labels = list(range(16))
        results = _together(4, lambda _: self.store(tier, labels))
        for of_one_key in zip(*results, strict=True):
            assert sorted(of_one_key) == [WriteStatus.STORED] + [WriteStatus.EXISTS] * 3
        assert self.load(tier, labels) == [self.payload(i) for i in labels]

    def test_readers_and_writers_under_eviction_never_see_wrong_bytes(self, tier: Tier) -> None:
        labels = list(range(2 * self.capacity_bytes // self.payload_bytes))

        def run(worker: int) -> None:
            for start in range(0, len(labels), 8):
                batch = labels[start : start + 8][:: 1 if worker % 2 else -1]
                if worker < 2:
                    self.store(tier, batch)
                loaded = self.load(tier, batch)
                assert all(block in (None, self.payload(i)) for i, block in zip(batch, loaded, strict=True))
                if worker == 3:
                    tier.discard([self.key(i) for i in batch[:2]])

        _together(4, run)

    def test_a_closed_tier_says_so(self, make_tier: MakeTier) -> None:
        tier = make_tier(self.capacity_bytes)
        self.store(tier, ["a"])
        tier.close()
        tier.close()
        calls: list[Callable[[], Any]] = [
            lambda: tier.lookup([self.key("a")]),
            lambda: self.load(tier, ["a"]),
            lambda: self.store(tier, ["b"]),
            lambda: tier.discard([self.key("a")]),
            tier.usage,
            tier.check,
        ]
        for call in calls:
            with pytest.raises(ClosedError):
                call()

    def test_close_under_load_ends_every_call(self, make_tier: MakeTier) -> None:
        tier = make_tier(self.capacity_bytes)
        warm = threading.Barrier(4)

        def read_for_ever(worker: int) -> None:
            while True:
                assert self.load(tier, [worker]) == [self.payload(worker)]

        def run(worker: int) -> None:
            self.store(tier, [worker])
            warm.wait(_WAIT_S)
            if worker == 0:
                tier.close()
                return
            with pytest.raises(ClosedError):
                read_for_ever(worker)

        _together(4, run)


def _together(num_threads: int, run: Callable[[int], Any]) -> list[Any]:
    """Results of `run(0)`, `run(1)`, ... started at the same moment; raises what one of them raises."""
    start = threading.Barrier(num_threads)

    def wait_and_run(worker: int) -> Any:
        start.wait(_WAIT_S)
        return run(worker)

    with ThreadPoolExecutor(num_threads) as executor:
        futures: list[Future[Any]] = [executor.submit(wait_and_run, i) for i in range(num_threads)]
        return [future.result(_WAIT_S) for future in futures]
