"""LoRA adapters: computed as if added to the weights, and known by their content."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_rig import random_adapter
from engine_model_rig import small_folder
from engine_rig import EngineRig
from kvtier.errors import ConfigError
from kvtier_engine.model.adapters import load_adapter
from kvtier_engine.model.llama import LlamaModel
from kvtier_engine.model.model_folder import ModelFolder, open_model
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


def add_to(hf: Any, folder: Path, scale: float, sign: int) -> None:
    """Adds an adapter to transformers' model, or takes it out again."""
    tensors = load_file(folder / "adapter_model.safetensors")
    for name in (name for name in tensors if ".lora_A." in name):
        delta = tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
        weight = hf.get_parameter(name.removeprefix("base_model.model.").replace("lora_A.", ""))
        weight.data += sign * scale * delta


def test_tokens_are_those_of_added_weights_and_nothing_is_shared(small: Small, tmp_path: Path) -> None:
    folder, weights, hf = small
    tokens = random.Random(4).choices(range(1, 320), k=43)
    scales = {"one": 2.0, "two": 4.0}
    folders = {
        "one": random_adapter(tmp_path / "one", SHAPES),
        "two": random_adapter(tmp_path / "two", SHAPES, num_layers=1, seed=1, use_rslora=True),
    }
    expected = {None: greedy(hf, tokens, 12)}
    for name, path in folders.items():
        add_to(hf, path, scales[name], 1)
        expected[name] = greedy(hf, tokens, 12)
        add_to(hf, path, scales[name], -1)
    adapters = {name: load_adapter(path, weights, folder.config, tmp_path) for name, path in folders.items()}
    models = {name: LlamaModel(folder.config, adapter.weights) for name, adapter in adapters.items()}
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
