"""`KvtierConnector`: vLLM's connector interface, handed on to the half that lives in this process."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput

from kvtier_vllm import compat, requirements
from kvtier_vllm.content.contents import Contents
from kvtier_vllm.kv.groups import KVGroups
from kvtier_vllm.messages import StepMetadata, WorkerIdentity
from kvtier_vllm.observe.kv_events import KVEvents
from kvtier_vllm.observe.stats import KvtierPromMetrics, KvtierStats
from kvtier_vllm.scheduler import SchedulerSide
from kvtier_vllm.settings import load_settings, of_rank, shown_config
from kvtier_vllm.worker import WorkerSide

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class KvtierConnector(KVConnectorBase_V1, SupportsHMA):
    """One per process: in the scheduler it has the directory, in a worker the mover. vLLM calls it.

    Loads run between steps and saves behind them, both in threads of the mover; no step waits for a tier. The device
    blocks of a request are vLLM's as soon as it ends: what is still being copied is waited for by the step that writes
    to it.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        """Raises `ConfigError`: another failure policy, a model or a configuration that cannot be."""
        super().__init__(vllm_config, role, kv_cache_config)
        compat.log_as_vllm_does()
        requirements.require_recompute(self._kv_transfer_config.kv_load_failure_policy)
        tokens_per_block = requirements.tokens_per_block(vllm_config, kv_cache_config)
        settings = load_settings(self._kv_transfer_config.kv_connector_extra_config or {}, tokens_per_block)
        compat.log_as_vllm_does(settings.log.level, settings.log.format)
        config = of_rank(settings, vllm_config.parallel_config)
        if config.gateway_tenants:
            requirements.require_safe_hashes(vllm_config)
        is_scheduler = role is KVConnectorRole.SCHEDULER
        of_states = compat.state_groups(kv_cache_config)
        groups = KVGroups(len(kv_cache_config.kv_cache_groups), kv_cache_config.num_blocks, of_states)
        events: KVEvents | None = None
        if is_scheduler and compat.publishes_events(vllm_config):
            events = KVEvents(tokens_per_block, groups, compat.attention_kinds(kv_cache_config))
        self._scheduler: SchedulerSide | None = None
        if is_scheduler:
            contents = Contents.of(vllm_config)
            self._scheduler = SchedulerSide(
                config,
                tokens_per_block,
                groups,
                num_volatile_blocks=compat.num_volatile_blocks(vllm_config),
                contents=contents,
                events=events,
            )
        self._worker = None if is_scheduler else WorkerSide(vllm_config, kv_cache_config, config)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache may forget."""
        return False

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()

    # Worker

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor]) -> None:
        self._on_worker().register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._on_worker().identity()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Marks the step's start, too: both of vLLM's runners call it right before they launch the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        self._on_worker().begin(connector_metadata)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, StepMetadata)
        self._on_worker().flush(kv_connector_metadata)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Nothing: loads begin with the saves, in `wait_for_save`."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is scheduled when its load is over."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: "AttentionMetadata", **kwargs: Any
    ) -> None:
        """Nothing: whole blocks are saved, by `wait_for_save`."""

    def wait_for_save(self) -> None:
        step = self._get_connector_metadata()
        assert isinstance(step, StepMetadata)
        self._on_worker().submit(step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._on_worker().take_results()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._on_worker().take_invalid_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._on_worker().take_messages()

    # Scheduler

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        workers = [worker for _, worker in sorted(metadata.items()) if isinstance(worker, WorkerIdentity)]
        if workers:
            self._on_scheduler().connect(workers)

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._on_scheduler().bind(kv_cache_manager)

    def on_new_request(self, request: "Request") -> None:
        self._on_scheduler().add(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._on_scheduler().match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        self._on_scheduler().allocate(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        return self._on_scheduler().step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._on_scheduler().deliver(connector_output)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._on_scheduler().finish(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._on_scheduler().finish(request, block_ids)

    def get_external_cache_hit_sources(self, request: "Request", num_external_tokens: int) -> dict[CacheHitSource, int]:
        return self._on_scheduler().sources(request) if num_external_tokens else {}

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._on_scheduler().take_events()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._scheduler.take_stats() if self._scheduler is not None else self._on_worker().take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return KvtierStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        transfer = vllm_config.kv_transfer_config
        config = shown_config((transfer and transfer.kv_connector_extra_config) or {})
        return KvtierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues, config=config)

    def has_pending_push_work(self) -> bool:
        return self._on_scheduler().has_work

    def reset_cache(self) -> bool | None:
        return self._on_scheduler().reset()

    def _on_scheduler(self) -> SchedulerSide:
        assert self._scheduler is not None, "a call for the scheduler's connector reached a worker's"
        return self._scheduler

    def _on_worker(self) -> WorkerSide:
        assert self._worker is not None, "a call for a worker's connector reached the scheduler's"
        return self._worker


compat.register(KvtierConnector)
