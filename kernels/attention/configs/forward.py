"""Which version of the forward runs, and with which tiles. Pure functions of sizes, dtype and number of SMs.

A wave: as many CTAs, or tiles of a persistent kernel, as the SMs run at a time. A section of heads: those whose tiles
are scheduled together, so that their keys and values stay in L2."""

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
    """A CTA has a producer warp, and `consumers` warp groups of 64 queries each with `registers` registers a thread.
    Blocks of block_n keys and values are buffered in `stages` stages. ping_pong: consumers issue their wgmmas one
    after the other. share: the epilogue stages results in the shared memory of the queries. That makes room for keys,
    but the next tile's queries can be loaded only after the results are stored."""

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
    """Blocks of block_n keys in a pipeline of `stages` stages; tiles of consumers · 64 queries. ping_pong: consumers
    issue their wgmmas one after the other, each as soon as the one before it has issued its own. q_registers: the
    queries of a tile stay in registers. q_buffers: with 2, the next tile's queries are loaded while a tile's are in
    use, at the cost of a stage."""

    block_n: int
    stages: int
    consumers: int
    ping_pong: bool
    q_registers: bool
    q_buffers: int = 1


TWO_CONSUMERS = 0.83  # time of a tile of 128 queries over that of one of 192, where an SM has few tiles


