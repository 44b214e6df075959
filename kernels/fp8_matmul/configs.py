"""Launch configurations of fp8_matmul: every choice is a pure function of the problem and the GPU.

EXPERIMENTS.md lists the alternatives that were tried.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_BLOCK_M, MIN_BLOCK_K = 16, 32  # minimum of tl.dot in fp8


@dataclass(frozen=True)
class Config:
    """One CTA per tile of block_m rows of a by block_n rows of b, with K-blocks of block_k. Grouped tile order:
    `group_m` vertically adjacent tiles before the next column of tiles."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class CudaConfig:
    """Configuration of products.cu.

    - `stages`: pipeline stages.
    - `raster`: height of a group in the grouped tile order, in rows of clusters.
    - `cluster`: 1, or 2 CTAs with vertically adjacent tiles, which share b by TMA multicast.
    - `block_n`: 256 without promotion, 128 with it; with block scales also 192.
    - `turns`: ping-pong. A consumer issues its wgmmas when half of those of the other consumer's K-block have
      completed."""

    stages: int
    raster: int
    cluster: int
    block_n: int
    turns: bool


@dataclass(frozen=True)
class FewConfig:
    """Configuration of few_rows.cu: a CTA computes `rows` rows of a by 64 `groups` rows of b with `stages` pipeline
    stages. A cluster has one CTA for each of `splits` split-K partitions. `resident` CTAs fit on an SM."""

    rows: int
    groups: int
    splits: int
    stages: int
    resident: int


FEW_ROWS = 128  # up to this number of rows CUDA C++ uses few_rows.cu, above it products.cu


def pick_backend(backend: str, possible: bool) -> str:
    """The version that runs. `possible`: CUDA C++ supports the problem. It was faster than Triton in every case
    recorded on an H200 and an H100. Pure.

    With up to 128 rows (FEW_ROWS) the GEMM is bound by the reads of b; few_rows.cu keeps more of them in flight, in
    more CTAs.
    """
    if backend == "auto":
        return "cuda" if possible else "triton"
    return backend


