"""Tells an operator that what was asked for goes on, while it takes its time."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

from kvtier.errors import UnavailableError
from kvtier_pool.operator_socket import send

PURGING = "purging"
"""The key that a message has, beside the tenant's name, as long as a purge goes on."""
_PROGRESS_S = 0.5
"""Seconds between two messages."""


@contextlib.contextmanager
def telling(connection: socket.socket, message: dict[str, Any]) -> Iterator[None]:
    """Sends the message at once, and twice a second until the context is left, on a thread of its own. Nobody else
    may send meanwhile.

    Raises `OSError` where nobody takes the first one, and `UnavailableError` where there is no thread; the others are
    sent for as long as there is somebody.
    """
    send(connection, message)
    ended = threading.Event()
    thread = threading.Thread(
        target=_tell, args=(connection, message, ended), name="kvtier-operator-progress", daemon=True
    )
    try:
        thread.start()
    except RuntimeError as error:
        raise UnavailableError("this process can have no more threads: try later") from error
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _tell(connection: socket.socket, message: dict[str, Any], ended: threading.Event) -> None:
    while not ended.wait(_PROGRESS_S):
        try:
            send(connection, message)
        except TimeoutError:  # the operator's process is stopped, and may go on
            continue
        except OSError:
            return
