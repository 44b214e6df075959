"""How fp8_matmul is launched: every choice is a pure function of the problem and the GPU.

What was tried is in EXPERIMENTS.md.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_BLOCK_M, MIN_BLOCK_K = 16, 32  # what tl.dot takes of fp8


@dataclass(frozen=True)
class Config:
    """A CTA for each tile of block_m rows of a by block_n rows of b, of which it takes block_k of k at a time.
    `group_m` tiles of rows follow each other before the next column of tiles."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class CudaConfig:
    """Of products.cu: steps of the ring, rows of tiles that follow each other, CTAs below each other that share what
    they read of b (1 or 2), columns of a tile, and whether its two consumers take turns at the tensor cores. 256
    columns are for sums that the tensor cores keep; 192 and 128 for those that are promoted, 192 where scales are of
    blocks."""

    stages: int
    raster: int
    cluster: int
    block_n: int
    turns: bool


def pick_backend(backend: str, rows: int, fast_accum: bool, possible: bool) -> str:
    """The version that runs; `possible`: CUDA C++ can. Pure.

    Measured on one H200: with fp32 sums beside the tensor core's CUDA C++ is 11 to 39 % faster than Triton; without
    them (`fast_accum`) Triton is 2 to 8 % faster; 16 rows take it 10 % less.
    """
    if backend == "auto":
        return "cuda" if possible and rows > 64 and not fast_accum else "triton"
    return backend


def pick_config(
    rows: int, cols: int, depth: int, blocked: bool, fast_accum: bool, capability: tuple[int, int]
) -> Config:
    """The configuration of one product. Pure.

    - Steps of 128 bytes of k: a line of shared memory, and what has a scale of its own, so that scales of blocks need
      this step. Else 64 on sm_89, which has 99 KiB of it.
    - Two sets of sums, the tensor core's and fp32, are 128 registers a thread with 128 x 128 sums in 8 warps. Without
      the second (`fast_accum`), tiles are twice as wide and read 48 KiB for the products of two that read 64.
    - Up to 64 rows the reading of b is what takes the time: more and narrower tiles.

    By these sums; not measured yet.
    """
    block_m = max(MIN_BLOCK_M, min(128, _power(rows)))
    block_k = max(MIN_BLOCK_K, min(128 if blocked or capability >= (9, 0) else 64, _power(depth)))
    if block_m <= 64:
        return Config(block_m, _fit(cols, 64), block_k, group_m=8, num_warps=4, num_stages=4)
    if capability < (9, 0):
        return Config(block_m, _fit(cols, 128), block_k, group_m=8, num_warps=8, num_stages=3)
    if fast_accum and not blocked:
        return Config(block_m, _fit(cols, 256), block_k, group_m=8, num_warps=8, num_stages=4)
    return Config(block_m, _fit(cols, 128), block_k, group_m=8, num_warps=8, num_stages=4)


def pick_cuda_config(rows: int, cols: int, depth: int, scaling: int) -> CudaConfig:
    """The configuration of products.cu. Pure.

    - Two CTAs share b where there are rows for both: up to 9 % faster with scales of 1x128, 3 % with others (measured
      on one H200, of tiles of 128 x 128).
    - 16 rows of tiles follow each other.
    - Of blocks, tiles of 192 or 128 columns: which takes less time by STEP_NS, all CTAs' rounds together.
    - As many steps as there is room for, at most six of 128 columns.
    - Two consumers with a set of sums each take turns; one with two sets always has a step under way.
    """
    cluster = 2 if rows > 128 else 1
    if scaling == 0:
        return CudaConfig(stages=4, raster=16 // cluster, cluster=cluster, block_n=256, turns=False)
    block_n = 128
    if scaling > 1:
        block_n = min(STEP_NS[scaling], key=lambda n: _step_ns(rows, cols, cluster, scaling, n))
    stages = 5 if block_n == 192 else 6
    return CudaConfig(stages, raster=16 // cluster, cluster=cluster, block_n=block_n, turns=block_n == 192)


#: What a CTA takes for 128 of k, by the scaling and the columns of its tile, measured on one H200 (EXPERIMENTS.md).
STEP_NS = {2: {128: 440, 192: 620}, 3: {128: 550, 192: 810}}
SMS = 132


def _step_ns(rows: int, cols: int, cluster: int, scaling: int, block_n: int) -> int:
    """Of all rounds for 128 of k, with tiles of 128 rows, `cluster` of them below each other."""
    clusters = -(-rows // (128 * cluster)) * -(-cols // block_n)
    return -(-clusters // (SMS // cluster)) * STEP_NS[scaling][block_n]


def _power(size: int) -> int:
    """The next power of two."""
    return 1 << max(0, size - 1).bit_length()


def _fit(size: int, most: int) -> int:
    """The block of a dimension: `most`, or what a smaller dimension fills."""
    return max(16, min(most, _power(size)))
