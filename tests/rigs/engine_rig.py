"""A small engine on a random two-layer model: real scheduler, block pool and tiers, stepped by the test."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from kvtier.device.block_pool import BlockPool
from kvtier.device.kv import Fence, HostMemoryKV
from kvtier.device.layered_loads import LayeredLoads
from kvtier.errors import KvtierError
from kvtier.identity.keys import BlockHasher, NamespaceId, PrefixHasher, tenant_id
from kvtier.memory.arena import Arena
from kvtier.memory.slot_memory import SlotMemory
from kvtier.metrics import Metrics
from kvtier.offload import (
    AlwaysFetch,
    Cleaner,
    Directory,
    DirectorySettings,
    Hierarchy,
    HierarchyMetrics,
    InventoryLog,
    Mover,
    MoverTiers,
)
from kvtier.tiers.base import Tier
from kvtier_engine.model.arriving_kv import ArrivingKV
from kvtier_engine.model.kv_groups import KVGroups
from kvtier_engine.model.llama import LlamaModel
from kvtier_engine.model.model_config import ModelConfig
from kvtier_engine.model.paged_kv import PagedKV, allocate_kv
from kvtier_engine.scheduling.completion import Completion, NewToken
from kvtier_engine.scheduling.engine import Engine, EngineLimits
from kvtier_engine.scheduling.fetch_planning import FetchPlanning, PendingPolicy
from kvtier_engine.scheduling.metrics import EngineMetrics
from kvtier_engine.scheduling.partial_reuse import PartialReuse
from kvtier_engine.scheduling.prefix_cache import PrefixCache
from kvtier_engine.scheduling.request import Request
from kvtier_engine.scheduling.sampling_params import Sampling
from kvtier_engine.scheduling.scheduler import Scheduler, SchedulerSettings
from kvtier_engine.scheduling.windowed_blocks import WindowedBlocks
from tiny_model import CONFIG, MODEL

TOKENS_PER_BLOCK = 4
PATIENCE_S = 20.0
NAMESPACE = NamespaceId(b"e" * 16)


class HeldDevice:
    """A device whose copies to host memory wait for `gate`."""

    def __init__(self, inner: HostMemoryKV) -> None:
        self._inner = inner
        self.gate = threading.Event()
        self.gate.set()

    @property
    def num_blocks(self) -> int:
        return self._inner.num_blocks

    @property
    def block_bytes(self) -> int:
        return self._inner.block_bytes

    def fence(self) -> Fence | None:
        return self._inner.fence()

    def gather(
        self, device_slots: Sequence[int], arena: Arena, arena_slots: Sequence[int], *, after: Fence | None
    ) -> None:
        assert self.gate.wait(PATIENCE_S)
        self._inner.gather(device_slots, arena, arena_slots, after=after)

    def scatter(
        self, arena: SlotMemory, arena_slots: Sequence[int], device_slots: Sequence[int], *, after: Fence | None
    ) -> float:
        return self._inner.scatter(arena, arena_slots, device_slots, after=after)


class EngineRig:
    """`step` by hand, or `run` until all requests are done. `done` holds completions by request id, `answers` those of
    all branches of each request."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        shared: Tier | None = None,
        tiers: bool = True,
        cache: bool = True,
        num_slots: int = 64,
        clean_ahead_blocks: int = 0,
        max_batch_tokens: int = 4096,
        max_running: int = 16,
        secret: bytes = bytes(32),
        pending: PendingPolicy | None = None,
        layered: Callable[[PagedKV], LayeredLoads] | None = None,
        cache_aware: bool = False,
        model: LlamaModel = MODEL,
        config: ModelConfig | None = None,
    ) -> None:
        """
        :param tiers: False leaves the device alone; `cache` False also keeps requests from sharing anything.
        :param cache_aware: the engine's defaults: its order, parts of blocks reused, blocks computed once for all who
            need them. False makes it simple to say what is a hit.
        :param model: another model than the tiny one.
        :param config: what its blocks are made for; None: its own.
        """
        config = config or model._config
        groups, dtype = KVGroups.of(config), model._weights.embedding.dtype
        self.kv = allocate_kv(config, num_blocks, TOKENS_PER_BLOCK, dtype, groups=groups)
        self.kv.tensor.fill_(float("nan"))
        self.layered = layered(self.kv) if layered else None
        if self.layered is not None:
            self.kv = ArrivingKV(self.kv.tensor, self.layered)
        self.device = HeldDevice(HostMemoryKV(self.kv.byte_rows().numpy()))
        self.registry = CollectorRegistry()
        self.hasher = BlockHasher(tenant_id("red"), PrefixHasher(secret, "", TOKENS_PER_BLOCK)) if cache else None
        self.hierarchy, metrics = self._hierarchy(shared, num_slots) if tiers else (None, None)
        on_evict = self.hierarchy.note_eviction if self.hierarchy else None
        self.block_pool = BlockPool(num_blocks, on_evict=on_evict)
        cleaner = None
        if self.hierarchy and metrics and clean_ahead_blocks:
            cleaner = Cleaner(self.block_pool, self.hierarchy, metrics, depth_blocks=clean_ahead_blocks)
        windowed = WindowedBlocks(self.block_pool, TOKENS_PER_BLOCK, groups)
        self.cache = PrefixCache(
            self.block_pool,
            windowed,
            TOKENS_PER_BLOCK,
            self.kv.copy_tokens,
            hierarchy=self.hierarchy,
            cleaner=cleaner,
            layerwise_loads=self.layered is not None,
            planning=FetchPlanning(self.hierarchy, windowed, TOKENS_PER_BLOCK, pending) if self.hierarchy else None,
            partial_reuse=PartialReuse(
                self.block_pool,
                TOKENS_PER_BLOCK,
                max_blocks=200,
                hierarchy=self.hierarchy,
                num_windowed=groups.num_windowed,
            )
            if cache_aware
            else None,
            single_flight=cache_aware,
        )
        settings = SchedulerSettings(
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
            order="cache_aware" if cache_aware else "fcfs",
        )
        self.scheduler = Scheduler(model, self.kv, self.cache, EngineMetrics(self.registry), settings)
        self.done: dict[int, Completion] = {}
        self.answers: dict[int, dict[int, Completion]] = {}
        self._last_id = 0

    def _hierarchy(self, shared: Tier | None, num_slots: int) -> tuple[Hierarchy, HierarchyMetrics]:
        tenant, namespace = tenant_id("red"), NAMESPACE
        metrics = HierarchyMetrics(Metrics(self.registry))
        mover = Mover(
            namespace=namespace,
            device=self.device,
            arena=Arena(num_slots, self.kv.block_bytes),
            tiers=MoverTiers(
                by_name={shared.name: shared} if shared else {}, inventory=InventoryLog([tenant], namespace)
            ),
            layered=self.layered,
        )
        directory = Directory(
            namespaces=[namespace],
            num_slots=num_slots,
            local_tiers=[],
            shared=shared,
            metrics=metrics,
            on_answer=mover.nudge,
            settings=DirectorySettings(batch_blocks=4, lookup_deadline_s=PATIENCE_S),
        )
        return Hierarchy(directory, mover, AlwaysFetch(), metrics), metrics

    def add(
        self,
        tokens: Sequence[int],
        max_tokens: int = 6,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        on_token: Callable[[int], None] | None = None,
        adapter: tuple[str, BlockHasher] | None = None,
        **sampling: Any,
    ) -> int:
        """
        :param on_token: called with each token of the first branch.
        :param adapter: the name of the request's LoRA adapter, and the hasher of its blocks.
        """
        self._last_id += 1
        request_id = self._last_id

        def on_done(completion: Completion) -> None:
            answers = self.answers.setdefault(request_id, {})
            assert completion.branch not in answers
            answers[completion.branch] = completion
            if completion.branch == 0:
                self.done[request_id] = completion

        def on_new_token(token: NewToken) -> None:
            if on_token is not None and token.branch == 0:
                on_token(token.token_id)

        self.scheduler.add(
            Request(
                request_id=request_id,
                tokens=list(tokens),
                sampling=Sampling(max_tokens=max_tokens, temperature=temperature, seed=seed, **sampling),
                hasher=self.hasher if adapter is None else adapter[1],
                adapter=None if adapter is None else adapter[0],
                on_done=on_done,
                arrived_at=time.monotonic(),
                on_token=on_new_token,
            )
        )
        return request_id

    def step(self) -> bool:
        worked = self.scheduler.step()
        if not worked and self.hierarchy is not None:
            self.hierarchy.wait(0.001)
        return worked

    def run(self) -> None:
        """Until all requests are done, and what they left is in the tiers."""
        self.run_until(
            lambda: not self.scheduler.num_unfinished and not self.cache.copies_hold_blocks and self._stored()
        )

    def _stored(self) -> bool:
        return self.hierarchy is None or not self.hierarchy._directory.is_moving

    def run_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "no end in time"
            self.step()

    def ask(self, tokens: Sequence[int], max_tokens: int = 6) -> Completion:
        """One request from start to end."""
        request_id = self.add(tokens, max_tokens)
        self.run()
        return self.done[request_id]

    def counter(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"kvtier_{name}_total", labels) or 0.0

    def close(self) -> None:
        """Everything must be given back by now."""
        self.scheduler.end_all()
        self.run()
        assert self.block_pool.num_free == self.block_pool.num_blocks
        self.block_pool.check()
        if self.hierarchy is not None:
            self.hierarchy.close()
            self.hierarchy.check()


