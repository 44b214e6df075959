"""fused_mlp as GEMMs with the activation in an epilogue, in Triton.

Estimate, bf16, M rows, D -> H -> D, one NVIDIA H200 at 790 TFLOP/s and 4254 GB/s. A GEMM has 2·M·D·H FLOPs. The
forward has two (gated three), the backward four (gated six), plus one or two that recompute with save="input".
                                         forward     floor    hidden, written and read
  205 000 rows, 512 -> 1365 -> 512       573 GFLOP   726 us   1119 MB, 263 us
  11 000 rows, 512 -> 1365 -> 512         31 GFLOP    39 us     60 MB (it stays in L2)
  8192 rows, 4096 -> 11008 -> 4096      1478 GFLOP  1870 us    361 MB, 85 us
The tensor cores are the bound. The traffic of the hidden overlaps them, except in the first and last tile of a CTA.

The rows of the hidden and of its gradient are padded with zeros to a multiple of 16 elements. So GEMMs with this
dimension as K or as N load whole vectors: a width of 1365 costs what 1376 would.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activation import _activation, _activation_and_gradient

# Arguments that change from call to call come first, then integers, then constexprs: see `Launch`.


@triton.jit
def _raster(place, tiles_m, tiles_n, RASTER: tl.constexpr):
    """The tile (m, n) at this place of the grouped tile order: RASTER row tiles of a column, then the next column."""
    band = RASTER * tiles_n
    first = place // band * RASTER
    height = tl.minimum(tiles_m - first, RASTER)
    return first + place % band % height, place % band // height


@triton.jit
def _rows_times_weight(
    acc,
    a_ptr,
    b_ptr,
    depth_a,
    depth_b,
    stride_ak,
    stride_bk,
    row_mask,
    col_mask,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """acc + Σ_k a · b in fp32. a_ptr [BLOCK_M, 1] and b_ptr [1, BLOCK_N] point to k = 0. depth_a and depth_b are K of a
    and b; they differ if one of the two is padded with zeros."""
    k = tl.arange(0, BLOCK_K)
    a_ptr = a_ptr + k.to(tl.int64)[None, :] * stride_ak
    b_ptr = b_ptr + k.to(tl.int64)[:, None] * stride_bk
    for first in tl.range(0, depth_b, BLOCK_K):
        a_mask, b_mask = row_mask, col_mask
        if not EVEN_K:
            a_mask = row_mask & (k < depth_a - first)[None, :]
            b_mask = col_mask & (k < depth_b - first)[:, None]
        a = tl.load(a_ptr, mask=a_mask, other=0.0)
        b = tl.load(b_ptr, mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        a_ptr += tl.cast(BLOCK_K, tl.int64) * stride_ak
        b_ptr += tl.cast(BLOCK_K, tl.int64) * stride_bk
    return acc


@triton.jit
def _rows_times_two_weights(
    acc,
    acc_gate,
    a_ptr,
    b_ptr,
    gate_ptr,
    depth,
    stride_ak,
    stride_bk,
    stride_gk,
    row_mask,
    col_mask,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """acc + Σ_k a · b and acc_gate + Σ_k a · gate. Both use the same loads of a."""
    k = tl.arange(0, BLOCK_K)
    a_ptr = a_ptr + k.to(tl.int64)[None, :] * stride_ak
    b_ptr = b_ptr + k.to(tl.int64)[:, None] * stride_bk
    gate_ptr = gate_ptr + k.to(tl.int64)[:, None] * stride_gk
    for first in tl.range(0, depth, BLOCK_K):
        a_mask, b_mask = row_mask, col_mask
        if not EVEN_K:
            left = k < depth - first
            a_mask, b_mask = row_mask & left[None, :], col_mask & left[:, None]
        a = tl.load(a_ptr, mask=a_mask, other=0.0)
        acc = tl.dot(a, tl.load(b_ptr, mask=b_mask, other=0.0), acc, input_precision="ieee")
        acc_gate = tl.dot(a, tl.load(gate_ptr, mask=b_mask, other=0.0), acc_gate, input_precision="ieee")
        a_ptr += tl.cast(BLOCK_K, tl.int64) * stride_ak
        b_ptr += tl.cast(BLOCK_K, tl.int64) * stride_bk
        gate_ptr += tl.cast(BLOCK_K, tl.int64) * stride_gk
    return acc, acc_gate


@triton.jit
def _copy_block(
    src_ptr,
    out_ptr,
    block,
    rows,
    cols,
    pitch,
    stride_n,
    stride_k,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Copies one block of a matrix [rows, cols] to rows of `pitch` elements, zero from column `cols` on."""
    blocks_k = tl.cdiv(pitch, BLOCK_K)
    row = block // blocks_k * BLOCK_N + tl.arange(0, BLOCK_N)
    col = block % blocks_k * BLOCK_K + tl.arange(0, BLOCK_K)
    row_mask, wide_row = (row < rows)[:, None], row.to(tl.int64)[:, None]
    from_src = src_ptr + wide_row * stride_n + col.to(tl.int64)[None, :] * stride_k
    value = tl.load(from_src, mask=row_mask & (col < cols)[None, :], other=0.0)
    tl.store(out_ptr + wide_row * pitch + col[None, :], value, mask=row_mask & (col < pitch)[None, :])


