"""`kvtier bench writes`: what blocks cost the pool on their way from its memory to a disk and a Redis."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry

from kvtier.cli.options import Json, Plot
from kvtier.codec.stored_form import Header, encode_header, parse_header
from kvtier.errors import KvtierError
from kvtier.identity.keys import tenant_id
from kvtier.memory.malloc import keep_freed_memory
from kvtier.memory.pages import copy_bytes
from kvtier.metrics import Metrics
from kvtier.store.event_hub import EventHub
from kvtier.store.lower_tiers import LowerTier
from kvtier.store.metrics import StoreMetrics
from kvtier.store.store import Store
from kvtier.store.write_behind import WriteBehindSettings
from kvtier.system.redis_process import redis_binary, redis_process
from kvtier.system.working_folder import working_folder
from kvtier.tiers.base import Tier, WriteStatus
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.host.slots import WriteSlot
from kvtier.tiers.redis import RedisSettings, RedisTier
from kvtier_bench.measuring.blocks import TENANT, Rotation, keys_of
from kvtier_bench.measuring.options import PayloadBytes, Rounds
from kvtier_bench.measuring.report import Case, report
from kvtier_bench.measuring.rounds import NUM_ROUNDS, Subject, in_turn
from kvtier_bench.processes.pool_process import CALL_TIMEOUT_S

_ROOM = 4
"""Capacity of each tier, in rounds."""
_POLL_S = 0.002


def bench_writes(
    json: Json = False, plot: Plot = None, payload_bytes: PayloadBytes = 2 << 20, rounds: Rounds = NUM_ROUNDS
) -> None:
    """Write 64 blocks to a pool's store, with nothing, a disk, a Redis or both below, until all have them.

    Every block is held against its checksum as it arrives, as a socket does it. CPU time is this process's: neither the
    Redis server's, nor what the kernel does for a disk afterwards.
    """
    keep_freed_memory()
    rotation = Rotation(payload_bytes)
    notes: list[str] = []
    with ExitStack() as stack:
        folder = stack.enter_context(working_folder())
        room = max(256 << 20, _ROOM * rotation.nbytes)
        redis_url = None
        if (binary := redis_binary()) is not None:
            redis_url, _ = stack.enter_context(redis_process(binary, folder, 2 * room))
        else:
            notes.append("Without redis: no redis-server is installed.")
        subjects = {"memcpy": Subject(rotation.copies)}
        for name in ("memory", "disk", "redis", "disk and redis"):
            if redis_url is not None or "redis" not in name:
                store = stack.enter_context(_store(name, folder, redis_url, room))
                prepare = partial(store.prepare, rotation)
                subjects[name] = Subject(store.run, prepare=prepare)
                for _ in range(_ROOM + 1):  # all memory is touched, and from now on evicted
                    prepare()
                    store.run()
        samples = in_turn(subjects, rounds=rounds, label="write")
    cases = [
        Case.of(
            name,
            "write",
            samples[name],
            floor=("memcpy", samples["memcpy"]),
            round_bytes=rotation.nbytes,
            payload_bytes=payload_bytes,
            batch=len(rotation.sources),
            unit="batch",
        )
        for name in subjects
        if name != "memcpy"
    ]
    report("Writes", cases, as_json=json, plot=plot, notes=notes)


class _Writing:
    """A store, and in each round blocks that nobody has written yet."""

    def __init__(self, store: Store, registry: CollectorRegistry, names: list[str], label: str) -> None:
        """:param names: of the tiers below."""
        self._store, self._registry, self._names, self._label = store, registry, names, label
        self._num_written = 0
        self._blocks: list[tuple[Header, memoryview]] = []

    def prepare(self, rotation: Rotation) -> None:
        """What their writer does."""
        keys = keys_of(len(rotation.sources), f"{self._label} {self._num_written}")
        sources = zip(keys, rotation.sources, strict=True)
        self._blocks = [(parse_header(encode_header(key, source)), source) for key, source in sources]

    def run(self) -> list[float]:
        """What the pool does, until every tier has them."""
        began_s = time.perf_counter()
        for header, source in self._blocks:
            slot = self._store.begin_write(tenant_id(TENANT), header.key, len(source))
            if not isinstance(slot, WriteSlot):
                raise KvtierError(f"a write was refused ({slot.name}): the figures would mean nothing")
            copy_bytes(slot.view, source)
            if self._store.commit_write(slot, header) is not WriteStatus.STORED:
                raise KvtierError("a write was refused: the figures would mean nothing")
        self._num_written += len(self._blocks)
        while any(self._num_below(name) < self._num_written for name in self._names):
            time.sleep(_POLL_S)
        return [time.perf_counter() - began_s]

    def _num_below(self, name: str) -> float:
        labels = {"tier": name, "result": "stored"}
        return self._registry.get_sample_value("kvtier_pool_written_down_blocks_total", labels) or 0.0


@contextmanager
def _store(name: str, folder: Path, redis_url: str | None, room: int) -> Iterator[_Writing]:
    tiers: list[Tier] = []
    if "disk" in name:
        tiers.append(DiskTier.open(folder / name.replace(" ", "-"), 2 * room, reserve_bytes=0))
    if redis_url is not None and "redis" in name:
        of_redis, breaker = RedisSettings(call_timeout_s=CALL_TIMEOUT_S), CircuitBreaker(3, 1.0)
        tiers.append(RedisTier(redis_url, of_redis, metrics=Metrics(), breaker=breaker))
    registry = CollectorRegistry()
    settings = WriteBehindSettings(queue_bytes=room // 2)
    below = [LowerTier(tier, settings) for tier in tiers]
    hub = EventHub(max_streams=1, buffer=1)
    store = Store(memory_bytes=room, below=below, hub=hub, metrics=StoreMetrics(registry))
    store.start()
    try:
        yield _Writing(store, registry, [tier.name for tier in tiers], name)
    finally:
        store.close()
