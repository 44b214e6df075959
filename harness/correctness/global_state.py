"""Detects calls that touch state shared by the whole process.

It is detected in two ways. A value that differs after the call was changed or, like the state of a random number
generator, consumed. And a setter called in between affects what other threads run meanwhile, even if the value is
restored.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.backends import ContextProp

from .accuracy import Verdict

# Setters in torch._C. torch.backends binds its own when it is imported: all its flags go through ContextProp.
SETTERS = ("_set_default_dtype", "_set_float32_matmul_precision", "_set_deterministic_algorithms")
SDP = ("flash", "mem_efficient", "math", "cudnn")  # backends of scaled_dot_product_attention


def _generators() -> Hashable:
    """The states of PyTorch's default generators, of Python's and of NumPy's."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    of_numpy = pickle.dumps(np.random.get_state(legacy=False))
    return (random.getstate(), of_numpy, *(state.numpy().tobytes() for state in states))


def _flags() -> Hashable:
    """The flags of torch.backends. `float32_matmul_precision` covers TF32 too, but not for convolutions."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return (
        cudnn.benchmark,
        cudnn.deterministic,
        cudnn.enabled,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
    )


def _sdp() -> dict[str, bool]:
    return {backend: getattr(torch.backends.cuda, f"{backend}_sdp_enabled")() for backend in SDP}


VALUES: dict[str, Callable[[], Hashable]] = {
    "default dtype": torch.get_default_dtype,
    "default device": torch.get_default_device,
    "grad mode": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "autocast": lambda: (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
    "float32 matmul precision": torch.get_float32_matmul_precision,
    "deterministic mode": torch.get_deterministic_debug_mode,
    "flags of torch.backends": _flags,
    "backends of attention": lambda: tuple(_sdp().values()),
    "number of threads": torch.get_num_threads,
    "random number generators": _generators,
    "current device": lambda: torch.cuda.current_device() if torch.cuda.is_initialized() else None,
    "current stream": lambda: torch.cuda.current_stream() if torch.cuda.is_initialized() else None,
}


@contextmanager
def put_back() -> Iterator[None]:
    """Restores the grad mode, default dtype, matmul precision, backends of attention and current device afterwards, so
    that a kernel which changes one fails its own check and nothing that runs later."""
    sdp, device = _sdp(), torch.cuda.current_device() if torch.cuda.is_initialized() else None
    grad, dtype, precision = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        for backend in (name for name, enabled in _sdp().items() if enabled != sdp[name]):
            getattr(torch.backends.cuda, f"enable_{backend}_sdp")(sdp[backend])
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
        if torch.get_float32_matmul_precision() != precision:
            torch.set_float32_matmul_precision(precision)
        if device is not None and torch.cuda.current_device() != device:
            torch.cuda.set_device(device)


class GlobalState:
    """Watches the shared state while it is active."""

    def __init__(self) -> None:
        self._touched: list[str] = []
        self._stack = ExitStack()

    def __enter__(self) -> GlobalState:
        self._stack.enter_context(put_back())
        for name in SETTERS:
            setter = getattr(torch._C, name)
            self._stack.enter_context(mock.patch.object(torch._C, name, self._noting(name.removeprefix("_"), setter)))
        setter = ContextProp.__set__
        self._stack.enter_context(mock.patch.object(ContextProp, "__set__", self._noting("torch.backends", setter)))
        self._before = {name: read() for name, read in VALUES.items()}
        return self

    def __exit__(self, *exception: object) -> None:
        self._touched += [name for name, read in VALUES.items() if read() != self._before[name]]
        self._stack.close()

    def _noting(self, name: str, setter: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._touched.append(name)
            return setter(*args, **kwargs)

        return noted

    def verdict(self) -> Verdict:
        """The verdict, which names what was set, used or left changed."""
        if not self._touched:
            return Verdict(True)
        names = ", ".join(dict.fromkeys(self._touched))
        return Verdict(False, f"global state was set, used or left changed: {names}", "state")
