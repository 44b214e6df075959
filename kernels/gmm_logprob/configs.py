"""How gmm_logprob's kernels are launched: every choice is a pure function of the problem and the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

MAX_K = 128


@dataclass(frozen=True)
class Config:
    """A tile has block_m rows. Columns per load (load_n), per register tile (hold_n) and per store (store_n, backward
    only): see tiles.py. programs_per_sm = 0: one CTA per tile. Otherwise that many persistent CTAs per SM loop over
    tiles."""

    block_m: int
    load_n: int
    hold_n: int
    store_n: int
    num_warps: int
    programs_per_sm: int


def vector(k: int, itemsize: int) -> int:
    """Adjacent columns that a thread can load at once: a power of two that divides K, at most 16 bytes."""
    return min(k & -k, 16 // itemsize)


def hold_width(k: int, itemsize: int, loads: int) -> int:
    """The narrowest register tile, in columns, with which a row needs at most `loads` loads.

    Each load of a warp touches nearly every 128-byte line of its rows, and L1 looks up about one line per cycle.
    Narrower tiles mean more loads, but fewer threads per row, so fewer shuffles and less redundant arithmetic.
    """
    width = vector(k, itemsize)
    while -(-k // width) > loads:
        width *= 2
    return width


def _loads(itemsize: int) -> int:
    """The number of loads per row that is fastest on an H200. 16-bit rows have half the bytes, and so half the time for
    arithmetic: for them fewer threads per row outweigh more loads."""
    return 3 if itemsize == 4 else 5


def pick_fwd_config(rows: int, k: int, dtype: torch.dtype, capability: tuple[int, int]) -> Config:
    """Configuration of the forward kernel. Pure.

    More than 2^22 elements of logits: 8 persistent CTAs of 4 warps per SM, which bounds the number of atomic additions;
    at most 3 loads per row in fp32, 5 in 16-bit dtypes. Fewer elements: latency-bound, so one CTA per tile and at most
    5 loads per row; CTAs of 1 warp, or of 8 above 32768 threads, so that the last CTA waits for few others. Record:
    reports/h200/tune/gmm_logprob.json.
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

    One CTA of two warps per tile. Register tiles narrower than a 32-byte sector are joined to entire rows before the
    store, because a partly written sector costs as much as a full one. At most 2^18 elements are not joined: they stay
    in L2, and joining goes through shared memory, which adds latency. Record: reports/h200/tune/gmm_logprob.json.
    """
    width = hold_width(k, dtype.itemsize, _loads(dtype.itemsize))
    whole_row = triton.next_power_of_2(k)
    joined = width * dtype.itemsize < 32 and whole_row <= 32 and rows * k > 1 << 18
    block_m = max(1, 64 * vector(k, dtype.itemsize) // width)
    return Config(block_m, width, width, whole_row if joined else width, num_warps=2, programs_per_sm=0)
