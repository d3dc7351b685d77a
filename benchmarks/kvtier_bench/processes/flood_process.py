"""A tenant that floods a pool, by several means at once.

`python -m kvtier_bench.processes.flood_process` reads JSON lines: first `pool`, `label`, `means` (names of
`flood_means`) and `cold_blocks`, then `{"seconds": ...}`. It answers `{"cpu_s": ..., "counts": {...}}`.
"""

import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict

from kvtier.memory.malloc import keep_freed_memory
from kvtier_bench.processes.flood_means import Flood, flood_for
from kvtier_bench.processes.json_process import JsonProcess
from kvtier_bench.processes.pool_process import PoolProcess


class FloodProcess:
    """One of the tenant's clients, started. One thread."""

    def __init__(self, pool: PoolProcess, label: str, means: Sequence[str], cold_blocks: int, stack: ExitStack) -> None:
        """:param stack: ends the process."""
        first = {"pool": asdict(pool), "label": label, "means": list(means), "cold_blocks": cold_blocks}
        self._process = stack.enter_context(JsonProcess(__name__, first))

    def start(self, seconds: float) -> None:
        """Does not wait: `result` does."""
        self._process.tell({"seconds": seconds})

    def result(self) -> tuple[float, dict[str, int]]:
        """Waits until everything is given back; processor seconds, and what was done."""
        answer = self._process.answer()
        return float(answer["cpu_s"]), {str(name): int(num) for name, num in answer["counts"].items()}


def _run() -> None:
    keep_freed_memory()
    first = json.loads(sys.stdin.readline())
    flood = Flood(PoolProcess(**first["pool"]), first["label"], first["cold_blocks"])
    for line in sys.stdin:
        began_s = time.process_time()
        counts = flood_for(flood, first["means"], json.loads(line)["seconds"])
        print(json.dumps({"cpu_s": time.process_time() - began_s, "counts": counts}), flush=True)


if __name__ == "__main__":
    _run()
