"""Launch configurations of grouped_gemm: every choice is a pure function of the problem and the GPU.

EXPERIMENTS.md lists the alternatives that were tried.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

MIN_BLOCK_M = 16  # minimum of tl.dot; the tile list has room for tiles of so few rows
SHARED = 227 << 10  # bytes that a CTA of sm_90 can use
MOST_TERMS_IN_TURNS = 3072  # largest K with ping-pong, between K that were measured to be faster and slower with it
ROWS_IN_TURNS = (176, 160, 128)  # ping-pong widths of the forward and dx; 192 was slower


@dataclass(frozen=True)
class RowsConfig:
    """Tiles of `block_m` rows (by `pick_block_m`) by `block_n` columns, processed by `ctas` persistent CTAs per SM in
    grouped tile order: `raster` row tiles of a column, then of the next, so that they share a weight's columns in
    L2."""

    block_n: int
    block_k: int
    raster: int
    stages: int
    num_warps: int
    ctas: int


@dataclass(frozen=True)
class CudaConfig:
    """Configuration of products.cu: pipeline stages, height of a group in the grouped tile order (`raster`, in
    clusters), CTAs of a cluster (1 or 2), whose tiles are vertically adjacent and share b, and the columns of a tile:
    256, which the two consumers of a CTA share (cooperative), or 128, 160, 176 or 192, with ping-pong."""

    stages: int
    raster: int
    cluster: int
    block_n: int = 256

    @property
    def turns(self) -> bool:
        """Ping-pong. Two sets of 64 x 256 accumulators do not fit into a consumer's registers."""
        return self.block_n < 256


@dataclass(frozen=True)
class WeightsConfig:
    """One CTA per tile of `block_n` by `block_k` of a weight's gradient, with K-blocks of `block_r` rows."""

    block_n: int
    block_k: int
    block_r: int
    raster: int
    stages: int
    num_warps: int


@dataclass(frozen=True)
class BiasConfig:
    """A CTA sums `block_n` columns of one group, `block_r` rows at a time."""

    block_n: int
    block_r: int
    num_warps: int


def pick_backend(backend: str) -> str:
    """The version of a GEMM: "triton", "cuda" or, for "auto", "where it can": CUDA C++ if it supports the problem, else
    Triton. Pure.

    In explorations on one H200 (EXPERIMENTS.md) CUDA C++ took less time than Triton in the forward and, with groups of
    equal sizes or sizes that follow Zipf's law, for the weights' gradient. With all rows in one group, the gradient
    took 2 % less with 128 groups and 12 % more with 64. "auto" cannot exclude that case: only the offsets show it,
    which the host does not read.
    """
    return "where it can" if backend == "auto" else backend


