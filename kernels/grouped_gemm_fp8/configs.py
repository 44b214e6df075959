"""How grouped_gemm_fp8 is launched: every choice is a pure function of the problem and the GPU.

What was tried is in EXPERIMENTS.md.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_BLOCK_M, MIN_BLOCK_K = 16, 32  # what tl.dot takes of fp8; the tile list has room for tiles of so few rows


@dataclass(frozen=True)
class RowsConfig:
    """Tiles of `block_m` rows (by `pick_block_m`) by `block_n` columns, walked by `ctas` persistent CTAs an SM, in
    steps of `block_k` terms: 128, which have a scale, or all. `raster` row tiles follow each other before the next
    column, so that they share a weight's columns in L2."""

    block_n: int
    block_k: int
    raster: int
    stages: int
    num_warps: int
    ctas: int


@dataclass(frozen=True)
class WeightsConfig:
    """A CTA for each tile of `block_n` by `block_k` of a weight's gradient, which is summed over 128 rows at a time.
    `raster` tiles follow each other before the next column of tiles."""

    block_n: int
    block_k: int
    raster: int
    stages: int
    num_warps: int


@dataclass(frozen=True)
class CudaConfig:
    """Of products.cu: steps of the ring, row tiles that follow each other, CTAs beside each other that share what they
    read of a (1 or 2), columns of a tile (192 or 128), and whether its two consumers take turns at the tensor cores.
    A turn passes when `passes` of a step's four wgmmas are done; with `late`, which 192 columns can have, a step's slot
    is given back when the next step has started."""

    stages: int
    raster: int
    cluster: int
    block_n: int
    turns: bool
    passes: int = 2
    late: bool = False


def pick_backend(backend: str, rows: int, groups: int, of_weights: bool, possible: bool) -> str:
    """The version that runs; `possible`: CUDA C++ can. Pure.

    CUDA C++ has tiles of 128 rows, which groups of up to 64 rows leave half empty or more; Triton has narrower tiles. A
    weight's gradient has the same tiles whatever the groups are. Measured on one H200 with 8 and 64 groups of 512 and
    1024 rows: CUDA C++ takes 51 to 67 % of Triton's time in both products. The threshold follows from the size of the
    tiles; it was not measured.
    """
    if backend != "auto":
        return backend
    return "cuda" if possible and (of_weights or rows > 64 * groups) else "triton"


def pick_block_m(rows: int, groups: int) -> int:
    """Rows of a tile of Triton's: 128, less where a group has fewer rows on average, since a tile holds rows of one
    group alone. Pure. By what a tile costs; not measured yet."""
    return max(MIN_BLOCK_M, min(128, _power(rows // max(1, groups))))


def pick_rows_config(cols: int, depth: int, block_m: int, capability: tuple[int, int]) -> RowsConfig:
    """Configuration of the forward. Pure.

    - Two sets of sums, the tensor core's and fp32, are 128 registers a thread with 128 x 128 sums in 8 warps.
    - Steps of 128 bytes of k: a line of shared memory, and what has a scale.
    - With few rows a weight is read for little: narrower tiles, two CTAs an SM.

    By these sums; not measured yet.
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

    - Tiles of 192 or 128 columns, and CTAs by themselves or in pairs that share rows of x: which takes less time by
      ROWS_STEP_NS, all rounds of the CTAs together, of groups of the same size. Where both have as many rounds they are
      level, and pairs are taken. Of an odd number of columns of tiles pairs have one that is empty: 2048 columns are
      eleven tiles of 192 in 22 rounds of 64 groups of 512 rows, and twelve of pairs in 24, which took 6 % longer.
    - As many steps as there is room for, at most six of 128 columns. Two consumers with a set of sums each take turns;
      one with two sets always has a step under way.
    - 8 rows of tiles after each other: 4, 8 and 16 are within about 1 % of each other, 32 up to 3 % slower.

    Measured on one H200 with 8 and 64 groups of the same size (reports/h200/tune/grouped_gemm_fp8.json): what is picked
    takes at most 0.6 % longer than the best. Other sizes, and groups of different ones, were not searched.
    """
    row_tiles = groups * -(-rows // (128 * max(1, groups)))
    shapes = [(block_n, cluster) for block_n in ROWS_STEP_NS for cluster in (2, 1) if cluster == 1 or cols > block_n]
    block_n, cluster = min(shapes, key=lambda shape: _rounds(row_tiles, cols, *shape) * ROWS_STEP_NS[shape[0]])
    stages = 5 if block_n == 192 else 6
    return CudaConfig(stages, raster=8, cluster=cluster, block_n=block_n, turns=block_n == 192)


def pick_cuda_weights_config(groups: int, rows: int, cols: int, depth: int) -> CudaConfig:
    """Configuration of products.cu for the weights' gradient [groups, cols, depth]. Pure.

    Tiles of 192 or 128 columns: which takes less time by WEIGHTS_NS, all rounds of the CTAs together, of groups of the
    same size. A tile in fp32 leaves room for a ring of three steps of 192 columns or four of 128, and consumers that
    take turns are slower with so short a one.
    """
    steps = max(1, rows // (128 * max(1, groups)))
    row_tiles = groups * -(-cols // 128)

    def cost(block_n: int) -> int:
        tile, step = WEIGHTS_NS[block_n]
        return _rounds(row_tiles, depth, block_n, 2) * (tile + steps * step)

    block_n = min(WEIGHTS_NS, key=cost)
    cluster = 2 if depth > block_n else 1
    return CudaConfig(stages=4 if block_n == 128 else 3, raster=8, cluster=cluster, block_n=block_n, turns=False)


#: What a CTA takes for 128 terms, by the columns of its tile: the time of 8 groups measured on one H200, divided by
#: rounds and steps. That of 64 groups gives 1.16 times as much for both widths.
ROWS_STEP_NS = {128: 498, 192: 682}
#: Of a weight's gradient: for a tile, and for each 128 terms.
WEIGHTS_NS = {128: (530, 830), 192: (3380, 790)}
SMS = 132


def _rounds(row_tiles: int, cols: int, block_n: int, cluster: int) -> int:
    """Tiles that each CTA has, `cluster` of them beside each other."""
    return -(-row_tiles * -(-cols // (cluster * block_n)) // (SMS // cluster))


def _power(size: int) -> int:
    """The next power of two."""
    return 1 << max(0, size - 1).bit_length()


def _fit(size: int, most: int) -> int:
    """The block of a dimension: `most`, or what a smaller dimension fills."""
    return max(16, min(most, _power(size)))
