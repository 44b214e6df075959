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
    columns are for sums that the tensor cores keep; 192 and 128 for those that are promoted. A turn passes when
    `passes` of a step's four wgmmas are done. Where scales are of blocks, a tile of 128 columns may have 256 rows
    (`block_m`), of which each consumer multiplies 64 after the other. With `late`, which tiles of 192 columns or 256
    rows can have, a step's slot is given back when the next step has started."""

    stages: int
    raster: int
    cluster: int
    block_n: int
    turns: bool
    passes: int = 2
    late: bool = False
    block_m: int = 128


@dataclass(frozen=True)
class FewConfig:
    """Of few_rows.cu: a CTA has `rows` of a by 64 `groups` rows of b and `stages` of its pipeline, a cluster one CTA
    for each of `splits` parts of k, and an SM room for `resident` CTAs."""

    rows: int
    groups: int
    splits: int
    stages: int
    resident: int


FEW_ROWS = 128  # up to which CUDA C++ is few_rows.cu, above products.cu


def pick_backend(backend: str, possible: bool) -> str:
    """The version that runs; `possible`: CUDA C++ can, which is the faster one in every case that was recorded on an
    H200 and an H100. Pure.

    Up to 128 rows (FEW_ROWS) the time is that of reading b, of which few_rows.cu has more in flight, in more CTAs.
    """
    if backend == "auto":
        return "cuda" if possible else "triton"
    return backend


def pick_config(
    rows: int, cols: int, depth: int, blocked: bool, fast_accum: bool, capability: tuple[int, int]
) -> Config:
    """The configuration of one product. Pure.

    - Steps of 128 bytes of k: a line of shared memory, and what has a scale of its own, so that scales of blocks need
      this step. Else 64 on sm_89, which has 99 KiB of it.
    - Two sets of accumulators, the tensor core's and fp32, are 128 registers a thread with a tile of 128 x 128 in 8
      warps. Without the second (`fast_accum`), a tile is twice as wide and loads 48 KiB where two narrow ones load 64.
    - Up to 64 rows the reading of b is what takes the time: narrower tiles, and on Hopper and later a ring of 8 steps.
      With 8192 rows of b two CTAs an SM then have 56 KiB of them on their way, where 32 KiB an SM are needed
      (4254 GB/s for 1 us); of tiles of 64 in a ring of 4 it was one CTA with 24 KiB.

    By this estimate; not searched.
    """
    block_m = max(MIN_BLOCK_M, min(128, _power(rows)))
    block_k = max(MIN_BLOCK_K, min(128 if blocked or capability >= (9, 0) else 64, _power(depth)))
    if block_m <= 64 and capability >= (9, 0):
        return Config(block_m, _fit(cols, 32), block_k, group_m=8, num_warps=4, num_stages=8)
    if block_m <= 64:
        return Config(block_m, _fit(cols, 64), block_k, group_m=8, num_warps=4, num_stages=4)
    if capability < (9, 0):
        return Config(block_m, _fit(cols, 128), block_k, group_m=8, num_warps=8, num_stages=3)
    if fast_accum and not blocked:
        return Config(block_m, _fit(cols, 256), block_k, group_m=8, num_warps=8, num_stages=4)
    return Config(block_m, _fit(cols, 128), block_k, group_m=8, num_warps=8, num_stages=4)


def pick_cuda_config(rows: int, cols: int, depth: int, scaling: int) -> CudaConfig:
    """The configuration of products.cu. Pure.

    - Two CTAs share b: up to 9 % faster with scales of 1x128, 3 % with others (measured on one H200, of tiles of
      128 x 128).
    - 16 rows of tiles follow each other.
    - Of blocks, tiles of 192 or 128 columns: which takes less time by STEP_NS, all CTAs' rounds together.
    - As many steps as there is room for, at most six of 128 columns.
    - Two consumers with a set of sums each take turns; one with two sets always has a step under way.
    """
    cluster = 2
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


def pick_few_config(rows: int, cols: int, depth: int, scaling: int, sms: int = SMS) -> FewConfig:
    """The configuration of few_rows.cu. Pure.

    - 128 rows of b to a CTA, of which an SM has two; one where the sums of more than 64 rows of a take the registers.
    - k in 1, 2, 4 or 8 parts, by waves of clusters times the steps of each; starting a cluster and adding up
      its parts counts as two steps for each part. Within 5 % of the best of all on one H200 (EXPERIMENTS.md).
    - As many steps in the ring as shared memory has room for, at most 8.
    """
    tile_m = next(size for size in (8, 16, 32, 64, 128) if rows <= size or size == 128)
    groups, steps = 2, -(-depth // 128)
    tiles, resident = -(-cols // (64 * groups)) * -(-rows // tile_m), few_resident(tile_m, groups)

    def cost(splits: int) -> int:
        return -(-tiles // _clusters(sms, resident, splits)) * (-(-steps // splits) + 2 * splits)

    splits = min((s for s in (1, 2, 4, 8) if s == 1 or steps >= 2 * s), key=cost)
    return few_config(tile_m, groups, splits, scaling)


def few_config(rows: int, groups: int, splits: int, scaling: int) -> FewConfig:
    """With as many steps as 224 KiB hold for the CTAs of an SM, at most 8."""
    resident = few_resident(rows, groups)
    stages = min(8, (224 << 10) // resident // few_step_bytes(rows, groups, scaling))
    return FewConfig(rows, groups, splits, stages, resident)


def few_resident(rows: int, groups: int) -> int:
    """How many CTAs an SM's registers hold: four warpgroups with sums of 64 rows, two with those of 128."""
    return max(1, (4 if rows <= 64 else 2) // groups)


def few_step_bytes(rows: int, groups: int, scaling: int) -> int:
    """Of a step of few_rows.cu in shared memory: both operands, scales of blocks, and two barriers."""
    scales = 0 if scaling == 1 else rows + (64 * groups if scaling == 3 else 4)
    return (rows + 64 * groups) * 128 + 4 * scales + 16


def _clusters(sms: int, resident: int, size: int) -> int:
    """How many clusters of `size` CTAs run at once, with `resident` CTAs an SM. A cluster lies within a GPC, so that of
    132 SMs those of 4 and of 8 CTAs leave 12 without work (the driver's count on one H200)."""
    usable = sms if size <= 2 else sms * 10 // 11
    return usable * resident // size


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
