"""Which form of the backward runs, and how the fused one in CUDA C++ (sm90/backward.cu) gives its work to CTAs. Pure
functions of sizes and number of SMs. The measurements behind each rule are in EXPERIMENTS.md."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass

import triton


class Schedule(enum.IntEnum):
    """Which CTA computes which blocks of 128 keys. The numbers are those of sm90/backward_schedule.cuh."""

    CTA_PER_BLOCK = 0  # a CTA for each block of keys; preprocess and postprocess are launches of their own
    SINGLE_BLOCK = 1  # there is one block of keys, so that one launch computes everything and dQ is not summed
    CTA_PER_KV_HEAD = 2  # a CTA has all blocks of a key head, in order, and casts dQ itself: dQ is deterministic
    PERSISTENT = 3  # a CTA for each SM, which computes one block or share after the other
    ROLES = 4  # as CTA_PER_BLOCK, with preprocess and postprocess in CTAs of the same launch


@dataclass(frozen=True)
class CudaBackwardConfig:
    """How blocks of 128 keys are given to CTAs, which go over tiles of so many queries.

    section: how many key heads' CTAs run together, longest first. The last `shared` blocks have `splits` CTAs each.
    alternate: sections go from the last queries to the first and from the first to the last, in turn.
    span: with ROLES, how many key heads are preprocessed and postprocessed at a time, while others are multiplied.
    PERSISTENT needs tiles of 128 queries at D = 64 and of 64 at D = 128.
    """

    queries: int
    section: int
    shared: int = 0
    splits: int = 1
    alternate: bool = False
    schedule: Schedule = Schedule.CTA_PER_BLOCK
    span: int = 0


CUDA_BWD_KEYS = 128  # of a block; as BN in the source
PERSISTENT_QUERIES = {64: 128, 128: 64}  # of a tile: shared memory has room for two blocks of keys beside it
PERSISTENT_TILES = {64: 127, 128: 16}  # of a block of keys: with more, a CTA for each block is as fast or faster
PERSISTENT_KEYS = {64: CUDA_BWD_KEYS + 1, 128: 2048}  # with fewer at D = 128 CTA_PER_KV_HEAD is 3 to 5 % faster
CUDA_BWD_SPANS = 61  # at most; with LAG it is MOST_ROUNDS in the source
KV_HEAD_BYTES = 40e6  # of fp32 sums, that L2 keeps of its 50 MB on an H100 or H200
SECTION_BYTES = 16 * 2**20  # of q, dout and the fp32 sum of dQ of the heads of a section: a third of L2


def pick_backward(version: str, hopper: str = "", deterministic: bool = False) -> str:
    """The form of the backward that runs. `hopper`: the one for Hopper if it takes the problem; not where results must
    be `deterministic` and its own are not. The portable fused form has fewer FLOPs but more traffic, so it runs on
    request only."""
    if version != "auto":
        return version
    return hopper if hopper and not deterministic else "separate"


@functools.lru_cache(1024)
def pick_cuda_bwd_config(
    queries: int,
    keys: int,
    dim: int,
    kv_heads: int,
    group: int,
    causal: bool,
    sms: int,
    schedule: Schedule | None = None,
) -> CudaBackwardConfig:
    """Schedule, tile, sections, shares and spans of the backward in CUDA C++. `kv_heads` of all batches;
    `schedule`: the only one that can run, if there is no choice.

    The schedule is `_pick_schedule`'s. Without a mask all CTAs take as long: heads go one by one, and the last round of
    CTAs is shared out over all SMs. With a mask the longest CTAs of a section start first (`_pick_section`). With a
    mask and shared heads a section has a CTA for each SM, and sections alternate: its CTAs are then at the same queries
    all the time, which L2 holds whatever the size of the group. Spans are `_pick_span`'s, and halves of the heads where
    CTAs are few rounds.

    Record: tables "Sections", "Roles" and "Few rounds" of EXPERIMENTS.md (H200). Cached, for it takes up to 0.1 ms.
    """
    blocks = triton.cdiv(keys, CUDA_BWD_KEYS)
    rounds = blocks * kv_heads / sms
    if schedule is None:
        schedule = _pick_schedule(queries, keys, dim, kv_heads, group, causal, sms)
    if schedule is Schedule.CTA_PER_KV_HEAD:
        return CudaBackwardConfig(64, 1, schedule=schedule)
    if schedule is Schedule.PERSISTENT:
        tile = PERSISTENT_QUERIES[dim]
    else:
        tile = pick_query_tile(dim, queries, keys, group, causal, rounds)
    roles = schedule is Schedule.ROLES

    def span(section: int) -> int:
        return _pick_span(section, kv_heads, blocks, sms) if roles else 0

    if not causal:
        shared, splits = _pick_shares(blocks * kv_heads, triton.cdiv(queries, tile) * group, sms)
        heads = triton.cdiv(kv_heads, 2) if roles and rounds < _few_rounds(blocks) else span(1)
        return CudaBackwardConfig(tile, 1, shared, splits, schedule=schedule, span=heads)
    if group > 1:
        section = max(1, min(kv_heads, round(sms / blocks)))
        return CudaBackwardConfig(tile, section, alternate=True, schedule=schedule, span=span(section))
    most = max(1, min(triton.cdiv(kv_heads, 4) if roles else kv_heads, SECTION_BYTES // (8 * dim * queries)))
    section = _pick_section(most, kv_heads, blocks, sms)
    return CudaBackwardConfig(tile, section, schedule=schedule, span=span(section))


def _pick_schedule(queries: int, keys: int, dim: int, kv_heads: int, group: int, causal: bool, sms: int) -> Schedule:
    """SINGLE_BLOCK up to 128 keys. PERSISTENT where blocks and shares are more than SMs and each has few tiles of
    queries, beside which the prologue and epilogue of a CTA count. At D = 128 CTA_PER_KV_HEAD where it fills the GPU
    and L2 (`_one_cta_per_kv_head`), else ROLES. Else CTA_PER_BLOCK."""
    blocks = triton.cdiv(keys, CUDA_BWD_KEYS)
    if blocks == 1:
        return Schedule.SINGLE_BLOCK
    tiles = triton.cdiv(queries, PERSISTENT_QUERIES[dim]) * group
    shared, splits = (0, 1) if causal else _pick_shares(blocks * kv_heads, tiles, sms)
    several = blocks * kv_heads + shared * (splits - 1) > sms
    if several and keys >= PERSISTENT_KEYS[dim] and tiles <= PERSISTENT_TILES[dim]:
        return Schedule.PERSISTENT
    if dim == 64:
        return Schedule.CTA_PER_BLOCK
    if _one_cta_per_kv_head(queries, keys, dim, kv_heads, group, causal, sms):
        return Schedule.CTA_PER_KV_HEAD
    return Schedule.ROLES


def pick_query_tile(dim: int, queries: int, keys: int, group: int, causal: bool, rounds: float) -> int:
    """Queries of a tile where the schedule is not PERSISTENT; as BM in the source. `rounds`: blocks of keys
    for each SM.

    128 at D = 64. At D = 128 80 read keys a fifth less often than 64, but round up few queries, and under a mask have
    more to hide: so without a mask, or with 2560 keys or more (8193 where heads are shared), or with one or two rounds
    of CTAs, where the longest CTA decides. Not for a single block of keys, which stores dQ by rows: tiles of 80 have
    its columns there.

    Record: "64 and 80 queries" of EXPERIMENTS.md (H200).
    """
    if dim == 64:
        return 128
    few = keys >= 1024 and rounds <= (2 if group == 1 else 1)
    long = not causal or few or keys >= (2560 if group == 1 else 8193)
    padded = {tile: triton.cdiv(queries, tile) * tile for tile in (64, 80)}
    return 80 if keys > CUDA_BWD_KEYS and long and padded[80] <= 1.03 * padded[64] else 64


def _few_rounds(blocks: int) -> float:
    """How many rounds of CTAs are few. Of short sequences fewer: what runs before the first and after the last span
    takes a larger part of longer spans there. Record: "Few rounds" of EXPERIMENTS.md."""
    return 3.5 if blocks >= 16 else 2


def _pick_section(most: int, kv_heads: int, blocks: int, sms: int) -> int:
    """Heads of a section under a causal mask: of those counts that L2 has room for, from half of `most` on, the one
    that leaves the fewest over.

    The longest CTAs of a last section start when those before it are done, which counts with few rounds: then halves,
    or all, if heads are few and odd. But where each section has a CTA for nearly all SMs, and sections are an even
    number, each second one fills the gaps. A list schedule of CTAs on SMs agrees within 2 %
    (test_backward_configs.py). Record: "Few rounds" of EXPERIMENTS.md.
    """
    section = min(range(most, most // 2, -1), key=lambda s: -kv_heads % s)
    rounds, few = kv_heads * blocks / sms, _few_rounds(blocks)
    by_rounds = kv_heads % (2 * section) == 0 and section * blocks >= 0.9 * sms
    if rounds >= few and (by_rounds or blocks < 16 or rounds >= 8):
        return section
    return kv_heads if kv_heads % 2 and kv_heads < 8 else triton.cdiv(kv_heads, 2)


def _pick_span(section: int, kv_heads: int, blocks: int, sms: int) -> int:
    """Key heads of a span, as many sections as have a CTA for nine tenths of the SMs: what a span waits for then
    started more than a round of CTAs before. But four spans, where there are as many sections, and at most
    CUDA_BWD_SPANS."""
    sections = triton.cdiv(9 * sms, 10 * section * blocks)
    least = triton.cdiv(kv_heads, CUDA_BWD_SPANS * section)
    return section * max(least, min(sections, kv_heads // (4 * section)))


def _one_cta_per_kv_head(queries: int, keys: int, dim: int, kv_heads: int, group: int, causal: bool, sms: int) -> bool:
    """Whether CTAs with a key head each keep nine tenths of the SMs busy, and whether L2 keeps dQ's fp32 sums, which
    all heads that run at once go over for each block of keys: those of all queries, under a causal mask of
    m − m² / (2 keys) on average, where m = min(queries, keys) of them see any. Memory is slower than the products: a
    visit to a tile of 64 queries is 96 KB, of which 64 are its sum, read and written."""
    rounds = triton.cdiv(kv_heads, sms)
    seeing = min(queries, keys)
    visited = seeing - seeing * seeing / (2 * keys) if causal else queries
    sums = min(kv_heads, sms) * group * visited * 4 * dim
    return kv_heads >= 0.9 * rounds * sms and sums <= KV_HEAD_BYTES


def _pick_shares(blocks: int, tiles: int, sms: int) -> tuple[int, int]:
    """How many blocks are shared, by how many CTAs each: what makes the last round shortest, in tiles."""
    shared = blocks % sms
    if not shared:
        return 0, 1

    def last_round(splits: int) -> int:
        start = 3 if splits == 1 else 5  # of a CTA, in tiles, and with parts to write and to add up
        return triton.cdiv(shared * splits, sms) * (triton.cdiv(tiles, splits) + start)

    splits = min(range(1, min(tiles, 16) + 1), key=last_round)
    return (shared, splits) if splits > 1 else (0, 1)
