"""The compressed form of a weight [N, K] with 2:4 sparsity, and the order of its metadata.

Two of each chunk of 4 elements along K are kept, at positions i < j of the chunk. The chunk's code has 4 bits: i in the
lower two, j in the upper two. Codes are in the order in which the sparse wgmma reads them (PTX ISA, "Sparse matrix
storage" and "Matrix fragments" of wgmma.mma_async.sp), in blocks of 16 rows by 64 of K with 64 words of 16 bits:

    values of 16 or 32 bits   block (k // 64, n // 16), word (n % 8) · 8 + (k % 64 // 16) · 2 + n % 16 // 8
    values of 8 bits          the same block, word (n % 8) · 8 + (k % 64 // 32) · 4 + n % 16 // 8 · 2 + k % 32 // 16
    both                      bits 4 · (k % 16 // 4)

So a warp's 32 lanes read the 32 words of 32 bits of a block, lane 4 · r + q one of these:

    16 bits   K elements from 16 · q to 16 · q + 15: of row r in its lower half, of row r + 8 in its upper half. The K
              of 32 of one instruction is that of lanes q = 0 and 1, or q = 2 and 3, by its sparsity selector.
    8 bits    K elements from 32 · (q // 2) on, 32 of them, of row r + 8 · (q % 2). All 64 belong to one instruction,
              whose sparsity selector is 0.
"""

from __future__ import annotations

import torch

CHUNK = 4  # elements of which two are kept
BLOCK_N, BLOCK_K = 16, 64  # size of a block of metadata
WORDS = 64  # per block
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


def multiple(dtype: torch.dtype) -> int:
    """K must be a multiple of this: for fp8 the K of one instruction, so that rows of values are 16-byte aligned."""
    return BLOCK_K if dtype in EIGHT_BITS else CHUNK


def metadata_shape(rows: int, depth: int) -> tuple[int, int, int]:
    """The shape of the metadata of a weight [rows, depth]."""
    return -(-depth // BLOCK_K), -(-rows // BLOCK_N), WORDS
