"""Launch plans of fused_mlp: the part of a call that does not depend on the tensors' contents and addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from . import configs
from .launches import bias_launch, gradients_launch, pitch_launch, single_launch, whole_vectors
from .sm90 import products
from .versions import dhidden_launch, hidden_launch, rows_launch, weights_launch

BACKENDS = ("auto", "fused", "two_gemms", "cuda", "narrow")
SAVES = ("activations", "input")

Optional = torch.Tensor | None
Weights = tuple[torch.Tensor, torch.Tensor, Optional, Optional, Optional]  # w1, w2, b1, b2, w_gate
Gradients = tuple[Optional, Optional, Optional, Optional, Optional, Optional]  # of x, w1, w2, b1, b2, w_gate
Forward = Callable[..., tuple[torch.Tensor, Optional, Optional]]
Backward = Callable[..., Gradients]


class Needs(NamedTuple):
    """Which gradients are needed."""

    x: bool
    w1: bool
    w2: bool
    b1: bool
    b2: bool
    w_gate: bool

    @property
    def pre(self) -> bool:
        return self.x or self.w1 or self.b1

    @property
    def gate(self) -> bool:
        return self.x or self.w_gate


def fwd_plan(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    b1: Optional,
    b2: Optional,
    w_gate: Optional,
    activation: str,
    keep: bool,
    backend: str,
) -> Forward:
    """The plan of the forward for tensors like these, which `op` has checked. It takes (x, w1, w2, b1, b2, w_gate) and
    returns y, and pre and gate [rows, pitch], None unless `keep`. RuntimeError if `backend` cannot run."""
    x_copied, flat = _flat(x)
    (rows, dim), hidden, dim_out = flat.shape, w1.shape[0], w2.shape[0]
    if backend == "fused" and dim_out > configs.MAX_FUSED_OUT:
        most = f"at most {configs.MAX_FUSED_OUT} rows of w2"
        raise RuntimeError(f'fused_mlp: backend="fused" cannot run here: it supports {most}, got {dim_out}')
    missing = products.missing(x) if backend in ("auto", "cuda", "narrow") else None
    if missing and backend != "auto":
        raise RuntimeError(f'fused_mlp: backend="{backend}" cannot run here: {missing}')
    shape, pitch, gated = (*x.shape[:-1], dim_out), configs.pick_pitch(hidden), w_gate is not None
    empty = not rows or (not dim_out and not keep)
    launch = None
    if not empty and backend == "fused" and dim_out:
        launch = _single(flat, w1, w2, b1, b2, w_gate, activation)
    elif not empty:
        use = configs.pick_versions(backend, rows, dim, hidden, x.dtype, hopper=missing is None)
        launch = _two_products(flat, w1, w2, b1, b2, w_gate, activation, use, keep)

    def plan(
        x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, b1: Optional, b2: Optional, w_gate: Optional
    ) -> tuple[torch.Tensor, Optional, Optional]:
        y = x.new_empty(shape)
        pre = x.new_empty((rows, pitch)) if keep else None
        gate = x.new_empty((rows, pitch)) if keep and gated else None
        if launch is not None:
            launch(_flat(x)[1] if x_copied else x, w1, w2, b1, b2, w_gate, y, pre, gate)
        return y, pre, gate

    return plan


def _single(x, w1, w2, b1, b2, w_gate, activation: str) -> Callable[..., None]:
    """The forward in one kernel, which keeps the hidden in registers and shared memory."""
    copied, w2_read = _pitched(w2)
    write = single_launch(x, w1, w2_read, b1, b2, w_gate, activation)

    def run(x, w1, w2, b1, b2, w_gate, y, pre, gate) -> None:
        write(x, w1, copied(w2) if copied else w2, w_gate, b1, b2, y, pre, gate)

    return run


def _two_products(x, w1, w2, b1, b2, w_gate, activation: str, use: configs.Versions, keep: bool) -> Callable[..., None]:
    """The forward in two GEMMs, with the hidden in memory between them."""
    shape = x.shape[0], configs.pick_pitch(w1.shape[0])
    hidden_like, copied = x.new_empty(shape), _copied_shape(w2)
    to_hidden = None
    if hidden_like.numel():
        beside = None if copied is None else w2
        to_hidden = hidden_launch(x, w1, b1, w_gate, activation, use, (True, keep), beside)
    w2_read = w2 if copied is None else w2.new_empty(copied)
    to_y = rows_launch(hidden_like, w2_read, None, b2, use) if w2.shape[0] else None

    def run(x, w1, w2, b1, b2, w_gate, y, pre, gate) -> None:
        hidden, copy = x.new_empty(shape), None if copied is None else w2.new_empty(copied)
        if to_hidden is not None:
            to_hidden(x, w1, w_gate, b1, hidden, pre, gate, None if copy is None else w2, copy)
        if to_y is not None:
            to_y(hidden, w2 if copy is None else copy, None, None, b2, y)

    return run


def bwd_plan(
    dy: torch.Tensor,
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    b1: Optional,
    w_gate: Optional,
    pre: Optional,
    gate: Optional,
    activation: str,
    needs: Needs,
    backend: str,
) -> Backward:
    """The plan of the backward for tensors like these. It takes (dy, x, w1, w2, b1, w_gate, pre, gate) and returns the
    gradients of x, w1, w2, b1, b2 and w_gate, None where not needed. If pre is None, pre and gate are recomputed."""
    x_copied, x_rows = _flat(x)
    dy_copied, dy_rows = _flat(dy, dense=True)
    (rows, dim), hidden, dim_out = x_rows.shape, w1.shape[0], w2.shape[0]
    needs = needs._replace(w_gate=needs.w_gate and w_gate is not None)
    use = configs.pick_versions(backend, rows, dim, hidden, x.dtype, hopper=products.missing(x) is None)
    pitch = configs.pick_pitch(hidden)
    within = _within_plan(dy_rows, x_rows, w1, w2, b1, w_gate, pre is None, activation, needs, use)
    wide = x_rows.new_empty((rows, pitch)) if within is not None else x_rows
    gate_read = None if w_gate is None else w_gate.mT
    # One launch computes all three gradients if none of them fills the GPU.
    together = None
    if needs.x and needs.w1 and needs.w2 and w_gate is None and use.triton and all((rows, dim, hidden, dim_out)):
        together = gradients_launch(dy_rows, x_rows, w1, wide, hidden)
    for_x = rows_launch(wide, w1.mT, gate_read, None, use) if needs.x and rows and dim else None
    any_w1 = (needs.w1 or needs.w_gate) and hidden and dim
    # cuBLAS computes these gradients with the rows of the padding; the returned view leaves them out.
    long = pitch if use.library else hidden
    for_w1 = weights_launch(wide, x_rows, long, dim, use) if any_w1 else None
    for_w2 = weights_launch(dy_rows, wide, dim_out, hidden, use) if needs.w2 and hidden and dim_out else None
    for_b1 = bias_launch(wide, hidden) if needs.b1 and hidden else None
    for_b2 = bias_launch(dy_rows, dim_out) if needs.b2 and dim_out else None

    def run(dy, x, w1, w2, b1, w_gate, pre, gate) -> Gradients:
        x_rows = _flat(x)[1] if x_copied else x
        dy_rows = _flat(dy, dense=True)[1] if dy_copied else dy
        dpre = dgate = hidden_rows = None
        if within is not None:
            dpre, dgate, hidden_rows = within(dy_rows, x_rows, w1, w2, b1, w_gate, pre, gate)
        dx = dw1 = dw2 = db1 = db2 = dw_gate = None
        if together is not None:
            dx = torch.empty_like(x, memory_format=torch.contiguous_format)
            dw1, dw2 = x.new_empty((hidden, dim)), x.new_empty((dim_out, hidden))
            together(dpre, w1, x_rows, dy_rows, hidden_rows, dx, dw1, dw2)
        elif needs.x:
            dx = torch.empty_like(x, memory_format=torch.contiguous_format)
            if for_x is not None:
                for_x(dpre, w1, dgate, w_gate, None, dx)
        if needs.w1 and together is None:
            dw1 = _written(x, (long, dim), for_w1, dpre, x_rows)[:hidden]
        if needs.w_gate:
            dw_gate = _written(x, (long, dim), for_w1, dgate, x_rows)[:hidden]
        if needs.w2 and together is None:
            dw2 = _written(x, (dim_out, hidden), for_w2, dy_rows, hidden_rows)
        if needs.b1:
            db1 = _written(x, (hidden,), for_b1, dpre)
        if needs.b2:
            db2 = _written(x, (dim_out,), for_b2, dy_rows)
        return dx, dw1, dw2, db1, db2, dw_gate

    return run


def _within_plan(
    dy: torch.Tensor,
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    b1: Optional,
    w_gate: Optional,
    recompute: bool,
    activation: str,
    needs: Needs,
    use: configs.Versions,
) -> Callable[..., tuple[Optional, Optional, Optional]] | None:
    """Computes the gradients of pre and gate, and the hidden, [rows, pitch] each, None for those that are not needed,
    given (dy, x, w1, w2, b1, w_gate, pre, gate). Returns None if none of them is needed."""
    gated = w_gate is not None
    need_dpre, need_dgate = needs.pre, needs.gate and gated
    if not (need_dpre or need_dgate or needs.w2):
        return None
    rows, pitch = x.shape[0], configs.pick_pitch(w1.shape[0])
    derivative = need_dpre or need_dgate  # else only w2's gradient, whose hidden is recomputed from x
    copied, w2_read = _pitched(w2)
    any_elements = rows and pitch
    again = None
    if any_elements and (recompute or not derivative):
        again = hidden_launch(x, w1, b1, w_gate, activation, use, (not derivative, derivative))
    to_gradients = None
    if any_elements and derivative:
        written = need_dpre, need_dgate, needs.w2
        to_gradients = dhidden_launch(dy, w2_read, w1.shape[0], gated, activation, use, written)

    def run(dy, x, w1, w2, b1, w_gate, pre, gate) -> tuple[Optional, Optional, Optional]:
        def empty(wanted: bool) -> Optional:
            return x.new_empty((rows, pitch)) if wanted else None

        dpre, dgate, hidden = empty(need_dpre), empty(need_dgate), empty(needs.w2)
        if not derivative:
            if again is not None:
                again(x, w1, w_gate, b1, hidden, None, None, None, None)
            return None, None, hidden
        if recompute:
            pre, gate = empty(True), empty(gated)
            if again is not None:
                again(x, w1, w_gate, b1, None, pre, gate, None, None)
        if to_gradients is not None:
            to_gradients(dy, copied(w2) if copied else w2, pre, gate, dpre, dgate, hidden)
        return dpre, dgate, hidden

    return run


def _written(like: torch.Tensor, shape: tuple[int, ...], launch: Callable[..., None] | None, *operands) -> torch.Tensor:
    """Allocates a gradient of this shape and dtype, and has `launch` write it."""
    grad = like.new_empty(shape)
    if launch is not None:
        launch(*operands, grad)
    return grad


def _pitched(w2: torch.Tensor) -> tuple[Callable[[torch.Tensor], torch.Tensor] | None, torch.Tensor]:
    """A function that copies w2 to rows of whole vectors, None if w2 is read in place; and a tensor like the one that
    is read."""
    shape = _copied_shape(w2)
    if shape is None:
        return None, w2
    launch = pitch_launch(w2)

    def copied(w2: torch.Tensor) -> torch.Tensor:
        copy = w2.new_empty(shape)
        launch(w2, copy)
        return copy

    return copied, w2.new_empty(shape)


def _copied_shape(w2: torch.Tensor) -> tuple[int, int] | None:
    """The shape of w2's copy with rows of whole vectors; None if w2 is read in place."""
    rows, cols = w2.shape
    return (rows, configs.pick_pitch(cols)) if configs.pick_copy(rows, cols, whole_vectors(w2), w2.dtype) else None


def _flat(tensor: torch.Tensor, dense: bool = False) -> tuple[bool, torch.Tensor]:
    """Whether the tensor must be copied to be a matrix [rows, columns], and that matrix. With `dense` the rows are made
    contiguous: an incoming gradient is often a broadcast scalar."""
    matrix = (
        tensor.reshape(-1, tensor.shape[-1])
        if tensor.numel()
        else tensor.new_empty(tensor.shape[:-1].numel(), tensor.shape[-1])
    )
    if dense and matrix.numel() and matrix.stride(1) != 1:
        matrix = matrix.contiguous()
    return matrix.data_ptr() != tensor.data_ptr(), matrix
