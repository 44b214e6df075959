"""Quantisation of bf16 on Hopper, two numbers an instruction.

What `kernel.py` computes in fp32, one element at a time, is exact in bf16: a product with a power of two, and a sum
whose last place is a step of the element. So a register keeps the two neighbours that were loaded with it from the load
to the store, and each of these instructions is of both: a product and an addition (HMUL2, HADD2), the largest and the
smallest of two (VIMNMX.U16x2), and integer arithmetic without a carry between the halves.

NVFP4's products are rounded to fp32. Of these bf16 has the upper half; where the lower half is not zero its last bit is
set (rounding to odd). It has more than two bits behind the last place of e2m1, so that what is rounded next is rounded
as the number in fp32 is (Boldo and Melquiond 2008, doi:10.1109/TC.2007.70819).

A thread has 32 elements. 12 instructions an element in MXFP8 and MXFP4, 16 in MXFP6, addresses included, where
`kernel.py` has 18 to 23, and a third of them is not of the integer pipe. At 64 of that pipe a cycle and SM memory
leaves time for 9 (mxfp4) to 11 (mxfp8).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codec import NOT_FINITE, mx_scale, nv_scale, pack_twelve
from .kernel import corner, store_tile, with_tensor_scale, zero_unless

LARGEST_E2M1 = tl.constexpr(6.0)


@triton.jit
def both(bits: tl.constexpr):
    """The same 16 bits in both halves of a register."""
    return bits * 0x10001


@triton.jit
def larger(a, b):
    """The larger of each half, without a sign."""
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def larger_signed(a, b):
    return tl.inline_asm_elementwise("max.s16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def smaller(a, b):
    return tl.inline_asm_elementwise("min.u16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def product(a, b):
    """Of two numbers in bf16."""
    return tl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def added(a, b):
    """Two numbers in bf16, rounded to nearest, ties to even."""
    return tl.inline_asm_elementwise("add.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def upper(a, b):
    """The upper half of each."""
    return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def lower(a, b):
    return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def rounded_product(magnitude, factor):
    """Two numbers >= 0 in bf16 times one in fp32, rounded to fp32 and then to odd in bf16; at most 8."""
    a = ((magnitude << 16).to(tl.float32, bitcast=True) * factor).to(tl.int32, bitcast=True)
    b = ((magnitude & 0x7FFF0000).to(tl.float32, bitcast=True) * factor).to(tl.int32, bitcast=True)
    return smaller(upper(a, b) | smaller(lower(a, b), both(1)), both(0x4100))


@triton.jit
def encode_pairs(y, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST_CODE: tl.constexpr):
    """The codes of two numbers y >= 0 in bf16, as `codec.encode` has them: one in each half.

    With e the exponent of y above that of the smallest normal element, a sum with 2^(e + 7 - MANTISSA) is rounded to a
    step of the element, of which its last bits are the number. The code is that number + (e << MANTISSA).
    """
    SHIFT: tl.constexpr = 7 - MANTISSA
    exponent = larger(y & both(0x7F80), both((128 - BIAS) << 7))
    anchor = exponent + both(SHIFT << 7)
    steps = added(y, anchor) - anchor
    return smaller(steps + ((exponent >> SHIFT) - both((128 - BIAS) << MANTISSA)), both(LARGEST_CODE))


@triton.jit
def load_pairs(x_ptr, row, col, rows, dim, stride_xm, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile of x in bf16, two neighbours in each int32; zeros where x has ended."""
    m, n = row + tl.arange(0, BLOCK_M), col // 2 + tl.arange(0, BLOCK_N // 2)
    mask = None if EVEN else (m < rows)[:, None] & (n < dim // 2)[None, :]
    at = x_ptr.to(tl.pointer_type(tl.int32)) + m[:, None] * (stride_xm // 2) + n[None, :]
    return tl.load(at, mask=mask, other=None if EVEN else 0)


@triton.jit(do_not_specialize=["rows"])
def _mxfp_amax_pairs_kernel(
    x_ptr,
    amax_ptr,
    rows,
    dim,
    stride_xm,
    EVEN: tl.constexpr,
    ONE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """As `kernel._mxfp_amax_kernel`. Raised by 0x80, what is not finite is a negative number of 16 bits."""
    row, col = corner(dim, False, ONE, BLOCK_M, BLOCK_N)
    bits = load_pairs(x_ptr, row, col, rows, dim, stride_xm, EVEN, BLOCK_M, BLOCK_N)
    raised = (bits & both(0x7FFF)) + both(0x80)
    most = larger_signed(tl.reduce(raised, 1, larger_signed), both(0x80))
    tl.atomic_max(amax_ptr, (tl.max(tl.maximum(most & 0xFFFF, most >> 16)) - 0x80) << 16, sem="relaxed")


@triton.jit(do_not_specialize=["rows"])
def _mxfp_quantize_pairs_kernel(
    x_ptr,
    data_ptr,
    scale_ptr,
    tensor_scale_ptr,
    amax_ptr,
    rows,
    dim,
    stride_xm,
    WIDTH: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    EMAX: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    ONE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """x [rows, dim] in bf16 to data and scales, as `kernel._mxfp_quantize_kernel`. dim is a number of whole blocks, and
    a row is contiguous and begins on a boundary of 4 bytes."""
    PAIRS: tl.constexpr = BLOCK_N // 2
    row, col = corner(dim, amax_ptr is not None, ONE, BLOCK_M, BLOCK_N)
    bits = load_pairs(x_ptr, row, col, rows, dim, stride_xm, EVEN, BLOCK_M, BLOCK_N)
    magnitude = bits & both(0x7FFF)
    blocks = tl.reshape(magnitude, [BLOCK_M, BLOCK_N // BLOCK, BLOCK // 2])
    most = tl.reduce(blocks, 2, larger)
    amax = tl.maximum(most & 0xFFFF, most >> 16) << 16  # as fp32
    if tensor_scale_ptr is not None:
        amax, tensor_scale = with_tensor_scale(amax, tensor_scale_ptr, amax_ptr)
    # A block with a NaN or an infinity: its scale is NaN, its data are zeros, which they become once they are packed.
    finite = amax < NOT_FINITE
    amax = tl.where(finite, amax, 0)
    if tensor_scale_ptr is not None:
        scale, inverse = nv_scale(amax, tensor_scale, LARGEST_E2M1)
        scale = tl.where(finite, scale, 0x7F)
        y = rounded_product(blocks, inverse[:, :, None])
    else:
        exponent, inverse = mx_scale(amax, EMAX)
        scale = tl.where(finite, exponent, 0xFF)
        y = product(blocks, (inverse.to(tl.int32, bitcast=True) >> 16)[:, :, None] * 0x10001)
    store_tile(scale_ptr, scale.to(tl.uint8), row, col // BLOCK, rows, dim // BLOCK, EVEN, BLOCK_M, BLOCK_N // BLOCK)
    y = tl.reshape(y, [BLOCK_M, PAIRS])
    codes = encode_pairs(y, MANTISSA, BIAS, LARGEST_CODE)
    codes |= (bits >> (16 - WIDTH)) & both(1 << (WIDTH - 1))
    codes = (codes & 0xFFFF) | (codes >> (16 - WIDTH))
    if WIDTH == 8:
        codes = zero_unless(finite, codes, BLOCK_M, PAIRS, BLOCK // 2).to(tl.int16)
        to = data_ptr.to(tl.pointer_type(tl.int16))
        store_tile(to, codes, row, col // 2, rows, dim // 2, EVEN, BLOCK_M, PAIRS)
    elif WIDTH == 4:
        codes = zero_unless(finite, codes, BLOCK_M, PAIRS, BLOCK // 2).to(tl.uint8)
        store_tile(data_ptr, codes, row, col // 2, rows, dim // 2, EVEN, BLOCK_M, PAIRS)
    else:
        m, n = row + tl.arange(0, BLOCK_M), col // 16 + tl.arange(0, BLOCK_N // 16)
        mask = None if EVEN else (m < rows)[:, None] & (n < dim // 16)[None, :]
        at = data_ptr + m[:, None] * (dim // 16 * 3) + n[None, :] * 3
        first, second, third = pack_twelve(codes & 0xFFF, BLOCK_M, PAIRS)
        tl.store(at, zero_unless(finite, first, BLOCK_M, BLOCK_N // 16, BLOCK // 16), mask=mask)
        tl.store(at + 1, zero_unless(finite, second, BLOCK_M, BLOCK_N // 16, BLOCK // 16), mask=mask)
        tl.store(at + 2, zero_unless(finite, third, BLOCK_M, BLOCK_N // 16, BLOCK // 16), mask=mask)
