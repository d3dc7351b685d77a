"""What the servers of a Redis say of themselves, for an operator. Unlike the tier, it raises what fails."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvtier.clock import MONOTONIC
from kvtier.errors import ConfigError, InvalidInputError, KvtierError
from kvtier.metrics import Metrics
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.common.health import Health
from kvtier.tiers.redis.address import RedisAddress
from kvtier.tiers.redis.clients import FAILURES, RedisClients
from kvtier.tiers.redis.exchange import Conversation
from kvtier.tiers.redis.memory import REPORT, ServerMemory
from kvtier.tiers.redis.sentinels import UnknownServiceError
from kvtier.tiers.redis.settings import RedisSettings
from kvtier.tiers.redis.topology import Server, Topology

_log = logging.getLogger(__name__)
_QUESTIONS = (("INFO", "server"), ("INFO", "cluster"), ("TIME",), *REPORT)


@dataclass(frozen=True, slots=True)
class ServerLook:
    """One server."""

    software: str
    """`redis` or `valkey`, and its release."""
    release: tuple[int, ...]
    """The release of Redis that it is compatible with."""
    is_of_a_cluster: bool
    memory: ServerMemory
    time_s: float
    """Its clock, in seconds since 1970."""
    ping_s: float


def look_at(url: str, settings: RedisSettings, timeout_s: float) -> dict[str, ServerLook | KvtierError]:
    """Asks every server behind an address, and changes nothing. Blocks for `timeout_s` at the most for each. The value
    of a server that fails says why.

    :raises KvtierError: it is not known which servers there are; `ConfigError` for a URL that is none, or that names a
        service which its Sentinels do not know. An `UnauthenticatedError`, raised or returned, is about a wrong
        password or missing rights. No text of it has the password.
    """
    address = RedisAddress.parse(url)
    clients = RedisClients(address, settings)
    breaker = CircuitBreaker(1, 1.0)

    def health(name: str, probe: Callable[[], None]) -> Health:
        return Health("redis", server=name, metrics=Metrics(), breaker=breaker.another(), log=_log, probe=probe)

    topology = Topology(address, clients, health, timeout_s)
    found: dict[str, ServerLook | KvtierError] = {}
    try:
        for server in topology.servers(MONOTONIC() + timeout_s):
            try:
                found[server.name] = _look(server, timeout_s)
            except UnknownServiceError as error:
                raise ConfigError(str(clients.translated(error))) from None
            except FAILURES as error:
                found[server.name] = clients.translated(error)
    except FAILURES as error:
        raise error if isinstance(error, ConfigError) else clients.translated(error) from None
    finally:
        topology.close()
    return found


def _look(server: Server, timeout_s: float) -> ServerLook:
    def work(talk: Conversation) -> ServerLook:
        begun = MONOTONIC()
        talk.ask([("PING",)], lambda i, answer: None)
        ping_s = MONOTONIC() - begun
        answers: list[Any] = []
        talk.ask(_QUESTIONS, lambda i, answer: answers.append(answer))
        about, cluster, now, *memory = answers
        return _parsed(_fields(about), _fields(cluster), now, ServerMemory.parse(memory), ping_s)

    return server.ask(work).result(MONOTONIC() + timeout_s)


def _parsed(
    about: dict[str, str], cluster: dict[str, str], now: Any, memory: ServerMemory, ping_s: float
) -> ServerLook:
    compatible = about.get("redis_version", "")
    name = about.get("server_name", "redis")
    try:
        seconds, microseconds = map(int, now)
        release = tuple(int(part) for part in compatible.split("."))
    except (TypeError, ValueError):
        raise InvalidInputError("the Redis answers INFO and TIME with something else") from None
    return ServerLook(
        software=f"{name} {about.get(f'{name}_version', compatible)}",
        release=release,
        is_of_a_cluster=cluster.get("cluster_enabled") == "1",
        memory=memory,
        time_s=seconds + microseconds / 1e6,
        ping_s=ping_s,
    )


def _fields(info: Any) -> dict[str, str]:
    if not isinstance(info, bytes):
        raise InvalidInputError("the Redis answers INFO with something else")
    lines = info.decode(errors="replace").splitlines()
    return {name: value for name, colon, value in (line.partition(":") for line in lines) if colon}
