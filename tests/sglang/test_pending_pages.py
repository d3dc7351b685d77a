"""Pages that wait for the pool: in order, within bounds, each as a whole, and none for ever."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import not_reached  # noqa: F401  (before SGLang)
import pytest

from cache_pool import until
from kvtier.clock import MONOTONIC, Clock
from kvtier.identity.keys import StoreKey
from kvtier.memory.pieces import together
from kvtier.tiers.base import WriteStatus
from kvtier_sglang.pending_pages import Items, Outcome, PendingPages

LONG_S = 60.0


@dataclass
class Pool:
    """What the pages are owed to. Answers when it may."""

    status: Outcome = WriteStatus.FAILED
    begun_by_others: frozenset[StoreKey] = frozenset()
    may_answer: threading.Event = field(default_factory=threading.Event)
    written: list[bytes] = field(default_factory=list)
    num_calls: int = 0

    def write(self, items: Items) -> Sequence[Outcome]:
        assert self.may_answer.wait(LONG_S)
        self.num_calls += 1
        status, others = self.status, self.begun_by_others  # as they are now: tests change them meanwhile
        if status is WriteStatus.STORED:
            self.written += [bytes(together(payload)) for key, payload, _ in items if key not in others]
        return [None if key in others else status for key, _, _ in items]


@contextmanager
def owing(
    pool: Pool, *, capacity_bytes: int = 1000, keep_s: float = LONG_S, clock: Clock = MONOTONIC
) -> Iterator[tuple[PendingPages, list[str]]]:
    settled: list[str] = []
    owed = PendingPages(
        pool.write, capacity_bytes=capacity_bytes, keep_s=keep_s, on_settled=settled.append, clock=clock
    )
    try:
        yield owed, settled
    finally:
        pool.may_answer.set()
        owed.close(0)


def await_settled(settled: list[str], expected: list[str]) -> None:
    """Told when nobody waits for the page any more, which is when `flush` ends."""
    until(lambda: settled == expected, f"{expected} is told")


def page(name: bytes, *parts: bytes) -> Items:
    return [(StoreKey(name + bytes([i])), memoryview(part), 0) for i, part in enumerate(parts)]


def test_a_page_that_cannot_be_copied_takes_no_room() -> None:
    with owing(Pool(), capacity_bytes=3) as (owed, _):
        for _ in range(3):
            with pytest.raises((ValueError, BufferError)):
                owed.add([(StoreKey(b"a"), memoryview(b"1"), 0), (StoreKey(b"b"), memoryview(b"2345")[::2], 0)])
        assert owed.waiting_bytes == 0
        assert owed.add(page(b"a", b"1", b"2"))


def test_pages_are_tried_again_until_they_are_taken() -> None:
    pool = Pool()
    pool.may_answer.set()
    with owing(pool) as (owed, settled):
        assert owed.add(page(b"a", b"1", b"2"))
        assert owed.add(page(b"b", b"3"))
        until(lambda: pool.num_calls >= 3, "it was tried again and again")
        assert owed.has(StoreKey(b"a\0"))
        pool.status = WriteStatus.STORED
        assert owed.flush(LONG_S)
        assert pool.written == [b"1", b"2", b"3"]
        assert owed.waiting_bytes == 0
        await_settled(settled, ["retried", "retried"])


def test_what_waits_is_a_copy_and_there_is_one_of_each() -> None:
    pool = Pool(WriteStatus.STORED)
    with owing(pool) as (owed, _):
        memory = bytearray(b"first")
        assert owed.add([(StoreKey(b"a"), memoryview(memory), 0)])
        memory[:] = b"other"
        assert owed.add([(StoreKey(b"a"), memoryview(memory), 0)])
        assert owed.waiting_bytes == 5
        pool.may_answer.set()
        assert owed.flush(LONG_S)
        assert pool.written == [b"first"]


def test_bounds_refuse_the_newest() -> None:
    pool = Pool(WriteStatus.STORED)
    with owing(pool, capacity_bytes=10) as (owed, _):
        assert owed.add(page(b"a", bytes(6)))
        assert not owed.add(page(b"b", bytes(6)))
        assert owed.add(page(b"c", bytes(4)))
        pool.may_answer.set()
        assert owed.flush(LONG_S)
        assert owed.add(page(b"b", bytes(6)))


def test_what_has_no_chance_is_dropped() -> None:
    for pool, keep_s in ((Pool(WriteStatus.FULL), LONG_S), (Pool(WriteStatus.FAILED), 0.0)):
        with owing(pool, keep_s=keep_s) as (owed, settled):
            owed.add(page(b"a", b"1"))
            pool.may_answer.set()
            assert owed.flush(LONG_S)
            await_settled(settled, ["dropped"])


def test_a_page_that_another_writer_has_begun_keeps_nobody_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_sglang.pending_pages._BATCH_BYTES", 1)
    pool = Pool(WriteStatus.STORED, begun_by_others=frozenset([StoreKey(b"a\0")]))
    with owing(pool) as (owed, settled):
        for name in (b"a", b"b", b"c"):
            assert owed.add(page(name, name))
        pool.may_answer.set()
        until(lambda: pool.written == [b"b", b"c"], "the others are written")
        assert owed.has(StoreKey(b"a\0"))
        pool.begun_by_others = frozenset()
        assert owed.flush(LONG_S)
        assert pool.written == [b"b", b"c", b"a"]
        await_settled(settled, ["retried"] * 3)


def test_pages_that_keep_coming_keep_none_from_being_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_sglang.pending_pages._BATCH_BYTES", 1)
    tried: list[StoreKey] = []
    pool = Pool()

    def write(items: Items) -> Sequence[Outcome]:
        tried.append(items[0][0])
        if len(tried) < 10:
            assert owed.add(page(b"%d" % len(tried), b"another"))
        return [WriteStatus.FAILED]

    pool.write = write  # type: ignore[method-assign]
    with owing(pool) as (owed, _):
        assert owed.add(page(b"a", b"1"))
        until(lambda: len(tried) >= 3, "it is tried")
    assert tried[:3].count(StoreKey(b"a\0")) == 2


def test_another_writer_is_waited_for_as_long_as_it_may_be_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_sglang.pending_pages._LONGEST_PAUSE_S", 0.01)
    now_s = 0.0
    pool, others = Pool(), frozenset([StoreKey(b"a\0")])
    pool.may_answer.set()

    def is_tried_twice_more() -> None:
        before = pool.num_calls
        until(lambda: pool.num_calls >= before + 3, "it is tried again")

    with owing(pool, keep_s=100.0, clock=lambda: now_s) as (owed, settled):
        assert owed.add(page(b"a", b"1"))
        for now_s, pool.begun_by_others in ((40.0, others), (60.0, frozenset()), (69.0, others), (98.0, others)):
            is_tried_twice_more()
            assert not settled, f"{now_s:.0f} s"
        assert owed.add(page(b"b", b"2"))
        now_s = 99.5
        until(lambda: bool(settled), "its time is over")
        assert settled == ["dropped"]
        is_tried_twice_more()
        assert owed.has(StoreKey(b"b\0")), "what the pool does not take has longer"
        assert not owed.has(StoreKey(b"a\0"))


def test_an_error_in_writing_ends_nothing() -> None:
    pool = Pool()
    calls: list[int] = []

    def write(items: Items) -> Sequence[Outcome]:
        calls.append(len(items))
        if len(calls) == 1:
            raise RuntimeError("a bug")
        return [WriteStatus.EXISTS] * len(items)

    pool.write = write  # type: ignore[method-assign]
    with owing(pool) as (owed, settled):
        owed.add(page(b"a", b"1"))
        assert owed.flush(LONG_S)
        await_settled(settled, ["retried"])


def test_forgotten_pages_leave_no_trace() -> None:
    pool = Pool(WriteStatus.STORED)
    with owing(pool, capacity_bytes=4) as (owed, _):
        owed.add(page(b"a", bytes(4)))
        owed.forget()
        assert (owed.waiting_bytes, owed.flush(0)) == (0, True)
        assert owed.add(page(b"b", bytes(4)))


def test_after_closing_nothing_is_taken() -> None:
    pool = Pool()
    pool.may_answer.set()
    with owing(pool) as (owed, _):
        owed.add(page(b"a", b"1"))
        until(lambda: pool.num_calls >= 1, "it is tried")
        owed.close(0.3)
        assert pool.num_calls < 10, "now and then until the end"
        assert not owed.add(page(b"b", b"1"))
        owed.close(0.2)
