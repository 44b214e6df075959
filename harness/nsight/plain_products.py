"""PyTorch's GEMMs without cuBLAS, for initcheck.

initcheck must instrument every kernel that writes, and it does not see TMA stores of cuBLAS kernels: their whole output
counts as uninitialised, so that each kernel which reads it would have a finding. So under initcheck a GEMM is a sum of
elementwise products, whose stores it sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The GEMM a b of [..., M, K] and [..., K, N], accumulated in at least fp32. Needs memory for M·K·N products."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return (a.to(wide).unsqueeze(-1) * b.to(wide).unsqueeze(-3)).sum(-2)


@contextmanager
def plain_products(device: str = "CUDA") -> Iterator[None]:
    """Context in which mm, bmm and addmm, also of kernels under test, use `product` on this device (a dispatch key)."""

    def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return product(a, b).to(a.dtype)

    def mm_out(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(product(a, b))

    def addmm(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
        return (beta * c + alpha * product(a, b)).to(c.dtype)

    def addmm_out(
        c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1, out: torch.Tensor
    ) -> torch.Tensor:
        return out.copy_(beta * c + alpha * product(a, b))

    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("mm", mm, device)
        library.impl("mm.out", mm_out, device)
        library.impl("bmm", mm, device)
        library.impl("bmm.out", mm_out, device)
        library.impl("addmm", addmm, device)
        library.impl("addmm.out", addmm_out, device)
        yield
    finally:
        library._destroy()
