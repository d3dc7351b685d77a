"""URLs of a Redis: what they say, and those that cannot be."""

from pathlib import Path

import pytest

from certificates import Authority
from kvtier.errors import ConfigError
from kvtier.net.address import Address
from kvtier.tiers.redis.address import Kind, RedisAddress, Tls


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://cache", RedisAddress(Kind.SINGLE, (Address(host="cache", port=6379),))),
        ("redis://[::1]:7000/3", RedisAddress(Kind.SINGLE, (Address(host="::1", port=7000),), db=3)),
        ("redis://[::1]", RedisAddress(Kind.SINGLE, (Address(host="::1", port=6379),))),
        ("unix:///run/redis.sock?db=2", RedisAddress(Kind.SINGLE, (Address(path="/run/redis.sock"),), db=2)),
        (
            "rediss://cache?ca=/etc/ca.pem&check_hostname=no",
            RedisAddress(
                Kind.SINGLE, (Address(host="cache", port=6379),), tls=Tls(ca="/etc/ca.pem", check_hostname=False)
            ),
        ),
        (
            "redis+sentinel://a,b:7000/main/1",
            RedisAddress(
                Kind.SENTINEL, (Address(host="a", port=26379), Address(host="b", port=7000)), db=1, service="main"
            ),
        ),
        (
            "rediss+cluster://a:1,b:2",
            RedisAddress(Kind.CLUSTER, (Address(host="a", port=1), Address(host="b", port=2)), tls=Tls()),
        ),
    ],
)
def test_urls(url: str, address: RedisAddress) -> None:
    assert RedisAddress.parse(url) == address


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("", "use one of redis"),
        ("http://cache", "use one of redis"),
        ("unix+cluster:///run/redis.sock", "use one of redis"),
        ("cache:6379", "use one of redis"),
        ("redis://", "lacks a host"),
        ("redis://a,b", "several servers"),
        ("redis://a,", "lacks a host|several servers"),
        ("redis://a:70000", "70000"),
        ("redis://[::1", "cannot be read"),
        ("redis+cluster://a,b..svc:1", r"no host can have the name 'b\.\.svc'"),
        (f"redis://{'long' * 20}", "no host can have the name 'longlong"),
        ("redis://a/b", "use a number"),
        ("redis://a/1/2", "no meaning"),
        ("redis://a?timeout=1", "unknown option 'timeout'"),
        ("redis://a?ca=/x", "unknown option 'ca'"),
        ("rediss://a?cert=/x", "belong together"),
        ("rediss://a?check_hostname=maybe", "use yes or no"),
        ("redis+sentinel://a", "lacks the service's name"),
        ("redis+cluster://a/1", "no meaning"),
        ("unix://", "path must have"),
        ("redis://user:secret@a", "set redis_username and redis_password instead"),
        ("redis:user:secret@a:6379", "set redis_username and redis_password instead"),
        ("redis://user:secret#x@a:6379", "set redis_username and redis_password instead"),
    ],
)
def test_urls_that_cannot_be(url: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as error:
        RedisAddress.parse(url)
    assert "secret" not in str(error.value)


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    own, other = ca.issue("own"), ca.issue("other")
    (tmp_path / "no.pem").write_text("nothing")
    url = f"rediss://a?ca={ca.certificate}"
    RedisAddress.parse(f"{url}&cert={own.certificate}&key={own.key}").require_files()
    for text, complaint in (
        ("rediss://a?ca=ca.pem", "ca=ca.pem in the URL of the Redis: write an absolute path"),
        (f"rediss://a?ca={tmp_path}/none.pem", "ca: cannot read .*none.pem"),
        (f"rediss://a?ca={tmp_path}/no.pem", "ca: .*no.pem holds no CA certificate"),
        (f"{url}&cert={own.certificate}&key={other.key}", "key: .*other.key is not the key of .*own.pem"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            RedisAddress.parse(text).require_files()
