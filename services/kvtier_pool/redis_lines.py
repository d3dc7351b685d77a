"""What `kvtier doctor` says of each server of a pool's Redis."""

import dataclasses
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvtier.cli.doctor.clocks import clock_line
from kvtier.cli.doctor.lines import Level, Line
from kvtier.codec.sealed_form import NO_SEALS
from kvtier.config import Config
from kvtier.config.findings import size_words
from kvtier.errors import ConfigError, KvtierError, UnauthenticatedError
from kvtier_pool.open_tiers import redis_settings
from kvtier_pool.startable import require_redis_address

if TYPE_CHECKING:
    from kvtier.tiers.redis.look import ServerLook

_OLDEST_REDIS = (6, 2)
_REDIS_S = 5.0
_KEY = "pool_service.redis_url"
_WITHOUT = "the pool runs without this tier: nothing is shared with other pools"
_WITHOUT_MASTER = "a pool that starts runs without this tier; one that runs keeps to the master that it knows"
_WITHOUT_NODE = "blocks of this node miss; the other nodes serve theirs"
_START = "start the Redis, or correct the URL (rediss:// for TLS); see bind and protected-mode of its configuration"
_TRUST = "the server's certificate must hold, be for the host of the URL, and be signed by a CA in the URL's ca"
_START_SENTINELS = "start the Sentinels, or correct the URL; see the Sentinels' log, and bind of their configuration"


def redis_lines(config: Config) -> Iterable[Line]:
    """Asks all servers of a pool's `redis_url`, which is set. Blocks for some seconds for each."""
    from kvtier.tiers.redis.look import look_at  # imported here, as by a pool: without Redis nobody waits for it

    url = config.pool_service.redis_url
    assert url is not None
    require_redis_address(config)
    settings = redis_settings(config, NO_SEALS)
    timeout_s = min(settings.call_timeout_s, _REDIS_S)
    settings = dataclasses.replace(settings, call_timeout_s=timeout_s, lookup_timeout_s=timeout_s)
    try:
        servers = look_at(url, settings, timeout_s)
    except ConfigError as error:
        yield Line(Level.PROBLEM, _KEY, str(error))
        return
    except KvtierError as error:
        servers = {"": error}
    any_serves = not all(isinstance(found, KvtierError) for found in servers.values())
    for name, found in servers.items():
        subject = f"{_KEY} {name}" if "+cluster" in url and name else _KEY
        if isinstance(found, KvtierError):
            yield _failure(subject, found, has_sentinels="+sentinel" in url, others_serve=any_serves)
        else:
            yield from _server(subject, found, is_cluster="+cluster" in url, has_ttl=settings.ttl_s > 0)


def _failure(subject: str, error: KvtierError, *, has_sentinels: bool, others_serve: bool) -> Line:
    if isinstance(error, UnauthenticatedError):
        remedy = "set redis_password (and redis_username) to what the server has: requirepass, or ACL LIST"
        return Line(Level.PROBLEM, "pool_service.redis_password", str(error), _WITHOUT, remedy)
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return Line(Level.PROBLEM, subject, str(error), _WITHOUT_NODE if others_serve else _WITHOUT, _TRUST)
    if has_sentinels:
        return Line(Level.PROBLEM, subject, str(error), _WITHOUT_MASTER, _START_SENTINELS)
    return Line(Level.PROBLEM, subject, str(error), _WITHOUT_NODE if others_serve else _WITHOUT, _START)


def _server(subject: str, server: "ServerLook", *, is_cluster: bool, has_ttl: bool) -> Iterable[Line]:
    memory = server.memory
    most = size_words(memory.max_bytes) if memory.max_bytes else "no"
    found = f"{server.software} answers in {server.ping_s * 1e6:,.0f} us; {most} maxmemory, {memory.policy}"
    yield Line(Level.OK, subject, f"{found}; {memory.num_keys:,} keys")
    if server.release < _OLDEST_REDIS:
        remedy = "use Redis 6.2 or Valkey, or later"
        yield Line(Level.PROBLEM, subject, f"{server.software} is too old", _WITHOUT, remedy)
    if server.is_of_a_cluster and not is_cluster:
        remedy = "begin the URL with redis+cluster://"
        yield Line(Level.PROBLEM, subject, "the server is one of a Cluster", "most blocks are refused there", remedy)
    if warning := memory.warning(ttl=has_ttl):
        yield Line(Level.WARNING, subject, f"the Redis {warning}")
    yield clock_line("the Redis", server.time_s - time.time())
