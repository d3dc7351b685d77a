"""LoRA adapters: computed as if added to the weights, and known by their content."""

import copy
import random
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_rig import random_adapter
from engine_model_rig import small_folder
from engine_rig import EngineRig
from kvtier.errors import ConfigError
from kvtier_engine.model.adapters import load_adapter
from kvtier_engine.model.llama import Chunk, LlamaModel
from kvtier_engine.model.model_folder import ModelFolder, open_model
from kvtier_engine.model.paged_kv import allocate_kv
from kvtier_engine.model.weights import LlamaWeights, load_weights
from kvtier_engine.scheduling.adapted_model import AdaptedModel

SHAPES = {
    "self_attn.q_proj": (64, 48), "self_attn.v_proj": (32, 48), "self_attn.o_proj": (48, 64),
    "mlp.up_proj": (80, 48), "mlp.down_proj": (48, 80),
}  # fmt: skip
Small = tuple[ModelFolder, LlamaWeights, Any]


@pytest.fixture
def small(tmp_path: Path) -> Small:
    path, hf = small_folder(tmp_path, eos_token_id=None, pad_token_id=0)
    folder = open_model(path, tmp_path)
    return folder, load_weights(folder.weight_files, folder.config, torch.float32), hf.eval()


def greedy(hf: Any, tokens: list[int], max_tokens: int) -> list[int]:
    with torch.inference_mode():
        found = hf.generate(torch.tensor([tokens]), do_sample=False, max_new_tokens=max_tokens)
    answer: list[int] = found[0, len(tokens) :].tolist()
    return answer


def saved_by_peft(folder: Path, hf: Any, **settings: Any) -> Path:
    """A random adapter of all projections, as PEFT itself makes and saves it. Returns the folder."""
    torch.manual_seed(2)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, **settings)
    peft.get_peft_model(copy.deepcopy(hf), config).save_pretrained(folder)
    return folder


def test_logits_and_tokens_are_those_of_peft_and_nothing_is_shared(small: Small, tmp_path: Path) -> None:
    """PEFT computes in float32 on transformers' model, with adapters that it saved and one of the first layer alone."""
    folder, weights, hf = small
    tokens = random.Random(4).choices(range(1, 320), k=43)
    folders = {
        "saved by PEFT": saved_by_peft(tmp_path / "one", hf, lora_alpha=3),
        "first layer": random_adapter(tmp_path / "two", SHAPES, num_layers=1, seed=1, use_rslora=True),
    }
    adapters = {name: load_adapter(path, weights, folder.config, tmp_path) for name, path in folders.items()}
    models = {name: LlamaModel(folder.config, adapter.weights) for name, adapter in adapters.items()}
    expected = {None: greedy(hf, tokens, 12)}
    for name, path in folders.items():
        adapted = peft.PeftModel.from_pretrained(copy.deepcopy(hf), path).eval()
        expected[name] = greedy(adapted, tokens, 12)
        with torch.inference_mode():
            theirs = adapted(torch.tensor([tokens])).logits[0, -1]
        ours = models[name].forward([Chunk(tokens, 0, range(3))], allocate_kv(folder.config, 3, 16, torch.float32))[0]
        assert (ours - theirs).abs().max().item() <= 1e-5 * theirs.abs().max().item()
    rig = EngineRig(tiers=False, model=LlamaModel(folder.config, weights), config=folder.config, cache_aware=True)
    rig.scheduler._model = AdaptedModel(rig.scheduler._model, models)
    assert rig.hasher is not None
    hashers = {name: rig.hasher.with_adapter(adapter.digest) for name, adapter in adapters.items()}
    for num_cached in (0, 42):
        requests = {
            name: rig.add(tokens, 12, adapter=None if name is None else (name, hashers[name])) for name in expected
        }
        rig.run()
        for name, request in requests.items():
            assert list(rig.done[request].token_ids) == expected[name], name
            assert sum(rig.done[request].cached_by_tier.values()) == num_cached, name
    assert len({*map(tuple, expected.values())}) == 3
    rig.close()


def test_adapters_are_known_by_their_content(small: Small, tmp_path: Path) -> None:
    folder, weights, _ = small

    def digest(path: Path) -> bytes:
        return load_adapter(path, weights, folder.config, tmp_path).digest

    first = digest(random_adapter(tmp_path / "first", SHAPES))
    assert digest(random_adapter(tmp_path / "elsewhere", SHAPES)) == first
    assert digest(random_adapter(tmp_path / "other", SHAPES, seed=1)) != first
    assert digest(random_adapter(tmp_path / "stronger", SHAPES, lora_alpha=9)) != first
    adapter = load_adapter(tmp_path / "first", weights, folder.config, tmp_path)
    assert adapter.weights.layers[0].input_norm is weights.layers[0].input_norm


@pytest.mark.parametrize(
    ("shapes", "settings", "words"),
    [
        ({"self_attn.q_proj": (64, 40)}, {}, "q_proj is for"),
        ({"self_attn.x_proj": (64, 48)}, {}, "is of no attention or MLP"),
        (SHAPES, {"use_dora": True}, "use_dora is True, which this engine does not compute"),
        (SHAPES, {"r": None}, "cannot be read"),
        (SHAPES, {"num_layers": 3}, "is of no attention or MLP of this model"),
    ],
)
def test_what_is_not_computed_is_refused(
    small: Small, tmp_path: Path, shapes: dict[str, tuple[int, int]], settings: dict[str, Any], words: str
) -> None:
    folder, weights, _ = small
    path = random_adapter(tmp_path / "wrong", shapes, **settings)
    with pytest.raises(ConfigError, match=words):
        load_adapter(path, weights, folder.config, tmp_path)


def test_a_folder_that_lacks_something_is_named(small: Small, tmp_path: Path) -> None:
    folder, weights, _ = small
    path = random_adapter(tmp_path / "half", SHAPES)
    tensors = load_file(path / "adapter_model.safetensors")
    save_file({n: t for n, t in tensors.items() if "lora_B" not in n}, path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=f"{path}: .* has no lora_B"):
        load_adapter(path, weights, folder.config, tmp_path)
    (path / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors"):
        load_adapter(path, weights, folder.config, tmp_path)
