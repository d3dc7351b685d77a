"""Addresses of the block protocol, `host:port` or `unix:/path`, and connections to them within a deadline."""

import ipaddress
import os
import queue
import socket
import threading
from dataclasses import dataclass
from typing import Any

from kvtier.clock import MONOTONIC
from kvtier.errors import ConfigError

GRPC_PREFIX = "grpc:"
"""The prefix of an engine's pool address that means gRPC instead of the block protocol."""

UNIX_PREFIX = "unix:"
_MAX_PATH_BYTES = 100
"""A socket's path is at most 107 bytes on Linux and 103 on macOS; servers need a few for a temporary name."""
_SocketAddress = tuple[int, Any]
"""Address family and what `connect` takes for it."""


@dataclass(frozen=True, slots=True)
class Address:
    """The place at which a server listens. Either `path` is set, or `host` and `port`."""

    path: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Reads `host:port`, `[v6]:port` or `unix:/path`. Raises `ConfigError` that says what is wrong."""
        if text.startswith(UNIX_PREFIX):
            path = text.removeprefix(UNIX_PREFIX)
            if not path or len(path.encode()) > _MAX_PATH_BYTES:
                raise ConfigError(f"address {text!r}: the path must have 1 to {_MAX_PATH_BYTES} bytes")
            return cls(path=path)
        host, colon, port = text.rpartition(":")
        if not colon or not host or "/" in host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ConfigError(f"address {text!r}: use host:port or unix:/path")
        host = host.removeprefix("[").removesuffix("]")
        try:
            require_possible_name(host)
        except ConfigError as error:
            raise ConfigError(f"address {text!r}: {error}") from None
        return cls(host=host, port=int(port))

    @property
    def is_of_this_machine(self) -> bool:
        """Whether nobody but processes of this machine can be there or reach it."""
        return bool(self.path) or is_loopback(self.host)

    def __str__(self) -> str:
        if self.path:
            return f"{UNIX_PREFIX}{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def require_possible_name(host: str) -> None:
    """Raises `ConfigError` for a name that no host can have; asks nobody. Addresses pass, and an empty name."""
    try:
        host.encode("idna")  # as `socket.getaddrinfo` does
    except UnicodeError:
        raise ConfigError(
            f"no host can have the name {host!r}: between its dots there must be 1 to 63 characters each time"
        ) from None


def is_loopback(host: str) -> bool:
    """Whether a name or an address stays on this machine, as far as can be told without asking anybody."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may be of any network
        return False


def open_connection(address: Address, deadline: float) -> socket.socket:
    """A connected blocking socket. Raises `OSError` when nobody answers before `deadline` (monotonic)."""
    failure: OSError = TimeoutError("no time left to connect")
    for family, target in _resolve(address, deadline):
        remaining_s = deadline - MONOTONIC()
        if remaining_s <= 0:
            break
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(remaining_s)
            connection.connect(target)
            connection.settimeout(None)
        except OSError as error:
            connection.close()
            failure = error
        else:
            return connection
    raise failure


def _resolve(address: Address, deadline: float) -> list[_SocketAddress]:
    if address.path:
        return [(socket.AF_UNIX, address.path)]
    try:
        return _look_up(address, socket.AI_NUMERICHOST)
    except socket.gaierror:
        return _look_up_in_time(address, deadline)


def _look_up(address: Address, flags: int) -> list[_SocketAddress]:
    try:
        answers = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError as error:  # the name is one that no DNS could have
        raise socket.gaierror(socket.EAI_NONAME, f"{address.host!r} is no host's name: {error}") from error
    return [(family, target) for family, _, _, _, target in answers]


def _look_up_in_time(address: Address, deadline: float) -> list[_SocketAddress]:
    """Asks the resolver on a thread of its own: its own timeouts are longer than anybody here may wait."""
    answers: queue.SimpleQueue[list[_SocketAddress] | OSError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(_look_up(address, 0))
        except OSError as error:
            answers.put(error)

    try:
        threading.Thread(target=ask, name="kvtier-resolve", daemon=True).start()
    except RuntimeError as error:
        raise OSError(f"no thread to look {address.host} up with: {error}") from None
    try:
        answer = answers.get(timeout=max(0.0, deadline - MONOTONIC()))
    except queue.Empty:
        raise TimeoutError(f"no address found for {address.host} in time") from None
    if isinstance(answer, OSError):
        raise answer
    return answer


def reason_of(error: Exception) -> str:
    """What the operating system says of an address, without the address, which `socket.create_server` adds."""
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno is not None else str(error)
