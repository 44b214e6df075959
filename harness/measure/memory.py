"""Memory of one call: its peak, what it saves for the backward, and what it leaks.

peak    the maximum allocated during a call, above what was allocated before, so inputs do not count. On a GPU it comes
        from PyTorch's allocator. On a CPU it is that of the whole process (Linux: VmHWM), after the C library has
        returned memory kept from earlier calls.
saved   the bytes that the forward keeps for the backward: the storages that its graph holds beyond those of the inputs,
        parameters and outputs. Each is counted once and whole, since a view keeps all of its storage alive. Saved
        tensors are seen by `torch.autograd.graph.saved_tensors_hooks`, and count as long as the graph holds them.
        Attributes that a custom `autograd.Function` keeps on its context are found on the graph's nodes. In a mode that
        runs its own backward it is the maximum saved at once, which includes outputs but not such attributes.
growth  what is allocated in addition after GROWTH_CALLS further calls, whose results are dropped: 0, unless it leaks.
        On a CPU it is the process's resident memory, which scatters by some hundred KiB. Not measured for calls of
        seconds.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, saved_tensors_hooks

GROWTH_CALLS = 10
DEPTH = 3  # of nested containers in a context's attribute
FROZEN_AT_START = gc.get_freeze_count()  # Python 3.12 freezes some of its own objects at start-up

Call = Callable[[], Any]


@dataclass(frozen=True)
class Memory:
    """Bytes; None where a figure does not exist or cannot be measured."""

    peak: int | None
    saved: int | None
    growth: int | None

    def to_record(self) -> dict[str, int | None]:
        """The fields of a row."""
        return {"peak_memory_bytes": self.peak, "saved_bytes": self.saved, "growth_bytes": self.growth}


def measure(run: Call, device: torch.device, saved: int | None = None, growth: bool = True) -> Memory:
    """Peak of `run`, which has been called before, and its growth if `growth`; `saved` is recorded as given."""
    return Memory(peak_bytes(run, device), saved, growth_bytes(run, device) if growth else None)


def peak_bytes(run: Call, device: torch.device) -> int | None:
    """The maximum that one call allocates above what was allocated before it; None on a CPU other than Linux's."""
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    _trim()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to what is resident now
        before = _resident("VmHWM")
        run()
        return _resident("VmHWM") - before
    except OSError:
        return None


def growth_bytes(run: Call, device: torch.device, calls: int = GROWTH_CALLS) -> int | None:
    """The increase in allocated memory over `calls` calls; None on a CPU other than Linux's."""
    before = _allocated(device)
    for _ in range(calls):
        run()
    after = _allocated(device)
    return None if before is None or after is None else after - before


def make_room(device: torch.device) -> None:
    """Releases the memory that PyTorch's allocator caches, where the device has less than that free. During the capture
    of a CUDA graph it cannot be released, and the graph's own memory could not be allocated."""
    gc.collect()
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if torch.cuda.mem_get_info(device)[0] < kept:
        torch.cuda.empty_cache()


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """In this block the garbage collector visits only objects made in it, which takes a tenth of the time."""
    if gc.get_freeze_count() > FROZEN_AT_START:  # frozen by other code
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _allocated(device: torch.device) -> int | None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)
    _trim()
    try:
        return _resident("VmRSS")
    except OSError:
        return None


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _trim() -> None:
    """Freed memory that the C library keeps would hide the next allocation."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)


def saved_bytes(forward: Call, given: Iterable[Any] = ()) -> int:
    """Bytes that the graph of the result of `forward`, called with gradients, keeps. `given` are its inputs: tensors,
    modules (all of whose parameters and buffers count as given), and anything else, which is ignored."""
    ledger = _Ledger(given)
    with torch.enable_grad(), saved_tensors_hooks(ledger.pack, _unpack):
        results = forward()
    outputs = list(_tensors(results))
    ledger.leave_out(outputs)
    for node in _nodes(outputs):
        if isinstance(node, BackwardCFunction):
            ledger.add(_tensors(vars(node)))
    return ledger.now


def most_saved_bytes(run: Call, given: Iterable[Any] = ()) -> int:
    """The maximum saved at once during `run`, which has its own forward and backward."""
    ledger = _Ledger(given)
    with saved_tensors_hooks(ledger.pack, _unpack):
        run()
    return ledger.most


class _Held:
    """The object that autograd keeps in place of a saved tensor; it notifies the ledger when the graph drops it."""

    def __init__(self, tensor: torch.Tensor, ledger: _Ledger) -> None:
        self.tensor, self._ledger = tensor, ledger

    def __del__(self) -> None:
        self._ledger.release(self.tensor)


def _unpack(held: _Held) -> torch.Tensor:
    return held.tensor


class _Ledger:
    """The storages that are held, each counted once, and their bytes: the present sum `now`, and its maximum."""

    def __init__(self, given: Iterable[Any]) -> None:
        self._left_out = {key for tensor in _tensors(list(given)) for key, _ in _storage(tensor)}
        self._held: dict[int, list[int]] = {}  # storage -> number of holders, its bytes
        self.now = self.most = 0

    def pack(self, tensor: torch.Tensor) -> _Held:
        self.add([tensor])
        return _Held(tensor, self)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        for key, size in (found for tensor in tensors for found in _storage(tensor)):
            if key not in self._left_out:
                entry = self._held.setdefault(key, [0, size])
                entry[0] += 1
                self.now += size if entry[0] == 1 else 0
                self.most = max(self.most, self.now)

    def release(self, tensor: torch.Tensor) -> None:
        for key, size in _storage(tensor):
            if key in self._held:
                self._held[key][0] -= 1
                if self._held[key][0] == 0:
                    del self._held[key]
                    self.now -= size

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """From now on these do not count, whatever holds them."""
        for key, _ in (found for tensor in tensors for found in _storage(tensor)):
            self._left_out.add(key)
            self.now -= self._held.pop(key, [0, 0])[1]


def _storage(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Identity and bytes of the storage behind a tensor; empty where it has none of its own, like a sparse one."""
    try:
        storage = tensor.untyped_storage()
        return [(storage._cdata, storage.nbytes())]
    except (NotImplementedError, RuntimeError):
        return []


def _tensors(value: Any, depth: int = DEPTH) -> Iterator[torch.Tensor]:
    """Yields the tensors in a value: in containers, dataclasses, and the parameters and buffers of modules."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif depth:
        inside: Iterable[Any] = ()
        if isinstance(value, dict):
            inside = value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            inside = value
        elif is_dataclass(value) and not isinstance(value, type):
            inside = [getattr(value, field.name, None) for field in fields(value)]
        for item in inside:
            yield from _tensors(item, depth - 1)


def _nodes(outputs: Iterable[torch.Tensor]) -> Iterator[Node]:
    """Yields every node of the graph behind some outputs."""
    queue = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = set(queue)
    while queue:
        node = queue.pop()
        yield node
        fresh = {before for before, _ in node.next_functions if before is not None} - seen
        seen |= fresh
        queue += fresh
