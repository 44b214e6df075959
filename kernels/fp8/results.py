"""The tensors that fp8 returns: names, shapes and strides."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .configs import BLOCK

GRANULARITIES = ("tensor", "row", "column", "1x128", "128x128")


def scale_shape(shape: Sequence[int], granularity: str) -> tuple[int, ...]:
    """The shape of the scales of a tensor of the given shape [..., D]."""
    *lead, dim = shape
    blocks = (dim + BLOCK - 1) // BLOCK
    return {
        "tensor": (),
        "row": (*lead, 1),
        "column": (*(1 for _ in lead), dim),
        "1x128": (*lead, blocks),
        "128x128": ((math.prod(lead) + BLOCK - 1) // BLOCK, blocks),
    }[granularity]


def result_names(granularity: str, transpose: bool, given: bool, return_amax: bool) -> list[str]:
    """The names of the tensors that are written: no scale if it is given, no scale_t where it equals scale."""
    names = {
        "data": True,
        "scale": not given,
        "data_t": transpose,
        "scale_t": transpose and not given and granularity != "tensor",
        "amax": return_amax,
    }
    return [name for name, wanted in names.items() if wanted]


def allocate(
    x: torch.Tensor, names: Sequence[str], granularity: str, scale_format: str, mn_major: bool
) -> dict[str, torch.Tensor]:
    """Uninitialised tensors of the given names. fp8 and UE8M0 are stored as uint8."""
    rows, dim = math.prod(x.shape[:-1]), x.shape[-1]

    def scales(shape: Sequence[int]) -> torch.Tensor:
        shape = scale_shape(shape, granularity)
        if not mn_major:
            return x.new_empty(shape, dtype=torch.uint8 if scale_format == "e8m0" else torch.float32)
        *lead, blocks = shape
        count = math.prod(lead)
        columns = x.new_empty((blocks, (count + 3) // 4 * 4), dtype=torch.float32)  # each aligned to 16 bytes
        return columns.t()[:count].view(shape)

    make = {
        "data": lambda: x.new_empty(x.shape, dtype=torch.uint8),
        "scale": lambda: scales(x.shape),
        "data_t": lambda: x.new_empty((dim, rows), dtype=torch.uint8),
        "scale_t": lambda: scales((dim, rows)),
        "amax": lambda: x.new_empty((), dtype=torch.float32),
    }
    return {name: make[name]() for name in names}
