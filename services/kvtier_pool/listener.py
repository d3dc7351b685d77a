"""A listening socket, TCP or Unix."""

import contextlib
import errno
import grp
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.net.address import Address, reason_of

_BACKLOG = 128
_NEW_SUFFIX = ".new"
_ROOT = 0


class ServedError(OSError):
    """A server lives on a Unix socket."""


@dataclass(frozen=True, slots=True)
class SocketAccess:
    """The mode and the group of a Unix socket, which decide which users may connect."""

    mode: int
    """Permissions."""
    group: str | int | None = None
    """Name or number; None: the process's own."""

    def require(self) -> None:
        """Raises `ConfigError` where there is no such group, or this user is no member of it."""
        if self.group is None:
            return
        number = self._group_number()
        if os.geteuid() != _ROOT and number not in (os.getegid(), *os.getgroups()):
            raise self._not_a_member()

    def give(self, path: str) -> None:
        """Sets it on the socket at `path`.

        :raises ConfigError: there is no such group, or this user may not give it.
        """
        if self.group is not None:
            try:
                os.chown(path, -1, self._group_number())
            except PermissionError as error:
                raise self._not_a_member() from error
        os.chmod(path, self.mode)

    def _group_number(self) -> int:
        if isinstance(self.group, int):
            return self.group
        try:
            return grp.getgrnam(str(self.group)).gr_gid
        except KeyError as error:
            raise ConfigError(
                f"pool_service.socket_group: {self.group!r}: there is no such group; make it, or name another"
            ) from error

    def _not_a_member(self) -> ConfigError:
        user = os.geteuid()
        return ConfigError(
            f"pool_service.socket_group: {self.group!r}: user {user} is no member of it; make that user one, or name "
            "another group"
        )


class Listener:
    """Bound and listening from the start until `close`. One thread accepts, another may close."""

    def __init__(self, address: Address, access: SocketAccess) -> None:
        """
        :param address: port 0 takes a free one. A Unix socket that a dead server left behind is replaced.
        :param access: of a Unix socket, there before the first connection is.
        :raises ConfigError: the address cannot be had, a server that lives on it included.
        """
        try:
            self._socket = _listen_unix(address.path, access) if address.path else _listen_tcp(address)
            self._inode = os.stat(address.path).st_ino if address.path else 0
        except (OSError, OverflowError) as error:
            is_taken = isinstance(error, ServedError) or getattr(error, "errno", None) == errno.EADDRINUSE
            remedy = f"{'stop what is there, or ' if is_taken else ''}choose another address (--listen)"
            raise ConfigError(
                f"pool_service.listen: cannot listen on {address}: {reason_of(error)}; {remedy}"
            ) from error
        self._path = address.path
        self.address = str(address if address.path else Address("", address.host, self._socket.getsockname()[1]))
        """The address that is listened on, with the real port."""

    def accept(self) -> socket.socket:
        """Waits for the next connection. `OSError` when there is none to be had, after `close` for ever."""
        connection, _ = self._socket.accept()
        return connection

    def shut_down(self) -> None:
        """Refuses what comes, ends an `accept` that waits, and takes a Unix socket's file away. Any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            if self._path and os.stat(self._path).st_ino == self._inode:  # not a successor's
                os.unlink(self._path)

    def close(self) -> None:
        """Idempotent. After `shut_down`, when nobody accepts any more."""
        self._socket.close()


def _listen_tcp(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    return socket.create_server((address.host, address.port), family=family, backlog=_BACKLOG)


def _listen_unix(path: str, access: SocketAccess) -> socket.socket:
    """Listens under another name first, so that the name shows up only when all is set."""
    require_nobody_there(path)
    new = path + _NEW_SUFFIX
    Path(new).unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(new)
        access.give(new)
        listening.listen(_BACKLOG)
        os.rename(new, path)
    except (OSError, ConfigError):
        listening.close()
        raise
    return listening


def require_nobody_there(path: str) -> None:
    """Raises `ServedError` when a server lives on this Unix socket, and another `OSError` when something else has its
    name. One that is dead may be replaced."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise FileExistsError(f"{path} is there and no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return
        except OSError as error:  # its queue is full: a server that is busy, or stopped, is not dead
            raise ServedError(f"a server lives there ({error})") from error
    raise ServedError("a server lives there")
