"""What a neighbour that is left alone is asked, on a clock of the test."""

import logging
import threading

import pytest

from clock_rig import StillClock
from kvtier.errors import UnavailableError
from kvtier.metrics import Metrics
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.common.deadlines import RemoteCalls
from pool_rig import WAIT_S, until

OPEN_S = 10.0


class Neighbour:
    """One that hangs while `answers` is clear, and fails while `fails`."""

    def __init__(self) -> None:
        self.fails, self.answers, self.num_probes = True, threading.Event(), 0

    def call(self) -> None:
        if self.fails:
            raise UnavailableError("nobody there")

    def probe(self) -> None:
        self.num_probes += 1
        assert self.answers.wait(WAIT_S)
        self.call()


@pytest.fixture
def clock() -> StillClock:
    return StillClock()


@pytest.fixture
def neighbour() -> Neighbour:
    return Neighbour()


@pytest.fixture
def calls(neighbour: Neighbour, clock: StillClock) -> RemoteCalls:
    """Calls of a neighbour that has failed."""
    calls = RemoteCalls(
        "pool",
        metrics=Metrics(),
        breaker=CircuitBreaker(1, OPEN_S, clock),
        log=logging.getLogger("kvtier.tests"),
        call_timeout_s=WAIT_S,
        max_batch_bytes=1,
        max_batch_blocks=1,
        probe=neighbour.probe,
        clock=clock,
    )
    assert not calls.attempt("read", neighbour.call)
    return calls


def test_no_call_waits_for_a_neighbour_that_hangs_and_one_probe_does(
    calls: RemoteCalls, neighbour: Neighbour, clock: StillClock
) -> None:
    assert not calls.attempt("read", neighbour.call)
    assert neighbour.num_probes == 0
    for _ in range(3):
        clock.now_s += OPEN_S
        assert not calls.attempt("read", neighbour.call)
        until(lambda: neighbour.num_probes)
    assert neighbour.num_probes == 1
    neighbour.fails = False
    assert not calls.attempt("read", neighbour.call)
    neighbour.answers.set()
    until(lambda: calls.attempt("read", neighbour.call))


def test_a_probe_that_fails_is_followed_by_another_one(
    calls: RemoteCalls, neighbour: Neighbour, clock: StillClock
) -> None:
    neighbour.answers.set()
    for i in range(3):
        clock.now_s += OPEN_S
        until(lambda: calls.attempt("read", neighbour.call) or neighbour.num_probes > i)  # noqa: B023 - called here
        assert neighbour.num_probes == i + 1
    neighbour.fails = False

    def answers() -> bool:
        clock.now_s += OPEN_S
        return calls.attempt("read", neighbour.call)

    until(answers)


def test_a_machine_without_threads_probes_later(
    calls: RemoteCalls, neighbour: Neighbour, clock: StillClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    neighbour.answers.set()
    neighbour.fails = False
    clock.now_s += OPEN_S
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert not calls.attempt("read", neighbour.call)
    assert neighbour.num_probes == 0
    clock.now_s += OPEN_S
    until(lambda: calls.attempt("read", neighbour.call))
    assert neighbour.num_probes == 1
