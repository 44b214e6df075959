"""GELU with an fp8 output: y is quantised in registers, in blocks of 1x128.

Estimate, bf16, n elements of output, one NVIDIA H200 that copies 4254 GB/s:
  1x128                   reads x, writes data            3·n bytes   65536 x 4096: 805 MB, 189 us
  … then quantised        y written and read beside it    7·n bytes                       442 us
  with a transposed copy  reads x, writes data, data_t    4·n bytes                       252 us
"""

from __future__ import annotations

import triton
import triton.language as tl

from .fp8_output import encode, finite_or_nan, inverse, scale_of, store_scale
from .kernel import _gaussian_cdf, _logistic


@triton.jit
def _store_quantised(
    y,
    row,
    col,
    rows,
    cols,
    data_ptr,
    scale_ptr,
    data_t_ptr,
    scale_t_ptr,
    DATA: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    E4M3: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Quantises and stores a tile of y. DATA: stores data, with one scale per row of a tile of 128 columns. TRANSPOSE:
    stores data_t [cols, rows], with one scale per column of a tile of 128 rows. Elements that are not finite become NaN
    and do not count in a scale; out of bounds y is 0 and does not either."""
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    y = finite_or_nan(y)
    magnitude = tl.where(y == y, tl.abs(y), 0.0)
    wide_row, wide_col = row.to(tl.int64), col.to(tl.int64)
    mask = None if EVEN else inside
    if DATA:
        scale = scale_of(tl.max(magnitude, axis=1), E4M3, POW2)
        codes = encode(y * inverse(scale, POW2)[:, None], E4M3, NATIVE)
        tl.store(data_ptr + wide_row[:, None] * cols + col[None, :], codes, mask=mask)
        store_scale(scale_ptr + wide_row * tl.cdiv(cols, 128) + tl.min(col, axis=0) // 128, scale, row < rows)
    if TRANSPOSE:
        scale = scale_of(tl.max(magnitude, axis=0), E4M3, POW2)
        codes = tl.trans(encode(y * inverse(scale, POW2)[None, :], E4M3, NATIVE))
        mask = None if EVEN else tl.trans(inside)
        tl.store(data_t_ptr + wide_col[:, None] * rows + row[None, :], codes, mask=mask)
        store_scale(scale_t_ptr + wide_col * tl.cdiv(rows, 128) + tl.min(row, axis=0) // 128, scale, col < cols)


@triton.jit
def _gelu(x, APPROXIMATE: tl.constexpr, IS_FP32: tl.constexpr):
    """y in fp32, by the formulas of `_gelu_fwd_tile`. It is 0 for x = 0."""
    if APPROXIMATE == "tanh":
        s, _ = _logistic(x, x * x, IS_FP32)
        y = x * s
    else:
        _, cdf = _gaussian_cdf(x, IS_FP32)
        y = x * cdf
    return y


@triton.jit
def _gelu_fp8_kernel(
    x_ptr,
    data_ptr,
    scale_ptr,
    data_t_ptr,
    scale_t_ptr,
    rows,
    cols,
    stride_xm,
    APPROXIMATE: tl.constexpr,
    DATA: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    E4M3: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One CTA per tile. DATA requires BLOCK_N = 128, TRANSPOSE requires BLOCK_M = 128."""
    tiles_n = tl.cdiv(cols, BLOCK_N)
    row = tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    wide_row = row.to(tl.int64)[:, None]
    mask = None if EVEN else (row < rows)[:, None] & (col < cols)[None, :]
    other = None if EVEN else 0.0
    x = tl.load(x_ptr + wide_row * stride_xm + col[None, :], mask=mask, other=other)
    y = _gelu(x.to(tl.float32), APPROXIMATE, x.dtype == tl.float32).to(x.dtype)
    _store_quantised(
        y, row, col, rows, cols, data_ptr, scale_ptr, data_t_ptr, scale_t_ptr,
        DATA, TRANSPOSE, E4M3, POW2, NATIVE, EVEN,
    )  # fmt: skip
