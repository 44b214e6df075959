"""grouped_gemm_fp8: the grouped GEMMs in Triton.

Back-of-the-envelope estimate, T rows of K, weights [G, N, K], one NVIDIA H200 at 1500 TFLOP/s of fp8 and 4254 GB/s:
  forward    y = x · wᵀ, a group's rows with its weight     2·T·N·K FLOPs    bytes T·K + G·N·K + 2·T·N
  dweights   dyᵀ · x over the rows of each group            2·T·N·K FLOPs    bytes T·(N + K) + 4·G·N·K
                                                 FLOPs        floor     forward's bytes    dweights' bytes
  8 groups, 8192 rows, 4096 x 4096               275 GFLOP    183 us    235 MB,  55 us     604 MB, 142 us
  64 groups, 32768 rows, 2048 x 1408             189 GFLOP    126 us    365 MB,  86 us     851 MB, 200 us
The forward is bound by the tensor cores, dweights with many groups by the writes of fp32 gradients. On Hopper the
tensor cores accumulate fp8 products with some 14 bits. So the accumulators of each K-block of 128 are scaled and added
to fp32 registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .schedule import ENTRY, HEADER, write_table

BLOCK = tl.constexpr(128)  # elements along K that share a scale


@triton.jit
def _half_of(code, E4M3: tl.constexpr):
    """Converts fp8 bytes to fp16, exactly. Only for Triton's interpreter, whose own conversions of fp8 are wrong."""
    wide = code.to(tl.uint16)
    if not E4M3:  # e5m2 is the upper byte of fp16
        return (wide << 8).to(tl.float16, bitcast=True)
    # The exponent bias of fp16 is 8 more than that of e4m3: a factor of 2^8.
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)


@triton.jit
def _raster(place, tiles_m, tiles_n, RASTER: tl.constexpr):
    """The tile (m, n) at this place of the grouped tile order: RASTER row tiles of a column, then the next column."""
    band = RASTER * tiles_n
    first = place // band * RASTER
    height = tl.minimum(tiles_m - first, RASTER)
    return first + place % band % height, place % band // height


# Arguments that change from call to call come first, then integers, then constexprs: see `Launch`. In a model with
# routing the numbers of rows and groups vary from step to step, so that kernels are not specialised for them.


