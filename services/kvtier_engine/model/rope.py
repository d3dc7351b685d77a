"""Rotary position embedding, Hugging Face's convention: element i turns with element i + head_dim / 2."""

import math

import torch
from torch import Tensor

from kvtier_engine.model.model_config import ModelConfig, RopeScaling


class RopeTable:
    """Cosines and sines of all positions. Immutable; `max_position_embeddings * head_dim * 2` elements."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, theta: float | None = None) -> None:
        """:param theta: in place of the configuration's, and without its scaling."""
        frequencies = _frequencies(config) if theta is None else _plain_frequencies(config, theta)
        angles = torch.outer(torch.arange(config.max_position_embeddings, dtype=torch.float32), frequencies)
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat((cos, cos), dim=-1).to(dtype).unsqueeze(1)
        # The sign of rotate_half(x) = (-x2, x1) lives in the table.
        self._sin = torch.cat((-sin, sin), dim=-1).to(dtype).unsqueeze(1)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What `rotate` takes: two `[num_tokens, 1, head_dim]`. `positions`: int64 `[num_tokens]`."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


def rotate(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A fresh `[num_tokens, num_heads, head_dim]`, rotated."""
    half = rows.size(-1) // 2
    swapped = torch.cat((rows[..., half:], rows[..., :half]), dim=-1)
    return (rows * cos).addcmul_(swapped, sin)


def _plain_frequencies(config: ModelConfig, theta: float) -> Tensor:
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    return 1.0 / theta**exponents


def _frequencies(config: ModelConfig) -> Tensor:
    frequencies = _plain_frequencies(config, config.rope_theta)
    return frequencies if config.rope_scaling is None else _stretch(frequencies, config.rope_scaling)


def _stretch(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: slow frequencies divided by `factor`, fast ones kept, a linear blend between (transformers 5.23,
    `modeling_rope_utils._compute_llama3_parameters`)."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies
