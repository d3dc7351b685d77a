"""The circuit breaker, on a clock of the test."""

import pytest

from clock_rig import StillClock
from kvtier.errors import InvalidInputError
from kvtier.metrics import Metrics
from kvtier.tiers.common.breaker import CircuitBreaker


@pytest.fixture
def clock() -> StillClock:
    return StillClock()


def test_it_opens_after_failures_in_a_row_only(clock: StillClock) -> None:
    breaker = CircuitBreaker(3, 10.0, clock)
    for _ in range(5):
        assert not breaker.failure()
        assert not breaker.failure()
        assert not breaker.success()
    assert breaker.allow()
    assert [breaker.failure() for _ in range(4)] == [False, False, True, False]
    assert not breaker.allow()


def test_one_probe_at_a_time_and_success_closes(clock: StillClock) -> None:
    breaker = CircuitBreaker(1, 10.0, clock)
    assert breaker.failure()
    clock.now_s += 9.9
    assert not breaker.allow()
    clock.now_s += 0.1
    assert [breaker.allow() for _ in range(3)] == [True, False, False]
    assert not breaker.failure()
    clock.now_s += 9.9
    assert not breaker.allow()
    clock.now_s += 0.1
    assert breaker.allow()
    assert breaker.success()
    assert [breaker.allow() for _ in range(3)] == [True, True, True]


def test_a_probe_that_never_reports_is_replaced(clock: StillClock) -> None:
    breaker = CircuitBreaker(1, 10.0, clock)
    breaker.failure()
    clock.now_s += 10.0
    assert breaker.allow()
    clock.now_s += 10.0
    assert breaker.allow()


def test_an_old_call_that_fails_late_puts_off_the_probe(clock: StillClock) -> None:
    breaker = CircuitBreaker(1, 10.0, clock)
    breaker.failure()
    clock.now_s += 9.0
    breaker.failure()
    clock.now_s += 9.0
    assert not breaker.allow()


@pytest.mark.parametrize(("threshold", "open_s"), [(0, 1.0), (1, 0.0)])
def test_bad_settings(threshold: int, open_s: float) -> None:
    with pytest.raises(InvalidInputError):
        CircuitBreaker(threshold, open_s)


def test_open_ones_are_counted_by_tier_for_as_long_as_they_are_used(clock: StillClock) -> None:
    metrics = Metrics()

    def count(tier: str) -> float | None:
        return metrics.registry.get_sample_value("kvtier_open_breakers", {"tier": tier})

    assert count("redis") is None
    breakers = [CircuitBreaker(1, 10.0, clock) for _ in range(3)]
    for breaker in breakers:
        metrics.levels.watch_breaker("redis", breaker)
    metrics.levels.watch_breaker("pool", CircuitBreaker(1, 10.0, clock))
    assert (count("redis"), count("pool")) == (0, 0)
    for breaker in breakers:
        breaker.failure()
    assert (count("redis"), count("pool")) == (3, 0)
    breakers[0].success()
    assert count("redis") == 2
    del breaker, breakers[1:]
    assert count("redis") == 0
