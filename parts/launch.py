"""Eager calls with little host time: which calls may skip torch.library, launch plans, and launches of Triton kernels.

A public function asks `lean` whether its tensors are plain ones and nothing traces or transforms the call. If so, the
call goes to a launch plan, which holds the kernel, the configuration, the grid and all arguments but the tensors. Plans
are cached in `Plans` by key: the `signature` of each tensor, and the options. All other calls go through torch.library.
A plan launches through `Launch`, which calls the compiled kernel's launcher directly. Triton's `kernel[grid](...)`
would bind and hash the arguments again: 16 us of host time instead of 5.5 us, on the host of an H200.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
import triton
from torch.autograd import forward_ad

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_ALIGNMENT = 16  # bytes: what Triton specialises a pointer for, and what TMA and 16-byte loads need

# Called on every launch. Bound to module names, because looking up a dotted name takes longer than the function itself.
_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transformed = torch._C._are_functorch_transforms_active
_traced = torch._C._get_tracing_state
_batched = torch._C._functorch.is_legacy_batchedtensor  # of torch.autograd.grad(..., is_grads_batched=True)
# A PyTorch without CUDA has neither function. There only the ahead-of-time build calls them, for device 0.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)

# Triton releases whose launcher `Launch` can call directly. With any other it uses kernel[grid](...).
_TRITON, _KNOWN = ".".join(triton.__version__.split(".")[:2]), ("3.6", "3.7")
_RUNTIME = triton.knobs.runtime


def lean(first: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether this is an eager call on plain tensors. False under torch.compile, export, a functorch transform, forward
    AD, torch.jit.trace, and a dispatch or function mode. False for tensor subclasses, tensors with the negative bit,
    and batched gradients."""
    if (
        _compiling()  # first, because torch.compile cannot trace what follows
        or _dispatch_modes()
        or _function_modes()
        or _transformed()
        or _traced() is not None
        or forward_ad._current_level >= 0
        or type(first) not in _PLAIN
        or first.is_neg()
        or _batched(first)
    ):
        return False
    for tensor in others:  # a loop, because a generator would cost as much as all of the above
        if tensor is not None and (type(tensor) not in _PLAIN or tensor.is_neg() or _batched(tensor)):
            return False
    return True


def signature(tensor: torch.Tensor | None) -> Hashable:
    """The properties of a tensor that a plan may depend on: shape, strides, dtype, device, and 16-byte alignment."""
    if tensor is None:
        return None
    aligned = tensor.data_ptr() % _ALIGNMENT == 0
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, aligned


_EVERY: list[Plans] = []  # of this folder; the harness counts and drops them


def forget() -> None:
    """Drops every plan of this folder. Call it after replacing a `pick_*` function, as `tune` and tests do."""
    for plans in _EVERY:
        plans.clear()


class Plans(dict):
    """A cache of at most `size` plans by key, evicted first in, first out. Safe to share between threads."""

    def __init__(self, size: int = 1024) -> None:
        super().__init__()
        self.size = size
        _EVERY.append(self)

    def find(self, key: Hashable) -> Any:
        """The plan of a key, or None. Also None if an option is not hashable; the argument checks then reject it."""
        try:
            return self.get(key)
        except TypeError:
            return None

    def keep(self, key: Hashable, plan: Any) -> Any:
        """Stores a plan and returns it."""
        while len(self) >= self.size:
            try:
                del self[next(iter(self))]
            except (KeyError, RuntimeError, StopIteration):  # another thread has removed it
                continue
        self[key] = plan
        return plan


class Launch:
    """A launch of a Triton kernel in which only the first arguments change from call to call.

        kernel[grid](*arguments of the call, *fixed, **options)

    Arguments of a call are tensors, None and floats. Integers are `fixed`, because Triton specialises a kernel for
    their values. Tensors must agree with those of the first call in dtype and in 16-byte alignment, which the key of a
    plan ensures. The kernel that the first call compiles reads other tensors wrongly, or fails with "misaligned
    address". Triton's interpreter would accept them, so there they raise AssertionError. The first call goes through
    Triton, which compiles the kernel. Later calls use the compiled kernel's launcher directly. They go through Triton
    if a hook is installed, for example by a profiler, or if the Triton release is not in _KNOWN.
    """

    __slots__ = ("_device", "_fixed", "_grid", "_held", "_kernel", "_options")

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], device: torch.device, fixed: tuple[Any, ...], **options: Any
    ) -> None:
        self._kernel, self._grid, self._fixed, self._options = kernel, grid, fixed, options
        self._device = device.index if device.type == "cuda" else None
        self._held: tuple[Any, ...] | None = None

    def __call__(self, *arguments: Any) -> None:
        device = self._device
        if device is not None and device != _current_device():
            with torch.cuda.device(device):
                return self(*arguments)
        held = self._held
        if held is None or device is None or _hooked() or self._kernel.pre_run_hooks:
            if device is None:
                kinds = tuple(map(_kind, arguments))
                assert held in (None, kinds), f"{self._kernel}: compiled for {held}, called with {kinds}"
                self._held = kinds
            compiled = self._kernel[self._grid](*arguments, *self._fixed, **self._options)
            if held is None and device is not None:
                self._held = self._hold(compiled, len(arguments))
            return None
        call, x, y, z, launched, rest = held
        return call(x, y, z, raw_stream(device), *launched, *arguments, *rest)

    def _hold(self, compiled: Any, given: int) -> tuple[Any, ...] | None:
        """The state with which later calls launch the compiled kernel; None for Triton releases not in _KNOWN."""
        function = getattr(compiled, "function", None)
        if _TRITON not in _KNOWN or not isinstance(function, int):
            return None
        names = self._kernel.arg_names[given + len(self._fixed) :]
        rest = (*self._fixed, *(self._options[name] for name in names))
        run, metadata = compiled.run, compiled.packed_metadata
        # No launch metadata and no hooks: a call with hooks goes through Triton.
        call, launched = run, (function, metadata, None, None, None)
        if _TRITON == "3.6" and not run.global_scratch_size and not run.profile_scratch_size:
            # `run` allocates scratch memory if the kernel needs any, and then calls `run.launch`.
            cluster = run.launch_cooperative_grid, run.launch_pdl
            call, launched = run.launch, (function, *cluster, None, None, metadata, None, None, None)
        x, y, z = (*self._grid, 1, 1)[:3]
        return call, x, y, z, launched, rest


def _kind(argument: Any) -> Hashable:
    """The properties of an argument that Triton specialises a kernel for."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % _ALIGNMENT == 0
    return type(argument).__name__


def _hooked() -> bool:
    """Whether a launch hook is installed."""
    enter, leave = _RUNTIME.launch_enter_hook, _RUNTIME.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
