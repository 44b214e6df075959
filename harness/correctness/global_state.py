"""What a call may not touch: the state that the whole process shares.

Two ways are looked for. A value that is another after the call was changed or, as the state of a random number
generator, used. And a setter that is called in between changes what runs on other threads meanwhile, even if the value
is put back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.backends import ContextProp

from .accuracy import Verdict

# Setters in torch._C. torch.backends reads its own once, when it is imported: all its flags go through ContextProp.
SETTERS = ("_set_default_dtype", "_set_float32_matmul_precision", "_set_deterministic_algorithms")


def _generators() -> Hashable:
    """The states of PyTorch's default generators and of Python's."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return (random.getstate(), *(state.numpy().tobytes() for state in states))


def _flags() -> Hashable:
    """Of torch.backends. TF32 is under `float32_matmul_precision` too, but not for convolutions."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return (
        cudnn.benchmark,
        cudnn.deterministic,
        cudnn.enabled,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
    )


VALUES: dict[str, Callable[[], Hashable]] = {
    "default dtype": torch.get_default_dtype,
    "default device": torch.get_default_device,
    "grad mode": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "autocast": lambda: (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
    "float32 matmul precision": torch.get_float32_matmul_precision,
    "deterministic mode": torch.get_deterministic_debug_mode,
    "flags of torch.backends": _flags,
    "number of threads": torch.get_num_threads,
    "random number generators": _generators,
    "current device": lambda: torch.cuda.current_device() if torch.cuda.is_initialized() else None,
    "current stream": lambda: torch.cuda.current_stream() if torch.cuda.is_initialized() else None,
}


@contextmanager
def put_back() -> Iterator[None]:
    """Afterwards the grad mode, default dtype, matmul precision and current device are what they were: a kernel that
    changes one fails its own check and nothing that runs later."""
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    grad, dtype, precision = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
        if torch.get_float32_matmul_precision() != precision:
            torch.set_float32_matmul_precision(precision)
        if device is not None and torch.cuda.current_device() != device:
            torch.cuda.set_device(device)


class GlobalState:
    """Watches the state while it is active."""

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
        """Names what was set, used or left changed."""
        if not self._touched:
            return Verdict(True)
        names = ", ".join(dict.fromkeys(self._touched))
        return Verdict(False, f"global state was set, used or left changed: {names}", "state")
