"""GEMMs and sums over rows, in Triton: gradients of weights and biases. Also the copy of a weight to padded rows.

The GEMMs use split-K over the rows, since a gradient of 1365 x 512 has too few tiles to fill the GPU. Each partition is
summed in the order of rows into its own fp32 workspace, and the partitions are added in order: repeated runs agree bit
for bit. Six partitions of 1365 x 512 are 17 MB, which stay in L2: 8 us, compared with 363 us for the GEMM over 205 000
rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kernel import _copy_block, _raster


@triton.jit
def _over_rows(
    a_ptr,
    b_ptr,
    start,
    end,
    n,
    k,
    loaded_a,
    loaded_b,
    stride_am,
    stride_bm,
    stride_bk,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Σ_m a[m, n] · b[m, k] in fp32 over the rows m from start to end, for columns n of a and k of b. `loaded_a`
    columns of a and `loaded_b` of b can be read; rows of a are contiguous."""
    row = tl.arange(0, BLOCK_R).to(tl.int64)[:, None]
    a_ptr += (start + row) * stride_am + n[None, :]
    b_ptr += (start + row) * stride_bm + k.to(tl.int64)[None, :] * stride_bk
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for first in tl.range(start, end, BLOCK_R):
        inside = row < end - first
        a = tl.load(a_ptr, mask=inside & (n < loaded_a)[None, :], other=0.0)
        b = tl.load(b_ptr, mask=inside & (k < loaded_b)[None, :], other=0.0)
        acc = tl.dot(tl.trans(a), b, acc, input_precision="ieee")
        a_ptr += tl.cast(BLOCK_R, tl.int64) * stride_am
        b_ptr += tl.cast(BLOCK_R, tl.int64) * stride_bm
    return acc


@triton.jit
def _fused_mlp_weights_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    rows,
    cols,
    depth,
    loaded_a,
    loaded_b,
    part,
    stride_am,
    stride_bm,
    stride_bk,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    RASTER: tl.constexpr,
):
    """out[s, n, k] = Σ_m a[m, n] · b[m, k] over the rows m of split-K partition s, of `part` rows; [parts, cols,
    depth]. `loaded_a` columns of a and `loaded_b` of b can be read; rows of a are contiguous."""
    tiles_n, tiles_k = tl.cdiv(cols, BLOCK_N), tl.cdiv(depth, BLOCK_K)
    split = tl.program_id(0) // (tiles_n * tiles_k)
    tile_n, tile_k = _raster(tl.program_id(0) % (tiles_n * tiles_k), tiles_n, tiles_k, RASTER)
    start = split.to(tl.int64) * part
    end = tl.minimum(start + part, rows)
    n, k = tile_n * BLOCK_N + tl.arange(0, BLOCK_N), tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    acc = _over_rows(
        a_ptr, b_ptr, start, end, n, k, loaded_a, loaded_b, stride_am, stride_bm, stride_bk, BLOCK_N, BLOCK_K, BLOCK_R
    )
    out = out_ptr + (split.to(tl.int64) * cols + n.to(tl.int64)[:, None]) * depth + k[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(n < cols)[:, None] & (k < depth)[None, :])


@triton.jit
def _fused_mlp_bias_kernel(
    a_ptr,
    out_ptr,
    rows,
    cols,
    part,
    stride_am,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """out[s, n] = Σ_m a[m, n] over the rows m of part s; rows of a are contiguous. Reads a once: 2·M·N bytes in bf16,
    49 us for 205000 x 512."""
    tiles_n = tl.cdiv(cols, BLOCK_N)
    split, tile_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    start = split.to(tl.int64) * part
    end = tl.minimum(start + part, rows)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_R)[:, None]
    acc = tl.zeros([BLOCK_R, BLOCK_N], dtype=tl.float32)
    for first in tl.range(start, end, BLOCK_R):
        a = a_ptr + (first + row) * stride_am + n[None, :]
        acc += tl.load(a, mask=(first + row < end) & (n < cols)[None, :], other=0.0).to(tl.float32)
    tl.store(out_ptr + split.to(tl.int64) * cols + n, tl.sum(acc, 0).to(out_ptr.dtype.element_ty), mask=n < cols)


@triton.jit
def _fused_mlp_sum_kernel(
    parts_ptr,
    bias_ptr,
    out_ptr,
    elements,
    cols,
    parts,
    stride_bias,
    BLOCK: tl.constexpr,
):
    """out[i] = Σ_s parts[s, i] + bias[i % cols] in fp32, with the parts in order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    parts_ptr += at
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for _ in tl.range(0, parts):
        acc += tl.load(parts_ptr, mask=inside, other=0.0)
        parts_ptr += elements
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + at % cols * stride_bias, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _fused_mlp_pitch_kernel(
    src_ptr,
    out_ptr,
    rows,
    cols,
    pitch,
    stride_n,
    stride_k,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Copies a matrix [rows, cols] to rows of `pitch` elements, zero from column `cols` on. 1.4 MB read and written for
    512 x 1365: some 2 us, most of them latency. `_fused_mlp_hidden_kernel` can make the same copy in additional CTAs,
    without a launch of its own."""
    _copy_block(src_ptr, out_ptr, tl.program_id(0), rows, cols, pitch, stride_n, stride_k, BLOCK_N, BLOCK_K)
