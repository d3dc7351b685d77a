"""A client of the soak in a process of its own: random calls over one path, every payload derived from its key.

    python tests/soak/soak_client.py '{"address": "unix:/tmp/s", "tenant": "red", "seed": 1, ...}'

Appends its counts as lines of JSON to `log`, a few times a second, so that a client that is killed has told most of
them. Ends when its standard input does: with its parent, whatever becomes of that.
"""

import json
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from kvtier.identity.keys import StoreKey, tenant_id
from kvtier.metrics import Metrics
from kvtier.testing.blocks import make_key, make_payload, summed
from kvtier.tiers.base import Status, Tier, WriteStatus
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.pool.access import PoolAccess, open_transport
from kvtier.tiers.pool.tier import PoolTier

SIZES = (4096, 40_000, 65_536, 262_144, 1 << 20)
_WEIGHTS = (30, 20, 30, 15, 5)
_OPERATIONS = {"write": 45, "read": 45, "lookup": 8, "discard": 2}
_TELL_S = 0.25
_NUM_THREADS = 2
_PAUSE_S = 0.05
"""After a call that a pool without pulse has failed."""
_POISON = 0xA5


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientPlan:
    """What one client does."""

    address: str
    shared_memory: bool
    tenant: str
    token: str
    seed: int
    num_labels: int
    """Keys are drawn from so many, of all clients of a tenant."""
    log: str


def size_of(label: int) -> int:
    """The payload length of a block: the same for everybody."""
    return random.Random(label).choices(SIZES, _WEIGHTS)[0]


def payload_of(tenant: str, label: int) -> bytes:
    """Differs between tenants, so that a block of the other one would be noticed."""
    return make_payload((tenant, label), size_of(label))


class Client:
    """One thread's calls."""

    def __init__(self, plan: ClientPlan, tier: Tier, number: int, counts: "Counts") -> None:
        self._plan, self._tier, self._counts = plan, tier, counts
        self._random = random.Random(f"{plan.seed}/{number}")

    def step(self) -> None:
        operation = self._random.choices(list(_OPERATIONS), list(_OPERATIONS.values()))[0]
        labels = [self._random.randrange(self._plan.num_labels) for _ in range(self._random.randint(1, 8))]
        getattr(self, operation)(list(dict.fromkeys(labels)))

    def _keys(self, labels: list[int]) -> list[StoreKey]:
        return [make_key(label, tenant=tenant_id(self._plan.tenant)) for label in labels]

    def write(self, labels: list[int]) -> None:
        payloads = [payload_of(self._plan.tenant, label) for label in labels]
        statuses = self._tier.write([summed(*block) for block in zip(self._keys(labels), payloads, strict=True)])
        for status in statuses:
            self._counts.add(f"write_{status.name.lower()}")
        if WriteStatus.FAILED in statuses:
            time.sleep(_PAUSE_S)

    def read(self, labels: list[int]) -> None:
        buffers = [bytearray([_POISON]) * size_of(label) for label in labels]
        statuses = self._tier.read(self._keys(labels), [memoryview(buffer) for buffer in buffers])
        for label, buffer, status in zip(labels, buffers, statuses, strict=True):
            self._counts.add(f"read_{status.name.lower()}")
            if status is Status.HIT and buffer != payload_of(self._plan.tenant, label):
                self._counts.add("mismatched")

    def lookup(self, labels: list[int]) -> None:
        self._tier.lookup(self._keys(labels))
        self._counts.add("lookup", len(labels))

    def discard(self, labels: list[int]) -> None:
        self._tier.discard(self._keys(labels))
        self._counts.add("discard", len(labels))


class Counts:
    """What the threads of this process have seen. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        """Guarded by _lock."""

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[name] += amount

    def now(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def line(self, metrics: Metrics) -> str:
        """All so far, and what the tier has counted itself."""
        counts = self.now()
        counts["corrupt"] = _total(metrics, "kvtier_corrupt_blocks_total")
        for path in ("shm", "unix", "tcp", "grpc"):
            counts[f"bytes_{path}"] = _total(metrics, "kvtier_path_bytes_total", path=path)
        return json.dumps(counts) + "\n"


def run(plan: ClientPlan) -> None:
    """Until standard input ends."""
    counts, end = Counts(), threading.Event()
    metrics = Metrics()
    tenant = tenant_id(plan.tenant)
    breaker = CircuitBreaker(3, 0.2)
    access = PoolAccess([plan.address], tenant, plan.token, shared_memory=plan.shared_memory)
    tier = PoolTier(open_transport(access, metrics), tenant, metrics=metrics, breaker=breaker, call_timeout_s=2.0)

    def work(number: int) -> None:
        client = Client(plan, tier, number, counts)
        while not end.is_set():
            try:
                client.step()
            except Exception as error:  # a tier answers whatever happens; that it raised is a finding
                counts.add(f"raised {type(error).__name__}: {error}")
                time.sleep(0.1)

    def until_input_ends() -> None:
        sys.stdin.read()
        end.set()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(_NUM_THREADS)]
    reader = threading.Thread(target=until_input_ends, daemon=True)
    for thread in (*threads, reader):
        thread.start()
    with Path(plan.log).open("a", buffering=1) as log:
        while not end.wait(_TELL_S):
            log.write(counts.line(metrics))
        for thread in threads:
            thread.join()
        log.write(counts.line(metrics))
    tier.close()


def _total(metrics: Metrics, name: str, **labels: str) -> int:
    """The sum of a counter's samples that have these labels."""
    samples = [sample for family in metrics.registry.collect() for sample in family.samples if sample.name == name]
    return int(sum(sample.value for sample in samples if labels.items() <= sample.labels.items()))


def command(plan: ClientPlan) -> list[str]:
    """Starts such a client."""
    return [sys.executable, __file__, json.dumps(asdict(plan))]


if __name__ == "__main__":
    run(ClientPlan(**json.loads(sys.argv[1])))
