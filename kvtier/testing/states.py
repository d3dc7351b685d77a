"""One Hypothesis state machine for whatever keeps blocks, against a dict: it may forget, but never lie."""

from collections.abc import Callable, Sequence
from typing import Protocol

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.testing.blocks import make_key, payload_maker, read_blocks, summed
from kvtier.tiers.base import Status, Tier, WriteStatus

NUM_LABELS = 40
"""Blocks the machine knows; more than a store under test should hold."""

labels = st.integers(min_value=0, max_value=NUM_LABELS - 1)
batches = st.lists(labels, max_size=6)


class Store(Protocol):
    """What the machine drives, from one thread: blocks by label, in batches. A batch may name a label twice."""

    @property
    def forgets_for_good(self) -> bool:
        """What was missed or discarded stays away until it is written again, and a write fails for lack of room only.

        Not so where the medium fails for a while, or where several copies of a block are kept.
        """

    def write(self, blocks: Sequence[tuple[int, bytes]]) -> list[WriteStatus]:
        """A status per block, in order, as `Tier.write` has it."""

    def read(self, labels: Sequence[int]) -> list[bytes | None]:
        """Payloads, None for a miss."""

    def lookup(self, labels: Sequence[int]) -> list[Status]:
        """A status per label."""

    def discard(self, labels: Sequence[int]) -> int:
        """Forgets what can be forgotten; how many different labels were there."""

    def num_blocks(self) -> int:
        """How many different labels are there."""

    def reopen(self) -> None:
        """Closes, and opens the same medium; nothing for a store that has none."""

    def check(self) -> None:
        """Raises when the store is not sound."""

    def close(self) -> None:
        """The end of an example."""


class TierStore:
    """A tier as a `Store`."""

    def __init__(
        self, make_tier: Callable[[], Tier], payload_bytes: int, *, persistent: bool, forgets_for_good: bool = True
    ) -> None:
        """Opens the tier and discards all that the machine knows: others may have used the medium before."""
        self._make_tier = make_tier
        self._payload_bytes = payload_bytes
        self._persistent = persistent
        self.forgets_for_good = forgets_for_good
        self._tier = make_tier()
        self.discard(range(NUM_LABELS))

    def write(self, blocks: Sequence[tuple[int, bytes]]) -> list[WriteStatus]:
        return self._tier.write([summed(make_key(label), payload) for label, payload in blocks])

    def read(self, labels: Sequence[int]) -> list[bytes | None]:
        return read_blocks(self._tier, [make_key(label) for label in labels], self._payload_bytes)

    def lookup(self, labels: Sequence[int]) -> list[Status]:
        return self._tier.lookup([make_key(label) for label in labels])

    def discard(self, labels: Sequence[int]) -> int:
        return self._tier.discard([make_key(label) for label in labels])

    def num_blocks(self) -> int:
        return self._tier.usage().num_blocks

    def reopen(self) -> None:
        if self._persistent:
            self._tier.close()
            self._tier = self._make_tier()

    def check(self) -> None:
        self._tier.check()

    def close(self) -> None:
        self._tier.close()


class StoreStateMachine(RuleBasedStateMachine):
    """The machine. Subclass, override `make_store`, add rules for what only this store can do.

    `TestCase` of the subclass is the test; `store_settings` are settings that fit it.
    """

    payload_bytes = 16 * 1024
    packable = False
    """Payloads that codecs can pack."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: dict[int, bytes] = {}
        """What may be there: the oracle. Never less than what is there."""
        self.written: set[int] = set()
        """Labels that were tried. Unlike `stored` it is the same whatever threads do, so draws may depend on it."""
        self.store = self.make_store()

    def make_store(self) -> Store:
        """Makes the store under test, at the start of each example."""
        raise NotImplementedError("override make_store in the subclass")

    def payload(self, label: int, version: int = 0) -> bytes:
        """What to write under `label`. Copies in several places may differ in version: there, one is all there is."""
        only = version if self.store.forgets_for_good else 0
        return payload_maker(self.packable)((label, only), self.payload_bytes)

    @rule(batch=batches, version=st.integers(min_value=0, max_value=2))
    def write(self, batch: list[int], version: int) -> None:
        self.written.update(batch)
        payloads = [self.payload(label, version) for label in batch]
        statuses = self.store.write(list(zip(batch, payloads, strict=True)))
        for label, payload, status in zip(batch, payloads, statuses, strict=True):
            if status is WriteStatus.EXISTS:
                assert label in self.stored
            elif status is WriteStatus.STORED:
                self.stored[label] = payload
            elif self.store.forgets_for_good:
                assert status is WriteStatus.FULL
            else:
                self.stored.setdefault(label, payload)  # one of the copies may have succeeded

    @rule(batch=batches)
    def read(self, batch: list[int]) -> None:
        for label, block in zip(batch, self.store.read(batch), strict=True):
            if block is None:
                self._missed(label)
            else:
                assert block == self.stored[label]

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def read_what_was_written(self, data: st.DataObject) -> None:
        self.read(self.draw_written(data))

    @rule(batch=batches)
    def lookup(self, batch: list[int]) -> None:
        for label, status in zip(batch, self.store.lookup(batch), strict=True):
            if status is Status.MISS:
                self._missed(label)
            elif status is Status.HIT:
                assert label in self.stored
            else:
                assert not self.store.forgets_for_good, "nothing is under way"

    @rule(batch=batches)
    def discard(self, batch: list[int]) -> None:
        assert self.store.discard(batch) <= len(set(batch) & self.stored.keys())
        for label in batch:
            self._missed(label)

    @rule()
    def reopen(self) -> None:
        self.store.reopen()

    @invariant()
    def is_sound(self) -> None:
        self.store.check()
        assert self.store.num_blocks() <= len(self.stored)

    def teardown(self) -> None:
        self.store.close()

    def draw_written(self, data: st.DataObject) -> list[int]:
        """A batch that was written some time."""
        return data.draw(st.lists(st.sampled_from(sorted(self.written)), min_size=1, max_size=6))

    def _missed(self, label: int) -> None:
        if self.store.forgets_for_good:
            self.stored.pop(label, None)


def store_settings(max_examples: int, *, num_steps: int = 30) -> settings:
    """Examples of at most `num_steps`, however long a step takes."""
    return settings(
        max_examples=max_examples,
        stateful_step_count=num_steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def tier_state_machine(  # noqa: PLR0913 - what may be set, by keyword
    make_tier: Callable[[int], Tier],
    *,
    capacity_bytes: int = 256 * 1024,
    payload_bytes: int = 16 * 1024,
    packable: bool = False,
    persistent: bool = False,
    forgets_for_good: bool = True,
    max_examples: int = 50,
) -> type[StoreStateMachine]:
    """The machine for a tier.

    :param make_tier: called with the capacity at the start of each example and, for a `persistent` tier, also
        after a close. It may open the same medium every time: an example begins by discarding all it knows.
    :param packable: payloads that codecs can pack.
    :param forgets_for_good: False for a tier whose medium fails: see `Store.forgets_for_good`.
    """

    class TierStateMachine(StoreStateMachine):
        def make_store(self) -> Store:
            return TierStore(
                lambda: make_tier(capacity_bytes),
                payload_bytes,
                persistent=persistent,
                forgets_for_good=forgets_for_good,
            )

    TierStateMachine.payload_bytes = payload_bytes
    TierStateMachine.packable = packable
    TierStateMachine.TestCase.settings = store_settings(max_examples)
    return TierStateMachine
