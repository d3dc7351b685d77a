"""User names and passwords: what a wrong one costs, and that none gets into the log."""

import logging
from pathlib import Path

import pytest

from kvtier.codec.sealed_form import NO_SEALS
from kvtier.config import parse_config
from kvtier.metrics import Metrics
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.redis import RedisTier
from kvtier_pool.open_tiers import redis_settings
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


def test_a_password_that_is_changed_is_read_again(tmp_path: Path) -> None:
    (file := tmp_path / "password").write_text(PASSWORD)
    service = {"redis_url": "redis://127.0.0.1:1", "redis_password": "file:password"}
    config = parse_config({"pool_service": service}, source="x", folder=tmp_path, environ={})
    settings = redis_settings(config, NO_SEALS)
    with running_redis(tmp_path, password=PASSWORD) as server:
        tier = RedisTier(server.url, settings, metrics=Metrics(), breaker=CircuitBreaker(1, 0.05))
        assert tier.write(items(1)) == [WriteStatus.STORED]
        for text in ("", "another battery"):  # an emptied file has what it had
            file.write_text(text)
            with server.client() as client:
                if text:
                    client.config_set("requirepass", text)
                client.client_kill_filter(_type="normal", skipme=True)
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
