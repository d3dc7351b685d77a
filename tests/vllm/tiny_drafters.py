"""Models that draft tokens for the tiny Llama. A model of one layer drafts hardly anything that is right."""

import json
from collections.abc import Mapping
from pathlib import Path

import tiny_llama
import torch
from safetensors.torch import load_file, save_file
from tiny_llama import HIDDEN, NUM_HEADS, NUM_KV_HEADS, SPREAD


def make_half_right(folder: Path, *, seed: int) -> None:
    """A Llama like that of this seed, but for some noise in its head: about every second token is drafted right."""
    tiny_llama.make(folder, seed=seed)
    weights = load_file(folder / "model.safetensors")
    head = weights["lm_head.weight"]
    noise = torch.randn(head.shape, generator=torch.Generator().manual_seed(seed + 1))
    weights["lm_head.weight"] = (head.float() + 0.6 * SPREAD * noise).to(head.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def make_eagle(folder: Path, *, seed: int) -> None:
    """One layer over the Llama's last hidden state and the embedding of the token after it."""
    weights = _one_layer(seed)
    del weights["layers.0.input_layernorm.weight"]
    weights["fc.weight"] = _random((HIDDEN, 2 * HIDDEN), seed)
    _write_layer(folder, weights, {})


def make_eagle3(folder: Path, *, seed: int) -> None:
    """One layer over hidden states of three of the Llama's layers and the embedding of the token after them."""
    weights = {name.replace("layers.0.", "midlayer."): weight for name, weight in _one_layer(seed).items()}
    for name, heads in (("q", NUM_HEADS), ("k", NUM_KV_HEADS), ("v", NUM_KV_HEADS)):
        shape = (heads * tiny_llama.HEAD_DIM, 2 * HIDDEN)
        weights[f"midlayer.self_attn.{name}_proj.weight"] = _random(shape, seed)
    weights |= {
        name: torch.ones(HIDDEN, dtype=torch.bfloat16) for name in ("midlayer.hidden_norm.weight", "norm.weight")
    }
    weights["fc.weight"] = _random((HIDDEN, 3 * HIDDEN), seed)
    weights["lm_head.weight"] = _random((tiny_llama.VOCABULARY, HIDDEN), seed)
    _write_layer(
        folder,
        weights,
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": tiny_llama.VOCABULARY,
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        },
    )


def _one_layer(seed: int) -> dict[str, torch.Tensor]:
    all_layers = tiny_llama.make_weights(seed)
    prefix = "model."
    return {name.removeprefix(prefix): each for name, each in all_layers.items() if name.startswith("model.layers.0.")}


def _random(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return (SPREAD * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(torch.bfloat16)


def _write_layer(folder: Path, weights: dict[str, torch.Tensor], changes: Mapping[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = tiny_llama.configuration() | {"num_hidden_layers": 1} | changes
    (folder / "config.json").write_text(json.dumps(config))
    tiny_llama.write_tokenizer(folder)
