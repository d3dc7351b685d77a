"""What depends on vLLM's version, except its hashes and what `requirements` refuses."""

import logging
from dataclasses import dataclass

import torch
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from vllm.v1.request import Request

from kvtier.system.logs import Format, Level, set_up_logs_within

MEDIA = frozenset(("image", "video", "audio", "vision_chunk"))
"""What vLLM calls them; it also carries `prompt_embeds` in their way."""
DRAFTERS = frozenset(("draft_model", "eagle", "eagle3", "mtp"))
"""The methods of speculative decoding that keep KV of their own beside the model's."""


def log_as_vllm_does(level: Level | None = None, format: Format | None = None) -> None:
    """Shows what kvtier logs where vLLM logs, unless the application has its own way: vLLM sets up its own only.

    :param level: what `[log]` asks for, likewise `format`; None: as vLLM does.
    """
    theirs = logging.getLogger("vllm")
    for name in ("kvtier", "kvtier_vllm"):
        logger = logging.getLogger(name)
        if not logger.hasHandlers():
            logger.handlers = list(theirs.handlers)
            logger.setLevel(theirs.level)
    set_up_logs_within(level, format)


def register(connector: type) -> None:
    """Lets vLLM find the connector by its name alone: so MultiConnector looks for the statistics of its children."""
    if connector.__name__ not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(connector.__name__, connector.__module__, connector.__name__)


def use_of_adapters(config: VllmConfig) -> str:
    """What decides what becomes of LoRA adapters, beside their content and the model: empty without them."""
    lora = config.lora_config
    if lora is None:
        return ""
    modules = None if lora.target_modules is None else sorted(lora.target_modules)
    return f"dtype={lora.lora_dtype} modules={modules} tower={lora.enable_tower_connector_lora}"


def encoder_of(config: VllmConfig) -> str:
    """What decides what becomes of processed media, beside the model: empty for models that take none."""
    media, lora = config.model_config.multimodal_config, config.lora_config
    if media is None:
        return ""
    in_tower = lora is not None and lora.enable_tower_connector_lora
    return f"normalizes={media.mm_device_do_normalize} attends={media.mm_encoder_attn_backend} lora={in_tower}"


def refused_media(config: VllmConfig) -> dict[str, str]:
    """Kinds of media whose content does not say what KV comes of them with this configuration, and why."""
    model, media = config.model_config, config.model_config.multimodal_config
    if media is None:
        return {}
    why = None
    if model.is_mm_prefix_lm:
        why = "in this model, their tokens see those after them"
    elif config.ec_transfer_config is not None:
        why = "an encoder elsewhere makes of them what nobody here can check (ec_transfer_config)"
    elif media.mm_encoder_attn_dtype is not None:
        why = "the encoder's scales are not in the weights (mm_encoder_attn_dtype)"
    if why is not None:
        return dict.fromkeys(MEDIA, why)
    if media.is_multimodal_pruning_enabled():
        return dict.fromkeys(("video", "vision_chunk"), "positions depend on what was pruned (video_pruning_rate)")
    return {}


def is_of_another_engine(config: VllmConfig, worker: object) -> bool:
    """Whether this worker, or what vLLM wraps it in, belongs to another engine of this process for certain."""
    theirs = getattr(worker, "vllm_config", None)
    if theirs is None:
        return False
    # MultiConnector gives its children copies, which are shallow.
    is_same = theirs.instance_id == config.instance_id or theirs.compilation_config is config.compilation_config
    return not is_same


def is_model_of_another_engine(config: VllmConfig, model: object) -> bool:
    """Whether a model is for certain not this engine's nor a drafter of its: none of its layers is known there."""
    layers = {id(layer) for layer in config.compilation_config.static_forward_context.values()}
    if not layers or not isinstance(model, torch.nn.Module):
        return False
    return layers.isdisjoint(id(module) for module in model.modules())


def drafter(config: VllmConfig) -> tuple[str, ModelConfig, LoadConfig] | None:
    """What drafts tokens and has KV of its own in every block: by which method, which model, and how it is loaded."""
    speculation = config.speculative_config
    if speculation is None or speculation.method not in DRAFTERS:
        return None
    return speculation.method, speculation.draft_model_config, speculation.draft_load_config or config.load_config


