"""`KvtierTier`: the cache pool as a secondary tier of vLLM's native offloading, for those who stay with that.

`"secondary_tiers": [{"type": "KvtierTier", "module_path": "kvtier_vllm.secondary_tier", "config": "kvtier.toml"}]` in
the `kv_connector_extra_config` of an `OffloadingConnector` with `"spec_name": "TieringOffloadingSpec"`.
"""

import contextlib
import logging
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.build.tiers import shared_tier
from kvtier.config import Config
from kvtier.errors import ConfigError
from kvtier.identity.keys import NamespaceId, PrefixHasher, StoreKey, TenantId, store_key, tenant_id
from kvtier.metrics import Metrics
from kvtier_vllm import compat
from kvtier_vllm.content.identity import DIGESTS
from kvtier_vllm.secondary.identity import namespace_of, require_usable, scheduler_config
from kvtier_vllm.secondary.lookups import Lookups
from kvtier_vllm.secondary.metrics import DEFINITIONS, TierStats
from kvtier_vllm.secondary.transfers import Limits, Transfers
from kvtier_vllm.settings import load_settings
from kvtier_vllm.version import require_version

_log = logging.getLogger(__name__)
_PARAMS = "kvtier"
"""Key of our table in a request's `kv_transfer_params`."""
_BATCH_BYTES = 64 << 20
"""The bytes of one call to the pool, unless `cache.batch_blocks` is more."""
_ANY_TOKENS = 16
"""`cache.tokens_per_block`, which nothing asks for here: vLLM's hashes are of as many tokens as it likes."""


