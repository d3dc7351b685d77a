"""Random weights, so that nothing has to be downloaded: times are those of any weights."""

import torch
from torch import Tensor

from kvtier_engine.model.model_config import ModelConfig
from kvtier_engine.model.weights import LayerWeights, LlamaWeights


def random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> LlamaWeights:
    """Random weights of a size that keeps activations near 1."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device).mul_(shape[-1] ** -0.5)

    hidden, wide = config.hidden_size, config.intermediate_size
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    ones = torch.ones(hidden, dtype=dtype, device=device)
    layers = tuple(
        LayerWeights(
            input_norm=ones,
            qkv=random((heads + 2 * kv_heads) * head_dim, hidden),
            attention_output=random(hidden, heads * head_dim),
            pre_mlp_norm=ones,
            gate_up=random(2 * wide, hidden),
            down=random(hidden, wide),
        )
        for _ in range(config.num_hidden_layers)
    )
    return LlamaWeights(random(config.vocab_size, hidden), layers, ones, random(config.vocab_size, hidden))
