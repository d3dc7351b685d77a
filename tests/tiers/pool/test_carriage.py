"""The thread that helps with sealing: all calls are made once, in order, and none goes on when its caller has gone."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from kvtier.tiers.pool.carriage import HELPED_FROM_BYTES, Rooms, ahead, behind, share

Helper = ThreadPoolExecutor | None


@pytest.fixture(params=["alone", "helped"])
def helper(request: pytest.FixtureRequest) -> Iterator[Helper]:
    if request.param == "alone":
        yield None
        return
    with ThreadPoolExecutor(1) as threads:
        yield threads


def never(_: object) -> bool:
    return False


def squares(num_calls: int) -> list[Callable[[], int]]:
    return [partial(pow, i, 2) for i in range(num_calls)]


@pytest.mark.parametrize("num_calls", [0, 1, 2, 50])
def test_results_come_in_order(helper: Helper, num_calls: int) -> None:
    expected = [i * i for i in range(num_calls)]
    assert share(squares(num_calls), helper, never) == list(enumerate(expected))
    assert list(ahead(squares(num_calls), helper)) == expected
    assert list(behind(squares(num_calls), helper)) == expected


def test_no_call_is_begun_after_the_last(helper: Helper) -> None:
    shared = share(squares(1000), helper, lambda result: result >= 4)
    assert len(shared) <= 4, "one more thread can have begun one more"
    assert shared == sorted(shared)


@pytest.mark.parametrize("failing", [0, 1, 5])
def test_an_error_is_the_callers(helper: Helper, failing: int) -> None:
    calls = squares(8)
    calls[failing] = partial(int, "none")
    for run in (
        lambda: share(calls, helper, never),
        lambda: list(ahead(calls, helper)),
        lambda: list(behind(calls, helper)),
    ):
        with pytest.raises(ValueError, match="none"):
            run()


def test_a_caller_that_goes_waits_for_the_helper() -> None:
    """What is read into belongs to somebody else when a read has returned."""
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def slow() -> int:
        begun.set()
        may_end.wait()
        ended.set()
        return 1

    with ThreadPoolExecutor(1) as threads, ThreadPoolExecutor(1) as closers:
        results = ahead([lambda: 0, slow], threads)
        assert next(results) == 0
        begun.wait()
        closing = closers.submit(results.close)
        assert not ended.is_set()
        may_end.set()
        closing.result()
        assert ended.is_set()


def test_a_helper_that_works_for_another_call_is_not_waited_for() -> None:
    may_end = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(may_end.wait)
        assert share(squares(5), threads, never) == list(enumerate(i * i for i in range(5)))
        assert list(ahead(squares(5), threads)) == list(behind(squares(5), threads)) == [i * i for i in range(5)]
        assert not other.done()
        may_end.set()


def test_large_rooms_are_used_again_and_no_two_at_a_time() -> None:
    rooms = Rooms()
    first, second = rooms.take(HELPED_FROM_BYTES), rooms.take(HELPED_FROM_BYTES)
    assert first.obj is not second.obj
    kept = first.obj
    rooms.give(first)
    assert rooms.take(HELPED_FROM_BYTES).obj is kept
    assert rooms.take(HELPED_FROM_BYTES).obj is not kept
    rooms.give(second)
    assert len(rooms.take(2 * HELPED_FROM_BYTES)) == 2 * HELPED_FROM_BYTES
