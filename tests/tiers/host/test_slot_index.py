"""The host tier's index of slots, driven by a state machine."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvtier.errors import InvalidInputError, InvariantError
from kvtier.tiers.base import WriteStatus
from kvtier.tiers.host.entries import Entry
from kvtier.tiers.host.slot_index import Prepared, SlotIndex


def make_index(num_slots: int) -> SlotIndex[bytes]:
    return SlotIndex(num_slots)


def prepare(index: SlotIndex[bytes], key: bytes) -> Prepared[bytes]:
    outcome = index.prepare(key)
    assert isinstance(outcome, Prepared)
    return outcome


def store(index: SlotIndex[bytes], *keys: bytes) -> list[bytes | None]:
    """Prepares and commits each; returns what was evicted for it."""
    evicted = []
    for key in keys:
        entry, victim = prepare(index, key)
        assert index.commit(entry, nbytes=10, checksum=7)
        evicted.append(victim)
    return evicted


def pin(index: SlotIndex[bytes], key: bytes) -> Entry[bytes]:
    entry = index.pin(key)
    assert entry is not None
    return entry


def test_an_entry_is_found_before_and_pinned_after_commit() -> None:
    index = make_index(2)
    entry, evicted = prepare(index, b"a")
    assert evicted is None
    assert index.find(b"a") is entry
    assert not entry.ready
    assert index.pin(b"a") is None
    assert index.prepare(b"a") is WriteStatus.EXISTS
    assert index.commit(entry, nbytes=10, checksum=7)
    assert (entry.ready, entry.nbytes, entry.checksum) == (True, 10, 7)
    assert index.pin(b"a") is entry
    assert (len(index), index.num_ready, index.num_free, index.ready_bytes) == (1, 1, 1, 10)


def test_an_aborted_key_is_gone_and_its_slot_free() -> None:
    index = make_index(1)
    index.abort(prepare(index, b"a").entry)
    assert index.find(b"a") is None
    assert index.num_free == 1
    assert store(index, b"b") == [None]


def test_the_least_recently_used_goes_first_and_looking_is_no_use() -> None:
    index = make_index(3)
    store(index, b"a", b"b", b"c")
    index.touch(b"a")
    index.find(b"b")
    assert store(index, b"d", b"e") == [b"b", b"c"]
    assert store(index, b"f") == [b"a"]


def test_pinned_and_unfinished_entries_are_not_evicted() -> None:
    index = make_index(2)
    store(index, b"a")
    held = pin(index, b"a")
    writing = prepare(index, b"b").entry
    assert index.prepare(b"c") is WriteStatus.FULL
    index.commit(writing, nbytes=1)
    assert prepare(index, b"c").evicted == b"b"
    index.unpin(held)
    assert prepare(index, b"d").evicted == b"a"


def test_a_victim_that_was_pinned_counts_as_used_at_its_last_unpin() -> None:
    index = make_index(2)
    store(index, b"a", b"b")
    first, second = pin(index, b"a"), pin(index, b"a")
    assert store(index, b"c") == [b"b"]
    index.unpin(first)
    assert store(index, b"d") == [b"c"]
    index.unpin(second)
    assert store(index, b"e", b"f") == [b"d", b"a"]


def test_a_pinned_key_that_is_discarded_lives_on_unseen_until_the_last_unpin() -> None:
    index = make_index(2)
    store(index, b"a")
    first, second = pin(index, b"a"), pin(index, b"a")
    assert index.discard(b"a")
    assert not index.discard(b"a")
    assert index.find(b"a") is None
    assert index.pin(b"a") is None
    again = prepare(index, b"a").entry
    assert again.slot != first.slot
    assert index.prepare(b"b") is WriteStatus.FULL
    index.unpin(first)
    assert index.num_free == 0
    index.unpin(second)
    assert index.num_free == 1
    assert index.commit(again, nbytes=1)
    index.check()


def test_a_key_discarded_while_written_is_forgotten_at_commit() -> None:
    index = make_index(1)
    entry = prepare(index, b"a").entry
    assert index.discard(b"a")
    assert index.prepare(b"a") is WriteStatus.FULL
    assert not index.commit(entry, nbytes=1)
    assert index.find(b"a") is None
    assert index.num_free == 1


def test_misuse_is_refused_and_changes_nothing() -> None:
    index = make_index(2)
    store(index, b"a")
    committed = pin(index, b"a")
    aborted = prepare(index, b"b").entry
    index.abort(aborted)
    index.unpin(committed)
    for call in (
        lambda: index.unpin(committed),
        lambda: index.commit(committed, nbytes=1),
        lambda: index.abort(committed),
        lambda: index.commit(aborted, nbytes=1),
        lambda: index.abort(aborted),
    ):
        with pytest.raises(InvalidInputError):
            call()
    index.check()
    assert len(index) == 1


def test_check_finds_broken_books() -> None:
    index = make_index(2)
    store(index, b"a")
    index.check()
    index._free_slots[0] = index._free_slots[1] = None
    with pytest.raises(InvariantError):
        index.check()


class Against(RuleBasedStateMachine):
    """The index against lists and dicts that say what they mean."""

    keys = st.sampled_from([bytes([c]) for c in b"abcdefgh"])
    writing = Bundle("writing")
    pins = Bundle("pins")

    def __init__(self) -> None:
        super().__init__()
        self.index = make_index(4)
        self.open: dict[bytes, Entry[bytes]] = {}
        """Visible entries being written."""
        self.ready: list[bytes] = []
        """Visible, ready keys, coldest first; a pinned victim moves to the end when it is unpinned."""
        self.passed_over: set[bytes] = set()
        """Ready keys that were skipped as victims because of a pin."""
        self.num_pins: dict[Entry[bytes], int] = {}
        self.num_writing = 0

    def pinned(self, key: bytes) -> bool:
        entry = self.index.find(key)
        return entry is not None and self.num_pins.get(entry, 0) > 0

    def slots_in_use(self) -> int:
        hidden = [e for e, n in self.num_pins.items() if n and self.index.find(e.key) is not e]
        return len(self.ready) + self.num_writing + len(hidden)

    @rule(target=writing, key=keys)
    def prepare(self, key: bytes) -> Entry[bytes] | None:
        in_use = self.slots_in_use()
        outcome = self.index.prepare(key)
        if key in self.ready or key in self.open:
            assert outcome is WriteStatus.EXISTS
            return None
        candidates = [k for k in self.ready if k not in self.passed_over]
        victim = next((k for k in candidates if not self.pinned(k)), None)
        if in_use == 4:
            skipped = candidates[: candidates.index(victim)] if victim is not None else candidates
            self.passed_over.update(skipped)
            if victim is None:
                assert outcome is WriteStatus.FULL
                return None
            self.ready.remove(victim)
        assert isinstance(outcome, Prepared)
        assert outcome.evicted == (victim if in_use == 4 else None)
        self.open[key] = outcome.entry
        self.num_writing += 1
        return outcome.entry

    @rule(entry=consumes(writing), nbytes=st.integers(min_value=0, max_value=9), commit=st.booleans())
    def finish(self, entry: Entry[bytes] | None, nbytes: int, commit: bool) -> None:
        if entry is None:
            return
        visible = self.open.get(entry.key) is entry
        if commit:
            assert self.index.commit(entry, nbytes=nbytes) == visible
        else:
            self.index.abort(entry)
        self.num_writing -= 1
        if visible:
            del self.open[entry.key]
            if commit:
                self.ready.append(entry.key)

    @rule(target=pins, key=keys)
    def pin(self, key: bytes) -> Entry[bytes] | None:
        entry = self.index.pin(key)
        assert (entry is not None) == (key in self.ready)
        if entry is not None:
            self.num_pins[entry] = self.num_pins.get(entry, 0) + 1
        return entry

    @rule(entry=consumes(pins))
    def unpin(self, entry: Entry[bytes] | None) -> None:
        if entry is None:
            return
        self.index.unpin(entry)
        self.num_pins[entry] -= 1
        visible = self.index.find(entry.key) is entry
        if visible and not self.num_pins[entry] and entry.key in self.passed_over:
            self.passed_over.remove(entry.key)
            self.ready.remove(entry.key)
            self.ready.append(entry.key)

    @rule(key=keys)
    def touch(self, key: bytes) -> None:
        self.index.touch(key)
        if key in self.ready and key not in self.passed_over:
            self.ready.remove(key)
            self.ready.append(key)

    @rule(key=keys)
    def discard(self, key: bytes) -> None:
        assert self.index.discard(key) == (key in self.ready or key in self.open)
        if key in self.ready:
            self.ready.remove(key)
        self.open.pop(key, None)
        self.passed_over.discard(key)

    @rule()
    def discard_ready(self) -> None:
        assert sorted(self.index.discard_ready()) == sorted(self.ready)
        self.ready.clear()
        self.passed_over.clear()

    @invariant()
    def books_agree(self) -> None:
        self.index.check()
        assert len(self.index) == len(self.ready) + len(self.open)
        assert self.index.num_ready == len(self.ready)
        assert self.index.num_free == 4 - self.slots_in_use()


Against.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestAgainstModel = Against.TestCase
