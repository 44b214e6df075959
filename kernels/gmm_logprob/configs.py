"""How gmm_logprob's kernels are launched: every choice is a pure function of the problem and the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

MAX_K = 128


@dataclass(frozen=True)
class Config:
    """block_m rows a tile; load_n, hold_n and store_n are the widths of `tiles`, store_n for the backward alone.
    programs_per_sm = 0 gives each tile a CTA of its own; else the grid is persistent and its CTAs loop over tiles."""

    block_m: int
    load_n: int
    hold_n: int
    store_n: int
    num_warps: int
    programs_per_sm: int


def vector(k: int, itemsize: int) -> int:
    """Neighbouring columns that one load may take: rows are K elements apart, a load has at most 16 bytes."""
    return min(k & -k, 16 // itemsize)


def hold_width(k: int, itemsize: int, loads: int) -> int:
    """The narrowest tile that keeps a row to that many loads.

    Each load of a warp touches nearly every 128-byte line of its rows, and the L1 cache looks up about one line a
    cycle. Narrower means more such loads, but fewer lanes to a row, so fewer shuffles and less arithmetic done twice.
    """
    width = vector(k, itemsize)
    while -(-k // width) > loads:
        width *= 2
    return width


def _loads(itemsize: int) -> int:
    """Loads per row that pay, on an H200: 16-bit rows have half the bytes and so half the time for the arithmetic."""
    return 3 if itemsize == 4 else 5


def pick_fwd_config(rows: int, k: int, dtype: torch.dtype, capability: tuple[int, int]) -> Config:
    """Configuration of the forward kernel. Pure.

    Large batches: a persistent grid, which bounds the number of additions to one word. Small ones, where an SM has a
    few warps at most and their latency is all that counts: one row a thread, and from about one CTA an SM on, eight
    warps in each, so that there are few arrivals to wait for. Record: reports/h200/tune/gmm_logprob.json.
    """
    if rows * k <= 1 << 22:
        width = hold_width(k, dtype.itemsize, 5)
        num_warps = 8 if rows * (width // vector(k, dtype.itemsize)) > 32768 else 1
        programs_per_sm = 0
    else:
        width, num_warps, programs_per_sm = hold_width(k, dtype.itemsize, _loads(dtype.itemsize)), 4, 8
    lanes = width // vector(k, dtype.itemsize)
    return Config(max(1, 32 * num_warps // lanes), width, width, width, num_warps, programs_per_sm)


def pick_bwd_config(rows: int, k: int, dtype: torch.dtype, capability: tuple[int, int]) -> Config:
    """Configuration of the backward kernel. Pure.

    Two warps a CTA. Tiles narrower than a sector of L2, 32 bytes, are joined to whole rows before they are stored,
    because a part of a sector costs as much as the whole; not in small batches, which stay in L2 and wait rather for
    the way through shared memory. Record: reports/h200/tune/gmm_logprob.json.
    """
    width = hold_width(k, dtype.itemsize, _loads(dtype.itemsize))
    whole_row = triton.next_power_of_2(k)
    joined = width * dtype.itemsize < 32 and whole_row <= 32 and rows * k > 1 << 18
    block_m = max(1, 64 * vector(k, dtype.itemsize) // width)
    return Config(block_m, width, width, whole_row if joined else width, num_warps=2, programs_per_sm=0)
