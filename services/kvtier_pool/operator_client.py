"""The other end of the operator's Unix socket: finds the pool that is meant, and asks it."""

import contextlib
import socket
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError, KvtierError, UnavailableError
from kvtier_pool.operator_socket import Lines, address_of, peer_of, running_pools, send

_ANSWER_S = 30.0
"""A pool says something twice a second, where it takes longer to answer."""


def connected(pid: int | None) -> socket.socket:
    """A connection to the pool, and to nobody who only has its name. Raises `ConfigError` unless there is one pool
    that may be meant, and `UnavailableError` when it does not answer.

    :param pid: process of the pool; None: the only one that runs here.
    """
    if pid is None:
        pools = running_pools()
        if len(pools) != 1:
            found = (
                f"pools {', '.join(map(_named, pools))} run here: name one by --pid" if pools else "no pool runs here"
            )
            raise ConfigError(f"{found}; in a container, run this command there")
        (pid,) = pools
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_ANSWER_S)
        connection.connect(address_of(pid))
        if peer_of(connection).pid != pid:
            raise UnavailableError(f"another process than {pid} has the name of that pool: nothing is asked of it")
    except OSError as error:
        connection.close()
        raise UnavailableError(f"no pool answers as process {pid}: {error}") from error
    except KvtierError:
        connection.close()
        raise
    return connection


def _named(pid: int) -> str:
    """The number of a process, and the file that it was started with, where the system tells that."""
    words: list[str] = []
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    files = [file for option, file in pairwise(words) if option == "--config"]
    return f"{pid} ({files[0]})" if files else str(pid)


def ask(connection: socket.socket, request: dict[str, Any]) -> None:
    """Sends a request. A pool that refuses at once has said why: `received` raises it."""
    with contextlib.suppress(BrokenPipeError):
        send(connection, request)


def received(lines: Lines) -> dict[str, Any]:
    """The next answer. Raises `ConfigError` for a refusal, `UnavailableError` when there is none."""
    try:
        message = lines.receive()
    except OSError as error:
        raise UnavailableError(f"the pool says nothing any more: {error}") from error
    if message is None:
        raise UnavailableError("the pool has ended, or was stopped, before it had answered")
    if "error" in message:
        raise ConfigError(str(message["error"]))
    return message
