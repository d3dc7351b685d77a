"""What some models do to the scores of attention, beside scaling and masking them."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

_MAX_SOFT_CAP = 10_000
"""The largest soft cap. Kernels would be off by more than 0.015 beyond it: they take numbers near 1 from 1, and
multiply what is left."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """What a model does to a score after its product with `scale`, in the order of the fields. None: nothing."""

    soft_cap: float | None = None
    """A score becomes `soft_cap * tanh(score / soft_cap)` (Gemma 2, 2024), and stays below this number. Positive, up
    to 10,000: in kernels a score is off by up to 1.5e-6 times as much."""
    alibi_slopes: Tensor | None = None
    """float32 `[num_heads]`: a key so many tokens before the query loses as many times the head's slope (ALiBi, Press
    et al., 2022)."""
    sinks: Tensor | None = None
    """float32 `[num_heads]`: a score of each head that takes its share of the weights and has no value (gpt-oss, 2025;
    after StreamingLLM, Xiao et al., 2024). Log-sum-exps include it. -inf for a head without one."""

    @property
    def changes_scores(self) -> bool:
        return self.soft_cap is not None or self.alibi_slopes is not None

    def without_sinks(self) -> "Scoring":
        """Returns the scoring of one of several runs of keys: a sink counts once, when their states are merged."""
        return self if self.sinks is None else replace(self, sinks=None)

    def to(self, device: torch.device) -> "Scoring":
        slopes, sinks = (None if of is None else of.to(device) for of in (self.alibi_slopes, self.sinks))
        return Scoring(self.soft_cap, slopes, sinks)

    def check(self, query: Tensor) -> None:
        """It fits queries `[num_tokens, num_heads, head_dim]`; raises `ValueError` that names what does not."""
        if self.soft_cap is not None and not 0 < self.soft_cap <= _MAX_SOFT_CAP:
            raise ValueError(f"soft_cap is {self.soft_cap}: needs to be positive, at most {_MAX_SOFT_CAP:,}, or None")
        for name, per_head in (("alibi_slopes", self.alibi_slopes), ("sinks", self.sinks)):
            if per_head is None:
                continue
            if per_head.shape != query.shape[1:2] or per_head.dtype != torch.float32 or not per_head.is_contiguous():
                raise ValueError(
                    f"{name} of shape {list(per_head.shape)}, {per_head.dtype}: "
                    f"needs contiguous float32 [{query.size(1)}], one for each query head"
                )
            if per_head.device != query.device:
                raise ValueError(f"{name} is on {per_head.device}, query on {query.device}")


PLAIN = Scoring()
