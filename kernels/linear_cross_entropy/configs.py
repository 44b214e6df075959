"""How linear_cross_entropy is computed and launched: every choice is a pure function of the problem and the GPU.

What was measured for these choices, and against what, is in EXPERIMENTS.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton

MIB = 1 << 20
MIN_SLICE = 16
# A slice of this many entries fills the GPU with tiles, and more gained nothing (EXPERIMENTS.md).
SLICE = 2048
MIN_SPARE = 512


@dataclass(frozen=True)
class Chunk:
    """Rows start to stop. Their logits lie in the weight's gradient or, if `spare`, in a memory of their own. Unless
    they are `kept` until the weight's gradient is formed, they are computed twice."""

    start: int
    stop: int
    spare: bool
    kept: bool

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def count(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Config:
    """`chunk` rows at a time have all their logits in memory, `slice` vocabulary entries of them come from one product.
    `in_gradient`: in the memory of the weight's gradient, else in a scratch. `spare` rows, a multiple of `unit` unless
    they are all, have a scratch of their own besides."""

    chunk: int
    slice: int
    in_gradient: bool
    spare: int = 0
    unit: int = 1

    def chunks(self, rows: int) -> Iterator[Chunk]:
        """In the order in which they are computed, which is also that of the rows."""
        if not self.in_gradient:
            for start in range(0, rows, max(1, self.chunk)):
                yield Chunk(start, min(start + self.chunk, rows), spare=True, kept=True)
        elif rows:
            # The last chunk begins at a multiple of `unit`, so that it is aligned in the scratch as well.
            last = -(-max(0, rows - self.chunk) // self.unit) * self.unit
            spare = max(0, last - self.spare)
            for start in range(0, spare, self.chunk):
                yield Chunk(start, min(start + self.chunk, spare), spare=False, kept=False)
            if spare < last:
                yield Chunk(spare, last, spare=True, kept=True)
            yield Chunk(last, rows, spare=False, kept=True)


def pick_config(
    rows: int, dim: int, vocab: int, dtype: torch.dtype, weight_too: bool, scratch_bytes: int | None = None
) -> Config:
    """How the gradients are computed within `scratch_bytes`. Pure.

    By default the scratch is what the gradients leave of 640 MiB, or a sixteenth of them, whichever is more: where
    memory matters the peak is the result plus 6 %, and where it does not, nothing is computed twice.
    """
    size, columns = dtype.itemsize, _up(rows, 64)
    if scratch_bytes is None:
        results = (vocab * weight_too + rows) * dim * size
        scratch_bytes = max(640 * MIB - results, results // 16, 1024 * columns * size * weight_too)
    if vocab * columns * size <= scratch_bytes:
        return Config(rows, _slice(vocab), in_gradient=False)
    if not weight_too:
        return Config(min(rows, max(64, _down(scratch_bytes // (vocab * size), 64))), _slice(vocab), in_gradient=False)
    unit = 64 if dim >= 64 else 8 if dim >= 8 else 1
    chunk = _down(dim, unit)
    excess = _up(max(0, rows - chunk), unit)
    spare = min(excess, _down((scratch_bytes - 1024 * columns * size) // (vocab * size), 64))
    spare = spare if spare >= min(excess, MIN_SPARE) else 0
    return Config(chunk, _slice((scratch_bytes - spare * vocab * size) // (columns * size)), True, spare, unit)


def pick_forward_config(rows: int, vocab: int, dtype: torch.dtype, scratch_bytes: int | None = None) -> Config:
    """How the loss alone is computed: a slice for all rows of a chunk. Pure."""
    chunk = min(max(rows, 1), 8192)
    part = (64 * MIB if scratch_bytes is None else scratch_bytes) // (_up(chunk, 64) * dtype.itemsize)
    return Config(chunk, max(MIN_SLICE, min(vocab, _down(part, 128))), in_gradient=False)


def _slice(most: int) -> int:
    """A slice of at most so many entries, if MIN_SLICE allows, that tiles of cuBLAS fit into."""
    most = min(most, SLICE)
    return max(MIN_SLICE, _down(most, 128 if most >= 128 else MIN_SLICE))


def _down(n: int, of: int) -> int:
    return n // of * of


def _up(n: int, of: int) -> int:
    return -(-n // of) * of


@dataclass(frozen=True)
class StatsConfig:
    """A CTA walks over `span` vocabulary entries of `block_r` rows, `unroll` · `block_v` entries at a time."""

    block_r: int
    block_v: int
    unroll: int
    span: int
    num_warps: int


@dataclass(frozen=True)
class TileConfig:
    """A CTA for each tile of `block_v` vocabulary entries by `block_r` rows."""

    block_r: int
    block_v: int
    num_warps: int


def pick_stats_config(rows: int, vocab: int, dtype: torch.dtype, capability: tuple[int, int]) -> StatsConfig:
    """Configuration of the stats kernel. Pure.

    128 rows, so that a warp reads whole vectors of a vocabulary entry, and 4 tiles of 1024 elements in flight; fewer
    rows and more entries where there are fewer. Measured: EXPERIMENTS.md, "What was tried".
    """
    block_r = min(128, max(16, triton.next_power_of_2(rows)))
    return StatsConfig(block_r, block_v=1024 // block_r, unroll=4, span=1024, num_warps=4)


def pick_tile_config(rows: int, vocab: int, dtype: torch.dtype, capability: tuple[int, int]) -> TileConfig:
    """Configuration of the gradient and move kernels. Pure.

    Tiles of 2048 elements with 4 warps, 128 rows wide where there are as many: of 4096 elements with few rows Triton
    3.6 makes spills. Measured: EXPERIMENTS.md, "What was tried".
    """
    block_r = min(128, max(16, triton.next_power_of_2(rows)))
    return TileConfig(block_r, block_v=max(32, 2048 // block_r), num_warps=4)
