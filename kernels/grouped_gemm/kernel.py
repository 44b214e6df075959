"""grouped_gemm: the GEMMs in Triton.

Estimate, bf16, T rows of K, weights [G, N, K], one NVIDIA H200 at 790 TFLOP/s and 4254 GB/s:
  forward    y = x · wᵀ, a group's rows with its weight     2·T·N·K FLOPs    bytes 2·(T·K + G·N·K + T·N)
  dx         the same GEMM with weights [G, K, N]           2·T·N·K FLOPs    the same bytes
  dweights   dyᵀ · x over the rows of each group            2·T·N·K FLOPs    the same bytes
                                                 FLOPs        floor     bytes    at that rate
  8 groups, 8192 rows, 4096 x 4096               275 GFLOP    348 us    403 MB     95 us
  64 groups, 32768 rows, 1408 x 2048             189 GFLOP    239 us    596 MB    140 us
  128 groups, 32768 rows, 1408 x 2048            189 GFLOP    239 us    965 MB    227 us
So the tensor cores are the bound, if each operand is read from memory about once. The padding of each group's last row
tile costs time too: on average half a tile of 128 rows, which is 12 % for 64 groups of 512 rows each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .schedule import ENTRY, HEADER, write_table

# Arguments that change from call to call come first, then integers, then constexprs: see `Launch`. In a model with
# routing the numbers of rows and groups vary from step to step, so that kernels are not specialised for them.


@triton.jit(do_not_specialize=["rows", "groups", "room"])
def _grouped_gemm_table_kernel(
    offsets_ptr,
    table_ptr,
    rows,
    groups,
    room,
    stride_o,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    TILES: tl.constexpr,
):
    """Writes the table of tiles (schedule.py), which the kernels below read."""
    write_table(offsets_ptr, table_ptr, rows, groups, room, stride_o, BLOCK_M, CHUNK, TILES)


@triton.jit
def _raster(place, tiles_m, tiles_n, RASTER: tl.constexpr):
    """The tile (m, n) at this place of the grouped tile order: RASTER row tiles of a column, then the next column."""
    band = RASTER * tiles_n
    first = place // band * RASTER
    height = tl.minimum(tiles_m - first, RASTER)
    return first + place % band % height, place % band // height


@triton.jit
def _rows_times_weight(
    a_ptr,
    b_ptr,
    depth,
    stride_ak,
    stride_bk,
    row_mask,
    col_mask,
    steps,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Σ_k a · b over `steps` K-blocks, in fp32. a_ptr [BLOCK_M, 1] and b_ptr [1, BLOCK_N] point to k = 0. Rows and
    columns out of bounds affect only elements that are not stored. They are masked, because their addresses may be
    invalid."""
    k = tl.arange(0, BLOCK_K)
    a_ptr = a_ptr + k.to(tl.int64)[None, :] * stride_ak
    b_ptr = b_ptr + k.to(tl.int64)[:, None] * stride_bk
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for step in tl.range(0, steps):
        a_mask, b_mask = row_mask, col_mask
        if not EVEN_K:
            left = k < depth - step * BLOCK_K
            a_mask, b_mask = row_mask & left[None, :], col_mask & left[:, None]
        a = tl.load(a_ptr, mask=a_mask, other=0.0)
        if EVEN_N and EVEN_K:
            b = tl.load(b_ptr)
        else:
            b = tl.load(b_ptr, mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        a_ptr += tl.cast(BLOCK_K, tl.int64) * stride_ak
        b_ptr += tl.cast(BLOCK_K, tl.int64) * stride_bk
    return acc


@triton.jit(do_not_specialize=["groups"])
def _grouped_gemm_rows_kernel(
    a_ptr,
    b_ptr,
    bias_ptr,
    table_ptr,
    out_ptr,
    groups,
    cols,
    depth,
    stride_am,
    stride_ak,
    stride_bg,
    stride_bn,
    stride_bk,
    stride_biasg,
    stride_biasn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RASTER: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """out[r, n] = Σ_k a[r, k] · b[g, n, k] + bias[g, n] for the group g of row r, and 0 for a row without one.

    Computes the forward, and x's gradient with n and k of the weights exchanged. Persistent: a CTA processes every
    num_programs-th tile of the row tiles in the table.
    """
    tiles_m, tiles_n = tl.load(table_ptr), tl.cdiv(cols, BLOCK_N)
    entries = table_ptr + HEADER + groups * ENTRY
    for place in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        tile_m, tile_n = _raster(place, tiles_m, tiles_n, RASTER)
        entry = entries + tile_m * ENTRY
        group, row, end = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        has_group = group >= 0
        steps = tl.where(has_group, tl.cdiv(depth, BLOCK_K), 0)
        rows = row + tl.arange(0, BLOCK_M)
        col = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        row_mask, col_mask = (rows < end)[:, None], (col < cols)[None, :]
        acc = _rows_times_weight(
            a_ptr + rows.to(tl.int64)[:, None] * stride_am,
            b_ptr + group.to(tl.int64) * stride_bg + col.to(tl.int64)[None, :] * stride_bn,
            depth, stride_ak, stride_bk, row_mask, col_mask, steps,
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K,
        )  # fmt: skip
        if bias_ptr is not None:
            from_bias = bias_ptr + group.to(tl.int64) * stride_biasg + col.to(tl.int64) * stride_biasn
            acc += tl.load(from_bias, mask=(col < cols) & has_group, other=0.0).to(tl.float32)[None, :]
        out = out_ptr + rows.to(tl.int64)[:, None] * cols + col[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=row_mask & col_mask)


@triton.jit
def _grouped_gemm_weights_kernel(
    dy_ptr,
    x_ptr,
    table_ptr,
    dweights_ptr,
    cols,
    depth,
    stride_dym,
    stride_dyn,
    stride_xm,
    stride_xk,
    stride_wg,
    stride_wn,
    stride_wk,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    RASTER: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """dweights[g, n, k] = Σ over the rows r of group g of dy[r, n] · x[r, k], in the order of rows, in fp32.

    One CTA per tile. The group with most rows comes first: CTAs start in this order, so that tiles with the largest K
    are not left for the end. A group without rows is filled with zeros.
    """
    tiles_n, tiles_k = tl.cdiv(cols, BLOCK_N), tl.cdiv(depth, BLOCK_K)
    place = tl.program_id(0) // (tiles_n * tiles_k)
    tile_n, tile_k = _raster(tl.program_id(0) % (tiles_n * tiles_k), tiles_n, tiles_k, RASTER)
    entry = table_ptr + HEADER + place * ENTRY
    group, start, end = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    n, k = tile_n * BLOCK_N + tl.arange(0, BLOCK_N), tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    row = tl.arange(0, BLOCK_R).to(tl.int64)[:, None]
    dy_ptr += start.to(tl.int64) * stride_dym + row * stride_dym + n.to(tl.int64)[None, :] * stride_dyn
    x_ptr += start.to(tl.int64) * stride_xm + row * stride_xm + k.to(tl.int64)[None, :] * stride_xk
    n_mask, k_mask = (n < cols)[None, :], (k < depth)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for first in tl.range(0, end - start, BLOCK_R):
        # Both operands are masked, because rows past the group's end may hold inf or NaN.
        n_inside, k_inside = row < end - start - first, row < end - start - first
        if not EVEN_N:
            n_inside = n_inside & n_mask
        if not EVEN_K:
            k_inside = k_inside & k_mask
        dy = tl.load(dy_ptr, mask=n_inside, other=0.0)
        x = tl.load(x_ptr, mask=k_inside, other=0.0)
        acc = tl.dot(tl.trans(dy), x, acc, input_precision="ieee")
        dy_ptr += tl.cast(BLOCK_R, tl.int64) * stride_dym
        x_ptr += tl.cast(BLOCK_R, tl.int64) * stride_xm
    out = dweights_ptr + group.to(tl.int64) * stride_wg
    out += n.to(tl.int64)[:, None] * stride_wn + k.to(tl.int64)[None, :] * stride_wk
    tl.store(out, acc.to(dweights_ptr.dtype.element_ty), mask=(n < cols)[:, None] & k_mask)


@triton.jit
def _grouped_gemm_bias_kernel(
    dy_ptr,
    table_ptr,
    dbias_ptr,
    cols,
    stride_dym,
    stride_dyn,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """dbias[g, n] = Σ_r dy[r, n] over the rows r of group g, in a fixed order, in fp32. Reads dy once: 2·T·N bytes in
    bf16, 22 us for 32768 x 1408."""
    tiles_n = tl.cdiv(cols, BLOCK_N)
    place, tile_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    entry = table_ptr + HEADER + place * ENTRY
    group, start, end = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_R)[:, None]
    acc = tl.zeros([BLOCK_R, BLOCK_N], dtype=tl.float32)
    for first in tl.range(start, end, BLOCK_R):
        dy = dy_ptr + (first + row).to(tl.int64) * stride_dym + n.to(tl.int64)[None, :] * stride_dyn
        acc += tl.load(dy, mask=(first + row < end) & (n < cols)[None, :], other=0.0).to(tl.float32)
    dbias = tl.sum(acc, 0).to(dbias_ptr.dtype.element_ty)
    tl.store(dbias_ptr + group.to(tl.int64) * cols + n, dbias, mask=n < cols)
