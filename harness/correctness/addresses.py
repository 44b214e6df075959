"""Checks in Triton's interpreter that every address which a kernel accesses lies in a tensor that it was given.

Guard zones detect a write outside a tensor, and poison a read whose value reaches the result. Neither detects an
unmasked lane that reads out of bounds if its value is discarded later; on a GPU such a read may end the process. Here
each load, store and atomic is compared with the extents of the launch's arguments before it executes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

Extent = tuple[int, int]


class OutsideError(Exception):
    """A kernel touched memory outside its tensors."""


@contextmanager
def checked(*more: Any) -> Iterator[None]:
    """Makes an out-of-bounds launch raise OutsideError, wrapped in Triton's InterpreterError. `more`: tensors (or lists
    and tuples of them) that a kernel may access although they are not its arguments, through a table of addresses or
    as a neighbour in the same storage. Has no effect on compiled kernels."""
    from triton.runtime import interpreter

    current: list[list[Extent]] = []
    builder = interpreter.InterpreterBuilder

    def launch(original: Callable[..., Any]) -> Callable[..., Any]:
        def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
            current.append(_merged([e for value in (*args, *kwargs.values(), *more) for e in _extents(value)]))
            try:
                return original(self, *args, **kwargs)
            finally:
                current.pop()

        return launched

    def access(original: Callable[..., Any], what: str, mask_at: int | None) -> Callable[..., Any]:
        def accessed(self: Any, *args: Any) -> Any:
            pointers = args[1] if what == "an atomic" and mask_at is not None else args[0]
            mask = args[mask_at] if mask_at is not None else None
            if current:
                _check(pointers, mask, current[-1], what)
            return original(self, *args)

        return accessed

    with ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        replace(interpreter.GridExecutor, "__call__", launch(interpreter.GridExecutor.__call__))
        replace(builder, "create_masked_load", access(builder.create_masked_load, "a load", 1))
        replace(builder, "create_masked_store", access(builder.create_masked_store, "a store", 2))
        replace(builder, "create_atomic_rmw", access(builder.create_atomic_rmw, "an atomic", 3))
        replace(builder, "create_atomic_cas", access(builder.create_atomic_cas, "an atomic", None))
        yield


def _extents(value: Any) -> Iterator[Extent]:
    """Yields the first address and the one past the last, of each tensor in an argument."""
    if isinstance(value, tuple | list):
        for inner in value:
            yield from _extents(inner)
    elif isinstance(value, torch.Tensor):
        if value.numel():
            last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
            yield value.data_ptr(), value.data_ptr() + (last + 1) * value.element_size()
    elif hasattr(value, "base"):  # a tensor descriptor
        yield from _extents(value.base)


def _merged(extents: list[Extent]) -> list[Extent]:
    """The extents, sorted, with adjacent and overlapping ones merged."""
    found: list[Extent] = []
    for start, end in sorted(extents):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _check(pointers: Any, mask: Any, extents: list[Extent], what: str) -> None:
    import numpy as np

    addresses = np.asarray(pointers.data).astype(np.int64).ravel()
    if mask is not None:
        addresses = addresses[np.broadcast_to(np.asarray(mask.data, dtype=bool), np.shape(pointers.data)).ravel()]
    if not addresses.size:
        return
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    lowest = np.iinfo(np.int64).min  # an empty extent before all addresses
    starts, ends = np.array([(lowest, lowest), *extents], dtype=np.int64).T
    outside = addresses + size > ends[np.searchsorted(starts, addresses, side="right") - 1]
    if outside.any():
        count = int(outside.sum())
        raise OutsideError(f"{count} of {addresses.size} addresses of {what} lie outside the tensors of the launch")
