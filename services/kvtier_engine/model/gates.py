"""The function that opens the gate of an MLP: as torch computes it, or with bits that do not depend on the shape."""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor


def opened(gate: Tensor, *, gelu: bool) -> Tensor:
    """The gate through SiLU, or through GELU by its approximation with tanh; fresh."""
    return F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)


def invariantly_opened(gate: Tensor, *, gelu: bool) -> Tensor:
    """`opened`, with the same bits wherever an element stands; fresh, on the CPU.

    Vector instructions take most elements, plain ones the last few of a run, and where runs end depends on the shape.
    SiLU in bfloat16 has the same bits in both. Elements of other functions in 16 bits are looked up: there are 65,536
    of them, and that takes two thirds of the time of GELU. One element in 25 of SiLU in float32 differs, and one in
    some ten thousand millions of what is computed in float64 and then rounded to that.
    """
    if gate.dtype == torch.bfloat16 and not gelu:
        return F.silu(gate)
    if gate.itemsize == 2:
        numbers = gate.view(torch.int16).int().bitwise_and_(0xFFFF)
        return _all_opened(gate.dtype, gelu=gelu).index_select(0, numbers.flatten()).view(gate.shape)
    return _by_float64(gate, gelu=gelu)


@functools.cache
def _all_opened(dtype: torch.dtype, *, gelu: bool) -> Tensor:
    """`[65536]`: what becomes of each element of a dtype of 16 bits, by its bits."""
    with torch.inference_mode(False):
        every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
        return _by_float64(every, gelu=gelu)


def _by_float64(gate: Tensor, *, gelu: bool) -> Tensor:
    """`opened`, computed in float64 and rounded once.

    GELU by tanh would differ even so, where 1 + tanh(u) cancels; 2 sigmoid(2 u) is the same and does not.
    """
    wide = gate.double()
    if not gelu:
        return F.silu(wide).to(gate.dtype)
    twice_u = wide.square().mul_(0.044715).add_(1).mul_(wide).mul_(math.sqrt(8 / math.pi))
    return wide.mul_(twice_u.sigmoid_()).to(gate.dtype)
