"""Models to measure with: as large as Llama 3 8B and random, so that nothing has to be downloaded."""

from dataclasses import replace

from kvtier_bench.gpu.measuring.setting import Setting
from kvtier_bench.measuring.random_model import random_weights
from kvtier_engine.model.llama import LlamaModel
from kvtier_engine.model.model_config import ModelConfig
from kvtier_engine.model.weights import LlamaWeights


def model_of(setting: Setting) -> tuple[LlamaModel, ModelConfig]:
    """Makes a model on the setting's device, in its dtype, which is tiny where the setting is."""
    weights, config = weights_of(setting)
    return LlamaModel(config, weights), config


def weights_of(setting: Setting) -> tuple[LlamaWeights, ModelConfig]:
    """The weights of `model_of`."""
    config = tiny_llama() if setting.tiny else llama_8b()
    return random_weights(config, setting.dtype, setting.device), config


def llama_8b() -> ModelConfig:
    """The geometry of Llama 3 8B."""
    return ModelConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        rope_scaling=None,
        tie_word_embeddings=False,
        eos_token_ids=(),
    )


def tiny_llama() -> ModelConfig:
    """Enough to run."""
    return replace(
        llama_8b(),
        vocab_size=61,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=4096,
    )
