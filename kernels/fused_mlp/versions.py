"""The version that computes a GEMM: cuBLAS or CUDA C++ if it was chosen and supports the operands, else Triton.

`written` says which results a launch stores: (the hidden, pre and gate) or (dpre, dgate, the hidden)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import launches, library
from .configs import Versions
from .sm90 import narrow, products

Optional = torch.Tensor | None


def hidden_launch(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: Optional,
    w_gate: Optional,
    activation: str,
    use: Versions,
    written: tuple[bool, bool],
    copied: Optional = None,
) -> Callable[..., None]:
    """Writes hidden, pre and gate [rows, pitch], given (x, w1, w_gate, b1, hidden, pre, gate, w2, copy). If `copied` is
    a weight like w2, also copies w2 to padded rows, in the same launch if the version can."""
    if use.narrow and narrow.takes(x, w1, w_gate):
        return narrow.hidden_launch(x, w1, b1, w_gate, activation, written, copied)
    if use.passes:
        return _after_copy(library.hidden_launch(x, w1, b1, w_gate, activation), copied)
    # The tile of b in a gated GEMM has rows of both weights, so that both must be K-major.
    in_rows = w_gate is None or w_gate.stride(1) == w1.stride(1) == 1
    if use.cuda and in_rows and products.takes(x, w1, w_gate):
        return _after_copy(products.hidden_launch(x, w1, b1, w_gate, activation), copied)
    return launches.hidden_launch(x, w1, b1, w_gate, activation, copied)


def _after_copy(launch: Callable[..., None], copied: Optional) -> Callable[..., None]:
    """`launch` with two more arguments, a weight and its copy, which is written first."""
    if copied is None:
        return lambda *arguments: launch(*arguments[:-2])
    copy = launches.pitch_launch(copied)

    def run(*arguments: Optional) -> None:
        *others, w2, to = arguments
        copy(w2, to)
        launch(*others)

    return run


def rows_launch(
    a: torch.Tensor, b: torch.Tensor, b_gate: Optional, bias: Optional, use: Versions
) -> Callable[..., None]:
    alike = b_gate is None or (b_gate.stride(1) == 1) == (b.stride(1) == 1)
    fits = alike and b.shape[0] % products.VECTOR == 0 and products.takes(a, b, b_gate)
    if fits and (use.plain or (use.cuda and not use.library)):
        return products.rows_launch(a, b, b_gate, bias)
    if use.library:
        return library.rows_launch(a, b, b_gate, bias)
    return launches.rows_launch(a, b, b_gate, bias)


def dhidden_launch(
    dy: torch.Tensor,
    w2: torch.Tensor,
    hidden: int,
    gated: bool,
    activation: str,
    use: Versions,
    written: tuple[bool, bool, bool],
) -> Callable[..., None]:
    if use.narrow and narrow.takes(dy, w2.mT):
        return narrow.dhidden_launch(dy, w2, hidden, gated, activation, written)
    if use.passes:
        return library.dhidden_launch(dy, w2, hidden, gated, activation)
    if use.cuda and products.takes(dy, w2):
        return products.dhidden_launch(dy, w2, hidden, gated, activation)
    return launches.dhidden_launch(dy, w2, hidden, gated, activation)


def weights_launch(a: torch.Tensor, b: torch.Tensor, cols: int, depth: int, use: Versions) -> Callable[..., None]:
    # For other widths products.cu writes fp32 partitions, even if there is only one.
    plain = use.plain and depth % products.VECTOR == 0
    if products.takes(a, b) and (plain or (use.cuda and not use.library)):
        return products.weights_launch(a, b, cols, depth)
    if use.library:
        return library.weights_launch(a, b, cols, depth)
    return launches.weights_launch(a, b, cols, depth)
