"""Products and norms by Triton kernels whose bits do not depend on how many tokens there are."""

from torch import Tensor

from kvtier_engine.model.gates import opened
from kvtier_kernels.invariant.linear import invariant_linear
from kvtier_kernels.invariant.rms_norm import invariant_rms_norm


class TritonProducts:
    """`Products` on CUDA. What stands between the kernels goes element by element, each by the same instructions."""

    def __init__(self, *, gelu: bool = False) -> None:
        """:param gelu: as of `PlainProducts`."""
        self._gelu = gelu

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = invariant_linear(rows, weight)
        return out if bias is None else out.add_(bias)

    def gated(self, rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = invariant_linear(rows, gate_up).chunk(2, dim=-1)
        return invariant_linear(opened(gate, gelu=self._gelu).mul_(up), down)

    def norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        return invariant_rms_norm(rows, weight, eps)
