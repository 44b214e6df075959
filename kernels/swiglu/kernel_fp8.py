"""Gated linear units with an fp8 output: y is quantised in registers, in blocks of 1x128.

Napkin maths, bf16, n elements of output, one NVIDIA H200 that copies 4254 GB/s:
  1x128                   reads gate and up, writes data            5·n bytes   16384 x 11008: 902 MB, 212 us
  … then quantised        y written and read beside that            9·n bytes                        381 us
  with a transposed copy  reads gate and up, writes data, data_t    6·n bytes                        254 us
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activation import _activation
from .fp8_output import encode, finite_or_nan, inverse, scale_of, store_scale


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
    """With DATA, data and scales of a tile of 128 columns, of which a row has one scale. With TRANSPOSE, data_t
    [cols, rows] and its scales of a tile of 128 rows, of which a column has one. y is NaN where it is not finite, and
    does not count there."""
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    y = finite_or_nan(y) if EVEN else tl.where(inside, finite_or_nan(y), 0.0)
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
def _swiglu_fp8_kernel(
    gate_ptr,
    up_ptr,
    data_ptr,
    scale_ptr,
    data_t_ptr,
    scale_t_ptr,
    rows,
    cols,
    stride_gm,
    stride_um,
    ACTIVATION: tl.constexpr,
    DATA: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    E4M3: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A CTA for each tile. BLOCK_N is 128 with DATA, BLOCK_M with TRANSPOSE."""
    tiles_n = tl.cdiv(cols, BLOCK_N)
    row = tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    wide_row = row.to(tl.int64)[:, None]
    mask = None if EVEN else (row < rows)[:, None] & (col < cols)[None, :]
    other = None if EVEN else 0.0
    gate = tl.load(gate_ptr + wide_row * stride_gm + col[None, :], mask=mask, other=other)
    up = tl.load(up_ptr + wide_row * stride_um + col[None, :], mask=mask, other=other)
    y = _activation(gate.to(tl.float32), ACTIVATION, gate.dtype == tl.float32) * up.to(tl.float32)
    y = y.to(gate.dtype)
    _store_quantised(
        y, row, col, rows, cols, data_ptr, scale_ptr, data_t_ptr, scale_t_ptr,
        DATA, TRANSPOSE, E4M3, POW2, NATIVE, EVEN,
    )  # fmt: skip
