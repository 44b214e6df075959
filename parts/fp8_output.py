"""Device functions of the fp8 output: fp32 to the bits of e4m3 or e5m2, and the scale of a group. As kernels/fp8, whose
results they give to the bit.

        exponent bias   mantissa   largest   smallest normal   step below it
e4m3         7           3 bits      448         2^-6              2^-9
e5m2        15           2 bits     57344        2^-14             2^-16

NATIVE takes the conversion instructions of sm_89 and later. Without it (sm_80, and Triton's interpreter, whose own
conversion rounds wrongly) the same bits come out of integer arithmetic.
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
    """x in fp32 with NaN in place of ±inf: 0 · inf is NaN. One fused multiply-add."""
    x = x.to(tl.float32)
    return x * 0.0 + x


@triton.jit
def scale_of(amax, E4M3: tl.constexpr, POW2: tl.constexpr):
    """The scale of a group whose largest finite magnitude is amax (NaN where nothing is finite), never 0 or inf."""
    if POW2:
        # 448 = 1.75 · 2^8 and 57344 = 1.75 · 2^15: the smallest power of two that is at least amax / largest has amax's
        # exponent less 8 or 15, and one more where amax's mantissa is over 1.75.
        bits = (amax.to(tl.int32, bitcast=True) + 0x1FFFFF) & 0x7F800000
        bits = tl.maximum(bits - ((8 if E4M3 else 15) << 23), 1 << 23)
        scale = bits.to(tl.float32, bitcast=True)
    else:
        # A product with the inverse, as PyTorch on a GPU divides by a constant.
        scale = tl.maximum(amax * (1 / 448 if E4M3 else 1 / 57344), 1.1754943508222875e-38)
    return tl.where(amax > 0, scale, 1.0)


@triton.jit
def inverse(scale, POW2: tl.constexpr):
    """1 / scale, correctly rounded. POW2 promises a power of two from 2^-126 to 2^126."""
    if POW2:
        return ((254 << 23) - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    return tl.div_rn(1.0, scale)


@triton.jit
def store_scale(ptr, scale, mask):
    """Stores a scale in fp32 or, as bytes, in UE8M0."""
    if ptr.dtype.element_ty == tl.uint8:
        scale = (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
    tl.store(ptr, scale, mask=mask)


@triton.jit
def encode(y, E4M3: tl.constexpr, NATIVE: tl.constexpr):
    """The bits of fp32 y rounded to nearest, ties to even; the largest number where y is larger; NaN is 0x7F."""
    if NATIVE:
        # Four at a time in place of y.to(float8), for which ptxas 12.8 unpacks and packs pairs again; where the result
        # is stored in two layouts, it may even read some of it before it is written.
        return tl.inline_asm_elementwise(
            _FOUR_E4M3 if E4M3 else _FOUR_E5M2, "=r,r,r,r,r", [y], dtype=tl.uint8, is_pure=True, pack=4
        )
    SHIFT: tl.constexpr = 20 if E4M3 else 21
    sign = (y.to(tl.uint32, bitcast=True) >> 24) & 0x80
    a = tl.minimum(tl.abs(y), 448.0 if E4M3 else 57344.0)
    bits = a.to(tl.uint32, bitcast=True)
    # Adds just under half a step, and the last bit kept: ties go to even. Then the difference of the biases.
    normal = bits + ((bits >> SHIFT) & 1) + ((1 << (SHIFT - 1)) - 1)
    normal = (normal >> SHIFT) - (120 << 3 if E4M3 else 112 << 2)
    # Below the smallest normal number: fp32's own rounding, at a magnitude where its step is that of the subnormals.
    tiny = (a + (16384.0 if E4M3 else 128.0)).to(tl.uint32, bitcast=True) - (0x46800000 if E4M3 else 0x43000000)
    result = tl.where(a < (0.015625 if E4M3 else 6.103515625e-05), tiny, normal) | sign
    return tl.where(y == y, result, 0x7F).to(tl.uint8)
