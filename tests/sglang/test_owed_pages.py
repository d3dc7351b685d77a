"""Pages that wait for the pool: in order, within bounds, each as a whole, and none for ever."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import not_reached  # noqa: F401  (before SGLang)
import pytest

from cache_pool import until
from kvtier.keys import StoreKey
from kvtier.tiers.base import WriteStatus
from kvtier_sglang.owed_pages import Items, OwedPages

LONG_S = 60.0


@dataclass
class Pool:
    """What the pages are owed to. Answers when it may."""

    status: WriteStatus = WriteStatus.FAILED
    may_answer: threading.Event = field(default_factory=threading.Event)
    written: list[bytes] = field(default_factory=list)
    num_calls: int = 0

    def write(self, items: Items) -> Sequence[WriteStatus]:
        assert self.may_answer.wait(LONG_S)
        self.num_calls += 1
        if self.status is WriteStatus.STORED:
            self.written += [bytes(payload) for _, payload in items]
        return [self.status] * len(items)


@contextmanager
def owing(pool: Pool, *, capacity_bytes: int = 1000, keep_s: float = LONG_S) -> Iterator[tuple[OwedPages, list[str]]]:
    settled: list[str] = []
    owed = OwedPages(pool.write, capacity_bytes=capacity_bytes, keep_s=keep_s, on_settled=settled.append)
    try:
        yield owed, settled
    finally:
        pool.may_answer.set()
        owed.close(0)


def page(name: bytes, *parts: bytes) -> Items:
    return [(StoreKey(name + bytes([i])), memoryview(part)) for i, part in enumerate(parts)]


def test_a_page_that_cannot_be_copied_takes_no_room() -> None:
    with owing(Pool(), capacity_bytes=3) as (owed, _):
        for _ in range(3):
            with pytest.raises((ValueError, BufferError)):
                owed.add([(StoreKey(b"a"), memoryview(b"1")), (StoreKey(b"b"), memoryview(b"2345")[::2])])
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
        assert (owed.waiting_bytes, settled) == (0, ["retried", "retried"])


def test_what_waits_is_a_copy_and_there_is_one_of_each() -> None:
    pool = Pool(WriteStatus.STORED)
    with owing(pool) as (owed, _):
        memory = bytearray(b"first")
        assert owed.add([(StoreKey(b"a"), memoryview(memory))])
        memory[:] = b"other"
        assert owed.add([(StoreKey(b"a"), memoryview(memory))])
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
            assert settled == ["dropped"]


def test_an_error_in_writing_ends_nothing() -> None:
    pool = Pool()
    calls: list[int] = []

    def write(items: Items) -> Sequence[WriteStatus]:
        calls.append(len(items))
        if len(calls) == 1:
            raise RuntimeError("a bug")
        return [WriteStatus.EXISTS] * len(items)

    pool.write = write  # type: ignore[method-assign]
    with owing(pool) as (owed, settled):
        owed.add(page(b"a", b"1"))
        assert owed.flush(LONG_S)
        assert settled == ["retried"]


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
        owed.close(0.2)
        assert not owed.add(page(b"b", b"1"))
        owed.close(0.2)
