"""What an engine on CUDA does otherwise, as far as a machine without one can tell."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine_rig import TOKENS_PER_BLOCK
from kvtier.config import parse_config
from kvtier.config.engine import EngineConfig
from kvtier.device.kv import HostMemoryKV
from kvtier.errors import ConfigError
from kvtier.memory.arena import Arena
from kvtier_bench.cases.first_token import FirstToken, Prompts
from kvtier_bench.gpu.measuring.models import random_weights
from kvtier_engine import assemble
from kvtier_engine.assemble import compile_for_long_sequences, engine_of, prepare
from kvtier_engine.model import devices, llama
from kvtier_engine.model.devices import device_kv, engine_device, weights_on
from kvtier_engine.model.llama import Chunk, LlamaModel
from kvtier_engine.model.paged_kv import allocate_kv, kv_namespace
from kvtier_engine.scheduling.engine import EngineLimits
from kvtier_kernels import AttentionBatch, LayerAttention, SharedPrefixes
from kvtier_kernels.records import LossyCodec
from kvtier_kernels.tiles import prefill_splits
from tiny_model import CONFIG, VOCABULARY, tiny_model

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")


class OneDevice(TorchDispatchMode):
    """Operations on tensors of two devices raise, as on CUDA; a meta tensor alone would let some of them pass."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim() > 0]
        copies = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        if not copies and len({tensor.device for tensor in tensors}) > 1:
            raise AssertionError(f"{func} on {[str(tensor.device) for tensor in tensors]}")
        return func(*args, **kwargs)


