"""The model against transformers' forward of the same weights."""

import copy
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from engine_model_rig import TABLE, gguf_read_once, small_folder
from engine_process import FRANCE
from engine_rig import EngineRig
from kvtier_engine.demo.demo_model import demo_model_path
from kvtier_engine.model.llama import Chunk, LlamaModel
from kvtier_engine.model.model_folder import ModelFolder, open_model
from kvtier_engine.model.paged_kv import allocate_kv
from kvtier_engine.model.weights import load_weights
from kvtier_engine.scheduling.beam_search import BeamSettings


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return open_model(demo_model_path(), tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def models(smollm2: ModelFolder) -> Callable[[torch.dtype], LlamaModel]:
    loaded: dict[torch.dtype, LlamaModel] = {}

    def get(dtype: torch.dtype) -> LlamaModel:
        if dtype not in loaded:
            loaded[dtype] = LlamaModel(smollm2.config, load_weights(smollm2.weight_files, smollm2.config, dtype))
        return loaded[dtype]

    return get


@pytest.fixture(scope="module")
def reference(smollm2: ModelFolder) -> Any:
    """transformers' own reading of the GGUF file."""
    path = demo_model_path()
    with gguf_read_once():
        return transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


def all_logits(model: LlamaModel, folder: ModelFolder, ids: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Logits after every token: a prefill of half of them, then each of the others alone, then two at once."""
    kv = allocate_kv(folder.config, 16, 16, dtype)
    table = [7, 3, 11, 0, 9, 14, 2, 5, 1, 12, 4]
    cuts = [0, len(ids) // 2, *range(len(ids) // 2 + 1, len(ids) - 1), len(ids)]
    return torch.stack([model.forward([Chunk(ids[a:b], a, table)], kv)[0] for a, b in itertools.pairwise(cuts)])


@torch.inference_mode()
def reference_logits(model: Any, ids: Sequence[int], dtype: torch.dtype) -> Tensor:
    every: Tensor = model.to(dtype)(torch.tensor([list(ids)])).logits[0]
    last = [len(ids) // 2 - 1, *range(len(ids) // 2, len(ids) - 2), len(ids) - 1]
    return every[last].double()


def rms(error: Tensor) -> float:
    return error.double().square().mean().sqrt().item()


def test_imported_weights_are_transformers_bit_for_bit(smollm2: ModelFolder, reference: Any) -> None:
    ours, theirs = load_file(smollm2.weight_files[0]), reference.state_dict()
    assert set(theirs) - set(ours) == {"lm_head.weight"}  # tied
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.fixture(scope="module")
def exact(smollm2: ModelFolder) -> tuple[list[int], Tensor, dict[torch.dtype, Tensor]]:
    """Token ids, transformers' logits of them in float64, and what it gets in the dtypes that the engine has."""
    ids = smollm2.tokenizer.encode("The table of people:\n" + TABLE).tolist()[:100]
    hf = transformers.AutoModelForCausalLM.from_pretrained(smollm2.weight_files[0].parent, dtype=torch.float64)
    truth = reference_logits(hf, ids, torch.float64)
    return ids, truth, {dtype: reference_logits(hf, ids, dtype) for dtype in (torch.float32, torch.bfloat16)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_logits_are_as_exact_as_transformers(
    smollm2: ModelFolder,
    models: Callable[[torch.dtype], LlamaModel],
    exact: tuple[list[int], Tensor, dict[torch.dtype, Tensor]],
    dtype: torch.dtype,
) -> None:
    """The bound comes from transformers itself: its float64 forward is the truth, its error in `dtype` the measure.

    Two evaluations that round equally often but in another order have errors of the same size, so ours may be at most
    1.5 times as large over all logits.
    """
    ids, truth, theirs = exact
    our_error = rms(all_logits(models(dtype), smollm2, ids, dtype).double() - truth)
    their_error = rms(theirs[dtype] - truth)
    print(f"{dtype}: rms error {our_error:.2e}, transformers {their_error:.2e}")
    assert 0 < our_error <= 1.5 * their_error


def test_greedy_answer_and_tokens_equal_transformers(
    smollm2: ModelFolder, models: Callable[[torch.dtype], LlamaModel], reference: Any
) -> None:
    prompt = smollm2.tokenizer.encode_chat(FRANCE).tolist()
    answer = greedy(models(torch.float32), smollm2, prompt, torch.float32, 32)
    generated = (
        reference.to(torch.float32)
        .generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=32
        )[0, len(prompt) :]
        .tolist()
    )
    assert smollm2.tokenizer.decode(answer) == "The capital of France is Paris."
    assert [*answer, smollm2.config.eos_token_ids[0]] == generated


def test_branches_and_beams_are_those_of_transformers(
    smollm2: ModelFolder, models: Callable[[torch.dtype], LlamaModel], reference: Any
) -> None:
    """Through scheduler, shared blocks and cache; the second time the prompts come from the cache."""
    rig = EngineRig(tiers=False, num_blocks=60, cache_aware=True, model=models(torch.float32), config=smollm2.config)
    ends = smollm2.config.eos_token_ids
    for prompt in (smollm2.tokenizer.encode_chat(FRANCE).tolist(), smollm2.tokenizer.encode("The sea is").tolist()):
        for width in (1, 3, 3):
            theirs = reference.to(torch.float32).generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                do_sample=False,
                num_beams=width,
                num_return_sequences=width,
                max_new_tokens=12,
            )[:, len(prompt) :]
            beams = BeamSettings(width=width) if width > 1 else None
            request = rig.add(prompt, 12, num_branches=3, beams=beams, eos_token_ids=ends)
            rig.run()
            expected = [tuple(_up_to_its_end(answer, ends)) for answer in theirs.tolist()]
            answers = [done.token_ids for _, done in sorted(rig.answers[request].items())]
            assert answers == (expected if width > 1 else 3 * expected)
        assert rig.done[request].cached_by_tier == {"device": len(prompt) - 1}
    rig.close()


def _up_to_its_end(token_ids: list[int], ends: tuple[int, ...]) -> list[int]:
    return token_ids[: next((i + 1 for i, token in enumerate(token_ids) if token in ends), None)]


def greedy(model: LlamaModel, folder: ModelFolder, prompt: list[int], dtype: torch.dtype, most: int) -> list[int]:
    kv = allocate_kv(folder.config, 8, 16, dtype)
    answer: list[int] = []
    new, start = prompt, 0
    while len(answer) < most:
        token = int(model.forward([Chunk(new, start, range(8))], kv)[0].argmax())
        if token in folder.config.eos_token_ids:
            break
        answer.append(token)
        start += len(new)
        new = [token]
    return answer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_same_chunks_give_the_same_bits_in_any_blocks(
    smollm2: ModelFolder, models: Callable[[torch.dtype], LlamaModel], dtype: torch.dtype
) -> None:
    ids = smollm2.tokenizer.encode(TABLE * 2).tolist()[:330]
    tables = [list(range(21)), [40 - 2 * i for i in range(21)], list(range(21))]
    results = []
    for table in tables:
        kv = allocate_kv(smollm2.config, 41, 16, dtype)
        kv.tensor.fill_(float("nan"))
        first = models(dtype).forward([Chunk(ids[:290], 0, table)], kv)
        second = models(dtype).forward([Chunk(ids[290:], 290, table)], kv)
        results.append((first, second, kv.tensor[table[:20]].clone()))
    for logits, more_logits, blocks in results[1:]:
        assert torch.equal(logits, results[0][0])
        assert torch.equal(more_logits, results[0][1])
        assert torch.equal(blocks, results[0][2])


def test_copied_blocks_give_the_same_bits_as_computed_ones(
    smollm2: ModelFolder, models: Callable[[torch.dtype], LlamaModel]
) -> None:
    """What every tier relies on: a block is the bytes of its row, whole and nothing else."""
    ids = smollm2.tokenizer.encode(TABLE).tolist()[:200]
    kv = allocate_kv(smollm2.config, 30, 16, torch.bfloat16)
    rows = kv.byte_rows()
    assert rows.shape == (30, 16 * 23_040)
    assert rows.data_ptr() == kv.tensor.data_ptr()
    model = models(torch.bfloat16)
    model.forward([Chunk(ids[:160], 0, range(10))], kv)
    computed = model.forward([Chunk(ids[160:], 160, range(13))], kv)
    other = allocate_kv(smollm2.config, 30, 16, torch.bfloat16)
    other.byte_rows()[20:30] = rows[:10]
    copied = model.forward([Chunk(ids[160:], 160, [*range(20, 30), 3, 4, 5])], other)
    assert torch.equal(computed, copied)


def test_sequences_in_one_batch_do_not_mix(smollm2: ModelFolder, models: Callable[[torch.dtype], LlamaModel]) -> None:
    """Together or alone: the same logits, up to the rounding of matrix products of other heights."""
    encode = smollm2.tokenizer.encode
    prompts = [encode("The sky is").tolist(), encode(TABLE).tolist()[:77], encode("2 + 2 =").tolist()]
    model = models(torch.float32)
    together_kv = allocate_kv(smollm2.config, 12, 16, torch.float32)
    tables = [[4], [11, 1, 0, 7, 9], [2]]
    chunks = [Chunk(prompt, 0, table) for prompt, table in zip(prompts, tables, strict=True)]
    together = model.forward(chunks, together_kv)
    for row, prompt in enumerate(prompts):
        alone = model.forward([Chunk(prompt, 0, range(5))], allocate_kv(smollm2.config, 5, 16, torch.float32))
        assert (together[row] - alone[0]).abs().max().item() < 1e-3
        assert together[row].argmax() == alone[0].argmax()


@pytest.mark.parametrize("rope", ["default", "llama3"])
def test_sharded_untied_model_with_scaled_rope(tmp_path: Path, rope: str) -> None:
    parameters: dict[str, Any] = {"rope_type": rope, "rope_theta": 500000.0}
    if rope == "llama3":
        parameters |= {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512,
        }  # fmt: skip
    path, hf = small_folder(tmp_path, rope_parameters=parameters)
    folder = open_model(path, tmp_path)
    assert len(folder.weight_files) > 1
    our_error, their_error = _errors(folder, hf, torch.float32, num_tokens=600)
    assert our_error <= 2 * their_error


def _errors(folder: ModelFolder, hf: Any, dtype: torch.dtype, num_tokens: int) -> tuple[float, float]:
    """How far the last logits are from transformers' float64 ones: ours, half of the prompt cached, and theirs."""
    model = LlamaModel(folder.config, load_weights(folder.weight_files, folder.config, dtype))
    ids = torch.randint(0, 320, (num_tokens,), generator=torch.Generator().manual_seed(2)).tolist()
    rounded, exact = copy.deepcopy(hf).to(dtype), copy.deepcopy(hf).to(dtype).double()
    for each in (rounded, exact):  # not rounded by transformers either, when it loads a model in `dtype`
        each.model.rotary_emb.inv_freq = hf.model.rotary_emb.inv_freq
    with torch.inference_mode():
        theirs, truth = (each(torch.tensor([ids])).logits[0, -1].double() for each in (rounded, exact))
    table = [*range(1, num_tokens // 16 + 1), 0]
    kv, half = allocate_kv(folder.config, len(table), 16, dtype), num_tokens // 2
    model.forward([Chunk(ids[:half], 0, table)], kv)
    ours = model.forward([Chunk(ids[half:], half, table)], kv)[0].double()
    return rms(ours - truth), rms(theirs - truth)


QWEN: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2": ("Qwen2", {}),
    "Qwen2 with tied embeddings and wide heads": ("Qwen2", {"tie_word_embeddings": True, "hidden_size": 64}),
    "Qwen3": ("Qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "Qwen3 with tied embeddings": ("Qwen3", {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "changes"), QWEN.values(), ids=QWEN.keys())
def test_qwen_logits_are_as_exact_as_transformers(
    tmp_path: Path, family: str, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    if family == "Qwen2":  # its heads are always hidden_size / num_attention_heads wide
        changes = changes | {"head_dim": changes.get("hidden_size", 48) // 4}
    path, hf = small_folder(tmp_path, family, **changes)
    folder = open_model(path, tmp_path)
    assert (folder.config.qkv_bias, folder.config.qk_norm) == (family == "Qwen2", family == "Qwen3")
    our_error, their_error = _errors(folder, hf, dtype, num_tokens=300)
    print(f"{family} {dtype}: rms error {our_error:.2e}, transformers {their_error:.2e}")
    assert 0 < our_error <= 2 * their_error
