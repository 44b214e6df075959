"""Which version of the backward runs, and how the one in CUDA C++ (sm90/backward.cu) distributes its work over CTAs.
Pure functions of sizes and number of SMs. The measurements behind each rule are in EXPERIMENTS.md.

A block has 128 keys of a KV head, and a CTA that owns it loops over tiles of queries. A wave: as many CTAs as the SMs
run at a time, which is one per SM. `waves`, a float, is the number of key blocks divided by the number of SMs."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass

import triton


class Schedule(enum.IntEnum):
    """Which CTA computes which blocks of 128 keys. The values are those of sm90/backward_schedule.cuh."""

    CTA_PER_BLOCK = 0  # a CTA for each block of keys; preprocess and postprocess are launches of their own
    SINGLE_BLOCK = 1  # one block of keys: one launch computes everything, and each dQ is computed by one CTA
    CTA_PER_KV_HEAD = 2  # a CTA has all blocks of a KV head, in order, and casts dQ itself: dQ is deterministic
    PERSISTENT = 3  # a CTA for each SM, which computes several blocks, or splits of blocks, one at a time
    ROLES = 4  # as CTA_PER_BLOCK, but other CTAs of the same launch preprocess and postprocess


@dataclass(frozen=True)
class CudaBackwardConfig:
    """How blocks of 128 keys are distributed over CTAs, which loop over tiles of `queries` queries.

    section    KV heads whose CTAs are next to each other in launch order, the longest first. q, dout and dQ of these
               heads share L2.
    shared     The last `shared` blocks have `splits` CTAs each, over which their tiles of queries are split. One more
    splits     launch adds up their partial dK and dV.
    alternate  Even sections go over queries from the last to the first, odd ones from the first to the last.
    span       With ROLES, KV heads that are preprocessed, or postprocessed, while the GEMMs of others run: whole
               sections.

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
PERSISTENT_QUERIES = {64: 128, 128: 64}  # of a tile, by D: shared memory then has room for two blocks of keys
PERSISTENT_TILES = {64: 127, 128: 16}  # tiles of queries of a block, at most: with more PERSISTENT is no faster
PERSISTENT_KEYS = {64: CUDA_BWD_KEYS + 1, 128: 2048}  # at least; at D = 128 CTA_PER_KV_HEAD is 3 to 5 % faster below
CUDA_BWD_SPANS = 61  # at most; with LAG it is MOST_ROUNDS in the source
KV_HEAD_BYTES = 40e6  # fp32 dQ that stays in the L2 of an H100 or H200, which has 50 MB
SECTION_BYTES = 16 * 2**20  # of q, dout and fp32 dQ of the heads of a section: a third of L2


