"""The part of `selfcheck` for products and norms whose bits depend on a row alone; attention's is beside others."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from kvtier_kernels.selfcheck.copies import Check

LINEAR_SIZES = ((4096, 6144), (576, 960), (100, 70))
"""Inputs and outputs."""
NORM_WIDTHS = (4096, 576, 80)
NUM_ROWS = 300
_SOME_ROWS = (slice(0, 1), slice(5, 22), slice(100, 230))
_UNIT_FLOAT32 = 2.0**-24


def invariance_checks(device: torch.device, dtypes: Sequence[torch.dtype]) -> Iterator[tuple[str, Check]]:
    """Name and check of each: `selfcheck` runs them."""
    for dtype, (num_inputs, num_outputs) in itertools.product(dtypes, LINEAR_SIZES):
        name = f"invariant_linear {_name(dtype)} {num_inputs} to {num_outputs}"
        yield name, partial(_check_linear, dtype, num_inputs, num_outputs, device)
    for dtype, width in itertools.product(dtypes, NORM_WIDTHS):
        yield f"invariant_rms_norm {_name(dtype)} of {width}", partial(_check_norm, dtype, width, device)


def _check_linear(dtype: torch.dtype, num_inputs: int, num_outputs: int, device: torch.device) -> str:
    """Each sum has `num_inputs` products, which tensor cores may cut instead of rounding, and is rounded to `dtype`."""
    from kvtier_kernels.invariant.linear import invariant_linear

    rows, weight = _random((NUM_ROWS, num_inputs), dtype), _random((num_outputs, num_inputs), dtype)
    there = weight.to(device)
    expected = torch.matmul(rows.double(), weight.double().t())
    largest_sum = torch.matmul(rows.double().abs(), weight.double().abs().t()).max().item()
    bound = 2 * (num_inputs + 2) * _UNIT_FLOAT32 * largest_sum + _rounding(expected, dtype)
    return _wrong(lambda some: invariant_linear(some, there), rows.to(device), expected, bound)


def _check_norm(dtype: torch.dtype, width: int, device: torch.device) -> str:
    """The sum has `width` products; the square root and two factors are rounded, and twice the result to `dtype`."""
    from kvtier_kernels.invariant.rms_norm import invariant_rms_norm

    rows, weight = _random((NUM_ROWS, width), dtype), _random((width,), dtype)
    there, wide = weight.to(device), rows.double()
    expected = wide * (wide.square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    bound = (width + 16) * _UNIT_FLOAT32 * expected.abs().max().item() + 2.1 * _rounding(expected, dtype)
    return _wrong(lambda some: invariant_rms_norm(some, there, 1e-5), rows.to(device), expected, bound)


def _wrong(compute: Callable[[Tensor], Tensor], rows: Tensor, expected: Tensor, bound: float) -> str:
    whole = compute(rows)
    worst = (whole.double().cpu() - expected).abs().max().item()
    if not worst <= bound:  # a NaN is not
        return f"output is off by {worst:.3g}, allowed are {bound:.3g}"
    for some in _SOME_ROWS:
        if not torch.equal(compute(rows[some]), whole[some]):
            return f"rows {some.start} to {some.stop} alone have other bits than among {NUM_ROWS}"
    return ""


def _rounding(expected: Tensor, dtype: torch.dtype) -> float:
    limits = torch.finfo(dtype)
    return limits.eps / 2 * expected.abs().max().item() + limits.smallest_normal


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).to(dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
