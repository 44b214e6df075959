"""Plain mixture-density heads in PyTorch that are right unless told which fault to have.

Every fault is one line that says `fault == "..."`; "" is the control.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F

_CALLS = itertools.count()
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
CHUNK = 5


def _dense(tensor: torch.Tensor, fault: str) -> torch.Tensor:
    """The tensor; or what one reads there who takes it for contiguous."""
    end = tensor.storage_offset() + tensor.numel()
    if fault != "strides of y ignored" or tensor.untyped_storage().nbytes() < end * tensor.element_size():
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


def _parameters(x, w1, w2, bias, activation, fault) -> tuple[torch.Tensor, torch.Tensor]:
    """Before the activation [heads, rows, hidden], and the parameters [rows, heads, 3], in fp32."""
    pre = x.reshape(-1, x.shape[-1]).float() @ w1.float().mT
    found = (_act(pre, activation) @ w2.float().mT).transpose(0, 1)
    if bias is not None and fault != "bias left out":
        found = found + bias.float()
    if fault == "mean and deviation exchanged":
        found = found[..., [0, 2, 1]]
    if fault == "parameters rounded to half precision":
        found = found.half().float()
    return pre, found


def _densities(found: torch.Tensor, y: torch.Tensor, fault: str) -> tuple[torch.Tensor, ...]:
    """1/sigma, z, and the logarithms of the weights and of the joint densities, [rows, heads]."""
    logits, mu, log_sigma = found.unbind(-1)
    if fault == "last head skipped":
        logits = (
            torch.cat((logits[:, :-1], torch.full_like(logits[:, -1:], -math.inf)), 1)
            if logits.shape[1] > 1
            else logits
        )
    inverse = (-log_sigma).exp()
    z = (y[:, None] - mu) * inverse
    weight = logits - logits.logsumexp(1, keepdim=True) if fault != "weights not normalised" else logits
    joint = weight - log_sigma - 0.5 * z.square()
    return inverse, z, weight, joint


@torch.library.custom_op("plain_heads_gmm::fwd", mutates_args=())
def _fwd(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    reduction: str,
    fault: str,
) -> torch.Tensor:
    _, found = _parameters(x, w1, w2, bias, activation, fault)
    _, _, _, joint = _densities(found, _dense(y, fault).reshape(-1).float(), fault)
    if fault == "log-sum-exp without the maximum":
        log_p = joint.exp().sum(1).log()
    else:
        log_p = joint.logsumexp(1)
    if fault != "-0.5 log 2 pi dropped":
        log_p = log_p - 0.5 * math.log(2 * math.pi)
    loss = log_p if fault == "sign of the log-likelihood" else -log_p
    if fault == "tail of the rows dropped":
        loss[loss.shape[0] // 4 * 4 :] = 0
    if reduction == "none":
        return loss.reshape(y.shape).clone()
    return loss.mean() if reduction == "mean" else loss.sum()


@_fwd.register_fake
def _(x, w1, w2, y, bias, activation, reduction, fault):
    dtype = torch.float64 if fault == "dtype of the fake result" else torch.float32
    return x.new_empty(y.shape if reduction == "none" else (), dtype=dtype)


@torch.library.custom_op("plain_heads_gmm::bwd", mutates_args=())
def _bwd(
    dloss: torch.Tensor,
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    reduction: str,
    fault: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    pre, found = _parameters(x, w1, w2, bias, activation, fault)
    rows = x.reshape(-1, x.shape[-1]).float()
    inverse, z, weight, joint = _densities(found, _dense(y, fault).reshape(-1).float(), fault)
    grad = -dloss.float().reshape(-1, 1)
    if fault == "incoming gradient taken for one":
        grad = -torch.ones_like(grad)
    if reduction == "mean" and fault != "gradient of the mean not divided":
        grad = grad / rows.shape[0]
    posterior, weight = joint.softmax(1), weight.softmax(1)
    if fault == "prior taken for the posterior":
        posterior = weight
    d_mu = posterior * z * inverse
    d_log_sigma = posterior * (z * z - (0 if fault == "gradient of sigma without its own term" else 1))
    if fault == "gradient of sigma in place of its logarithm":
        d_log_sigma = d_log_sigma * inverse
    g = grad[:, :, None] * torch.stack((posterior - weight, d_mu, d_log_sigma), 2)
    dy = (grad * (d_mu if fault == "sign of y's gradient" else -d_mu)).sum(1)
    hidden, heads = _act(pre, activation), g.transpose(0, 1)
    dpre = _dact(pre, heads @ w2.float(), activation)
    starts = list(range(0, rows.shape[0], CHUNK))
    if fault == "chunks in the order of arrival" and next(_CALLS) % 2:
        starts.reverse()
    dw1, dw2 = torch.zeros(w1.shape, device=x.device), torch.zeros(w2.shape, device=x.device)
    for start in starts:
        mine = slice(start, start + CHUNK)
        if fault == "last chunk of the rows alone":
            dw1.zero_()
        dw1 += dpre[:, mine].mT @ rows[mine]
        dw2 += heads[:, mine].mT @ hidden[:, mine]
    dbias = g[-1] if fault == "bias's gradient of the last row" and len(g) else g.sum(0)
    dx = (dpre @ w1.float()).sum(0)
    return (
        dx.to(x.dtype).reshape(x.shape),
        dw1.to(x.dtype, copy=True),
        dw2.to(x.dtype, copy=True),
        dy.to(y.dtype, copy=True).reshape(y.shape),
        dbias.to(x.dtype, copy=True),
    )


@_bwd.register_fake
def _(dloss, x, w1, w2, y, bias, activation, reduction, fault):
    likes = x, w1, w2, y, w2.new_empty((w2.shape[0], 3))
    return tuple(like.new_empty(like.shape) for like in likes)


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.activation, ctx.reduction, ctx.fault = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, dloss):
    *grads, dbias = _bwd(dloss, *ctx.saved_tensors, ctx.activation, ctx.reduction, ctx.fault)
    return *grads, dbias if ctx.saved_tensors[4] is not None else None, None, None, None


_fwd.register_autograd(_backward, setup_context=_save)


def heads_gmm(x, w1, w2, y, bias=None, activation="silu", reduction="mean", fault=""):
    """The public op's signature and checks, and a fault."""
    if fault != "no checks":
        check(x, w1, w2, y, bias, activation, reduction)
    return _fwd(x, w1, w2, y, bias, activation, reduction, fault)


def check(x, w1, w2, y, bias, activation, reduction) -> None:
    """Raises TypeError or ValueError naming the argument."""
    given = {"x": x, "w1": w1, "w2": w2, "y": y, **({"bias": bias} if bias is not None else {})}
    for name, tensor in given.items():
        if tensor.dtype not in DTYPES or tensor.dtype not in (x.dtype, torch.float32 if name == "y" else x.dtype):
            raise TypeError(f"{name} must be fp32, fp16 or bf16, like x, got {tensor.dtype}")
        if tensor.device != x.device:
            raise ValueError(f"{name} must be on x's device {x.device}, got {tensor.device}")
    if w1.dim() != 3 or w1.shape[2:] != x.shape[-1:]:
        raise ValueError(f"w1 must be [K, H, {x.shape[-1]}], got {tuple(w1.shape)}")
    heads, hidden = w1.shape[:2]
    for name, shape in {"w2": (heads, 3, hidden), "y": x.shape[:-1], "bias": (heads, 3)}.items():
        if name in given and given[name].shape != shape:
            raise ValueError(f"{name} must be {tuple(shape)}, got {tuple(given[name].shape)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be mean, sum or none, got {reduction!r}")