def pick_backward(version: str, hopper: str = "", deterministic: bool = False) -> str:
    """The version of the backward that runs. `hopper`: "cuda" if that supports the problem, else "". `deterministic`:
    dQ must be deterministic; that of "cuda" is not. "auto" never selects "fused", which has fewer FLOPs than "separate"
    but more memory traffic."""
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
    """The configuration of the backward in CUDA C++. `kv_heads` of all batches; `group`: query heads of a KV head;
    `schedule`: the only one that can run, if there is no choice.

    The schedule is `_pick_schedule`'s, the tile `pick_query_tile`'s, the span `_pick_span`'s.
    No mask: all CTAs take the same time. Sections have one head, and the blocks of the last wave are split over all SMs
    (`_pick_shares`). With ROLES and few waves, a span has half of the heads.
    Causal, group 1: the longest CTAs of a section start first; `_pick_section` says how many heads it has.
    Causal, group > 1: a section has about one CTA for each SM, and sections alternate. All its CTAs then go over the
    same queries at about the same time, so that these are in L2 whatever the size of the group.

    Record: "Sections that alternate", "Roles" and "Few waves" of EXPERIMENTS.md (H200). Cached: it takes up to 0.1 ms.
    """
    blocks = triton.cdiv(keys, CUDA_BWD_KEYS)
    waves = blocks * kv_heads / sms
    if schedule is None:
        schedule = _pick_schedule(queries, keys, dim, kv_heads, group, causal, sms)
    if schedule is Schedule.CTA_PER_KV_HEAD:
        return CudaBackwardConfig(64, 1, schedule=schedule)
    if schedule is Schedule.PERSISTENT:
        tile = PERSISTENT_QUERIES[dim]
    else:
        tile = pick_query_tile(dim, queries, keys, group, causal, waves)
    roles = schedule is Schedule.ROLES

    def span(section: int) -> int:
        return _pick_span(section, kv_heads, blocks, sms) if roles else 0

    if not causal:
        shared, splits = _pick_shares(blocks * kv_heads, triton.cdiv(queries, tile) * group, sms)
        heads = triton.cdiv(kv_heads, 2) if roles and waves < _few_waves(blocks) else span(1)
        return CudaBackwardConfig(tile, 1, shared, splits, schedule=schedule, span=heads)
    if group > 1:
        section = max(1, min(kv_heads, round(sms / blocks)))
        return CudaBackwardConfig(tile, section, alternate=True, schedule=schedule, span=span(section))
    most = max(1, min(triton.cdiv(kv_heads, 4) if roles else kv_heads, SECTION_BYTES // (8 * dim * queries)))
    section = _pick_section(most, kv_heads, blocks, sms)
    return CudaBackwardConfig(tile, section, schedule=schedule, span=span(section))


def _pick_schedule(queries: int, keys: int, dim: int, kv_heads: int, group: int, causal: bool, sms: int) -> Schedule:
    """The first of these that applies. Record: "Persistent CTAs", "One CTA per KV head" and "Roles" of EXPERIMENTS.md.

    SINGLE_BLOCK: up to 128 keys.
    PERSISTENT: more blocks (with splits) than SMs, PERSISTENT_KEYS keys or more, and up to PERSISTENT_TILES tiles of
    queries a block. With so few tiles a CTA's prologue and epilogue take a large part of its time; here they overlap.
    CTA_PER_BLOCK: D = 64.
    CTA_PER_KV_HEAD: KV heads fill the SMs, and L2 holds their dQ (`_one_cta_per_kv_head`).
    ROLES: all else.
    """
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


def pick_query_tile(dim: int, queries: int, keys: int, group: int, causal: bool, waves: float) -> int:
    """Queries of a tile where the schedule is not PERSISTENT; as BM in the source.

    D = 64: 128. D = 128: 64 or 80. A tile of 80 reads keys from shared memory a fifth less often for each query. But it
    pads few queries by more, and computes more masked pairs on the diagonal. So 80 without a mask; under a causal mask
    from 2560 keys on (8193 where query heads share a KV head), or from 1024 keys on where there are at most two waves
    (one where heads are shared) and the longest CTA decides. Not where 80 pads queries by 3 % more than 64, nor with
    SINGLE_BLOCK: its epilogue stores rows of dQ, and tiles of 80 compute dQ transposed.

    Record: "64 and 80 queries" of EXPERIMENTS.md (H200).
    """
    if dim == 64:
        return 128
    few = keys >= 1024 and waves <= (2 if group == 1 else 1)
    long = not causal or few or keys >= (2560 if group == 1 else 8193)
    padded = {tile: triton.cdiv(queries, tile) * tile for tile in (64, 80)}
    return 80 if keys > CUDA_BWD_KEYS and long and padded[80] <= 1.03 * padded[64] else 64


def _few_waves(blocks: int) -> float:
    """Returns the number of waves of CTAs below which the heads are divided into halves. It is lower for short
    sequences, where preprocessing the first span and postprocessing the last, which are not overlapped, take a larger
    part of the time. Record: "Few waves" of EXPERIMENTS.md."""
    return 3.5 if blocks >= 16 else 2


def _pick_section(most: int, kv_heads: int, blocks: int, sms: int) -> int:
    """KV heads of a section under a causal mask. `most`: those that L2 has room for.

    Of the counts above most / 2, the one with the fullest last section. But the longest CTAs of the last section start
    only after the earlier sections have started, and with few waves they end late. So below `_few_waves`,
    and below 8 waves of 16 blocks or more, there are two sections of half of the heads, or one if heads are odd and
    fewer than 8. The exception, from `_few_waves` on: an even number of sections with CTAs for nine tenths of the SMs
    each, as every second section fills the SMs that the one before it leaves idle. A list schedule of CTAs on SMs
    agrees within 2 % (test_backward_configs.py). Record: "Few waves" of EXPERIMENTS.md.
    """
    section = min(range(most, most // 2, -1), key=lambda s: -kv_heads % s)
    waves, few = kv_heads * blocks / sms, _few_waves(blocks)
    by_waves = kv_heads % (2 * section) == 0 and section * blocks >= 0.9 * sms
    if waves >= few and (by_waves or blocks < 16 or waves >= 8):
        return section
    return kv_heads if kv_heads % 2 and kv_heads < 8 else triton.cdiv(kv_heads, 2)


def _pick_span(section: int, kv_heads: int, blocks: int, sms: int) -> int:
    """KV heads of a span: as many whole sections as have CTAs for nine tenths of the SMs. The CTAs that a span waits
    for then started about a wave before, and have ended. But shorter spans where that leaves fewer than four, and
    longer ones where it makes more than CUDA_BWD_SPANS."""
    sections = triton.cdiv(9 * sms, 10 * section * blocks)
    least = triton.cdiv(kv_heads, CUDA_BWD_SPANS * section)
    return section * max(least, min(sections, kv_heads // (4 * section)))


def _one_cta_per_kv_head(queries: int, keys: int, dim: int, kv_heads: int, group: int, causal: bool, sms: int) -> bool:
    """Whether a CTA for each KV head fills nine tenths of each wave, and the fp32 dQ of the heads that run at a time
    fits KV_HEAD_BYTES of L2.

    For each block of keys, a CTA reads and writes dQ of all queries that see it. Under a causal mask these are
    m − m² / (2 keys) on average, where m = min(queries, keys) queries see any key. A tile of 64 queries moves 96 KB, 64
    of them for dQ: from device memory that would take longer than its GEMMs."""
    waves = triton.cdiv(kv_heads, sms)
    seeing = min(queries, keys)
    visited = seeing - seeing * seeing / (2 * keys) if causal else queries
    sums = min(kv_heads, sms) * group * visited * 4 * dim
    return kv_heads >= 0.9 * waves * sms and sums <= KV_HEAD_BYTES


def _pick_shares(blocks: int, tiles: int, sms: int) -> tuple[int, int]:
    """(shared, splits): how many blocks are left for the last wave, and over how many CTAs the `tiles` tiles of queries
    of each are split, so that this wave is shortest. (0, 1): none is split."""
    shared = blocks % sms
    if not shared:
        return 0, 1

    def last_wave(splits: int) -> int:
        start = 3 if splits == 1 else 5  # prologue and epilogue of a CTA, in tiles; with partial sums, also these
        return triton.cdiv(shared * splits, sms) * (triton.cdiv(tiles, splits) + start)

    splits = min(range(1, min(tiles, 16) + 1), key=last_wave)
    return (shared, splits) if splits > 1 else (0, 1)
