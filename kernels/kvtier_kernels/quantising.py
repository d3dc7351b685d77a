"""Float32 to a byte and back inside of a kernel, bit for bit as `kvtier_kernels.quantise_reference` does.

e4m3 is made by integer arithmetic: chips before sm_89 cannot convert to it, and the others would differ from the
interpreter.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl

_INFINITY = tl.constexpr(0x7F800000)
_LARGEST_E4M3 = tl.constexpr(0x43E00000)
_LEAST_NORMAL_E4M3 = tl.constexpr(0x3C800000)
"""Bits of float32: infinity, 448, 2**-6."""
_BIAS = tl.constexpr(120)
"""The difference between the exponent biases of float32 and e4m3."""


@triton.jit
def vector_scales(values, LARGEST: tl.constexpr):
    """float32 `[VECTORS]` of float32 `[VECTORS, COLUMNS]`, as `kvtier_kernels.records` says."""
    # Magnitudes are in the order of their bits, infinity and NaN above all numbers.
    peak = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    scale = tl.div_rn(peak.to(tl.float32, bitcast=True), tl.full(peak.shape, LARGEST, tl.float32))
    scale = tl.where(peak < _INFINITY, scale, float("inf"))
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def quantise(values, scales, FP8: tl.constexpr):
    """int8 `[VECTORS, COLUMNS]`: the stored values, or the codes of e4m3."""
    scale = tl.broadcast_to(scales[:, None], values.shape)
    ratio = tl.where(scale < float("inf"), tl.div_rn(values, scale), 0.0)
    if FP8:
        return _to_e4m3(ratio)
    # Adding 1.5 * 2**23 leaves no bits for a fraction: the sum is rounded to an integer, ties to even.
    rounded = (tl.minimum(tl.maximum(ratio, -127.0), 127.0) + 12582912.0) - 12582912.0
    return rounded.to(tl.int8)


@triton.jit
def dequantise(stored, scales, FP8: tl.constexpr, DTYPE: tl.constexpr):
    """The bits, int16 `[VECTORS, COLUMNS]`, of values in DTYPE, of int8 `[VECTORS, COLUMNS]` as `quantise` makes it."""
    if FP8:
        values = _from_e4m3(stored.to(tl.int32))
    else:
        values = stored.to(tl.float32)
    bits = (values * scales[:, None]).to(DTYPE).to(tl.int16, bitcast=True)
    # Chips have NaNs of their own.
    NAN: tl.constexpr = 0x7E00 if tl.float16 == DTYPE else 0x7FC0
    return tl.where(scales[:, None] < float("inf"), bits, NAN).to(tl.int16)


@triton.jit
def _to_e4m3(values):
    """Rounded to nearest, ties to even, saturating. The NaN is 0x7F."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    clamped = tl.minimum(magnitude, _LARGEST_E4M3)
    normal = ((clamped + 0x7FFFF + ((clamped >> 20) & 1)) >> 20) - (_BIAS << 3)
    # Below 2**-6 codes are multiples of 2**-9. Adding 2**23 rounds as in `quantise`; 8 is the code of 2**-6.
    shifted = clamped.to(tl.float32, bitcast=True) * 512.0 + 8388608.0
    subnormal = shifted.to(tl.int32, bitcast=True) & 0xF
    code = tl.where(clamped < _LEAST_NORMAL_E4M3, subnormal, normal) | ((bits >> 24) & 0x80)
    return tl.where(magnitude > _INFINITY, 0x7F, code).to(tl.int8)


@triton.jit
def _from_e4m3(codes):
    magnitude = codes & 0x7F
    normal = ((magnitude << 20) + (_BIAS << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    # Not `-value`, of which Triton 3.6 makes 0 - value: a zero would lose its sign.
    return (value.to(tl.int32, bitcast=True) | ((codes & 0x80) << 24)).to(tl.float32, bitcast=True)
