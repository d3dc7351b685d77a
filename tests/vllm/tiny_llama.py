"""A Llama of 2 million random parameters: it says nothing, but the same to the same prompt.

In float32 the two likeliest tokens never come close to each other; in bfloat16 they tie, and either may be said.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 6, 2, 32
HIDDEN, INTERMEDIATE, VOCABULARY = NUM_HEADS * HEAD_DIM, 512, 2048
SPREAD = 0.3
"""The standard deviation of weights. It is large, so that logits lie far apart, and one wrong block of KV changes what
is said."""
SPECIAL = ["<s>", "</s>", "<unk>"]


def make(folder: Path, *, seed: int, window: int | None = None, kv_scale: float | None = None) -> None:
    """Writes configuration, weights and tokenizer. Seeds differ in nothing but the values of the weights.

    :param window: every second layer sees so many tokens only, which makes it a hybrid model.
    :param kv_scale: what keys are divided by before they become fp8, and values by twice as much.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_file(make_weights(seed) | _scales(kv_scale), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(configuration() | _sliding(window) | _quantisation(kv_scale)))
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer whose words are numbers, for models of `VOCABULARY`."""
    words = SPECIAL + [f"w{number}" for number in range(VOCABULARY - len(SPECIAL))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | {"unk_token": "<unk>"}))


def make_adapter(folder: Path, *, seed: int, alpha: int = 8) -> None:
    """A LoRA adapter of rank 4 for the attention of that model."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(NUM_LAYERS):
        for name, width in (("q_proj", HIDDEN), ("v_proj", NUM_KV_HEADS * HEAD_DIM)):
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{module}.lora_A.weight"] = SPREAD * torch.randn(4, HIDDEN, generator=generator)
            weights[f"{module}.lora_B.weight"] = SPREAD * torch.randn(width, 4, generator=generator)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": alpha, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(folder)}))


def make_weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(NUM_LAYERS):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        shapes[f"{attention}.q_proj.weight"] = (HIDDEN, HIDDEN)
        shapes[f"{attention}.k_proj.weight"] = (NUM_KV_HEADS * HEAD_DIM, HIDDEN)
        shapes[f"{attention}.v_proj.weight"] = (NUM_KV_HEADS * HEAD_DIM, HIDDEN)
        shapes[f"{attention}.o_proj.weight"] = (HIDDEN, HIDDEN)
        shapes[f"{mlp}.gate_proj.weight"] = (INTERMEDIATE, HIDDEN)
        shapes[f"{mlp}.up_proj.weight"] = (INTERMEDIATE, HIDDEN)
        shapes[f"{mlp}.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
    shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    weights = {name: SPREAD * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for layer in range(NUM_LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = torch.ones(HIDDEN)
    weights["model.norm.weight"] = torch.ones(HIDDEN)
    return {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}


def _scales(kv_scale: float | None) -> dict[str, torch.Tensor]:
    if kv_scale is None:
        return {}
    attention = [f"model.layers.{layer}.self_attn" for layer in range(NUM_LAYERS)]
    keys = {f"{name}.k_scale": torch.tensor([kv_scale]) for name in attention}
    return keys | {f"{name}.v_scale": torch.tensor([2 * kv_scale]) for name in attention}


def _quantisation(kv_scale: float | None) -> dict[str, object]:
    """The quantisation settings of a model whose KV alone is quantised."""
    if kv_scale is None:
        return {}
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    config = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "kv_cache_scheme": scheme}
    return {"quantization_config": config}


def _sliding(window: int | None) -> dict[str, object]:
    if window is None:
        return {}
    kinds = ["full_attention", "sliding_attention"] * (NUM_LAYERS // 2)
    return {"layer_types": kinds, "sliding_window": window}


def configuration() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
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
        "mlp_bias": False,
    }
