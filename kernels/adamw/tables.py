"""The table by which one launch finds the tensors of many parameters, and how it comes to the GPU.

A row for each parameter: the addresses of its tensors and what else the kernel must know of it. Beside it `owners`: for
each CTA the row that it works on. Both are valid for as long as the addresses are, so `PointerTables` keeps them.
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
PARAM, GRAD, EXP_AVG, EXP_AVG_SQ, MASTER, STEP, NUMEL, FIRST, KIND, STREAM = (tl.constexpr(i) for i in range(10))

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

# What is written to a parameter: the fp32 result rounded to its dtype; that of its fp32 master; one rounded at random.
PLAIN, FROM_MASTER, STOCHASTIC = (tl.constexpr(i) for i in range(3))


@dataclass
class Tensors:
    """The tensors of one launch, on one device, each column as long as `params` or empty. Dense, and the tensors of one
    parameter in the same memory order. `streams` numbers the parameters for the random rounding."""

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    exp_avgs: list[torch.Tensor]
    exp_avg_sqs: list[torch.Tensor]
    masters: list[torch.Tensor | None]
    steps: list[torch.Tensor]
    streams: list[int]
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
            tuple(self.streams),
            sizes,
            dtypes,
            *map(tuple, self.addresses()),
        )

    def kind(self, index: int) -> tuple[Any, Any, int]:
        """Types of parameter and gradient, and how the parameter comes about: what the kernel is specialised for."""
        dtype = self.params[index].dtype
        how = PLAIN
        if self.masters and self.masters[index] is not None:
            how = FROM_MASTER
        elif self.stochastic and dtype == torch.bfloat16:
            how = STOCHASTIC
        return TYPES[dtype], TYPES[self.grads[index].dtype], how.value


@dataclass(frozen=True)
class Table:
    """On the device: `rows` int64 [parameters, COLUMNS], `owners` int32 [CTAs]. `kinds` is what the column KIND counts
    through, `stream` the one on which the copies were queued, `pinned` the host memory that they read."""

    rows: torch.Tensor
    owners: torch.Tensor
    kinds: tuple[tuple[Any, Any, int], ...]
    stream: int
    pinned: tuple[torch.Tensor, ...]


class PointerTables:
    """The tables of an optimizer: built when an address is new, used again while all of them stay.

    `capacity` is how many are kept: more than one, since the memory of the gradients may alternate. A table that a CUDA
    graph has seen is kept for good, because each replay reads it, and the host memory behind it where the copy itself
    was captured. `built` counts the tables made.
    """

    def __init__(self, capacity: int = 8) -> None:
        self.capacity = capacity
        self.built = 0
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._latest: Any = None  # of them, the one used last
        self._owners: WeakValueDictionary[Hashable, torch.Tensor] = WeakValueDictionary()
        self._in_graphs: dict[int, Table] = {}
        # A handle is what an op of torch.library can take in the place of an object.
        self.handle = next(_handles)
        _by_handle[self.handle] = self

    @staticmethod
    def of(handle: int) -> PointerTables:
        """The tables with that handle; for 0 new ones, which keep nothing but what a graph needs."""
        tables = _by_handle.get(handle)
        if tables is None:
            tables = PointerTables(capacity=0)
            tables._in_graphs = _in_graphs_of_nobody
        return tables

    def __reduce__(self) -> tuple[Any, ...]:
        return PointerTables, (self.capacity,)  # the tensors of a copy lie elsewhere

    def __len__(self) -> int:
        return len(self._kept)

    def __bool__(self) -> bool:
        return True

    def find(self, key: Hashable) -> Any:
        """What was kept under a key, or None."""
        found = self._kept.get(key)
        # Only where it is not the latest already: the key is long, and a tuple is hashed anew each time.
        if found is not None and found is not self._latest:
            with suppress(KeyError):  # another thread was faster
                self._kept.move_to_end(key)
            self._latest = found
        return found

    def keep(self, key: Hashable, made: Any) -> None:
        """Enters what launches with a table; the oldest goes first. During the capture of a CUDA graph nothing is kept:
        the copies to the device are recorded, not made, and what they fill holds nothing until the first replay."""
        if _capturing():
            return
        self._kept[key] = self._latest = made
        while len(self._kept) > self.capacity:
            with suppress(KeyError):  # another thread was faster
                self._kept.popitem(last=False)

    def use(self, table: Table) -> None:
        """To be called before each launch that reads a table. Never waits for the GPU."""
        device = table.rows.device
        if device.type != "cuda" or not torch.cuda.is_initialized():  # an ahead-of-time build has no GPU
            return None
        if device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self.use(table)
        if _capturing():
            self._in_graphs[id(table)] = table
        elif raw_stream(device.index) != table.stream:
            _used_on_another_stream(table.rows, table.owners)
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
        columns = (*tensors.addresses(), sizes, firsts, numbers, tensors.streams)
        cells = array("q", [x for row in zip(*(c or repeat(0) for c in columns), strict=False) for x in row])
        rows, *pinned = _upload(torch.frombuffer(cells, dtype=torch.int64).view(len(sizes), COLUMNS.value), device)
        # A change of addresses alone leaves the owners as they are.
        layout = (device, *blocks)
        owners = self._owners.get(layout)
        capturing = _capturing()
        if owners is None:
            index = torch.arange(len(sizes), dtype=torch.int32)
            repeats = torch.tensor(blocks)
            owners, *more = _upload(torch.repeat_interleave(index, repeats, output_size=sum(blocks)), device)
            pinned += more
            if not capturing:
                self._owners[layout] = owners
        elif device.type == "cuda" and not capturing:
            _used_on_another_stream(owners)
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        return Table(rows, owners, tuple(kinds), stream, tuple(pinned))


def _capturing() -> bool:
    """Whether the current stream is being captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


_handles = count(1)
# A few kilobytes for each capture of a call that was given no tables, for good: the graph reads them at each replay,
# and nobody says when it is gone.
_in_graphs_of_nobody: dict[int, Table] = {}
_by_handle: WeakValueDictionary[int, PointerTables] = WeakValueDictionary()


def _used_on_another_stream(*tensors: torch.Tensor) -> None:
    """Tells the allocator, which would otherwise give the memory away while that stream still reads it."""
    for tensor in tensors:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _upload(host: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, ...]:
    """The tensor on the device and the pinned memory that it comes from: a copy from there does not hold the host up.
    PyTorch's caching host allocator does not give that memory away before the copy is made."""
    if device.type != "cuda":
        return (host.clone(),)
    pinned = torch.empty(host.shape, dtype=host.dtype, pin_memory=True).copy_(host)
    return pinned.to(device, non_blocking=True), pinned
