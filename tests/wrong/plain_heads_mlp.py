"""Plain heads in PyTorch, by blocks of the hidden, that are right unless told which fault to have.

Every fault is one line that says `fault == "..."`; "" is the control.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

_CALLS = itertools.count()
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
BLOCK, TILE, CHUNK = 4, 4, 5


def _dense(tensor: torch.Tensor, fault: str) -> torch.Tensor:
    """The tensor; or what one reads there who takes it for contiguous."""
    end = tensor.storage_offset() + tensor.numel()
    if fault != "strides ignored" or tensor.untyped_storage().nbytes() < end * tensor.element_size():
        return tensor
    return torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset()).view(tensor.shape)


def _act(x: torch.Tensor, name: str) -> torch.Tensor:
    if name.startswith("gelu"):
        return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")
    return {"silu": F.silu, "relu": F.relu}[name](x)


def _dact(x: torch.Tensor, dy: torch.Tensor, name: str) -> torch.Tensor:
    if name.startswith("gelu"):
        return torch.ops.aten.gelu_backward(dy, x, approximate="tanh" if name == "gelu_tanh" else "none")
    return torch.ops.aten.silu_backward(dy, x) if name == "silu" else torch.ops.aten.threshold_backward(dy, x, 0)


def _pre(x: torch.Tensor, w1: torch.Tensor, fault: str) -> torch.Tensor:
    """Before the activation, [heads, rows, hidden], in fp32."""
    x, w1 = _dense(x, fault).reshape(-1, x.shape[-1]).float(), _dense(w1, fault).float()
    if fault == "last column of x dropped":
        x, w1 = x[:, :-1], w1[:, :, :-1]
    return x @ w1.mT


@torch.library.custom_op("plain_heads_mlp::fwd", mutates_args=())
def _fwd(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, activation: str, fault: str) -> torch.Tensor:
    pre = _pre(x, w1, fault)
    if fault == "tanh form taken for exact":
        activation = "gelu_tanh" if activation == "gelu" else activation
    hidden, weights = _act(pre, activation), w2.float()
    if fault == "w2 of the first head":
        weights = weights[:1].expand_as(weights)
    y = hidden.new_zeros(*hidden.shape[:2], w2.shape[1])
    for h in range(0, w2.shape[2], BLOCK):
        if fault == "last block of the hidden dropped" and h and h + BLOCK > w2.shape[2]:
            continue
        y += hidden[:, :, h : h + BLOCK] @ weights[:, :, h : h + BLOCK].mT
        if fault == "sum rounded at each block of the hidden":
            y = y.half().float()
    if fault == "sum carried from head to head":
        y = y.cumsum(0)
    if fault == "tail of the rows dropped":
        y[:, y.shape[1] // TILE * TILE :] = 0
    if fault != "heads before rows":
        y = y.transpose(0, 1)
    return y.to(x.dtype).reshape(*x.shape[:-1], *w2.shape[:2]).contiguous()


@_fwd.register_fake
def _(x, w1, w2, activation, fault):
    dtype = torch.float64 if fault == "dtype of the fake result" else x.dtype
    return x.new_empty((*x.shape[:-1], *w2.shape[:2]), dtype=dtype)


@torch.library.custom_op("plain_heads_mlp::bwd", mutates_args=())
def _bwd(
    dy: torch.Tensor, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, activation: str, fault: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = x.reshape(-1, x.shape[-1]).float()
    g = dy.reshape(rows.shape[0], *dy.shape[-2:]).float().transpose(0, 1)
    if fault == "incoming gradient taken for one":
        g = torch.ones_like(g)
    pre = _pre(x, w1, fault)
    hidden, dh = _act(pre, activation), g @ w2.float()
    if fault == "derivative at the hidden":
        pre = hidden
    dpre = dh if fault == "derivative left out" else _dact(pre, dh, activation)
    parts = dpre @ w1.float()
    dx = parts[-1] if fault == "gradient of x of the last head" else parts.sum(0)
    starts = list(range(0, rows.shape[0], CHUNK))
    if fault == "chunks in the order of arrival" and next(_CALLS) % 2:
        starts.reverse()
    dw1, dw2 = torch.zeros(w1.shape, device=x.device), torch.zeros(w2.shape, device=x.device)
    for start in starts:
        mine = slice(start, start + CHUNK)
        if fault == "last chunk of the rows alone":
            dw1.zero_()
        dw1 += dpre[:, mine].mT @ rows[mine]
        if fault == "sum rounded at each chunk":
            dw1 = dw1.half().float()
        if fault == "first chunk left out of w2's gradient" and not start:
            continue
        dw2 += g[:, mine].mT @ (pre if fault == "w2's gradient before the activation" else hidden)[:, mine]
    return dx.to(x.dtype).reshape(x.shape), dw1.to(x.dtype, copy=True), dw2.to(x.dtype, copy=True)


@_bwd.register_fake
def _(dy, x, w1, w2, activation, fault):
    return x.new_empty(x.shape), x.new_empty(w1.shape), x.new_empty(w2.shape)


def _save(ctx, inputs, output) -> None:
    x, w1, w2, ctx.activation, ctx.fault = inputs
    ctx.save_for_backward(x, w1, w2)


def _backward(ctx, dy):
    return *_bwd(dy, *ctx.saved_tensors, ctx.activation, ctx.fault), None, None


_fwd.register_autograd(_backward, setup_context=_save)


def heads_mlp(x, w1, w2, activation="silu", fault=""):
    """The public op's signature and checks, and a fault."""
    if fault != "no checks":
        check(x, w1, w2, activation)
    return _fwd(x, w1, w2, activation, fault)


def check(x, w1, w2, activation) -> None:
    """Raises TypeError or ValueError naming the argument."""
    for name, tensor in (("x", x), ("w1", w1), ("w2", w2)):
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} must be fp32, fp16 or bf16, got {tensor.dtype}")
        if tensor.device != x.device:
            raise ValueError(f"{name} must be on x's device {x.device}, got {tensor.device}")
    if w1.shape[2:] != x.shape[-1:]:
        raise ValueError(f"w1 must be [K, H, {x.shape[-1]}], got {tuple(w1.shape)}")
    if (w2.shape[0], w2.shape[2]) != w1.shape[:2]:
        raise ValueError(f"w2 must be [{w1.shape[0]}, O, {w1.shape[1]}], got {tuple(w2.shape)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}")
