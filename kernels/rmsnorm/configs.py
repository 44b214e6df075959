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
    """A tile is `block_m` whole rows of block_n + tail columns, or one row in chunks where those are fewer than dim
    (then x is read twice, from L2 the second time). A CTA for each tile. `eviction` is the L2 policy of the loads of x;
    `weight_first` has the weight loaded along with x rather than when it is needed, at the price of registers."""

    block_m: int
    block_n: int
    num_warps: int
    eviction: str
    tail: int = 0
    weight_first: bool = False


@dataclass(frozen=True)
class ClusterConfig:
    """A row is split over `ctas` CTAs of a cluster: `slice` vectors of 16 bytes each, the last what is left. A thread
    has `vectors` of them. Registers are limited so that `resident` CTAs fit on an SM."""

    ctas: int
    threads: int
    vectors: int
    slice: int
    resident: int


@dataclass(frozen=True)
class BwdConfig:
    """A tile is `block_m` rows, whole or, where block_n < dim, in slices of `block_n` columns. programs_per_sm CTAs
    stay on each SM and loop over the tiles, with the loads of `stages` tiles in flight."""

    block_m: int
    block_n: int
    num_warps: int
    programs_per_sm: int
    stages: int


def pick_fwd_config(rows: int, dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> FwdConfig:
    """Configuration of the forward kernel. Pure.

    x is dead once it is read, and yet evict_last makes large problems faster on an H200: what leaves L2 in the place of
    x is y, so that writes go out early and in order (README, what was tried).
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
        # 5120 is 4096 and 1024: 5 % faster than a row of 8192 of which three eighths are masked. Here the weight comes
        # last, for its registers would cost a third of the CTAs on an SM.
        return FwdConfig(1, block_n // 2, min(8, block_n // 1024), eviction, tail)
    # On sm_80 ptxas would rather spill than give 8 warps of a row of 4096 the 33rd register.
    warps = {4096: 8 if capability >= (9, 0) else 4, 8192: 8, 16384: 16}
    return FwdConfig(1, block_n, warps[block_n], eviction, weight_first=True)


def pick_cluster_config(dim: int, dtype: torch.dtype, weight: bool, residual: bool) -> ClusterConfig:
    """Configuration of the forward of wide rows on Hopper: the fewest CTAs of 256 threads with at most 6 vectors each.
    Pure. Of what was tried (README) it alone is within 1.5 % of a copy at each of five widths.

    80 to 96 KB of x are then on their way to an SM, whose 4 or 5 CTAs wait at different times.
    """
    threads, most, line = 256, 6, 128 // VECTOR
    vectors = dim * dtype.itemsize // VECTOR  # of a row
    ctas = triton.next_power_of_2(triton.cdiv(vectors, threads * most))
    part = triton.cdiv(triton.cdiv(vectors, ctas), line) * line  # whole lines of L2
    each = triton.cdiv(part, threads)
    # What ptxas needs without a spill: x, what is held beside it, and 8 more for a second address or for masks.
    even = ctas * threads * each == vectors
    registers = 16 + 4 * each * (2 if weight or residual else 1) + (8 if residual or not even else 0)
    resident = min(8, 65536 // (threads * triton.cdiv(registers, 8) * 8))
    return ClusterConfig(ctas, threads, each, part, resident)


def pick_bwd_config(rows: int, dim: int, dtype: torch.dtype, tensors: int, capability: tuple[int, int]) -> BwdConfig:
    """Configuration of the backward kernel, which reads `tensors` tensors. Pure.

    Always a loop, because each CTA carries its share of dW in registers. So few CTAs fit on an SM that the
    next rows have to be on their way to shared memory while this one is reduced: `stages`.
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
    """Bytes of shared memory per SM that stages may take up."""
    return {(8, 0): 160, (8, 7): 160, (9, 0): 224, (10, 0): 224}.get(capability, 96) * 1024
