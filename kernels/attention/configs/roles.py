"""How a launch of sm90/backward.cu whose CTAs have three roles (backward_roles.cuh) orders them. A pure function of
sizes and number of SMs."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .backward import CudaBackwardConfig

CHUNK_ROWS = 1024  # of a CTA that preprocesses or postprocesses, at most; backward_roles.cuh has room for 1152
# As in backward_roles.cuh.
LAG = 3  # rounds from the one that preprocesses a span to the one that postprocesses it
LAST = LAG - 1  # spans that are postprocessed when nothing else runs any more
WARPS = 8  # of a CTA that multiplies, each of which announces that it is done


@dataclass(frozen=True)
class RolesPlan:
    """Spans of key heads, and the chunks of tiles of queries that CTAs preprocess and postprocess: `chunks` of `chunk`
    tiles to a query head; at the ends, which nothing is overlapped with, `end_chunks` of `end_chunk`. `ctas` of all
    roles."""

    span: int
    spans: int
    chunk: int
    chunks: int
    end_chunk: int
    end_chunks: int
    ctas: int
    rounds: tuple[tuple[int, ...], ...]  # a Round each


@functools.lru_cache(maxsize=256)
def pick_roles_plan(
    config: CudaBackwardConfig, kv_heads: int, group: int, m_tiles: int, blocks: int, sms: int
) -> RolesPlan:
    """`kv_heads` of all batches; `m_tiles` tiles of queries to a query head, `blocks` of keys to a key head."""
    span = min(config.span, kv_heads)
    spans = -(-kv_heads // span)
    chunk, chunks = _chunks(m_tiles, kv_heads * group, config.queries, sms)
    end_chunk, end_chunks = _chunks(m_tiles, span * group, config.queries, sms)
    unshared = kv_heads * blocks - config.shared

    def heads(s: int) -> int:  # before span s, as all below
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
    """Tiles of a chunk and chunks of a query head, all about as long: as short as it takes to have one for each
    SM of all these heads' tiles together."""
    most = max(1, min(CHUNK_ROWS // tile, -(-heads * m_tiles // sms)))
    chunk = -(-m_tiles // -(-m_tiles // most))
    return chunk, -(-m_tiles // chunk)
