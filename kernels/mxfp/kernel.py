"""Quantisation: one CTA per tile of whole blocks, which computes their scales and writes data and scales in one pass.

Back-of-the-envelope estimate, bf16, 8192 x 8192 (65536 x 4096), one NVIDIA H200 that copies 4254 GB/s; 2 bytes per
element are read:

              written per element     bytes              lower bound
mxfp8         1 + 1/32                203 MB (814 MB)    48 us (191 us)
mxfp6         3/4 + 1/32              187 MB (747 MB)    44 us (176 us)
mxfp4         1/2 + 1/32              170 MB (680 MB)    40 us (160 us)
nvfp4         1/2 + 1/16              172 MB (688 MB)    40 us (162 us); x is read twice unless its scale is given

On Hopper `pairs.py` is used for bf16. Here an element of mxfp4 takes 21 SASS instructions (two for the maximum, nine
for the rounding, two for the sign, the rest for unpacking, packing and the scale), 11 of them on the integer pipe. At
64 of these per cycle and SM, the lower bound leaves time for 9: mxfp4 is bound by instructions as much as by bytes.
mxfp8 has 18, and time for 11.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codec import (
    NOT_FINITE,
    SMALLEST_TENSOR_SCALE,
    encode,
    encode_at_random,
    four_random,
    interleave,
    interleave_four,
    mx_scale,
    nv_scale,
    pack_six,
    pairs,
)


@triton.jit
def load_bits(
    x_ptr, row, col, rows, dim, stride_xm, stride_xn, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Loads a tile of x as fp32 bits, with zeros out of bounds."""
    m, n = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    mask = None if EVEN else (m < rows)[:, None] & (n < dim)[None, :]
    at = x_ptr + m[:, None] * stride_xm + n[None, :] * stride_xn
    return tl.load(at, mask=mask, other=None if EVEN else 0.0).to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def corner(columns, BACKWARDS: tl.constexpr, ONE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first row and column of this CTA's tile. ONE: a row has one tile, which saves a division. BACKWARDS: tiles in
    reverse order, for a second pass over x, because the first leaves the end of x in L2."""
    tile = tl.program_id(0)
    if BACKWARDS:
        tile = tl.num_programs(0) - 1 - tile
    if ONE:
        return tile.to(tl.int64) * BLOCK_M, tile.to(tl.int64) * 0
    tiles_n = (columns - 1) // BLOCK_N + 1  # tl.cdiv(columns, BLOCK_N) overflows 32 bits just below 2^31
    return (tile // tiles_n).to(tl.int64) * BLOCK_M, (tile % tiles_n).to(tl.int64) * BLOCK_N


@triton.jit
def store_tile(ptr, tile, row, col, rows, columns, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Stores a tile of a row-major matrix."""
    m, n = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    mask = None if EVEN else (m < rows)[:, None] & (n < columns)[None, :]
    tl.store(ptr + m[:, None] * columns + n[None, :], tile, mask=mask)


@triton.jit
def zero_unless(finite, packed, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr):
    """The packed tile, with zeros in the blocks that are not finite."""
    blocks = tl.reshape(packed, [BLOCK_M, BLOCK_N // BLOCK, BLOCK])
    return tl.reshape(tl.where(finite[:, :, None], blocks, 0), [BLOCK_M, BLOCK_N])


@triton.jit
def tensor_scale_of(amax_ptr):
    """NVFP4's tensor scale: the largest magnitude, whose fp32 bits are at amax_ptr, times 1 / (448 · 6)."""
    amax = tl.load(amax_ptr).to(tl.float32, bitcast=True)
    return tl.where(amax > 0, tl.maximum(amax * (1 / 2688), SMALLEST_TENSOR_SCALE), 1.0)


@triton.jit
def with_tensor_scale(amax, tensor_scale_ptr, amax_ptr):
    """Returns amax of the blocks and NVFP4's tensor scale, which is computed and stored with an amax_ptr, else loaded.
    If the scale is invalid, all blocks count as not finite."""
    if amax_ptr is not None:
        tensor_scale = tensor_scale_of(amax_ptr)
        tl.store(tensor_scale_ptr, tensor_scale, mask=tl.program_id(0) == 0)
    else:
        tensor_scale = tl.load(tensor_scale_ptr)
        ordered = tensor_scale.to(tl.int32, bitcast=True)
        usable = tl.where(ordered < (10 << 23), False, ordered < NOT_FINITE)  # from 2^-117 on
        amax = tl.where(usable, amax, NOT_FINITE)
        tensor_scale = tl.where(usable, tensor_scale, 1.0)
    return amax, tensor_scale


@triton.jit(do_not_specialize=["rows"])
def _mxfp_amax_kernel(
    x_ptr,
    amax_ptr,
    rows,
    dim,
    stride_xm,
    stride_xn,
    EVEN: tl.constexpr,
    ONE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Atomic maximum of the finite magnitudes, as fp32 bits, which are ordered as the values, into an int32 initialised
    with zero. The result does not depend on the order of CTAs."""
    row, col = corner(dim, False, ONE, BLOCK_M, BLOCK_N)
    bits = load_bits(x_ptr, row, col, rows, dim, stride_xm, stride_xn, EVEN, BLOCK_M, BLOCK_N) & 0x7FFFFFFF
    tl.atomic_max(amax_ptr, tl.max(tl.where(bits < NOT_FINITE, bits, 0)), sem="relaxed")


@triton.jit(do_not_specialize=["seed_low", "seed_high", "rows"])
def _mxfp_quantize_kernel(
    x_ptr,
    data_ptr,
    scale_ptr,
    tensor_scale_ptr,
    amax_ptr,
    seed_low,
    seed_high,
    rows,
    dim,
    padded,
    stride_xm,
    stride_xn,
    WIDTH: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    EMAX: tl.constexpr,
    BLOCK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    EVEN: tl.constexpr,
    ONE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Quantises x [rows, dim] to data and scales of rows of `padded` elements, dim rounded up to a multiple of BLOCK.

    tensor_scale_ptr  None unless nvfp4; with an amax_ptr the scale is stored, else loaded
    """
    row, col = corner(padded, amax_ptr is not None, ONE, BLOCK_M, BLOCK_N)
    bits = load_bits(x_ptr, row, col, rows, dim, stride_xm, stride_xn, EVEN, BLOCK_M, BLOCK_N)
    blocks = tl.reshape(bits, [BLOCK_M, BLOCK_N // BLOCK, BLOCK])
    amax = tl.max(blocks & 0x7FFFFFFF, axis=2)
    if tensor_scale_ptr is not None:
        amax, tensor_scale = with_tensor_scale(amax, tensor_scale_ptr, amax_ptr)
    # A block with a NaN or an infinity has the scale NaN, and zeros as data, which are set after packing.
    finite = amax < NOT_FINITE
    amax = tl.where(finite, amax, 0)
    if tensor_scale_ptr is not None:
        scale, inverse = nv_scale(amax, tensor_scale, LARGEST)
        scale = tl.where(finite, scale, 0x7F)
    else:
        scale, inverse = mx_scale(amax, EMAX)
        scale = tl.where(finite, scale, 0xFF)
    scale_col = col // BLOCK
    store_tile(scale_ptr, scale.to(tl.uint8), row, scale_col, rows, padded // BLOCK, EVEN, BLOCK_M, BLOCK_N // BLOCK)
    y = tl.reshape(tl.abs(blocks.to(tl.float32, bitcast=True)) * inverse[:, :, None], [BLOCK_M, BLOCK_N])
    if STOCHASTIC:
        m, n = row + tl.arange(0, BLOCK_M), col // 8 + tl.arange(0, BLOCK_N // 8)
        a, b, c, d = four_random(seed_low, seed_high, m[:, None] * (padded // 8) + n[None, :])
        two = tl.reshape(interleave_four(a, b, c, d), [BLOCK_M, BLOCK_N // 2])
        random = interleave(two & 0xFFFF, (two >> 16) & 0xFFFF, BLOCK_M, BLOCK_N)
        codes = encode_at_random(y, random, MANTISSA, BIAS, LARGEST)
    else:
        codes = encode(y, MANTISSA, BIAS, LARGEST)
    codes |= (bits >> (32 - WIDTH)) & (1 << (WIDTH - 1))
    if WIDTH == 8:
        codes = zero_unless(finite, codes, BLOCK_M, BLOCK_N, BLOCK)
        store_tile(data_ptr, codes.to(tl.uint8), row, col, rows, padded, EVEN, BLOCK_M, BLOCK_N)
    elif WIDTH == 4:
        low, high = pairs(codes, BLOCK_M, BLOCK_N)
        packed = zero_unless(finite, low | (high << 4), BLOCK_M, BLOCK_N // 2, BLOCK // 2)
        store_tile(data_ptr, packed.to(tl.uint8), row, col // 2, rows, padded // 2, EVEN, BLOCK_M, BLOCK_N // 2)
    else:
        m, n = row + tl.arange(0, BLOCK_M), col // 16 + tl.arange(0, BLOCK_N // 16)
        mask = None if EVEN else (m < rows)[:, None] & (n < padded // 16)[None, :]
        at = data_ptr + m[:, None] * (padded // 16 * 3) + n[None, :] * 3
        first, second, third = pack_six(codes, BLOCK_M, BLOCK_N)
        tl.store(at, zero_unless(finite, first, BLOCK_M, BLOCK_N // 16, BLOCK // 16), mask=mask)
        tl.store(at + 1, zero_unless(finite, second, BLOCK_M, BLOCK_N // 16, BLOCK // 16), mask=mask)
        tl.store(at + 2, zero_unless(finite, third, BLOCK_M, BLOCK_N // 16, BLOCK // 16), mask=mask)
