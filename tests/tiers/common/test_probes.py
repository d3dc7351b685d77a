"""What a neighbour that is left alone is asked."""

import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtier.errors import UnavailableError
from kvtier.metrics import Metrics
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.common.deadlines import RemoteCalls
from kvtier.tiers.common.health import Health
from pool_rig import WAIT_S, failed_calls, until
from threads_rig import no_more_threads

OPEN_S = 0.01
THRESHOLD = 3


class Neighbour:
    """Answers calls, probes, both or nothing. A probe waits for `goes_on`."""

    def __init__(self) -> None:
        self.calls_fail, self.probes_fail = True, False
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.num_calls = self.num_probes = self.num_at_once = 0

    def call(self) -> None:
        self.num_calls += 1
        if self.calls_fail:
            raise UnavailableError("nobody there")

    def probe(self) -> None:
        self.num_probes += 1
        self.num_at_once += 1
        assert self.num_at_once == 1
        assert self.goes_on.wait(WAIT_S)
        self.num_at_once -= 1
        if self.probes_fail:
            raise UnavailableError("nobody there")


@pytest.fixture
def neighbour() -> Neighbour:
    return Neighbour()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def health(neighbour: Neighbour, metrics: Metrics) -> Iterator[Health]:
    health = Health(
        "pool",
        metrics=metrics,
        breaker=CircuitBreaker(THRESHOLD, OPEN_S),
        log=logging.getLogger("kvtier.tests"),
        probe=neighbour.probe,
    )
    yield health
    neighbour.goes_on.set()
    health.close()
    until(lambda: not probing_threads())


@pytest.fixture
def calls(health: Health) -> RemoteCalls:
    return RemoteCalls(health, call_timeout_s=WAIT_S, max_batch_bytes=1, max_batch_blocks=1)


def probing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvtier-probe-pool"]


def fail(calls: RemoteCalls, neighbour: Neighbour) -> None:
    """The breaker opens."""
    for _ in range(THRESHOLD):
        assert not calls.attempt("read", neighbour.call)


def test_no_call_waits_for_a_neighbour_that_hangs_and_one_probe_does(calls: RemoteCalls, neighbour: Neighbour) -> None:
    neighbour.goes_on.clear()
    fail(calls, neighbour)
    until(lambda: neighbour.num_probes)
    for _ in range(100):
        assert not calls.attempt("read", neighbour.call)
    assert (neighbour.num_calls, neighbour.num_probes) == (THRESHOLD, 1)
    neighbour.goes_on.set()
    neighbour.calls_fail = False
    until(lambda: calls.attempt("read", neighbour.call))
    until(lambda: not probing_threads())
    assert calls.attempt("read", neighbour.call)


def test_the_first_call_after_a_return_is_made_though_nobody_called_meanwhile(
    calls: RemoteCalls, neighbour: Neighbour
) -> None:
    neighbour.probes_fail = True
    fail(calls, neighbour)
    until(lambda: neighbour.num_probes >= 3)
    neighbour.calls_fail = neighbour.probes_fail = False
    probes_so_far = neighbour.num_probes
    until(lambda: neighbour.num_probes >= probes_so_far + 2)
    assert calls.attempt("read", neighbour.call)


def test_who_answers_probes_alone_is_called_once_for_each(
    calls: RemoteCalls, neighbour: Neighbour, caplog: pytest.LogCaptureFixture
) -> None:
    fail(calls, neighbour)
    for _ in range(20):
        probes_so_far = neighbour.num_probes
        until(lambda: neighbour.num_probes > probes_so_far)  # noqa: B023 - called here
        for _ in range(10):
            assert not calls.attempt("read", neighbour.call)
    assert neighbour.num_calls - THRESHOLD <= neighbour.num_probes
    assert len(caplog.records) == 1


def test_one_call_at_a_time_tries_a_neighbour_that_answers_probes(calls: RemoteCalls, neighbour: Neighbour) -> None:
    entered, may_end = threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        assert may_end.wait(WAIT_S)
        raise UnavailableError("late")

    fail(calls, neighbour)
    with ThreadPoolExecutor(1) as other:
        tries = other.submit(lambda: until(lambda: calls.attempt("read", hang) or entered.is_set()))
        assert entered.wait(WAIT_S)
        probes_so_far = neighbour.num_probes
        time.sleep(10 * OPEN_S)
        for _ in range(10):
            assert not calls.attempt("read", neighbour.call)
        assert (neighbour.num_calls, neighbour.num_probes) == (THRESHOLD, probes_so_far)
        may_end.set()
        tries.result()
    neighbour.calls_fail = False
    until(lambda: calls.attempt("read", neighbour.call))


def test_a_neighbour_that_fails_again_is_probed_again(calls: RemoteCalls, neighbour: Neighbour) -> None:
    for _ in range(5):
        neighbour.calls_fail = True
        fail(calls, neighbour)
        neighbour.calls_fail = False
        until(lambda: calls.attempt("read", neighbour.call))


def test_probes_outlast_errors_that_nobody_expects(
    calls: RemoteCalls, health: Health, neighbour: Neighbour, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = iter([ValueError("a bug"), SystemExit()])

    def probe() -> None:
        for error in errors:
            raise error
        neighbour.probe()

    monkeypatch.setattr(health, "_probe", probe)
    monkeypatch.setattr(threading, "excepthook", lambda told: None)
    fail(calls, neighbour)
    neighbour.calls_fail = False
    until(lambda: calls.attempt("read", neighbour.call))
    assert failed_calls(metrics, op="probe", error="ValueError") == 1


def test_a_machine_without_threads_probes_later(calls: RemoteCalls, neighbour: Neighbour) -> None:
    with no_more_threads():
        fail(calls, neighbour)
        assert not calls.attempt("read", neighbour.call)
    assert not neighbour.num_probes
    neighbour.calls_fail = False
    until(lambda: calls.attempt("read", neighbour.call))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_that_is_forked_during_a_probe_probes_by_itself(calls: RemoteCalls, neighbour: Neighbour) -> None:
    neighbour.goes_on.clear()
    fail(calls, neighbour)
    until(lambda: neighbour.num_probes)
    if not (child := os.fork()):
        code = 1
        try:
            neighbour.calls_fail, neighbour.num_at_once = False, 0
            neighbour.goes_on.set()
            until(lambda: calls.attempt("read", neighbour.call))
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_closed_tier_probes_nothing(
    calls: RemoteCalls, health: Health, neighbour: Neighbour, metrics: Metrics
) -> None:
    neighbour.goes_on.clear()
    neighbour.probes_fail = True
    fail(calls, neighbour)
    until(lambda: neighbour.num_probes)
    health.close()
    neighbour.goes_on.set()
    until(lambda: not probing_threads())
    assert not calls.attempt("read", neighbour.call)
    assert not probing_threads()
    assert failed_calls(metrics, op="probe", error="UnavailableError") == 0
