"""Ports for servers that are told which one to take."""

import contextlib
import random
import socket

_FIRST, _END = 10_000, 30_000
"""Below those that Linux gives to whoever asks for any: nobody gets one of these by accident."""
_held: list[socket.socket] = []
"""One for each port that was given out, named after it in Linux's abstract namespace: two processes that test at the
same time get no port twice, though neither has a server there yet. They go with the process."""


def free_port() -> int:
    """One of 127.0.0.1 that can be bound a little later, and again after its server was killed."""
    chance = random.SystemRandom()  # tests seed the other one
    while True:
        port = chance.randrange(_FIRST, _END)
        with contextlib.ExitStack() as unless_free, contextlib.suppress(OSError):
            name = unless_free.enter_context(socket.socket(socket.AF_UNIX))
            name.bind(f"\0kvtier-tests-port-{port}")
            with socket.create_server(("127.0.0.1", port)):
                _held.append(name)
                unless_free.pop_all()
                return port
