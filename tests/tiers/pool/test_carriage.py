"""The thread that helps with sealing: all calls are made once, in order, and none goes on when its caller has gone."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from kvtier.tiers.pool.carriage import share

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


def test_no_call_is_begun_after_the_last(helper: Helper) -> None:
    shared = share(squares(1000), helper, lambda result: result >= 4)
    assert len(shared) <= 4, "one more thread can have begun one more"
    assert shared == sorted(shared)


@pytest.mark.parametrize("failing", [0, 1, 5])
def test_an_error_is_the_callers(helper: Helper, failing: int) -> None:
    calls = squares(8)
    calls[failing] = partial(int, "none")
    with pytest.raises(ValueError, match="none"):
        share(calls, helper, never)


def test_a_helper_that_works_for_another_call_is_not_waited_for() -> None:
    may_end = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(may_end.wait)
        assert share(squares(5), threads, never) == list(enumerate(i * i for i in range(5)))
        assert not other.done()
        may_end.set()
