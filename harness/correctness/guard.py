"""Observes one call of an implementation: unwritten elements, writes outside its outputs, and work that finishes late.

poisoned      fresh memory holds NaN, so that an element which is never written is detected
Snapshot      inputs, and the memory around them, must be unchanged bit for bit
Allocations   outputs are allocated between guard zones, so that an out-of-bounds write is detected
rehearse      warm-up, so that the observed call behaves like any later one
observe       the results on the current stream when the call returns, and again once all work has finished
launches      whether any Triton kernel was launched
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch.utils._device import _device_constructors

from .. import execute
from .accuracy import Verdict, same_bits
from .layouts import PAD, POISON, view

Run = Callable[[], Sequence[torch.Tensor]]
# How long the GPU is delayed before a call, so that the host can enqueue all of it: 20 ms at 2 GHz. If the host took
# more than half of that, a second attempt has MARGIN times what it took, at most half a second. The gate of
# `measure.driver` is not suitable here: a stream that waits for a word in memory may block others that share its
# hardware queue, and so hide that they are not ordered after it.
DELAY_CYCLES = (40_000_000, 1_000_000_000)
MARGIN = 8
CYCLES_PER_SECOND = 2e9
END = 4096  # elements


@contextmanager
def poisoned() -> Iterator[None]:
    """Fills every torch.empty with NaN (integers: the largest value), through PyTorch's deterministic mode, with
    warnings instead of errors for ops without a deterministic form. The mode is restored afterwards.

    A call inside that asks for the mode gets the former one: an implementation with another path for the deterministic
    mode must take the one that a user's calls and the timed calls take."""
    with warnings.catch_warnings(), _filling(True), ExitStack() as stack:
        warnings.simplefilter("ignore")
        for name in ("_get_deterministic_algorithms", "_get_deterministic_algorithms_warn_only"):
            former = getattr(torch._C, name)()
            stack.enter_context(mock.patch.object(torch._C, name, lambda former=former: former))
        stack.enter_context(deterministic(warn_only=True))
        yield


@contextmanager
def deterministic(warn_only: bool = False) -> Iterator[None]:
    """Sets torch.use_deterministic_algorithms(True), and restores the former state."""
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@contextmanager
def _filling(wanted: bool) -> Iterator[None]:
    """Sets whether the deterministic mode fills fresh memory, and restores the former setting."""
    before = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = wanted  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = before  # type: ignore[attr-defined]


class Snapshot:
    """The bits of some tensors and of the whole storages that they view."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = {name: t for name, t in tensors.items() if isinstance(t, torch.Tensor)}
        self._storages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for tensor in self._tensors.values():
            whole = storage_bytes(tensor)
            self._storages.setdefault(whole.data_ptr(), (whole, whole.clone()))

    def verdict(self) -> Verdict:
        """The verdict, which names the tensor that was changed, or around which memory was written."""
        for name, tensor in self._tensors.items():
            whole, before = self._storages[storage_bytes(tensor).data_ptr()]
            if torch.equal(whole, before):
                continue
            old = view(before, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
            if same_bits([tensor], [old]):
                return Verdict(False, f"memory around {name} was written", "bounds")
            return Verdict(False, f"{name} was changed in place", "inputs")
        return Verdict(True)


def refill(tensors: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Writes new contents at the same addresses, without a change of autograd's version counters."""
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            tensor.data.copy_(values[name])


def refill_a_few(tensor: torch.Tensor, generator: torch.Generator, count: int = 8) -> None:
    """Permutes the first element of a contiguous tensor with some others, without autograd noticing and without device
    synchronisation."""
    if tensor.numel() > 1:
        flat = tensor.data.view(-1)
        flat = flat.view(torch.uint8) if flat.element_size() == 1 else flat  # few operators support fp8
        places = torch.randint(1, flat.numel(), (count,), device=tensor.device, generator=generator)
        places[0].zero_()
        flat[places] = flat[places.roll(1)]


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage that a tensor views, as bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


