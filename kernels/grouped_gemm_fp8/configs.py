"""Launch configurations of grouped_gemm_fp8: every choice is a pure function of the problem and the GPU.

EXPERIMENTS.md lists the alternatives that were tried.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_BLOCK_M, MIN_BLOCK_K = 16, 32  # minimum of tl.dot in fp8; the tile list has room for tiles of so few rows


@dataclass(frozen=True)
class RowsConfig:
    """Tiles of `block_m` rows (by `pick_block_m`) by `block_n` columns, computed by `ctas` persistent CTAs per SM, with
    K-blocks of `block_k`: 128, which share a scale, or all of K. Grouped tile order: `raster` row tiles before the next
    column, so that they share a weight's columns in L2."""

    block_n: int
    block_k: int
    raster: int
    stages: int
    num_warps: int
    ctas: int


@dataclass(frozen=True)
class WeightsConfig:
    """One CTA per tile of `block_n` by `block_k` of a weight's gradient, summed over blocks of 128 rows. Grouped tile
    order: `raster` vertically adjacent tiles before the next column of tiles."""

    block_n: int
    block_k: int
    raster: int
    stages: int
    num_warps: int


@dataclass(frozen=True)
class CudaConfig:
    """Configuration of products.cu.

    - `stages`: pipeline stages.
    - `raster`: height of a group in the grouped tile order, in row tiles.
    - `cluster`: 1, or 2 CTAs with horizontally adjacent tiles, which share a by TMA multicast.
    - `block_n`: 192 or 128.
    - `turns`: ping-pong. A consumer issues its wgmmas when half of those of the other consumer's K-block have
      completed."""

    stages: int
    raster: int
    cluster: int
    block_n: int
    turns: bool


def pick_backend(backend: str, rows: int, groups: int, of_weights: bool, possible: bool) -> str:
    """The version that runs. `possible`: CUDA C++ supports the problem. Pure.

    CUDA C++ has tiles of 128 rows, of which groups of up to 64 rows fill at most half; Triton has narrower tiles. The
    tiles of a weight's gradient do not depend on the groups. Measured on one H200 with 8 and 64 groups of 512 and 1024
    rows: CUDA C++ takes 51 to 67 % of Triton's time in both GEMMs. The threshold of 64 rows per group follows from the
    tile size; it was not measured.
    """
    if backend != "auto":
        return backend
    return "cuda" if possible and (of_weights or rows > 64 * groups) else "triton"


