"""The model against transformers' forward of the same weights; folders, GGUF import, tokenizer."""

import copy
import itertools
import json
import os
import shutil
import time
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import GGUFWriter
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from kvtier.atomic_files import folder_published_at
from kvtier.errors import ConfigError, InvalidInputError
from kvtier.weights_digest import weights_digest
from kvtier_engine.demo_model import demo_model_path
from kvtier_engine.devices import weights_on
from kvtier_engine.gguf_import import import_gguf
from kvtier_engine.llama import Chunk, LlamaModel
from kvtier_engine.model_folder import ModelFolder, open_model
from kvtier_engine.paged_kv import allocate_kv
from kvtier_engine.tokenizer import ChatTokenizer
from kvtier_engine.weights import LlamaWeights, load_weights

FRANCE = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
TABLE = "| id | name | age | e-mail |\n| --- | ---: | --- | --- |\n" + "".join(
    f"| {i} | Anna-Lena Müller {i} | {20 + i} | a.m{i}@example.org |\n" for i in range(12)
)
STRINGS = [
    "", " ", "hello world", "  two  spaces   12  345", "2024-10-31T23:59:60Z", "x=1;y=22;z=333 4444", TABLE,
    "tabs\tand\n\n\nnewlines \r\n 7", "naïve café – “quotes” … №5 Ⅳ ½ ² ٣", "日本語のテキスト 123",
    "emoji 👩‍👩‍👧‍👦 7️⃣ end",
    "don't we'll I'm you've", "<|im_start|>user\nhi<|im_end|>\n", "def f(x):\n    return x[1:-1] + 0x1F  # comment",
    "\u00a0nbsp\u2003em space\u200bzero width", "a" * 300, "\x00\x01\ufffd",
]  # fmt: skip


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def smollm2(cache_dir: Path) -> ModelFolder:
    return open_model(demo_model_path(), cache_dir)


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


def _tiny_folder(tmp_path: Path, smollm2: ModelFolder, family: str = "Llama", **changes: Any) -> tuple[Path, Any]:
    """A random small model saved by transformers, with the tokenizer of SmolLM2."""
    settings = {
        "vocab_size": 320, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    } | changes  # fmt: skip
    torch.manual_seed(5)
    config = getattr(transformers, family + "Config")(**settings)
    model = getattr(transformers, family + "ForCausalLM")(config)
    for name, parameter in model.named_parameters():  # made as zeros and ones, which hide whether they are used
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    folder = tmp_path / "tiny"
    model.save_pretrained(folder, max_shard_size="100KB")
    shutil.copy(smollm2.weight_files[0].parent / "tokenizer.json", folder)
    return folder, model


@pytest.mark.parametrize("rope", ["default", "llama3"])
def test_sharded_untied_model_with_scaled_rope(tmp_path: Path, smollm2: ModelFolder, rope: str) -> None:
    parameters: dict[str, Any] = {"rope_type": rope, "rope_theta": 500000.0}
    if rope == "llama3":
        parameters |= {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512,
        }  # fmt: skip
    path, hf = _tiny_folder(tmp_path, smollm2, rope_parameters=parameters)
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
    tmp_path: Path, smollm2: ModelFolder, family: str, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    if family == "Qwen2":  # its heads are always hidden_size / num_attention_heads wide
        changes = changes | {"head_dim": changes.get("hidden_size", 48) // 4}
    path, hf = _tiny_folder(tmp_path, smollm2, family, **changes)
    folder = open_model(path, tmp_path)
    assert (folder.config.qkv_bias, folder.config.qk_norm) == (family == "Qwen2", family == "Qwen3")
    our_error, their_error = _errors(folder, hf, dtype, num_tokens=300)
    print(f"{family} {dtype}: rms error {our_error:.2e}, transformers {their_error:.2e}")
    assert 0 < our_error <= 2 * their_error


@pytest.mark.parametrize(
    ("family", "config", "words"),
    [
        ("Qwen2", {"use_sliding_window": True}, r"use_sliding_window is True; this engine computes qwen2 with"),
        ("Qwen3", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types has sliding_attention"),
        ("Qwen3", {"attention_bias": True}, "attention_bias is True; this engine computes qwen3 with"),
        ("Qwen2", {"rope_parameters": {"rope_type": "yarn"}}, "knows 'default' and 'llama3'"),
        ("Qwen2", {"model_type": "qwen3"}, r"no tensor 'model\.layers\.0\.self_attn\.q_norm\.weight'"),
        ("Qwen3", {"model_type": "qwen2"}, r"no tensor 'model\.layers\.0\.self_attn\.q_proj\.bias'"),
        ("Qwen2", {"model_type": "qwen2_moe"}, "model_type is 'qwen2_moe'; this engine computes llama, qwen2, qwen3"),
    ],
)
def test_other_qwens_are_refused(
    tmp_path: Path, smollm2: ModelFolder, family: str, config: dict[str, Any], words: str
) -> None:
    path, _ = _tiny_folder(tmp_path, smollm2, family, head_dim=12)
    _change_config(path, **config)
    with pytest.raises(ConfigError, match=words) as caught:
        _load(path, tmp_path / "cache")
    assert str(path) in str(caught.value)


def test_weights_digest_is_of_the_content(tmp_path: Path, smollm2: ModelFolder) -> None:
    path, _ = _tiny_folder(tmp_path, smollm2)
    first = open_model(path, tmp_path / "cache").weights_digest
    tensors: dict[str, Tensor] = {}
    for file in path.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    save_file(dict(reversed(tensors.items())), path / "in_one_file.safetensors")
    moved = path.rename(tmp_path / "elsewhere")
    assert open_model(moved, tmp_path / "cache").weights_digest == first
    assert open_model(moved, tmp_path / "other cache").weights_digest == first
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].clone()
    tensors[name][3, 5] += 0.5
    save_file(tensors, moved / "in_one_file.safetensors")
    assert open_model(moved, tmp_path / "cache").weights_digest != first


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "another file"])
def test_weights_replaced_behind_the_same_size_and_time_are_others(tmp_path: Path, in_place: bool) -> None:
    """As rsync -t, tar -x and images with a fixed date leave them."""
    file, cache = tmp_path / "model.safetensors", tmp_path / "cache"
    save_file({"a": torch.zeros(10)}, file)
    os.utime(file, (0, 0))
    first = weights_digest([file], cache)
    before = file.stat()
    time.sleep(0.05)  # the clock of file systems ticks every 1 to 10 ms
    if not in_place:
        file.rename(tmp_path / "old")
    file.write_bytes(save({"a": torch.ones(10)}))
    os.utime(file, (0, 0))
    after = file.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert (after.st_ino == before.st_ino) == in_place
    assert weights_digest([file], cache) != first


