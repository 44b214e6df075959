"""The two formats, and how packed weights lie in memory.

Elements are e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.

        elements of a scale   scale
mxfp4           32            E8M0, a power of two
nvfp4           16            e4m3, and one fp32 number for the whole tensor

Weights [N, K] are cut along K into chunks of 128, the last filled up with zeros: w [chunks, N, 64] and scales
[chunks, N, 128 / elements of a scale], both contiguous. So a tile of rows of one chunk is one piece of memory. Byte j
of a row has element j of the chunk in its lower half and element j + 64 in its upper half: the two halves of x that
they are multiplied with are contiguous, and no element moves to another thread after it is unpacked.
"""

from __future__ import annotations

CHUNK = 128
BLOCK = {"mxfp4": 32, "nvfp4": 16}  # elements of a scale


def chunks(depth: int) -> int:
    return (depth + CHUNK - 1) // CHUNK
