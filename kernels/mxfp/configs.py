"""How each kernel of mxfp is launched: every choice is a pure function of the problem and the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

FLAT = 512  # row length of a contiguous tensor where the result does not depend on its own rows
TILE = 4096  # elements


@dataclass(frozen=True)
class Config:
    """One CTA per tile of block_m rows by block_n columns, which are whole blocks."""

    block_m: int
    block_n: int
    num_warps: int


@dataclass(frozen=True)
class UnitsConfig:
    """One CTA per `units` units of eight elements."""

    units: int
    num_warps: int


@dataclass(frozen=True)
class CudaConfig:
    """Configuration of transposed.cu: a warp's iterations of 32 rows, and warps of a CTA, with 64 adjacent columns
    each."""

    steps: int
    warps: int


def pick_backend(backend: str, possible: bool) -> str:
    """The version that runs. `possible`: CUDA C++ supports the problem; it requires blocks along a dimension other than
    the last. Pure.

    CUDA C++ packs the elements before it transposes them, and rounds two per instruction. On one H100 it takes 0.79 of
    Triton's time in 8 bits and 0.54 in 4 (reports/h100).
    """
    return backend if backend != "auto" else "cuda" if possible else "triton"


def pick_cuda_config(rows: int, dim: int, width: int, sms: int = 132) -> CudaConfig:
    """The configuration of transposed.cu for x [rows, dim], whose blocks are along `dim`. Pure.

    width   bits of an element

    A warp writes 64 bytes of a row of the result, two sectors of L2. An iteration is 32 bytes of them (mxfp8), or 16
    and 24. There are fewer iterations where an SM would have less than 8 warps. 4 warps read 512 bytes of a row of x.
    Not tuned.
    """
    steps = 2 if width == 8 else 4
    while steps > 1 and -(-rows // 64) * -(-dim // (32 * steps)) < 8 * sms:
        steps //= 2
    return CudaConfig(steps, 4)


def pick_config(
    rows: int, dim: int, width: int, transposed: bool, dtype: torch.dtype, capability: tuple[int, int]
) -> Config:
    """The configuration of quantisation. Pure.

    width       bits of an element
    transposed  the contiguous dimension of x is that of its rows, not of its columns

    Tiles of 4096 elements with 4 warps: 32 elements per thread. They are as wide as a row up to 512 columns, and 64 by
    64 where x is transposed, so that both sides of the transposition access segments of 128 bytes. Not tuned.
    """
    widest = 64 if transposed else 512
    block_n = min(widest, max(32, triton.next_power_of_2(dim)))
    return Config(TILE // block_n, block_n, 4)


def pick_pairs(
    rows: int,
    dim: int,
    strides: tuple[int, int],
    block: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
) -> Config | None:
    """The configuration of quantisation two elements at a time (pairs.py), or None where that is not possible. It
    requires bf16, sm_90 or later, whole blocks, and contiguous rows on 16-byte boundaries. Pure.

    Tiles of 4096 elements with 4 warps: twice 16 elements per thread, each two loads of 16 bytes. With 32 registers
    these are 128 KB in flight per SM. A contiguous tensor is read as rows of a tile, with fewer instructions for
    addresses. On one H200 within 1.5 % of the fastest of nine configurations in five formats at 8192 x 8192.
    """
    aligned = strides[1] == 1 and strides[0] % 8 == 0 and dim % block == 0
    if capability < (9, 0) or dtype != torch.bfloat16 or not aligned:
        return None
    if strides[0] == dim and rows * dim % TILE == 0:
        return Config(1, TILE, 4)
    block_n = min(512, max(32, triton.next_power_of_2(dim)))
    return Config(TILE // block_n, block_n, 4)


def pick_amax(rows: int, dim: int) -> Config:
    """The configuration of the reduction for the largest magnitude, of tensors that `pick_pairs` supports. Pure.

    64 elements per thread, eight loads of 16 bytes, and an atomic operation for each 16384 elements. On one H200 within
    1 % of the fastest of nine configurations at 8192 x 8192.
    """
    block_n = min(512, max(32, triton.next_power_of_2(dim)))
    return Config(4 * TILE // block_n, block_n, 8)


def pick_dequantize_config(rows: int, dim: int, width: int, dtype: torch.dtype, capability: tuple[int, int]) -> Config:
    """The configuration of dequantisation. Pure. `dtype` is that of the result. As in quantisation; not tuned."""
    block_n = min(512, max(32, triton.next_power_of_2(dim)))
    return Config(TILE // block_n, block_n, 4)


def pick_dequantize_pairs(
    count: int, whole: bool, width: int, dtype: torch.dtype, capability: tuple[int, int]
) -> UnitsConfig | None:
    """The configuration of dequantisation in one layout (dequantize_pairs.py), or None where that is not possible. It
    requires results in bf16 or fp16, sm_90 or later, and contiguous data of `whole` blocks on a 16-byte boundary.
    `count`: elements. Pure.

    Two units per thread, whose loads are in flight together; 32 registers, for full occupancy. On one H200 the fastest
    of twelve configurations at 8192 x 8192 in three formats of four, and within 1 % in the other.
    """
    if capability < (9, 0) or dtype not in (torch.bfloat16, torch.float16) or not whole:
        return None
    return UnitsConfig(256, 4)