@pytest.mark.parametrize("garbage", [b"z" * 64, b"", b"ab" * 31, b"\xff" * 64, b"0" * 65])
def test_a_garbled_digest_is_computed_again(tmp_path: Path, garbage: bytes) -> None:
    file, cache = tmp_path / "model.safetensors", tmp_path / "cache"
    save_file({"a": torch.zeros(10)}, file)
    digest = weights_digest([file], cache)
    (memory,) = (cache / "digests").iterdir()
    memory.write_bytes(garbage)
    assert weights_digest([file], cache) == digest
    assert memory.read_text() == digest.hex() + "\n"


def test_the_first_of_two_imports_stays_and_a_failed_one_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with folder_published_at(target) as slow:
        (slow / "config.json").write_text("slow")
        with folder_published_at(target) as fast:
            (fast / "config.json").write_text("fast")
    assert (target / "config.json").read_text() == "fast"
    with pytest.raises(FileNotFoundError), folder_published_at(tmp_path / "failed") as draft:
        (draft / "no such folder" / "config.json").write_text("")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_import_is_reused_wherever_the_file_lies(tmp_path: Path, cache_dir: Path, smollm2: ModelFolder) -> None:
    folder = smollm2.weight_files[0].parent
    before = smollm2.weight_files[0].stat().st_mtime_ns
    copy = tmp_path / "renamed.gguf"
    shutil.copy(demo_model_path(), copy)
    assert import_gguf(copy, cache_dir) == folder
    assert smollm2.weight_files[0].stat().st_mtime_ns == before
    assert [p.name for p in cache_dir.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("text", STRINGS, ids=range(len(STRINGS)))
def test_tokenizer_agrees_with_transformers(smollm2: ModelFolder, hf_tokenizer: Any, text: str) -> None:
    """transformers' tokenizer from the same GGUF lacks the `smollm` rule that every digit stands alone.

    llama.cpp applies that rule first, so the truth is transformers' encoding of the pieces between digits.
    """
    pieces, piece = [], ""
    for character in text:
        if unicodedata.category(character).startswith("N"):
            pieces += [piece, character]
            piece = ""
        else:
            piece += character
    expected = [token for part in (*pieces, piece) for token in hf_tokenizer.encode(part)]
    ours = smollm2.tokenizer.encode(text).tolist()
    assert ours == expected
    assert smollm2.tokenizer.decode(ours) == hf_tokenizer.decode(expected, skip_special_tokens=True)


@pytest.fixture(scope="module")
def hf_tokenizer() -> Any:
    path = demo_model_path()
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def test_chat_template_agrees_with_transformers(smollm2: ModelFolder, hf_tokenizer: Any) -> None:
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello, who are you?"},
        {"role": "assistant", "content": "A model."},
        {"role": "user", "content": "{{ 1 }} <|im_end|>"},
    ]
    for messages in (FRANCE, conversation):
        expected = hf_tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert smollm2.tokenizer.encode_chat(messages).tolist() == expected


def test_no_chat_template_is_an_error_of_the_request(tmp_path: Path, smollm2: ModelFolder) -> None:
    shutil.copy(smollm2.weight_files[0].parent / "tokenizer.json", tmp_path)
    with pytest.raises(InvalidInputError, match="/v1/completions"):
        ChatTokenizer(tmp_path).encode_chat(FRANCE)


def _change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _load(path: Path, cache_dir: Path) -> None:
    folder = open_model(path, cache_dir)
    load_weights(folder.weight_files, folder.config, torch.float32)


