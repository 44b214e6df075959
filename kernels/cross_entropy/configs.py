"""How each kernel of cross_entropy is launched: every choice is a pure function of the problem and the GPU.

What was measured for these choices, and against what, is in EXPERIMENTS.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

NARROW = 4096  # the widest row that one CTA of Triton holds whole
CLUSTER_THREADS, CLUSTER_VECTORS = 256, 8  # of a CTA of a cluster, and at most of 16 bytes that each of them has
VECTOR, LINE = 16, 128  # bytes of the widest load, and of a line of L2
REGISTERS = 65536  # of an SM


@dataclass(frozen=True)
class NarrowConfig:
    """Tiles of block_m whole rows. A row belongs to `lanes` threads, each with `vector` columns next to each other."""

    lanes: int
    vector: int
    block_m: int
    num_warps: int


@dataclass(frozen=True)
class NarrowFwdConfig(NarrowConfig):
    """`registers` a thread. A persistent kernel of as many CTAs as then fit on an SM."""

    registers: int

    @property
    def programs_per_sm(self) -> int:
        return REGISTERS // (32 * self.num_warps * self.registers)


@dataclass(frozen=True)
class WideFwdConfig:
    """One row to a CTA, in chunks of so many 16-byte vectors a thread, and of grad_unroll in the second pass that
    writes the gradient. `eviction` is the L2 policy of the first pass."""

    unroll: int
    grad_unroll: int
    num_warps: int
    eviction: str


@dataclass(frozen=True)
class WideBwdConfig:
    """A tile of block_n columns to a CTA. `eviction` is the L2 policy of the loads of the logits."""

    block_n: int
    num_warps: int
    eviction: str


@dataclass(frozen=True)
class ClusterConfig:
    """A row is split over `ctas` CTAs of a cluster: `slice` vectors of 16 bytes each, the last what is left. A thread
    has `vectors` of them. Registers are limited so that `resident` CTAs fit on an SM."""

    ctas: int
    threads: int
    vectors: int
    slice: int
    resident: int


def pick_fwd_config(
    vocab: int,
    dtype: torch.dtype,
    aligned: bool,
    grad: bool,
    spread: bool,
    softcap: bool,
    capability: tuple[int, int],
) -> NarrowFwdConfig | WideFwdConfig:
    """Configuration of the forward in Triton, with or without the gradient. Pure.

    `aligned` says whether every row begins and ends on a 16-byte boundary, `spread` whether the loss is spread over the
    classes by their weights (label smoothing with weights).

    Up to 4096 columns: whole rows. A thread has 32 columns, half of that with the gradient, which takes twice the
    registers a column, and half with `spread`, whose weights do; 64 registers, or 128 with `spread` or a softcap, which
    would spill otherwise.

    Beyond: a row a CTA, in chunks. The loss alone is a stream, for which 8 warps with 4 vectors a thread are enough.
    With the gradient a row is read twice and should still be in L2 the second time: up to 64 KiB four rows of 16 warps
    fit on an SM; of longer ones only one, of 32 warps, so that L2 holds those in flight.

    Measured: EXPERIMENTS.md, "Chunks of the forward", "The gradient in the forward" and "Narrow rows".
    """
    if vocab <= NARROW:
        tile = _tile(vocab, dtype, aligned, 32 >> grad + spread)
        return NarrowFwdConfig(tile.lanes, tile.vector, tile.block_m, tile.num_warps, 128 if spread or softcap else 64)
    if not grad:
        return WideFwdConfig(4, 0, 8, "")
    if vocab * dtype.itemsize <= 65536:
        return WideFwdConfig(2, 1, 16, "evict_last")
    return WideFwdConfig(4, 2, 32, "evict_last")


def pick_cluster_config(vocab: int, dtype: torch.dtype, terms: bool) -> ClusterConfig:
    """Configuration of the forward with the gradient over clusters on Hopper. Pure.

    The fewest CTAs, a power of two, of 256 threads that hold the row in 8 vectors a thread: what a thread does once a
    row is some 320 instructions, as much as 36 elements cost. `terms`: whether there is label smoothing or a z-loss.

    Measured: EXPERIMENTS.md, "The gradient in the forward over clusters".
    """
    vectors = vocab * dtype.itemsize // VECTOR  # of a row
    ctas = triton.next_power_of_2(triton.cdiv(vectors, CLUSTER_THREADS * CLUSTER_VECTORS))
    return cluster_config(ctas, CLUSTER_THREADS, vocab, dtype, terms)


def cluster_config(ctas: int, threads: int, vocab: int, dtype: torch.dtype, terms: bool) -> ClusterConfig:
    """A row over that many CTAs, in whole lines of L2. As many are resident as fit without a spill."""
    line = LINE // VECTOR
    vectors = vocab * dtype.itemsize // VECTOR
    part = triton.cdiv(triton.cdiv(vectors, ctas), line) * line
    each = triton.cdiv(part, threads)
    # What ptxas needs without a spill.
    registers = 20 + 4 * each + ((8 if dtype.itemsize == 2 else 16) if terms else 0)
    resident = REGISTERS // (threads * triton.cdiv(registers, 8) * 8)
    return ClusterConfig(ctas, threads, each, part, resident)


def pick_bwd_config(
    vocab: int, dtype: torch.dtype, aligned: bool, capability: tuple[int, int]
) -> NarrowConfig | WideBwdConfig:
    """Configuration of the backward. Pure.

    Up to 4096 columns: whole rows, 16 columns a thread. Beyond: tiles of 4096 columns and 8 warps; of 2048 before
    sm_90, where ptxas would rather spill than give a thread of 16 columns with all features the 65th register. The
    logits are dead once read, and yet evict_last gains 2 %: what leaves L2 in their place is the gradient, so that
    writes go out early and in order.

    Measured: EXPERIMENTS.md, "Tiles of the backward" and "Narrow rows".
    """
    if vocab <= NARROW:
        return _tile(vocab, dtype, aligned, 16)
    return WideBwdConfig(4096 if capability >= (9, 0) else 2048, 8, "evict_last")


def _tile(vocab: int, dtype: torch.dtype, aligned: bool, columns: int) -> NarrowConfig:
    """A tile of which each thread has so many columns of a row; of two rows, where they are short.

    At least two lanes a row, which read a sector of 32 bytes at a time. Rows off alignment are read an element at a
    time, with a predicate for each: fewer columns, and 32 neighbours of a row to a warp.
    """
    block_n = triton.next_power_of_2(vocab)
    vector, least = (min(block_n, VECTOR // dtype.itemsize), 2) if aligned else (1, 32)
    columns = columns if aligned else max(8, columns // 2)
    lanes = min(max(least, block_n // columns), block_n // vector)
    num_warps = max(4, lanes // 32)
    rows_a_thread = max(1, min(2, columns * lanes // block_n))
    return NarrowConfig(lanes, vector, 32 * num_warps // lanes * rows_a_thread, num_warps)
