"""Executors that need no thread any more when work comes."""

import threading

import pytest

from kvtier.errors import UnavailableError
from kvtier.system.started_threads import started_threads
from threads_rig import no_more_threads

WAIT_S = 20.0


def threads_named(name: str) -> int:
    return sum(thread.name.startswith(name) for thread in threading.enumerate())


def test_all_threads_run_before_there_is_work() -> None:
    executor = started_threads(3, "started")
    assert threads_named("started") == 3
    together = threading.Barrier(3)
    with no_more_threads():
        futures = [executor.submit(together.wait, WAIT_S) for _ in range(3)]
        assert sorted(future.result(WAIT_S) for future in futures) == [0, 1, 2]
    executor.shutdown()
    assert threads_named("started") == 0


def test_where_no_thread_is_to_be_had_there_is_an_error_at_once_and_nothing_is_left() -> None:
    with no_more_threads(), pytest.raises(UnavailableError, match=r"no thread for started .*ulimit -u"):
        started_threads(3, "started")
    assert threads_named("started") == 0


def test_where_some_are_to_be_had_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    start, num_started = threading.Thread.start, 0

    def start_two(thread: threading.Thread) -> None:
        nonlocal num_started
        num_started += 1
        if num_started > 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_two)
        with pytest.raises(UnavailableError):
            started_threads(3, "started")
    assert threads_named("started") == 0
