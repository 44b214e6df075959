# A copy of parts/configs/heads_backward.py, made by `nox -s vendor`: change it there.
"""How the backward of heads that share their input is launched. Every choice is a pure function of the problem and the
GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

MIN_BLOCK = 16  # what tl.dot takes
PITCH = 16  # elements: rows of the hidden's gradient are whole vectors
CHUNK_ROWS = 8448
BLOCK = 128  # rows of a tile, and columns of the hidden of a CTA, in CUDA C++
MIN_ROWS = 128


@dataclass(frozen=True)
class DhiddenConfig:
    """A CTA takes `block_h` columns of a head and `tiles` tiles of `block_m` rows, which follow each other."""

    block_m: int
    block_h: int
    block_k: int
    tiles: int
    stages: int
    num_warps: int


@dataclass(frozen=True)
class CudaConfig:
    """A unit of work is a block of columns of the hidden and `tiles` tiles of rows. `cluster` CTAs, which have blocks
    that follow each other, share what they load of x, in a ring of `stages` steps of 64 columns."""

    tiles: int
    cluster: int
    stages: int


@dataclass(frozen=True)
class TileConfig:
    """A CTA computes a tile of `block_m` by `block_n` of a gradient, `block_k` terms at a time."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    num_warps: int


def pick_chunk_rows(rows: int, heads: int, hidden: int) -> int:
    """Rows of which the hidden's gradient is in memory at a time. Pure. 8448 rows of 512 columns are 132 tiles of 128 x
    256, one for each SM. Each chunk also reads and writes the fp32 sums of w1's gradient: 56 MB for ten heads of 1365.
    Twice the rows would halve that, and take 465 MB instead of 232; estimated, 2 % of the time."""
    return min(max(1, rows), CHUNK_ROWS)


def pick_cuda(rows: int, possible: bool) -> bool:
    """Whether the gradient of the hidden is made in CUDA C++; `possible`: it can be. Pure. Measured on one H200, ten
    heads of 512 to 1365 to 3: the backward of 564 rows takes 112 us, with Triton's 164. Down to a tile of rows a unit
    of work is the same, so that fewer should not take longer; not measured."""
    return possible and rows > MIN_ROWS


def pick_cuda_config(rows: int, heads: int, hidden: int, sms: int) -> CudaConfig:
    """Configuration of the hidden's gradient in CUDA C++. Pure.

    As many tiles of rows a unit as make the rounds of all SMs shortest: a unit costs its tiles, and about half a tile
    more to load w1. Of ten heads of 1365 there are 55 pairs of blocks, for 66 pairs of SMs: 8448 rows are six parts of
    eleven tiles, five rounds in which no SM is idle, and 5000 rows six parts of seven. Of equal times the one with
    the most tiles, which are the fewest parts. 11 stages are what shared memory holds beside dpre and dy. Estimated,
    not measured.
    """
    blocks, bands = heads * triton.cdiv(hidden, BLOCK), triton.cdiv(rows, BLOCK)
    cluster = 2 if blocks > 1 else 1

    def time(tiles: int) -> tuple[int, int]:
        units = triton.cdiv(blocks, cluster) * triton.cdiv(bands, tiles)
        return triton.cdiv(units, max(1, sms // cluster)) * (2 * tiles + 1), -tiles

    return CudaConfig(min(range(1, bands + 1), key=time), cluster, stages=11)


def pick_library(rows: int, dtype: torch.dtype, on_gpu: bool) -> bool:
    """Whether cuBLAS makes the products of the hidden's gradient where Triton writes that. Pure. Triton's products
    reach some 290 TFLOP/s; measured on one H200, the backward of 500 rows takes 189 us with cuBLAS, 207 without. cuBLAS
    may be set to round fp32 operands to tf32."""
    return on_gpu and dtype != torch.float32 and rows >= 256


def pick_pitch(hidden: int) -> int:
    """Elements of a row of the hidden's gradient. Pure."""
    return triton.cdiv(hidden, PITCH) * PITCH


def pick_dhidden_config(
    rows: int,
    dim: int,
    heads: int,
    hidden: int,
    aligned: bool,
    dtype: torch.dtype,
    capability: tuple[int, int],
    sms: int,
) -> DhiddenConfig:
    """Configuration of the hidden's gradient. Pure. Row tiles follow each other in a CTA as long as there are four CTAs
    to each SM, so that there are few parts of w2's gradient. 128 columns in place of 64, measured on one H200 with the
    products by cuBLAS: 205 000 rows take 22.4 ms in place of 26.5, 5000 879 us in place of 726."""
    if not aligned or dtype == torch.float32 or dim <= 64:
        block_m, block_h, block_k, stages, warps = (
            fit(rows, 32),
            fit(hidden, 32),
            fit(dim, 32 if dim <= 64 else 16),
            2,
            4,
        )
    else:
        wide = capability >= (9, 0) and rows >= 8192
        block_m, block_h, stages, warps = fit(rows, 128), fit(hidden, 128 if wide else 64), 3, 8
        block_k = 32 if capability < (9, 0) else 64
    ctas = heads * triton.cdiv(hidden, block_h) * triton.cdiv(rows, block_m)
    return DhiddenConfig(block_m, block_h, block_k, max(1, min(8, ctas // (4 * sms))), stages, warps)


def pick_dx_config(
    rows: int, dim: int, aligned: bool, dtype: torch.dtype, capability: tuple[int, int], sms: int
) -> TileConfig:
    """Configuration of x's gradient, a sum over all heads. Pure. Smaller tiles where large ones leave SMs idle."""
    if not aligned or dtype == torch.float32:
        return TileConfig(fit(rows, 64), fit(dim, 64), 16, stages=2, num_warps=4)
    if capability < (9, 0):
        return TileConfig(fit(rows, 128), fit(dim, 128), 32, stages=4, num_warps=8)
    if dim >= 256 and triton.cdiv(rows, 128) * triton.cdiv(dim, 256) > sms // 2:
        return TileConfig(128, 256, 64, stages=3, num_warps=8)
    small = triton.cdiv(rows, 128) * triton.cdiv(dim, 128) <= sms // 2
    return TileConfig(fit(rows, 64 if small else 128), fit(dim, 64 if small else 128), 64, stages=4, num_warps=4)


def pick_dw1_config(
    rows: int, dim: int, hidden: int, aligned: bool, dtype: torch.dtype, capability: tuple[int, int]
) -> TileConfig:
    """Configuration of w1's gradient, `block_m` being columns of the hidden and `block_k` rows. Pure."""
    if not aligned or dtype == torch.float32:
        return TileConfig(fit(hidden, 64), fit(dim, 64), fit(rows, 32), stages=2, num_warps=4)
    block_k, stages = (32, 4) if capability < (9, 0) else (64, 3)
    return TileConfig(fit(hidden, 128), fit(dim, 128), block_k, stages, num_warps=8)


def fit(size: int, most: int) -> int:
    """The block of a dimension: `most`, or what a smaller dimension fills."""
    return max(MIN_BLOCK, min(most, triton.next_power_of_2(max(1, size))))
