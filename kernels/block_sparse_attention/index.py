"""Compresses the mask into lists: the kept key blocks of each query block, and the kept query blocks of each key block.

The table holds the mask in compressed sparse row and in compressed sparse column format, padded to a fixed size. A
line of the table is the list of one row, or of one column, of the mask:

    count      number of kept blocks
    whole      rows only: the first `whole` blocks of the list need no mask. The others, at its end, are partial: the
               causal mask or the end of the keys crosses them
    order      line i holds the index of the line with the i-th largest count: the order in which CTAs process lines
    blocks     indices of the kept blocks in ascending order, then -1

Two small launches compute the lists, then the order, in which the rank of a line is the number of lines before it. A
mask of 64 by 64 blocks and 32 heads is 128 KiB and its table 1 MiB, so both launches are bound by latency. The host
reads nothing back, as lists have room for every block: there is no synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launch import Launch, Plans, lean, signature

HEADER = tl.constexpr(3)
LIST_LINES, CHUNK = 8, 128  # first launch: lines per CTA, and blocks of each line per iteration
ORDER_LINES = 64  # second launch: lines per CTA

_PLANS = Plans()

# `do_not_specialize`: Triton compiles no variants for values of 1 or multiples of 16.
PLAIN = ["queries", "keys", "rows", "columns", "parts", "all_parts", "heads", *(f"stride_m{axis}" for axis in "bhmn")]


class BlockIndex(NamedTuple):
    """A compressed mask, made by `block_index` for sequences of these lengths; on the mask's device.

    table  int32 [1 or B, 1 or Hq, nq · (3 + nk) + nk · (3 + nq)]: lines of rows, then of columns (see the module)
    """

    table: torch.Tensor
    queries: int
    keys: int
    block_size: int
    causal: bool

    @property
    def rows(self) -> torch.Tensor:
        """[1 or B, 1 or Hq, nq, 3 + nk]: count, whole, order and the kept key blocks of each query block."""
        rows, columns = _blocks(self.queries, self.block_size), _blocks(self.keys, self.block_size)
        return self.table[..., : rows * (3 + columns)].unflatten(-1, (rows, 3 + columns))

    @property
    def columns(self) -> torch.Tensor:
        """[1 or B, 1 or Hq, nk, 3 + nq]: the same for the query blocks that keep each key block."""
        rows, columns = _blocks(self.queries, self.block_size), _blocks(self.keys, self.block_size)
        return self.table[..., rows * (3 + columns) :].unflatten(-1, (columns, 3 + rows))


def _blocks(length: int, block: int) -> int:
    return (length + block - 1) // block


def table_size(queries: int, keys: int, block: int) -> int:
    """Returns the number of elements in the table of one head."""
    rows, columns = _blocks(queries, block), _blocks(keys, block)
    return rows * (3 + columns) + columns * (3 + rows)


@triton.jit
def _lists(
    mask_ptr,
    table_ptr,
    part,
    lines,
    length,
    queries,
    keys,
    stride_own,
    stride_other,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    LINES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Writes LINES lines, except their order. A line is a row of the mask if ROWS, else a column; it has up to `length`
    blocks."""
    own = (part * LINES + tl.arange(0, LINES))[:, None]
    table_ptr += own * (length + HEADER)
    mask_ptr += own.to(tl.int64) * stride_own
    count = tl.full([LINES, 1], 0, dtype=tl.int32)
    whole = tl.full([LINES, 1], 0, dtype=tl.int32)
    for start in tl.range(0, length, CHUNK):
        other = start + tl.arange(0, CHUNK)[None, :]
        here = (own < lines) & (other < length)
        row, column = own, other
        if not ROWS:
            row, column = other, own
        keep = tl.load(mask_ptr + other.to(tl.int64) * stride_other, mask=here, other=0) != 0
        inside = (column + 1) * BLOCK <= keys
        if CAUSAL:
            shift = keys - queries
            keep = keep & (column * BLOCK <= tl.minimum((row + 1) * BLOCK, queries) - 1 + shift)
            inside = inside & ((column + 1) * BLOCK - 1 <= row * BLOCK + shift)
        one = keep.to(tl.int32)
        before = count + tl.cumsum(one, 1) - one
        # For each dropped block a -1 is stored, from the end of the list backwards.
        slot = tl.where(keep, before, length - 1 - other + before)
        tl.store(table_ptr + HEADER + slot, tl.where(keep, other, -1), mask=here)
        count += tl.sum(one, 1, keep_dims=True)
        whole += tl.sum((keep & inside).to(tl.int32), 1, keep_dims=True)
    tl.store(table_ptr, count, mask=own < lines)
    tl.store(table_ptr + 1, whole, mask=own < lines)


