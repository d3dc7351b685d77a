"""Connecting to servers of a Redis within a deadline, and what goes wrong, in words that show no password."""

import reprlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvtier.clock import MONOTONIC
from kvtier.errors import InvalidInputError, KvtierError, UnavailableError
from kvtier.net.address import Address
from kvtier.tiers.redis.address import RedisAddress
from kvtier.tiers.redis.answers import ReplyError
from kvtier.tiers.redis.commands import command
from kvtier.tiers.redis.connection import RedisConnection, RedisPyConnection

_T = TypeVar("_T")


class Dialer:
    """Makes connections for one Redis address. Immutable; any thread."""

    def __init__(
        self, address: RedisAddress, *, username: str | None, password: str | None, connect_timeout_s: float
    ) -> None:
        """:param connect_timeout_s: for a connection, its greeting included."""
        self._address = address
        self._username, self._password = username, password
        self._connect_timeout_s = connect_timeout_s

    def connect(self, node: Address, deadline: float, *, of_data: bool = True) -> RedisConnection:
        """A connection that has answered. Raises `OSError`, `redis.RedisError` or a `KvtierError`.

        :param of_data: to a server with data; False for a Sentinel.
        """
        deadline = min(deadline, MONOTONIC() + self._connect_timeout_s)
        dial = self._dial(node, deadline)
        connection = RedisConnection(in_time(dial, lambda late: late.disconnect(), deadline))
        try:
            for words, expected in self._greeting(of_data):
                connection.send([command(*words)], deadline)
                answer = connection.receive_answers(1)[0]
                if isinstance(answer, ReplyError):
                    raise answer.translated()
                if answer != expected:
                    raise InvalidInputError(f"{node} is no Redis: {words[0].decode()} gives {reprlib.repr(answer)}")
        except BaseException:
            connection.close()
            raise
        return connection

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Whatever a connection fails with, as one of kvtier's exceptions, its words without the password."""
        try:
            yield
        except (redis.RedisError, OSError, UnicodeError) as error:  # the last: a host that cannot be a name
            failure: Exception = UnavailableError(f"Redis at {self._address}: {error}")
        except KvtierError as error:
            failure = error
        else:
            return
        # A server that does not know AUTH repeats its arguments in the answer.
        if self._password and self._password in str(failure):
            failure = type(failure)(str(failure).replace(self._password, "***"))
        raise failure from None

    def _greeting(self, of_data: bool) -> Iterator[tuple[tuple[bytes, ...], bytes]]:
        """Commands, and what they are to be answered with."""
        # A Sentinel without a password takes any from the user `default`; one with a password mostly has ours.
        username = self._username if of_data or not self._password else "default"
        if username or self._password:
            credentials = [word.encode() for word in (username, self._password or "") if word is not None]
            yield (b"AUTH", *credentials), b"OK"
        if of_data and self._address.db:
            yield (b"SELECT", b"%d" % self._address.db), b"OK"
        yield (b"PING",), b"PONG"

    def _dial(self, node: Address, deadline: float) -> Callable[[], RedisPyConnection]:
        """What makes redis-py connect, and no more."""
        timeout_s = max(0.001, deadline - MONOTONIC())
        options: dict[str, Any] = {
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            "retry": Retry(NoBackoff(), 0),
            "redis_connect_func": lambda connection: None,  # its greeting would take an array of any length
        }
        make: Callable[..., Any] = redis.UnixDomainSocketConnection
        if node.path:
            options |= {"path": node.path}
        else:
            make = redis.Connection
            options |= {"host": node.host, "port": node.port, "socket_keepalive": True}
        if (tls := self._address.tls) is not None:
            make = redis.SSLConnection
            options |= {"ssl_ca_certs": tls.ca, "ssl_certfile": tls.cert, "ssl_keyfile": tls.key}
            options |= {"ssl_check_hostname": tls.check_hostname}

        def dial() -> RedisPyConnection:
            connection = make(**options)
            connection.connect()
            made: RedisPyConnection = connection
            return made

        return dial


def in_time(call: Callable[[], _T], dispose: Callable[[_T], None], deadline: float) -> _T:
    """What `call` returns, made on a thread of its own: it may resolve names, and nothing bounds how long that takes.

    Raises `TimeoutError` at the deadline; what comes later is disposed of.
    """
    future: Future[_T] = Future()

    def run() -> None:
        try:
            result = call()
        except Exception as error:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            return
        if future.set_running_or_notify_cancel():
            future.set_result(result)
        else:
            dispose(result)

    threading.Thread(target=run, name="kvtier-redis-connect", daemon=True).start()
    wait([future], timeout=max(0.0, deadline - MONOTONIC()))
    if future.cancel():
        raise TimeoutError("no connection in time")
    return future.result()
