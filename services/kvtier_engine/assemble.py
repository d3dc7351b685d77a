"""Assembles an engine from a `Config`."""

import contextlib
import gc
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from prometheus_client import CollectorRegistry

from kvtier.build.engine_cache import engine_cache
from kvtier.build.startable import require_startable
from kvtier.config import Config
from kvtier.config.engine import EngineConfig
from kvtier.device.block_pool import BlockPool
from kvtier.device.layered_loads import LayeredLoads
from kvtier.device.pinned_memory import near_node, pins_read_only
from kvtier.errors import ConfigError
from kvtier.identity.keys import BlockHasher, BlockKey
from kvtier.identity.namespace import Namespace
from kvtier.offload import OTHER_COPIES, Cleaner, Hierarchy, PrefixTokens
from kvtier.system.cores import usable_cores
from kvtier.system.process_metrics import describe_process
from kvtier_engine.events.kv_events import KVEvents
from kvtier_engine.events.publisher import EventPublisher
from kvtier_engine.least_memory import too_small
from kvtier_engine.model.adapters import Adapter, load_adapter
from kvtier_engine.model.arriving_kv import ArrivingKV
from kvtier_engine.model.cuda_graphs import with_cuda_graphs
from kvtier_engine.model.devices import device_kv, engine_device, layered_loads, weights_on
from kvtier_engine.model.fingerprint import arithmetic_fingerprint
from kvtier_engine.model.kv_groups import KVGroups
from kvtier_engine.model.llama import LlamaModel, over_all_blocks
from kvtier_engine.model.model_config import ModelConfig
from kvtier_engine.model.model_folder import DEFAULT_CACHE_DIR, ModelFolder, open_model
from kvtier_engine.model.paged_kv import PagedKV, allocate_kv, bytes_per_block, kv_namespace
from kvtier_engine.model.weights import LlamaWeights, load_weights
from kvtier_engine.scheduling.adapted_model import AdaptedModel
from kvtier_engine.scheduling.engine import Engine, EngineLimits
from kvtier_engine.scheduling.fetch_planning import FetchPlanning
from kvtier_engine.scheduling.metrics import EngineMetrics
from kvtier_engine.scheduling.partial_reuse import PartialReuse
from kvtier_engine.scheduling.prefix_cache import PrefixCache
from kvtier_engine.scheduling.scheduler import Model, Scheduler, SchedulerSettings
from kvtier_engine.scheduling.windowed_blocks import WindowedBlocks

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

