"""Dequantisation: data times scale. On Hopper dequantize_pairs.py is used for whole blocks to bf16 and fp16.

Back-of-the-envelope estimate, to bf16, 8192 x 8192 (65536 x 4096): reads and writes are those of quantisation,
exchanged, so the bounds are the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codec import decode, decode_scale, interleave, unpack_six
from .kernel import corner


@triton.jit(do_not_specialize=["rows"])
def _mxfp_dequantize_kernel(
    data_ptr,
    scale_ptr,
    tensor_scale_ptr,
    y_ptr,
    rows,
    dim,
    padded,
    WIDTH: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    E8M0: tl.constexpr,
    EVEN: tl.constexpr,
    ONE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Dequantises data and scales of rows of `padded` elements to y [rows, dim]."""
    row, col = corner(padded, False, ONE, BLOCK_M, BLOCK_N)
    m = row + tl.arange(0, BLOCK_M)
    if WIDTH == 8:
        codes = _load_tile(data_ptr, m, rows, col, padded, EVEN, BLOCK_N)
    elif WIDTH == 4:
        packed = _load_tile(data_ptr, m, rows, col // 2, padded // 2, EVEN, BLOCK_N // 2)
        codes = interleave(packed & 0xF, packed >> 4, BLOCK_M, BLOCK_N)
    else:
        n = col // 16 + tl.arange(0, BLOCK_N // 16)
        mask = None if EVEN else (m < rows)[:, None] & (n < padded // 16)[None, :]
        at = data_ptr + m[:, None] * (padded // 16 * 3) + n[None, :] * 3
        first, second, third = tl.load(at, mask=mask), tl.load(at + 1, mask=mask), tl.load(at + 2, mask=mask)
        codes = unpack_six(first, second, third, BLOCK_M, BLOCK_N)
    scale = _load_tile(scale_ptr, m, rows, col // BLOCK, padded // BLOCK, EVEN, BLOCK_N // BLOCK)
    blocks = tl.reshape(decode(codes, WIDTH, MANTISSA, BIAS), [BLOCK_M, BLOCK_N // BLOCK, BLOCK])
    y = tl.reshape(blocks * decode_scale(scale, E8M0)[:, :, None], [BLOCK_M, BLOCK_N])
    if tensor_scale_ptr is not None:
        y *= tl.load(tensor_scale_ptr)
    n = col + tl.arange(0, BLOCK_N)
    mask = None if EVEN else (m < rows)[:, None] & (n < dim)[None, :]
    tl.store(y_ptr + m[:, None] * dim + n[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_tile(ptr, m, rows, col, columns, EVEN: tl.constexpr, BLOCK_N: tl.constexpr):
    """Loads a tile of a row-major matrix of bytes as int32."""
    n = col + tl.arange(0, BLOCK_N)
    mask = None if EVEN else (m < rows)[:, None] & (n < columns)[None, :]
    return tl.load(ptr + m[:, None] * columns + n[None, :], mask=mask, other=None if EVEN else 0).to(tl.int32)
