"""How linear_cross_entropy is computed and launched: every choice is a pure function of the problem and the GPU.

The measurements behind these choices are in EXPERIMENTS.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton

MIB = 1 << 20
MIN_SLICE = 16
# Vocabulary entries per GEMM: enough tiles to fill the GPU; larger slices were no faster (EXPERIMENTS.md).
SLICE = 2048
MIN_SPARE = 512


@dataclass(frozen=True)
class Chunk:
    """Rows `start` to `stop` - 1. Their logits use the memory of the weight's gradient or, if `spare`, a workspace.
    They are computed twice unless `kept`, that is, stored until the weight's gradient is computed."""

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
    """Rows are processed in chunks of `chunk` rows, whose logits are all in memory; one GEMM computes `slice`
    vocabulary entries of them. in_gradient: logits use the memory of the weight's gradient, otherwise a workspace. With
    in_gradient, `spare` more rows have a separate workspace, and their logits are not computed twice. Chunks begin at
    multiples of `unit`."""

    chunk: int
    slice: int
    in_gradient: bool
    spare: int = 0
    unit: int = 1

    def chunks(self, rows: int) -> Iterator[Chunk]:
        """Yields the chunks in the order of their rows, which is the order of computation."""
        if not self.in_gradient:
            for start in range(0, rows, max(1, self.chunk)):
                yield Chunk(start, min(start + self.chunk, rows), spare=True, kept=True)
        elif rows:
            # The last chunk begins at a multiple of `unit`, so that it is also aligned in the workspace.
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
    """How loss and gradients are computed within `scratch_bytes`. Pure.

    The default is the largest of 640 MiB less the size of the gradients, a sixteenth of that size and, if the weight
    needs a gradient, the logits of 1024 entries of all rows. With large gradients peak memory is then mostly that of
    the results plus 6 %; with small ones nothing is computed twice. If all logits fit, they are in the workspace.
    Otherwise, without `weight_too` (the weight needs no gradient), rows are processed in chunks whose logits fit. With
    it, chunks have H rows and use the memory of the weight's gradient, and the rest of the workspace holds `spare`
    rows.
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
    """How the loss alone is computed: in chunks of up to 8192 rows, with slices of logits that fit 64 MiB. Pure."""
    chunk = min(max(rows, 1), 8192)
    part = (64 * MIB if scratch_bytes is None else scratch_bytes) // (_up(chunk, 64) * dtype.itemsize)
    return Config(chunk, max(MIN_SLICE, min(vocab, _down(part, 128))), in_gradient=False)


def _slice(most: int) -> int:
    """The largest slice up to `most` and SLICE that is a multiple of cuBLAS's tiles; MIN_SLICE at least."""
    most = min(most, SLICE)
    return max(MIN_SLICE, _down(most, 128 if most >= 128 else MIN_SLICE))


def _down(n: int, of: int) -> int:
    return n // of * of


def _up(n: int, of: int) -> int:
    return -(-n // of) * of


@dataclass(frozen=True)
class StatsConfig:
    """A CTA loops over `span` vocabulary entries of `block_r` rows, `unroll` · `block_v` entries per iteration."""

    block_r: int
    block_v: int
    unroll: int
    span: int
    num_warps: int


@dataclass(frozen=True)
class LogitsConfig:
    """Configuration of logits.cu: columns of a tile (160, 176 or 192), pipeline stages, height of a group in the
    grouped tile order (`raster`, in clusters), and CTAs of a cluster (1 or 2). The tiles of a cluster are vertically
    adjacent, so its CTAs share the tile of weight."""

    block_n: int
    stages: int
    raster: int
    cluster: int


@dataclass(frozen=True)
class TileConfig:
    """One CTA per tile of `block_v` vocabulary entries by `block_r` rows."""

    block_r: int
    block_v: int
    num_warps: int


def pick_backend(backend: str, possible: bool) -> str:
    """The version that computes the logits: "cuda" is a GEMM in CUDA C++ (logits.cu), "triton" is cuBLAS and Triton.
    `possible`: CUDA C++ supports the problem. Pure.

    "cuda" computes the softmax's statistics in the GEMM's epilogue, which saves a read of all logits; without gradients
    the logits are not even written.
    """
    if backend == "auto":
        return "cuda" if possible else "triton"
    return backend


def pick_logits_config(rows: int, more: bool) -> LogitsConfig:
    """Configuration of logits.cu; `more`: its epilogue has a softcap, label smoothing or a z-loss. Pure.

    - 192 columns: the most accumulators that fit a thread's registers. With `more` in the epilogue some spill: 160.
    - A cluster of two CTAs, which share the tile of weight, if there are rows for both.
    - A group of the tile order has 2048 rows, 16 MB of hidden with H = 4096. They stay in L2 while weight is read once.
    - As many pipeline stages as fit in shared memory.

    Record: reports/h200/tune, 32 candidates in four cases of the loss alone.
    """
    cluster = 1 if rows <= 128 else 2
    block_n, stages = (160, 6) if more else (192, 5)
    return LogitsConfig(block_n, stages, raster=16 // cluster, cluster=cluster)


def pick_stats_config(rows: int, vocab: int, dtype: torch.dtype, capability: tuple[int, int]) -> StatsConfig:
    """Configuration of the stats kernel. Pure.

    128 rows, so that a warp reads 16-byte vectors of one vocabulary entry, and 4 tiles of 1024 elements in flight.
    If there are fewer rows, a tile has fewer rows and more entries. Record: "Statistics" in EXPERIMENTS.md (H200).
    """
    block_r = min(128, max(16, triton.next_power_of_2(rows)))
    return StatsConfig(block_r, block_v=1024 // block_r, unroll=4, span=1024, num_warps=4)


def pick_tile_config(rows: int, vocab: int, dtype: torch.dtype, capability: tuple[int, int]) -> TileConfig:
    """Configuration of the gradient and move kernels. Pure.

    Tiles of 2048 elements with 4 warps, 128 rows wide if there are as many, and at least 32 entries. With tiles of 4096
    elements and few rows, Triton 3.6 spills. Record: "Gradient tiles" in EXPERIMENTS.md (H200).
    """
    block_r = min(128, max(16, triton.next_power_of_2(rows)))
    return TileConfig(block_r, block_v=max(32, 2048 // block_r), num_warps=4)