def pick_cuda_config(dim: int, queries: int, keys: int, causal: bool, heads: int, sms: int) -> CudaConfig:
    """Three consumers where there are many tiles: each key and value is then read for 192 queries, not 128. Two where
    tiles of 128 queries need less time in waves (`_two_consumers`). `heads` of all batches.

    Three consumers, D = 64: queries in registers and blocks of 112 keys, but of 64 where 112 would pad the last block
    by too much. In units of a block of 64, a block of 112 takes 1.63; the rest of a tile takes 2.7 with blocks of 112
    and 2.5 with blocks of 64. Three consumers, D = 128: blocks of 80 keys, with ping-pong where there is no mask; up to
    512 keys, blocks of 64 and two buffers of queries. Two consumers: blocks of 64 keys where keys are few, else of 128.

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
    """Whether a tile has 128 queries (two consumers), not 192.

    Without a mask: where the waves of tiles of 128 take less time. Under a causal mask tiles differ in length, and
    waves do not predict the time: up to one tile of 128 for each SM, at D = 128 up to two."""
    if causal:
        return waves_of(128, queries, heads, sms) <= (1 if dim == 64 else 2)
    three = waves_of(192, queries, heads, sms)
    return TWO_CONSUMERS * waves_of(128, queries, heads, sms) < three


def waves_of(rows: int, queries: int, heads: int, sms: int) -> int:
    """Waves of tiles of `rows` queries: the most tiles that one SM has."""
    return -(-heads * -(-queries // rows) // sms)


@dataclass(frozen=True)
class Fp8Config:
    """As CudaConfig. section: this many blocks of values share a scale, and are summed in the wgmma accumulator before
    it is added to fp32 totals. polynomial: one exponential in so many is computed on the FMA units, 0 for none.
    exact_lse: lse comes from the probabilities before they are rounded to e4m3."""

    block_n: int
    stages: int
    consumers: int
    ping_pong: bool
    q_registers: bool
    section: int = 8
    polynomial: int = 0
    exact_lse: bool = True


def pick_fp8_config(dim: int, exact_lse: bool) -> Fp8Config:
    """Three consumers; blocks of 128 keys up to D = 64, of 96 beyond; sections of 8 blocks. Sections of 16 are faster,
    but double the error that comes from the tensor cores' accumulation with about 14 bits. Without `exact_lse` an
    addition for each probability is saved. Record: the table of e4m3 in EXPERIMENTS.md (H200).
    """
    if dim <= 64:
        return Fp8Config(128, 6, 3, False, False, exact_lse=exact_lse)
    return Fp8Config(96, 4, 3, False, False, exact_lse=exact_lse)


# Model of the forward's time in µs, fitted to measurements on one H200 without a mask (`pick_forward` in the report of
# attention). The keys 64 and 128 stand for D up to 64 and D over 64. Only ratios matter, so it decides on other GPUs
# too.
UNSPLIT_LAUNCH = 3.5
UNSPLIT_KEY = {64: 0.0102, 128: 0.0145}  # for each wave of tiles of 192 queries and each key
SPLIT_LAUNCHES = 7.0  # of the split kernel and of the combine kernel
SPLIT_CTA, SPLIT_ROW = 0.25, 0.0004  # for each CTA that an SM starts; for each row that is combined
SPLIT_PART = {64: 0.0001, 128: 0.00024}  # for each partial result of a row
# For each wave and each key, by the number of CTAs that an SM runs at a time.
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
    """The version of the forward that runs, and the number of splits along the keys: 1 except for "split".
    `kv_heads`: of all batches. `hopper`: the best version for Hopper that supports the problem, or "".

    "auto" selects "split" where its estimated time (`split_time`) is less than that of the other versions
    (`unsplit_time`): a few query tiles do not occupy all SMs; splits do, at the cost of a second kernel. It also
    selects "split" where the rows of all query heads of a KV head fit one tile of 64: keys and values are then read
    once for all of these heads. fp32 is never split: its backward recomputes scores with the forward's tiles, and
    requires the same rounding.
    """
    rows = queries * group
    if version == "split":
        return version, pick_splits(rows, keys, kv_heads, sms, dim)
    if version == "auto" and dtype != torch.float32:
        splits = pick_splits(rows, keys, kv_heads, sms, dim)
        unsplit = unsplit_time(queries, keys, kv_heads * group, sms, dim)
        pays = splits > 1 and split_time(rows, keys, kv_heads, sms, dim, splits) < unsplit
        if pays or (group > 1 and rows <= 64):
            return "split", splits
    return (hopper or "portable") if version == "auto" else version, 1


def unsplit_time(queries: int, keys: int, heads: int, sms: int, dim: int) -> float:
    """Microseconds of the forward where a CTA loops over all keys of its tile, by the model above."""
    three, two = (waves_of(rows, queries, heads, sms) for rows in (192, 128))
    return UNSPLIT_LAUNCH + min(three, TWO_CONSUMERS * two) * UNSPLIT_KEY[64 if dim <= 64 else 128] * keys


def split_time(rows: int, keys: int, kv_heads: int, sms: int, dim: int, splits: int) -> float:
    """Microseconds of the split forward, by the model above. `room`: CTAs that fit an SM's shared memory."""
    block, width = block_of_rows(rows), 64 if dim <= 64 else 128
    room = (4 if block == 32 else 2) if width == 64 else (2 if block <= 32 else 1)
    ctas = kv_heads * -(-rows // block) * splits
    together = next(n for n in (1, 2, 4) if n == room or ctas <= n * sms)
    waves = -(-ctas // (together * sms))
    combined = kv_heads * rows * (SPLIT_ROW + SPLIT_PART[width] * splits)
    keys_each = -(-keys // (128 * splits)) * 128
    return SPLIT_LAUNCHES + combined + waves * (together * SPLIT_CTA + SPLIT_KEY[width][together] * keys_each)


@functools.lru_cache(1024)
def pick_splits(rows: int, keys: int, kv_heads: int, sms: int, dim: int) -> int:
    """Splits of the keys, by `split_time`: the fewest whose time is at most 1 % above the best.

    Candidates are the powers of two up to 128, and the numbers (at most 64) that start one, two or four CTAs on each
    SM. A split has 256 keys at least. Cached, and without triton.cdiv, which takes microseconds: host time of a
    call."""
    tiles = kv_heads * -(-rows // block_of_rows(rows))
    numbers = {1, 2, 4, 8, 16, 32, 64, 128, *(min(64, full * sms // tiles) for full in (1, 2, 4))}
    times = {
        splits: split_time(rows, keys, kv_heads, sms, dim, splits)
        for splits in sorted(numbers)
        if splits == 1 or 0 < 256 * splits <= keys
    }
    return next(splits for splits, time in times.items() if time <= 1.01 * min(times.values()))


def pick_section(keys: int, bytes_per_key: int, group: int, heads: int) -> int:
    """Heads of a section: whole groups, a power of two of them, as many as have their keys and values in L2_BYTES at
    the same time. `bytes_per_key`: of a key and its value. Within a section the tiles with the most keys come first."""
    return min(heads, group * 2 ** int(log2(max(1.0, L2_BYTES / (bytes_per_key * keys)))))