def pick_block_m(rows: int, groups: int, dtype: torch.dtype, capability: tuple[int, int]) -> int:
    """Rows of a tile of the output and of x's gradient: 128, in fp32 64, less where a group has fewer rows on average,
    since a tile has rows of only one group. Pure. By the cost of a tile; not measured yet."""
    most = 64 if dtype == torch.float32 else 128
    return max(MIN_BLOCK_M, min(most, triton.next_power_of_2(max(1, rows // max(1, groups)))))


def pick_rows_config(
    cols: int, depth: int, block_m: int, aligned: bool, dtype: torch.dtype, capability: tuple[int, int]
) -> RowsConfig:
    """Configuration of the GEMM of the forward and of x's gradient. Pure.

    Two warpgroups with 64 rows of 256 columns each on Hopper: a K-block of 128 x 256 x 64 reads 48 KiB for 4.2 MFLOP,
    where two of 128 x 128 read 64 KiB. Where 256 columns would waste more of the last column of tiles than 128 do, two
    CTAs of 128 x 128 share an SM, and the epilogue of one overlaps the main loop of the other. Unless rows are
    `aligned`, elements are loaded one by one, through registers, of which larger tiles have not enough. By this
    arithmetic; not measured yet.
    """
    if not aligned or dtype == torch.float32:
        block_k = 32 if aligned else 16
        return RowsConfig(_fit(cols, 64), _fit(depth, block_k), raster=8, stages=2, num_warps=8, ctas=2)
    wide = triton.cdiv(cols, 256) * 2 == triton.cdiv(cols, 128)
    if capability < (9, 0):
        return RowsConfig(_fit(cols, 128), _fit(depth, 32), raster=8, stages=4, num_warps=8, ctas=1)
    if block_m == 128 and wide:
        return RowsConfig(256, _fit(depth, 64), raster=8, stages=3, num_warps=8, ctas=1)
    return RowsConfig(_fit(cols, 128), _fit(depth, 64), raster=8, stages=3, num_warps=4, ctas=2)


def pick_weights_config(
    cols: int, depth: int, aligned: bool, dtype: torch.dtype, capability: tuple[int, int]
) -> WeightsConfig:
    """Configuration of the weights' gradient. Pure. As `pick_rows_config`; not measured yet."""
    if not aligned or dtype == torch.float32:
        return WeightsConfig(_fit(cols, 64), _fit(depth, 64), block_r=32, raster=8, stages=2, num_warps=8)
    if capability < (9, 0):
        return WeightsConfig(_fit(cols, 128), _fit(depth, 128), block_r=32, raster=8, stages=4, num_warps=8)
    if cols > 64 and depth > 128 and triton.cdiv(depth, 256) * 2 == triton.cdiv(depth, 128):
        return WeightsConfig(128, 256, block_r=64, raster=8, stages=3, num_warps=8)
    return WeightsConfig(_fit(cols, 128), _fit(depth, 128), block_r=64, raster=8, stages=3, num_warps=4)


def pick_cuda_rows_config(cols: int, depth: int) -> CudaConfig:
    """Configuration of products.cu for the forward and x's gradient, with K = `depth`. Pure. As many pipeline stages as
    fit into shared memory.

    Measured on one NVIDIA H200 (reports/h200/tune/grouped_gemm.json): with K of 1408 and 2048 ping-pong takes 5 to 8 %
    less time than tiles of 256 columns, whose stores overlap no wgmma, and with K = 4096 0 to 4 % more. The width is
    the one that pads to the fewest columns, where each tile counts as 16 columns more. Pairs of row tiles are faster
    than no clusters, also where groups are uneven; where groups have one row tile each, so that no pair shares, it was
    not measured.
    """
    if depth > MOST_TERMS_IN_TURNS:
        return CudaConfig(cuda_stages(256), raster=8, cluster=2)
    block_n = min(ROWS_IN_TURNS, key=lambda width: triton.cdiv(cols, width) * (width + 16))
    return CudaConfig(cuda_stages(block_n), raster=2, cluster=2, block_n=block_n)


def cuda_stages(block_n: int) -> int:
    """Pipeline stages of products.cu, as many as fit. Pure."""
    return SHARED // cuda_step_bytes(block_n)


def cuda_step_bytes(block_n: int) -> int:
    """Shared memory of a pipeline stage of products.cu and its two barriers; b, where it is N-major, is in panels of 64
    columns."""
    return (128 + triton.cdiv(block_n, 64) * 64) * 64 * 2 + 16


def pick_cuda_weights_config(groups: int, rows: int, height: int, width: int) -> CudaConfig:
    """Configuration of products.cu for the weights' gradient of `groups` matrices with `height` contiguous rows of
    `width` elements, sums over `rows` rows in all. Pure.

    Measured on one H200: without clusters 2 to 6 % slower than pairs with 16 and 32 vertically adjacent tiles, and 2 to
    7 % faster with 11, which pairs pad to 12. Ping-pong is 6 to 9 % faster with K of 1024 on average and 4096 columns,
    which tiles of 192 pad to 4224, and 6 to 9 % slower with K of 512 and 256 in tiles that pad the columns by 3 and 9 %
    (EXPERIMENTS.md). Which of the two matters was not measured.
    """
    tiles = triton.cdiv(height, 128)
    cluster = 2 if tiles + tiles % 2 <= 1.04 * tiles else 1
    turns = cluster == 2 and rows >= 1024 * groups and triton.cdiv(width, 192) * 192 <= 1.04 * width
    block_n = 192 if turns else 256
    return CudaConfig(cuda_stages(block_n), raster=4 if turns else 8, cluster=cluster, block_n=block_n)


def pick_bias_config(cols: int, dtype: torch.dtype, capability: tuple[int, int]) -> BiasConfig:
    """Configuration of the bias's gradient, which reads dy once: 64 columns are a 128-byte line of a row. Pure."""
    return BiasConfig(_fit(cols, 64), block_r=64, num_warps=4)


def _fit(size: int, most: int) -> int:
    """The block size of a dimension: `most`, or the next power of two if the dimension is smaller."""
    return max(MIN_BLOCK_M, min(most, triton.next_power_of_2(max(1, size))))
