"""The compressed form of a weight [N, K] with 2:4 sparsity, and the order of its metadata.

Of each chunk of 4 elements along K two are kept, at positions i < j of the chunk. The chunk's code has 4 bits: i in the
lower two, j in the upper two. Codes are in the order in which the sparse wgmma takes them (PTX ISA, "Sparse matrix
storage" and "Matrix fragments" of wgmma.mma_async.sp), in blocks of 16 rows by 64 of K with 64 words of 16 bits:

    values of 16 or 32 bits   block (k // 64, n // 16), word (n % 8) · 8 + (k % 64 // 16) · 2 + n % 16 // 8
    values of 8 bits          the same block, word (n % 8) · 8 + (k % 64 // 32) · 4 + n % 16 // 8 · 2 + k % 32 // 16
    both                      bits 4 · (k % 16 // 4)

So a warp's 32 lanes read the 32 words of 32 bits of a block, lane 4 · r + q one of these:

    16 bits   16 of K, from 16 · q on: of row r in its lower half, of row r + 8 in its upper half. The 32 of K of one
              instruction are those of lanes with q = 0 and 1, or with q = 2 and 3, as its sparsity selector says.
    8 bits    32 of K, from 32 · (q // 2) on, of row r + 8 · (q % 2). All 64 of K are of one instruction, whose sparsity
              selector is 0.
"""

from __future__ import annotations

import torch

CHUNK = 4  # elements of which two are kept
BLOCK_N, BLOCK_K = 16, 64  # of a block of metadata
WORDS = 64  # of a block
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


def multiple(dtype: torch.dtype) -> int:
    """What K is a multiple of: in 8 bits whole instructions, so that rows of values begin on 16-byte boundaries."""
    return BLOCK_K if dtype in EIGHT_BITS else CHUNK


def metadata_shape(rows: int, depth: int) -> tuple[int, int, int]:
    """Of a weight [rows, depth]."""
    return -(-depth // BLOCK_K), -(-rows // BLOCK_N), WORDS