MakeRig = Callable[..., EngineRig]


def rigs() -> Iterator[MakeRig]:
    """For a fixture: makes rigs, and closes them at the end."""
    made: list[EngineRig] = []

    def make(**settings: Any) -> EngineRig:
        made.append(EngineRig(**settings))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


class RunningEngine:
    """An `Engine` around a rig's scheduler, run in a thread and closed at the end."""

    def __init__(self, rig: EngineRig, max_total_tokens: int = 100, *, fails: bool = False) -> None:
        """:param fails: it must; otherwise it must not."""
        limits = EngineLimits(max_total_tokens=max_total_tokens, vocab_size=CONFIG.vocab_size)
        self.engine = Engine(rig.scheduler, limits, hasher=rig.hasher, hierarchy=rig.hierarchy)
        self._thread = threading.Thread(target=self._run)
        self._fails = fails
        self._failures: list[KvtierError] = []

    def _run(self) -> None:
        try:
            self.engine.run()
        except KvtierError as error:
            self._failures.append(error)

    def __enter__(self) -> Engine:
        self._thread.start()
        return self.engine

    def __exit__(self, *_: object) -> None:
        self.engine.stop()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self.engine.close()  # idempotent
        assert bool(self._failures) == self._fails, self._failures


def judge(tokens: Sequence[int], max_tokens: int = 6) -> tuple[int, ...]:
    """The answer without any cache, alone in an engine."""
    rig = EngineRig(tiers=False, cache=False, num_blocks=128)
    answer = rig.ask(tokens, max_tokens).token_ids
    rig.close()
    return answer
