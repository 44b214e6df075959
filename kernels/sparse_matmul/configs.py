"""How sparse_matmul is launched: every choice is a pure function of the problem and the GPU.

What was tried is in EXPERIMENTS.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MIN_BLOCK = 16  # minimum block of tl.dot


@dataclass(frozen=True)
class Config:
    """Blocks along M, N and K: two are a CTA's output tile, the third is the block of the summed dimension. Grouped
    tile order: `group` vertically adjacent tiles before the next column of tiles."""

    block_m: int
    block_n: int
    block_k: int
    group: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class CudaConfig:
    """Configuration of products.cu, whose tiles are 128 rows of the weight by 256 of x: pipeline stages, height of a
    group in the grouped tile order in rows of clusters, and CTAs of a cluster, which share x by multicast (1, 2 or
    4)."""

    stages: int
    raster: int
    cluster: int


@dataclass(frozen=True)
class CompressConfig:
    """One CTA per block_n rows by block_k columns of the dense weight, multiples of 16 and 64."""

    block_n: int
    block_k: int
    num_warps: int


def pick_backend(backend: str, rows: int, dtype: torch.dtype, on_gpu: bool, possible: bool = False) -> str:
    """The version of a GEMM: "triton", "cuda" or, only for "auto", "library": the weight is decompressed into memory
    for cuBLAS. `possible`: CUDA C++ supports the problem. Pure.

    In an exploration on one H200 at 4096 x 4096 x 4096, in FLOPs of the dense GEMM: 129 TFLOP/s with Triton, which
    decompresses a tile of the weight again for each tile of rows, 760 with cuBLAS, 880 with the sparse tensor cores
    ("cuda"). "triton" runs up to 64 rows, which are one tile of rows, and in fp32, since cuBLAS may be set to round
    fp32 operands to tf32. fp8 has no "library".
    """
    if backend != "auto":
        return backend
    if not on_gpu or dtype == torch.float32 or rows <= 64:
        return "triton"
    if possible:
        return "cuda"
    return "triton" if dtype.itemsize == 1 else "library"


def pick_fwd_config(rows: int, cols: int, depth: int, dtype: torch.dtype, capability: tuple[int, int]) -> Config:
    """The configuration of y [rows, cols], a sum over `depth`. Pure.

    Tiles of 128 x 128 in 8 warps. The tile of the weight is decompressed in registers. It is then stored to shared
    memory for wgmma, or on sm_80 converted to mma's register layout, where K-blocks of 32 fit. Up to 64 rows the reads
    of the weight bind: narrow tiles. Rows whose length is no multiple of a vector are loaded element by element through
    registers, and larger tiles would spill. fp32 does not use tensor cores here: all operands of a K-block are in
    registers. Not measured yet.
    """
    block_m = _fit(rows, 128)
    if dtype == torch.float32:
        return Config(min(block_m, 32), _fit(cols, 64), _fit(depth, 16), group=8, num_warps=4, num_stages=2)
    if cols % 16 or depth % 32:
        return Config(min(block_m, 64), _fit(cols, 64), _fit(depth, 32), group=8, num_warps=8, num_stages=2)
    block_k = 64 if capability >= (9, 0) else 32
    if block_m <= 64:
        return Config(block_m, _fit(cols, 64), _fit(depth, block_k), group=8, num_warps=4, num_stages=3)
    return Config(block_m, _fit(cols, 128), _fit(depth, block_k), group=8, num_warps=8, num_stages=3)


def pick_dx_config(rows: int, cols: int, depth: int, dtype: torch.dtype, capability: tuple[int, int]) -> Config:
    """The configuration of dx [rows, depth], a sum over `cols`. Pure. As `pick_fwd_config`; not measured yet."""
    other = pick_fwd_config(rows, depth, cols, dtype, capability)
    return Config(other.block_m, other.block_k, other.block_n, other.group, other.num_warps, other.num_stages)


def pick_dvalues_config(rows: int, cols: int, depth: int, dtype: torch.dtype, capability: tuple[int, int]) -> Config:
    """The configuration of the dense gradient [cols, depth] before it is gathered, a sum over `rows`. Pure. As
    `pick_fwd_config`; not measured yet."""
    other = pick_fwd_config(cols, depth, rows, dtype, capability)
    return Config(other.block_k, other.block_m, other.block_n, other.group, other.num_warps, other.num_stages)


def pick_fp8_config(rows: int, cols: int, depth: int, capability: tuple[int, int]) -> Config:
    """The configuration of y [rows, cols] in 8 bits, a sum over `depth`. Pure.

    K-blocks of 64, a block of metadata; K is a multiple of it. Tiles as in `pick_fwd_config`; with 4 warps tiles of
    64 x 64 spill on sm_89. Not measured yet.
    """
    block_m = _fit(rows, 128)
    if block_m <= 64:
        warps = 4 if capability >= (9, 0) else 8
        return Config(block_m, _fit(cols, 64), 64, group=8, num_warps=warps, num_stages=3)
    return Config(block_m, _fit(cols, 128), 64, group=8, num_warps=8, num_stages=3)


def pick_cuda_config(rows: int, cols: int, depth: int) -> CudaConfig:
    """The configuration of products.cu. Pure. In 8 bits a K-block is twice as long, with the same bytes and 1 KiB more
    of metadata; not measured there yet.

    - As many stages as fit into shared memory: 41 KiB each.
    - Two CTAs share x where the weight has rows for both: 3 to 24 % faster than single CTAs; four are 50 % slower,
      since 132 SMs do not hold 33 such clusters at once (measured on one H200).
    - Groups of 16 vertically adjacent tiles in the tile order.
    """
    cluster = 2 if cols > 128 else 1
    return CudaConfig(stages=4, raster=16 // cluster, cluster=cluster)


def pick_compress_config(cols: int, depth: int, dtype: torch.dtype, capability: tuple[int, int]) -> CompressConfig:
    """The configuration of compress and decompress. Pure. 32 bytes of a row's values per thread; a block of metadata
    belongs to one CTA. Not measured yet."""
    return CompressConfig(16, 64 if depth <= 64 else 512 if dtype.itemsize == 1 else 256, 4)


def _fit(size: int, most: int) -> int:
    """The block of a dimension: `most`, or for a smaller dimension its next power of two, at least MIN_BLOCK."""
    return max(MIN_BLOCK, min(most, 1 << max(0, size - 1).bit_length()))
