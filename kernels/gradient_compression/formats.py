"""Device functions that convert blocks of fp32 values to codes and back, and loads and stores that round to 16 bits.

kind    codes                                          largest   NaN
int8    two's complement, four per 32-bit word         127       -128
int4    two's complement, eight per 32-bit word        7         -8
fp8     e4m3, bytes                                    448       0x7F

The kernels are bound by instruction issue if memory and link are fast. So few instructions are used: integers are
rounded, unpacked and converted to floating point in the significand of fp32, without conversion instructions, and
packed in words.

NATIVE uses the conversion instructions of sm_89 and later; without it integer arithmetic computes the same e4m3 bits.
In Triton's interpreter, whose own conversion truncates, bf16 tensors are passed as int16.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Adding 1.5 · 2^23 rounds to an integer, ties to even, and leaves it in the low bits.
_ROUND = tl.constexpr(12582912.0)


def _signed(bits: int) -> int:
    """A 32-bit pattern as an int32."""
    return (bits & 0xFFFFFFFF) - ((bits & 0x80000000) << 1)


# By the number of bits of a code: half its range less the bits of _ROUND, added up over the positions in a word; and
# half its range alone.
_OFFSET = {bits: sum(((1 << bits - 1) - 0x4B400000) << place for place in range(0, 32, bits)) for bits in (4, 8)}
_OFFSET_4, _OFFSET_8 = tl.constexpr(_signed(_OFFSET[4])), tl.constexpr(_signed(_OFFSET[8]))
_SIGNS_4, _SIGNS_8 = tl.constexpr(_signed(0x88888888)), tl.constexpr(_signed(0x80808080))

# One instruction; ptxas itself uses two if both operands are constants.
_AND_OR = tl.constexpr("lop3.b32 $0, $1, $2, 0x4B000000, 0xEA;")
# rcp.rn.f32 without its branch: a scale is a normal number below 2^126, which does not need the branch.
_RECIPROCAL = tl.constexpr("""{
    .reg .f32 near, error;
    rcp.approx.ftz.f32 near, $1;
    fma.rn.f32 error, $1, near, 0fBF800000;
    neg.f32 error, error;
    fma.rn.f32 $0, near, error, near;
}""")
_TO_E4M3 = tl.constexpr("""{
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
}""")


@triton.jit
def load_float(ptr, mask):
    """Loads values as fp32, with 0 where masked."""
    return _widened(tl.load(ptr, mask=mask, other=0))


@triton.jit
def store_float(ptr, x, mask):
    """Stores x, rounded to nearest, ties to even."""
    tl.store(ptr, _narrowed(ptr, x), mask=mask)


@triton.jit
def store_residual(ptr, lost, mask):
    """Stores errors in a residual, which stays finite: 0 for NaN, and what fp16 cannot hold as its largest number."""
    tl.store(ptr, _as_residual(ptr, lost), mask=mask)


@triton.jit
def through_residual(ptr, lost):
    """What `load_float` reads after `store_residual`, without the memory."""
    return _widened(_as_residual(ptr, lost))


@triton.jit
def _widened(x):
    if x.dtype == tl.int16:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _narrowed(ptr, x):
    """x in the pointer's dtype, rounded to nearest, ties to even."""
    if ptr.dtype.element_ty == tl.int16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, rounded, 0x7FC0).to(tl.int16)
    return x.to(ptr.dtype.element_ty)


@triton.jit
def _as_residual(ptr, lost):
    lost = tl.where(lost == lost, lost, 0.0)
    if ptr.dtype.element_ty == tl.float16:
        lost = tl.minimum(tl.maximum(lost, -65504.0), 65504.0)
    return _narrowed(ptr, lost)


