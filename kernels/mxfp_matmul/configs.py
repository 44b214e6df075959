"""How the kernels of mxfp_matmul are launched: every choice is a pure function of the problem and the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SMS = {(8, 0): 108, (9, 0): 132}  # of an A100, and of an H100 or H200


@dataclass(frozen=True)
class Config:
    """A CTA for each tile of block_m rows of x by block_n rows of w and for each of `splits` parts of K, which are
    summed by a second kernel where there are several. A step of the main loop takes block_k elements of each half of a
    chunk. `group_m` tiles of rows go together, for L2."""

    block_m: int
    block_n: int
    block_k: int
    splits: int
    group_m: int
    num_warps: int
    num_stages: int


DENSE_BLOCK_N, DENSE_WARPS = 32, 4  # of the kernel that unpacks the weights into memory


def pick_dense(rows: int, dtype: torch.dtype, on_gpu: bool) -> bool:
    """Whether the weights are unpacked into memory, for cuBLAS. Pure.

    Unpacking in registers is done again for each tile of rows. Measured on one H200 at N = K = 8192: 1024 rows take 633
    us so, 193 us in a dense product; unpacking once is some 45 us of reading and writing. Up to 128 rows there is one
    tile of them. cuBLAS may be set to round fp32 operands to tf32.
    """
    return on_gpu and dtype != torch.float32 and rows > 128


def pick_config(rows: int, columns: int, chunks: int, dtype: torch.dtype, capability: tuple[int, int]) -> Config:
    """The configuration of one product of x [rows, K] and w [columns, K], K in chunks of 128. Pure.

    - Up to 16 rows w is all that is read: tiles of 16 by 64, and K in parts until there are four CTAs an SM.
    - Up to 64 rows: 64 by 64, two CTAs an SM. More: 128 by 128 with 8 warps.
    - Without wgmma, which reads operands from shared memory, steps of half the elements and tiles of 64 columns.
    - fp32 has no tensor cores here: steps of 16, of which all operands are in registers.

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
        block_m, block_n, block_k, warps = min(block_m, 32), 64, 16, 4
    tiles = -(-rows // block_m) * -(-columns // block_n)
    splits = max(1, min(wanted // max(tiles, 1), chunks // 4, 16))
    return Config(block_m, block_n, block_k, splits, 8, warps, 3)
