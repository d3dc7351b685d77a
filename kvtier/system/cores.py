"""How many cores this process may use."""

import os
import sys


def usable_cores() -> int:
    """Cores on which the system may run this process: no more than the host has."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
