"""How the kernels of mxfp_matmul are launched: every choice is a pure function of the problem and the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SMS = {(8, 0): 108, (9, 0): 132}  # of an A100, and of an H100 or H200


@dataclass(frozen=True)
class Config:
    """One CTA per tile of block_m rows of x by block_n rows of w and per split-K partition. With several `splits` a
    second kernel reduces them. An iteration of the main loop processes block_k elements of each half of a chunk.
    `group_m`: height of a group in the grouped tile order."""

    block_m: int
    block_n: int
    block_k: int
    splits: int
    group_m: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class CudaConfig:
    """Configuration of few_rows.cu: `rows` rows of x by 64 `groups` rows of w per CTA, `splits` split-K partitions, one
    for each CTA of a cluster, and pipeline stages of a chunk of K each."""

    rows: int
    groups: int
    splits: int
    stages: int


@dataclass(frozen=True)
class ManyConfig:
    """Configuration of many_rows.cu: `rows` rows of x by 64 `groups` rows of w per CTA, `cluster` CTAs (1 or 2) with
    the same rows of x, and pipeline stages of a chunk of K each."""

    rows: int = 256
    groups: int = 2
    cluster: int = 2
    stages: int = 3

    def tiles(self, rows: int, columns: int) -> int:
        """The number of clusters' tiles of y [rows, columns]."""
        return -(-rows // self.rows) * -(-columns // (64 * self.groups * self.cluster))


DENSE_BLOCK_N, DENSE_WARPS = 32, 4  # tile of the kernel that unpacks the weights into memory
CUDA_ROWS = 4096  # up to this many rows CUDA C++ is selected where it can run
FEW_CYCLES = 1500  # per chunk of K in few_rows.cu, for four warpgroups and 64 rows of x
MANY_CYCLES = 2300  # the same in many_rows.cu


def pick_backend(backend: str, rows: int, possible: bool) -> str:
    """The version that runs. `possible`: CUDA C++ supports the problem. Pure.

    CUDA C++ unpacks a weight in 3 instructions instead of Triton's 17, and again for every 64 or 256 rows of x. On one
    H200 with N = K = 8192, one row takes 18 us in CUDA C++ and 43 us in Triton; 1024 rows take 172 us in CUDA C++, 256
    at a time, and 250 us if the weights are unpacked into memory for cuBLAS. The limit (CUDA_ROWS) is estimated: with
    more rows, unpacking into memory is a smaller part of the time.
    """
    if backend == "auto":
        return "cuda" if possible and rows <= CUDA_ROWS else "triton"
    return backend


def pick_many(rows: int, columns: int, sms: int = 132) -> bool:
    """Whether many_rows.cu is used instead of few_rows.cu. Pure. By the number of waves of tiles, times the cycles of a
    chunk. Those of few_rows.cu are measured, without split-K (EXPERIMENTS.md), those of many_rows.cu estimated."""
    many, few = ManyConfig(), -(-rows // 64) * -(-columns // 256)
    rounds = -(-many.tiles(rows, columns) // (sms // many.cluster))
    return rows > 128 and rounds * MANY_CYCLES < -(-few // sms) * FEW_CYCLES


def pick_dense(rows: int, dtype: torch.dtype, on_gpu: bool) -> bool:
    """Whether the weights are unpacked into memory, for cuBLAS. Pure.

    Unpacking in registers is repeated for each tile of rows. Measured on one H200 at N = K = 8192: with it 1024 rows
    take 633 us, a dense GEMM 193 us; unpacking once is some 45 us of reading and writing. Up to 128 rows there is one
    tile of rows. cuBLAS may be set to round fp32 operands to tf32.
    """
    return on_gpu and dtype != torch.float32 and rows > 128


def pick_config(rows: int, columns: int, chunks: int, dtype: torch.dtype, capability: tuple[int, int]) -> Config:
    """The configuration of the Triton kernel for x [rows, K] and w [columns, K], K in chunks of 128. Pure.

    - Up to 16 rows the reads of w bind: tiles of 16 by 64, and split-K until there are four CTAs per SM.
    - Up to 64 rows: 64 by 64, two CTAs per SM. More: 128 by 128 with 8 warps.
    - Without wgmma, which reads operands from shared memory, half the block_k and tiles of 64 columns.
    - fp32 does not use tensor cores here: block_k 16, with all operands in registers, and 8 warps; 4 spill.

    Not tuned; none of these spills.
    """
    sms = SMS.get(capability, 132)
    if rows <= 16:
        block_m, block_n, block_k, warps, wanted = 16, 64, 64, 4, 4 * sms
    elif rows <= 64:
        block_m, block_n, block_k, warps, wanted = 64, 64, 64, 4, 2 * sms
    else:
        block_m, block_n, block_k, warps, wanted = 128, 128, 64, 8, 0
    if capability < (9, 0) and rows > 16:
        block_n, block_k, warps = 64, 32, 8
    if dtype == torch.float32:
        block_m, block_n, block_k, warps = min(block_m, 32), 64, 16, 8
    tiles = -(-rows // block_m) * -(-columns // block_n)
    splits = max(1, min(wanted // max(tiles, 1), chunks // 4, 16))
    return Config(block_m, block_n, block_k, splits, 8, warps, 3)


def pick_cuda_config(rows: int, columns: int, chunks: int, chunk_bytes: int, sms: int = 132) -> CudaConfig:
    """The configuration of few_rows.cu. Pure. `chunk_bytes`: bytes of w and scales for a row of a chunk of K.

    - Two CTAs per SM with 128 rows of w each. With more than 16 rows of x, and a tile for each SM, also one CTA with
      256 rows of w, which share the loads of x.
    - 1, 2, 4 or 8 split-K partitions, by the number of waves of clusters times the chunks of a CTA. Starting a cluster
      and reducing its partitions counts as two chunks per partition.
    - As many pipeline stages as fit into shared memory, at most 8.

    On one H200 this picks the fastest of all up to 64 rows, and within 5 % of it with 128 (EXPERIMENTS.md).
    """
    tile_m = next(size for size in (8, 16, 32, 64) if rows <= size or size == 64)

    def cost(choice: tuple[int, int]) -> int:
        groups, splits = choice
        tiles = -(-columns // (64 * groups)) * -(-rows // tile_m)
        return -(-tiles // _clusters(sms, 4 // groups, splits)) * (-(-chunks // splits) + 2 * splits)

    parts = [splits for splits in (1, 2, 4, 8) if splits == 1 or chunks >= 2 * splits]
    shared = rows > 16 and -(-columns // 256) * -(-rows // tile_m) >= sms
    choices = [(groups, splits) for groups in ((4, 2) if shared else (2,)) for splits in parts]
    groups, splits = min(choices, key=cost)
    stage = 2 * tile_m * 128 + 64 * groups * chunk_bytes + 16
    return CudaConfig(tile_m, groups, splits, min(8, (224 << 10) * groups // 4 // stage))


def _clusters(sms: int, resident: int, size: int) -> int:
    """How many clusters of `size` CTAs run at once, with `resident` CTAs per SM. A cluster lies within a GPC, so that
    clusters of 4 and of 8 CTAs leave 12 of 132 SMs idle (the driver's count on one H200)."""
    usable = sms if size <= 2 else sms * 10 // 11
    return usable * resident // size
