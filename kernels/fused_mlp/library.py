"""Plain products by PyTorch (cuBLAS): those that have no activation in their epilogue. As `launches`, whose arguments
and results they share."""

from __future__ import annotations

from collections.abc import Callable

import torch

Optional = torch.Tensor | None


def rows_launch(a: torch.Tensor, b: torch.Tensor, b_gate: Optional, bias: Optional) -> Callable[..., None]:
    """Writes out [rows, cols], given (a, b, a_gate, b_gate, bias, out): a · bᵀ, of b's type for both products."""
    (cols, depth), strides = b.shape, b.stride()
    gate_strides = None if b_gate is None else b_gate.stride()

    def run(a: torch.Tensor, b: torch.Tensor, a_gate: Optional, b_gate: Optional, bias: Optional, out) -> None:
        out, weight = out.view(-1, cols), b.as_strided((cols, depth), strides).mT
        if bias is None:
            torch.mm(a[:, :depth], weight, out=out)
        else:
            torch.addmm(bias, a[:, :depth], weight, out=out)
        if a_gate is not None and b_gate is not None and gate_strides is not None:
            out.addmm_(a_gate[:, :depth], b_gate.as_strided((cols, depth), gate_strides).mT)

    return run


def weights_launch(a: torch.Tensor, b: torch.Tensor, cols: int, depth: int) -> Callable[..., None]:
    """Writes a gradient [cols, depth], contiguous, given (a, b, out): aᵀ · b over their rows. a and b may have more
    columns than that."""

    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        torch.mm(a[:, :cols].mT, b[:, :depth], out=out)

    return run