def _drop_tensor(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        save_file({k: v for k, v in load_file(file).items() if "layers.1.mlp.up" not in k}, file)


def _quantise_tensor(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        save_file({k: v.to(torch.float8_e4m3fn) if "o_proj" in k else v for k, v in load_file(file).items()}, file)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (lambda f: [p.unlink() for p in f.glob("*.safetensors")], r"no \*\.safetensors.*hf download"),
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer.json"),
    "garbled config": (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
    "garbled tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), r"tokenizer\.json cannot be read"),
    "torn weights": (lambda f: [os.truncate(p, 900) for p in f.glob("*.safetensors")], "download it again"),
    "another family": (lambda f: _change_config(f, model_type="mamba"), "model_type is 'mamba'"),
    "biases": (lambda f: _change_config(f, attention_bias=True), "attention_bias"),
    "another rope": (lambda f: _change_config(f, rope_parameters={"rope_type": "yarn"}), "rope scaling 'yarn'"),
    "config of another model": (lambda f: _change_config(f, intermediate_size=81), "config.json says"),
    "a tensor is missing": (_drop_tensor, "no tensor 'model.layers.1.mlp.up_proj.weight'"),
    "quantised": (lambda f: _change_config(f, quantization_config={"quant_method": "fp8"}), "that is not quantised"),
    "quantised without a word": (_quantise_tensor, r"o_proj\.weight' is torch\.float8_e4m3fn.*that is not quantised"),
    "impossible heads": (lambda f: _change_config(f, num_key_value_heads=3), "multiple of KV heads"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "words"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_folders_name_folder_and_remedy(
    tmp_path: Path, smollm2: ModelFolder, damage: Callable[[Path], object], words: str
) -> None:
    path, _ = _tiny_folder(tmp_path, smollm2)
    damage(path)

    with pytest.raises(ConfigError, match=words) as caught:
        _load(path, tmp_path / "cache")
    assert str(path) in str(caught.value)


def test_folder_with_only_a_gguf_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"to use the GGUF file in it, give its path: .*model\.gguf"):
        open_model(tmp_path, tmp_path)


def test_config_without_quantisation_may_say_so(tmp_path: Path, smollm2: ModelFolder) -> None:
    path, _ = _tiny_folder(tmp_path, smollm2)
    _change_config(path, quantization_config=None)
    _load(path, tmp_path / "cache")


def _small_gguf(path: Path, **rope: str | float) -> Path:
    """A Llama of 2 heads of 16, with all fields and no tensors."""
    writer = GGUFWriter(path, "llama")
    for key, number in {
        "embedding_length": 32, "feed_forward_length": 64, "block_count": 1, "attention.head_count": 2,
        "attention.head_count_kv": 1, "context_length": 128,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", number)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in rope.items():
        name = f"llama.rope.{key}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_float32(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"scaling.type": "linear", "scaling.factor": 4.0}, r"rope\.scaling\.type is 'linear'.*'none' only"),
        ({"scaling.type": "yarn"}, r"rope\.scaling\.type is 'yarn'"),
        ({"scaling.factor": 4.0}, r"rope\.scaling\.factor is 4\.0"),
        ({"scale_linear": 2.0}, r"rope\.scale_linear is 2\.0"),
        ({"dimension_count": 8}, r"rope\.dimension_count is 8.*computes 16 only"),
        ({"scaling.type": "none", "scaling.factor": 1.0, "dimension_count": 16}, "tokenizer of kind None"),
        ({}, "tokenizer of kind None"),
    ],
)
def test_gguf_with_another_rope_is_refused(tmp_path: Path, rope: dict[str, str | float], words: str) -> None:
    """Those of the engine's own rope go on to the tokenizer, which this file has not."""
    with pytest.raises(ConfigError, match=words + ".*Hugging Face folder"):
        open_model(_small_gguf(tmp_path / "small.gguf", **rope), tmp_path)


@pytest.mark.parametrize("length", [4, 20, 100, 5_000, 1_000_000, 10_000_000])
def test_a_torn_gguf_says_so(tmp_path: Path, length: int) -> None:
    with demo_model_path().open("rb") as whole:
        (tmp_path / "torn.gguf").write_bytes(whole.read(length))
    with pytest.raises(ConfigError, match=r"torn\.gguf cannot be read as GGUF: it is torn.*download it again"):
        open_model(tmp_path / "torn.gguf", tmp_path)


def test_weights_that_do_not_fit_the_device_name_the_remedy() -> None:
    class Full:
        def to(self, device: torch.device) -> Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

    full: Any = Full()
    with pytest.raises(ConfigError, match=r"engine\.kv_bytes: leaves no room on cuda:0 for the model's weights; lower"):
        weights_on(LlamaWeights(full, (), full, full), torch.device("cuda", 0))


def test_no_such_model_and_garbled_gguf(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model at"):
        open_model(tmp_path / "nothing", tmp_path)
    garbled = tmp_path / "garbled.gguf"
    garbled.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ConfigError, match="cannot be read as GGUF"):
        open_model(garbled, tmp_path)
