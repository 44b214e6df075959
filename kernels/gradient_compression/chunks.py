"""How a flat tensor is divided into one chunk per rank, and the memory layout of a quantised chunk.

    chunk   payload: `blocks` blocks of BLOCK elements | scales: `blocks` fp32 values | padding to 16 bytes

Payload and scales are contiguous, so that one collective moves both.
"""

from __future__ import annotations

from dataclasses import dataclass

from .configs import BLOCK

KINDS = ("int8", "fp8", "int4")
BITS = {"int8": 8, "fp8": 8, "int4": 4}
ALIGNMENT = 16  # bytes, as chunks are read with 16-byte loads


@dataclass(frozen=True)
class Chunks:
    """`numel` elements in `world` chunks of `elements` each; the last may have fewer, or none."""

    numel: int
    world: int
    kind: str
    elements: int

    @staticmethod
    def whole_blocks(numel: int, world: int, kind: str) -> Chunks:
        """Chunks of an integral number of blocks, for an all-reduce, which may choose the chunks."""
        blocks = -(-numel // BLOCK)
        return Chunks(numel, world, kind, -(-blocks // world) * BLOCK)

    @staticmethod
    def even(numel: int, world: int, kind: str) -> Chunks:
        """Chunks of numel / world elements, as a reduce-scatter requires."""
        return Chunks(numel, world, kind, numel // world)

    @property
    def blocks(self) -> int:
        """The number of blocks of one chunk."""
        return -(-self.elements // BLOCK)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's payload."""
        return BLOCK * BITS[self.kind] // 8

    @property
    def scales_at(self) -> int:
        """Offset of the scales, in bytes from the beginning of a chunk."""
        return self.blocks * self.block_bytes

    @property
    def bytes(self) -> int:
        """The size of one chunk in bytes."""
        unpadded = self.scales_at + 4 * self.blocks
        return -(-unpadded // ALIGNMENT) * ALIGNMENT
