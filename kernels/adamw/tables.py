"""The table of addresses that lets one launch update many parameters, and its copy to the GPU.

The table has one row per parameter: the addresses of its tensors, its size, its kind. `cta_rows` has, for each CTA, the
index of the row that it processes. Both stay valid as long as the addresses do, so `PointerTables` caches them.
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

# How a parameter is written: the fp32 result rounded to the parameter's dtype; the fp32 master weight updated, then
# rounded to the parameter; the fp32 result rounded stochastically.
PLAIN, FROM_MASTER, STOCHASTIC = (tl.constexpr(i) for i in range(3))


@dataclass
class Tensors:
    """The tensors of one launch, on one device. Each list is as long as `params` or empty. Tensors are dense, and those
    of a parameter have the same memory order. `sequences` has the index of each parameter in Philox's counter."""

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    exp_avgs: list[torch.Tensor]
    exp_avg_sqs: list[torch.Tensor]
    masters: list[torch.Tensor | None]
    steps: list[torch.Tensor]
    sequences: list[int]
    stochastic: bool

    def addresses(self) -> tuple[list[int], ...]:
        """The addresses of each list of tensors, in the order of the table's columns."""
        columns = (self.params, self.grads, self.exp_avgs, self.exp_avg_sqs, self.masters, self.steps)
        return tuple([0 if t is None else t.data_ptr() for t in column] for column in columns)

    def key(self) -> tuple[Any, ...]:
        """The key with everything that a table depends on."""
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
        """(dtype of the parameter, dtype of the gradient, rounding), for which the kernel is specialised."""
        dtype = self.params[index].dtype
        rounding = PLAIN
        if self.masters and self.masters[index] is not None:
            rounding = FROM_MASTER
        elif self.stochastic and dtype == torch.bfloat16:
            rounding = STOCHASTIC
        return TYPES[dtype], TYPES[self.grads[index].dtype], rounding.value


@dataclass(frozen=True)
class Table:
    """A table on the device: `rows` int64 [parameters, COLUMNS], `cta_rows` int32 [CTAs]. The column KIND is an index
    into `kinds`. `stream` is the CUDA stream of the copies to the device, and the event `copied` follows them. If they
    are part of a CUDA graph there is no event, and `pinned` is the host memory that they read."""

    rows: torch.Tensor
    cta_rows: torch.Tensor
    kinds: tuple[tuple[Any, Any, int], ...]
    stream: int
    copied: torch.cuda.Event | None
    pinned: tuple[torch.Tensor, ...]


