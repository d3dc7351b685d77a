"""A DeepSeek of 3 million random parameters, with latent attention, a layer that drafts tokens, and without experts."""

import json
from pathlib import Path
from typing import Any

import tiny_llama
import torch
from safetensors.torch import save_file
from tiny_llama import SPREAD, VOCABULARY

NUM_LAYERS, NUM_HEADS, HIDDEN, INTERMEDIATE = 3, 4, 128, 256
LATENT, ROPE = 512, 64
"""The only sizes that vLLM's kernel on the CPU has been compiled for."""
NOPE, VALUE = 32, 32
BLOCK = 16
"""Tokens of a block: that kernel has no other."""
OPTIONS: dict[str, Any] = {
    "block_size": BLOCK,
    "attention_backend": "CPU_MLA",
    # What is left of a prompt after a hit is computed in another way than all of it.
    "dtype": "float32",
    # vLLM 0.32's own kernel for it takes the heads of these queries to lie where they do not.
    "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
}
"""Arguments of engines that run it."""
_DRAFTING_NORMS = ("enorm", "hnorm", "shared_head.norm")


def make(folder: Path, *, seed: int) -> None:
    """Writes configuration, weights and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = _weights(seed)
    save_file(weights | _drafting(weights, seed), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_configuration()))
    tiny_llama.write_tokenizer(folder)


def _weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(NUM_LAYERS + 1):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        shapes[f"{attention}.q_proj.weight"] = (NUM_HEADS * (NOPE + ROPE), HIDDEN)
        shapes[f"{attention}.kv_a_proj_with_mqa.weight"] = (LATENT + ROPE, HIDDEN)
        shapes[f"{attention}.kv_b_proj.weight"] = (NUM_HEADS * (NOPE + VALUE), LATENT)
        shapes[f"{attention}.o_proj.weight"] = (HIDDEN, NUM_HEADS * VALUE)
        shapes[f"{mlp}.gate_proj.weight"] = (INTERMEDIATE, HIDDEN)
        shapes[f"{mlp}.up_proj.weight"] = (INTERMEDIATE, HIDDEN)
        shapes[f"{mlp}.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
    shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    weights = {name: SPREAD * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for layer in range(NUM_LAYERS + 1):
        weights[f"model.layers.{layer}.self_attn.kv_a_layernorm.weight"] = torch.ones(LATENT)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = torch.ones(HIDDEN)
    weights["model.norm.weight"] = torch.ones(HIDDEN)
    return {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}


def _drafting(weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """What the last layer, which drafts, has more than others."""
    layer = f"model.layers.{NUM_LAYERS}"
    names = {f"{layer}.{norm}.weight": torch.ones(HIDDEN).to(torch.bfloat16) for norm in _DRAFTING_NORMS}
    mixing = SPREAD * torch.randn((HIDDEN, 2 * HIDDEN), generator=torch.Generator().manual_seed(seed))
    return names | {
        f"{layer}.eh_proj.weight": mixing.to(torch.bfloat16),
        f"{layer}.embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        f"{layer}.shared_head.head.weight": weights["lm_head.weight"].clone(),
    }


def _configuration() -> dict[str, object]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "moe_intermediate_size": INTERMEDIATE,
        "num_hidden_layers": NUM_LAYERS,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": NUM_LAYERS + 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_HEADS,
        "q_lora_rank": None,
        "kv_lora_rank": LATENT,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "attention_bias": False,
    }
