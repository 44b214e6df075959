# A copy of parts/heads_backward/products.py, made by `nox -s vendor`: change it there.
"""The large GEMMs of the backward by PyTorch (cuBLAS), for one chunk of rows at a time."""

from __future__ import annotations

import torch

Optional = torch.Tensor | None


def padded(w1: torch.Tensor, pitch: int) -> torch.Tensor:
    """w1 [K, H, D] as [K · pitch, D], with zeros after the H rows of each head, to be multiplied by dpre."""
    heads, hidden, dim = w1.shape
    if hidden == pitch:
        return w1.reshape(-1, dim)
    copy = w1.new_zeros((heads, pitch, dim))
    copy[:, :hidden] = w1
    return copy.view(-1, dim)


def write_dx(dpre: torch.Tensor, w1: torch.Tensor, dx: torch.Tensor) -> None:
    """Writes dx [rows, D] of a chunk, from dpre [rows, K, pitch] and the padded w1."""
    torch.mm(dpre.flatten(1), w1, out=dx)


def add_dw1(dpre: torch.Tensor, x: torch.Tensor, sums: Optional) -> torch.Tensor:
    """Adds a chunk's dw1 to `sums` over the chunks before, in place, and returns it: [K · pitch, D] in fp32. `sums` is
    None for the first chunk."""
    wide = dpre.flatten(1).mT
    if sums is None:
        return torch.mm(wide, x, out_dtype=torch.float32)
    return torch.addmm(sums, wide, x, out_dtype=torch.float32, out=sums)


def dw1_of(dpre: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dw1 of a single chunk, rounded once: [K · pitch, D] in the dtype of x."""
    # With `out`, since autocast would round the operands of a product that has none to its dtype.
    wide = dpre.flatten(1).mT
    return torch.mm(wide, x, out=x.new_empty((wide.shape[0], x.shape[1])))


def rounded(sums: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The gradient of w1, contiguous, in w1's dtype, from sums [K · pitch, D]."""
    heads, hidden, dim = like.shape
    return sums.view(heads, -1, dim)[:, :hidden].to(like.dtype).contiguous()