@triton.jit(do_not_specialize=PLAIN)
def _block_sparse_attention_index_kernel(
    mask_ptr,
    table_ptr,
    queries,
    keys,
    rows,
    columns,
    parts,
    all_parts,
    heads,
    stride_mb,
    stride_mh,
    stride_mm,
    stride_mn,
    BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    LINES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The first `parts` CTAs of a head write the lists of rows, the others those of columns. `heads`: mask heads."""
    head, part = tl.program_id(0) // all_parts, tl.program_id(0) % all_parts
    mask_ptr += (head // heads).to(tl.int64) * stride_mb + (head % heads).to(tl.int64) * stride_mh
    table_ptr += head.to(tl.int64) * (2 * rows.to(tl.int64) * columns + HEADER * (rows + columns))
    if part < parts:
        _lists(
            mask_ptr, table_ptr, part, rows, columns, queries, keys, stride_mm, stride_mn,
            True, BLOCK, CAUSAL, LINES, CHUNK,
        )  # fmt: skip
    else:
        _lists(
            mask_ptr, table_ptr + rows * (columns + HEADER), part - parts, columns, rows, queries, keys, stride_mn,
            stride_mm, False, BLOCK, CAUSAL, LINES, CHUNK,
        )  # fmt: skip


@triton.jit
def _order(table_ptr, part, lines, width, LINES: tl.constexpr):
    """Computes the ranks of LINES lines among all, by decreasing count, ties in ascending order, and stores each line's
    index as `order` of the line at its rank."""
    own = part * LINES + tl.arange(0, LINES)
    count = tl.load(table_ptr + own * width, mask=own < lines, other=-1)
    rank = tl.full([LINES], 0, dtype=tl.int32)
    for start in tl.range(0, lines, LINES):
        other = start + tl.arange(0, LINES)
        theirs = tl.load(table_ptr + other * width, mask=other < lines, other=-1)
        ahead = theirs[None, :] > count[:, None]
        ahead = ahead | ((theirs[None, :] == count[:, None]) & (other[None, :] < own[:, None]))
        rank += tl.sum(ahead.to(tl.int32), 1)
    tl.store(table_ptr + rank * width + 2, own, mask=own < lines)


@triton.jit(do_not_specialize=PLAIN)
def _block_sparse_attention_order_kernel(table_ptr, rows, columns, parts, all_parts, LINES: tl.constexpr):
    """Stores the order of lines, the longest first, so that the CTAs that start last are short."""
    head, part = tl.program_id(0) // all_parts, tl.program_id(0) % all_parts
    table_ptr += head.to(tl.int64) * (2 * rows.to(tl.int64) * columns + HEADER * (rows + columns))
    if part < parts:
        _order(table_ptr, part, rows, columns + HEADER, LINES)
    else:
        _order(table_ptr + rows * (columns + HEADER), part - parts, columns, rows + HEADER, LINES)


def table_shape(mask: torch.Tensor, queries: int, keys: int, block: int) -> tuple[int, int, int]:
    """Returns the shape of the table of a mask [B, H, nq, nk]."""
    return mask.shape[0], mask.shape[1], table_size(queries, keys, block)


def _plan(
    mask: torch.Tensor, queries: int, keys: int, block: int, causal: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function of masks like this one (bool [B, H, nq, nk] of any strides, or a view of that memory in
    another shape). It returns their table, int32 [B, H, table_size]."""
    shape, device = table_shape(mask, queries, keys, block), mask.device
    batch, heads, rows, columns = mask.shape
    if batch * heads == 0 or rows == 0 or columns == 0:
        return lambda mask: torch.zeros(shape, dtype=torch.int32, device=device)
    strides = (heads * shape[2], shape[2], 1)
    parts = triton.cdiv(rows, LIST_LINES)
    all_parts = parts + triton.cdiv(columns, LIST_LINES)
    lists = Launch(
        _block_sparse_attention_index_kernel,
        (batch * heads * all_parts,),
        device,
        (queries, keys, rows, columns, parts, all_parts, heads, *mask.stride()),
        BLOCK=block,
        CAUSAL=causal,
        LINES=LIST_LINES,
        CHUNK=CHUNK,
        num_warps=4,
    )
    parts = triton.cdiv(rows, ORDER_LINES)
    all_parts = parts + triton.cdiv(columns, ORDER_LINES)
    order = Launch(
        _block_sparse_attention_order_kernel,
        (batch * heads * all_parts,),
        device,
        (rows, columns, parts, all_parts),
        LINES=ORDER_LINES,
        num_warps=4,
    )

    def run(mask: torch.Tensor) -> torch.Tensor:
        table = torch.empty_strided(shape, strides, dtype=torch.int32, device=device)
        lists(mask.view(torch.uint8), table)
        order(table)
        return table

    return run


def index_plan(
    mask: torch.Tensor, queries: int, keys: int, block: int, causal: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns `_plan` of the same arguments, cached if the mask is a plain tensor."""
    if not lean(mask):
        return _plan(mask, queries, keys, block, causal)
    key = (signature(mask), queries, keys, block, causal)
    return _PLANS.find(key) or _PLANS.keep(key, _plan(mask, queries, keys, block, causal))


def make_table(mask: torch.Tensor, queries: int, keys: int, block: int, causal: bool) -> torch.Tensor:
    """Returns the table, int32 [B, H, table_size], of a mask, bool [B, H, nq, nk] of any strides."""
    return index_plan(mask, queries, keys, block, causal)(mask)
