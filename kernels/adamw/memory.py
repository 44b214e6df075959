"""Brings the tensors of a parameter into the same dense memory order, so that the kernel needs no strides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from .tables import Tensors


@contextmanager
def dense(tensors: Tensors) -> Iterator[Tensors]:
    """A context with tensors that are dense in the memory order of their parameter. Tensors that are not are replaced
    by copies, and those that the step writes are copied back at the end."""
    columns: list[list[Any]] = [tensors.params, tensors.grads, tensors.exp_avgs, tensors.exp_avg_sqs, tensors.masters]
    if all(False not in [t is None or t.is_contiguous() for t in column] for column in columns):
        yield tensors
        return
    copied = False
    back: list[tuple[torch.Tensor, torch.Tensor]] = []
    new: list[list[Any]] = [list(column) for column in columns]
    grads = new[1]
    for index, param in enumerate(tensors.params):
        order = _order(param)
        for column in new:
            tensor = column[index]
            if tensor is None or _same_order(tensor.shape, tensor.stride(), order):
                continue
            copy = torch.empty_strided(tensor.shape, order, dtype=tensor.dtype, device=tensor.device)
            column[index], copied = copy.copy_(tensor), True
            if column is not grads:
                back.append((tensor, copy))
    if not copied:
        yield tensors
        return
    params, grads, exp_avgs, exp_avg_sqs, masters = new
    yield replace(tensors, params=params, grads=grads, exp_avgs=exp_avgs, exp_avg_sqs=exp_avg_sqs, masters=masters)
    for tensor, copy in back:
        tensor.copy_(copy)


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor if it is dense, that is, occupies contiguous memory in any dimension order; otherwise a copy."""
    if tensor.is_contiguous() or _same_order(tensor.shape, tensor.stride(), _order(tensor)):
        return tensor
    return tensor.contiguous()


def _order(param: torch.Tensor) -> tuple[int, ...]:
    """The strides of a dense tensor in the parameter's memory order: the parameter's own strides if it is dense."""
    return torch.empty_like(param, device="meta").stride()


def _same_order(shape: Sequence[int], strides: Sequence[int], order: Sequence[int]) -> bool:
    if 0 in shape:
        return True
    return all(n == 1 or a == b for n, a, b in zip(shape, strides, order, strict=True))
