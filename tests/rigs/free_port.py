"""Ports for servers that are told which one to take."""

import contextlib
import random
import socket

_FIRST, _END = 10_000, 30_000
"""Below those that Linux gives to whoever asks for any: nobody gets one of these by accident."""


def free_port() -> int:
    """One of 127.0.0.1 that can be bound a little later, and again after its server was killed."""
    chance = random.SystemRandom()  # tests seed the other one
    while True:
        port = chance.randrange(_FIRST, _END)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
