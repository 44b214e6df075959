"""fused_mlp in a single kernel, in Triton: the hidden stays in registers and shared memory.

Estimate, bf16, 512 -> 1365 -> 512: a tile of 64 rows reads all weights, 2.8 MB, from L2 for 179 MFLOP. That takes 30 us
of one SM's tensor cores, and 24 us at its share of L2's bandwidth. So the hidden is split: with 564 rows, 9 tiles and
14 parts, a CTA reads 0.2 MB and computes 13 MFLOP, about 2 us each. The partial sums of y are fp32. A second, small
launch adds them in order: 16 MB written and read within L2, about 4 us.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activation import _activation
from .kernel import _rows_times_two_weights, _rows_times_weight


@triton.jit
def _fused_mlp_single_kernel(
    x_ptr,
    w1_ptr,
    w2_ptr,
    w_gate_ptr,
    b1_ptr,
    b2_ptr,
    out_ptr,
    pre_ptr,
    gate_ptr,
    rows,
    hidden,
    loaded,
    pitch,
    dim,
    dim_out,
    part,
    stride_xm,
    stride_xk,
    stride_1n,
    stride_1k,
    stride_gn,
    stride_gk,
    stride_2n,
    stride_2k,
    stride_b1,
    stride_b2,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_O: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """out[s] = act(x · w1ᵀ + b1) · w2ᵀ + b2 over the hidden's columns of part s; [parts, rows, dim_out]. A part has
    `part` columns. b2 is given only if there is one part. Also writes pre and gate, if not None. `loaded` columns of w2
    can be read.

    A CTA keeps BLOCK_M rows of out in registers and loops over blocks of BLOCK_H columns of the hidden: a GEMM with w1,
    the activation, a GEMM with w2.
    """
    tiles = tl.cdiv(rows, BLOCK_M)
    split, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row, out_col = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_O)
    row_mask, out_mask = (row < rows)[:, None], (out_col < dim_out)[None, :]
    from_x = x_ptr + row.to(tl.int64)[:, None] * stride_xm
    acc = tl.zeros([BLOCK_M, BLOCK_O], dtype=tl.float32)
    for first in tl.range(split * part, tl.minimum((split + 1) * part, hidden), BLOCK_H):
        col = first + tl.arange(0, BLOCK_H)
        wide_col, col_mask = col.to(tl.int64), (col < hidden)[None, :]
        from_w1 = w1_ptr + wide_col[None, :] * stride_1n
        zero = tl.zeros([BLOCK_M, BLOCK_H], dtype=tl.float32)
        if w_gate_ptr is not None:
            from_gate = w_gate_ptr + wide_col[None, :] * stride_gn
            pre, gate = _rows_times_two_weights(
                zero, zero, from_x, from_w1, from_gate, dim, stride_xk, stride_1k, stride_gk, row_mask, col_mask,
                BLOCK_K, EVEN_K,
            )  # fmt: skip
        else:
            pre = _rows_times_weight(
                zero, from_x, from_w1, dim, dim, stride_xk, stride_1k, row_mask, col_mask, BLOCK_K, EVEN_K
            )
        if b1_ptr is not None:
            pre += tl.load(b1_ptr + wide_col * stride_b1, mask=col < hidden, other=0.0).to(tl.float32)[None, :]
        to = row.to(tl.int64)[:, None] * pitch + col[None, :]
        inside = row_mask & (col < pitch)[None, :]
        if pre_ptr is not None:
            tl.store(pre_ptr + to, pre.to(pre_ptr.dtype.element_ty), mask=inside)
        if w_gate_ptr is not None:
            if gate_ptr is not None:
                tl.store(gate_ptr + to, gate.to(gate_ptr.dtype.element_ty), mask=inside)
            pre = _activation(gate, ACTIVATION) * pre
        else:
            pre = _activation(pre, ACTIVATION)
        pre = tl.where(col_mask, pre, 0.0).to(w2_ptr.dtype.element_ty)
        w2_mask = (col < loaded)[:, None] & out_mask
        from_w2 = w2_ptr + wide_col[:, None] * stride_2k + out_col.to(tl.int64)[None, :] * stride_2n
        w2 = tl.load(from_w2, mask=w2_mask, other=0.0)
        acc = tl.dot(pre, w2, acc, input_precision="ieee")
    if b2_ptr is not None:
        from_b2 = b2_ptr + out_col.to(tl.int64) * stride_b2
        acc += tl.load(from_b2, mask=out_col < dim_out, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + (split.to(tl.int64) * rows + row.to(tl.int64)[:, None]) * dim_out + out_col[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=row_mask & out_mask)