def test_the_forward_pass_stays_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without memory stand for those of CUDA."""
    there = torch.device("meta")

    def step(places: tuple[Tensor, Tensor], batch: AttentionBatch) -> LayerAttention:
        assert batch.query_starts is not None
        index = batch.block_tables, batch.query_starts, batch.seq_lens
        assert {tensor.device for tensor in (*places, *index)} == {there}
        assert (batch.max_seq_len, batch.num_keys) == (9, 9 + 1)
        assert batch.prefixes is None

        def attend(*tensors: Tensor) -> Tensor:
            assert {tensor.device for tensor in tensors} == {there}
            return torch.empty_like(tensors[1], memory_format=torch.contiguous_format)

        return attend

    monkeypatch.setattr(llama, "step_attention", step)
    weights = weights_on(tiny_model()._weights, there)
    kv = allocate_kv(CONFIG, 8, TOKENS_PER_BLOCK, torch.float32, there)
    with OneDevice():
        logits = LlamaModel(CONFIG, weights).forward([Chunk([1, 2], 7, [0, 1, 2]), Chunk([3], 0, [4])], kv)
    assert logits.shape == (2, VOCABULARY)
    assert logits.device == kv.tensor.device == there


def test_the_guard_of_devices_notices() -> None:
    with OneDevice(), pytest.raises(AssertionError, match=r"aten\.embedding"):
        torch.nn.functional.embedding(torch.tensor([1]), torch.empty(3, 2, device="meta"))


def test_weights_stay_the_same_and_tied() -> None:
    weights = tiny_model()._weights
    moved = weights_on(weights, CPU)
    assert moved.lm_head is not moved.embedding
    assert moved.layers[1].down is weights.layers[1].down
    tied = weights_on(llama.LlamaWeights(weights.embedding, weights.layers, weights.final_norm, weights.embedding), CPU)
    assert tied.lm_head is tied.embedding


def test_engines_on_cpu_and_cuda_do_not_share() -> None:
    ids = {kv_namespace(CONFIG, bytes(32), torch.bfloat16, device).id for device in (CPU, CUDA)}
    assert len(ids) == 2
    assert kv_namespace(CONFIG, bytes(32), torch.bfloat16).id in ids


def test_engines_with_different_codecs_do_not_share() -> None:
    codecs = ("", *LossyCodec)
    ids = {kv_namespace(CONFIG, bytes(32), torch.bfloat16, lossy_codec=codec).id for codec in codecs}
    assert len(ids) == 3
    assert kv_namespace(CONFIG, bytes(32), torch.bfloat16).id in ids
    annotation = EngineConfig.model_fields["lossy_codec"].annotation
    assert set(get_args(annotation)) == {"none", *(str(codec) for codec in LossyCodec)}


@pytest.mark.parametrize(
    "change", [{"rope_theta": 5e5}, {"rms_norm_eps": 1e-6}, {"qk_norm": True}, {"num_attention_heads": 8}]
)
def test_the_same_weights_in_another_arithmetic_do_not_share(change: dict[str, Any]) -> None:
    """Somebody edited config.json."""
    before = kv_namespace(CONFIG, bytes(32), torch.bfloat16)
    assert kv_namespace(replace(CONFIG, **change), bytes(32), torch.bfloat16).id != before.id
    assert kv_namespace(replace(CONFIG, max_position_embeddings=77), bytes(32), torch.bfloat16).id == before.id


def test_the_device_is_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [engine_device(name) for name in ("auto", "cpu")] == [CPU, CPU]
    with pytest.raises(ConfigError, match=r'engine.device: "cuda", but torch sees no CUDA device'):
        engine_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [engine_device(name) for name in ("auto", "cpu", "cuda")] == [CUDA, CPU, CUDA]
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda _name: None)
    assert engine_device("auto") == CPU
    with pytest.raises(ConfigError, match="triton is missing: pip install triton"):
        engine_device("cuda")


def test_the_device_is_configured() -> None:
    def device(*lines: str) -> str:
        return parse_config(
            {"engine": dict(line.split("=") for line in lines)}, source="test", environ={}
        ).engine.device

    assert device() == "auto"
    assert device("device=cuda") == "cuda"
    with pytest.raises(ConfigError, match=r"engine.device"):
        device("device=gpu")


def test_blocks_go_down_in_the_form_of_a_codec() -> None:
    kv = allocate_kv(CONFIG, 3, TOKENS_PER_BLOCK, torch.bfloat16)
    kv.tensor.normal_(generator=torch.Generator().manual_seed(3))
    before = kv.tensor.clone()
    for codec in LossyCodec:
        with device_kv(kv, num_copies=3, lossy_codec=codec) as mover_side:
            assert mover_side.block_bytes < 0.8 * kv.block_bytes, "heads are of 8 elements, each with a scale"
            arena = Arena(3, mover_side.block_bytes)
            mover_side.gather([0, 2], arena, [1, 0], after=None)
            mover_side.scatter(arena, [1, 0], [0, 2], after=None)
        worst = (kv.tensor.float() - before.float()).abs().max().item()
        assert 0 < worst < 0.3, "values of a normal distribution, to 3 bits"
        assert torch.equal(kv.tensor[1], before[1])
        kv.tensor.copy_(before)
    wide = allocate_kv(CONFIG, 3, TOKENS_PER_BLOCK, torch.float32)
    with (
        pytest.raises(ConfigError, match=r'set engine\.dtype to "bfloat16"'),
        device_kv(wide, num_copies=1, lossy_codec="int8_per_head"),
    ):
        pass


def test_attention_of_all_kinds_is_compiled_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over runs of keys, and over shared blocks, too: in the middle of a step, each would take seconds."""
    seen = set()

    def step(_places: tuple[Tensor, Tensor], batch: AttentionBatch) -> LayerAttention:
        def attend(_kv_layer: Tensor, query: Tensor, *_: Tensor) -> Tensor:
            prefixes = batch.prefixes
            seen.add((query.size(0), batch.max_seq_len, prefixes.num_seqs if prefixes is not None else None))
            return torch.zeros_like(query)

        return attend

    def find(tables: Tensor, lens: Tensor, kv_layer: Tensor, _num_heads: int) -> SharedPrefixes | None:
        found = SharedPrefixes.of(tables, lens, kv_layer.size(2))
        return found if found.num_saved_keys else None

    monkeypatch.setattr(llama, "step_attention", step)
    monkeypatch.setattr(llama, "find_shared_prefixes", find)
    kv = allocate_kv(CONFIG, 8, TOKENS_PER_BLOCK, torch.float32)
    compile_for_long_sequences(tiny_model(), kv, CONFIG, max_running=3)
    assert seen == {(16, 32, None), (1, 32, None), (3, 32, 3)}
    num_kv_heads, num_multiprocessors = 8, 132
    assert prefill_splits(num_kv_heads, 8192, num_multiprocessors) > 1