def pick_config(
    rows: int, cols: int, depth: int, blocked: bool, fast_accum: bool, capability: tuple[int, int]
) -> Config:
    """The configuration of the Triton kernel. Pure.

    - K-blocks of 128 bytes: a row of swizzled shared memory. Block scales require them, since 128 elements share a
      scale. Without block scales 64 on sm_89, which has 99 KiB of shared memory.
    - Two sets of accumulators, the tensor cores' and fp32, are 128 registers a thread with a tile of 128 x 128 in 8
      warps. Without the second (`fast_accum`), a tile is twice as wide and loads 48 KiB where two narrow ones load 64.
      Its stages do not fit into the 99 KiB of sm_120.
    - Up to 64 rows the reads of b are the bound: narrower tiles, and from Hopper on 8 pipeline stages. With 8192 rows
      of b two CTAs per SM then have 56 KiB of b in flight, where 32 KiB per SM are needed (4254 GB/s for 1 us); with
      tiles of 64 and 4 stages it was one CTA with 24 KiB.

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
    if fast_accum and not blocked and capability < (12, 0):
        return Config(block_m, _fit(cols, 256), block_k, group_m=8, num_warps=8, num_stages=4)
    return Config(block_m, _fit(cols, 128), block_k, group_m=8, num_warps=8, num_stages=4)


def pick_cuda_config(rows: int, cols: int, depth: int, scaling: int) -> CudaConfig:
    """The configuration of products.cu. Pure.

    - Two CTAs share b: up to 9 % faster with scales per 1x128, 3 % with others (measured on one H200, with tiles of
      128 x 128).
    - Groups of 16 vertically adjacent tiles in the tile order.
    - With block scales tiles of 192 or 128 columns, whichever takes less time by STEP_NS over all waves of tiles.
    - As many stages as fit into shared memory, at most six with 128 columns.
    - Ping-pong where a consumer has one set of wgmma accumulators; with two sets its wgmmas overlap its own promotion.
    """
    cluster = 2
    if scaling == 0:
        return CudaConfig(stages=4, raster=16 // cluster, cluster=cluster, block_n=256, turns=False)
    block_n = 128
    if scaling > 1:
        block_n = min(STEP_NS[scaling], key=lambda n: _step_ns(rows, cols, cluster, scaling, n))
    stages = 5 if block_n == 192 else 6
    return CudaConfig(stages, raster=16 // cluster, cluster=cluster, block_n=block_n, turns=block_n == 192)


#: Time of a K-block of 128 by the scaling and the columns of a tile, in ns, measured on one H200 (EXPERIMENTS.md).
STEP_NS = {2: {128: 440, 192: 620}, 3: {128: 550, 192: 810}}
SMS = 132


def pick_few_config(rows: int, cols: int, depth: int, scaling: int, sms: int = SMS) -> FewConfig:
    """The configuration of few_rows.cu. Pure.

    - A CTA has 128 rows of b. Two CTAs fit on an SM; one with more than 64 rows of a, whose accumulators need the
      registers.
    - 1, 2, 4 or 8 split-K partitions, by the number of waves of clusters times the K-blocks of a CTA. Starting a
      cluster and reducing its partitions counts as two K-blocks per partition. Within 5 % of the best of all on one
      H200 (EXPERIMENTS.md).
    - As many pipeline stages as fit into shared memory, at most 8.
    """
    tile_m = next(size for size in (8, 16, 32, 64, 128) if rows <= size or size == 128)
    groups, steps = 2, -(-depth // 128)
    tiles, resident = -(-cols // (64 * groups)) * -(-rows // tile_m), few_resident(tile_m, groups)

    def cost(splits: int) -> int:
        return -(-tiles // _clusters(sms, resident, splits)) * (-(-steps // splits) + 2 * splits)

    splits = min((s for s in (1, 2, 4, 8) if s == 1 or steps >= 2 * s), key=cost)
    return few_config(tile_m, groups, splits, scaling)


def few_config(rows: int, groups: int, splits: int, scaling: int) -> FewConfig:
    """The configuration with as many stages as fit into 224 KiB for the CTAs of an SM, at most 8."""
    resident = few_resident(rows, groups)
    stages = min(8, (224 << 10) // resident // few_step_bytes(rows, groups, scaling))
    return FewConfig(rows, groups, splits, stages, resident)


def few_resident(rows: int, groups: int) -> int:
    """How many CTAs fit into an SM's registers: four warpgroups with accumulators of up to 64 rows, two of 128."""
    return max(1, (4 if rows <= 64 else 2) // groups)


def few_step_bytes(rows: int, groups: int, scaling: int) -> int:
    """Bytes of a pipeline stage of few_rows.cu: both operands, block scales, and two barriers."""
    scales = 0 if scaling == 1 else rows + (64 * groups if scaling == 3 else 4)
    return (rows + 64 * groups) * 128 + 4 * scales + 16


def _clusters(sms: int, resident: int, size: int) -> int:
    """How many clusters of `size` CTAs run at once, with `resident` CTAs per SM. A cluster lies within a GPC, so that
    clusters of 4 and of 8 CTAs leave 12 of 132 SMs idle (the driver's count on one H200)."""
    usable = sms if size <= 2 else sms * 10 // 11
    return usable * resident // size


def _step_ns(rows: int, cols: int, cluster: int, scaling: int, block_n: int) -> int:
    """Time of all waves of tiles for one K-block, with tiles of 128 rows and clusters of `cluster` of them."""
    clusters = -(-rows // (128 * cluster)) * -(-cols // block_n)
    return -(-clusters // (SMS // cluster)) * STEP_NS[scaling][block_n]


def _power(size: int) -> int:
    """The next power of two."""
    return 1 << max(0, size - 1).bit_length()


def _fit(size: int, most: int) -> int:
    """The block size of a dimension: `most`, or for a smaller dimension its next power of two, at least 16."""
    return max(16, min(most, _power(size)))
