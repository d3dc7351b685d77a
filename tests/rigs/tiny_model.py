"""Random models of two and three layers, whose answers depend on every token before them, and prompts for them."""

from dataclasses import replace

import torch

from kvtier_engine.model.llama import LlamaModel
from kvtier_engine.model.model_config import ModelConfig
from kvtier_engine.model.weights import LayerWeights, LlamaWeights

VOCABULARY = 61
CONFIG = ModelConfig(
    vocab_size=VOCABULARY,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    tie_word_embeddings=False,
    eos_token_ids=(),
)
WINDOWED_CONFIG = replace(CONFIG, num_hidden_layers=3, sliding_window=10, windowed_layers=(True, False, True))
"""Two of three layers see ten tokens: blocks are of one layer, and a token has three."""


def tiny_model(seed: int = 3, config: ModelConfig = CONFIG) -> LlamaModel:
    """Random float32 weights. Answers depend on every token before them."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    hidden, heads, kv_heads = CONFIG.hidden_size, CONFIG.num_attention_heads, CONFIG.num_key_value_heads
    layer = [
        LayerWeights(
            input_norm=torch.ones(hidden),
            qkv=2 * random((heads + 2 * kv_heads) * CONFIG.head_dim, hidden),
            attention_output=2 * random(hidden, heads * CONFIG.head_dim),
            pre_mlp_norm=torch.ones(hidden),
            gate_up=random(2 * CONFIG.intermediate_size, hidden),
            down=random(hidden, CONFIG.intermediate_size),
        )
        for _ in range(config.num_hidden_layers)
    ]
    embedding, lm_head = random(VOCABULARY, hidden) * 4, random(VOCABULARY, hidden) * 4
    return LlamaModel(config, LlamaWeights(embedding, tuple(layer), torch.ones(hidden), lm_head))


MODEL = tiny_model()
WINDOWED_MODEL = tiny_model(config=WINDOWED_CONFIG)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCABULARY, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
