"""How grouped_gemm is launched: every choice is a pure function of the problem and the GPU.

What was tried is in EXPERIMENTS.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

MIN_BLOCK_M = 16  # what tl.dot takes; the tile list has room for tiles of so few rows


@dataclass(frozen=True)
class RowsConfig:
    """Tiles of `block_m` rows (by `pick_block_m`) by `block_n` columns, walked by `ctas` persistent CTAs an SM.
    `raster` row tiles follow each other before the next column, so that they share a weight's columns in L2."""

    block_n: int
    block_k: int
    raster: int
    stages: int
    num_warps: int
    ctas: int


@dataclass(frozen=True)
class CudaConfig:
    """Of products.cu, whose tiles are 128 x 256: steps of the ring, tiles (or clusters of them) below each other that
    follow each other, terms of a step, and how many CTAs below and beside each other share what they read (1 and 1, 2
    and 1, or 1 and 2).

    Of a gradient alone: 2 CTAs below each other, steps of 32 terms, by how many steps one consumer is ahead of the
    other, and whether tiles leave through shared memory by TMA."""

    stages: int
    raster: int
    block_k: int = 64
    cluster: tuple[int, int] = (1, 1)
    lag: int = 0
    staged: bool = False


@dataclass(frozen=True)
class WeightsConfig:
    """A CTA for each tile of `block_n` by `block_k` of a weight's gradient, which is summed over `block_r` rows at a
    time."""

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
    """The version of a product: "triton", "cuda" or, of "auto", "where it can" for CUDA C++ with Triton for what that
    does not take. Pure.

    Measured on one H200: the forward is 2 to 15 % faster in CUDA C++, and so are all gradients together with 64 groups
    and more. With 8 groups the weights' gradient was slower when it had neither clusters nor an epilogue beside the
    other consumer's products; with both it is predicted to be faster (EXPERIMENTS.md), not measured yet.
    """
    return "where it can" if backend == "auto" else backend


def pick_block_m(rows: int, groups: int, dtype: torch.dtype, capability: tuple[int, int]) -> int:
    """Rows of a tile of the output and of x's gradient: 128, in fp32 64, less where a group has fewer rows on average,
    since a tile holds rows of one group alone. Pure. By what a tile costs; not measured yet."""
    most = 64 if dtype == torch.float32 else 128
    return max(MIN_BLOCK_M, min(most, triton.next_power_of_2(max(1, rows // max(1, groups)))))


def pick_rows_config(
    cols: int, depth: int, block_m: int, aligned: bool, dtype: torch.dtype, capability: tuple[int, int]
) -> RowsConfig:
    """Configuration of the product that gives rows: the forward, and x's gradient. Pure.

    Two warpgroups with 64 rows of 256 columns each on Hopper: a step of 128 x 256 x 64 reads 48 KiB for 4.2 MFLOP,
    where two of 128 x 128 read 64 KiB. Where 256 columns would waste more of the last column of tiles than 128 do, two
    CTAs of 128 x 128 share an SM, and the epilogue of one is overlapped with the main loop of the other. Unless rows
    are `aligned`, elements are loaded one by one, through registers, of which larger tiles have not enough. By these
    sums; not measured yet.
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


def pick_cuda_rows_config(groups: int, rows: int, cols: int, depth: int) -> CudaConfig:
    """Configuration of products.cu for the forward and x's gradient. Pure. The ring takes what shared memory there is.
    Of 64 groups and more 16 row tiles after each other are 2 to 7 % faster than 8, of 8 groups 5 % slower (measured on
    one H200)."""
    return CudaConfig(stages=4, raster=16 if groups >= 32 else 8)


def pick_cuda_weights_config(groups: int, rows: int, height: int, width: int) -> CudaConfig:
    """Configuration of products.cu for the weights' gradient, of matrices [height, width] with contiguous rows. Pure.

    - A consumer is three steps of 32 terms ahead of the other: 768 cycles in which one has the tensor cores for itself
      while the other stores. Four steps of 64 leave room for one that it is ahead.
    - Two tiles below each other share 256 columns, or two beside each other 128 rows, whichever adds fewer tiles beyond
      the end; alone where both would add more than what is read costs (READ_COST).

    By cycles (EXPERIMENTS.md); not measured yet.
    """

    def cost(cluster: tuple[int, int]) -> float:
        below, beside = cluster
        return READ_COST[cluster] * below * -(-height // (128 * below)) * beside * -(-width // (256 * beside))

    return CudaConfig(8, raster=8, block_k=32, cluster=min(READ_COST, key=cost), lag=3, staged=True)


#: What a step takes relative to the others, by the CTAs that share: reckoned from 32, 40 and 48 bytes a cycle out of L2
#: and the 3 to 6 % that fused_mlp's clusters gain.
READ_COST = {(2, 1): 1.0, (1, 2): 1.02, (1, 1): 1.05}


def pick_bias_config(cols: int, dtype: torch.dtype, capability: tuple[int, int]) -> BiasConfig:
    """Configuration of the bias's gradient, which reads dy once: 64 columns are a 128-byte line of a row. Pure."""
    return BiasConfig(_fit(cols, 64), block_r=64, num_warps=4)


def _fit(size: int, most: int) -> int:
    """The block of a dimension: `most`, or what a smaller dimension fills."""
    return max(MIN_BLOCK_M, min(most, triton.next_power_of_2(max(1, size))))
