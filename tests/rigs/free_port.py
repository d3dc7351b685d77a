"""Ports for servers that are told which one to take."""

import contextlib
import itertools
import random
import socket

_FIRST, _END, _SLICE = 10_000, 30_000, 100
"""Below those that Linux gives to whoever asks for any: nobody gets one of these by accident."""
_chance = random.SystemRandom()  # tests seed the other one


def _claimed() -> tuple[socket.socket, int]:
    """A slice of the ports that no other process has which tests at the same time, by a name in Linux's abstract
    namespace that goes with this process; and the slice's first port."""
    while True:
        first = _chance.randrange(_FIRST, _END, _SLICE)
        with contextlib.ExitStack() as unless_free, contextlib.suppress(OSError):
            name = unless_free.enter_context(socket.socket(socket.AF_UNIX))
            name.bind(f"\0kvtier-tests-ports-{first}")
            unless_free.pop_all()
            return name, first


_name, _first = _claimed()
"""Claimed at the import, and not in a test, which must leave nothing behind."""
_ports = itertools.cycle(_chance.sample(range(_first, _first + _SLICE), _SLICE))


def free_port() -> int:
    """One of 127.0.0.1 that can be bound a little later, and again after its server was killed."""
    for port in _ports:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("a cycle has no end")
