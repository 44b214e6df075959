"""How the kernels are launched: every choice is a pure function of the problem and the GPU.

The numbers are reckoned, and by what the build shows of registers; none is measured yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

MIN_BLOCK = 16  # of tl.dot
MAX_ROW = 2048  # elements of a row that a pass holds at once


@dataclass(frozen=True)
class ProductConfig:
    """One CTA per tile of `block_m` rows by `block_n` columns, in steps of `block_k` terms that `stages` buffers
    overlap. With `stats_first` the forward reads its rows once before the product, for their 1 / rms."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    num_warps: int
    stats_first: bool = False


@dataclass(frozen=True)
class PassConfig:
    """One CTA per row, which it takes by `block_n` columns."""

    block_n: int
    num_warps: int


def pick_fwd_config(
    rows: int, cols: int, depth: int, aligned: bool, dtype: torch.dtype, capability: tuple[int, int]
) -> ProductConfig:
    """Configuration of the forward: a product of `depth` terms. Pure.

    A step of a CTA turns block_m x block_k numbers of h into operands, whatever block_n: so tiles are wider than high.
    564 x 1536 in tiles of 64 x 128 are 108 CTAs, one wave of 132 SMs; 8 warps share the conversion. A CTA has its SM to
    itself, and a read from L2 takes some 800 clocks, in which 51 KB arrive: 4 steps of 24 to 32 KB are on their way.
    fp16 alone takes the statistics first, since its h · g may overflow. Rows that are not `aligned` to 16 bytes are
    loaded through registers, of which larger tiles have not enough.
    """
    stats_first = dtype == torch.float16
    if not aligned:
        return ProductConfig(_fit(rows, 64), _fit(cols, 32), _fit(depth, 32), 2, 8, stats_first)
    if dtype == torch.float32:
        return ProductConfig(_fit(rows, 64), _fit(cols, 64), _fit(depth, 32), 3, 8, stats_first)
    if capability < (9, 0):
        return ProductConfig(_fit(rows, 64), _fit(cols, 64), _fit(depth, 32), 3, 8, stats_first)
    return ProductConfig(_fit(rows, 64), _fit(cols, 128), _fit(depth, 64), 5, 8, stats_first)


def pick_bwd_config(
    rows: int, cols: int, depth: int, summed: bool, aligned: bool, dtype: torch.dtype, capability: tuple[int, int]
) -> ProductConfig:
    """Configuration of the product of the backward, of `depth` terms; `summed` where it reads y as well, for the sum of
    dy · y. Pure.

    564 x 512 in tiles of 64 x 64 are 72 CTAs, each of which reads 0.4 MB at 1536 terms, and 0.6 with y: some 3.5 and
    5 us at 64 bytes a clock. Half as high and as wide are 144 CTAs that read a third less each, but tiles of 32 rows
    have no wgmma. Steps are of 16 or 24 KB, of which 5 are on their way. Tiles of rows that are not `aligned` are as in
    the forward.
    """
    if not aligned:
        return ProductConfig(_fit(rows, 64), _fit(cols, 32), _fit(depth, 32), 2, 8)
    if dtype == torch.float32:
        return ProductConfig(_fit(rows, 64), _fit(cols, 32), _fit(depth, 32), 3, 8)
    if capability < (9, 0):
        return ProductConfig(_fit(rows, 64), _fit(cols, 64), _fit(depth, 32), 3, 4)
    return ProductConfig(_fit(rows, 64), _fit(cols, 64), _fit(depth, 64), 6, 8 if summed else 4)


def pick_dpre_config(
    rows: int, cols: int, depth: int, aligned: bool, dtype: torch.dtype, capability: tuple[int, int]
) -> ProductConfig:
    """Configuration of the product that gives the gradient before the activation from that after the layer that
    follows. Pure. 564 x 1408 in tiles of 64 x 128 are 99 CTAs, one wave; its epilogue reads a tile, and 8 warps share
    the derivative. Tiles of rows that are not `aligned` are as in the forward."""
    if not aligned:
        return ProductConfig(_fit(rows, 64), _fit(cols, 32), _fit(depth, 32), 2, 8)
    if dtype == torch.float32:
        return ProductConfig(_fit(rows, 64), _fit(cols, 32), _fit(depth, 32), 3, 8)
    if capability < (9, 0):
        return ProductConfig(_fit(rows, 64), _fit(cols, 64), _fit(depth, 32), 3, 8)
    return ProductConfig(_fit(rows, 64), _fit(cols, 128), _fit(depth, 64), 5, 8)


def pick_dact_config(cols: int) -> PassConfig:
    """Configuration of the pass that gives the gradient before the activation. Pure. Rows of a model's hidden at few
    rows are one step of 4 warps."""
    return PassConfig(_fit(cols, MAX_ROW), num_warps=4)


def _fit(size: int, most: int) -> int:
    return max(MIN_BLOCK, min(most, triton.next_power_of_2(max(1, size))))