class PointerTables:
    """A cache of tables for an optimizer. A table is built for new addresses, and reused while all addresses stay the
    same.

    At most `capacity` tables are cached, more than one because the addresses of gradients may alternate. A table used
    during the capture of a CUDA graph is never freed, because each replay reads it. Neither is its pinned memory, if
    the copy itself was captured. `built` counts the tables built.
    """

    def __init__(self, capacity: int = 8) -> None:
        self.capacity = capacity
        self.built = 0
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._latest: Any = None  # the entry of _kept that was used last
        self._cta_rows: WeakValueDictionary[Hashable, Table] = WeakValueDictionary()  # the latest table with these
        self._in_graphs: dict[int, Table] = {}
        # An op of torch.library takes this number, as it cannot take the object.
        self.handle = next(_handles)
        _by_handle[self.handle] = self

    @staticmethod
    def of(handle: int) -> PointerTables:
        """The PointerTables of a handle. For handle 0 a new one, which keeps only the tables that CUDA graphs need."""
        tables = _by_handle.get(handle)
        if tables is None:
            tables = PointerTables(capacity=0)
            tables._in_graphs = _in_graphs_without_tables
        return tables

    def __reduce__(self) -> tuple[Any, ...]:
        return PointerTables, (self.capacity,)  # without tables: a copy has tensors at other addresses

    def __len__(self) -> int:
        return len(self._kept)

    def __bool__(self) -> bool:
        return True

    def find(self, key: Hashable) -> Any:
        """The cached entry of a key, or None."""
        found = self._kept.get(key)
        # Skipped for the latest entry: the key is a long tuple, which is hashed again in every look-up.
        if found is not None and found is not self._latest:
            with suppress(KeyError):  # another thread has removed it
                self._kept.move_to_end(key)
            self._latest = found
        return found

    def keep(self, key: Hashable, made: Any) -> None:
        """Caches an object that launches with a table, and evicts the least recently used one. During the capture of a
        CUDA graph nothing is cached: the copies to the device are only recorded, so the table is empty until the first
        replay."""
        if _capturing() or not self.capacity:
            return
        self._kept[key] = self._latest = made
        while len(self._kept) > self.capacity:
            with suppress(KeyError):  # another thread has removed it
                self._kept.popitem(last=False)

    def use(self, table: Table) -> None:
        """Makes a table safe to read on the current stream; call it before each launch that reads the table. Does not
        synchronise."""
        device = table.rows.device
        if device.type != "cuda" or not torch.cuda.is_initialized():  # an ahead-of-time build has no GPU
            return None
        if device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self.use(table)
        if _capturing():
            self._in_graphs[id(table)] = table
        else:
            _order_after_copies(table)
        return None

    def build(self, tensors: Tensors, block: int) -> Table:
        """Builds the table of these tensors, for CTAs of `block` elements. Their device must be current."""
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
        # cta_rows depends only on the sizes, so tables with other addresses share it.
        layout = (device, *blocks)
        found, capturing = self._cta_rows.get(layout), _capturing()
        if found is None:
            index = torch.arange(len(sizes), dtype=torch.int32)
            repeats = torch.tensor(blocks)
            cta_rows, *more = _upload(torch.repeat_interleave(index, repeats, output_size=sum(blocks)), device)
            pinned += more
        else:
            cta_rows = found.cta_rows
            if device.type == "cuda" and not capturing:
                _order_after_copies(found)
        stream, copied = 0, None
        if device.type == "cuda":
            current = torch.cuda.current_stream(device)
            stream = current.cuda_stream
            if torch.cuda.is_initialized() and not capturing:  # an ahead-of-time build has no GPU
                copied = current.record_event()
        table = Table(rows, cta_rows, tuple(kinds), stream, copied, tuple(pinned))
        if not capturing:
            self._cta_rows[layout] = table
        return table


def _capturing() -> bool:
    """Whether the current stream is being captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


_handles = count(1)
# A few kilobytes per capture of a call without `tables`. They are never freed: the graph reads them at each replay, and
# nothing tells when the graph is destroyed.
_in_graphs_without_tables: dict[int, Table] = {}
_by_handle: WeakValueDictionary[int, PointerTables] = WeakValueDictionary()


def _order_after_copies(table: Table) -> None:
    """Before the current stream reads a table that another stream copied to the device: it waits for the copies, and
    the caching allocator records that it reads the table, so that the memory is not reused too early."""
    device = table.rows.device
    if raw_stream(device.index) == table.stream:
        return
    stream = torch.cuda.current_stream(device)
    if table.copied is not None:
        stream.wait_event(table.copied)
    for tensor in (table.rows, table.cta_rows):
        tensor.record_stream(stream)


def _upload(host: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, ...]:
    """The tensor on the device, copied asynchronously. During the capture of a CUDA graph also the pinned memory from
    which each replay copies.

    Otherwise the pinned memory is freed here. PyTorch's caching host allocator does not reuse it before the copy has
    completed: it records an event when the memory is freed. If the memory were freed during a later capture, the event
    would be part of that graph, and each later allocation of pinned memory that queries the event would fail ("CUDA
    error: invalid argument").
    """
    if device.type != "cuda":
        return (host.clone(),)
    pinned = torch.empty(host.shape, dtype=host.dtype, pin_memory=True).copy_(host)
    on_device = pinned.to(device, non_blocking=True)
    return (on_device, pinned) if _capturing() else (on_device,)
