"""redis-py's clients for one Redis address: connection options, the greeting, and errors that show no password."""

import socket
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, NodesManager
from redis.retry import Retry

from kvtier.errors import InvalidInputError, KvtierError, UnauthenticatedError, UnavailableError
from kvtier.tiers.redis.address import Kind, RedisAddress
from kvtier.tiers.redis.sentinels import Sentinels
from kvtier.tiers.redis.settings import RedisSettings

FAILURES = (
    redis.RedisError,
    redis.exceptions.RedisClusterException,
    OSError,
    ValueError,  # texts that are no UTF-8, hosts that are no names
    TypeError,  # hiredis, of a map with a list for a key
    KvtierError,
)
"""What a server that is gone, late or no Redis raises."""
_REFUSED = (redis.AuthenticationError, redis.exceptions.AuthorizationError, redis.exceptions.NoPermissionError)
_SENTINELS: Any = Sentinels
_NODE: Any = ClusterNode
_MAX_LINE_BYTES = 4096
_READ_BYTES = 1 << 20
"""Received from the socket at a time."""


class _Login(redis.CredentialProvider):
    """What each new connection logs in with. Any thread."""

    def __init__(self, username: str | None, settings: RedisSettings) -> None:
        self._username = username
        self.password = settings.password
        """The newest one."""
        self._newest = settings.newest_password

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """redis-py's."""
        if self._newest is not None:
            self.password = self._newest()
        password = self.password or ""
        return (password,) if self._username is None else (self._username, password)


class RedisClients:
    """Makes clients for one address. Any thread; does no I/O but in `cluster`."""

    def __init__(self, address: RedisAddress, settings: RedisSettings) -> None:
        """
        :param settings: `connect_timeout_s` bounds each connection attempt, and each Sentinel's answer;
            `call_timeout_s` each wait for a socket, so that no thread hangs on one for ever.
        """
        self._address = address
        self._settings, self._login = settings, _Login(settings.username, settings)
        self._greeting_s = min(settings.connect_timeout_s, settings.call_timeout_s)
        self._options: dict[str, Any] = {
            "socket_timeout": settings.call_timeout_s,
            "socket_connect_timeout": self._greeting_s,
            "socket_read_size": _READ_BYTES,
            "protocol": 2,
            "redis_connect_func": self._greet,
        }
        if settings.username or settings.password:
            self._options["credential_provider"] = self._login
        if not address.seeds[0].path:
            self._options["socket_keepalive"] = True
        if (tls := address.tls) is not None:
            self._options |= {"ssl": True, "ssl_ca_certs": tls.ca, "ssl_certfile": tls.cert, "ssl_keyfile": tls.key}
            self._options["ssl_check_hostname"] = tls.check_hostname

    def single(self) -> redis.Redis:
        """The client of the one server, or of whichever server the Sentinels call master."""
        seeds, service = self._address.seeds, self._address.service
        options = self._options | {"db": self._address.db, "retry": Retry(NoBackoff(), 0)}
        if self._address.kind is Kind.SENTINEL:
            # One that hangs leaves time for the others. A Sentinel without a password takes any from the user
            # `default`; one with a password mostly has the servers' password.
            share_s = self._greeting_s / (len(seeds) + 1)
            of_sentinels = options | {"db": 0, "socket_timeout": share_s, "socket_connect_timeout": share_s}
            if self._settings.password:
                of_sentinels["credential_provider"] = _Login("default", self._settings)
            hosts = [(seed.host, seed.port) for seed in seeds]
            client: redis.Redis = _SENTINELS(hosts, sentinel_kwargs=of_sentinels, **options).master_for(service)
            return client
        if seeds[0].path:
            return redis.Redis(unix_socket_path=seeds[0].path, **options)
        return redis.Redis(seeds[0].host, seeds[0].port, **options)

    def cluster(self) -> NodesManager:
        """The map of a Cluster: asks the seeds for it, one after the other. Raises one of `FAILURES`.

        `RedisCluster` without its command table, which asks one node more, and needs one more right of the user.
        """
        nodes = [_NODE(seed.host, seed.port) for seed in self._address.seeds]
        return NodesManager(nodes, require_full_coverage=False, **self._options)

    def translated(self, error: BaseException) -> KvtierError:
        """One of `FAILURES` as the exception that says what to do, its words without the password."""
        text = str(error)
        for password in filter(None, (self._settings.password, self._login.password)):
            text = text.replace(password, "***")  # a server that does not know AUTH repeats its arguments
        if isinstance(error, _REFUSED):
            return UnauthenticatedError(f"the Redis refuses: {text}; check username and password and their rights")
        if isinstance(error, InvalidInputError | UnauthenticatedError):
            return type(error)(text)
        return UnavailableError(f"Redis at {self._address}: {text}")

    def _greet(self, connection: Any) -> None:
        """Logs in, and makes sure that a Redis answers: called by redis-py for each new connection."""
        try:
            self._require_redis(connection)
            connection.on_connect()
            connection.send_command("PING", check_health=False)
            if not connection.can_read(self._greeting_s):
                raise redis.TimeoutError("no answer to PING in time")
            if (answer := connection.read_response()) != b"PONG":
                raise redis.InvalidResponse(f"no Redis: PING gives {str(answer)[:40]!r}")
        except BaseException:
            connection.disconnect()
            raise

    def _require_redis(self, connection: Any) -> None:
        """Sees the first answer before hiredis does, which believes whatever length an array announces.

        It makes room for thousands of millions of elements, with everybody else waiting for the interpreter. A Redis
        answers a PING with one line, even where a login is needed first.
        """
        connected: socket.socket = connection._sock
        connected.settimeout(self._greeting_s)
        connected.sendall(b"*1\r\n$4\r\nPING\r\n")
        answer = b""
        while b"\r\n" not in answer and answer[:1] in (b"", b"+", b"-") and len(answer) < _MAX_LINE_BYTES:
            if not (received := connected.recv(_MAX_LINE_BYTES)):
                raise redis.ConnectionError("the Redis closed the connection")
            answer += received
        line, _, rest = answer.partition(b"\r\n")
        if rest or (line != b"+PONG" and line[:1] != b"-"):
            raise redis.InvalidResponse(f"no Redis: PING gives {answer[:40]!r}")
        connected.settimeout(connection.socket_timeout)
