"""Addresses: how they are written, and how their hosts are looked up."""

import time

import pytest

from kvtier.errors import ConfigError
from kvtier.net.address import Address, open_connection
from threads_rig import no_more_threads


def test_a_name_that_no_thread_can_look_up_is_not_found() -> None:
    """What fails by an `OSError` is a miss."""
    with no_more_threads("kvtier-resolve"), pytest.raises(OSError, match="no thread to look pool"):
        open_connection(Address.parse("pool.invalid:7600"), time.monotonic() + 1)


@pytest.mark.parametrize(
    "text",
    [
        "pool:7600",
        "pool.svc.:7600",
        "kältespeicher.de:7600",
        "[::1]:7600",
        "[fe80::1%eth0]:7600",
        "unix:/run/kvtier/pool.sock",
        "127.0.0.1:0",
    ],
)
def test_addresses(text: str) -> None:
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "pool",
        "pool:",
        ":7600",
        "pool:http",
        "pool:70000",
        "pool:-1",
        "unix:",
        "unix:/" + "x" * 200,
        "pool..svc:1",
        "a" * 64 + ":1",
    ],
)
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        Address.parse(text)


def test_a_name_that_no_host_can_have_is_not_found() -> None:
    with pytest.raises(OSError, match=r"'pool\.\.svc' is no host's name"):
        open_connection(Address(host="pool..svc", port=1), time.monotonic() + 1)
