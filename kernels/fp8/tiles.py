"""All granularities except "row": one CTA per tile of x. transposed.py also writes a transposed copy.

The scale of a block of 128 is computed by the tile's CTA, so x is read once. Estimate, bf16, 65536 x 4096, one NVIDIA
H200 that copies 4254 GB/s: 1x128 reads 2 and writes 1 byte per element, and writes 4 bytes per block: 814 MB, 191 us.

The scale of a tensor or of a column must be known before the first element is written. So x is read twice, 5 bytes per
element, 315 us, or once if the scale is given.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .formats import encode, finite_or_nan, inverse, load_scale, scale_of, store_scale


@triton.jit
def tile_of(dim, BLOCK_N: tl.constexpr, SOURCE: tl.constexpr):
    """(index, row, column) of this CTA's tile. The second pass over x processes tiles in reverse order, because the
    tiles that the first pass read last are still in L2."""
    tiles_n = (dim - 1) // BLOCK_N + 1  # tl.cdiv(dim, BLOCK_N) overflows 32 bits just below 2^31
    tile = tl.num_programs(0) - 1 - tl.program_id(0) if SOURCE == "amax" else tl.program_id(0)
    return tile, (tile // tiles_n).to(tl.int64), (tile % tiles_n).to(tl.int64)


@triton.jit
def rectangle(ptr, m, n, stride_m):
    """Pointers to rows m by columns n. Row offsets have 64 bits, because the row stride may be large."""
    return ptr + m.to(tl.int64)[:, None] * stride_m + n[None, :]


@triton.jit
def inside(m, n, height, width):
    """The mask of a partial tile of height by width elements."""
    return (m < height)[:, None] & (n < width)[None, :]


@triton.jit
def raise_to(ptr, amax, mask=None):
    """Atomic maximum in memory, on the bits of fp32, which are ordered as the values if none is negative or NaN. The
    result does not depend on the order of CTAs."""
    bits = tl.where(amax > 0, amax, 0.0).to(tl.int32, bitcast=True)
    tl.atomic_max(ptr, bits, mask=mask, sem="relaxed")


@triton.jit
def group_scale(
    magnitudes,
    AXIS: tl.constexpr,
    amax_ptr,
    index,
    at,
    valid,
    first,
    SOURCE: tl.constexpr,
    E4M3: tl.constexpr,
    POW2: tl.constexpr,
):
    """The scales of a tile, from amax along AXIS. Unless SOURCE is "given" they are stored at `at`: by every tile if
    each has its own, else only by the `first` of the tiles that share them."""
    if SOURCE == "given":
        return load_scale(at, valid)
    if SOURCE == "amax":
        amax = tl.load(amax_ptr + index, mask=valid, other=0).to(tl.float32, bitcast=True)
    else:
        amax = tl.max(magnitudes, axis=AXIS)
    scale = scale_of(amax, E4M3, POW2)
    store_scale(at, scale, valid if SOURCE == "tile" else valid & first)
    return scale


@triton.jit(do_not_specialize=["rows"])
def _fp8_amax_kernel(
    x_ptr,
    row_amax_ptr,
    col_amax_ptr,
    rows,
    dim,
    stride_xm,
    PER_ROW: tl.constexpr,
    PER_COLUMN: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """Computes the largest magnitude per row, per column, or else of the tensor (at row_amax_ptr), into int32
    initialised with zeros."""
    tiles_n = (dim - 1) // BLOCK_N + 1
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    row, col = (tl.program_id(0) // tiles_n).to(tl.int64) * BLOCK_M, (tl.program_id(0) % tiles_n).to(tl.int64) * BLOCK_N
    height, width = tl.minimum(rows - row, BLOCK_M).to(tl.int32), tl.minimum(dim - col, BLOCK_N).to(tl.int32)
    x_ptrs = rectangle(x_ptr + row * stride_xm + col, m, n, stride_xm)
    mask = None if EVEN else inside(m, n, height, width)
    x = tl.abs(finite_or_nan(tl.load(x_ptrs, mask=mask, other=None if EVEN else 0.0, eviction_policy=EVICTION)))
    if PER_ROW:
        raise_to(row_amax_ptr + row + m, tl.max(x, axis=1), m < height)
    if PER_COLUMN:
        raise_to(col_amax_ptr + col + n, tl.max(x, axis=0), n < width)
    if not PER_ROW and not PER_COLUMN:
        raise_to(row_amax_ptr, tl.max(x))


# Specialising for the strides of scales would compile more kernels without a gain.
@triton.jit(do_not_specialize=["stride_sm", "stride_sn"])
def _fp8_tile_kernel(
    x_ptr,
    data_ptr,
    scale_ptr,
    amax_ptr,
    rows,
    dim,
    stride_xm,
    stride_sm,
    stride_sn,
    GROUPS: tl.constexpr,
    SOURCE: tl.constexpr,
    RAISE_AMAX: tl.constexpr,
    E4M3: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """Writes data, and scales unless they are given.

    GROUPS   "tile": one scale per tile; "rows": one per row of the tile; "columns": one per column of the tile
    SOURCE   of the scales: "tile", computed here; "amax", from the results of the kernel above; "given" by the caller

    The scale of a row is at row · stride_sm + tile_n · stride_sn, that of a column at col · stride_sm + tile_m ·
    stride_sn, that of a tile at tile_m · stride_sm + tile_n · stride_sn.
    """
    SMALL: tl.constexpr = POW2 and SOURCE != "given"  # the scale is a power of two with an inverse in fp32
    tile, tile_m, tile_n = tile_of(dim, BLOCK_N, SOURCE)
    row, col, m, n = tile_m * BLOCK_M, tile_n * BLOCK_N, tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    height, width = tl.minimum(rows - row, BLOCK_M).to(tl.int32), tl.minimum(dim - col, BLOCK_N).to(tl.int32)
    mask = None if EVEN else inside(m, n, height, width)
    x_ptrs = rectangle(x_ptr + row * stride_xm + col, m, n, stride_xm)
    x = finite_or_nan(tl.load(x_ptrs, mask=mask, other=None if EVEN else 0.0, eviction_policy=EVICTION))
    magnitudes = tl.abs(x)
    if RAISE_AMAX:
        raise_to(amax_ptr, tl.max(magnitudes))
    if GROUPS == "tile":
        at = scale_ptr + tile_m * stride_sm + tile_n * stride_sn
        scale = group_scale(magnitudes, None, amax_ptr, 0, at, tile >= 0, tile == 0, SOURCE, E4M3, POW2)
        factor = inverse(scale, SMALL)
    if GROUPS == "rows":
        at = scale_ptr + (row + m) * stride_sm + tile_n * stride_sn
        scale = group_scale(magnitudes, 1, amax_ptr, row + m, at, m < height, tile_n == 0, SOURCE, E4M3, POW2)
        factor = inverse(scale, SMALL)[:, None]
    if GROUPS == "columns":
        at = scale_ptr + (col + n) * stride_sm + tile_m * stride_sn
        scale = group_scale(magnitudes, 0, amax_ptr, col + n, at, n < width, tile_m == 0, SOURCE, E4M3, POW2)
        factor = inverse(scale, SMALL)[None, :]
    data_ptrs = rectangle(data_ptr + row * dim + col, m, n, dim)
    tl.store(data_ptrs, encode(x * factor, E4M3, NATIVE), mask=mask)