@triton.jit
def _fused_mlp_hidden_kernel(
    x_ptr,
    w_ptr,
    w_gate_ptr,
    bias_ptr,
    hidden_ptr,
    pre_ptr,
    gate_ptr,
    w2_ptr,
    copy_ptr,
    rows,
    cols,
    pitch,
    depth,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    stride_gn,
    stride_gk,
    stride_bias,
    copy_rows,
    stride_2n,
    stride_2k,
    workers,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RASTER: tl.constexpr,
    EVEN_K: tl.constexpr,
    COPY_N: tl.constexpr,
    COPY_K: tl.constexpr,
):
    """hidden = act(pre) or act(gate) · pre, with pre = x · wᵀ + bias and gate = x · w_gateᵀ; [rows, pitch], zero from
    column `cols` on. Writes those of hidden, pre and gate that are not None; without w_gate there is no gate.
    Persistent: each of the first `workers` CTAs processes every workers-th tile. The other CTAs, which exist if
    copy_ptr is not None, copy one block each of w2 [copy_rows, cols] to rows of `pitch` elements."""
    tiles_m, tiles_n, program = tl.cdiv(rows, BLOCK_M), tl.cdiv(pitch, BLOCK_N), tl.program_id(0)
    if copy_ptr is not None:  # noqa: SIM102 (known when compiling, unlike the other)
        if program >= workers:
            _copy_block(
                w2_ptr, copy_ptr, program - workers, copy_rows, cols, pitch, stride_2n, stride_2k, COPY_N, COPY_K
            )
    for place in tl.range(tl.where(program < workers, program, tiles_m * tiles_n), tiles_m * tiles_n, workers):
        tile_m, tile_n = _raster(place, tiles_m, tiles_n, RASTER)
        row, col = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        row_mask, col_mask = (row < rows)[:, None], (col < cols)[None, :]
        from_x = x_ptr + row.to(tl.int64)[:, None] * stride_xm
        from_w = w_ptr + col.to(tl.int64)[None, :] * stride_wn
        to = row.to(tl.int64)[:, None] * pitch + col[None, :]
        inside = row_mask & (col < pitch)[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        if w_gate_ptr is not None:
            from_gate = w_gate_ptr + col.to(tl.int64)[None, :] * stride_gn
            pre, gate = _rows_times_two_weights(
                acc, acc, from_x, from_w, from_gate, depth, stride_xk, stride_wk, stride_gk, row_mask, col_mask,
                BLOCK_K, EVEN_K,
            )  # fmt: skip
        else:
            pre = _rows_times_weight(
                acc, from_x, from_w, depth, depth, stride_xk, stride_wk, row_mask, col_mask, BLOCK_K, EVEN_K
            )
        if bias_ptr is not None:
            from_bias = bias_ptr + col.to(tl.int64) * stride_bias
            pre += tl.load(from_bias, mask=col < cols, other=0.0).to(tl.float32)[None, :]
        if pre_ptr is not None:
            tl.store(pre_ptr + to, pre.to(pre_ptr.dtype.element_ty), mask=inside)
        if gate_ptr is not None:
            tl.store(gate_ptr + to, gate.to(gate_ptr.dtype.element_ty), mask=inside)
        if hidden_ptr is not None:
            if w_gate_ptr is not None:
                hidden = _activation(gate, ACTIVATION) * pre
            else:
                hidden = _activation(pre, ACTIVATION)
            # Past the last column the result is NaN if the row of x is not finite.
            hidden = tl.where(col_mask, hidden, 0.0)
            tl.store(hidden_ptr + to, hidden.to(hidden_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _fused_mlp_rows_kernel(
    a_ptr,
    b_ptr,
    a_gate_ptr,
    b_gate_ptr,
    bias_ptr,
    out_ptr,
    rows,
    cols,
    depth_a,
    depth_b,
    stride_am,
    stride_ak,
    stride_bn,
    stride_bk,
    stride_gn,
    stride_gk,
    stride_bias,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RASTER: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """out = a · bᵀ + a_gate · b_gateᵀ + bias, [rows, cols], contiguous; a_gate has the layout of a.

    Computes y from the hidden and w2, and x's gradient from pre's and w1. If gated, x's gradient also has the term of
    gate's gradient and w_gate, in the same accumulators. Persistent.
    """
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(cols, BLOCK_N)
    for place in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        tile_m, tile_n = _raster(place, tiles_m, tiles_n, RASTER)
        row, col = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        row_mask, col_mask = (row < rows)[:, None], (col < cols)[None, :]
        from_a, wide_col = row.to(tl.int64)[:, None] * stride_am, col.to(tl.int64)[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        acc = _rows_times_weight(
            acc, a_ptr + from_a, b_ptr + wide_col * stride_bn, depth_a, depth_b, stride_ak, stride_bk,
            row_mask, col_mask, BLOCK_K, EVEN_K,
        )  # fmt: skip
        if a_gate_ptr is not None:
            acc = _rows_times_weight(
                acc, a_gate_ptr + from_a, b_gate_ptr + wide_col * stride_gn, depth_a, depth_b, stride_ak, stride_gk,
                row_mask, col_mask, BLOCK_K, EVEN_K,
            )  # fmt: skip
        if bias_ptr is not None:
            from_bias = bias_ptr + col.to(tl.int64) * stride_bias
            acc += tl.load(from_bias, mask=col < cols, other=0.0).to(tl.float32)[None, :]
        out = out_ptr + row.to(tl.int64)[:, None] * cols + col[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=row_mask & col_mask)


@triton.jit
def _fused_mlp_dhidden_kernel(
    dy_ptr,
    w_ptr,
    pre_ptr,
    gate_ptr,
    dpre_ptr,
    dgate_ptr,
    hidden_ptr,
    rows,
    cols,
    loaded,
    pitch,
    depth,
    stride_dym,
    stride_dyk,
    stride_wn,
    stride_wk,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RASTER: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """dh = dy · w2. From dh and the saved pre (and gate): the gradients dpre (and dgate), and the hidden, which w2's
    gradient needs. All are [rows, pitch], zero from column `cols` on. Writes those that are not None. w_ptr is w2ᵀ, of
    which `loaded` columns can be read. Persistent."""
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(pitch, BLOCK_N)
    for place in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        tile_m, tile_n = _raster(place, tiles_m, tiles_n, RASTER)
        row, col = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        row_mask, col_mask = (row < rows)[:, None], (col < cols)[None, :]
        dh = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        dh = _rows_times_weight(
            dh, dy_ptr + row.to(tl.int64)[:, None] * stride_dym, w_ptr + col.to(tl.int64)[None, :] * stride_wn,
            depth, depth, stride_dyk, stride_wk, row_mask, (col < loaded)[None, :], BLOCK_K, EVEN_K,
        )  # fmt: skip
        at = row.to(tl.int64)[:, None] * pitch + col[None, :]
        inside = row_mask & (col < pitch)[None, :]
        pre = tl.load(pre_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if gate_ptr is not None:
            gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
            opened, dgate = _activation_and_gradient(gate, dh * pre, ACTIVATION)
            hidden, dpre = opened * pre, dh * opened
            if dgate_ptr is not None:
                dgate = tl.where(col_mask, dgate, 0.0)
                tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
        else:
            hidden, dpre = _activation_and_gradient(pre, dh, ACTIVATION)
        if dpre_ptr is not None:
            tl.store(dpre_ptr + at, tl.where(col_mask, dpre, 0.0).to(dpre_ptr.dtype.element_ty), mask=inside)
        if hidden_ptr is not None:
            tl.store(hidden_ptr + at, tl.where(col_mask, hidden, 0.0).to(hidden_ptr.dtype.element_ty), mask=inside)
