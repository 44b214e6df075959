"""Device functions: blocks of fp32 numbers to their codes and back, and loads and stores that round to 16 bits.

kind    codes                        largest   NaN
int8    two's complement             127       -128
int4    two's complement, two a byte 7         -8
fp8     e4m3                         448       0x7F

NATIVE takes the conversion instructions of sm_89 and later; without it the same e4m3 bits come out of integer
arithmetic. bf16 tensors are given as int16 in Triton's interpreter, whose own conversion truncates.
"""

from __future__ import annotations

import triton
import triton.language as tl

_TO_E4M3 = tl.constexpr("""{
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
}""")


@triton.jit
def load_float(ptr, mask):
    """In fp32; 0 where masked."""
    if ptr.dtype.element_ty == tl.int16:
        bits = tl.load(ptr, mask=mask, other=0).to(tl.int32) << 16
        return bits.to(tl.float32, bitcast=True)
    return tl.load(ptr, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_float(ptr, x, mask):
    """Rounded to nearest, ties to even."""
    if ptr.dtype.element_ty == tl.int16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store(ptr, tl.where(x == x, rounded, 0x7FC0).to(tl.int16), mask=mask)
    else:
        tl.store(ptr, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def scale_of(x, KIND: tl.constexpr):
    """The scale of each row of x [rows, BLOCK], from its finite elements: never 0, inf or NaN. NaN stands for inf."""
    amax = tl.max(tl.where(x == x, tl.abs(x), 0.0), axis=1)
    # A product, because PyTorch on a GPU too divides by a constant in this way. The smallest normal number has an
    # inverse, and no GPU flushes it to zero.
    inverse: tl.constexpr = 1 / 448 if KIND == "fp8" else 1 / 7 if KIND == "int4" else 1 / 127
    return tl.where(amax > 0, tl.maximum(amax * inverse, 1.1754943508222875e-38), 1.0)


@triton.jit
def encode(x, scale, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """The bytes of x [rows, BLOCK], whose scales are given: [rows, BLOCK], or half as wide for int4."""
    y = x * tl.div_rn(1.0, scale)[:, None]
    if KIND == "fp8":
        return _e4m3(y, NATIVE)
    # Adding 1.5 · 2^23 rounds to an integer, ties to even, and leaves it in the low bits.
    code = (y + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    code = tl.where(y == y, code, -8 if KIND == "int4" else -128)
    if KIND == "int4":
        low, high = tl.split(tl.reshape(code & 0xF, [code.shape[0], code.shape[1] // 2, 2]))
        code = low | high << 4
    return code.to(tl.uint8)


@triton.jit
def decode(code, scale, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """The inverse of `encode`, [rows, BLOCK]."""
    if KIND == "fp8":
        y = _from_e4m3(code, NATIVE)
    elif KIND == "int4":
        wide = code.to(tl.int32)
        pairs = tl.join(wide & 0xF, wide >> 4)
        nibble = tl.reshape(pairs, [code.shape[0], code.shape[1] * 2])
        y = tl.where(nibble == 8, float("nan"), ((nibble ^ 8) - 8).to(tl.float32))
    else:
        wide = code.to(tl.int8, bitcast=True).to(tl.int32)
        y = tl.where(wide == -128, float("nan"), wide.to(tl.float32))
    return y * scale[:, None]


@triton.jit
def _e4m3(y, NATIVE: tl.constexpr):
    """The bits of |y| <= 448, rounded to nearest, ties to even; NaN is 0x7F."""
    if NATIVE:
        # Four at a time: ptxas 12.8 may take apart and reorder what y.to(float8) converts in pairs.
        return tl.inline_asm_elementwise(_TO_E4M3, "=r,r,r,r,r", [y], dtype=tl.uint8, is_pure=True, pack=4)
    sign = (y.to(tl.uint32, bitcast=True) >> 24) & 0x80
    a = tl.minimum(tl.abs(y), 448.0)
    bits = a.to(tl.uint32, bitcast=True)
    # Just under half a step, and the last bit kept: ties go to even. Then the difference of the exponents' biases.
    normal = ((bits + ((bits >> 20) & 1) + 0x7FFFF) >> 20) - (120 << 3)
    # Below 2^-6 fp32 itself rounds to e4m3's step of 2^-9, at a magnitude where that is its own.
    tiny = (a + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(a < 0.015625, tiny, normal) | sign
    return tl.where(y == y, code, 0x7F).to(tl.uint8)


@triton.jit
def _from_e4m3(code, NATIVE: tl.constexpr):
    """fp32 of e4m3 bits; exact."""
    if NATIVE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    wide = code.to(tl.uint16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)  # as fp16, whose bias is 8 more
    value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)