def models_of(config: VllmConfig) -> list[tuple[ModelConfig, LoadConfig]]:
    """The models whose KV is in a block, and how each is loaded: the engine's, and a drafter with KV of its own."""
    drafting = drafter(config)
    return [(config.model_config, config.load_config), *([drafting[1:]] if drafting is not None else [])]


def num_volatile_blocks(config: VllmConfig) -> int:
    """Blocks at the end of a hit to be computed again: a drafter's KV of their last token depends on the next one."""
    speculation = config.speculative_config
    return int(speculation is not None and speculation.use_eagle_block_drop())


def frees_late(request: Request) -> bool:
    """Whether device blocks are allocated anew only when the last step that used them has been processed.

    vLLM sees to that where it plans steps ahead and a connector may load, by the role of the outermost connector's
    configuration. Only then it notes the last step of a request.

    :param request: one that has been scheduled.
    """
    return bool(request.last_sched_seq > 0)


def holds_the_same_in_all_ranks(kv_cache_config: KVCacheConfig) -> bool:
    """Whether tensor-parallel ranks all have the whole KV, rather than some heads each: latent attention does.

    Under context parallelism, which `requirements.require_tried_options` refuses, each rank has only some tokens.
    """
    return all(
        type(spec) is MLAAttentionSpec and spec.max_tp_shards == 1
        for group in kv_cache_config.kv_cache_groups
        for spec in specs_of(group.kv_cache_spec)
    )


@dataclass(frozen=True, slots=True)
class BoundaryState:
    """A device block that holds a KV group's state after so many tokens of a request, once a step is computed."""

    group: int
    device_block: int
    num_tokens: int


def boundary_states(output: SchedulerOutput) -> dict[str, list[BoundaryState]]:
    """States that vLLM's own prefix cache has from this step on, by request.

    No later step writes to such a device block until it is freed and allocated anew.
    """
    of_step = output.kv_connector_block_state
    if of_step is None:
        return {}
    return {
        request_id: [BoundaryState(*state) for state in states]
        for request_id, states in of_step.boundary_state_offloads.items()
    }


def state_groups(kv_cache_config: KVCacheConfig) -> frozenset[int]:
    """KV groups whose layers have a state instead of KV."""
    groups = enumerate(kv_cache_config.kv_cache_groups)
    return frozenset(number for number, group in groups if isinstance(specs_of(group.kv_cache_spec)[0], MambaSpec))


def states_of(kv_cache_config: KVCacheConfig) -> list[str]:
    """What the states of layers are made of, by layer, shapes and dtypes: vLLM registers them as mere bytes.

    Which dimension of a convolution's state comes first depends on its configuration, and the kernels that write it on
    the processor; shapes do not show either.
    """
    orders = f"{is_conv_state_dim_first()} {torch.cpu.get_capabilities().get('avx512_bf16')}"
    return [
        f"{name} {spec.mamba_type.name} {spec.shapes} {spec.dtypes} {orders}"
        for group in kv_cache_config.kv_cache_groups
        for name, spec in _specs_by_layer(group)
        if isinstance(spec, MambaSpec)
    ]


def publishes_events(config: VllmConfig) -> bool:
    """Whether the user wants KV events."""
    events = config.kv_events_config
    return events is not None and events.enable_kv_cache_events


def attention_kinds(kv_cache_config: KVCacheConfig) -> list[tuple[str, int | None]]:
    """The kind of each KV group's attention, as events name it, and the tokens that its window sees."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return [(get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)) for spec in specs]


def device_cache(kv: KVCacheManager) -> object:
    """What vLLM knows of its own prefix cache: another object after each reset."""
    return kv.block_pool.cached_block_hash_to_block


def _specs_by_layer(group: KVCacheGroupSpec) -> list[tuple[str, KVCacheSpec]]:
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return list(spec.kv_cache_specs.items())
    return [(name, spec) for name in group.layer_names]


def specs_of(spec: KVCacheSpec) -> list[KVCacheSpec]:
    """The spec of each layer where layers differ in size; else the one that they share."""
    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