@triton.jit
def quantize(x, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """Quantises blocks x [rows, BLOCK] in fp32. Returns (codes [rows, width], scales [rows], dequantised values)."""
    x = tl.fma(x, 0.0, x)  # infinities become NaN, as no code represents them
    scale = _scale_of(x, KIND)
    y = x * _reciprocal(scale, NATIVE)[:, None]
    if KIND == "fp8":
        code = _e4m3(y, NATIVE)
        kept = decode(code, scale, KIND, NATIVE)
    else:
        rounded = y + _ROUND
        code = _packed(rounded, 4 if KIND == "int4" else 8, NATIVE)
        kept = (rounded - _ROUND) * scale[:, None]
    return code, scale, kept


@triton.jit
def decode(code, scale, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """Dequantises the codes and scales of `quantize` to [rows, BLOCK]."""
    if KIND == "fp8":
        y = _from_e4m3(code, NATIVE)
    else:
        y = _unpacked(code, 4 if KIND == "int4" else 8, NATIVE)
    return y * scale[:, None]


@triton.jit
def _scale_of(x, KIND: tl.constexpr):
    """The scale of each row of x [rows, BLOCK], from its elements that are not NaN. It is never 0, inf or NaN."""
    amax = tl.max(tl.abs(x), axis=1)  # ignores NaN, but is NaN if all elements are
    # A multiplication by the inverse, because PyTorch on a GPU divides by a constant in the same way. The smallest
    # normal number has a finite inverse, and no GPU flushes it to zero.
    inverse: tl.constexpr = 1 / 448 if KIND == "fp8" else 1 / 7 if KIND == "int4" else 1 / 127
    return tl.where(amax > 0, tl.maximum(amax * inverse, 1.1754943508222875e-38), 1.0)


@triton.jit
def _reciprocal(scale, NATIVE: tl.constexpr):
    """1 / scale, rounded to nearest."""
    if NATIVE:
        return tl.inline_asm_elementwise(_RECIPROCAL, "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1)
    return tl.div_rn(1.0, scale)


@triton.jit
def _pairs(word, SHIFT: tl.constexpr):
    """Combines the words of adjacent elements of [rows, n] into one word: [rows, n / 2]."""
    low, high = tl.split(tl.reshape(word, [word.shape[0], word.shape[1] // 2, 2]))
    return low + (high << SHIFT)


@triton.jit
def _packed(rounded, BITS: tl.constexpr, NATIVE: tl.constexpr):
    """Packs values to which _ROUND was added into words."""
    lowest: tl.constexpr = 12582912.0 - (1 << BITS - 1)
    if NATIVE:  # a GPU's maximum of NaN and a number is the number; that of the interpreter is not
        rounded = tl.maximum(rounded, lowest)
    else:
        rounded = tl.where(rounded == rounded, rounded, lowest)
    word = rounded.to(tl.int32, bitcast=True)
    # Entire words are added, although a code is only their low bits: the sum of the other bits is known, modulo 2^32.
    if BITS == 4:
        word = (_pairs(_pairs(_pairs(word, 4), 8), 16) + _OFFSET_4) ^ _SIGNS_4
    else:
        word = (_pairs(_pairs(word, 8), 16) + _OFFSET_8) ^ _SIGNS_8
    return word


@triton.jit
def _number(word, PLACE: tl.constexpr, BITS: tl.constexpr, NATIVE: tl.constexpr):
    """The code at bit PLACE of words as fp32, exactly. In the word, half its range is added to the code."""
    # The code is placed in the significand of 2^23, then scaled down by a multiplication that is exact.
    MASK: tl.constexpr = ((1 << BITS) - 1) << PLACE
    if NATIVE:
        bits = tl.inline_asm_elementwise(_AND_OR, "=r,r,r", [word, MASK], dtype=tl.int32, is_pure=True, pack=1)
    else:
        bits = (word & MASK) | 0x4B000000
    return tl.fma(bits.to(tl.float32, bitcast=True), 1 / (1 << PLACE), -((1 << 23 - PLACE) + (1 << BITS - 1)) * 1.0)


@triton.jit
def _far(low, high, PLACE: tl.constexpr, BITS: tl.constexpr, NATIVE: tl.constexpr):
    """The codes at the same place of both 16-bit halves of words, [.., 2]."""
    return tl.join(_number(low, PLACE, BITS, NATIVE), _number(high, PLACE, BITS, NATIVE))


@triton.jit
def _unpacked(word, BITS: tl.constexpr, NATIVE: tl.constexpr):
    """The inverse of `_packed`, without _ROUND."""
    low = word ^ (_SIGNS_4 if BITS == 4 else _SIGNS_8)
    high = low >> 16  # the significand has 23 bits
    # The pair that is joined first becomes the first dimension, so its codes are the farthest apart.
    if BITS == 4:
        first = tl.join(_far(low, high, 0, 4, NATIVE), _far(low, high, 8, 4, NATIVE))
        second = tl.join(_far(low, high, 4, 4, NATIVE), _far(low, high, 12, 4, NATIVE))
    else:
        first = _far(low, high, 0, 8, NATIVE)
        second = _far(low, high, 8, 8, NATIVE)
    y = tl.reshape(tl.join(first, second), [word.shape[0], word.shape[1] * 32 // BITS])
    return tl.where(y == -(1 << BITS - 1) * 1.0, float("nan"), y)


@triton.jit
def _e4m3(y, NATIVE: tl.constexpr):
    """The bits of |y| <= 448, rounded to nearest, ties to even; NaN is 0x7F."""
    if NATIVE:
        # Four elements at once: ptxas 12.8 may split and reorder the pairs that y.to(float8) converts.
        return tl.inline_asm_elementwise(_TO_E4M3, "=r,r,r,r,r", [y], dtype=tl.uint8, is_pure=True, pack=4)
    sign = (y.to(tl.uint32, bitcast=True) >> 24) & 0x80
    a = tl.minimum(tl.abs(y), 448.0)
    bits = a.to(tl.uint32, bitcast=True)
    # Add just under half a step plus the last bit that is kept, so that ties go to even. Then subtract the difference
    # of the exponents' biases.
    normal = ((bits + ((bits >> 20) & 1) + 0x7FFFF) >> 20) - (120 << 3)
    # Below 2^-6 the addition rounds to e4m3's step of 2^-9: it moves the value to where 2^-9 is the ulp of fp32.
    tiny = (a + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(a < 0.015625, tiny, normal) | sign
    return tl.where(y == y, code, 0x7F).to(tl.uint8)


@triton.jit
def _from_e4m3(code, NATIVE: tl.constexpr):
    """The fp32 values of e4m3 bits, exactly."""
    if NATIVE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    wide = code.to(tl.uint16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)  # as fp16, whose exponent bias is 8 larger
    value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)