def test_decodes_are_captured_on_cuda_unless_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """After everything has been compiled."""
    done: list[Any] = []
    monkeypatch.setattr(assemble, "compile_for_long_sequences", lambda *arguments: done.append(arguments[-1]))
    monkeypatch.setattr(assemble, "with_cuda_graphs", lambda *_, **sizes: done.append(sizes) or "graphs")
    model, limits = tiny_model(), EngineLimits(max_total_tokens=77, vocab_size=VOCABULARY)

    def prepared(device: torch.device, **engine: Any) -> Any:
        done.clear()
        section = parse_config({"engine": {"max_running": 6, **engine}}, source="test", environ={}).engine
        kv: Any = SimpleNamespace(tensor=SimpleNamespace(device=device))
        return prepare(model, kv, CONFIG, section, limits)

    assert prepared(CUDA) == "graphs"
    assert done == [6, {"max_seqs": 6, "max_seq_len": 77}]
    assert prepared(CUDA, max_batch_tokens=4) == "graphs"
    assert done == [6, {"max_seqs": 4, "max_seq_len": 77}]
    assert prepared(CUDA, cuda_graphs=False) is model
    assert done == [6]
    assert prepared(CPU) is model
    assert not done


@pytest.mark.parametrize("codec", LossyCodec)
def test_an_engine_finds_what_its_device_forgot(codec: LossyCodec) -> None:
    """In host memory, where a block takes as much as its record."""
    settings = {
        "tenant": "t",
        "tenants": {"t": {"secret": "env:SECRET"}},
        "host": {"capacity_bytes": 2**16},
        "cache": {"tokens_per_block": TOKENS_PER_BLOCK, "fetch": "always"},
    }
    config = parse_config(settings, source="test", environ={"SECRET": "of a test, shared with nobody"})
    kv = allocate_kv(CONFIG, 12, TOKENS_PER_BLOCK, torch.bfloat16)
    model = LlamaModel(CONFIG, random_weights(CONFIG, torch.bfloat16, CPU))
    namespace = kv_namespace(CONFIG, bytes(32), torch.bfloat16, lossy_codec=codec)
    registry = CollectorRegistry()
    document, other = (Prompts(VOCABULARY, prompt_tokens=length, new_tokens=4, seed=length) for length in (40, 47))
    with engine_of(config, model, CONFIG, kv, namespace, registry) as engine:
        first_token = FirstToken(engine, registry)
        assert first_token.ask(document.fresh()) == {}
        computed = kv.tensor.clone()
        assert first_token.ask(other.fresh()) == {}, "in all blocks"
        kv.tensor[:] = torch.nan
        assert first_token.ask(document.follow_up()) == {"host": 36}
    rows = kv.tensor.flatten(1).float().nan_to_num(torch.inf)
    nearest = [((rows - block).abs().amax(1).min() / block.abs().max()).item() for block in computed.flatten(1).float()]
    assert sum(0 < distance < 0.07 for distance in nearest) == 9, "rounded, at most to 3 bits"


def test_blocks_in_host_memory_are_copied_by_numpy() -> None:
    kv = allocate_kv(CONFIG, 3, TOKENS_PER_BLOCK, torch.float32)
    with device_kv(kv, num_copies=3) as mover_side:
        assert isinstance(mover_side, HostMemoryKV)
        assert (mover_side.num_blocks, mover_side.block_bytes) == (kv.num_blocks, kv.block_bytes)
