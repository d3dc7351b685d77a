"""Which kinds of KV are kept, in which namespaces, and what is said of the others. No engine runs here."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_drafters
import tiny_llama
import torch
from engine_lab import Lab
from model_classes import found_out_here
from native_rig import OF_032, engine_config
from torch import Tensor
from vllm.config import SpeculativeConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

from kvtier.errors import ConfigError
from kvtier.memory.arena import Arena
from kvtier_vllm.compat import holds_the_same_in_all_ranks, state_groups, states_of
from kvtier_vllm.content.identity import model_digest, namespace_of
from kvtier_vllm.kv.paged_kv import device_kv
from kvtier_vllm.requirements import tokens_per_block
from kvtier_vllm.secondary.identity import require_usable

if OF_032:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
else:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_groups

SIZE = 64
NUM_BLOCKS = 6
DENSE: dict[str, Any] = {"block_size": SIZE, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(**DENSE)
LATENT: dict[str, Any] = DENSE | {"num_kv_heads": 1, "head_size": 576, "max_tp_shards": 1}
MLA = MLAAttentionSpec(**LATENT)
INDEXER = MLAAttentionSpec(**LATENT | {"head_size": 132, "dtype": torch.uint8}, cache_role=SparseCacheRole.INDEXER)
"""What DeepSeek-V3.2 keeps beside: values in fp8 and their scales, one vector per token."""
STATE: dict[str, Any] = {
    "block_size": SIZE,
    "shapes": ((3, 192), (1, 64, 64)),
    "dtypes": (torch.bfloat16, torch.float32),
    "mamba_type": MambaAttentionBackendEnum.GDN_ATTN,
    "mamba_cache_mode": "align",
}
DELTA_NET = MambaSpec(**STATE)
"""What Qwen3-Next has in most layers."""


@pytest.fixture
def config(lab: Lab) -> VllmConfig:
    return engine_config(lab.model)


def _groups(*specs: KVCacheSpec) -> KVCacheConfig:
    """A layer and a KV group for each."""
    groups = [KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)]
    return KVCacheConfig(NUM_BLOCKS, [], groups)


KEPT: dict[str, tuple[KVCacheSpec, ...]] = {
    "full": (FULL,),
    "sliding window": (FULL, SlidingWindowSpec(**DENSE, sliding_window=80)),
    "fp8": (FullAttentionSpec(**DENSE | {"dtype": torch.uint8}, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR),),
    "latent": (MLA,),
    "latent and full": (MLA, FULL),
    "gated delta nets": (DELTA_NET, DELTA_NET, FULL),
    "latent with indexer": (UniformTypeKVCacheSpecs(block_size=SIZE, kv_cache_specs={"a": MLA, "b": INDEXER}),),
}
REFUSED: dict[str, tuple[KVCacheSpec, str]] = {
    "latent sliding window": (SlidingWindowMLASpec(**LATENT, sliding_window=80), "SlidingWindowMLASpec"),
    "hidden states": (HiddenStateCacheSpec(**LATENT), "HiddenStateCacheSpec"),
    "a prefix seen both ways": (FullAttentionSpec(**DENSE, non_causal=True), "tokens after it"),
    "compressed": (MLAAttentionSpec(**LATENT, tokens_per_state=4), "several tokens as one"),
    **{
        mode.name: (FullAttentionSpec(**DENSE, kv_quant_mode=mode), f"{mode.name.lower()}: use --kv-cache-dtype fp8")
        for mode in KVQuantMode
        if mode not in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)
    },
}


@pytest.mark.parametrize("specs", KEPT.values(), ids=KEPT)
def test_what_is_kept(config: VllmConfig, specs: tuple[KVCacheSpec, ...]) -> None:
    assert tokens_per_block(config, _groups(*specs)) == SIZE


@pytest.mark.parametrize(("spec", "told"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(config: VllmConfig, spec: KVCacheSpec, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        tokens_per_block(config, _groups(spec))
    with pytest.raises(ConfigError, match=told):
        tokens_per_block(config, _groups(FULL, spec))


@pytest.mark.parametrize("kind", [kind for kind in MambaAttentionBackendEnum if kind.name != "GDN_ATTN"])
def test_states_of_other_kinds_are_refused(config: VllmConfig, kind: MambaAttentionBackendEnum) -> None:
    other = MambaSpec(**STATE | {"mamba_type": kind})
    for specs in ((FULL, other), (FULL, DELTA_NET, other)):
        with pytest.raises(ConfigError, match=rf"gated delta nets beside full attention.*\b{kind.name}\b"):
            tokens_per_block(config, _groups(*specs))


def test_states_beside_other_attention_or_none_are_refused(config: VllmConfig) -> None:
    for beside in (MLA, SlidingWindowSpec(**DENSE, sliding_window=80)):
        with pytest.raises(ConfigError, match=f"gated delta nets beside full attention.*{type(beside).__name__}"):
            tokens_per_block(config, _groups(FULL, DELTA_NET, beside))
    with pytest.raises(ConfigError, match="states of linear attention beside it; this model has: MambaSpec"):
        tokens_per_block(config, _groups(DELTA_NET))


def test_states_that_vllm_keeps_nowhere_but_at_the_end_are_refused(config: VllmConfig) -> None:
    """As without prefix caching; nor would blocks have one size then."""
    last = MambaSpec(**STATE | {"mamba_cache_mode": "none", "block_size": 1024})
    with pytest.raises(ConfigError, match="--enable-prefix-caching"):
        tokens_per_block(config, _groups(FULL, last))


@pytest.mark.parametrize("kind", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_refused(config: VllmConfig, kind: str) -> None:
    """Ranks would have some tokens of a block each: of latent attention too, they would not hold the same."""
    setattr(config.parallel_config, kind, 2)
    with pytest.raises(ConfigError, match="context parallelism"):
        tokens_per_block(config, _groups(MLA))


def test_an_engine_that_goes_on_after_a_failed_step_is_refused(config: VllmConfig) -> None:
    """Nobody would say which blocks that step has spoilt."""
    config.parallel_config.enable_fault_tolerance = True
    with pytest.raises(ConfigError, match="enable-fault-tolerance"):
        tokens_per_block(config, _groups(FULL))


def test_hits_that_end_within_a_block_are_refused(config: VllmConfig) -> None:
    config.cache_config.prefix_match_unit = SIZE
    assert tokens_per_block(config, _groups(FULL)) == SIZE
    config.cache_config.prefix_match_unit = SIZE // 2
    with pytest.raises(ConfigError, match="prefix-match-unit"):
        tokens_per_block(config, _groups(FULL))


@pytest.mark.parametrize("other", [FullAttentionSpec(**DENSE | {"dtype": torch.float32}), DELTA_NET])
def test_a_runner_that_clears_blocks_too_soon_is_refused(
    config: VllmConfig, other: KVCacheSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are cleared where KV is of several precisions, or has states beside it: a save would copy the zeros."""
    of_two = _groups(FULL, other)
    assert of_two.needs_kv_cache_zeroing
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", False)
    assert tokens_per_block(config, of_two) == SIZE
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)
    assert tokens_per_block(config, _groups(FULL)) == SIZE
    with pytest.raises(ConfigError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        tokens_per_block(config, of_two)


def test_other_ways_of_drafting_tokens_are_refused(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def drafting_by(method: str, *, use_multi_module_mtp: bool = False) -> SimpleNamespace:
        return SimpleNamespace(method=method, use_multi_module_mtp=lambda: use_multi_module_mtp)

    monkeypatch.setattr(config, "speculative_config", drafting_by("ngram"))
    assert tokens_per_block(config, _groups(FULL)) == SIZE
    monkeypatch.setattr(config, "speculative_config", drafting_by("mtp"))
    assert tokens_per_block(config, _groups(FULL)) == SIZE
    monkeypatch.setattr(config, "speculative_config", drafting_by("mtp", use_multi_module_mtp=True))
    with pytest.raises(ConfigError, match="num_speculative_tokens to 1"):
        tokens_per_block(config, _groups(FULL))
    monkeypatch.setattr(config, "speculative_config", drafting_by("medusa"))
    with pytest.raises(ConfigError, match="by medusa: use one of draft_model, eagle, eagle3"):
        tokens_per_block(config, _groups(FULL))
    with pytest.raises(ConfigError, match="leave out speculative_config"):
        require_usable(config)


def test_states_are_not_kept_of_drafted_tokens(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tokens_per_block(config, _groups(FULL, DELTA_NET)) == SIZE
    monkeypatch.setattr(config, "speculative_config", SimpleNamespace(method="ngram"))
    with pytest.raises(ConfigError, match="with models that have gated delta nets: leave out --speculative-config"):
        tokens_per_block(config, _groups(FULL, DELTA_NET))


def test_below_native_offloading_the_same_is_refused(config: VllmConfig) -> None:
    config.cache_config.cache_dtype = "fp8"
    require_usable(config)
    config.cache_config.cache_dtype = "int8_per_token_head"
    with pytest.raises(ConfigError, match="int8_per_token_head"):
        require_usable(config)


def test_only_latent_attention_holds_the_same_in_all_ranks() -> None:
    assert holds_the_same_in_all_ranks(_groups(MLA))
    assert holds_the_same_in_all_ranks(_groups(*KEPT["latent with indexer"]))
    assert not holds_the_same_in_all_ranks(_groups(FULL))
    assert not holds_the_same_in_all_ranks(_groups(MLA, FULL))
    unknown = MLAAttentionSpec(**LATENT | {"max_tp_shards": None})
    assert not holds_the_same_in_all_ranks(_groups(unknown)), "vLLM does not say so"


def test_groups_of_states_are_told_from_those_of_kv() -> None:
    assert state_groups(_groups(FULL, MLA)) == frozenset()
    assert state_groups(_groups(DELTA_NET, FULL, DELTA_NET)) == {0, 2}


def test_pages_of_latent_attention_and_of_the_indexer_beside_it(config: VllmConfig) -> None:
    """A block is both, and is copied as a whole."""
    (group,) = get_kv_cache_groups(config, {"layer.0.attn": MLA, "layer.0.indexer": INDEXER})
    assert tokens_per_block(config, KVCacheConfig(NUM_BLOCKS, [], [group])) == SIZE
    random = torch.Generator().manual_seed(0)
    layers = [
        torch.randint(0, 256, (NUM_BLOCKS, spec.page_size_bytes), dtype=torch.uint8, generator=random)
        .view(spec.dtype)
        .view(NUM_BLOCKS, 1, SIZE, spec.head_size)
        for spec in (MLA, INDEXER)
    ]
    before = [layer.view(torch.uint8).clone() for layer in layers]
    with device_kv([layers], NUM_BLOCKS, num_copies=1) as device:
        assert device.block_bytes == MLA.page_size_bytes + INDEXER.page_size_bytes
        arena = Arena(2, device.block_bytes)
        device.gather([1, 4], arena, [0, 1], after=None)
        device.scatter(arena, [0, 1], [5, 2], after=None)
    for layer, old in zip(layers, before, strict=True):
        assert np.array_equal(layer.view(torch.uint8), old[[0, 1, 4, 3, 4, 1]])


class Engine:
    """All of an engine that says what its KV is: configuration, attention, paged KV."""

    def __init__(self, lab: Lab, *, kv_cache_dtype: str = "fp8", skip: tuple[str, ...] = ()) -> None:
        self.config = engine_config(lab.model)
        self.config.cache_config.cache_dtype = kv_cache_dtype
        self.config.cache_config.kv_cache_dtype_skip_layers = list(skip)
        with set_current_vllm_config(self.config):
            self.attention = [
                Attention(6, 32, 0.1, 2, cache_config=self.config.cache_config, prefix=f"layers.{number}.attn")
                for number in range(2)
            ]
        self._digests = lab.home / "digests"

    def namespace(self, states: Sequence[str] = ()) -> bytes:
        # One shape and dtype for all: nothing but what is said of it shall differ.
        layers: dict[str, Tensor] = {
            f"layers.{number}.attn": torch.zeros(NUM_BLOCKS, 2, SIZE, 64, dtype=torch.uint8) for number in range(2)
        }
        described = namespace_of(
            self.config, [layers], states=states, num_blocks=NUM_BLOCKS, tp_rank=0, pp_rank=0, digests=self._digests
        )
        return bytes(described.id)


@pytest.fixture
def fp8(lab: Lab) -> Engine:
    return Engine(lab)


def test_scales_in_use_are_in_the_namespace(lab: Lab, fp8: Engine) -> None:
    known = {fp8.namespace()}
    assert Engine(lab).namespace() in known
    for layer in fp8.attention:
        for which in ("_k_scale", "_v_scale", "_q_scale", "_prob_scale"):
            getattr(layer, which).fill_(0.5)
            assert fp8.namespace() not in known, f"{layer.layer_name} {which}"
            known.add(fp8.namespace())
    fp8.attention[0]._k_scale = torch.tensor([0.5, 0.25])
    assert fp8.namespace() not in known, "a scale for each head"


def test_formats_are_in_the_namespace(lab: Lab, fp8: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {fp8.namespace()}
    for other in (Engine(lab, kv_cache_dtype="fp8_e5m2"), Engine(lab, kv_cache_dtype="auto"), Engine(lab, skip=("0",))):
        assert other.namespace() not in known
        known.add(other.namespace())
    monkeypatch.setattr("vllm.platforms.current_platform.fp8_dtype", lambda: torch.float8_e4m3fnuz)
    assert fp8.namespace() not in known, "some GPUs have a format of their own under the same name"


def test_scales_of_what_is_not_quantised_say_nothing(lab: Lab) -> None:
    engine = Engine(lab, kv_cache_dtype="auto")
    known = engine.namespace()
    engine.attention[0]._k_scale.fill_(0.5)
    assert engine.namespace() == known


def test_what_states_are_made_of_is_in_the_namespace(fp8: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it takes as many bytes: that is all that pages show."""

    def namespace(**changes: object) -> bytes:
        return fp8.namespace(states_of(_groups(FULL, MambaSpec(**STATE | changes))))

    known = {fp8.namespace(), namespace()}
    assert len(known) == 2
    assert namespace() in known
    for changes in (
        {"shapes": ((192, 3), (1, 64, 64))},
        {"shapes": ((3, 192), (2, 32, 64))},
        {"dtypes": (torch.float16, torch.float32)},
        {"mamba_type": MambaAttentionBackendEnum.LINEAR},
    ):
        assert namespace(**changes) not in known, changes
        known.add(namespace(**changes))
    monkeypatch.setattr("kvtier_vllm.compat.is_conv_state_dim_first", lambda: True)
    assert namespace() not in known, "the other order of a convolution's dimensions"


def test_code_beside_the_weights_counts_where_it_is_run(lab: Lab, tmp_path: Path) -> None:
    tiny_llama.make(tmp_path / "model", seed=1)

    def digest(*, trusted: bool) -> bytes:
        config = engine_config(tmp_path / "model", trust_remote_code=trusted)
        return model_digest(config, lab.home / "digests")

    known, trusted = digest(trusted=False), digest(trusted=True)
    (tmp_path / "model" / "modeling_tiny.py").write_text("# another model")
    assert digest(trusted=False) == known, "code that vLLM does not run"
    assert digest(trusted=True) not in (known, trusted)


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_drafters_are_told_by_their_content_wherever_they_lie(lab: Lab, tmp_path: Path, method: str) -> None:
    make = tiny_drafters.make_eagle if method == "eagle" else tiny_llama.make

    def digest(name: str, seed: int) -> bytes:
        make(tmp_path / name, seed=seed)
        config = engine_config(lab.model)
        with found_out_here():
            config.speculative_config = SpeculativeConfig(
                method=method,
                model=str(tmp_path / name),
                num_speculative_tokens=3,
                target_model_config=config.model_config,
                target_parallel_config=config.parallel_config,
            )
        return model_digest(config, lab.home / "digests")

    known = digest("here", 1)
    assert digest("there", 1) == known
    assert digest("another", 2) != known
    assert model_digest(engine_config(lab.model), lab.home / "digests") != known
