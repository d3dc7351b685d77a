"""A terminal that shows one view after the other, until somebody types q."""

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console, RenderableType
from rich.live import Live

from kvtier.clock import MONOTONIC

_ENDS = (b"q", b"Q", b"\x03", b"\x04")
"""Keys that end it; the last two are Ctrl-C and Ctrl-D, where the terminal hands them on as keys."""


class Screen:
    """The other screen of a terminal, and its keys. One thread; see `opened`."""

    def __init__(self, live: Live, wakes: int) -> None:
        """:param wakes: a descriptor that is readable when a signal came."""
        self._live = live
        self._wakes = wakes
        self._is_ended = False

    def show(self, view: RenderableType) -> None:
        """Shows this in place of what was shown."""
        self._live.update(view, refresh=True)

    def wait(self, seconds: float) -> bool:
        """Waits so long, for a key that ends it, or a signal; False: it is to end. Draws anew when the size changes."""
        until_s = MONOTONIC() + seconds
        while not self._is_ended:
            left_s = until_s - MONOTONIC()
            if left_s <= 0:
                return True
            ready, _, _ = select.select([sys.stdin.fileno(), self._wakes], [], [], left_s)
            if self._wakes in ready:
                numbers = os.read(self._wakes, 64)
                self._is_ended |= any(number in numbers for number in (signal.SIGINT, signal.SIGTERM))
                self._live.refresh()
            if sys.stdin.fileno() in ready:
                keys = os.read(sys.stdin.fileno(), 64)
                self._is_ended |= not keys or any(key in keys for key in _ENDS)
        return False


@contextmanager
def opened(console: Console) -> Iterator[Screen]:
    """The screen for as long as the block lasts. The terminal is as it was afterwards, however the block ends."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    wakes, written = os.pipe()
    os.set_blocking(written, False)
    handlers = {number: signal.signal(number, _ignore) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGWINCH)}
    known = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    try:
        tty.setcbreak(descriptor)
        with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
            yield Screen(live, wakes)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
        signal.set_wakeup_fd(known)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(wakes)
        os.close(written)


def _ignore(number: int, frame: FrameType | None) -> None:
    """The number goes through the pipe, to the thread that waits."""
