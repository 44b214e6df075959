"""Dequantisation to bf16 and fp16 on Hopper, in one layout: a thread stores the elements that it has loaded.

A unit is eight elements: 8, 6 or 4 bytes of data and 16 of the result, which a warp writes as segments of 512 bytes.
The layout of the loads is that of the store, so that no data go through shared memory. Elements are converted to fp16,
two in a register; fp16 can represent those of every format. The product with the scale is computed and rounded in fp32,
as in `dequantize.py`.

Back-of-the-envelope estimate, to bf16, 8192 x 8192, one NVIDIA H200: bounds as in kernel.py, 48 us (mxfp8), 44 us
(mxfp6), 40 us (mxfp4, nvfp4). An element takes 5.5 SASS instructions (mxfp8), 9.2, 7.3 and 7.6, issued in 12 to 20 us
at 1.85 GHz, where `dequantize.py` has 15.4 to 10.7.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codec import decode_scale, interleave_four
from .halves import both, bytes_of, from_e4m3, product_fp16, scaled


@triton.jit
def halves_of(tops, MANTISSA: tl.constexpr, BIAS: tl.constexpr, WIDTH: tl.constexpr):
    """Converts two elements, in the highest bits of either half, to fp16. Lower bits are ignored."""
    SHIFT: tl.constexpr = MANTISSA + 6 - WIDTH  # to the bit positions of fp16's exponent and mantissa
    MAGNITUDE: tl.constexpr = ((1 << (WIDTH - 1)) - 1) << (10 - MANTISSA)
    bits = (tops & both(0x8000)) | ((tops >> SHIFT) & both(MAGNITUDE))
    return product_fp16(bits, both((30 - BIAS) << 10))  # 2^(15 - BIAS)


@triton.jit
def decode_eight(data_ptr, unit, mask, WIDTH: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Loads the elements of each unit as four registers of fp16. Masked elements are undefined."""
    # If Triton knew that units are contiguous, it would load 16 bytes per thread, in a layout other than the store's.
    unit = unit * 3 // 3
    if WIDTH == 8:
        codes = tl.load(data_ptr.to(tl.pointer_type(tl.int64)) + unit, mask=mask)
        low, high = codes.to(tl.int32), (codes >> 32).to(tl.int32)
        if MANTISSA == 3:
            a, b, c, d = from_e4m3(low), from_e4m3(low >> 16), from_e4m3(high), from_e4m3(high >> 16)
        else:  # e5m2 is the upper byte of fp16
            a, b = bytes_of(low, low * 0, 0x1404), bytes_of(low, low * 0, 0x3424)
            c, d = bytes_of(high, low * 0, 0x1404), bytes_of(high, low * 0, 0x3424)
    else:
        if WIDTH == 4:
            odd = tl.load(data_ptr.to(tl.pointer_type(tl.int32)) + unit, mask=mask)
            even = odd << 4  # each element in the highest bits of its byte
            a, b = bytes_of(even, odd, 0x4400), bytes_of(even, odd, 0x5511)
            c, d = bytes_of(even, odd, 0x6622), bytes_of(even, odd, 0x7733)
        else:  # 48 bits; every other unit begins in the middle of a word
            at = data_ptr.to(tl.pointer_type(tl.int32)) + ((unit * 3) >> 1)
            first, second = tl.load(at, mask=mask), tl.load(at + 1, mask=mask)
            odd = (unit & 1) != 0
            middle = bytes_of(first, second, 0x5432)
            low, high = tl.where(odd, middle, first), tl.where(odd, second, middle)  # from bit 0 and from bit 16 on
            a, b = top_of_twelve(low << 10, low << 20), top_of_twelve(low >> 2, low << 8)
            c, d = top_of_twelve(high << 2, high << 12), top_of_twelve(high >> 10, high)
        a, b = halves_of(a, MANTISSA, BIAS, WIDTH), halves_of(b, MANTISSA, BIAS, WIDTH)
        c, d = halves_of(c, MANTISSA, BIAS, WIDTH), halves_of(d, MANTISSA, BIAS, WIDTH)
    return a, b, c, d


@triton.jit
def top_of_twelve(lower, upper):
    """Joins the lower half of one and the upper half of the other; the highest six bits of each half are used."""
    return bytes_of(lower, upper, 0x7610)


@triton.jit
def _mxfp_dequantize_pairs_kernel(
    data_ptr,
    scale_ptr,
    tensor_scale_ptr,
    y_ptr,
    units,
    WIDTH: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Dequantises data and scales to y of 8 · units elements. All are contiguous; data and y are 16-byte aligned."""
    first = tl.program_id(0).to(tl.int64) * UNITS
    unit = tl.arange(0, UNITS)
    mask = None if EVEN else unit < units - first
    a, b, c, d = decode_eight(data_ptr + first * WIDTH, unit, mask, WIDTH, MANTISSA, BIAS)
    # Each thread loads the scale of its unit; threads of the same block load the same address.
    scale = tl.load(scale_ptr + first // (BLOCK // 8) + unit // (BLOCK // 8), mask=mask).to(tl.int32)
    BF16: tl.constexpr = y_ptr.dtype.element_ty == tl.bfloat16
    if tensor_scale_ptr is not None:
        # The product with the e4m3 scale is exact in fp16: it has six bits and is between 2^-10 and 2688.
        twice = from_e4m3(scale * 0x101)
        a, b, c, d = product_fp16(a, twice), product_fp16(b, twice), product_fp16(c, twice), product_fp16(d, twice)
        factor = tl.load(tensor_scale_ptr)
    else:
        factor = decode_scale(scale, True)
    a, b, c, d = scaled(a, factor, BF16), scaled(b, factor, BF16), scaled(c, factor, BF16), scaled(d, factor, BF16)
    store_units(y_ptr, tl.reshape(interleave_four(a, b, c, d), [4 * UNITS]), first, units, EVEN, UNITS)


@triton.jit
def store_units(y_ptr, y, first, units, EVEN: tl.constexpr, UNITS: tl.constexpr):
    """Stores the words of the units from `first` on."""
    word = tl.arange(0, 4 * UNITS)
    mask = None if EVEN else word < (units - first) * 4
    tl.store(y_ptr.to(tl.pointer_type(tl.int32)) + first * 4 + word, y, mask=mask)
