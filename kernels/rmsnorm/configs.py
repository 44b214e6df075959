"""How each kernel of rmsnorm is launched: every choice is a pure function of the problem and the GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton

MAX_BLOCK = 16384  # the widest row that is kept in the registers of one CTA
EVICT_LAST_BYTES = 60e6  # a little more than the L2 of an H100 or H200
VECTOR = 16  # bytes of the widest load


@dataclass(frozen=True)
class FwdConfig:
    """One CTA per tile. A tile is `block_m` entire rows of block_n + tail columns. If that is less than dim, a tile is
    one row in chunks of block_n columns, read twice, the second time from L2. `eviction` is the L2 policy of the loads
    of x. With `weight_first` the weight is loaded before x and not after the sum, which needs more registers."""

    block_m: int
    block_n: int
    num_warps: int
    eviction: str
    tail: int = 0
    weight_first: bool = False


@dataclass(frozen=True)
class ClusterConfig:
    """A cluster of `ctas` CTAs processes one row: `slice` vectors of 16 bytes per CTA, the remainder for the last. A
    thread holds `vectors` of them. Registers are limited so that `resident` CTAs fit on an SM."""

    ctas: int
    threads: int
    vectors: int
    slice: int
    resident: int


@dataclass(frozen=True)
class BwdConfig:
    """A tile is `block_m` rows of `block_n` columns: entire rows, or a slice of the columns if block_n < dim.
    programs_per_sm persistent CTAs on each SM loop over the tiles, in a pipeline of `stages` tiles (1: no pipeline)."""

    block_m: int
    block_n: int
    num_warps: int
    programs_per_sm: int
    stages: int


def pick_fwd_config(rows: int, dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> FwdConfig:
    """Configuration of the forward kernel. Pure.

    Up to 2048 columns, a tile has 2048 elements. Above, it is one row, in two pieces if that masks fewer lanes. Above
    16384, a row is processed in chunks. Loads of x use evict_last on problems larger than L2: L2 then evicts lines of y
    first, so that y is written back early and in order. Record: reports/h200/tune/rmsnorm.json; EXPERIMENTS.md.
    """
    block_n = triton.next_power_of_2(dim)
    eviction = "evict_last" if rows * dim * dtype.itemsize > EVICT_LAST_BYTES else ""
    if block_n > MAX_BLOCK:
        narrow = dtype.itemsize == 2 and block_n > 2 * MAX_BLOCK
        return FwdConfig(1, 2 * MAX_BLOCK, 32, "") if narrow else FwdConfig(1, MAX_BLOCK, 32, "evict_last")
    if block_n <= 2048:
        return FwdConfig(2048 // block_n, block_n, 4, eviction, weight_first=True)
    tail = triton.next_power_of_2(dim - block_n // 2)
    if tail <= block_n // 4:
        # 5120 = 4096 + 1024 is 5 % faster than a block of 8192 of which three eighths are masked. The weight is loaded
        # after the sum: its registers would cost a third of the occupancy.
        return FwdConfig(1, block_n // 2, min(8, block_n // 1024), eviction, tail)
    # On sm_80, with 8 warps at 4096 columns, ptxas limits itself to 32 registers per thread and spills.
    warps = {4096: 8 if capability >= (9, 0) else 4, 8192: 8, 16384: 16}
    return FwdConfig(1, block_n, warps[block_n], eviction, weight_first=True)


def pick_cluster_config(dim: int, dtype: torch.dtype, weight: bool, residual: bool) -> ClusterConfig:
    """Configuration of the forward of wide rows on Hopper: the smallest cluster, a power of two, of CTAs with 256
    threads of at most 6 vectors each. Pure. Record: reports/h200/tune/rmsnorm.json; EXPERIMENTS.md, "Wide rows over
    clusters": the only variant tried that is within 1.5 % of a copy at each of five widths.

    In bf16 with a weight, an SM then has 4 or 5 resident CTAs at different phases, and 80 to 96 KB of x in flight.
    """
    threads, most, line = 256, 6, 128 // VECTOR
    vectors = dim * dtype.itemsize // VECTOR  # per row
    ctas = triton.next_power_of_2(triton.cdiv(vectors, threads * most))
    cta_vectors = triton.cdiv(triton.cdiv(vectors, ctas), line) * line  # entire L2 cache lines
    thread_vectors = triton.cdiv(cta_vectors, threads)
    # Registers that ptxas needs to avoid spills: x, the weight or residual, and 8 for a second address or for masks.
    even = ctas * threads * thread_vectors == vectors
    registers = 16 + 4 * thread_vectors * (2 if weight or residual else 1) + (8 if residual or not even else 0)
    resident = min(8, 65536 // (threads * triton.cdiv(registers, 8) * 8))
    return ClusterConfig(ctas, threads, thread_vectors, cta_vectors, resident)


def pick_bwd_config(rows: int, dim: int, dtype: torch.dtype, tensors: int, capability: tuple[int, int]) -> BwdConfig:
    """Configuration of the backward kernel, which reads `tensors` tensors. Pure.

    CTAs are persistent because each accumulates its partial dW in registers. Occupancy is too low to hide the latency
    of loads, so loads are pipelined through shared memory: 1 to 4 CTAs per SM with at most 32 KB per stage in all, in 3
    stages, or 4 if a quarter of the tile or more is padding. At block_n = 16384 there is one CTA per SM and no
    pipeline: its stages would take shared memory that L1 needs. Record: reports/h200/tune/rmsnorm.json; EXPERIMENTS.md.
    """
    block_n = triton.next_power_of_2(dim)
    padded = dim <= block_n * 3 // 4
    if block_n == MAX_BLOCK:
        return BwdConfig(1, block_n, num_warps=16 if padded else 8, programs_per_sm=1, stages=1)
    if block_n > MAX_BLOCK:
        block_n, padded = 2048, False  # a slice
    block_m = max(1, 2048 // block_n)
    stage = block_m * block_n * dtype.itemsize * tensors  # bytes
    programs = max(1, min(4, 32768 // stage))
    stages = max(1, min(4 if padded else 3, _shared_memory(capability) // (programs * stage)))
    num_warps = max(2, min(16, 2 ** int(math.log2(stage / 4096))))
    return BwdConfig(block_m, block_n, num_warps, programs, stages)


def _shared_memory(capability: tuple[int, int]) -> int:
    """Bytes of shared memory per SM that pipeline stages may occupy."""
    return {(8, 0): 160, (8, 7): 160, (9, 0): 224, (10, 0): 224}.get(capability, 96) * 1024
