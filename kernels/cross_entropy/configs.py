"""How each kernel of cross_entropy is launched: every choice is a pure function of the problem and the GPU.

The measurements behind these choices are in EXPERIMENTS.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

NARROW = 4096  # columns of the widest row that a Triton CTA holds in registers
CLUSTER_THREADS, CLUSTER_VECTORS = 256, 8  # threads of a CTA of a cluster; 16-byte vectors of a thread, at most
VECTOR, LINE = 16, 128  # bytes of the widest load, and of a line of L2
REGISTERS = 65536  # per SM


@dataclass(frozen=True)
class NarrowConfig:
    """Tiles of block_m entire rows. A row has `lanes` threads; a thread loads `vector` contiguous columns at once."""

    lanes: int
    vector: int
    block_m: int
    num_warps: int


@dataclass(frozen=True)
class NarrowFwdConfig(NarrowConfig):
    """At most `registers` per thread. The kernel is persistent, with as many CTAs as are then resident on an SM."""

    registers: int

    @property
    def programs_per_sm(self) -> int:
        return REGISTERS // (32 * self.num_warps * self.registers)


@dataclass(frozen=True)
class WideFwdConfig:
    """One CTA per row, in chunks of `unroll` 16-byte vectors per thread. The second pass, which writes the gradient,
    has chunks of grad_unroll vectors. `eviction` is the L2 policy of the first pass."""

    unroll: int
    grad_unroll: int
    num_warps: int
    eviction: str


@dataclass(frozen=True)
class WideBwdConfig:
    """One CTA per tile of block_n columns of a row. `eviction`: L2 policy of the loads of the logits."""

    block_n: int
    num_warps: int
    eviction: str


@dataclass(frozen=True)
class ClusterConfig:
    """A row is split over a cluster of `ctas` CTAs. Each has `slice` vectors of 16 bytes, the last one the remainder. A
    thread holds `vectors` of them. Registers are limited so that `resident` CTAs fit an SM."""

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

    `aligned`: every row begins and ends on a 16-byte boundary. `spread`: label smoothing with class weights, for which
    a thread also holds the weights of its columns.

    Up to 4096 columns: tiles of entire rows. A thread has 32 columns; half of that with the gradient, and half again
    with `spread`, as each doubles the registers of a column. 64 registers a thread; 128 with `spread` or a softcap,
    which would spill with 64.

    Wider: one CTA per row, in chunks. The loss alone reads a row once: 8 warps with 4 vectors per thread saturate
    memory. With the gradient a row is read twice, and the rows in flight must stay in L2 in between: up to 64 KiB per
    row, CTAs of 16 warps, four per SM; above, CTAs of 32 warps, one per SM.

    Record: "Chunks of the forward", "The gradient in the forward" and "Narrow rows" in EXPERIMENTS.md (H200).
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

    The fewest CTAs of 256 threads, a power of two, that hold the row with at most 8 vectors per thread. Few, because a
    thread's per-row work is about 320 instructions, as many as for 36 elements. `terms`: there is label smoothing or a
    z-loss, which need more registers.

    Record: "The gradient in the forward over clusters" in EXPERIMENTS.md (H200).
    """
    vectors = vocab * dtype.itemsize // VECTOR  # per row
    ctas = triton.next_power_of_2(triton.cdiv(vectors, CLUSTER_THREADS * CLUSTER_VECTORS))
    return cluster_config(ctas, CLUSTER_THREADS, vocab, dtype, terms)


def cluster_config(ctas: int, threads: int, vocab: int, dtype: torch.dtype, terms: bool) -> ClusterConfig:
    """A row split over that many CTAs, in multiples of an L2 cache line. As many CTAs are resident as fit without
    spills."""
    line = LINE // VECTOR
    vectors = vocab * dtype.itemsize // VECTOR
    part = triton.cdiv(triton.cdiv(vectors, ctas), line) * line
    each = triton.cdiv(part, threads)
    # Registers that ptxas needs to avoid spills.
    registers = 20 + 4 * each + ((8 if dtype.itemsize == 2 else 16) if terms else 0)
    resident = REGISTERS // (threads * triton.cdiv(registers, 8) * 8)
    return ClusterConfig(ctas, threads, each, part, resident)


def pick_bwd_config(
    vocab: int, dtype: torch.dtype, aligned: bool, capability: tuple[int, int]
) -> NarrowConfig | WideBwdConfig:
    """Configuration of the backward. Pure.

    Up to 4096 columns: tiles of entire rows, 16 columns per thread. Wider: tiles of 4096 columns and 8 warps; of 2048
    columns before sm_90, where ptxas limits itself to 64 registers and spills with 16 columns per thread and all
    features. evict_last gains 2 % although the logits are not used again: the gradient is evicted from L2 instead, so
    that it is written back early and in order.

    Record: "Tiles of the backward" and "Narrow rows" in EXPERIMENTS.md (H200).
    """
    if vocab <= NARROW:
        return _tile(vocab, dtype, aligned, 16)
    return WideBwdConfig(4096 if capability >= (9, 0) else 2048, 8, "evict_last")


def _tile(vocab: int, dtype: torch.dtype, aligned: bool, columns: int) -> NarrowConfig:
    """A tile in which each thread has `columns` columns of a row, or of two rows where rows are short.

    At least two lanes per row, which together read a 32-byte sector. Unaligned rows are read one element per load, each
    with its predicate: half the columns, and at least 32 lanes per row, so that a warp reads contiguous memory.
    """
    block_n = triton.next_power_of_2(vocab)
    vector, least = (min(block_n, VECTOR // dtype.itemsize), 2) if aligned else (1, 32)
    columns = columns if aligned else max(8, columns // 2)
    lanes = min(max(least, block_n // columns), block_n // vector)
    num_warps = max(4, lanes // 32)
    rows_a_thread = max(1, min(2, columns * lanes // block_n))
    return NarrowConfig(lanes, vector, 32 * num_warps // lanes * rows_a_thread, num_warps)
