"""A `ShortLock` is a lock, also under a condition."""

import sys
import threading
from collections.abc import Iterator

import pytest

from kvtier.system.short_lock import ShortLock

WAIT_S = 20.0


@pytest.fixture
def switching_often() -> Iterator[None]:
    """Threads lose the interpreter in the middle of short sections, too."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_one_thread_at_a_time_is_inside(switching_often: None) -> None:
    lock, inside, most, total = ShortLock(), 0, 0, 0

    def run() -> None:
        nonlocal inside, most, total
        for _ in range(500):
            with lock:
                inside += 1
                most = max(most, inside)
                total += 1
                inside -= 1

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert (most, total) == (1, 8 * 500)


def test_whoever_waits_gets_it_when_it_is_given_back() -> None:
    lock, got = ShortLock(), threading.Event()

    def wait() -> None:
        assert lock.acquire()
        got.set()
        lock.release()

    assert lock.acquire()
    assert not lock.acquire(False)
    thread = threading.Thread(target=wait)
    thread.start()
    assert not got.is_set()
    lock.release()
    thread.join(WAIT_S)
    assert got.is_set()
    with pytest.raises(RuntimeError):
        lock.release()


def test_a_condition_waits_and_wakes_with_it() -> None:
    changed, numbers = threading.Condition(ShortLock()), list[int]()

    def take() -> None:
        with changed:
            assert changed.wait_for(lambda: bool(numbers), WAIT_S)
            numbers.pop()

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(4):
        with changed:
            numbers.append(number)
            changed.notify_all()
    for thread in threads:
        thread.join(WAIT_S)
    assert not numbers
    assert not any(thread.is_alive() for thread in threads)
