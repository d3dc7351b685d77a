"""Model folders: which are refused, in words that name folder and remedy, and the digest of what is in them."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine_model_rig import small_folder
from kvtier.config import parse_config
from kvtier.errors import ConfigError
from kvtier_engine import assemble
from kvtier_engine.assemble import assembled_engine
from kvtier_engine.model.devices import weights_on
from kvtier_engine.model.model_folder import open_model
from kvtier_engine.model.weights import LlamaWeights, load_weights


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
def test_broken_folders_name_folder_and_remedy(tmp_path: Path, damage: Callable[[Path], object], words: str) -> None:
    path, _ = small_folder(tmp_path)
    damage(path)

    with pytest.raises(ConfigError, match=words) as caught:
        _load(path, tmp_path / "cache")
    assert str(path) in str(caught.value)


def test_folder_with_only_a_gguf_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"to use the GGUF file in it, give its path: .*model\.gguf"):
        open_model(tmp_path, tmp_path)


def test_config_without_quantisation_may_say_so(tmp_path: Path) -> None:
    path, _ = small_folder(tmp_path)
    _change_config(path, quantization_config=None)
    _load(path, tmp_path / "cache")


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
def test_other_qwens_are_refused(tmp_path: Path, family: str, config: dict[str, Any], words: str) -> None:
    path, _ = small_folder(tmp_path, family, head_dim=12)
    _change_config(path, **config)
    with pytest.raises(ConfigError, match=words) as caught:
        _load(path, tmp_path / "cache")
    assert str(path) in str(caught.value)


def test_weights_that_do_not_fit_the_device_name_the_remedy() -> None:
    class Full:
        def to(self, device: torch.device) -> Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

    full: Any = Full()
    with pytest.raises(ConfigError, match=r"engine\.kv_bytes: leaves no room on cuda:0 for the model's weights; lower"):
        weights_on(LlamaWeights(full, (), full, full), torch.device("cuda", 0))


def test_weights_digest_is_of_the_content(tmp_path: Path) -> None:
    path, _ = small_folder(tmp_path)
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


def test_a_missing_secret_is_told_before_the_model_is_looked_at(tmp_path: Path) -> None:
    """Loading one takes minutes."""
    tables = {"engine": {"model": "nowhere"}, "tenant": "red", "tenants": {"red": {"secret": "env:NOT_EXPORTED"}}}
    config = parse_config(tables, source="kvtier.toml", folder=tmp_path, environ={})
    with pytest.raises(ConfigError, match="NOT_EXPORTED"), assembled_engine(config):
        pass


@pytest.mark.parametrize("key", ["host.capacity_bytes", "engine.kv_bytes"])
def test_memory_for_too_few_blocks_is_refused_before_weights_are_read(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = small_folder(tmp_path)
    monkeypatch.setattr(assemble, "load_weights", None)
    tables: dict[str, Any] = {
        "engine": {"model": str(folder), "device": "cpu"},
        "tenant": "red",
        "tenants": {"red": {"secret": "env:SECRET"}},
    }
    table, name = key.split(".")
    tables.setdefault(table, {})[name] = 4096 if table == "host" else 16
    config = parse_config(tables, source="kvtier.toml", folder=tmp_path, environ={"SECRET": "s" * 64})
    with pytest.raises(ConfigError, match=f"^{key}: "), assembled_engine(config):
        pass
