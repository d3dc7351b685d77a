"""A process that takes processor time and does nothing with it: a neighbour who never calls the pool.

`python -m kvtier_bench.processes.burner_process` reads JSON lines: `{}` first, then `{"seconds": ..., "share": ...}`,
share in processor seconds per second. It answers `{"cpu_s": ...}` when that time is over.
"""

import json
import sys
import time
from contextlib import ExitStack

from kvtier_bench.processes.json_process import JsonProcess

_SPIN_S = 0.002
"""Longest spin between two looks at the clocks, and longest rest: as long as clients of a pool run and wait."""


class BurnerProcess:
    """A burner, started. One thread."""

    def __init__(self, stack: ExitStack) -> None:
        """:param stack: ends the process."""
        self._process = stack.enter_context(JsonProcess(__name__, {}))

    def start(self, seconds: float, share: float) -> None:
        """Does not wait: `result` does."""
        self._process.tell({"seconds": seconds, "share": share})

    def result(self) -> float:
        """Waits until it has burnt; processor seconds that it got."""
        return float(self._process.answer()["cpu_s"])


def _burn(seconds: float, share: float) -> float:
    """Burns as much as is due by now, and makes up for what others took from it."""
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    while (elapsed_s := time.monotonic() - began_s) < seconds:
        due_s = share * elapsed_s - (time.process_time() - began_cpu_s)
        if due_s <= 0:
            time.sleep(_SPIN_S)
        else:
            until_s = time.process_time() + min(_SPIN_S, due_s)
            while time.process_time() < until_s:
                pass
    return time.process_time() - began_cpu_s


def _run() -> None:
    sys.stdin.readline()
    for line in sys.stdin:
        print(json.dumps({"cpu_s": _burn(**json.loads(line))}), flush=True)


if __name__ == "__main__":
    _run()
