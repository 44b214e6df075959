"""The table of addresses that lets one launch update many parameters, and its copy to the GPU.

The table has a row for each parameter: the addresses of its tensors, its size, its kind. `cta_rows` has, for each CTA,
the row that it works on. Both stay valid as long as the addresses do, so `PointerTables` keeps them.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, count, repeat
from typing import Any
from weakref import WeakValueDictionary

import torch
import triton.language as tl

from .launch import raw_stream

# The columns of the table. An absent tensor has the address 0.
COLUMNS = tl.constexpr(10)
PARAM, GRAD, EXP_AVG, EXP_AVG_SQ, MASTER, STEP, NUMEL, FIRST, KIND, SEQUENCE = (tl.constexpr(i) for i in range(10))

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

# How a parameter is written: the fp32 result rounded to its dtype; the fp32 master weight updated and rounded to it;
# the fp32 result rounded stochastically.
PLAIN, FROM_MASTER, STOCHASTIC = (tl.constexpr(i) for i in range(3))


@dataclass
class Tensors:
    """The tensors of one launch, on one device; each list is as long as `params` or empty. Tensors are dense, those of
    one parameter in the same memory order. `sequences` has the number of each parameter in the counter of Philox."""

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    exp_avgs: list[torch.Tensor]
    exp_avg_sqs: list[torch.Tensor]
    masters: list[torch.Tensor | None]
    steps: list[torch.Tensor]
    sequences: list[int]
    stochastic: bool

    def addresses(self) -> tuple[list[int], ...]:
        """In the order of the table's columns."""
        columns = (self.params, self.grads, self.exp_avgs, self.exp_avg_sqs, self.masters, self.steps)
        return tuple([0 if t is None else t.data_ptr() for t in column] for column in columns)

    def key(self) -> tuple[Any, ...]:
        """All that a table depends on."""
        dtypes = tuple(t.dtype for t in (*self.params, *self.grads))
        sizes = tuple(t.numel() for t in self.params)
        return (
            self.params[0].device,
            self.stochastic,
            tuple(self.sequences),
            sizes,
            dtypes,
            *map(tuple, self.addresses()),
        )

    def kind(self, index: int) -> tuple[Any, Any, int]:
        """Dtypes of parameter and gradient, and the rounding: what the kernel is specialised for."""
        dtype = self.params[index].dtype
        rounding = PLAIN
        if self.masters and self.masters[index] is not None:
            rounding = FROM_MASTER
        elif self.stochastic and dtype == torch.bfloat16:
            rounding = STOCHASTIC
        return TYPES[dtype], TYPES[self.grads[index].dtype], rounding.value


@dataclass(frozen=True)
class Table:
    """On the device: `rows` int64 [parameters, COLUMNS], `cta_rows` int32 [CTAs]. The column KIND is an index into
    `kinds`. `stream` is the CUDA stream of the copies to the device, `pinned` the host memory that they read where they
    are part of a CUDA graph."""

    rows: torch.Tensor
    cta_rows: torch.Tensor
    kinds: tuple[tuple[Any, Any, int], ...]
    stream: int
    pinned: tuple[torch.Tensor, ...]


