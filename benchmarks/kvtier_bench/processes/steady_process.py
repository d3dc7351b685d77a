"""A tenant with a steady workload: it reads its working set prompt by prompt, and writes again what it misses.

`python -m kvtier_bench.processes.steady_process` reads JSON lines: first `pool`, `path` and `work` (`SteadyWork`), then
`{"seconds": ...}`. It answers `Steady`.
"""

import json
import random
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field

from kvtier.identity.keys import tenant_id
from kvtier.memory.malloc import keep_freed_memory
from kvtier.memory.pages import map_memory
from kvtier.testing.blocks import make_key, summed
from kvtier.tiers.base import Item, Status, WriteStatus
from kvtier.tiers.pool.tier import PoolTier
from kvtier_bench.processes.json_process import JsonProcess
from kvtier_bench.processes.pool_process import PoolProcess

_FILL_S = 30.0
"""How long the working set may take to be there when it is written first."""


@dataclass(frozen=True, slots=True)
class SteadyWork:
    """What one client does."""

    num_prompts: int
    """Prompts in the working set, read one after the other in an order that a seed chooses."""
    prompt_blocks: int
    """Blocks of each, read in one call."""
    payload_bytes: int
    """The size of a block."""
    pause_s: float
    """The time between the end of a read, with what follows of it, and the next."""


@dataclass(frozen=True, slots=True)
class Steady:
    """What came of it."""

    reads_s: list[float] = field(default_factory=list)
    """Seconds of each read."""
    num_hits: int = 0
    """Blocks."""
    num_misses: int = 0
    """Blocks. Each was written again."""
    num_refused: int = 0
    """Blocks of those that the pool did not take."""
    cpu_s: float = 0.0
    """Processor seconds of the client."""

    @property
    def hit_rate(self) -> float:
        return self.num_hits / max(1, self.num_hits + self.num_misses)


class SteadyProcess:
    """A client, started. One thread."""

    def __init__(self, pool: PoolProcess, path: str, work: SteadyWork, stack: ExitStack) -> None:
        """:param stack: ends the process."""
        first = {"pool": asdict(pool), "path": path, "work": asdict(work)}
        self._process = stack.enter_context(JsonProcess(__name__, first))

    def start(self, seconds: float) -> None:
        """Does not wait: `result` does. 0: each prompt once, without pauses."""
        self._process.tell({"seconds": seconds})

    def result(self) -> Steady:
        """Waits for the end of what was started."""
        return Steady(**self._process.answer())


class _Client:
    """One thread."""

    def __init__(self, tier: PoolTier, tenant: str, path: str, work: SteadyWork) -> None:
        self._tier, self._work = tier, work
        rng = random.Random(path)
        owner, num_blocks = tenant_id(tenant), work.prompt_blocks
        self._prompts: list[list[Item[bytes]]] = []
        for prompt in range(work.num_prompts):
            payloads = [rng.randbytes(work.payload_bytes) for _ in range(num_blocks)]
            keys = [make_key((path, prompt, block), tenant=owner) for block in range(num_blocks)]
            self._prompts.append([summed(key, payload) for key, payload in zip(keys, payloads, strict=True)])
        rng.shuffle(self._prompts)
        self._into = [map_memory(work.payload_bytes, prefault=True) for _ in range(num_blocks)]
        self._at = 0

    def fill(self) -> None:
        """Writes the working set, however often the pool asks for patience."""
        deadline = time.monotonic() + _FILL_S
        for prompt in self._prompts:
            while self._num_refused(prompt) and time.monotonic() < deadline:
                time.sleep(0.02)

    def run(self, seconds: float) -> Steady:
        began_cpu_s, ends_at_s = time.process_time(), time.monotonic() + seconds
        reads_s: list[float] = []
        num_hits = num_misses = num_refused = 0
        while time.monotonic() < ends_at_s or (not seconds and len(reads_s) < len(self._prompts)):
            prompt = self._prompts[self._at]
            self._at = (self._at + 1) % len(self._prompts)
            start = time.perf_counter()
            statuses = self._tier.read([key for key, _, _ in prompt], self._into)
            reads_s.append(time.perf_counter() - start)
            missed = [item for item, status in zip(prompt, statuses, strict=True) if status is not Status.HIT]
            num_hits += len(prompt) - len(missed)
            num_misses += len(missed)
            num_refused += self._num_refused(missed) if missed else 0
            if seconds:
                time.sleep(self._work.pause_s)
        return Steady(reads_s, num_hits, num_misses, num_refused, time.process_time() - began_cpu_s)

    def _num_refused(self, items: list[Item[bytes]]) -> int:
        statuses = self._tier.write(items)
        return sum(status not in (WriteStatus.STORED, WriteStatus.EXISTS) for status in statuses)


def _run() -> None:
    keep_freed_memory()
    first = json.loads(sys.stdin.readline())
    pool = PoolProcess(**first["pool"])
    with ExitStack() as stack:
        tier = pool.tier(first["path"], stack, only=False)
        client = _Client(tier, pool.tenant, first["path"], SteadyWork(**first["work"]))
        client.fill()
        for line in sys.stdin:
            print(json.dumps(asdict(client.run(json.loads(line)["seconds"]))), flush=True)


if __name__ == "__main__":
    _run()
