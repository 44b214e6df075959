"""Quantisation of bf16 on Hopper, two elements per register, sixteen per thread.

A thread holds sixteen adjacent elements in eight registers from the load to the store: a block of NVFP4, or half a
block of the others, so that one or two threads compute a block's scale. `kernel.py` rounds in fp32, one element at a
time. Here the rounding depends on the format:

MXFP8   F2FP rounds fp32 products to e4m3 and e5m2, two per instruction, with their signs, saturating.
MXFP6   The 8-bit formats have the mantissas of the 6-bit formats, and subnormals as well. The multiplication corrects
        for their exponent bias; then F2FP's code is the 6-bit code, except 32, which saturates to 31.
FP4     e2m1's code of y >= 0 is the integer nearest to min(2 y, y + 2, y / 2 + 4, 7). Each linear function is one fused
        multiply-add of two bf16 values, with a sum whose unit in the last place is 1. A tie rounds to the even sum and
        hence to the even code.

Back-of-the-envelope estimate, 8192 x 8192, one NVIDIA H200 (132 SMs, 4254 GB/s; bounds as in kernel.py), SASS
instructions per element with addresses, at 1.85 GHz:

                    all     issued in   on the integer pipe, at 64 a cycle and SM   memory bound
mxfp8                6.2      13 us       3.0    13 us                              48 us
mxfp6               11.1      24 us       6.6    28 us                              44 us
mxfp4                8.5      18 us       4.8    20 us                              40 us
nvfp4               13.5      29 us       7.5    32 us                              40 us
mxfp4, stochastic   17.4      37 us       9.3    40 us                              40 us; 5 of them are Philox

NVFP4's products are rounded to fp32 and then to odd in bf16: bf16 keeps the upper half, and sets its last bit where the
lower half is not zero. It has more than two bits below the last place of e2m1, so that the next rounding gives the same
result as from fp32 (Boldo and Melquiond 2008, doi:10.1109/TC.2007.70819).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codec import NOT_FINITE, four_random, interleave_four, mx_scale
from .halves import (
    both,
    bytes_of,
    larger,
    larger_signed,
    product,
    product_and_sum,
    products_of_magnitudes,
    reciprocal,
    smaller,
    to_e4m3,
    to_eight_bits,
    truncated_product,
)
from .kernel import corner, with_tensor_scale

LARGEST_E2M1 = tl.constexpr(6.0)
INTEGERS = tl.constexpr(0x4340)  # bf16 of 192: from there to 256 the unit in the last place is 1


@triton.jit
def unit_places(BLOCK_M: tl.constexpr, UNITS: tl.constexpr):
    """The row in the tile of each unit of sixteen elements, and its position in the row. Units have one dimension: with
    two, Triton's layout may assign adjacent rows to adjacent threads."""
    unit = tl.arange(0, BLOCK_M * UNITS)
    return (unit // UNITS).to(tl.int64), unit % UNITS


@triton.jit
def load_eight(x_ptr, row, col, m, n, mask, stride_xm, EVEN: tl.constexpr):
    """Loads the sixteen elements of each unit as eight registers, with zeros out of bounds."""
    at = (x_ptr + row * stride_xm + col).to(tl.pointer_type(tl.int32))
    at = at + (m * (stride_xm // 2) + n * 8)[:, None] + tl.arange(0, 4)[None, :]
    mask = None if EVEN else mask[:, None]
    other: tl.constexpr = None if EVEN else 0
    left, right = tl.load(at, mask=mask, other=other), tl.load(at + 4, mask=mask, other=other)
    a, b, c, d = split_four(left)
    e, f, g, h = split_four(right)
    return a, b, c, d, e, f, g, h


@triton.jit
def split_four(tile):
    """The four columns of a tile [N, 4]."""
    even, odd = tl.split(tl.reshape(tile, [tile.shape[0], 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def largest_of_eight(a, b, c, d, e, f, g, h):
    """The largest magnitude in either half of eight registers."""
    m: tl.constexpr = both(0x7FFF)
    left = larger(larger(a & m, b & m), larger(c & m, d & m))
    return larger(left, larger(larger(e & m, f & m), larger(g & m, h & m)))


@triton.jit
def nv_scale(amax, tensor_scale):
    """As `codec.nv_scale`, with conversion instructions."""
    wanted = tl.div_rn(amax.to(tl.float32, bitcast=True), tensor_scale * LARGEST_E2M1)
    code = tl.maximum(to_e4m3(wanted), 1)
    scale = (code << 20).to(tl.float32, bitcast=True) * 2.0**120
    return code, reciprocal(scale * tensor_scale)


@triton.jit
def rounded_product(x, factor):
    """The magnitudes of two bf16 values times an fp32 factor, rounded to fp32 and then to odd in bf16."""
    a, b = products_of_magnitudes(x, factor)
    a, b = a.to(tl.int32, bitcast=True), b.to(tl.int32, bitcast=True)
    return bytes_of(a, b, 0x7632) | smaller(bytes_of(a, b, 0x5410), both(1))


@triton.jit
def e2m1_of(x, factor, BLOCK: tl.constexpr):
    """The e2m1 codes of two magnitudes, in the last three bits of either half."""
    if BLOCK == 16:
        y = rounded_product(x, factor)
    else:
        y = product(x & both(0x7FFF), factor)
    below_2 = product_and_sum(y, both(0x4000), both(INTEGERS))  # 2 y
    below_4 = product_and_sum(y, both(0x3F80), both(INTEGERS + 2))  # y + 2
    above_4 = product_and_sum(y, both(0x3F00), both(INTEGERS + 4))  # y / 2 + 4
    return smaller(smaller(below_2, below_4), smaller(above_4, both(INTEGERS + 7)))


@triton.jit
def code_and_fraction(y, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """The code of an element in the highest 8 bits, and the truncated fraction below. These are shifted fp32 bits,
    after scaling the element's smallest exponent to that of fp32."""
    code = truncated_product(y, 2.0 ** (BIAS - 127)).to(tl.int32, bitcast=True)
    return tl.mul(code, 2 << MANTISSA, sanitize_overflow=False)


@triton.jit
def at_random(x, random, factor, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST_CODE: tl.constexpr):
    """The codes of two magnitudes, in the upper byte of either half, rounded as by `codec.encode_at_random`."""
    low, high = products_of_magnitudes(x, factor)
    low, high = code_and_fraction(low, MANTISSA, BIAS), code_and_fraction(high, MANTISSA, BIAS)
    low = tl.add(low, bytes_of(random, random * 0, 0x4104), sanitize_overflow=False)
    high = tl.add(high, bytes_of(random, random * 0, 0x4324), sanitize_overflow=False)
    return smaller(bytes_of(low, high, 0x7632), both(LARGEST_CODE * 256 + 255))


@triton.jit
def with_signs(codes, signs, WIDTH: tl.constexpr):
    """Four codes, in the lowest bits of each byte, with the highest bits of the bytes of `signs` as signs."""
    MAGNITUDE: tl.constexpr = ((1 << (WIDTH - 1)) - 1) * 0x1010101
    SIGN: tl.constexpr = (1 << (WIDTH - 1)) * 0x1010101 - (WIDTH // 8) * 0x100000000
    return (codes & MAGNITUDE) | ((signs >> (8 - WIDTH)) & SIGN)


@triton.jit
def four_codes(
    a,
    b,
    random_a,
    random_b,
    factor,
    WIDTH: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    BLOCK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """The codes of four elements, each in the lowest bits of a byte."""
    if STOCHASTIC:
        a_codes = at_random(a, random_a, factor, MANTISSA, BIAS, LARGEST_CODE)
        b_codes = at_random(b, random_b, factor, MANTISSA, BIAS, LARGEST_CODE)
        codes = with_signs(bytes_of(a_codes, b_codes, 0x7531), bytes_of(a, b, 0x7531), WIDTH)
    elif WIDTH == 4:
        codes = bytes_of(e2m1_of(a, factor, BLOCK), e2m1_of(b, factor, BLOCK), 0x6420)
        codes = with_signs(codes, bytes_of(a, b, 0x7531), WIDTH)
    else:
        codes = to_eight_bits(a, b, factor, MANTISSA)
        if WIDTH == 6:
            codes -= (codes >> 5) & 0x1010101  # 32 becomes 31
            codes = with_signs(codes, codes, WIDTH)
    return codes


@triton.jit
def eight_nibbles(a, b):
    """Packs eight 4-bit codes, one in each byte of two words, into one word."""
    return bytes_of(a | (a >> 4), b | (b >> 4), 0x6420)


@triton.jit
def twenty_four_bits(codes):
    """Packs four 6-bit codes, one in each byte, into 24 bits."""
    codes = (codes & 0x3F003F) | ((codes >> 2) & 0xFC00FC0)
    return (codes & 0xFFF) | ((codes >> 4) & 0xFFF000)


@triton.jit
def store_units(data_ptr, a, b, c, d, row, col, m, n, mask, dim, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """Packs and stores the sixteen codes of each unit, one in each byte of four words, as WIDTH / 2 words."""
    WORDS: tl.constexpr = WIDTH // 2
    if WIDTH == 4:
        words = tl.join(eight_nibbles(a, b), eight_nibbles(c, d))
    else:
        if WIDTH == 6:
            a, b, c, d = twenty_four_bits(a), twenty_four_bits(b), twenty_four_bits(c), twenty_four_bits(d)
            a, b, c = bytes_of(a, b, 0x4210), bytes_of(b, c, 0x5421), bytes_of(c, d, 0x6542)
        words = tl.reshape(interleave_four(a, b, c, d), [a.shape[0], 4])
    # A row has dim / 16 units.
    to = data_ptr.to(tl.pointer_type(tl.int32)) + (row * (dim // 16) + col // 16) * WORDS
    k = tl.arange(0, 2 if WIDTH == 4 else 4)[None, :]
    to = to + ((m * (dim // 16) + n) * WORDS)[:, None] + k
    mask = None if EVEN else mask[:, None]
    if WIDTH == 6:
        # Three of four words are stored. Words are exchanged between threads, so that adjacent threads store adjacent
        # words, in segments of 96 bytes. If each thread stored its own 12 bytes, there would be three times as many
        # sectors.
        mask = k < 3 if EVEN else mask & (k < 3)
    tl.store(to, words, mask=mask)


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
    """As `kernel._mxfp_amax_kernel`. Adding 0x80 makes values that are not finite negative 16-bit integers."""
    row, col = corner(dim, False, ONE, BLOCK_M, BLOCK_N)
    m, n = row + tl.arange(0, BLOCK_M), col // 2 + tl.arange(0, BLOCK_N // 2)
    mask = None if EVEN else (m < rows)[:, None] & (n < dim // 2)[None, :]
    at = x_ptr.to(tl.pointer_type(tl.int32)) + m[:, None] * (stride_xm // 2) + n[None, :]
    raised = (tl.load(at, mask=mask, other=None if EVEN else 0) & both(0x7FFF)) + both(0x80)
    most = tl.reduce(raised, None, larger_signed)
    # The two halves, sign-extended.
    most = tl.maximum(tl.maximum((most << 16) >> 16, most >> 16), 0x80)
    tl.atomic_max(amax_ptr, (most - 0x80) << 16, sem="relaxed")


@triton.jit(do_not_specialize=["seed_low", "seed_high", "rows"])
def _mxfp_quantize_pairs_kernel(
    x_ptr,
    data_ptr,
    scale_ptr,
    tensor_scale_ptr,
    amax_ptr,
    seed_low,
    seed_high,
    rows,
    dim,
    stride_xm,
    WIDTH: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    EMAX: tl.constexpr,
    BLOCK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    EVEN: tl.constexpr,
    ONE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Quantises x [rows, dim] in bf16 to data and scales, as `kernel._mxfp_quantize_kernel`. dim is a multiple of the
    block. Rows are contiguous and 4-byte aligned."""
    row, col = corner(dim, amax_ptr is not None, ONE, BLOCK_M, BLOCK_N)
    m, n = unit_places(BLOCK_M, BLOCK_N // 16)
    mask = (m < rows - row) & (n < (dim - col) // 16)
    a, b, c, d, e, f, g, h = load_eight(x_ptr, row, col, m, n, mask, stride_xm, EVEN)
    most = largest_of_eight(a, b, c, d, e, f, g, h)
    if BLOCK == 32:
        two = tl.reshape(most, [BLOCK_M * BLOCK_N // 32, 2])
        most = tl.reshape(tl.broadcast_to(tl.reduce(two, 1, larger)[:, None], two.shape), most.shape)
    amax = tl.maximum(most & 0xFFFF, most >> 16) << 16  # as fp32
    if tensor_scale_ptr is not None:
        amax, tensor_scale = with_tensor_scale(amax, tensor_scale_ptr, amax_ptr)
    # A block with a NaN or an infinity has the scale NaN and zeros as data.
    finite = amax < NOT_FINITE
    amax = tl.where(finite, amax, 0)
    if tensor_scale_ptr is not None:
        scale, factor = nv_scale(amax, tensor_scale)
        scale = tl.where(finite, scale, 0x7F)
    else:
        scale, factor = mx_scale(amax, EMAX)
        scale = tl.where(finite, scale, 0xFF)
        if not STOCHASTIC:
            if WIDTH == 4:
                factor = (factor.to(tl.int32, bitcast=True) >> 16) * 0x10001
            if WIDTH == 6:  # e2m3 as e4m3, e3m2 as e5m2
                factor *= 2.0 ** (BIAS - (7 if MANTISSA == 3 else 15))
    # One thread per block stores its scale. n * 3 // 3 hides contiguity from Triton, as in dequantize_pairs.py.
    to = scale_ptr + row * (dim // BLOCK) + col // BLOCK + m * (dim // BLOCK) + (n * 3 // 3) // (BLOCK // 16)
    first = n % (BLOCK // 16) == 0
    tl.store(to, scale.to(tl.uint8), mask=first if EVEN else first & mask)
    p, q, r, s, t, u, v, w = a, b, c, d, e, f, g, h  # random bits; unused without STOCHASTIC
    if STOCHASTIC:
        counter = (row + m) * (dim // 8) + col // 8 + n * 2
        p, q, r, s = four_random(seed_low, seed_high, counter)
        t, u, v, w = four_random(seed_low, seed_high, counter + 1)
    a = four_codes(a, b, p, q, factor, WIDTH, MANTISSA, BIAS, LARGEST_CODE, BLOCK, STOCHASTIC)
    c = four_codes(c, d, r, s, factor, WIDTH, MANTISSA, BIAS, LARGEST_CODE, BLOCK, STOCHASTIC)
    e = four_codes(e, f, t, u, factor, WIDTH, MANTISSA, BIAS, LARGEST_CODE, BLOCK, STOCHASTIC)
    g = four_codes(g, h, v, w, factor, WIDTH, MANTISSA, BIAS, LARGEST_CODE, BLOCK, STOCHASTIC)
    a, c, e, g = tl.where(finite, a, 0), tl.where(finite, c, 0), tl.where(finite, e, 0), tl.where(finite, g, 0)
    store_units(data_ptr, a, c, e, g, row, col, m, n, mask, dim, WIDTH, EVEN)
