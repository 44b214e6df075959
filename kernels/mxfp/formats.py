"""The formats and their memory layout.

              bits   exponent bias   mantissa   largest   block   scale of a block
mxfp8_e4m3     8           7          3 bits       448      32     E8M0: a power of two, 2^-127 to 2^127; 255 is NaN
mxfp8_e5m2     8          15          2 bits     57344      32     E8M0
mxfp6_e3m2     6           3          2 bits        28      32     E8M0
mxfp6_e2m3     6           1          3 bits       7.5      32     E8M0
mxfp4          4           1          1 bit          6      32     E8M0
nvfp4          4           1          1 bit          6      16     e4m3, and one fp32 scale for the whole tensor

An element is sign, exponent, mantissa from its highest bit down. Elements are stored in the order of the blocked
dimension, the first in the lowest bits: two of 4 bits in a byte, four of 6 bits in three bytes, little-endian.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """`width`, `mantissa` and `bias` of an element, its largest finite magnitude, and the elements of a block."""

    width: int
    mantissa: int
    bias: int
    largest: float
    block: int

    @property
    def block_bytes(self) -> int:
        return self.block * self.width // 8

    @property
    def exponent(self) -> int:
        """The exponent of the largest finite magnitude."""
        return math.frexp(self.largest)[1] - 1

    @property
    def largest_code(self) -> int:
        """The bits of the largest finite magnitude."""
        fraction = self.largest / 2**self.exponent - 1
        return (self.exponent + self.bias << self.mantissa) + int(fraction * 2**self.mantissa)

    def blocks(self, dim: int) -> int:
        """The number of blocks in a row of `dim` elements; the last one is padded with zeros."""
        return (dim + self.block - 1) // self.block


FORMATS = {
    "mxfp8_e4m3": Format(8, 3, 7, 448.0, 32),
    "mxfp8_e5m2": Format(8, 2, 15, 57344.0, 32),
    "mxfp6_e3m2": Format(6, 2, 3, 28.0, 32),
    "mxfp6_e2m3": Format(6, 3, 1, 7.5, 32),
    "mxfp4": Format(4, 1, 1, 6.0, 32),
    "nvfp4": Format(4, 1, 1, 6.0, 16),
}
