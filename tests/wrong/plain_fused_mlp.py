"""A plain MLP in PyTorch, by blocks of the hidden, that is right unless it is told which fault to have.

Every fault is one line that says `fault == "..."`; "" is the control.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

_CALLS = itertools.count()
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCK, TILE, PARTS = 4, 4, 3
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu_sq")
_laid_out: dict[tuple, torch.Tensor] = {}  # of the faults that keep a weight's copy


def _dense(tensor: torch.Tensor, fault: str) -> torch.Tensor:
    """The tensor; or what one reads there who takes it for contiguous."""
    end = tensor.storage_offset() + tensor.numel()
    if fault != "strides ignored" or tensor.untyped_storage().nbytes() < end * tensor.element_size():
        return tensor
    return torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset()).view(tensor.shape)


def _copy(w2: torch.Tensor, fault: str) -> torch.Tensor:
    """w2 in fp32; a fault keeps it by its address."""
    if fault != "copy of w2 kept by its address":
        return w2.float()
    key = w2.data_ptr(), w2.shape, w2.stride(), w2.dtype
    if key not in _laid_out:
        _laid_out[key] = w2.float().clone()
    return _laid_out[key]


def _act(x: torch.Tensor, name: str) -> torch.Tensor:
    if name.startswith("gelu"):
        return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")
    if name == "relu_sq":
        return F.relu(x).square()
    return {"silu": F.silu, "relu": F.relu}[name](x)


def _dact(x: torch.Tensor, dy: torch.Tensor, name: str) -> torch.Tensor:
    if name.startswith("gelu"):
        return torch.ops.aten.gelu_backward(dy, x, approximate="tanh" if name == "gelu_tanh" else "none")
    if name == "silu":
        return torch.ops.aten.silu_backward(dy, x)
    return torch.ops.aten.threshold_backward(dy * 2 * F.relu(x) if name == "relu_sq" else dy, x, 0)


def _pre(x, w1, b1, w_gate, fault: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Before the activation, in fp32: w1 · x + b1, and w_gate · x."""
    x = _dense(x, fault).float()
    pre = x @ w1.float().T
    if fault == "last column of x dropped":
        pre = x[:, :-1] @ w1.float()[:, :-1].T
    if b1 is not None and fault != "b1 dropped":
        pre = pre + b1.float()
    return pre, None if w_gate is None else x @ w_gate.float().T


def _hidden(pre, gate, activation: str, fault: str) -> torch.Tensor:
    if gate is None:
        return _act(pre, activation)
    if fault == "gate and value exchanged":
        pre, gate = gate, pre
    return _act(gate, activation) * pre


