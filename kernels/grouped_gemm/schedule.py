# A copy of parts/schedule.py, made by `nox -s vendor`: change it there.
"""The tile schedule of a grouped GEMM, computed on the device: the host never reads the offsets.

One small launch writes an int32 table, which the GEMMs of the forward and of the backward read:

    header      [4]           number of row tiles, 0, 0, 0
    groups      [G, 4]        group, first row, end of its rows, 0; the group with most rows first
    row tiles   [tiles, 4]    group, first row, end of the group's rows, 0; in the order of rows

The rows past the last offset form a group of their own, -1, whose tiles of the output are filled with zeros. Offsets
are made monotonic and within bounds: each is clamped to [0, rows], and to the largest offset before it. So no offsets
can cause an access out of bounds. The table is always large enough: s rows are at most s / BLOCK_M + 1 tiles, and there
are at most G + 1 groups of rows.

A table of 128 groups and 384 row tiles has 8 KiB. Its launch is bound by latency, some 3 us. Each of its CTAs scans all
offsets, 128 of them in one load.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .configs import MIN_BLOCK_M
from .launch import Launch

HEADER = tl.constexpr(4)
ENTRY = tl.constexpr(4)
CHUNK, MAX_TILES = 128, 64  # offsets scanned at a time, and row tiles written at a time


def table_size(rows: int, groups: int) -> int:
    """Elements of a table, for tiles of any height."""
    return 4 * (1 + groups + _tiles(rows, groups))


def _tiles(rows: int, groups: int) -> int:
    """An upper bound on the number of row tiles."""
    return rows // MIN_BLOCK_M + groups + 1


def table_launch(kernel: Any, offsets: torch.Tensor, rows: int, block_m: int) -> Launch:
    """The launch that writes a table, given (offsets, table). `kernel` is the folder's JIT kernel around
    `write_table`."""
    groups = offsets.shape[0]
    return Launch(
        kernel,
        (groups + 1,),
        offsets.device,
        (rows, groups, _tiles(rows, groups), offsets.stride(0)),
        BLOCK_M=block_m,
        CHUNK=min(CHUNK, triton.next_power_of_2(max(1, groups))),
        TILES=MAX_TILES,
        num_warps=1,
    )


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _ends(offsets_ptr, index, groups, rows, stride_o, before):
    """The offsets [CHUNK] at ascending indices, clamped to [0, rows] and to a running maximum that starts at `before`;
    0 at index -1."""
    inside = (index >= 0) & (index < groups)
    end = tl.load(offsets_ptr + index.to(tl.int64) * stride_o, mask=inside, other=0)
    end = tl.minimum(tl.maximum(end, 0), rows).to(tl.int32)
    return tl.maximum(tl.associative_scan(end, 0, _larger), before)


@triton.jit
def _own_rows(offsets_ptr, own, groups, rows, stride_o, CHUNK: tl.constexpr):
    """First row of group `own` and the end of its rows: the maximum of the offsets before its own, and including it."""
    start, end = 0, 0
    for first in tl.range(0, own + 1, CHUNK):
        index = first + tl.arange(0, CHUNK)
        inside = (index <= own) & (index < groups)
        offset = tl.load(offsets_ptr + index.to(tl.int64) * stride_o, mask=inside, other=0)
        offset = tl.minimum(tl.maximum(offset, 0), rows).to(tl.int32)
        end = tl.maximum(end, tl.max(offset, 0))
        start = tl.maximum(start, tl.max(tl.where(index < own, offset, 0), 0))
    return start, end


@triton.jit
def _entry(word, group, row, end):
    """An entry of the table: (group, row, end, 0) at word 0, 1, 2, 3."""
    return tl.where(word == 0, group, tl.where(word == 1, row, tl.where(word == 2, end, 0)))


@triton.jit
def write_table(
    offsets_ptr,
    table_ptr,
    rows,
    groups,
    room,
    stride_o,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    TILES: tl.constexpr,
):
    """The body of a kernel that has these parameters, and is not specialised for rows, groups and room.

    CTA g writes the entry of group g and the entries of its row tiles. The last CTA writes the header, the entries of
    the rows past the last offset, and zeros into the unused part of the `room` for row tiles. So equal calls give equal
    tables.
    """
    own = tl.program_id(0)
    start, end = _own_rows(offsets_ptr, own, groups, rows, stride_o, CHUNK)
    tiles_before, place, carry, carry_start = 0, 0, 0, 0
    for first in tl.range(0, groups, CHUNK):
        index = first + tl.arange(0, CHUNK)
        ends = _ends(offsets_ptr, index, groups, rows, stride_o, carry)
        starts = _ends(offsets_ptr, index - 1, groups, rows, stride_o, carry_start)
        size = ends - starts
        tiles_before += tl.sum(tl.where(index < own, tl.cdiv(size, BLOCK_M), 0), 0)
        larger = (size > end - start) | ((size == end - start) & (index < own))
        place += tl.sum(((index < groups) & larger).to(tl.int32), 0)
        carry, carry_start = tl.max(ends, 0), tl.max(starts, 0)
    word, tile = tl.arange(0, ENTRY)[None, :], tl.arange(0, TILES)[:, None]
    tiles = tl.cdiv(tl.where(own == groups, rows, end) - start, BLOCK_M)
    after = table_ptr + HEADER + (groups + tiles_before) * ENTRY
    if own == groups:
        header = tl.arange(0, HEADER)
        tl.store(table_ptr + header, tl.where(header == 0, tiles_before + tiles, 0))
        own, end = -1, rows
        for first in tl.range(tiles, room - tiles_before, TILES):
            inside = (first + tile < room - tiles_before) & (word < ENTRY)
            tl.store(after + (first + tile) * ENTRY + word, tl.zeros([TILES, ENTRY], dtype=tl.int32), mask=inside)
    else:
        tl.store(table_ptr + HEADER + place * ENTRY + word, _entry(word, own, start, end))
    for first in tl.range(0, tiles, TILES):
        inside = (first + tile < tiles) & (word < ENTRY)
        entry = _entry(word, own, start + (first + tile) * BLOCK_M, end)
        tl.store(after + (first + tile) * ENTRY + word, entry, mask=inside)
