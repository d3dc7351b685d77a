"""vLLM's native offloading without an engine: its manager and primary tier, with our tier below, driven by hand."""

import contextlib
import hashlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import vllm
import vllm_rig
from model_classes import found_out_here
from vllm.config import CacheConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm_rig import ENVIRON, TOKENS

import kvtier_vllm.secondary_tier
from cache_pool import WAIT_S
from kvtier.system.processes import Service
from kvtier.testing.blocks import make_payload
from suspending import resume, suspend

OF_032: bool = vllm.__version__.startswith("0.32.")
HASTE = {"call_timeout_s": 3.0, "breaker_open_s": 0.2}
"""Settings of the table `pool`, for pools that hang: each time costs a test this deadline. A pool that is a little
late must not miss it, though, or what was stored is not."""
ROW_BYTES = 64 * 1024
NUM_CHUNKS = 16
_STEP_S = 0.001
_numbers = itertools.count()


def set_environment(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """The secrets that `settings` names, and a folder in which digests of weights are remembered."""
    for name, value in ENVIRON.items():
        patch.setenv(name, value)
    patch.setattr(kvtier_vllm.secondary_tier, "DIGESTS", folder / "digests")


def settings(address: str, tenant: str = "red", *, client: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What users give as one of `secondary_tiers`, but for its name.

    :param client: of the table `pool`.
    """
    return vllm_rig.settings(tenant, pool={"address": [address], **(client or {})})


def named(tier: Mapping[str, Any]) -> dict[str, Any]:
    """The same with its name."""
    return {"type": "KvtierTier", "module_path": "kvtier_vllm.secondary_tier", **tier}


def engine_config(model: Path, *, hash_algorithm: str = "sha256", **options: Any) -> VllmConfig:
    """:param options: of `ModelConfig`."""
    cache = CacheConfig(block_size=32, prefix_caching_hash_algo=hash_algorithm)
    with found_out_here():
        of_model = ModelConfig(model=str(model), **{"dtype": "bfloat16"} | options)
    return VllmConfig(model_config=of_model, cache_config=cache)


def offloading_config(engine: VllmConfig, tier: Mapping[str, Any], **changes: Any) -> OffloadingConfig:
    """What vLLM gives its native offloading.

    :param tier: settings of ours.
    :param changes: `layers`, `blocks_per_chunk`, `world_size`.
    """
    world_size = changes.get("world_size", 1)
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(32, changes.get("layers", ("0", "1")), 0),),
        worker_kv_bytes_per_block=ROW_BYTES // world_size,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": NUM_CHUNKS * ROW_BYTES, "secondary_tiers": [named(tier)]},
        engine_id=f"kvtier-test-{time.time_ns()}-{next(_numbers)}",
        model=OffloadingModelConfig(engine.model_config.model, "bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=changes.get("blocks_per_chunk", 1)),
        parallel=OffloadingParallelConfig(0, world_size, world_size, 1, 1, 1, 0, 1, None, False),
    )


class Native:
    """A manager and its tiers. A context manager. Chunks are called by numbers, each with bytes of its own."""

    def __init__(self, engine: VllmConfig, tier: Mapping[str, Any], **changes: Any) -> None:
        """:param changes: see `offloading_config`."""
        with set_current_vllm_config(engine):
            spec = TieringOffloadingSpec(offloading_config(engine, tier, **changes))
            self.manager: TieringOffloadingManager = spec.get_manager()
        self._memory = self.manager.primary_tier.get_kv_memoryview().cast("B")
        self._row_bytes = spec.kv_bytes_per_chunk
        self._stats: dict[tuple[str, ...], int] = {}

    def __enter__(self) -> "Native":
        return self

    def __exit__(self, *error: object) -> None:
        self._memory.release()
        self.manager.shutdown()

    def begin(self, params: dict[str, Any] | None = None) -> ReqContext:
        """A new request."""
        request = ReqContext(f"request-{next(_numbers)}", kv_transfer_params=params)
        self.manager.on_new_request(request)
        return request

    def step(self) -> None:
        """One schedule's end."""
        self.manager.on_schedule_end(ScheduleEndContext((), ()))
        stats = self.manager.get_stats()
        for name, value in stats.reduce().items() if stats is not None else ():
            if name.startswith("vllm:kvtier_tier"):
                self._stats[name] = self._stats.get(name, 0) + int(value)

    def settle(self) -> None:
        """Steps until no job is under way."""
        self._until(lambda: not self.manager.has_pending_work(), "all jobs have ended")

    def count(self, name: str, *labels: str) -> int:
        """One of our counters, when the tier's were looked at the next time."""
        wanted = f"vllm:kvtier_tier_{name}" + (f":{labels}" if labels else "")
        return self._stats.get(wanted, 0)

    def await_count(self, expected: int, name: str, *labels: str) -> None:
        self._until(lambda: self.count(name, *labels) >= expected, f"{name} {labels} of {expected}: {self._stats}")
        assert self.count(name, *labels) == expected

    def begin_store(self, numbers: Sequence[int], params: dict[str, Any] | None = None) -> bool:
        """As if a request had computed these chunks, and has ended. False: the primary tier is full."""
        request = self.begin(params)
        prepared = self.manager.prepare_store([key(number) for number in numbers], request)
        if prepared is not None and prepared.keys_to_store:
            by_key = {key(number): number for number in numbers}
            for stored, chunk in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids, strict=True):
                self._row(chunk)[:] = content(by_key[stored], self._row_bytes)
            self.manager.complete_store(prepared.keys_to_store, request)
        self.manager.on_request_finished(request)
        return prepared is not None

    def store(self, numbers: Sequence[int]) -> None:
        """Until the pool has them, or does not take them."""
        assert self.begin_store(numbers)
        self.settle()

    def empty(self) -> None:
        """The primary tier: vLLM's own `reset_cache`, with no job of a worker under way."""
        self.manager.reset_cache()
        if not OF_032:
            self.manager.on_reset_flushed()

    def look(self, numbers: Sequence[int], request: ReqContext) -> list[LookupResult]:
        """As the scheduler does: up to the first miss."""
        results: list[LookupResult] = []
        for number in numbers:
            results.append(self.manager.lookup(key(number), request))
            if results[-1] is LookupResult.MISS:
                break
        return results

    def load(self, numbers: Sequence[int]) -> list[bytes]:
        """The chunks that a request gets, from the first on."""
        request = self.begin()
        found = self.await_found(numbers, request)
        chunks = self.manager.prepare_load([key(number) for number in found], request).chunk_ids
        loaded = [bytes(self._row(chunk)) for chunk in chunks]
        self.manager.complete_load([key(number) for number in found], request)
        self.manager.on_request_finished(request)
        return loaded

    def await_found(self, numbers: Sequence[int], request: ReqContext) -> list[int]:
        """Steps until the lookups of all that is found are hits: those in a row from the first on."""
        results: list[LookupResult] = []

        def answered() -> bool:
            results[:] = self.look(numbers, request)
            return not {LookupResult.RETRY, LookupResult.HIT_PENDING}.intersection(results)

        self._until(answered, "all lookups are answered")
        return list(numbers[: results.count(LookupResult.HIT)])

    def await_promotion(self, *asked: tuple[ReqContext, Sequence[int]]) -> None:
        """Until the pool is known to have all that these requests ask for; the loads begin with the next step."""
        for request, numbers in asked:
            self.look(numbers, request)
        self.step()

        def pending() -> bool:
            found = [result for request, numbers in asked for result in self.look(numbers, request)]
            return found == [LookupResult.HIT_PENDING] * sum(len(numbers) for _, numbers in asked)

        self._until(pending, "all are promoted", step=False)

    def until_back(self, condition: Callable[[], bool]) -> None:
        """Until a pool that was away is used again."""
        self._until(condition, "the pool is used again")

    def _until(self, condition: Callable[[], bool], what: str, *, step: bool = True) -> None:
        """:param step: between looks; not after the last one."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, f"in vain: {what}"
            if step:
                self.step()
            time.sleep(_STEP_S)

    def _row(self, chunk: int) -> memoryview:
        start = int(chunk) * self._row_bytes
        return self._memory[start : start + self._row_bytes]


def key(number: int) -> OffloadKey:
    return make_offload_key(hashlib.sha256(str(number).encode()).digest(), 0)


def content(number: int, nbytes: int = ROW_BYTES) -> bytes:
    return make_payload(number, nbytes)


@dataclass(frozen=True, slots=True)
class ListeningPool:
    """`kvtier pool serve` at one address alone."""

    service: Service
    address: str

    def kill(self) -> None:
        self.service.kill()

    def suspend(self) -> None:
        suspend(self.service.process.pid)

    def resume(self) -> None:
        resume(self.service.process.pid)


@contextlib.contextmanager
def listening_pool(folder: Path, listen: str = "127.0.0.1:0") -> Iterator[ListeningPool]:
    """For the tenants of `TOKENS`. Killed at the end."""
    tenants = [f"--tenant={name}={hashlib.sha256(token.encode()).hexdigest()}" for name, token in TOKENS.items()]
    free = ["--grpc-listen=127.0.0.1:0", "--http-listen=127.0.0.1:0"]
    arguments = ["pool", "serve", f"--listen={listen}", *free, "--memory-bytes=64MiB", *tenants]
    service = Service(arguments, log=folder / "pool.log", environ={})
    try:
        yield ListeningPool(service, service.ready()["block"])
    finally:
        service.kill()
