"""Device functions: fp32 to the bits of e4m3 or e5m2 and back, and the scale of a group.

        exponent bias   mantissa   largest   smallest normal   smallest subnormal   infinity
e4m3         7           3 bits      448         2^-6                2^-9             none
e5m2        15           2 bits     57344        2^-14               2^-16            not used

NATIVE uses the conversion instructions of sm_89 and later. Without it (sm_80, and Triton's interpreter, whose own
conversion rounds wrongly) integer arithmetic computes the same bits.
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
    """x in fp32, with NaN instead of ±inf because 0 · inf is NaN. One fused multiply-add."""
    x = x.to(tl.float32)
    return x * 0.0 + x


@triton.jit
def scale_of(amax, E4M3: tl.constexpr, POW2: tl.constexpr):
    """The scale of a group whose largest finite magnitude is amax (NaN where nothing is finite), never 0 or inf."""
    if POW2:
        # 448 = 1.75 · 2^8 and 57344 = 1.75 · 2^15. So the smallest power of two that is at least amax / largest has
        # amax's exponent minus 8 or 15, plus one where amax's mantissa is above 1.75.
        bits = (amax.to(tl.int32, bitcast=True) + 0x1FFFFF) & 0x7F800000
        bits = tl.maximum(bits - ((8 if E4M3 else 15) << 23), 1 << 23)
        scale = bits.to(tl.float32, bitcast=True)
    else:
        # Multiplies by the inverse, as PyTorch does on a GPU for a division by a constant.
        scale = tl.maximum(amax * (1 / 448 if E4M3 else 1 / 57344), 1.1754943508222875e-38)
    return tl.where(amax > 0, scale, 1.0)


@triton.jit
def inverse(scale, POW2: tl.constexpr):
    """1 / scale, correctly rounded. POW2 asserts a power of two from 2^-126 to 2^126."""
    if POW2:
        return ((254 << 23) - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    return tl.div_rn(1.0, scale)


@triton.jit
def load_scale(ptr, mask):
    """Loads a scale, stored as fp32 or as UE8M0, whose byte is the exponent field of fp32."""
    scale = tl.load(ptr, mask=mask, other=1)
    if scale.dtype == tl.uint8:
        bits = scale.to(tl.int32) << 23
        bits = tl.where(scale == 0, 1 << 22, tl.where(scale == 255, 0x7FC00000, bits))  # 2^-127, NaN
        scale = bits.to(tl.float32, bitcast=True)
    return scale


@triton.jit
def store_scale(ptr, scale, mask):
    """Stores a scale as fp32 or, where ptr points to uint8, as UE8M0."""
    if ptr.dtype.element_ty == tl.uint8:
        scale = (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
    tl.store(ptr, scale, mask=mask)


@triton.jit
def encode(y, E4M3: tl.constexpr, NATIVE: tl.constexpr):
    """The fp8 bits of fp32 y, rounded to nearest, ties to even, saturating; NaN is 0x7F."""
    if NATIVE:
        # Four at a time instead of y.to(float8), for which ptxas 12.8 unpacks and repacks pairs. Where the result is
        # stored in two layouts, the code of ptxas may even read part of it before it is written.
        return tl.inline_asm_elementwise(
            _FOUR_E4M3 if E4M3 else _FOUR_E5M2, "=r,r,r,r,r", [y], dtype=tl.uint8, is_pure=True, pack=4
        )
    SHIFT: tl.constexpr = 20 if E4M3 else 21
    sign = (y.to(tl.uint32, bitcast=True) >> 24) & 0x80
    a = tl.minimum(tl.abs(y), 448.0 if E4M3 else 57344.0)
    bits = a.to(tl.uint32, bitcast=True)
    # Adds just under half a unit in the last place plus the last bit kept, so that ties round to even. Then subtracts
    # the difference of the exponent biases.
    normal = bits + ((bits >> SHIFT) & 1) + ((1 << (SHIFT - 1)) - 1)
    normal = (normal >> SHIFT) - (120 << 3 if E4M3 else 112 << 2)
    # Subnormal results: the addition rounds at a magnitude where the spacing of fp32 is that of fp8's subnormals.
    tiny = (a + (16384.0 if E4M3 else 128.0)).to(tl.uint32, bitcast=True) - (0x46800000 if E4M3 else 0x43000000)
    result = tl.where(a < (0.015625 if E4M3 else 6.103515625e-05), tiny, normal) | sign
    return tl.where(y == y, result, 0x7F).to(tl.uint8)


@triton.jit
def encode_four(a, b, c, d, E4M3: tl.constexpr, NATIVE: tl.constexpr):
    """The fp8 bits of four values as the bytes of an int32, a in the lowest."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            _FOUR_E4M3 if E4M3 else _FOUR_E5M2, "=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1
        )
    low = encode(a, E4M3, NATIVE).to(tl.int32) | encode(b, E4M3, NATIVE).to(tl.int32) << 8
    return low | encode(c, E4M3, NATIVE).to(tl.int32) << 16 | encode(d, E4M3, NATIVE).to(tl.int32) << 24


@triton.jit
def decode(bits, E4M3: tl.constexpr, NATIVE: tl.constexpr):
    """Converts e4m3 or e5m2 bits to fp32, exactly."""
    if E4M3 and NATIVE:
        return bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    wide = bits.to(tl.uint16)
    if not E4M3:  # e5m2 is the upper half of fp16
        return (wide << 8).to(tl.float16, bitcast=True).to(tl.float32)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)  # as fp16, whose bias is larger by 8: too small by 2^8
    value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)
