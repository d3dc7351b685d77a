"""Time as a dependency, so that tests own it."""

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Returns seconds. `MONOTONIC` in production, a counter in tests."""

MONOTONIC: Clock = time.monotonic
WALL: Clock = time.time
"""Seconds since 1970, for what people name: it may jump."""