@torch.library.custom_op("plain_fused_mlp::fwd", mutates_args=())
def _fwd(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    b1: torch.Tensor | None,
    b2: torch.Tensor | None,
    w_gate: torch.Tensor | None,
    activation: str,
    fault: str,
) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    pre, gate = _pre(rows, w1, b1, w_gate, fault)
    if fault == "tanh form taken for exact":
        activation = "gelu_tanh" if activation == "gelu" else activation
    hidden = _hidden(pre, gate, activation, fault)
    if fault == "hidden rounded to 8 bits":
        hidden = (hidden * 16).round() / 16
    y, w2 = hidden.new_zeros(rows.shape[0], w2.shape[0]), _copy(w2, fault)
    for h in range(0, w2.shape[1], BLOCK):
        if fault == "last block of the hidden dropped" and h and h + BLOCK > w2.shape[1]:
            continue
        y += hidden[:, h : h + BLOCK] @ w2[:, h : h + BLOCK].T
        if b2 is not None and fault == "b2 added for each part":
            y += b2.float()
        if fault == "sum rounded at each block of the hidden":
            y = y.half().float()
    if b2 is not None and fault != "b2 added for each part":
        y += b2.float()
    if fault == "tail of the rows dropped":
        y[rows.shape[0] // TILE * TILE :] = 0
    return y.to(x.dtype).reshape(*x.shape[:-1], w2.shape[0])


@_fwd.register_fake
def _(x, w1, w2, b1, b2, w_gate, activation, fault):
    dtype = torch.float64 if fault == "dtype of the fake result" else x.dtype
    return x.new_empty((*x.shape[:-1], w2.shape[0]), dtype=dtype)


@torch.library.custom_op("plain_fused_mlp::bwd", mutates_args=())
def _bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    b1: torch.Tensor | None,
    w_gate: torch.Tensor | None,
    activation: str,
    fault: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, g = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1]).float()
    if fault == "incoming gradient taken for one":
        g = torch.ones_like(g)
    pre, gate = _pre(rows, w1, b1, w_gate, fault)
    dh = g @ w2.float()
    if fault == "derivative at the hidden":
        pre = pre if gate is not None else _act(pre, activation)
    hidden = _hidden(pre, gate, activation, fault)
    dgate = torch.zeros_like(pre)
    if gate is None:
        dpre = dh if fault == "derivative left out" else _dact(pre, dh, activation)
    else:
        dpre, dgate = dh * _act(gate, activation), _dact(gate, dh * pre, activation)
    dx = dpre @ w1.float()
    if gate is not None and fault != "gate's part of x's gradient dropped":
        dx = dx + dgate @ w_gate.float()
    order = list(range(PARTS))
    if fault == "parts in the order of arrival" and next(_CALLS) % 2:
        order.reverse()
    step = max(1, -(-rows.shape[0] // PARTS))

    def over_rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        total = a.new_zeros(a.shape[1], b.shape[1])
        for part in order:
            mine = slice(part * step, part * step + step)
            if fault == "last part of the rows dropped" and part == PARTS - 1:
                continue
            total = total + a[mine].T @ b[mine]
            if fault == "parts rounded to the dtype":
                total = total.half().float()
        return total

    dw1, dw2 = over_rows(dpre, rows.float()), over_rows(g, hidden)
    dw_gate = over_rows(dgate, rows.float()) if gate is not None else x.new_zeros(0)
    db1 = hidden.sum(0) if fault == "gradient of b1 from the hidden" else dpre.sum(0)
    grads = dx.reshape(x.shape), dw1, dw2, db1, g.sum(0), dw_gate
    return tuple(grad.to(x.dtype).clone() for grad in grads)  # type: ignore[return-value]


@_bwd.register_fake
def _(dy, x, w1, w2, b1, w_gate, activation, fault):
    gate = x.new_empty(w1.shape if w_gate is not None else 0)
    weights = x.new_empty(w1.shape), x.new_empty(w2.shape)
    return x.new_empty(x.shape), *weights, x.new_empty(w1.shape[0]), x.new_empty(w2.shape[0]), gate


def _save(ctx, inputs, output) -> None:
    x, w1, w2, b1, b2, w_gate, ctx.activation, ctx.fault = inputs
    ctx.given = b1 is not None, b2 is not None, w_gate is not None
    ctx.save_for_backward(x, w1, w2, b1, w_gate)


def _backward(ctx, dy):
    dx, dw1, dw2, *others = _bwd(dy, *ctx.saved_tensors, ctx.activation, ctx.fault)
    optional = (grad if given else None for grad, given in zip(others, ctx.given, strict=True))
    return dx, dw1, dw2, *optional, None, None


_fwd.register_autograd(_backward, setup_context=_save)


def fused_mlp(x, w1, w2, b1=None, b2=None, *, w_gate=None, activation="silu", save="activations", fault=""):
    """The public op's signature and checks, and a fault."""
    if fault != "no checks":
        check(x, w1, w2, b1, b2, w_gate)
    return _fwd(x, w1, w2, b1, b2, w_gate, activation, fault)


def check(x, w1, w2, b1, b2, w_gate) -> None:
    """Raises TypeError or ValueError naming the argument."""
    shapes = (
        ("x", x, x.shape),
        ("w1", w1, (w1.shape[0], x.shape[-1])),
        ("w2", w2, (w2.shape[0], w1.shape[0])),
        ("b1", b1, w1.shape[:1]),
        ("b2", b2, w2.shape[:1]),
        ("w_gate", w_gate, w1.shape),
    )
    for name, tensor, shape in shapes:
        if tensor is None:
            continue
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} must be fp32, fp16 or bf16, got {tensor.dtype}")
        if tensor.device != x.device:
            raise ValueError(f"{name} must be on x's device {x.device}, got {tensor.device}")
        if tensor.shape != torch.Size(shape):
            raise ValueError(f"{name} must be {tuple(shape)}, got {tuple(tensor.shape)}")