def pick_block_m(rows: int, groups: int) -> int:
    """Rows of a tile in Triton: 128, or fewer if groups have fewer rows on average, since a tile has rows of only one
    group. Pure. Estimated from the cost of a tile; not measured yet."""
    return max(MIN_BLOCK_M, min(128, _power(rows // max(1, groups))))


def pick_rows_config(cols: int, depth: int, block_m: int, capability: tuple[int, int]) -> RowsConfig:
    """Configuration of the forward in Triton. Pure.

    - Two sets of accumulators, the tensor cores' and fp32, are 128 registers a thread with tiles of 128 x 128 in 8
      warps.
    - K-blocks of 128 bytes: a row of swizzled shared memory and one scale block.
    - With few rows a weight is read for little computation: narrower tiles, two CTAs per SM.

    Estimated; not measured yet.
    """
    block_k = max(MIN_BLOCK_K, min(128, _power(depth)))
    if block_m <= 64:
        stages = 4 if capability >= (9, 0) else 2
        return RowsConfig(_fit(cols, 64), block_k, raster=8, stages=stages, num_warps=4, ctas=2)
    stages = 4 if capability >= (9, 0) else 3
    return RowsConfig(_fit(cols, 128), block_k, raster=8, stages=stages, num_warps=8, ctas=1)


def pick_weights_config(cols: int, depth: int, capability: tuple[int, int]) -> WeightsConfig:
    """Configuration of the weights' gradient. Pure. As `pick_rows_config`; not measured yet."""
    stages = 4 if capability >= (9, 0) else 3
    return WeightsConfig(_fit(cols, 128), _fit(depth, 128), raster=8, stages=stages, num_warps=8)


def pick_cuda_rows_config(groups: int, rows: int, cols: int) -> CudaConfig:
    """Configuration of products.cu for the forward. Pure.

    - Tiles of 192 or 128 columns, and single CTAs or pairs that share rows of x: whichever takes less time by
      ROWS_STEP_NS over all waves, for groups of the same size. With equally many waves single CTAs and pairs are
      equally fast, and pairs are picked. With an odd number of column tiles, one tile of the pairs is empty: 2048
      columns are eleven tiles of 192, in 22 waves with 64 groups of 512 rows. In pairs they are twelve, in 24 waves,
      which took 6 % longer.
    - As many stages as fit into shared memory, at most six with 128 columns. Ping-pong where a consumer has one set of
      wgmma accumulators; with two sets its wgmmas overlap its own promotion.
    - Groups of 8 row tiles in the tile order: 4, 8 and 16 are within about 1 % of each other, 32 up to 3 % slower.

    Measured on one H200 with 8 and 64 groups of the same size (reports/h200/tune/grouped_gemm_fp8.json): the picked
    configuration takes at most 0.6 % longer than the best. Other sizes, and unequal groups, were not searched.
    """
    row_tiles = groups * -(-rows // (128 * max(1, groups)))
    shapes = [(block_n, cluster) for block_n in ROWS_STEP_NS for cluster in (2, 1) if cluster == 1 or cols > block_n]
    block_n, cluster = min(shapes, key=lambda shape: _rounds(row_tiles, cols, *shape) * ROWS_STEP_NS[shape[0]])
    stages = 5 if block_n == 192 else 6
    return CudaConfig(stages, raster=8, cluster=cluster, block_n=block_n, turns=block_n == 192)


def pick_cuda_weights_config(groups: int, rows: int, cols: int, depth: int) -> CudaConfig:
    """Configuration of products.cu for the weights' gradient [groups, cols, depth]. Pure.

    Tiles of 192 or 128 columns: whichever takes less time by WEIGHTS_NS over all waves, for groups of the same size.
    Beside a tile in fp32, shared memory has room for three stages with 192 columns or four with 128. Ping-pong is
    slower with so few.
    """
    steps = max(1, rows // (128 * max(1, groups)))
    row_tiles = groups * -(-cols // 128)

    def cost(block_n: int) -> int:
        tile, step = WEIGHTS_NS[block_n]
        return _rounds(row_tiles, depth, block_n, 2) * (tile + steps * step)

    block_n = min(WEIGHTS_NS, key=cost)
    cluster = 2 if depth > block_n else 1
    return CudaConfig(stages=4 if block_n == 128 else 3, raster=8, cluster=cluster, block_n=block_n, turns=False)


#: Time of a K-block of 128 by the columns of a tile, in ns: the time of 8 groups measured on one H200, divided by waves
#: and K-blocks. That of 64 groups gives 1.16 times as much for both widths.
ROWS_STEP_NS = {128: 498, 192: 682}
#: For a weight's gradient, by the columns of a tile, in ns: per tile, and per K-block of 128.
WEIGHTS_NS = {128: (530, 830), 192: (3380, 790)}
SMS = 132


def _rounds(row_tiles: int, cols: int, block_n: int, cluster: int) -> int:
    """Waves: tiles per CTA, with clusters of `cluster` horizontally adjacent tiles."""
    return -(-row_tiles * -(-cols // (cluster * block_n)) // (SMS // cluster))


def _power(size: int) -> int:
    """The next power of two."""
    return 1 << max(0, size - 1).bit_length()


def _fit(size: int, most: int) -> int:
    """The block size of a dimension: `most`, or for a smaller dimension its next power of two, at least 16."""
    return max(16, min(most, _power(size)))
