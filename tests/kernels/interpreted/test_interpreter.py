"""The patched interpreter itself: what it gets wrong as it comes, every test of a kernel relies on."""

import threading

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from interpreter_rig import bfloat16_to_float32, float32_to_bfloat16


@triton.jit
def _round_kernel(source, target, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(target + index, tl.load(source + index).to(target.dtype.element_ty))


@triton.jit
def _dot_kernel(lhs, rhs, out, SIZE: tl.constexpr):
    row = tl.arange(0, SIZE)
    index = row[:, None] * SIZE + row[None, :]
    tl.store(out + index, tl.dot(tl.load(lhs + index), tl.load(rhs + index)))


@triton.jit
def _add_kernel(lhs, rhs, out):
    tl.store(out, tl.load(lhs) + tl.load(rhs))


@triton.jit
def _multiply_kernel(factor, out):
    tl.store(out, factor * factor)


@triton.jit
def _each_kernel(lhs, rhs, out, KIND: tl.constexpr):
    index = tl.arange(0, 4)
    left, right = tl.load(lhs + index), tl.load(rhs + index)
    if KIND == "add":
        result = left + right
    elif KIND == "sub":
        result = left - right
    else:
        result = left * right
    tl.store(out + index, result)


@triton.jit
def _fill_kernel(number, out, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(out + index, 1.0, mask=(index < SIZE) & ((number > 3) & (number < 9)))


def _float32_samples() -> torch.Tensor:
    """All kinds of float32: random bits, ties between two bfloat16 values, subnormals, infinities, NaN."""
    random = torch.randint(-(2**31), 2**31 - 1, (4000,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    ties = (random & ~0xFFFF) | 0x8000
    small = random & 0x007FFFFF
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.4e38]).view(torch.int32)
    every = torch.cat([random, ties, small, special])
    padding = torch.zeros(2 ** (every.numel() - 1).bit_length() - every.numel(), dtype=torch.int32)
    return torch.cat([every, padding]).view(torch.float32)


def test_casts_round_as_torch_does() -> None:
    values = _float32_samples()
    rounded = torch.empty(values.shape, dtype=torch.bfloat16)
    _round_kernel[(1,)](values, rounded, SIZE=values.numel())
    expected = values.bfloat16()
    assert torch.equal(rounded.isnan(), expected.isnan())
    assert torch.equal(rounded.view(torch.int16)[~rounded.isnan()], expected.view(torch.int16)[~expected.isnan()])
    widened = torch.empty(values.shape)
    _round_kernel[(1,)](rounded, widened, SIZE=values.numel())
    assert torch.equal(widened.nan_to_num(7.0), rounded.float().nan_to_num(7.0))


def test_float8_is_widened_as_torch_does() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    widened = torch.empty(256)
    _round_kernel[(1,)](values, widened, SIZE=256)
    assert torch.equal(widened.nan_to_num(7.0), values.float().nan_to_num(7.0))


def test_numpy_conversions_agree_with_each_other() -> None:
    every = np.arange(2**16, dtype=np.uint16)
    back = float32_to_bfloat16(bfloat16_to_float32(every))
    is_nan = np.isnan(bfloat16_to_float32(every))
    assert np.array_equal(back[~is_nan], every[~is_nan])
    assert np.isnan(bfloat16_to_float32(back[is_nan])).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_dot_multiplies_values_and_not_bits(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    # Small integers: every sum is exact, whatever its order.
    lhs, rhs = (torch.randint(-8, 9, (16, 16), generator=generator).to(dtype) for _ in range(2))
    out = torch.empty(16, 16)
    _dot_kernel[(1,)](lhs, rhs, out, SIZE=16)
    assert torch.equal(out, lhs.float() @ rhs.float())


def test_bfloat16_arithmetic_is_refused() -> None:
    one = torch.ones(1, dtype=torch.bfloat16)
    with pytest.raises(InterpreterError, match="cast to float32 first"):
        _add_kernel[(1,)](one, one, torch.empty(1))


def test_integers_that_wrap_raise() -> None:
    out = torch.empty(1, dtype=torch.int64)
    _multiply_kernel[(1,)](40_000, out)
    assert out.item() == 40_000**2
    with pytest.raises(InterpreterError, match="int32 overflow"):
        _multiply_kernel[(1,)](50_000, out)


# The operands of one of four elements: with the first pair it fits as well as can be, with the second it wraps.
AT_THE_LIMITS = [
    ("add", torch.int32, (2**31 - 2, 1), (2**31 - 1, 1)),
    ("add", torch.int8, (-127, -1), (-128, -1)),
    ("add", torch.uint8, (254, 1), (255, 1)),
    ("sub", torch.int32, (-(2**31) + 1, 1), (-(2**31), 1)),
    ("sub", torch.uint8, (1, 1), (0, 1)),
    ("mul", torch.int32, (2**30, -2), (2**30, 2)),
]


@pytest.mark.parametrize(("kind", "dtype", "fitting", "wrapping"), AT_THE_LIMITS)
def test_an_element_that_wraps_raises(
    kind: str, dtype: torch.dtype, fitting: tuple[int, int], wrapping: tuple[int, int]
) -> None:
    lhs, rhs = torch.ones((2, 4), dtype=dtype)
    lhs[2], rhs[2] = fitting
    out = torch.zeros_like(lhs)
    _each_kernel[(1,)](lhs, rhs, out, KIND=kind)
    assert torch.equal(out, getattr(torch, kind)(lhs, rhs))
    lhs[2], rhs[2] = wrapping
    with pytest.raises(InterpreterError, match=f"int{8 * dtype.itemsize} overflow detected for operation {kind}"):
        _each_kernel[(1,)](lhs, rhs, out, KIND=kind)


def test_comparisons_of_scalars_are_booleans() -> None:
    for number in (3, 4):
        out = torch.zeros(8)
        _fill_kernel[(1,)](number, out, SIZE=8)
        assert torch.equal(out, torch.full((8,), float(number == 4)))


def test_threads_may_launch_at_a_time() -> None:
    values = _float32_samples()
    expected = values.bfloat16().nan_to_num(7.0)
    failures: list[int] = []

    def launch(number: int) -> None:
        for _ in range(10):
            out = torch.zeros(values.shape, dtype=torch.bfloat16)
            _round_kernel[(1,)](values, out, SIZE=values.numel())
            if not torch.equal(out.nan_to_num(7.0), expected):
                failures.append(number)

    threads = [threading.Thread(target=launch, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
