"""Calls ops that update inputs in place on copies, so that the checks' inputs do not change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import execute
from ..spec import Op
from .accuracy import Verdict
from .guard import storage_bytes
from .layouts import view


class OnCopies:
    """`fn` with the inputs named in `mutates` replaced by copies. Each copies the whole storage that the input views,
    which preserves its strides and the poison around it. Without such inputs this is `fn` itself."""

    def __init__(self, fn: Op, mutates: Sequence[str]) -> None:
        self._fn, self._mutates = fn, mutates
        self._copies: dict[str, torch.Tensor] = {}
        self._results: tuple[torch.Tensor, ...] = ()

    def __call__(self, **inputs: Any) -> Any:
        if not self._mutates:
            return self._fn(**inputs)
        self._copies = {n: _copy(inputs[n]) for n in self._mutates if isinstance(inputs.get(n), torch.Tensor)}
        result = self._fn(**{**inputs, **self._copies})
        self._results = execute.outputs(result)
        return result

    def verdict(self, inputs: dict[str, Any]) -> Verdict:
        """Whether the last call, on these inputs, returned every copy and wrote nothing around one. Synchronises."""
        for name, copy in self._copies.items():
            if copy.numel() and not any(_same_memory(copy, result) for result in self._results):
                return Verdict(False, f"{name}, to be updated in place, is not among the outputs", "inputs")
            around = storage_bytes(copy).clone()
            view(around, copy.dtype, copy.shape, copy.stride(), int(copy.storage_offset())).copy_(inputs[name])
            if not torch.equal(around, storage_bytes(inputs[name])):
                return Verdict(False, f"memory around {name} was written", "bounds")
        return Verdict(True)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    whole = storage_bytes(tensor).clone()
    return view(whole, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())


def overlapping(tensor: torch.Tensor) -> bool:
    """Whether elements overlap in memory, so that the tensor cannot be updated in place."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
