"""Observes one call of an implementation: elements left unwritten, writes outside its outputs, and work that ends late.

poisoned      fresh memory holds NaN, so that an element which is never written shows
Snapshot      inputs, and the memory around them, must come back bit for bit
Allocations   outputs are allocated between guard zones, so that a write past their end shows
rehearse      warm-up, so that the observed call is like any later one
observe       the results as they are on the current stream when the call returns, and once everything has ended
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
# How long the GPU is kept from starting on a call until the host has enqueued all of it: 20 ms at 2 GHz, and once more
# for half a second where a busy host took more than half of that. The gate of `measure.driver` is no use here: a stream
# that waits for a word in memory may hold back others that share its hardware queue, and so hide that they did not
# wait.
DELAY_CYCLES = (40_000_000, 1_000_000_000)
CYCLES_PER_SECOND = 2e9
END = 4096  # elements


@contextmanager
def poisoned() -> Iterator[None]:
    """Every torch.empty is filled with NaN (integers: the largest value). PyTorch's deterministic mode does that, with
    warnings in place of errors for ops that have no deterministic form; it is left as it was found."""
    with warnings.catch_warnings(), _filling(True), deterministic(warn_only=True):
        warnings.simplefilter("ignore")
        yield


@contextmanager
def deterministic(warn_only: bool = False) -> Iterator[None]:
    """torch.use_deterministic_algorithms(True), and back to what was there."""
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@contextmanager
def _filling(wanted: bool) -> Iterator[None]:
    """Whether the deterministic mode fills fresh memory."""
    before = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = wanted  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = before  # type: ignore[attr-defined]


class Snapshot:
    """The bits of some tensors and of the whole storages that they are views of."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = {name: t for name, t in tensors.items() if isinstance(t, torch.Tensor)}
        self._storages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for tensor in self._tensors.values():
            whole = storage_bytes(tensor)
            self._storages.setdefault(whole.data_ptr(), (whole, whole.clone()))

    def verdict(self) -> Verdict:
        """Names the tensor that was changed, or around which memory was."""
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
    """New contents at the same addresses. Autograd's version counters do not change: only the values do."""
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            tensor.data.copy_(values[name])


def refill_a_few(tensor: torch.Tensor, generator: torch.Generator, count: int = 8) -> None:
    """The first element of a contiguous tensor and some others change places, unseen by autograd, without a wait for
    the device."""
    if tensor.numel() > 1:
        flat = tensor.data.view(-1)
        flat = flat.view(torch.uint8) if flat.element_size() == 1 else flat  # few operators take fp8
        places = torch.randint(1, flat.numel(), (count,), device=tensor.device, generator=generator)
        places[0].zero_()
        flat[places] = flat[places.roll(1)]


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage that a tensor is a view of."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


class Allocations:
    """While it is active, what Python code allocates through torch lies between guard zones of PAD poisoned bytes.

    It replaces torch.empty and its relatives, because a dispatch mode does not see inside a custom op.
    Memory that is allocated otherwise is not guarded.
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
        _device_constructors()  # `with torch.device(...)` acts on the functions that the first call of this finds
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
        """What was allocated, without the guard zones."""
        return sum(size for _, _, size in self._guarded)

    def verdict(self) -> Verdict:
        """Names the shape of the allocation outside which was written."""
        for buffer, shape, size in self._guarded:
            for zone, where in ((buffer[:PAD], "before"), (buffer[PAD + size :], "after")):
                if not bool((zone == POISON).all()):
                    return Verdict(False, f"memory {where} an allocation of shape {shape} was written", "bounds")
        return Verdict(True)


@dataclass(frozen=True)
class Observed:
    """What a call returned, and copies of it made on the current stream at the moment when it did: of a few last
    elements, and after that of everything."""

    results: tuple[torch.Tensor, ...]
    ends: tuple[torch.Tensor, ...]
    copies: tuple[torch.Tensor, ...]

    def verdict(self) -> Verdict:
        """Whether the results were complete when the call returned. Says nothing unless all work has ended since."""
        ends = [_end(t) for t in self.results]
        if same_bits(self.results, self.copies) and same_bits(ends, self.ends):
            return Verdict(True)
        return Verdict(
            False, "the outputs changed after the call had returned: work on another stream or thread", "late"
        )


def _end(tensor: torch.Tensor) -> torch.Tensor:
    """At most END elements, the last in every dimension: what a kernel writes at the very end, as a rule."""
    while tensor.ndim > 1 and tensor.numel():
        tensor = tensor[-1]
    return tensor[-END:] if tensor.ndim else tensor


def _copies(results: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """`ends` and `copies` of Observed. The ends are few bytes, read before late work can have come that far even if it
    has started. That they are expanded makes the copy a kernel; copies by the driver may start later."""
    ends = [_end(t.detach()) for t in results]
    return tuple(t.expand(2, *t.shape).clone()[0] for t in ends), tuple(t.detach().clone() for t in results)


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """The stream of all observations on that device. One, so that its memory is there from the second time on: to get
    some from the driver may wait for the whole GPU, and so hide that something did not wait."""
    return torch.cuda.Stream(device, priority=-1)


def rehearse(run: Run) -> None:
    """To be called before `observe`, so that nothing happens there for the first time. It compiles, and gives every
    stream that `run` uses, and that of the observation, the memory for two sets of results, of which the observed call
    may find one in use. The inputs that an op updates in place are others afterwards."""
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

    `prepare` puts the inputs into the state that the call is to find. It may be called, as `run` may, a second time:
    with a longer delay, if the host was too slow.

    On a GPU all of that is enqueued on a high-priority stream behind a delay. So work that `run` puts on a stream of
    its own either waits for this one, and then loses the race against the copies, or does not, and then reads what was
    there before `prepare` (refresh the inputs in it).
    """
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        prepare()
        results = execute.outputs(run())
        return Observed(results, *_copies(results))
    short, long = DELAY_CYCLES
    observed, seconds = _behind_a_delay(run, prepare, short)
    if seconds < 0.5 * short / CYCLES_PER_SECOND or not observed.verdict().ok:
        return observed
    # The right answer is in memory by now. It is kept there, lest the next call be given the same memory and so be
    # right before it has begun.
    return _behind_a_delay(run, prepare, long)[0]


def _behind_a_delay(run: Run, prepare: Callable[[], None], cycles: int) -> tuple[Observed, float]:
    """What was observed, and how long the host took to enqueue it."""
    device = torch.cuda.current_device()
    stream, caller = _stream(device), torch.cuda.current_stream(device)
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)
        prepare()
        results = execute.outputs(run())
        with _filling(False):  # copies that are filled first would come too late for the race
            ends, copies = _copies(results)
    seconds = time.perf_counter() - start
    for index in {device, *(t.device.index for t in results if t.is_cuda)}:
        torch.cuda.synchronize(index)
    caller.wait_stream(stream)
    return Observed(results, ends, copies), seconds


@contextmanager
def launches() -> Iterator[list[str]]:
    """The names of the Triton (and Gluon) kernels that are launched meanwhile, compiled or interpreted."""
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