@triton.jit(do_not_specialize=["rows", "groups", "room"])
def _grouped_gemm_fp8_table_kernel(
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
def _rows_times_weight(
    x_ptr,
    w_ptr,
    scale_x_ptr,
    scale_w_ptr,
    depth,
    stride_sxk,
    stride_swk,
    steps,
    X_E4M3: tl.constexpr,
    W_E4M3: tl.constexpr,
    DECODE: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Σ_k x · w in fp32 over `steps` K-blocks, each scaled before it is added. x_ptr [BLOCK_M, 1], w_ptr [1, BLOCK_N]
    and scale_x_ptr [BLOCK_M] point to k = 0; scale_w_ptr points to the single scale of the tile's columns at k = 0."""
    k = tl.arange(0, BLOCK_K)
    x_ptr, w_ptr = x_ptr + k[None, :], w_ptr + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for step in tl.range(0, steps):
        if EVEN_K:
            x, w = tl.load(x_ptr), tl.load(w_ptr)
        else:
            left = depth - step * BLOCK_K
            x = tl.load(x_ptr, mask=k[None, :] < left, other=0.0)
            w = tl.load(w_ptr, mask=k[:, None] < left, other=0.0)
        if DECODE:
            x, w = _half_of(x, X_E4M3), _half_of(w, W_E4M3)
        block = tl.cast(step, tl.int64)
        scale = tl.load(scale_x_ptr + block * stride_sxk) * tl.load(scale_w_ptr + block * stride_swk)
        acc += tl.dot(x, w) * scale[:, None]
        x_ptr += BLOCK_K
        w_ptr += BLOCK_K
    return acc


@triton.jit(
    do_not_specialize=["groups", "stride_sxm", "stride_sxk", "stride_swg", "stride_swn", "stride_swk"],
)
def _grouped_gemm_fp8_rows_kernel(
    x_ptr,
    weights_ptr,
    scale_x_ptr,
    scale_w_ptr,
    table_ptr,
    y_ptr,
    groups,
    cols,
    depth,
    stride_xm,
    stride_wg,
    stride_wn,
    stride_sxm,
    stride_sxk,
    stride_swg,
    stride_swn,
    stride_swk,
    X_E4M3: tl.constexpr,
    W_E4M3: tl.constexpr,
    DECODE: tl.constexpr,
    EVEN_K: tl.constexpr,
    RASTER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y[r, n] = Σ_k x[r, k] · weights[g, n, k], scaled, for the group g of row r, and 0 for a row without one.

    Persistent: a CTA processes every num_programs-th tile of the row tiles in the table. BLOCK_N divides 128, so that a
    tile has one weight scale per K-block. DECODE: operands are bytes, which the kernel converts to fp16.

    Rows and columns out of bounds are clamped to the group's last row or the last column, and not stored.
    """
    tiles_m, tiles_n = tl.load(table_ptr), tl.cdiv(cols, BLOCK_N)
    entries = table_ptr + HEADER + groups * ENTRY
    for place in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        tile_m, tile_n = _raster(place, tiles_m, tiles_n, RASTER)
        entry = entries + tile_m * ENTRY
        group, first, end = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        steps = tl.where(group >= 0, tl.cdiv(depth, BLOCK_K), 0)
        m, n = first + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        row, col = tl.minimum(m, end - 1).to(tl.int64), tl.minimum(n, cols - 1).to(tl.int64)
        weight, of_weight = group.to(tl.int64) * stride_wg, group.to(tl.int64) * stride_swg
        acc = _rows_times_weight(
            x_ptr + row[:, None] * stride_xm,
            weights_ptr + weight + col[None, :] * stride_wn,
            scale_x_ptr + row * stride_sxm,
            scale_w_ptr + of_weight + (tile_n * BLOCK_N // BLOCK).to(tl.int64) * stride_swn,
            depth, stride_sxk, stride_swk, steps,
            X_E4M3, W_E4M3, DECODE, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        y = y_ptr + m.to(tl.int64)[:, None] * cols + n[None, :]
        tl.store(y, acc.to(y_ptr.dtype.element_ty), mask=(m < end)[:, None] & (n < cols)[None, :])


@triton.jit
def _float8_of(code, E4M3: tl.constexpr, DECODE: tl.constexpr):
    """The bytes as fp8 or, with DECODE, converted to fp16."""
    if DECODE:
        return _half_of(code, E4M3)
    return code.to(tl.float8e4nv if E4M3 else tl.float8e5, bitcast=True)


@triton.jit
def _bytes(ptr, DECODE: tl.constexpr):
    """The pointer cast to bytes. With DECODE it already points to bytes."""
    if DECODE:
        return ptr
    return ptr.to(tl.pointer_type(tl.uint8), bitcast=True)


@triton.jit
def _cut_block(
    dy_ptr,
    x_ptr,
    of_n,
    of_k,
    block,
    start,
    end,
    rows,
    DY_E4M3: tl.constexpr,
    X_E4M3: tl.constexpr,
    DECODE: tl.constexpr,
):
    """Σ_r dy · x over the rows of a block that are in [start, end), unscaled. of_n and of_k are offsets of the tile's
    columns. Loads are masked only by `rows`, a multiple of 16, so that they stay vectorised. Rows outside the group may
    hold NaN, and are set to zero in both operands."""
    r = block * BLOCK + tl.arange(0, BLOCK)
    there, inside = r < rows, (r >= start) & (r < end)
    dy = tl.load(_bytes(dy_ptr, DECODE) + of_n[:, None] + r[None, :], mask=there[None, :], other=0)
    x = tl.load(_bytes(x_ptr, DECODE) + of_k[None, :] + r[:, None], mask=there[:, None], other=0)
    dy, x = tl.where(inside[None, :], dy, 0).to(tl.uint8), tl.where(inside[:, None], x, 0).to(tl.uint8)
    return tl.dot(_float8_of(dy, DY_E4M3, DECODE), _float8_of(x, X_E4M3, DECODE))


@triton.jit
def _scaled(sums, scale_dy_ptr, scale_x_ptr, block, stride_sdr, stride_sxr):
    """The accumulators of a block of rows times both scales. Multiplies by one scale after the other: a tile of
    products of scales in addition to the accumulators would spill."""
    scale_dy = tl.load(scale_dy_ptr + tl.cast(block, tl.int64) * stride_sdr)
    scale_x = tl.load(scale_x_ptr + tl.cast(block, tl.int64) * stride_sxr)
    return sums * scale_dy[:, None] * scale_x[None, :]


@triton.jit(do_not_specialize=["stride_sdn", "stride_sdr", "stride_sxk", "stride_sxr"])
def _grouped_gemm_fp8_weights_kernel(
    dy_ptr,
    x_ptr,
    scale_dy_ptr,
    scale_x_ptr,
    table_ptr,
    dweights_ptr,
    rows,
    cols,
    depth,
    stride_dyn,
    stride_xk,
    stride_sdn,
    stride_sdr,
    stride_sxk,
    stride_sxr,
    DY_E4M3: tl.constexpr,
    X_E4M3: tl.constexpr,
    DECODE: tl.constexpr,
    RASTER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """dweights[g, n, k] = Σ over the rows r of group g of dy[n, r] · x[k, r], scaled, in a fixed order, in fp32.

    One CTA per tile. The group with most rows comes first: CTAs start in this order, so that tiles with the largest K
    are not left for the end. A group without rows is filled with zeros. If a group begins or ends within a block of 128
    rows, that block is masked (`_cut_block`); the whole blocks between are not.
    """
    tiles_n, tiles_k = tl.cdiv(cols, BLOCK_N), tl.cdiv(depth, BLOCK_K)
    place = tl.program_id(0) // (tiles_n * tiles_k)
    tile_n, tile_k = _raster(tl.program_id(0) % (tiles_n * tiles_k), tiles_n, tiles_k, RASTER)
    entry = table_ptr + HEADER + place * ENTRY
    group, start, end = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    n, k = tile_n * BLOCK_N + tl.arange(0, BLOCK_N), tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    # Columns out of bounds are clamped to the last column, and not stored.
    col, deep = tl.minimum(n, cols - 1).to(tl.int64), tl.minimum(k, depth - 1).to(tl.int64)
    of_n, of_k = col * stride_dyn, deep * stride_xk
    scale_dy_ptr += col * stride_sdn
    scale_x_ptr += deep * stride_sxk
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    whole, whole_end = tl.cdiv(start, BLOCK), end // BLOCK
    for side in tl.range(0, 2, num_stages=1):  # the partial blocks before and after the whole blocks
        block = tl.where(side == 0, whole - 1, whole_end)
        before, behind = (start % BLOCK != 0) & (start < end), (end % BLOCK != 0) & (whole_end >= whole)
        if tl.where(side == 0, before, behind):
            cut = _cut_block(dy_ptr, x_ptr, of_n, of_k, block, start, end, rows, DY_E4M3, X_E4M3, DECODE)
            acc += _scaled(cut, scale_dy_ptr, scale_x_ptr, block, stride_sdr, stride_sxr)
    r = whole * BLOCK + tl.arange(0, BLOCK)
    dy_tile, x_tile = dy_ptr + of_n[:, None] + r[None, :], x_ptr + of_k[None, :] + r[:, None]
    for block in tl.range(whole, whole_end):
        dy, x = tl.load(dy_tile), tl.load(x_tile)
        if DECODE:
            dy, x = _half_of(dy, DY_E4M3), _half_of(x, X_E4M3)
        acc += _scaled(tl.dot(dy, x), scale_dy_ptr, scale_x_ptr, block, stride_sdr, stride_sxr)
        dy_tile += BLOCK
        x_tile += BLOCK
    out = dweights_ptr + group.to(tl.int64) * cols * depth + n.to(tl.int64)[:, None] * depth + k[None, :]
    tl.store(out, acc.to(dweights_ptr.dtype.element_ty), mask=(n < cols)[:, None] & (k < depth)[None, :])