_MAX_TOKENS_PER_BLOCK = 256
"""Attention is tried and tuned with blocks of as many, and of powers of two."""
_REMEMBERED_BLOCKS = 16384
"""Blocks that are remembered by their tokens, at least, to be reused in part: about 8 MB."""
_FOLLOW_UP_TOKENS = 16
"""Their attention is cut into runs of keys, wherever that is ever done: they are few enough."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AssembledEngine:
    """An engine that is ready to run, and what its server needs besides."""

    engine: Engine
    model: ModelFolder
    registry: CollectorRegistry


@contextlib.contextmanager
def assembled_engine(config: Config) -> Iterator[AssembledEngine]:
    """Loads the model, allocates KV, opens the tiers and warms up; the caller then calls `engine.run`.

    What the configuration alone shows is refused before the model is loaded.

    Leaving the context ends requests, writes out what is queued for the tiers, and closes them. Sets
    torch's number of threads for the whole process.

    :raises ConfigError: no model or an unusable one, blocks of a size that attention was not tried with, too little
        memory, or what `engine_cache` raises.
    """
    section = config.engine
    _require_block_size(config.cache.tokens_per_block)
    if section.model is None:
        raise ConfigError("engine.model: missing; name a Hugging Face folder or a GGUF file, or give --model")
    path_of = config.references.path
    cache_dir = path_of(section.model_cache_dir or DEFAULT_CACHE_DIR)
    device = engine_device(section.device)
    if section.cache:
        config.engine_tenants()
        require_startable(config, device.type)
    elif config.events.endpoint is not None:
        raise ConfigError("events.endpoint: engine.cache is false, so there are no blocks to tell of; leave one out")
    folder = open_model(path_of(section.model), cache_dir)
    torch.set_num_threads(section.num_threads or usable_cores())
    dtype = _DTYPES[section.dtype]
    kv = _allocate(config, folder, dtype, device)
    weights = weights_on(load_weights(folder.weight_files, folder.config, dtype), device)
    model = _model(section, folder.config, weights)
    if folder.name in section.adapters:
        raise ConfigError(f"engine.adapters: {folder.name!r} is the model's own name; call the adapter something else")
    adapters = {
        name: _adapted(section, folder, load_adapter(path_of(of.path), weights, folder.config, cache_dir))
        for name, of in section.adapters.items()
    }
    fingerprint = arithmetic_fingerprint(model, folder.config, dtype) if model.batch_invariant else ""
    registry = CollectorRegistry()
    describe_process(registry)
    lossy_codec = "" if section.lossy_codec == "none" else section.lossy_codec
    namespace = kv_namespace(
        folder.config,
        folder.weights_digest,
        dtype,
        device,
        lossy_codec=lossy_codec,
        fingerprint=fingerprint,
        groups=kv.groups,
    )
    with engine_of(config, model, folder.config, kv, namespace, registry, adapters=adapters) as engine:
        yield AssembledEngine(engine, folder, registry)


@contextlib.contextmanager
def engine_of(  # noqa: PLR0913 - the parts that it is put together from
    config: Config,
    model: LlamaModel,
    model_config: ModelConfig,
    kv: PagedKV,
    namespace: Namespace,
    registry: CollectorRegistry,
    *,
    adapters: Mapping[str, tuple[LlamaModel, bytes]] | None = None,
) -> Iterator[Engine]:
    """The rest of `assembled_engine`, for a model that is there already: weights and `kv` on the same device.

    :param namespace: of `kv`'s blocks.
    :param adapters: by name, the model with a LoRA adapter and that one's digest.
    """
    section = config.engine
    with contextlib.ExitStack() as stack:
        own_tenant = [] if config.tenant is None else [config.tenant]
        named = [*own_tenant, *config.gateway_tenants, *config.key_tenants()]
        hashers: Mapping[str, BlockHasher | None] = dict.fromkeys(named)
        hierarchy: Hierarchy | None = None
        cleaner: Cleaner | None = None
        tokens: PrefixTokens | None = None
        block_pool, events = BlockPool(kv.num_blocks), None
        layered: LayeredLoads | None = None
        if section.cache:
            checks_loads = config.verifies_on_device(kv.tensor.device.type)
            copies = stack.enter_context(
                device_kv(
                    kv,
                    num_copies=config.cache.load_threads + OTHER_COPIES,
                    staging_bytes=int(config.cache.staging_bytes),
                    lossy_codec=namespace.lossy_codec,
                    checks_loads=checks_loads,
                )
            )
            # A request that computes meanwhile cannot hear of a wrong block, nor begin anew without one of its windows.
            if section.layerwise_loads and not checks_loads and not kv.groups.num_windowed:
                layered = layered_loads(copies, kv)
            if layered is not None:
                kv = ArrivingKV(kv.tensor, layered)
            tiers = stack.enter_context(
                engine_cache(
                    config if pins_read_only(kv.tensor.device) else config.without_direct_loads(),
                    device=copies,
                    namespace=namespace,
                    registry=registry,
                    numa_node=near_node(kv.tensor.device),
                    layered=layered,
                )
            )
            hashers, hierarchy, tokens = tiers.hashers, tiers.hierarchy, tiers.metrics.prefix
            block_pool, events = _observed(stack, config, kv, hierarchy)
            if tiers.clean_ahead_blocks:
                cleaner = Cleaner(block_pool, hierarchy, tiers.metrics, depth_blocks=tiers.clean_ahead_blocks)
        windowed = WindowedBlocks(block_pool, kv.tokens_per_block, kv.groups)
        cache = PrefixCache(
            block_pool,
            windowed,
            kv.tokens_per_block,
            kv.copy_tokens,
            hierarchy=hierarchy,
            cleaner=cleaner,
            layerwise_loads=layered is not None,
            planning=FetchPlanning(hierarchy, windowed, kv.tokens_per_block, tokens=tokens)
            if hierarchy is not None
            else None,
            partial_reuse=PartialReuse(
                block_pool,
                kv.tokens_per_block,
                max_blocks=max(_REMEMBERED_BLOCKS, 4 * kv.num_blocks),
                hierarchy=hierarchy,
                num_windowed=windowed.num_groups,
            )
            if section.partial_reuse and section.cache
            else None,
            single_flight=section.order == "cache_aware",
            events=events,
        )
        settings = SchedulerSettings(
            max_batch_tokens=section.max_batch_tokens, max_running=section.max_running, order=section.order
        )
        limits = EngineLimits.of(
            max_positions=model_config.max_position_embeddings, kv=kv, vocab_size=model_config.vocab_size
        )
        prepared = prepare(model, kv, model_config, section, limits)
        if adapters:
            prepared = AdaptedModel(prepared, {name: adapted for name, (adapted, _) in adapters.items()})
        digests = {name: digest for name, (_, digest) in (adapters or {}).items()}
        scheduler = Scheduler(prepared, kv, cache, EngineMetrics(registry), settings)
        # Where gateways or keys name tenants, a request that names none is nobody's.
        is_named = bool(config.gateway_tenants or config.key_tenants())
        own = None if is_named or config.tenant is None else hashers.get(config.tenant)
        engine = Engine(scheduler, limits, hasher=own, hashers=hashers, adapters=digests, hierarchy=hierarchy)
        engine.warm_up()
        # What stands now stands as long as the process: full collections need not walk it.
        gc.freeze()
        stack.callback(engine.close)
        yield engine


def _observed(
    stack: contextlib.ExitStack, config: Config, kv: PagedKV, hierarchy: Hierarchy
) -> tuple[BlockPool, KVEvents | None]:
    """The block pool, and what tells routers of its blocks and of those below, if anybody listens."""
    if config.events.endpoint is None:
        return BlockPool(kv.num_blocks, on_evict=hierarchy.note_eviction), None
    publisher = EventPublisher(config.events)
    stack.callback(publisher.close)

    def on_evict(key: BlockKey, block_id: int) -> None:
        hierarchy.note_eviction(key, block_id)
        events.note_evicted(key)

    block_pool = BlockPool(kv.num_blocks, on_evict=on_evict)
    events = KVEvents(publisher, block_pool, kv.tokens_per_block, config.events.hashes, hierarchy=hierarchy)
    return block_pool, events


def _model(section: EngineConfig, config: ModelConfig, weights: LlamaWeights) -> LlamaModel:
    """The model, batch invariant where that is asked for, or where nothing is said and it costs little.

    :raises ConfigError: it is asked for and cannot be had.
    """
    on_cuda = weights.embedding.device.type == "cuda"
    may_be_invariant = section.may_be_invariant and config.attention_soft_cap is None
    if section.batch_invariant is None and not on_cuda and may_be_invariant:
        try:
            return LlamaModel(config, weights, batch_invariant=True)
        except ConfigError as error:
            log.warning("answers may depend on the cache in their last bits: %s", error)
    return LlamaModel(config, weights, batch_invariant=bool(section.batch_invariant))


def _adapted(section: EngineConfig, folder: ModelFolder, adapter: Adapter) -> tuple[LlamaModel, bytes]:
    return _model(section, folder.config, adapter.weights), adapter.digest


def _require_block_size(tokens_per_block: int) -> None:
    is_power_of_two = not tokens_per_block & (tokens_per_block - 1)
    if tokens_per_block > _MAX_TOKENS_PER_BLOCK or not is_power_of_two:
        raise ConfigError(
            f"cache.tokens_per_block: {tokens_per_block}, but `kvtier engine` takes powers of two up to "
            f"{_MAX_TOKENS_PER_BLOCK}; use one of them, such as 16"
        )


def _allocate(config: Config, folder: ModelFolder, dtype: torch.dtype, device: torch.device) -> PagedKV:
    groups = KVGroups.of(folder.config)
    block_bytes = bytes_per_block(folder.config, config.cache.tokens_per_block, dtype, groups)
    num_blocks = int(config.engine.kv_bytes) // block_bytes
    of_token = 1 + groups.num_windowed
    for finding in too_small(config, block_bytes, of_token):
        raise ConfigError(f"{finding.key}: {finding.text}")
    log.info(
        "%d blocks of %d tokens, %d bytes each, on %s; a token has %d",
        num_blocks, config.cache.tokens_per_block, block_bytes, device, of_token,
    )  # fmt: skip
    try:
        return allocate_kv(folder.config, num_blocks, config.cache.tokens_per_block, dtype, device, groups)
    except (RuntimeError, TypeError) as error:  # what torch raises for no memory, and for more than 2**63 blocks
        raise ConfigError(f"engine.kv_bytes: {int(config.engine.kv_bytes):,} bytes cannot be had; lower it") from error


def prepare(
    model: LlamaModel, kv: PagedKV, model_config: ModelConfig, section: EngineConfig, limits: EngineLimits
) -> Model:
    """The model as the scheduler calls it: on CUDA, with its kernels compiled and its decodes captured.

    :raises ConfigError: as `with_cuda_graphs` does.
    """
    if kv.tensor.device.type != "cuda":
        return model
    compile_for_long_sequences(model, kv, model_config, section.max_running)
    if not section.cuda_graphs or model.has_windows:
        return model
    max_seqs = min(section.max_running, section.max_batch_tokens)
    return with_cuda_graphs(model, kv, max_seqs=max_seqs, max_seq_len=limits.max_total_tokens)


def compile_for_long_sequences(model: LlamaModel, kv: PagedKV, config: ModelConfig, max_running: int) -> None:
    """Attention to a long sequence takes kernels that `warm_up`, with its short one, does not meet: a second each.

    A follow-up to a long prompt, a decode of one, and decodes of as many as may be, all of the same blocks: if it is
    not worth while to read those once for all of them, it never is. Computes into blocks that nobody has.
    """
    length = min(config.max_position_embeddings, kv.num_blocks * kv.tokens_per_block)
    few = min(_FOLLOW_UP_TOKENS, length)
    decode = over_all_blocks(kv, [0], length - 1)
    for chunks in ([over_all_blocks(kv, [0] * few, length - few)], [decode], [decode] * max_running):
        model.forward(chunks, kv)
