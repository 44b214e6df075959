"""The two formats, and the memory layout of packed weights.

Elements are e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.

        elements per scale    scale
mxfp4           32            E8M0, a power of two
nvfp4           16            e4m3, and one fp32 scale for the whole tensor

Weights [N, K] are divided along K into chunks of 128 and along N into tiles of 16, the last of both padded with zeros:

    w       [chunks, tiles, 1024] bytes
    scales  [chunks, N, 128 / elements per scale]

So the rows of a CTA's tile in one chunk are contiguous. A tile of a chunk is 256 words of 32 bits, in the order of the
A operand fragments of mma.m16n8k16 and wgmma:

    word    128 · (k // 64) + 4 · thread + k // 16 % 4         thread = 4 · (row % 8) + k % 8 // 2
    weight  half k % 2 of pair 2 · (k // 8 % 2) + row // 8     of the four pairs of a word

A pair is a word with the signs of its weights in bits 15 and 31 and their magnitudes in bits 8 to 6 and 24 to 22, as in
bf16. With arithmetic shifts and the mask m of those bits, the four pairs of a word q are

    q & m      q << 6 & m      (q << 3 ^ q << 5) & m      (q >> 6 ^ q << 4) & m

If the four bits of a weight were adjacent, sign and magnitude would need a shift and a mask each.

The sign of an nvfp4 scale is moved to its elements. The scale is stored as bits 14 to 7 of 128 times its magnitude in
fp16: five bits of exponent, three of mantissa, and 255 for NaN. So it has no subnormals, and shifts and one addition
convert it to fp16 and bf16. Elements whose scale is zero become zeros.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

CHUNK = 128
TILE = 16  # rows
TILE_BYTES = TILE * CHUNK // 2
BLOCK = {"mxfp4": 32, "nvfp4": 16}  # elements per scale


def chunks(depth: int) -> int:
    return (depth + CHUNK - 1) // CHUNK


def tiles(columns: int) -> int:
    return (columns + TILE - 1) // TILE


def packed_words(data: torch.Tensor) -> torch.Tensor:
    """Packs data [N, K / 2], with two elements per byte, the first in the lower half, to [chunks, tiles, 1024]."""
    columns, half = data.shape
    count_k, count_n = chunks(2 * half), tiles(columns)
    data = F.pad(data, (0, count_k * CHUNK // 2 - half, 0, count_n * TILE - columns))
    # Tile, half of its rows, row; chunk, half of it, 16 of K, half of those, two of K.
    parts = data.view(count_n, 2, 8, count_k, 2, 4, 2, 4).permute(3, 0, 4, 2, 7, 5, 6, 1)
    words = joined(*(_pair(parts[..., i // 2, i % 2].int()) for i in range(4)))
    return words.reshape(count_k, count_n, TILE_BYTES // 4).view(torch.uint8)


def _pair(byte: torch.Tensor) -> torch.Tensor:
    """The signs and magnitudes of the two elements of a byte, at their bit positions in bf16."""
    return ((byte & 7) << 6) | ((byte & 8) << 12) | ((byte & 0x70) << 18) | ((byte & 0x80) << 24)


def joined(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """The word that contains these four pairs. Exclusive ors are solved for its bits step by step."""
    q = a | ((b >> 6) & 0x02070207)  # bits 15, 8 to 6, 9, 2 to 0 of both halves
    q = q | (((c >> 3) ^ (q << 2)) & 0x00180018)  # 4 and 3
    q = q | (((c >> 3) ^ (q << 2)) & 0x00200020)  # 5
    q = q | (((d << 6) ^ (q << 10)) & 0x70007000)  # 14 to 12
    q = q | (((c >> 5) ^ (q >> 2)) & 0x04000400)  # 10
    return q | (((d >> 4) ^ (q >> 10)) & 0x08000800)  # 11


def unsigned_scales(data: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """nvfp4 elements [N, K / 2] and e4m3 scales [N, K / 16] as stored: signs of scales are moved to the elements."""
    value = scales.view(torch.float8_e4m3fn).to(torch.float16)
    kept = ((value.abs() * 128).view(torch.int16) >> 7).to(torch.uint8)
    bytes_each = BLOCK["nvfp4"] // 2
    flips = ((scales >> 7) * 0x88).repeat_interleave(bytes_each, 1)
    zero = (value == 0).repeat_interleave(bytes_each, 1)
    return (data ^ flips).masked_fill(zero, 0), kept.masked_fill(value.isnan(), 255)