class Allocations:
    """While active, memory that Python code allocates through torch lies between guard zones of PAD poisoned bytes.

    It replaces torch.empty and its relatives, because a dispatch mode does not see inside a custom op.
    Memory that is allocated in other ways is not guarded.
    """

    FUNCTIONS = (
        "empty",
        "empty_like",
        "empty_strided",
        "zeros",
        "zeros_like",
        "ones",
        "ones_like",
        "full",
        "full_like",
    )
    METHODS = ("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full")

    def __init__(self) -> None:
        self._guarded: list[tuple[torch.Tensor, tuple[int, ...], int]] = []
        self._stack = ExitStack()
        self._full = torch.full

    def __enter__(self) -> Allocations:
        _device_constructors()  # `with torch.device(...)` affects the functions that the first call of this finds
        for owner, names in ((torch, self.FUNCTIONS), (torch.Tensor, self.METHODS)):
            for name in names:
                self._stack.enter_context(mock.patch.object(owner, name, self._standing_in_for(getattr(owner, name))))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _standing_in_for(self, allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def guarded(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = allocate(*args, **kwargs)
            plain = type(tensor) is torch.Tensor and tensor.device.type in ("cpu", "cuda") and not tensor.requires_grad
            plain = plain and "out" not in kwargs and not kwargs.get("pin_memory")
            return self._move(tensor) if plain and tensor.numel() else tensor

        return guarded

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.untyped_storage().nbytes()
        buffer = self._full((size + 2 * PAD,), POISON, dtype=torch.uint8, device=tensor.device)
        self._guarded.append((buffer, tuple(tensor.shape), size))
        offset = PAD // tensor.element_size() + int(tensor.storage_offset())
        return view(buffer, tensor.dtype, tensor.shape, tensor.stride(), offset).copy_(tensor)

    @property
    def bytes(self) -> int:
        """Bytes allocated, without the guard zones."""
        return sum(size for _, _, size in self._guarded)

    def verdict(self) -> Verdict:
        """The verdict, which names the shape of the allocation outside of which memory was written."""
        for buffer, shape, size in self._guarded:
            for zone, where in ((buffer[:PAD], "before"), (buffer[PAD + size :], "after")):
                if not bool((zone == POISON).all()):
                    return Verdict(False, f"memory {where} an allocation of shape {shape} was written", "bounds")
        return Verdict(True)


@dataclass(frozen=True)
class Observed:
    """The results of a call, with copies enqueued on the current stream when it returned: first of the last few
    elements of each (`ends`), then of everything (`copies`)."""

    results: tuple[torch.Tensor, ...]
    ends: tuple[torch.Tensor, ...]
    copies: tuple[torch.Tensor, ...]

    def verdict(self) -> Verdict:
        """Whether the results were complete when the call returned. Meaningful only after all work has finished."""
        ends = [_end(t) for t in self.results]
        if same_bits(self.results, self.copies) and same_bits(ends, self.ends):
            return Verdict(True)
        return Verdict(
            False, "the outputs changed after the call had returned: work on another stream or thread", "late"
        )


def _end(tensor: torch.Tensor) -> torch.Tensor:
    """At most END elements, the last in every dimension: usually what a kernel writes last."""
    while tensor.ndim > 1 and tensor.numel():
        tensor = tensor[-1]
    return tensor[-END:] if tensor.ndim else tensor


def _copies(results: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """`ends` and `copies` of Observed. The ends are a few bytes, so they are read before late work can have reached
    them even if it has started. They are expanded so that the copy is a kernel; a driver copy may start later."""
    ends = [_end(t.detach()) for t in results]
    return tuple(t.expand(2, *t.shape).clone()[0] for t in ends), tuple(t.detach().clone() for t in results)


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """The stream of all observations on that device. It is always the same stream, so that its memory is in the
    allocator's pool from the second time on: an allocation by the driver may wait for the whole GPU, which would hide
    a missing dependency."""
    return torch.cuda.Stream(device, priority=-1)


def rehearse(run: Run) -> None:
    """Prepares for `observe`, so that nothing happens there for the first time. It compiles, and allocates memory for
    two sets of results on every stream that `run` uses and on that of the observation, since one set may still be in
    use during the observed call. Inputs that an op updates in place have changed afterwards."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        run()
        return
    device = torch.cuda.current_device()
    stream, caller = _stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(caller)
    with torch.cuda.stream(stream):
        held = [execute.outputs(run()) for _ in range(2)]
        copies = [_copies(results) for results in held]
    torch.cuda.synchronize(device)
    del held, copies


def observe(run: Run, prepare: Callable[[], None] = lambda: None) -> Observed:
    """Calls `prepare` and `run`, copies the results at once, waits for all work.

    `prepare` puts the inputs into the state that the call is to find. If the host was too slow, `prepare` and `run` are
    called a second time, with a longer delay.

    On a GPU all of that is enqueued on a high-priority stream after a delay. Work that `run` puts on a stream of its
    own either waits for this stream, and then loses the race against the copies; or it does not wait, and then reads
    what was there before `prepare` (which should therefore refresh the inputs).
    """
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        prepare()
        results = execute.outputs(run())
        return Observed(results, *_copies(results))
    short, long = DELAY_CYCLES
    observed, seconds = _behind_a_delay(run, prepare, short)
    if seconds < 0.5 * short / CYCLES_PER_SECOND or not observed.verdict().ok:
        return observed
    # The correct result is in memory by now. It is kept alive: otherwise the next call could be given the same memory,
    # and would be correct before it has begun.
    return _behind_a_delay(run, prepare, min(long, int(MARGIN * seconds * CYCLES_PER_SECOND)))[0]


def _behind_a_delay(run: Run, prepare: Callable[[], None], cycles: int) -> tuple[Observed, float]:
    """The observation, and how long the host took to enqueue it."""
    device = torch.cuda.current_device()
    stream, caller = _stream(device), torch.cuda.current_stream(device)
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)
        prepare()
        results = execute.outputs(run())
        with _filling(False):  # filling the copies first would delay them past the race
            ends, copies = _copies(results)
    seconds = time.perf_counter() - start
    for index in {device, *(t.device.index for t in results if t.is_cuda)}:
        torch.cuda.synchronize(index)
    caller.wait_stream(stream)
    return Observed(results, ends, copies), seconds


@contextmanager
def launches() -> Iterator[list[str]]:
    """Yields a list that collects the names of the Triton (and Gluon) kernels launched, compiled or interpreted."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    seen: list[str] = []
    with ExitStack() as stack:
        for owner in (JITFunction, InterpretedFunction):
            stack.enter_context(mock.patch.object(owner, "run", _noting(owner.run, seen)))
        yield seen


def _noting(run: Callable[..., Any], seen: list[str]) -> Callable[..., Any]:
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(getattr(self, "__name__", "kernel"))
        return run(self, *args, **kwargs)

    return noted


def first_failure(*verdicts: Callable[[], Verdict]) -> Verdict:
    """The first verdict that is not ok, or the last one; later ones are not computed."""
    verdict = Verdict(True)
    for compute in verdicts:
        verdict = compute()
        if not verdict.ok:
            break
    return verdict
