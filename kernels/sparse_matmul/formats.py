"""The compressed form of a weight [N, K] with 2:4 sparsity, and the order of its metadata.

Of each chunk of 4 elements along K two are kept, at positions i < j of the chunk. The chunk's code has 4 bits: i in the
lower two, j in the upper two. Codes are in the order in which the sparse wgmma of 16-bit operands takes them (PTX ISA,
"Sparse matrix storage" of wgmma.mma_async.sp), in blocks of 16 rows by 64 of K with 64 words of 16 bits:

    block (k // 64, n // 16), word (n % 8) · 8 + (k % 64 // 16) · 2 + n % 16 // 8, bits 4 · (k % 16 // 4)

So a warp's 32 lanes read the 32 words of 32 bits of a block: lane 4 · r + q has 16 of K, from 16 · q on, of row r in
its lower half and of row r + 8 in its upper half. The 32 of K of one instruction are those of lanes with q = 0 and 1,
or with q = 2 and 3, as its sparsity selector says.
"""

from __future__ import annotations

CHUNK = 4  # elements of which two are kept
BLOCK_N, BLOCK_K = 16, 64  # of a block of metadata
WORDS = 64  # of a block


def metadata_shape(rows: int, depth: int) -> tuple[int, int, int]:
    """Of a weight [rows, depth]."""
    return -(-depth // BLOCK_K), -(-rows // BLOCK_N), WORDS
