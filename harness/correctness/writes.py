"""Detects writes to an input, even if its contents are restored before the call returns.

PyTorch's operators are seen by a dispatch mode, those inside a custom op by autograd's version counters, and stores and
atomics in Triton's interpreter by their addresses. Stores of a kernel on a GPU are not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Methods of the interpreter's builder, with the positions of the pointers and of the mask among their arguments.
STORES: dict[str, tuple[int, int | None]] = {
    "create_masked_store": (0, 2),
    "create_atomic_cas": (0, None),
    "create_atomic_rmw": (1, 3),
}


@contextmanager
def watched(tensors: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yields a list of the names of tensors written. `guard.Snapshot` detects writes that are only around one."""
    from triton.runtime.interpreter import InterpreterBuilder

    mine = {name: t for name, t in tensors.items() if isinstance(t, torch.Tensor) and t.numel()}
    versions = {name: t._version for name, t in mine.items()}
    written: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(_Operators({t.untyped_storage().data_ptr(): name for name, t in mine.items()}, written))
        ranges = {name: _range(t) for name, t in mine.items() if not t.is_cuda}
        for method in STORES:
            store = getattr(InterpreterBuilder, method)
            stack.enter_context(mock.patch.object(InterpreterBuilder, method, _noting(method, store, ranges, written)))
        yield written
    written += [name for name, t in mine.items() if t._version != versions[name]]


class _Operators(TorchDispatchMode):
    def __init__(self, storages: Mapping[int, str], written: list[str]) -> None:
        super().__init__()
        self._storages, self._written = storages, written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for index, argument in enumerate(func._schema.arguments):
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                if argument.is_write and isinstance(value, torch.Tensor):
                    self._note(value)
        return func(*args, **kwargs)

    def _note(self, tensor: torch.Tensor) -> None:
        address = tensor.untyped_storage().data_ptr()
        if address in self._storages:
            self._written.append(self._storages[address])


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """The first address and the one past the last."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _noting(
    method: str, store: Callable[..., Any], ranges: Mapping[str, tuple[int, int]], written: list[str]
) -> Callable[..., Any]:
    def noted(self: Any, *args: Any) -> Any:
        place, mask_place = STORES[method]
        addresses = args[place].data
        if mask_place is not None:
            addresses = addresses[args[mask_place].data.astype(bool)]
        written.extend(n for n, (low, end) in ranges.items() if ((addresses >= low) & (addresses < end)).any())
        return store(self, *args)

    return noted
