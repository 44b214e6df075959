"""The order of CTAs with schedule ROLES (sm90/backward_roles.cuh): which preprocess, multiply (run the main kernel)
and postprocess, and when. Pure functions of sizes and number of SMs.

The launch is a software pipeline over spans of KV heads, in rounds. In round r, CTAs preprocess span r, multiply span
r − 1 and postprocess span r − LAG, interleaved, so that memory traffic is overlapped with GEMMs."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .backward import CudaBackwardConfig

CHUNK_ROWS = 1024  # at most so many queries for a CTA that preprocesses or postprocesses; backward_roles.cuh holds 1152
# As in backward_roles.cuh.
LAG = 3  # rounds from the one that preprocesses a span to the one that postprocesses it
LAST = LAG - 1  # spans at the end that are postprocessed when no GEMMs are left to overlap with
WARPS = 8  # consumer warps of a CTA that multiplies, each of which increments the span's counter when it is done


@dataclass(frozen=True)
class RolesPlan:
    """`spans` spans of `span` KV heads. A CTA that preprocesses or postprocesses has a chunk of a query head's tiles: a
    head has `chunks` chunks of `chunk` tiles. In the first span to be preprocessed and the last to be postprocessed,
    which no GEMMs overlap, it has `end_chunks` shorter ones of `end_chunk` tiles. `ctas`: of all roles."""

    span: int
    spans: int
    chunk: int
    chunks: int
    end_chunk: int
    end_chunks: int
    ctas: int
    rounds: tuple[tuple[int, ...], ...]  # fields of a Round of backward_roles.cuh each


@functools.lru_cache(maxsize=256)
def pick_roles_plan(
    config: CudaBackwardConfig, kv_heads: int, group: int, m_tiles: int, blocks: int, sms: int
) -> RolesPlan:
    """`kv_heads` of all batches; `m_tiles`: tiles of queries of a query head; `blocks`: of keys of a KV head."""
    span = min(config.span, kv_heads)
    spans = -(-kv_heads // span)
    chunk, chunks = _chunks(m_tiles, kv_heads * group, config.queries, sms)
    end_chunk, end_chunks = _chunks(m_tiles, span * group, config.queries, sms)
    unshared = kv_heads * blocks - config.shared

    # This function and the three below return counts before span s: KV heads, then CTAs of each role.
    def heads(s: int) -> int:
        return min(max(s, 0) * span, kv_heads)

    def preprocesses(s: int) -> int:
        first = heads(min(s, 1))
        return group * (first * end_chunks + (heads(s) - first) * chunks)

    def multiplies(s: int) -> int:
        return heads(s) * blocks + max(0, heads(s) * blocks - unshared) * (config.splits - 1)

    def postprocesses(s: int) -> int:
        others = heads(min(s, spans - LAST))
        return group * (others * chunks + (heads(s) - others) * end_chunks)

    rounds, start = [], 0
    for r in range(spans + LAG):
        before = preprocesses(r + 1) - preprocesses(r)
        after = postprocesses(r - LAG + 1) - postprocesses(r - LAG)
        multiply, others = multiplies(r) - multiplies(r - 1), before + after
        preprocessed, multiplied = preprocesses(r) - preprocesses(r - 1), multiplies(r - LAG + 1) - multiplies(r - LAG)
        stride = max(1, (others + multiply) // max(others, 1))
        rounds.append((start, before, others, stride, multiplies(r - 1), preprocessed, WARPS * multiplied))
        start += others + multiply
    return RolesPlan(span, spans, chunk, chunks, end_chunk, end_chunks, start, tuple(rounds))


def _chunks(m_tiles: int, heads: int, tile: int, sms: int) -> tuple[int, int]:
    """Tiles of a chunk, and chunks of a query head. Chunks are of about equal length, and short enough that the tiles
    of all `heads` make a chunk for each SM."""
    most = max(1, min(CHUNK_ROWS // tile, -(-heads * m_tiles // sms)))
    chunk = -(-m_tiles // -(-m_tiles // most))
    return chunk, -(-m_tiles // chunk)
