"""Comparisons that come before a figure: of what is wrong, no time is reported."""

import torch
from torch import Tensor

from kvtier.errors import KvtierError

_MOST_RELATIVE_DIFFERENCE = {torch.bfloat16: 0.02, torch.float32: 1e-4}
"""The most that two ways to compute a result may differ by, as a share of its largest number, by dtype.

This is several times what rounding makes.
"""
_MOST_RELATIVE_DIFFERENCE_OF_LOGITS = {torch.bfloat16: 0.1}
"""The most that two ways to compute logits may differ by, as a share of the largest number, by dtype. Products and sums
may be split otherwise, and are then rounded otherwise layer after layer."""
_MOST_BYTES_AT_ONCE = 256 << 20


class WrongResultError(KvtierError):
    """What is measured does not do what it should. The part ends with a failed check."""


def require_equal(what: str, got: Tensor, expected: Tensor) -> None:
    """Requires tensors that are equal bit for bit; they are compared where `got` is.

    :raises WrongResultError: a byte differs.
    """
    mine, theirs = _bits(got), _bits(_moved(expected, got.device))
    if mine.shape != theirs.shape:
        raise WrongResultError(f"{what}: {list(mine.shape)} instead of {list(theirs.shape)} bytes")
    if torch.equal(mine, theirs):
        return
    rows = (mine != theirs).reshape(len(mine), -1).any(1).nonzero().flatten()
    raise WrongResultError(f"{what}: {len(rows)} of {len(mine)} rows differ, the first is row {int(rows[0])}")


def difference(got: Tensor, expected: Tensor) -> float:
    """The largest of any number, NaN where there is one."""
    return float((got.float() - expected.float()).abs().max())


def require_close(what: str, got: Tensor, expected: Tensor, *, most: float | None = None) -> float:
    """`difference`, which is no more than rounding makes.

    :param most: the share of the largest expected number. None: what computing in the dtype of `got` makes of it.

    :raises WrongResultError: it is more, or there is a NaN.
    """
    worst, largest = difference(got, expected), float(expected.float().abs().max())
    if not worst <= (most or _MOST_RELATIVE_DIFFERENCE[got.dtype]) * largest:  # NaN is not
        raise WrongResultError(f"{what}: off by {worst:.3g}, the largest number is {largest:.3g}")
    return worst


def require_close_logits(what: str, got: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """`require_close` for logits of the same tokens by launches that split sums otherwise, or by other libraries.

    :param dtype: what the model computes in.
    :raises WrongResultError: they differ by more than that makes, or there is a NaN.
    """
    return require_close(what, got.to(dtype), expected, most=_MOST_RELATIVE_DIFFERENCE_OF_LOGITS.get(dtype))


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device. CUDA refuses to copy from memory that was pinned by several calls at once, so memory of
    the host is copied there before, some rows at a time."""
    if tensor.device == device or not tensor.dim():
        return tensor.to(device)
    moved = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    rows = max(1, _MOST_BYTES_AT_ONCE * len(tensor) // max(1, tensor.nbytes))
    for start in range(0, len(tensor), rows):
        moved[start : start + rows] = tensor[start : start + rows].clone()
    return moved


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
