"""Loads K columns of rows into register tiles and stores them: JIT functions for the kernels in `kernel`.

A row of K = 10 floats is 40 bytes: not a power of two, and not aligned to 16 bytes. Three widths in columns, all powers
of two, determine how a row is loaded, held and stored; the same arithmetic serves all of them:

  LOAD   columns of one load            K = 10: 5 loads of 2 columns, or one of 16 with 6 masked
  HOLD   columns of one register tile   the arithmetic runs on a tuple of ceil(K / HOLD) tiles [BLOCK_M, HOLD]
  STORE  columns of one store           narrow tiles are joined first, so that a warp writes full 32-byte sectors

With HOLD = 2 and K = 10 each row belongs to one thread: reductions over K need no shuffles. With HOLD = 4 two threads
share a row. If LOAD or STORE differs from HOLD, the compiler moves the elements through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_columns(
    ptr,
    rows,
    in_range,
    STRIDE: tl.constexpr,
    FILL: tl.constexpr,
    K: tl.constexpr,
    LOAD: tl.constexpr,
    HOLD: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Loads ceil(K / HOLD) tiles [BLOCK_M, HOLD] in fp32. Columns from K on hold FILL, rows out of range any value.
    in_range is None if all rows are in range."""
    tiles = ()
    cols = tl.arange(0, LOAD)[None, :]
    for start in tl.static_range(0, K, LOAD):
        at = ptr + (rows[:, None] * STRIDE + (start + cols))
        if in_range is None:
            if start + LOAD > K:
                tile = tl.load(at, mask=start + cols < K, other=FILL)
            else:
                tile = tl.load(at)
        elif start + LOAD > K:
            tile = tl.load(at, mask=in_range[:, None] & (start + cols < K), other=FILL)
        else:
            tile = tl.load(at, mask=in_range[:, None])
        tiles = tiles + _split_columns(tile.to(tl.float32), BLOCK_M, LOAD, HOLD, min(K - start, LOAD))
    return tiles


@triton.jit
def store_columns(
    ptr,
    tiles,
    rows,
    in_range,
    K: tl.constexpr,
    STORE: tl.constexpr,
    HOLD: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Writes the tiles into a contiguous [rows, K], rounded to its dtype."""
    cols = tl.arange(0, STORE)[None, :]
    for start in tl.static_range(0, K, STORE):
        tile = _join_columns(tiles, start // HOLD, (K + HOLD - 1) // HOLD, BLOCK_M, STORE, HOLD)
        at = ptr + (rows[:, None] * K + (start + cols))
        if start + STORE > K:
            tl.store(at, tile.to(ptr.dtype.element_ty), mask=in_range[:, None] & (start + cols < K))
        else:
            tl.store(at, tile.to(ptr.dtype.element_ty), mask=in_range[:, None])


@triton.jit
def _split_columns(tile, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, HOLD: tl.constexpr, USED: tl.constexpr):
    """Splits [BLOCK_M, WIDTH] into tiles of HOLD columns and omits the tiles from column USED on."""
    if WIDTH == HOLD:
        tiles = (tile,)
    else:
        HALF: tl.constexpr = WIDTH // 2
        low, high = tl.split(tl.permute(tl.reshape(tile, [BLOCK_M, 2, HALF]), [0, 2, 1]))
        tiles = _split_columns(low, BLOCK_M, HALF, HOLD, min(USED, HALF))
        if USED > HALF:
            tiles = tiles + _split_columns(high, BLOCK_M, HALF, HOLD, USED - HALF)
    return tiles


@triton.jit
def _join_columns(
    tiles, FIRST: tl.constexpr, COUNT: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, HOLD: tl.constexpr
):
    """Concatenates tiles FIRST, FIRST + 1 … along columns to [BLOCK_M, WIDTH], with zeros after the last tile."""
    if FIRST >= COUNT:
        tile = tl.zeros([BLOCK_M, WIDTH], dtype=tl.float32)
    elif WIDTH == HOLD:
        tile = tiles[FIRST]
    else:
        HALF: tl.constexpr = WIDTH // 2
        left = _join_columns(tiles, FIRST, COUNT, BLOCK_M, HALF, HOLD)
        right = _join_columns(tiles, FIRST + HALF // HOLD, COUNT, BLOCK_M, HALF, HOLD)
        tile = tl.reshape(tl.permute(tl.join(left, right), [0, 2, 1]), [BLOCK_M, WIDTH])
    return tile
