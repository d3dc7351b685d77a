"""User names and passwords: what a wrong one costs, and that none gets into the log."""

import logging
from pathlib import Path

import pytest

from kvtier.metrics import Metrics
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.common.breaker import CircuitBreaker
from redis_rig import (
    KEYS,
    assert_heals,
    connect,
    errors,
    items,
    running_redis,
)

PASSWORD = "correct horse battery"


@pytest.mark.parametrize(
    ("username", "password"), [(None, None), (None, "staple guess"), ("nobody", "staple guess"), ("nobody", PASSWORD)]
)
def test_wrong_credentials_are_a_miss_a_counter_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, username: str | None, password: str | None
) -> None:
    metrics = Metrics()
    with running_redis(tmp_path, password=PASSWORD) as server, caplog.at_level(logging.DEBUG):
        tier = connect(
            server.url, username=username, password=password, metrics=metrics, breaker=CircuitBreaker(3, 1000.0)
        )
        for _ in range(5):
            assert tier.lookup(KEYS[:1]) == [Status.MISS]
            assert tier.write(items(1)) == [WriteStatus.FAILED]
        assert errors(metrics, "lookup", "UnauthenticatedError") == 2
        assert errors(metrics, "lookup", "BreakerOpen") == 3
        assert len([r for r in caplog.records if "check username and password" in r.getMessage()]) == 1
        assert password is None or password not in caplog.text + repr(vars(tier))
        tier.close()


def test_the_right_password(tmp_path: Path) -> None:
    with running_redis(tmp_path, password=PASSWORD) as server:
        for username in (None, "default"):
            tier = connect(server.url, username=username, password=PASSWORD)
            assert_heals(tier)
            tier.close()


def test_a_server_that_repeats_the_password_does_not_get_it_into_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An unknown command comes back with its arguments, and AUTH may be one."""
    with running_redis(tmp_path, "--rename-command", "AUTH", "") as server, caplog.at_level(logging.DEBUG):
        tier = connect(server.url, password=PASSWORD, breaker=CircuitBreaker(1, 1000.0))
        assert tier.lookup(KEYS[:1]) == [Status.MISS]
        assert "***" in caplog.text
        assert PASSWORD not in caplog.text
        tier.close()
