"""Memory of one call: its peak, what it saves for the backward, and what it leaks.

peak    the most that is allocated during a call, above what was there before it, so inputs do not count. On a GPU
        PyTorch's allocator knows it; on a CPU it is that of the whole process (Linux: VmHWM), after the C library has
        given back what it kept of earlier calls.
saved   the bytes that the forward keeps for the backward: the storages that its graph holds beyond those of the inputs,
        parameters and outputs, each counted once and whole, since a view keeps all of its storage alive. Saved tensors
        are seen by `torch.autograd.graph.saved_tensors_hooks`, and count as long as the graph holds them; what a custom
        `autograd.Function` keeps as attributes of its context is found on the graph's nodes. In a mode that runs its
        own backward it is the most that was saved at once, outputs included and such attributes not.
growth  what is allocated more after GROWTH_CALLS further calls, whose results are dropped: 0, unless it leaks. On a CPU
        it is the process's resident memory, which scatters by some hundred KiB. Not of calls of seconds.
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
DEPTH = 3  # of containers in an attribute of a context
FROZEN_AT_START = gc.get_freeze_count()  # Python 3.12 freezes some of its own objects before it begins

Call = Callable[[], Any]


@dataclass(frozen=True)
class Memory:
    """Bytes; None where a figure does not exist or cannot be had."""

    peak: int | None
    saved: int | None
    growth: int | None

    def to_record(self) -> dict[str, int | None]:
        """The fields of a row."""
        return {"peak_memory_bytes": self.peak, "saved_bytes": self.saved, "growth_bytes": self.growth}


def measure(run: Call, device: torch.device, saved: int | None = None, growth: bool = True) -> Memory:
    """Peak and, if `growth`, that of `run`, which has been called before; `saved` is entered as it is."""
    return Memory(peak_bytes(run, device), saved, growth_bytes(run, device) if growth else None)


def peak_bytes(run: Call, device: torch.device) -> int | None:
    """The most that one call takes above what was there before it; None on a CPU other than Linux's."""
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
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far becomes what is resident now
        before = _resident("VmHWM")
        run()
        return _resident("VmHWM") - before
    except OSError:
        return None


def growth_bytes(run: Call, device: torch.device, calls: int = GROWTH_CALLS) -> int | None:
    """What is allocated more after so many calls than before them; None on a CPU other than Linux's."""
    before = _allocated(device)
    for _ in range(calls):
        run()
    after = _allocated(device)
    return None if before is None or after is None else after - before


def make_room(device: torch.device) -> None:
    """Gives back what PyTorch's allocator keeps for later, where the device has less than that left. While a CUDA graph
    is captured it cannot be given back, and the graph's own memory would be lacking."""
    gc.collect()
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if torch.cuda.mem_get_info(device)[0] < kept:
        torch.cuda.empty_cache()


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Within the block a collection looks at what was made in it alone, and takes a tenth of the time."""
    if gc.get_freeze_count() > FROZEN_AT_START:  # somebody else's
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
    """What the graph of the result of `forward`, called with gradients, keeps. `given` are its inputs: tensors, modules
    (all of whose parameters and buffers count as given), and anything else, which is left out."""
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
    """The most that is saved at once during `run`, which has its own forward and backward."""
    ledger = _Ledger(given)
    with saved_tensors_hooks(ledger.pack, _unpack):
        run()
    return ledger.most


class _Held:
    """What autograd keeps in place of a saved tensor; when the graph drops it, the ledger knows."""

    def __init__(self, tensor: torch.Tensor, ledger: _Ledger) -> None:
        self.tensor, self._ledger = tensor, ledger

    def __del__(self) -> None:
        self._ledger.release(self.tensor)


def _unpack(held: _Held) -> torch.Tensor:
    return held.tensor


class _Ledger:
    """Storages that are held, each once, and their bytes: `now`, and the most there were."""

    def __init__(self, given: Iterable[Any]) -> None:
        self._left_out = {key for tensor in _tensors(list(given)) for key, _ in _storage(tensor)}
        self._held: dict[int, list[int]] = {}  # storage -> how many hold it, its bytes
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
        """From now on these do not count, whoever holds them."""
        for key, _ in (found for tensor in tensors for found in _storage(tensor)):
            self._left_out.add(key)
            self.now -= self._held.pop(key, [0, 0])[1]


def _storage(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Identity and bytes of the storage behind a tensor; nothing where it has none of its own, as a sparse one."""
    try:
        storage = tensor.untyped_storage()
        return [(storage._cdata, storage.nbytes())]
    except (NotImplementedError, RuntimeError):
        return []


def _tensors(value: Any, depth: int = DEPTH) -> Iterator[torch.Tensor]:
    """The tensors in a value: containers, dataclasses, and the parameters and buffers of modules."""
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
    """Every node of the graph behind some outputs."""
    queue = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = set(queue)
    while queue:
        node = queue.pop()
        yield node
        fresh = {before for before, _ in node.next_functions if before is not None} - seen
        seen |= fresh
        queue += fresh
