"""heads_mlp: the forward, in Triton.

Estimate, bf16, R rows of D = 512, K = 10 heads of H = 1365, O = 3, one NVIDIA H200 at 790 TFLOP/s and 4254 GB/s:
  forward    x · w1ᵀ                   2·R·K·H·D FLOPs   205000 rows: 2.87 TFLOP, 3.6 ms; x, y: 222 MB, 52 us
  backward   x · w1ᵀ again, dx, dw1    6·R·K·H·D FLOPs   205000 rows: 8.6 TFLOP, 10.9 ms
The second GEMM has 6·H FLOPs a row and head, 0.6 % of the first. In memory the hidden would have 5.6 GB, 1.3 ms to
write and as much to read; here it stays in registers. The weights, 14 MB, stay in L2, from which each tile of rows
reads them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activation import _activation
from .heads_backward.dhidden import rows_times_weight

# Arguments that change from call to call come first, then integers, then constexprs: see `Launch`.


@triton.jit
def _heads_mlp_fwd_kernel(
    x_ptr,
    w1_ptr,
    w2_ptr,
    y_ptr,
    rows,
    dim,
    heads,
    hidden,
    dim_out,
    heads_per_cta,
    stride_xm,
    stride_xk,
    stride_1g,
    stride_1h,
    stride_1k,
    stride_2g,
    stride_2o,
    stride_2h,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_O: tl.constexpr,
    EVEN_K: tl.constexpr,
    RESIDENT: tl.constexpr,
):
    """y[r, g] = w2[g] · act(w1[g] · x[r]) for BLOCK_M rows and `heads_per_cta` heads; [rows, heads, dim_out].

    RESIDENT: BLOCK_K covers all of D, so that a row of x is loaded once for all heads. Otherwise x is read again, from
    L2, for each block of BLOCK_H columns of the hidden.
    """
    groups = tl.cdiv(heads, heads_per_cta)
    tile, first_head = tl.program_id(0) // groups, tl.program_id(0) % groups * heads_per_cta
    row, out_col, k = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_O), tl.arange(0, BLOCK_K)
    row_mask, out_mask = (row < rows)[:, None], (out_col < dim_out)[None, :]
    from_x = x_ptr + row.to(tl.int64)[:, None] * stride_xm
    if RESIDENT:
        x = tl.load(from_x + k.to(tl.int64)[None, :] * stride_xk, mask=row_mask & (k < dim)[None, :], other=0.0)
    for index in tl.range(0, tl.minimum(heads_per_cta, heads - first_head)):
        head = (first_head + index).to(tl.int64)
        w1, w2 = w1_ptr + head * stride_1g, w2_ptr + head * stride_2g
        acc = tl.zeros([BLOCK_M, BLOCK_O], dtype=tl.float32)
        for first in tl.range(0, hidden, BLOCK_H):
            col = first + tl.arange(0, BLOCK_H)
            from_w1, col_mask = w1 + col.to(tl.int64)[None, :] * stride_1h, (col < hidden)[None, :]
            if RESIDENT:
                b_mask = col_mask & (k < dim)[:, None]
                b = tl.load(from_w1 + k.to(tl.int64)[:, None] * stride_1k, mask=b_mask, other=0.0)
                pre = tl.dot(x, b, input_precision="ieee")
            else:
                pre = rows_times_weight(
                    from_x, from_w1, dim, stride_xk, stride_1k, row_mask, col_mask, BLOCK_M, BLOCK_H, BLOCK_K, EVEN_K
                )
            from_w2 = w2 + col.to(tl.int64)[:, None] * stride_2h + out_col.to(tl.int64)[None, :] * stride_2o
            b2 = tl.load(from_w2, mask=(col < hidden)[:, None] & out_mask, other=0.0)
            if first + BLOCK_H > hidden:
                pre = tl.where(col_mask, pre, 0.0)  # beyond the hidden's end it is NaN where x is not finite: inf · 0
            # Past the last column w2 and act(0) are 0.
            acc = tl.dot(_activation(pre, ACTIVATION).to(b2.dtype), b2, acc, input_precision="ieee")
        to = y_ptr + (row.to(tl.int64)[:, None] * heads + head) * dim_out + out_col[None, :]
        tl.store(to, acc.to(y_ptr.dtype.element_ty), mask=row_mask & out_mask)
