"""The gradients of x and of both weights in one Triton launch: for few rows, where none of them fills the GPU alone.

564 rows of 512 -> 1365 -> 512 are three GEMMs of 0.8 GFLOP, 1 us each at 790 TFLOP/s. In separate launches each takes 5
to 8 us, in 44 to 72 tiles for 132 SMs. Together they have 248 tiles, two of which are resident on an SM, and read 63 MB
from L2: some 8 us by the rate of L2 (estimated; EXPERIMENTS.md has the whole backward, which was measured).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kernel import _rows_times_weight
from .sums import _over_rows

# Arguments that change from call to call come first, then integers, then constexprs: see `Launch`.


@triton.jit
def _fused_mlp_gradients_kernel(
    dpre_ptr,
    w1_ptr,
    x_ptr,
    dy_ptr,
    hidden_ptr,
    dx_ptr,
    dw1_ptr,
    dw2_ptr,
    rows,
    dim,
    hidden,
    dim_out,
    pitch,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    stride_ym,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    EVEN_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """dx = dpre · w1, dw1 = dpreᵀ · x, dw2 = dyᵀ · hidden, all contiguous. dpre and the hidden are [rows, pitch]; rows
    of dy are contiguous. A CTA computes one tile of one of them. Tiles of dx come first, because their K is the
    largest."""
    place = tl.program_id(0)
    tiles_c, tiles_k = tl.cdiv(dim, BLOCK_C), tl.cdiv(dim, BLOCK_K)
    of_x, of_w1 = tl.cdiv(rows, BLOCK_M) * tiles_c, tl.cdiv(hidden, BLOCK_N) * tiles_k
    if place < of_x:
        row = place // tiles_c * BLOCK_M + tl.arange(0, BLOCK_M)
        col = place % tiles_c * BLOCK_C + tl.arange(0, BLOCK_C)
        row_mask, col_mask = (row < rows)[:, None], (col < dim)[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_C], dtype=tl.float32)
        a_ptr, b_ptr = dpre_ptr + row.to(tl.int64)[:, None] * pitch, w1_ptr + col.to(tl.int64)[None, :] * stride_wk
        acc = _rows_times_weight(acc, a_ptr, b_ptr, pitch, hidden, 1, stride_wn, row_mask, col_mask, BLOCK_H, EVEN_H)
        to = dx_ptr + row.to(tl.int64)[:, None] * dim + col[None, :]
        tl.store(to, acc.to(dx_ptr.dtype.element_ty), mask=row_mask & col_mask)
    elif place < of_x + of_w1:
        tile = place - of_x
        _weight_tile(
            dpre_ptr, x_ptr, dw1_ptr, tile // tiles_k, tile % tiles_k, rows, hidden, dim, pitch, dim, pitch,
            stride_xm, stride_xk, BLOCK_N, BLOCK_K, BLOCK_R,
        )  # fmt: skip
    else:
        tile, tiles_h = place - of_x - of_w1, tl.cdiv(hidden, BLOCK_K)
        _weight_tile(
            dy_ptr, hidden_ptr, dw2_ptr, tile // tiles_h, tile % tiles_h, rows, dim_out, hidden, dim_out, pitch,
            stride_ym, pitch, 1, BLOCK_N, BLOCK_K, BLOCK_R,
        )  # fmt: skip


@triton.jit
def _weight_tile(
    a_ptr,
    b_ptr,
    out_ptr,
    tile_n,
    tile_k,
    rows,
    cols,
    depth,
    loaded_a,
    loaded_b,
    stride_am,
    stride_bm,
    stride_bk,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Computes one tile of out = aᵀ · b, [cols, depth]."""
    n, k = tile_n * BLOCK_N + tl.arange(0, BLOCK_N), tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    acc = _over_rows(
        a_ptr, b_ptr, tl.cast(0, tl.int64), rows, n, k, loaded_a, loaded_b, stride_am, stride_bm, stride_bk,
        BLOCK_N, BLOCK_K, BLOCK_R,
    )  # fmt: skip
    to = out_ptr + n.to(tl.int64)[:, None] * depth + k[None, :]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=(n < cols)[:, None] & (k < depth)[None, :])
