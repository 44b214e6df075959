"""Configurations: what is chosen by size, dtype and compute capability, and the measurement that chose it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

NARROW = 4096  # the widest row that one CTA of Triton holds whole
CLUSTER_THREADS, CLUSTER_VECTORS = 256, 8  # of a CTA of a cluster, and at most of 16 bytes that each of them has


@dataclass(frozen=True)
class NarrowConfig:
    """Tiles of block_m whole rows. A row belongs to `lanes` threads, each with `vector` columns next to each other."""

    lanes: int
    vector: int
    block_m: int
    num_warps: int


@dataclass(frozen=True)
class NarrowFwdConfig(NarrowConfig):
    """`registers` a thread. As many programs as then fit on a multiprocessor stay there and go from tile to tile."""

    registers: int

    @property
    def programs_per_sm(self) -> int:
        return 65536 // (32 * self.num_warps * self.registers)


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
    has `vectors` of them. Registers are limited so that `resident` CTAs fit on a multiprocessor."""

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
    """Configuration of the forward, with or without the gradient. Pure. The figures are of one NVIDIA H200, bf16.

    `aligned` says whether every row begins and ends on a 16-byte boundary, `spread` whether the loss is spread over the
    classes by their weights (label smoothing with weights).

    Narrow rows, 205000 x 512: 32 columns and 64 registers a thread are 16 lanes a row and 8 CTAs of 4 warps, 63.8 us,
    with the logits evict_first; without a policy 66.4, evict_last 67.4. A tile of twice the size, 8 warps, 65.8; one of
    half the size, 2 warps, 66.1; 64 columns 66.4; 16 columns 77.4, because what goes by rows is then done twice as
    often. 5 CTAs 72.8, 16 of which half have to wait 69.5, a program a tile 73.7. With the gradient a thread holds
    twice as much a column, and has half the columns; the weights of its columns halve them as well. With these or with
    a softcap 64 registers would spill in some cases, and 128 do not. What they cost was not measured.

    Wide rows, the forward alone, is a stream: with 4 vectors a thread 4170 and 4160 GB/s for 4 and 8 warps at
    16384 x 32000, 4239 and 4342 at 8192 x 128256. 16 warps lose up to 18 %, and no policy of L2 does better than none.

    With the gradient each wide row is read twice, and what counts is that the second time it is still near. 16 warps in
    32 registers are four rows of 64 KiB to a multiprocessor, 34 MB in flight, which L2 holds: 3952 GB/s at
    16384 x 32000, against 3240 of 8 warps. Of rows beyond that only one fits: 32 warps with so many registers that no
    second CTA does.
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
    """Configuration of the forward with the gradient over clusters on Hopper: the fewest CTAs that hold the row.
    Pure. What a thread does once a row is some 320 instructions, as much as 36 elements cost.

    `terms` says whether there is label smoothing or a z-loss. 96 to 140 KB of logits are then on their way to a
    multiprocessor, whose 3 to 6 CTAs load, wait and store at different times. In one run, in us: 8192 x 128256 in place
    1017 (3 resident the same), 4 CTAs of 512 threads 1038, 10 with 7 vectors 1043, 16 of 128 threads 1030, of 256 with
    4 vectors 1131, 8 of 512 with 4 vectors 1165 to 1343; 16384 x 32000 503, 3 CTAs 523, 4 with 4 vectors 533.
    """
    threads, line = CLUSTER_THREADS, 8  # vectors in a line of L2
    vectors = vocab * dtype.itemsize // 16  # of a row
    ctas = triton.next_power_of_2(triton.cdiv(vectors, threads * CLUSTER_VECTORS))
    part = triton.cdiv(triton.cdiv(vectors, ctas), line) * line
    each = triton.cdiv(part, threads)
    # What ptxas needs without a spill.
    registers = 20 + 4 * each + ((8 if dtype.itemsize == 2 else 16) if terms else 0)
    resident = 65536 // (threads * triton.cdiv(registers, 8) * 8)
    return ClusterConfig(ctas, threads, each, part, resident)


def pick_bwd_config(
    vocab: int, dtype: torch.dtype, aligned: bool, capability: tuple[int, int]
) -> NarrowConfig | WideBwdConfig:
    """Configuration of the backward. Pure. The figures are of one NVIDIA H200, bf16.

    Narrow rows, 205000 x 512: 16 columns a thread and 4 warps 105.5 us, 2 warps 105.7, 8 warps 105.9; 32 columns 106.6.
    No policy of L2 makes a difference beyond 1 us.

    Wide rows: 4096 columns with 8 warps: 4277 GB/s at 16384 x 32000, 4314 at 8192 x 128256, 4127 at 8192 x 50257. The
    logits are dead once read, and yet evict_last gains 2 % over no policy and 6 % over evict_first: what leaves L2 in
    their place is the gradient, so that writes go out early and in order.
    """
    if vocab <= NARROW:
        return _tile(vocab, dtype, aligned, 16)
    # On sm_80 ptxas would rather spill than give a thread of 16 columns with all features the 65th register.
    return WideBwdConfig(4096 if capability >= (9, 0) else 2048, 8, "evict_last")


def _tile(vocab: int, dtype: torch.dtype, aligned: bool, columns: int) -> NarrowConfig:
    """A tile of which each thread has so many columns of a row; of two rows, where they are short.

    At least two lanes a row, which read a sector of 32 bytes at a time. Rows off alignment are read an element at a
    time, with a predicate for each: fewer columns, and 32 neighbours of a row to a warp.
    """
    block_n = triton.next_power_of_2(vocab)
    vector, least = (min(block_n, 16 // dtype.itemsize), 2) if aligned else (1, 32)
    columns = columns if aligned else max(8, columns // 2)
    lanes = min(max(least, block_n // columns), block_n // vector)
    num_warps = max(4, lanes // 32)
    rows_a_thread = max(1, min(2, columns * lanes // block_n))
    return NarrowConfig(lanes, vector, 32 * num_warps // lanes * rows_a_thread, num_warps)
