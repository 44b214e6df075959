"""Which keys a query sees, which tiles of keys need no mask, and in what order CTAs compute tiles.

Query i is aligned with key i + keys − queries: the last query with the last key. It sees the keys from `left` before
that one up to `right` after it. Causal is right = 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Bytes of K and V that concurrent CTAs should read at most: well under the 40 to 60 MB of an A100's or H100's L2.
SECTION_BYTES = 24e6


def section(heads: int, bytes_per_head: int, banded: bool) -> int:
    """Returns how many heads form a section, within which the tile order alternates between heads. Without a band 1:
    head by head, so that its keys and values are read from device memory once. In a band the tiles of a head differ in
    length, and the long ones of many heads should be launched first."""
    if not banded:
        return 1
    return max(1, min(heads, int(SECTION_BYTES // max(1, bytes_per_head))))


@triton.jit
def _tile_and_head(cta, tiles, heads, section):
    """Returns tile and head of a CTA: section by section of heads, and in a section tile 0 of each head, then tile 1,
    ..."""
    first = cta // (tiles * section) * section
    here = tl.minimum(section, heads - first)
    rest = cta - first * tiles
    return rest // here, first + rest % here


@triton.jit
def _bounds(position, keys, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Returns low and high: a query at `position` sees keys low <= j < high."""
    low = position * 0
    high = low + keys
    if HAS_LEFT:
        low = position - left
    if HAS_RIGHT:
        high = tl.minimum(high, position + (right + 1))
    return low, high


@triton.jit
def _keys_seen(first, last, keys, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns begin (a multiple of BLOCK_N) and end of the keys that queries at positions `first` to `last` see."""
    begin = first * 0
    end = begin + keys
    if HAS_LEFT:
        begin = tl.maximum(first - left, 0) // BLOCK_N * BLOCK_N
    if HAS_RIGHT:
        end = tl.maximum(tl.minimum(end, last + (right + 1)), 0)
    return begin, end


@triton.jit
def _keys_seen_by_all(
    begin, end, first, last, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Returns the multiples of BLOCK_N between which all queries see all keys. Tiles from `begin` to the first of them,
    and from the second one to `end`, need a mask."""
    inner = begin
    outer = end
    if HAS_LEFT:
        inner = tl.maximum(begin, tl.cdiv(tl.maximum(last - left, 0), BLOCK_N) * BLOCK_N)
        inner = tl.minimum(inner, tl.cdiv(end, BLOCK_N) * BLOCK_N)
    if HAS_RIGHT:
        outer = tl.minimum(outer, tl.maximum(first + (right + 1), 0))
    return inner, tl.maximum(inner, outer // BLOCK_N * BLOCK_N)


@triton.jit
def _queries_seeing(
    first, last, queries, shift, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Returns begin (a multiple of BLOCK_M) and end of the queries that see some of the keys `first` to `last`.
    shift = keys − queries."""
    begin = first * 0
    end = begin + queries
    if HAS_RIGHT:
        begin = tl.minimum(tl.maximum(first - shift - right, 0), queries) // BLOCK_M * BLOCK_M
    if HAS_LEFT:
        end = tl.maximum(tl.minimum(end, last - shift + left + 1), 0)
    return begin, end
