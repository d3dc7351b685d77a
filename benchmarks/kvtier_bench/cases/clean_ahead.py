"""`kvtier bench clean-ahead`: how fast a device may take blocks before it drops some that were not copied away."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import numpy as np
import typer
from prometheus_client import CollectorRegistry

from kvtier.build.engine_cache import EngineCache, engine_cache
from kvtier.cli.options import Json
from kvtier.config import parse_config
from kvtier.device.block_pool import BlockPool
from kvtier.device.kv import HostMemoryKV
from kvtier.errors import KvtierError
from kvtier.identity.keys import BLOCK_KEY_BYTES, BlockKey
from kvtier.memory.malloc import keep_freed_memory
from kvtier.offload import Cleaner
from kvtier_bench.measuring.blocks import TENANT, namespace_of
from kvtier_bench.measuring.report import Case, report
from kvtier_bench.measuring.rounds import progress

_STEP_S = 0.01
_GB = 1e9
_PATIENCE_S = 60.0


def bench_clean_ahead(
    json: Json = False,
    payload_bytes: Annotated[int, typer.Option(min=4096, help="Bytes per block.")] = 2 << 20,
    blocks: Annotated[int, typer.Option(min=16, help="Blocks of the device.")] = 512,
    depth: Annotated[int, typer.Option(min=1, help="Blocks kept clean (cache.clean_ahead_blocks).")] = 256,
    rates: Annotated[str, typer.Option(help="GB of KV that the engine computes per second, several.")] = "1,2,4,8",
    seconds: Annotated[float, typer.Option(min=0.1, help="Per rate.")] = 5.0,
) -> None:
    """Allocate device blocks at a steady rate while the scheduler's thread computes, and count those that were dropped.

    Host memory copies blocks as late as it can (`write_back`), so all that keeps one is the cleaner, called once per
    step of 10 ms, all of which is pure Python. The device is host memory, its blocks are taken in random order. Dropped
    blocks would be computed again.
    """
    keep_freed_memory()
    cases: list[Case] = []
    wanted = [float(rate) for rate in rates.split(",")]
    with progress("rates", len(wanted)) as advance:
        for rate in wanted:
            with _device(payload_bytes, blocks, depth) as device:
                figures = device.run(rate * _GB, seconds)
            speed = figures["allocated_gb_per_s"]
            cases.append(Case(f"{rate:g} GB/s", "allocate", payload_bytes, gb_per_s=speed, figures=figures))
            advance()
    notes = [
        f"{case.name}: {case.figures['clean_share']:.1%} of {case.figures['evicted']:,.0f} evicted blocks had been "
        f"copied; steps took {case.figures['step_p50_ms']:.1f} ms (p99 {case.figures['step_p99_ms']:.1f})."
        for case in cases
    ]
    report("Clean-ahead", cases, as_json=json, notes=notes)


class _Device:
    """An engine's device blocks, all of them always cached."""

    def __init__(self, cache: EngineCache, payload_bytes: int, blocks: int, depth: int) -> None:
        self._cache, self._payload_bytes = cache, payload_bytes
        self._block_pool = BlockPool(blocks, on_evict=self._note)
        self._cleaner = Cleaner(self._block_pool, cache.hierarchy, cache.metrics, depth_blocks=depth)
        self._keys = (BlockKey(i.to_bytes(BLOCK_KEY_BYTES, "big")) for i in itertools.count())
        self._evicted = self._clean = 0

    def run(self, bytes_per_s: float, seconds: float) -> dict[str, float]:
        """Steps at this rate, from a device that is full, and clean as far as the cleaner looks."""
        self._shuffle()
        self._take(self._block_pool.num_blocks)
        self._clean_up()
        steps_s, num_taken = [], 0
        start = last = time.perf_counter()
        while (elapsed := last - start) < seconds:
            wanted = int(elapsed * bytes_per_s / self._payload_bytes) - num_taken
            num_taken += self._take(min(wanted, self._block_pool.num_free))
            self._step()
            while time.perf_counter() - last < _STEP_S:
                sum(range(1000))
            now = time.perf_counter()
            steps_s.append(now - last)
            last = now
        return {
            "evicted": self._evicted,
            "clean_share": self._clean / max(1, self._evicted),
            "allocated_gb_per_s": num_taken * self._payload_bytes / elapsed / _GB,
            "step_p50_ms": float(np.percentile(steps_s, 50)) * 1e3,
            "step_p99_ms": float(np.percentile(steps_s, 99)) * 1e3,
        }

    def _shuffle(self) -> None:
        taken = self._block_pool.allocate(self._block_pool.num_blocks) or []
        self._block_pool.free(np.random.default_rng(0).permutation(taken).tolist())

    def _step(self) -> None:
        for result in self._cache.hierarchy.poll():
            self._cleaner.take(result)
        self._cleaner.step()

    def _clean_up(self) -> None:
        deadline = time.perf_counter() + _PATIENCE_S
        self._step()
        while self._cleaner.num_held:
            if time.perf_counter() > deadline:
                raise KvtierError("the cleaner does not come to an end: the figures would mean nothing")
            self._cache.hierarchy.wait(_STEP_S)
            self._step()

    def _take(self, num_blocks: int) -> int:
        taken = self._block_pool.allocate(num_blocks) or []
        for block_id, key in zip(taken, self._keys, strict=False):
            self._block_pool.assign_key(block_id, key)
        self._block_pool.free(taken)
        return len(taken)

    def _note(self, key: BlockKey, block_id: int) -> None:
        self._cache.hierarchy.note_eviction(key, block_id)
        self._evicted += 1
        self._clean += self._cache.hierarchy.holds(key)


@contextmanager
def _device(payload_bytes: int, blocks: int, depth: int) -> Iterator[_Device]:
    config = parse_config(
        {
            "tenant": TENANT,
            "tenants": {TENANT: {"secret": "env:SECRET"}},
            "host": {"capacity_bytes": blocks * payload_bytes, "write_policy": "write_back"},
        },
        source="kvtier bench clean-ahead",
        environ={"SECRET": "of a benchmark, shared with nobody"},
    )
    namespace = namespace_of(payload_bytes)
    kv = np.ones((blocks, payload_bytes), dtype=np.uint8)
    with engine_cache(config, device=HostMemoryKV(kv), namespace=namespace, registry=CollectorRegistry()) as built:
        yield _Device(built, payload_bytes, blocks, depth)
