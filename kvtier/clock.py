"""Time as a dependency, so that tests own it."""

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Returns monotonic seconds. `MONOTONIC` in production, a counter in tests."""

MONOTONIC: Clock = time.monotonic
