"""Which form of the backward runs, and how the fused one in CUDA C++ (sm90/backward.cu) gives its work to CTAs. Pure
functions of sizes and number of SMs."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import triton


@dataclass(frozen=True)
class CudaBackwardConfig:
    """How blocks of 128 keys are given to CTAs, which go over tiles of so many queries.

    section: how many key heads' CTAs run together, longest first. The last `shared` blocks have `splits` CTAs each.
    alternate: sections go from the last queries to the first and from the first to the last, in turn.
    whole_heads: a CTA has all blocks of a key head, one after the other, and casts dQ itself. It is then the same bit
    for bit in each run.
    chained: there is a CTA to an SM, which does one block or share after the other without a pause. Tiles
    then have 128 queries at D = 64, 64 at D = 128.
    span: what the main kernel needs of each query is made, and dQ is cast, by CTAs of its own launch, for so many key
    heads at a time, while others multiply those before. 0: by launches of their own.
    """

    queries: int
    section: int
    shared: int = 0
    splits: int = 1
    alternate: bool = False
    whole_heads: bool = False
    chained: bool = False
    span: int = 0


CUDA_BWD_KEYS = 128  # of a block of the backward in CUDA C++; as BN in the source
CHAIN_TILES = {64: 127, 128: 16}  # of a block of keys: with more a CTA for each block is as fast or faster
CHAIN_KEYS = {64: CUDA_BWD_KEYS + 1, 128: 2048}  # two blocks; with fewer at D = 128 whole heads are 3 to 5 % faster
CUDA_BWD_SPANS = 61  # of heads at most, in a launch of several roles; with LAG as MOST_ROUNDS in the source
WHOLE_HEADS_BYTES = 40e6  # of fp32 sums, that L2 keeps of its 50 MB on an H100 or H200


def cuda_query_tile(dim: int, queries: int, keys: int, group: int, causal: bool, rounds: float) -> int:
    """Queries of a tile of the backward in CUDA C++ where there are no chains; as BM in the source. `rounds`: blocks of
    keys to an SM.

    64 and 80 at D = 128, in TFLOP/s on an H200: 586 and 602 without a mask at 8192 keys; causal 493 and 484 at 2048,
    520 and 530 at 2560, 579 and 583 at 4096, 585 and 606 at 6144, where longer tiles on the diagonal matter less. With
    shared heads under a mask 587 and 574 at 4096, 619 and 606 at 8192, 593 and 610 at 16 384. With one or two rounds
    the longest CTA decides, and that is faster with 80: 8 heads of causal 2048 241 and 256, 16 and 2 of 8192 329 and
    338. Few queries are rounded up to more by 80: 256 and 2048 keys take 0.182 ms with 64 and 0.204 with 80. A single
    block of keys stores its dQ by rows, which tiles of 80, whose dQ has columns for rows, do not.
    """
    if dim == 64:
        return 128
    few = keys >= 1024 and rounds <= (2 if group == 1 else 1)
    long = not causal or few or keys >= (2560 if group == 1 else 8193)
    padded = {tile: triton.cdiv(queries, tile) * tile for tile in (64, 80)}
    return 80 if keys > CUDA_BWD_KEYS and long and padded[80] <= 1.03 * padded[64] else 64


@functools.lru_cache(1024)
def pick_cuda_bwd_config(
    queries: int, keys: int, dim: int, kv_heads: int, group: int, causal: bool, sms: int
) -> CudaBackwardConfig:
    """Where blocks have few tiles and there are several rounds of CTAs, one of chains takes their place: what starts
    and ends a CTA counts beside its tiles.

    Without a mask all CTAs take as long: heads go one by one, and the last round is shared out over all SMs. Where
    there are few rounds, spans are halves, else who finishes waits for what has just begun: 10 heads of 3072 queries
    and keys, 1.8 rounds, took 298 µs in five spans, 218 in two, and 225 by three launches; 13 of 4096, 3.2, 528, 458
    and 466; 8 of 2048, 143, 86 and 90.

    With one, a few heads at a time, as long as their q, dout and fp32 dQ fit a third of L2; a last section of fewer
    heads would begin long CTAs late, so the count that leaves the fewest over. With few rounds balance counts more than
    L2 (`_pick_section`): 10 heads of 4096 take 214 µs in halves, and 268 by two at a time. `kv_heads` of all batches.

    With one and shared heads, a section has a CTA to an SM, and sections alternate: its CTAs are then at
    the same queries all the time, which L2 holds whatever the size of the group. On an H200, 64 heads and 8 key
    heads, 8192 keys: 570 TFLOP/s, against 494 with each query head from its first query on, one after the other.

    At D = 128, CTAs of the same launch prepare and finish spans of heads (`_pick_span`). What is done for the first and
    the last has nothing to run beside: sections that do not alternate are no more than a quarter of the heads, but for
    few rounds.

    Else whole heads go to CTAs where there are as many as SMs, or a multiple, and few queries
    (`_whole_heads`).

    Every backward waits for it, up to 0.1 ms: hence the cache.
    """
    blocks = triton.cdiv(keys, CUDA_BWD_KEYS)

    def shares(tile: int) -> tuple[int, int]:
        tiles = triton.cdiv(queries, tile) * group
        return (0, 1) if causal else _pick_shares(blocks * kv_heads, tiles, sms)

    tile = 128 if dim == 64 else 64
    shared, splits = shares(tile)
    several = blocks * kv_heads + shared * (splits - 1) > sms
    chained = several and keys >= CHAIN_KEYS[dim] and triton.cdiv(queries, tile) * group <= CHAIN_TILES[dim]
    rounds = blocks * kv_heads / sms
    roles = not chained and dim == 128 and blocks > 1
    if roles and _whole_heads(queries, keys, dim, kv_heads, group, causal, sms):
        return CudaBackwardConfig(64, 1, whole_heads=True)
    if not chained:
        tile = cuda_query_tile(dim, queries, keys, group, causal, rounds)
        shared, splits = shares(tile)

    def span(section: int) -> int:
        return _pick_span(section, kv_heads, blocks, sms) if roles else 0

    if not causal:
        few = roles and rounds < _few_rounds(blocks)
        heads = triton.cdiv(kv_heads, 2) if few else span(1)
        return CudaBackwardConfig(tile, 1, shared, splits, chained=chained, span=heads)
    if group > 1:
        section = max(1, min(kv_heads, round(sms / blocks)))
        return CudaBackwardConfig(tile, section, alternate=True, chained=chained, span=span(section))
    most = max(1, min(triton.cdiv(kv_heads, 4) if roles else kv_heads, 16 * 2**20 // (8 * dim * queries)))
    section = _pick_section(most, kv_heads, blocks, sms)
    return CudaBackwardConfig(tile, section, chained=chained, span=span(section))


def _few_rounds(blocks: int) -> float:
    """How many rounds of CTAs are few. Of short sequences fewer: what is done before the first and after the last span
    is more beside what is multiplied in the longer ones. 200 heads of causal 512, 6.1 rounds, took 181 µs in halves,
    157 by 25."""
    return 3.5 if blocks >= 16 else 2


def _pick_section(most: int, kv_heads: int, blocks: int, sms: int) -> int:
    """Heads of a section under a causal mask: of those counts that L2 has room for, from half of `most` on, the one
    that leaves the fewest over.

    The longest CTAs of a last section begin when those before it are done, and with few rounds that is felt: then
    halves, or all, if heads are few and odd. That is what a list schedule of CTAs on SMs says, within 2 %.
    With half of the heads and with what L2 has room for, on an H200 in microseconds: 4 heads of 8192 285 and 425, 10 of
    4096 214 and 268, 16 of 2048 107 and 139, 21 of 4096, 5.1 rounds, 412 and 438; but 8 of 8192, 3.9 rounds, which go
    by two to a round, 564 and 559: where each section has a CTA for nearly all SMs, and they are an even
    number, each second one fills the gaps.
    """
    section = min(range(most, most // 2, -1), key=lambda s: -kv_heads % s)
    rounds, few = kv_heads * blocks / sms, _few_rounds(blocks)
    by_rounds = kv_heads % (2 * section) == 0 and section * blocks >= 0.9 * sms
    if rounds >= few and (by_rounds or blocks < 16 or rounds >= 8):
        return section
    return kv_heads if kv_heads % 2 and kv_heads < 8 else triton.cdiv(kv_heads, 2)


def _pick_span(section: int, kv_heads: int, blocks: int, sms: int) -> int:
    """Key heads of a span, as many sections as have a CTA for nine tenths of the SMs: what a span waits for
    then began more than a round of CTAs before. But four spans, where there are as many sections, and not too many."""
    sections = triton.cdiv(9 * sms, 10 * section * blocks)
    least = triton.cdiv(kv_heads, CUDA_BWD_SPANS * section)
    return section * max(least, min(sections, kv_heads // (4 * section)))


def _whole_heads(queries: int, keys: int, dim: int, kv_heads: int, group: int, causal: bool, sms: int) -> bool:
    """Whether CTAs with a key head each keep nine tenths of the SMs busy, and whether L2 keeps dQ's fp32
    sums, which all heads that run at once go over for each block of keys: those of all queries, under a causal mask of
    m - m² / (2 keys) in the mean, where m = min(queries, keys) of them see any. Memory is slower than the products: a
    visit to a tile of 64 queries is 96 KB, of which 64 are its sum, read and written."""
    rounds = triton.cdiv(kv_heads, sms)
    seeing = min(queries, keys)
    visited = seeing - seeing * seeing / (2 * keys) if causal else queries
    sums = min(kv_heads, sms) * group * visited * 4 * dim
    return kv_heads >= 0.9 * rounds * sms and sums <= WHOLE_HEADS_BYTES


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


def pick_backward(version: str, hopper: str = "", repeatable: bool = False) -> str:
    """The form of the backward that runs. `hopper`: the one for Hopper if it takes the problem; not where results must
    be `repeatable` and its own are not. The portable fused form has fewer FLOPs but more traffic (`fused_backward`)."""
    if version != "auto":
        return version
    return hopper if hopper and not repeatable else "separate"