class PointerTables:
    """The tables of an optimizer. One is built where an address is new, and used as long as all addresses stay.

    At most `capacity` are kept, more than one because the addresses of gradients may alternate. A table used during the
    capture of a CUDA graph is kept for good, because each replay reads it, and so is its pinned memory where the copy
    itself was captured. `built` counts the tables made.
    """

    def __init__(self, capacity: int = 8) -> None:
        self.capacity = capacity
        self.built = 0
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._latest: Any = None  # the entry of _kept that was used last
        self._cta_rows: WeakValueDictionary[Hashable, torch.Tensor] = WeakValueDictionary()
        self._in_graphs: dict[int, Table] = {}
        # An op of torch.library can take a number but not this object.
        self.handle = next(_handles)
        _by_handle[self.handle] = self

    @staticmethod
    def of(handle: int) -> PointerTables:
        """The tables of a handle; for 0 new ones, which keep only what a CUDA graph needs."""
        tables = _by_handle.get(handle)
        if tables is None:
            tables = PointerTables(capacity=0)
            tables._in_graphs = _in_graphs_without_tables
        return tables

    def __reduce__(self) -> tuple[Any, ...]:
        return PointerTables, (self.capacity,)  # a copy has tensors at other addresses

    def __len__(self) -> int:
        return len(self._kept)

    def __bool__(self) -> bool:
        return True

    def find(self, key: Hashable) -> Any:
        """What was kept under a key, or None."""
        found = self._kept.get(key)
        # Not where it is the latest already: the key is long, and a tuple is hashed in every look-up.
        if found is not None and found is not self._latest:
            with suppress(KeyError):  # another thread has removed it
                self._kept.move_to_end(key)
            self._latest = found
        return found

    def keep(self, key: Hashable, made: Any) -> None:
        """Keeps what launches with a table, and drops the least recently used. During the capture of a CUDA graph
        nothing is kept: the copies to the device are recorded and not made, so that the table is empty until the first
        replay."""
        if _capturing() or not self.capacity:
            return
        self._kept[key] = self._latest = made
        while len(self._kept) > self.capacity:
            with suppress(KeyError):  # another thread has removed it
                self._kept.popitem(last=False)

    def use(self, table: Table) -> None:
        """To be called before each launch that reads a table. Does not synchronise."""
        device = table.rows.device
        if device.type != "cuda" or not torch.cuda.is_initialized():  # an ahead-of-time build has no GPU
            return None
        if device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self.use(table)
        if _capturing():
            self._in_graphs[id(table)] = table
        elif raw_stream(device.index) != table.stream:
            _used_on_another_stream(table.rows, table.cta_rows)
        return None

    def build(self, tensors: Tensors, block: int) -> Table:
        """The table of these tensors, for CTAs of `block` elements, with their device current."""
        self.built += 1
        device = tensors.params[0].device
        sizes = [t.numel() for t in tensors.params]
        kinds: dict[tuple[Any, Any, int], int] = {}
        numbers = [kinds.setdefault(tensors.kind(i), len(kinds)) for i in range(len(sizes))]
        blocks = [-(-size // block) for size in sizes]
        firsts = accumulate(blocks, initial=0)
        columns = (*tensors.addresses(), sizes, firsts, numbers, tensors.sequences)
        cells = array("q", [x for row in zip(*(c or repeat(0) for c in columns), strict=False) for x in row])
        rows, *pinned = _upload(torch.frombuffer(cells, dtype=torch.int64).view(len(sizes), COLUMNS.value), device)
        # cta_rows depend only on the sizes, so that tables with other addresses share them.
        layout = (device, *blocks)
        cta_rows = self._cta_rows.get(layout)
        capturing = _capturing()
        if cta_rows is None:
            index = torch.arange(len(sizes), dtype=torch.int32)
            repeats = torch.tensor(blocks)
            cta_rows, *more = _upload(torch.repeat_interleave(index, repeats, output_size=sum(blocks)), device)
            pinned += more
            if not capturing:
                self._cta_rows[layout] = cta_rows
        elif device.type == "cuda" and not capturing:
            _used_on_another_stream(cta_rows)
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        return Table(rows, cta_rows, tuple(kinds), stream, tuple(pinned))


def _capturing() -> bool:
    """Whether the current stream is being captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


_handles = count(1)
# A few kilobytes, never freed, for each capture of a call without `tables`: the graph reads them at each replay, and
# its end is not known.
_in_graphs_without_tables: dict[int, Table] = {}
_by_handle: WeakValueDictionary[int, PointerTables] = WeakValueDictionary()


def _used_on_another_stream(*tensors: torch.Tensor) -> None:
    """Tells the caching allocator that the current stream reads the tensors, so that it does not reuse their memory too
    early."""
    for tensor in tensors:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _upload(host: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, ...]:
    """The tensor on the device, copied asynchronously, and during the capture of a CUDA graph the pinned memory that
    each replay copies from.

    Else that memory is given back here. PyTorch's caching host allocator does not reuse it before the copy has
    completed, which it learns from an event that it records when the memory is given back. Were that during a later
    capture, the event would be part of the graph, and each allocation of pinned memory would fail that asks for it
    ("CUDA error: invalid argument").
    """
    if device.type != "cuda":
        return (host.clone(),)
    pinned = torch.empty(host.shape, dtype=host.dtype, pin_memory=True).copy_(host)
    on_device = pinned.to(device, non_blocking=True)
    return (on_device, pinned) if _capturing() else (on_device,)
