"""GEMMs by PyTorch (cuBLAS), with activations in separate kernels. The functions have the arguments and results of
those in `launches`. cuBLAS is slow if rows of a result do not start on 16-byte boundaries: such operands are padded."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton

from . import configs
from .launch import Launch
from .launches import lengthen_launch
from .pointwise import _fused_mlp_activation_kernel, _fused_mlp_derivative_kernel

BLOCK = 1024

Optional = torch.Tensor | None


def hidden_launch(
    x: torch.Tensor, w1: torch.Tensor, b1: Optional, w_gate: Optional, activation: str
) -> Callable[..., None]:
    """Writes those of hidden, pre and gate [rows, pitch] that are not None, given (x, w1, w_gate, b1, hidden, pre,
    gate)."""
    (rows, depth), cols = x.shape, w1.shape[0]
    pitch, gated = configs.pick_pitch(cols), w_gate is not None
    activate = _pointwise(_fused_mlp_activation_kernel, x, rows, cols, activation)

    def product(x: torch.Tensor, w: torch.Tensor, bias: Optional, out: torch.Tensor) -> None:
        weight = F.pad(w, (0, 0, 0, pitch - cols)).mT if pitch != cols else w.mT
        if bias is None:
            torch.mm(x, weight, out=out)
        else:
            torch.addmm(F.pad(bias, (0, pitch - cols)), x, weight, out=out)

    def run(x, w1, w_gate, b1, hidden: Optional, pre: Optional, gate: Optional) -> None:
        to, x = pre if pre is not None else hidden, x.view(rows, depth)
        if to is None:
            return
        product(x, w1, b1, to)
        if gated:
            gate = x.new_empty((rows, pitch)) if gate is None else gate
            product(x, w_gate, None, gate)
        if hidden is not None:
            activate(to, gate, hidden)

    return run


def dhidden_launch(
    dy: torch.Tensor, w2: torch.Tensor, hidden: int, gated: bool, activation: str
) -> Callable[..., None]:
    """Writes those of dpre, dgate and the hidden [rows, pitch] that are not None, given (dy, w2, pre, gate, dpre,
    dgate, hidden)."""
    rows, pitch = dy.shape[0], configs.pick_pitch(hidden)
    derive = _pointwise(_fused_mlp_derivative_kernel, dy, rows, hidden, activation)

    def run(dy, w2, pre, gate, dpre: Optional, dgate: Optional, hidden: Optional) -> None:
        product = next((t for t in (dpre, dgate, hidden) if t is not None), None)
        if product is not None:
            weight = F.pad(w2, (0, pitch - w2.shape[1])) if w2.shape[1] != pitch else w2
            torch.mm(dy.view(rows, weight.shape[0]), weight, out=product)
            derive(product, pre, gate, dpre, dgate, hidden)

    return run


def rows_launch(a: torch.Tensor, b: torch.Tensor, b_gate: Optional, bias: Optional) -> Callable[..., None]:
    """Writes out [rows, cols] = a · bᵀ + a_gate · b_gateᵀ + bias, given (a, b, a_gate, b_gate, bias, out). a may have
    more columns than b, if they are zero."""
    (cols, _), width = b.shape, a.shape[1]
    # Each weight has its own, because one may be aligned to 16 bytes and the other not.
    factor, gate_factor = _factor(b, width), None if b_gate is None else _factor(b_gate, width)

    def run(a: torch.Tensor, b: torch.Tensor, a_gate: Optional, b_gate: Optional, bias: Optional, out) -> None:
        out = out.view(-1, cols)
        if bias is None:
            torch.mm(a, factor(b), out=out)
        else:
            torch.addmm(bias, a, factor(b), out=out)
        if a_gate is not None and b_gate is not None and gate_factor is not None:
            out.addmm_(a_gate, gate_factor(b_gate))

    return run


def weights_launch(a: torch.Tensor, b: torch.Tensor, cols: int, depth: int) -> Callable[..., None]:
    """Writes a gradient [cols, depth] = aᵀ · b, contiguous, given (a, b, out). K is the number of rows. a and b may
    have more columns than cols and depth."""

    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        a, b = a.view(-1, a.shape[-1]), b.view(-1, b.shape[-1])
        if (a.shape[1], b.shape[1]) == (cols, depth):
            torch.mm(a.mT, b, out=out)
        else:
            # With `out`, since autocast would round the operands of a product that has none to its dtype.
            whole = out.new_empty((a.shape[1], b.shape[1]))
            out.copy_(torch.mm(a.mT, b, out=whole)[:cols, :depth])

    return run


def _factor(like: torch.Tensor, width: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from a weight b like this one to bᵀ, padded with rows of zeros to `width` rows."""
    (cols, depth), strides = like.shape, like.stride()
    whole = like.mT.is_contiguous() and 0 < width * cols < 2**31
    lengthen = lengthen_launch(like.mT, width) if depth != width and whole else None

    def factor(b: torch.Tensor) -> torch.Tensor:
        weight = b.as_strided((cols, depth), strides).mT
        if depth == width:
            return weight
        if lengthen is None:
            return F.pad(weight, (0, 0, 0, width - depth))
        longer = weight.new_empty((width, cols))
        lengthen(weight, longer)
        return longer

    return factor


def _pointwise(kernel, like: torch.Tensor, rows: int, cols: int, activation: str) -> Launch:
    pitch = configs.pick_pitch(cols)
    count = rows * pitch
    padded = dict(COLS=cols, PITCH=pitch) if pitch != cols else dict(COLS=0, PITCH=0)
    options = dict(ACTIVATION=activation, **padded, BLOCK=BLOCK, num_warps=4)
    return Launch(kernel, (triton.cdiv(count, BLOCK),), like.device, (count,), **options)