class KvtierTier(SecondaryTierManager):
    """Chunks of vLLM's primary tier in the cache pool, found again by every engine that computes the same bytes.

    Runs in vLLM's scheduler and in its thread; what takes time does so in threads of our own, with deadlines. What
    fails is a miss or a job without success, never an exception. Keys are vLLM's hashes, keyed with the tenant's
    secret; they never meet those of `KvtierConnector`.
    """

    cache_hit_source: ClassVar[CacheHitSource] = CacheHitSource.EXTERNAL_UNSPECIFIED
    """vLLM knows none that fits. The tier has no `medium` either: the pool has memory, disk and Redis."""

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        locality: str | None = None,
        **settings: Any,
    ) -> None:
        """Called by vLLM. Does not wait for the pool.

        :param locality: `LOCAL` or `REMOTE`, for requests that say which they want; any without.
        :param settings: see `kvtier_vllm.settings`. The tables `pool`, `tenants` and `cache` count, and no others.
        :raises ConfigError: another vLLM, an engine whose hashes say too little, or a configuration that cannot be.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        require_version()
        compat.log_as_vllm_does()
        engine = scheduler_config(offloading_spec)
        require_usable(engine)
        config = load_settings(settings, _ANY_TOKENS)
        compat.log_as_vllm_does(config.log.level, config.log.format)
        _require_pool(config)
        self.locality = _locality(locality)
        row_bytes, num_chunks = self.block_size_bytes, primary_kv_view.shape[0] if primary_kv_view.shape else 0
        namespace = namespace_of(offloading_spec, engine, row_bytes=row_bytes, digests=DIGESTS).id
        name = config.only_tenant()
        if config.tenants[name].previous_secrets:
            _log.warning("tenants.%s.previous_secrets: this tier looks for chunks under the secret alone", name)
        hasher = PrefixHasher(config.chain_secret(name), config.tenants[name].salt, offloading_spec.tokens_per_hash)
        key_of = partial(_store_key, hasher, tenant_id(name), namespace)
        metrics = Metrics()
        self._memory = primary_kv_view.cast("B")
        self._stats = TierStats(metrics)
        with contextlib.ExitStack() as stack:
            stack.callback(self._memory.release)
            shared = stack.enter_context(shared_tier(config, [namespace], metrics))
            assert shared is not None, "pool.address is there"
            tier = shared.tier
            on_late = partial(self._stats.note, "lookup", "late")
            self._lookups = Lookups(tier, key_of, deadline_s=config.cache.lookup_deadline_s, on_late=on_late)
            stack.callback(self._lookups.close)
            self._transfers = Transfers(tier, key_of, _limits(config, row_bytes, num_chunks))
            stack.callback(self._transfers.close)
            self._stack = stack.pop_all()
        _log.info("kvtier keeps chunks of namespace %s in the pool, %d bytes each", namespace.hex(), row_bytes)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return dict(DEFINITIONS)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        found = self._lookups.ask(key, req_context.req_id)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.forget(req_context.req_id)

    def submit_load(self, job_metadata: TransferJob) -> None:
        job = job_metadata
        self._transfers.load(job.job_id, job.req_context.req_id, list(job.keys), self._rows(job))

    def submit_store(self, job_metadata: TransferJob) -> None:
        job, request_id, keys = job_metadata, job_metadata.req_context.req_id, list(job_metadata.keys)
        if not _may_store(job.req_context):
            self._transfers.drop(job.job_id, request_id, keys)
        elif not self._transfers.store(job.job_id, request_id, keys, self._rows(job)):
            self._stats.note("write", "dropped", len(keys))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results: list[JobResult] = []
        for outcome in self._transfers.take_finished():
            job, moved = outcome.job, outcome.moved
            if job.is_load and not outcome.is_whole:
                self._lookups.mark_missing(set(job.keys).difference(moved), job.request_id)
            results.append(
                JobResult(
                    job.job_id,
                    success=outcome.is_whole,
                    successful_keys=[OffloadKey(key) for key in moved] if job.is_load and moved else None,
                    transfer_time=outcome.seconds,
                    transfer_bytes=len(moved) * self.block_size_bytes,
                )
            )
        if results:
            self._stats.look_next()
        return results

    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._stats.take()

    def drain_jobs(self) -> None:
        """Waits for jobs under way, at most the deadline of one call to the pool."""
        self._transfers.drain()

    def shutdown(self) -> None:
        """Ends what is under way, at most the deadline of one call each, and lets go of the primary tier."""
        self._stack.close()

    def _rows(self, job: TransferJob) -> list[memoryview]:
        size = self.block_size_bytes
        return [self._memory[start : start + size] for start in (job.chunk_ids.astype(int) * size).tolist()]


def _store_key(hasher: PrefixHasher, tenant: TenantId, namespace: NamespaceId, key: bytes) -> StoreKey:
    return store_key(tenant, namespace, hasher.external_key(key))


def _limits(config: Config, row_bytes: int, num_chunks: int) -> Limits:
    cache = config.cache
    return Limits(
        batch_chunks=max(cache.batch_blocks, _BATCH_BYTES // row_bytes),
        load_threads=cache.load_threads,
        load_deadline_s=cache.load_deadline_s,
        max_saving_chunks=int(cache.saving_fraction * num_chunks),
    )


def _require_pool(config: Config) -> None:
    if not config.pool.address:
        raise ConfigError('pool.address: missing, and the pool is all that this tier has; e.g. "unix:/run/kvtier.sock"')
    if config.pool.write_policy != "write_through":
        raise ConfigError(
            f"pool.write_policy is {config.pool.write_policy!r}: vLLM decides what it stores here, and that is all; "
            "use write_through"
        )


def _locality(name: str | None) -> Locality | None:
    if name is None:
        return None
    try:
        return Locality(name)
    except ValueError as error:
        raise ConfigError(f"locality: {name!r} is none; use LOCAL or REMOTE, or leave it out") from error


def _may_store(context: ReqContext) -> bool:
    said: object = context.kv_transfer_params
    params = said.get(_PARAMS, {}) if isinstance(said, Mapping) else {}
    return not (isinstance(params, Mapping) and params.get("no_store"))
