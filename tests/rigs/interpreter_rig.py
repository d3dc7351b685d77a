"""Makes Triton's interpreter compute as a GPU would, or stop.

As it comes, the interpreter (triton 3.9) adds and multiplies the bits of bfloat16 as if they were integers, cuts
float32 to bfloat16 where a GPU rounds to nearest even, wraps integers without a word, takes the result of comparing
two integers for an integer, knows no NaN in float8, and breaks when two threads launch at a time.
"""

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

import interpreter_types

Array = npt.NDArray[Any]
_ON_INTEGERS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def install() -> None:
    """For the whole process; once."""
    InterpreterBuilder.cast_impl = _exact_cast(InterpreterBuilder.cast_impl)
    InterpreterBuilder.create_fp_to_fp = _exact_float8(InterpreterBuilder.create_fp_to_fp)
    InterpreterBuilder.binary_op = _honest_types(InterpreterBuilder.binary_op)
    InterpreterBuilder.create_dot = _dot_in_float32
    GridExecutor.__call__ = _one_at_a_time(GridExecutor.__call__)
    TritonSemantic.binary_op_sanitize_overflow_impl = _refuse_overflow
    _replace_language_once()
    interpreter_types.install()


def bfloat16_to_float32(bits: Array) -> Array:
    """`bits`: uint16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(values: Array) -> Array:
    """uint16, rounded to nearest even as on a GPU. A NaN stays one."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF).astype(np.uint32)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def float8_to_float32(bits: Array) -> Array:
    """`bits`: uint8, those of float8_e4m3fn."""
    return np.asarray(torch.from_numpy(np.array(bits)).view(torch.float8_e4m3fn).float())


def _exact_cast(original: Any) -> Any:
    def cast_impl(self: Any, source: TensorHandle, target_type: Any) -> TensorHandle:
        kinds = (source.dtype.scalar, target_type.scalar)
        if kinds == (tl.bfloat16, tl.float32):
            return TensorHandle(bfloat16_to_float32(source.data), tl.float32)
        if kinds == (tl.float32, tl.bfloat16):
            return TensorHandle(float32_to_bfloat16(source.data), tl.bfloat16)
        if tl.bfloat16 in kinds and kinds[0] != kinds[1]:
            raise NotImplementedError(f"cast from {kinds[0]} to {kinds[1]}: go through float32")
        return original(self, source, target_type)

    return cast_impl


def _exact_float8(original: Any) -> Any:
    def create_fp_to_fp(self: Any, source: TensorHandle, target_type: Any, rounding: Any) -> TensorHandle:
        if (source.dtype.scalar, target_type.scalar) == (tl.float8e4nv, tl.float32):
            return TensorHandle(float8_to_float32(source.data), tl.float32)
        return original(self, source, target_type, rounding)

    return create_fp_to_fp


def _honest_types(original: Any) -> Any:
    """Refuses arithmetic on the bits of bfloat16, and calls the result of a comparison a boolean."""

    def binary_op(self: Any, lhs: TensorHandle, rhs: TensorHandle, operation: Any) -> TensorHandle:
        if tl.bfloat16 in (lhs.dtype.scalar, rhs.dtype.scalar):
            raise NotImplementedError(f"{operation.__name__} of bfloat16: cast to float32 first")
        result: TensorHandle = original(self, lhs, rhs, operation)
        return TensorHandle(result.data, tl.int1) if result.data.dtype == np.bool_ else result

    return binary_op


def _dot_in_float32(
    self: Any, lhs: TensorHandle, rhs: TensorHandle, addend: TensorHandle, _precision: Any, _max_imprecise: Any
) -> TensorHandle:
    """Products of bfloat16 and float16 are exact in float32, and tensor cores sum in float32, all rows in one order. In
    numpy's products of matrices the order may depend on a row's place, so there is a product for each row."""
    wide = [
        bfloat16_to_float32(x.data) if x.dtype.scalar == tl.bfloat16 else x.data.astype(np.float32) for x in (lhs, rhs)
    ]
    product = np.matmul(wide[0][..., None, :], wide[1][..., None, :, :])[..., 0, :]
    return TensorHandle(product + addend.data, addend.dtype.scalar)


def _refuse_overflow(_self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
    """What Triton's own check does in debug builds, in one operation of numpy instead of seven of Triton's."""
    scalar = lhs.type.scalar
    if scalar.int_bitwidth >= 64:
        return
    exact = _ON_INTEGERS[operation.__name__](lhs.handle.data, rhs.handle.data, dtype=np.int64)
    if exact.min() < scalar.get_int_min_value() or exact.max() > scalar.get_int_max_value():
        raise OverflowError(f"int{scalar.int_bitwidth} overflow detected for operation {operation.__name__}")


def _replace_language_once() -> None:
    """Puts what is interpreted in the place of `tl`'s functions for good.

    The interpreter does so at every launch and, in kernels, at every call of another function, which takes longer than
    all arithmetic.
    """
    interpreter._patch_lang(lambda: (tl, core))  # it looks for both modules in the function's globals
    interpreter._patch_lang = lambda _fn: interpreter._LangPatchScope()


def _one_at_a_time(original: Any) -> Any:
    lock = threading.RLock()

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        with lock:
            original(self, *args, **kwargs)

    return call
