"""Which version of the forward runs, and how it is set up. Pure functions of sizes, dtype and number of SMs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import log2

import torch

from .portable import block_of_rows

ROWS = 64  # of queries for each warp group on Hopper: one wgmma is 64 rows high
L2_BYTES = 32e6  # what the keys and values of the heads in flight may take up of an H100's or H200's 50 MB


@dataclass(frozen=True)
class GluonConfig:
    """A CTA has `consumers` warp groups of 64 queries each, with that many registers a thread, and rings of `stages`
    blocks of block_n keys and values. ping_pong: consumers issue in turn. share: results leave through the
    shared memory of their queries, which makes room for keys and delays the next queries."""

    block_n: int
    stages: int
    consumers: int
    registers: int
    ping_pong: bool
    share: bool


def pick_gluon_config(dim: int, causal: bool) -> GluonConfig:
    """Three consumers up to D = 64 and under a causal mask up to D = 128, else two. Record: the tables of the forward
    in EXPERIMENTS.md (H200)."""
    if dim <= 64:
        return GluonConfig(128, 4, 3, 160, False, False)
    if dim > 128:
        return GluonConfig(64, 2, 2, 240, True, True)
    if causal:
        return GluonConfig(64, 4, 3, 160, True, True)
    return GluonConfig(128, 2, 2, 240, True, False)


@dataclass(frozen=True)
class CudaConfig:
    """block_n keys a block in rings of `stages`, consumers · 64 rows of queries a tile. ping_pong: consumers issue
    their products in turn, each as soon as the one before has issued its own. q_registers: queries are held in
    registers for the length of a tile. q_buffers: 2 lets the next tile's queries come while a tile's are in use, at the
    cost of a stage."""

    block_n: int
    stages: int
    consumers: int
    ping_pong: bool
    q_registers: bool
    q_buffers: int = 1


TWO_CONSUMERS = 0.83  # what a tile of two takes of the time of one of three, with few or no other tiles behind it


def pick_cuda_config(dim: int, queries: int, keys: int, causal: bool, heads: int, sms: int) -> CudaConfig:
    """Three consumers where tiles are many, for keys and values are then read less often for each query; two where they
    take fewer or shorter rounds (`_two_consumers`). `heads` of all batches.

    With three, at D = 64 112 keys and queries in registers, but 64 where 112 leave too much of the last block empty: a
    block of 112 takes as long as 1.63 of 64, a tile as long as 2.7 and 2.5 more. At D = 128 80 keys, ping-pong without
    a mask, and a second set of queries where tiles are short. With two, blocks of 64 or 128 keys.

    Record: "Forward" and the tables of the forward in EXPERIMENTS.md (H200).
    """
    if _two_consumers(dim, queries, causal, heads, sms):
        if dim == 64:
            return CudaConfig(64 if keys <= 768 else 128, 4, 2, False, True)
        if keys <= 1024 and not causal:
            return CudaConfig(64, 4, 2, True, False)
        return CudaConfig(128, 2, 2, True, False)
    if dim == 64:
        blocks_64, blocks_112 = -(-keys // 64), -(-keys // 112)
        narrow = keys <= 64 if causal else 2.5 + blocks_64 <= 2.7 + 1.63 * blocks_112
        return CudaConfig(64 if narrow else 112, 4, 3, False, True)
    if keys <= 512:
        return CudaConfig(64, 4, 3, True, False, q_buffers=2)
    return CudaConfig(80, 4, 3, not causal, False)


def _two_consumers(dim: int, queries: int, causal: bool, heads: int, sms: int) -> bool:
    """Under a causal mask tiles of different lengths even out, so that rounds are no measure: two up to one, and at
    D = 128 up to two, tiles of 128 queries for each SM."""
    if causal:
        return rounds_of(128, queries, heads, sms) <= (1 if dim == 64 else 2)
    three = rounds_of(192, queries, heads, sms)
    return TWO_CONSUMERS * rounds_of(128, queries, heads, sms) < three


def rounds_of(rows: int, queries: int, heads: int, sms: int) -> int:
    """Tiles of so many queries to an SM, at the most."""
    return -(-heads * -(-queries // rows) // sms)


@dataclass(frozen=True)
class Fp8Config:
    """As CudaConfig. section: blocks whose values share a scale and are summed in the accumulator. polynomial: one
    exponential in so many on the FMA units, 0 for none. exact_lse: lse comes from the probabilities before rounding."""

    block_n: int
    stages: int
    consumers: int
    ping_pong: bool
    q_registers: bool
    section: int = 8
    polynomial: int = 0
    exact_lse: bool = True


def pick_fp8_config(dim: int, exact_lse: bool) -> Fp8Config:
    """Three consumers, and sections of 8 blocks: 16 are faster, but double what the tensor cores' short sums lose.
    Without `exact_lse` an addition for each probability is saved. Record: the table of e4m3 in EXPERIMENTS.md (H200).
    """
    if dim <= 64:
        return Fp8Config(128, 6, 3, False, False, exact_lse=exact_lse)
    return Fp8Config(96, 4, 3, False, False, exact_lse=exact_lse)


# What the forward takes in microseconds, as measured on one H200 without a mask (`pick_forward` in the report of
# attention), for heads of up to 64 numbers and of more. Only the ratios matter: they decide which version runs on other
# GPUs too.
WHOLE_LAUNCH = 3.5
WHOLE_KEY = {64: 0.0102, 128: 0.0145}  # for each key of a round of tiles of 192 queries
SPLIT_LAUNCHES = 7.0  # both
SPLIT_CTA, SPLIT_ROW = 0.25, 0.0004  # for each CTA that an SM starts, for each row
SPLIT_PART = {64: 0.0001, 128: 0.00024}  # for each part of a row
# For each key of a round with so many CTAs to an SM.
SPLIT_KEY = {64: {1: 0.0122, 2: 0.0188, 4: 0.0352}, 128: {1: 0.0205, 2: 0.0385}}


def pick_forward(
    version: str,
    dtype: torch.dtype,
    queries: int,
    keys: int,
    kv_heads: int,
    group: int,
    sms: int,
    hopper: str = "",
    dim: int = 64,
) -> tuple[str, int]:
    """The version of the forward that runs, and among how many CTAs a tile's keys are shared out: 1 but for "split".
    `kv_heads` of all batches; `hopper`: the best version for Hopper that takes the problem, if there is one.

    Splitting fills the GPU where queries are few, at the price of a second kernel. With the heads of a group packed
    into one tile it also reads keys and values once for all of them, which pays where a tile holds them all. Not for
    fp32: there the backward counts on tiles that round scores as the forward's did.
    """
    rows = queries * group
    if version == "split":
        return version, pick_splits(rows, keys, kv_heads, sms, dim)
    if version == "auto" and dtype != torch.float32:
        splits = pick_splits(rows, keys, kv_heads, sms, dim)
        whole = whole_time(queries, keys, kv_heads * group, sms, dim)
        pays = splits > 1 and split_time(rows, keys, kv_heads, sms, dim, splits) < whole
        if pays or (group > 1 and rows <= 64):
            return "split", splits
    return (hopper or "portable") if version == "auto" else version, 1


def whole_time(queries: int, keys: int, heads: int, sms: int, dim: int) -> float:
    """Microseconds of the forward in which a CTA has all keys of a tile of queries, by the constants above."""
    three, two = (rounds_of(rows, queries, heads, sms) for rows in (192, 128))
    return WHOLE_LAUNCH + min(three, TWO_CONSUMERS * two) * WHOLE_KEY[64 if dim <= 64 else 128] * keys


def split_time(rows: int, keys: int, kv_heads: int, sms: int, dim: int, splits: int) -> float:
    """Microseconds of the split forward, by the constants above. An SM has shared memory for one CTA, two or
    four."""
    block, width = block_of_rows(rows), 64 if dim <= 64 else 128
    room = (4 if block == 32 else 2) if width == 64 else (2 if block <= 32 else 1)
    ctas = kv_heads * -(-rows // block) * splits
    together = next(n for n in (1, 2, 4) if n == room or ctas <= n * sms)
    rounds = -(-ctas // (together * sms))
    combined = kv_heads * rows * (SPLIT_ROW + SPLIT_PART[width] * splits)
    keys_each = -(-keys // (128 * splits)) * 128
    return SPLIT_LAUNCHES + combined + rounds * (together * SPLIT_CTA + SPLIT_KEY[width][together] * keys_each)


@functools.lru_cache(1024)
def pick_splits(rows: int, keys: int, kv_heads: int, sms: int, dim: int) -> int:
    """CTAs to a tile of queries: a power of two up to 128, or up to 64 as many as fill the SMs once, twice
    or four times; the fewest of those that take no more than 1 % above the least time. 256 keys each at least.

    Every forward waits for it: hence the cache, and no triton.cdiv, which takes microseconds."""
    tiles = kv_heads * -(-rows // block_of_rows(rows))
    numbers = {1, 2, 4, 8, 16, 32, 64, 128, *(min(64, full * sms // tiles) for full in (1, 2, 4))}
    times = {
        splits: split_time(rows, keys, kv_heads, sms, dim, splits)
        for splits in sorted(numbers)
        if splits == 1 or 0 < 256 * splits <= keys
    }
    return next(splits for splits, time in times.items() if time <= 1.01 * min(times.values()))


def pick_section(keys: int, bytes_per_key: int, group: int, heads: int) -> int:
    """How many of all `heads` go at a time where the longest row blocks of each come first: as their keys and values,
    together `bytes_per_key` wide, fit L2."""
    return min(heads, group * 2 ** int(log2(max(1.0, L2_BYTES / (bytes_per_key * keys)))))
