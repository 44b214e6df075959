"""What a launch of cuda_backward.cu is told whose CTAs have three roles (cuda_backward_roles.cuh)."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch

from .cuda_backward_config import CUDA_BWD_SPANS, CudaBackwardConfig
from .cuda_driver import pointer

CHUNK_ROWS = 1024  # of a CTA that prepares or finishes, at most; cuda_backward_roles.cuh has room for 1152
# As in cuda_backward_roles.cuh.
LAG = 3  # rounds from the one that prepares a span to the one that finishes it
LAST = LAG - 1  # spans that are finished when nothing else runs any more
WARPS = 8  # of a CTA that multiplies, each of which announces that it is done


class Round(ctypes.Structure):
    """As in cuda_backward_roles.cuh."""

    _fields_ = [
        (name, ctypes.c_int)
        for name in ("start", "prepares", "others", "stride", "multiplies_from", "prepared", "multiplied")
    ]


class Roles(ctypes.Structure):
    """As in cuda_backward_roles.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("lse", "dlse", "ready", "done")),
        *((name, ctypes.c_int) for name in ("span", "spans", "chunk", "chunks", "end_chunk", "end_chunks")),
        ("round", Round * (CUDA_BWD_SPANS + LAG)),
    ]


@dataclass(frozen=True)
class Plan:
    """Spans of key heads, and the chunks of tiles of queries that CTAs prepare and finish: `chunks` of `chunk` tiles to
    a query head; at the ends, which nothing runs beside, `end_chunks` of `end_chunk`. `ctas` of all roles."""

    span: int
    spans: int
    chunk: int
    chunks: int
    end_chunk: int
    end_chunks: int
    ctas: int
    rounds: tuple[tuple[int, ...], ...]  # a Round each

    def told(self, lse: torch.Tensor, dlse: torch.Tensor | None, counters: torch.Tensor) -> Roles:
        """counters: [2, spans] of 32 bits, 0."""
        sizes = (self.span, self.spans, self.chunk, self.chunks, self.end_chunk, self.end_chunks)
        return Roles(pointer(lse), pointer(dlse), *(pointer(x) for x in counters), *sizes, _table(self.rounds))


@functools.lru_cache(maxsize=256)
def plan(
    config: CudaBackwardConfig, kv_heads: int, group: int, m_tiles: int, blocks: int, multiprocessors: int
) -> Plan:
    """`kv_heads` of all batches; `m_tiles` tiles of queries to a query head, `blocks` of keys to a key head."""
    span = min(config.span, kv_heads)
    spans = -(-kv_heads // span)
    chunk, chunks = _chunks(m_tiles, kv_heads * group, config.queries, multiprocessors)
    end_chunk, end_chunks = _chunks(m_tiles, span * group, config.queries, multiprocessors)
    unshared = kv_heads * blocks - config.shared

    def heads(s: int) -> int:  # before span s, as all below
        return min(max(s, 0) * span, kv_heads)

    def prepares(s: int) -> int:
        first = heads(min(s, 1))
        return group * (first * end_chunks + (heads(s) - first) * chunks)

    def multiplies(s: int) -> int:
        return heads(s) * blocks + max(0, heads(s) * blocks - unshared) * (config.splits - 1)

    def finishes(s: int) -> int:
        others = heads(min(s, spans - LAST))
        return group * (others * chunks + (heads(s) - others) * end_chunks)

    rounds, start = [], 0
    for r in range(spans + LAG):
        prepare, finish = prepares(r + 1) - prepares(r), finishes(r - LAG + 1) - finishes(r - LAG)
        multiply, others = multiplies(r) - multiplies(r - 1), prepare + finish
        prepared, multiplied = prepares(r) - prepares(r - 1), multiplies(r - LAG + 1) - multiplies(r - LAG)
        stride = max(1, (others + multiply) // max(others, 1))
        rounds.append((start, prepare, others, stride, multiplies(r - 1), prepared, WARPS * multiplied))
        start += others + multiply
    return Plan(span, spans, chunk, chunks, end_chunk, end_chunks, start, tuple(rounds))


@functools.lru_cache(maxsize=256)
def _table(rounds: tuple[tuple[int, ...], ...]) -> ctypes.Array:
    return (Round * (CUDA_BWD_SPANS + LAG))(*(Round(*x) for x in rounds))


def _chunks(m_tiles: int, heads: int, tile: int, multiprocessors: int) -> tuple[int, int]:
    """Tiles of a chunk and chunks of a query head, all about as long: as short as it takes to have one for each
    multiprocessor of all these heads' tiles together."""
    most = max(1, min(CHUNK_ROWS // tile, -(-heads * m_tiles // multiprocessors)))
    chunk = -(-m_tiles // -(-m_tiles // most))
    return chunk, -(-m_tiles // chunk)
