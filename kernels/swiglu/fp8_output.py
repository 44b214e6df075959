# A copy of parts/fp8_output.py, made by `nox -s vendor`: change it there.
"""Device functions for fp8 outputs: conversion of fp32 to the bits of e4m3 or e5m2, and the scale of a group. Results
are bit-identical to those of kernels/fp8.

        exponent bias   mantissa   largest   smallest normal   smallest subnormal
e4m3         7           3 bits      448         2^-6              2^-9
e5m2        15           2 bits     57344        2^-14             2^-16

NATIVE uses the conversion instructions of sm_89 and later. Without it, integer arithmetic computes the same bits: on
sm_80, and in Triton's interpreter, whose own conversion rounds wrongly.
"""

from __future__ import annotations

import triton
import triton.language as tl

_FOUR = """{
    .reg .b16 low, high;
    cvt.rn.satfinite.TYPEx2.f32 low, $2, $1;
    cvt.rn.satfinite.TYPEx2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
}"""
_FOUR_E4M3 = tl.constexpr(_FOUR.replace("TYPE", "e4m3"))
_FOUR_E5M2 = tl.constexpr(_FOUR.replace("TYPE", "e5m2"))


@triton.jit
def finite_or_nan(x):
    """x in fp32, with ±inf replaced by NaN: 0 · inf is NaN. One fused multiply-add."""
    x = x.to(tl.float32)
    return x * 0.0 + x


@triton.jit
def scale_of(amax, E4M3: tl.constexpr, POW2: tl.constexpr):
    """The scale of a group whose largest finite magnitude is amax (NaN if no element is finite). Never 0 or inf."""
    if POW2:
        # 448 = 1.75 · 2^8 and 57344 = 1.75 · 2^15. So the smallest power of two >= amax / largest has the exponent of
        # amax minus 8 or 15, plus one if amax's mantissa exceeds 1.75.
        bits = (amax.to(tl.int32, bitcast=True) + 0x1FFFFF) & 0x7F800000
        bits = tl.maximum(bits - ((8 if E4M3 else 15) << 23), 1 << 23)
        scale = bits.to(tl.float32, bitcast=True)
    else:
        # Multiplied by the reciprocal, because PyTorch does the same on a GPU when it divides by a constant.
        scale = tl.maximum(amax * (1 / 448 if E4M3 else 1 / 57344), 1.1754943508222875e-38)
    return tl.where(amax > 0, scale, 1.0)


@triton.jit
def inverse(scale, POW2: tl.constexpr):
    """1 / scale, correctly rounded. With POW2, scale must be a power of two from 2^-126 to 2^126."""
    if POW2:
        return ((254 << 23) - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    return tl.div_rn(1.0, scale)


@triton.jit
def store_scale(ptr, scale, mask):
    """Stores a scale as fp32, or as UE8M0 where ptr points to bytes."""
    if ptr.dtype.element_ty == tl.uint8:
        scale = (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
    tl.store(ptr, scale, mask=mask)


@triton.jit
def encode(y, E4M3: tl.constexpr, NATIVE: tl.constexpr):
    """The fp8 bits of fp32 y, rounded to nearest, ties to even. Saturates at the largest finite value; NaN is 0x7F."""
    if NATIVE:
        # Converts four elements at a time. For y.to(float8), ptxas 12.8 unpacks and repacks pairs. If the result is
        # stored in two layouts, the generated code may even read some of it before it is written.
        return tl.inline_asm_elementwise(
            _FOUR_E4M3 if E4M3 else _FOUR_E5M2, "=r,r,r,r,r", [y], dtype=tl.uint8, is_pure=True, pack=4
        )
    SHIFT: tl.constexpr = 20 if E4M3 else 21
    sign = (y.to(tl.uint32, bitcast=True) >> 24) & 0x80
    a = tl.minimum(tl.abs(y), 448.0 if E4M3 else 57344.0)
    bits = a.to(tl.uint32, bitcast=True)
    # Adds just under half an ulp of the result, and the last kept bit: ties round to even. Then changes the exponent
    # bias.
    normal = bits + ((bits >> SHIFT) & 1) + ((1 << (SHIFT - 1)) - 1)
    normal = (normal >> SHIFT) - (120 << 3 if E4M3 else 112 << 2)
    # Below the smallest normal: the fp32 addition rounds, at a magnitude where its ulp is the smallest fp8 subnormal.
    tiny = (a + (16384.0 if E4M3 else 128.0)).to(tl.uint32, bitcast=True) - (0x46800000 if E4M3 else 0x43000000)
    result = tl.where(a < (0.015625 if E4M3 else 6.103515625e-05), tiny, normal) | sign
    return tl.where(y == y, result, 0x7F).to(tl.uint8)
