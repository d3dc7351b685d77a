"""A DeepSeek of 3 million random parameters, with latent attention and without experts."""

import json
from pathlib import Path

import tiny_llama
import torch
from safetensors.torch import save_file
from tiny_llama import SPREAD, VOCABULARY

NUM_LAYERS, NUM_HEADS, HIDDEN, INTERMEDIATE = 3, 4, 128, 256
LATENT, ROPE = 512, 64
"""The only sizes that vLLM's kernel on the CPU has been compiled for."""
NOPE, VALUE = 32, 32


def make(folder: Path, *, seed: int) -> None:
    """Writes configuration, weights and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_weights(seed), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_configuration()))
    tiny_llama.write_tokenizer(folder)


def _weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(NUM_LAYERS):
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
    for layer in range(NUM_LAYERS):
        weights[f"model.layers.{layer}.self_attn.kv_a_layernorm.weight"] = torch.ones(LATENT)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = torch.ones(HIDDEN)
    weights["model.norm.weight"] = torch.ones(HIDDEN)
    return {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}


def _configuration() -> dict[str, object]:
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "moe_intermediate_size": INTERMEDIATE,
        "num_hidden_layers": NUM_LAYERS,
        "first_k_dense_replace": NUM_LAYERS,
        "n_routed_experts": 4,
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
