"""A plain linear cross entropy in PyTorch, a slice of the vocabulary after the other, that is right unless it is told
which fault to have.

Every fault is one line that says `fault == "..."`; "" is the control.
"""

from __future__ import annotations

import itertools
import math

import torch

_CALLS = itertools.count()
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SLICE, CHUNK = 7, 4


def _slices(vocab: int, fault: str):
    end = vocab // SLICE * SLICE if fault == "last slice of the vocabulary dropped" else vocab
    return [slice(first, min(first + SLICE, vocab)) for first in range(0, end, SLICE)]


def _logits(hidden, weight, bias, entries, softcap, fault):
    if fault == "logits rounded twice":
        z = (hidden.half() @ weight[entries].half().T).float()
    else:
        z = hidden.float() @ weight[entries].float().T
    if bias is not None and fault != "bias dropped":
        z = z + bias[entries].float()
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def _matrix(tensor: torch.Tensor, fault: str) -> torch.Tensor:
    """[rows, columns]; or what one reads there who takes it for contiguous."""
    flat = tensor.reshape(-1, tensor.shape[-1])
    if fault != "strides ignored":
        return flat
    size = (flat.numel(),) if tensor.numel() else (0,)
    if tensor.untyped_storage().nbytes() < (tensor.storage_offset() + flat.numel()) * tensor.element_size():
        return flat
    return torch.as_strided(tensor, size, (1,), tensor.storage_offset()).view(flat.shape)


@torch.library.custom_op("plain_linear_cross_entropy::fwd", mutates_args=())
def _fwd(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    ignore_index: int,
    smoothing: float,
    softcap: float | None,
    z_loss: float,
    reduction: str,
    fault: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    h, vocab = _matrix(hidden, fault), weight.shape[0]
    t = (
        _matrix(target.unsqueeze(-1), "strides ignored" if fault == "stride of target ignored" else "")
        .reshape(-1)
        .long()
    )
    rows = h.shape[0]
    peak, total, sums = (
        h.new_full((rows,), -1e38, dtype=torch.float32),
        h.new_zeros(rows).float(),
        h.new_zeros(rows).float(),
    )
    at_target = torch.zeros_like(peak)
    for entries in _slices(vocab, fault):
        z = _logits(h, weight, bias, entries, softcap, fault)
        higher = torch.maximum(peak, z.amax(1))
        if fault == "softmax without the maximum":
            higher = torch.zeros_like(peak)
        scale = torch.ones_like(peak) if fault == "sum not rescaled to the new maximum" else (peak - higher).exp()
        total = total * scale + (z - higher[:, None]).exp().sum(1)
        peak, sums = higher, sums + z.sum(1)
        here = (t >= entries.start) & (t < entries.stop)
        at_target += torch.where(here, z.gather(1, (t - entries.start).clamp(0, z.shape[1] - 1)[:, None])[:, 0], 0)
    lse = peak + total.log()
    valid = t != ignore_index
    loss = (1 - smoothing) * (peak - at_target) + total.log()
    if smoothing:
        loss += smoothing * (peak - sums / (vocab - 1 if fault == "smoothing over one entry less" else vocab))
    if z_loss:
        loss += z_loss * lse.square()
    if fault != "ignored rows counted in":
        loss = torch.where(valid, loss, 0)
    count = rows if fault == "mean over ignored rows too" else valid.sum()
    result = {"none": loss.view(target.shape), "sum": loss.sum(), "mean": loss.sum() / count}[reduction].clone()
    return result, torch.stack((peak, total))


@_fwd.register_fake
def _(hidden, weight, target, bias, ignore_index, smoothing, softcap, z_loss, reduction, fault):
    shape = hidden.shape[:-1] if reduction == "none" else ()
    dtype = torch.float64 if fault == "dtype of the fake result" else torch.float32
    return hidden.new_empty(shape, dtype=dtype), hidden.new_empty(2, hidden.shape[:-1].numel(), dtype=torch.float32)


@torch.library.custom_op("plain_linear_cross_entropy::bwd", mutates_args=())
def _bwd(
    dloss: torch.Tensor,
    stats: torch.Tensor,  # maximum and sum: exp(z - lse) would be wrong by the rounding of a large lse
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    ignore_index: int,
    smoothing: float,
    softcap: float | None,
    z_loss: float,
    reduction: str,
    fault: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    h, t, vocab = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1).long(), weight.shape[0]
    valid, (peak, total) = t != ignore_index, stats
    factor = dloss.reshape(-1).float() / (valid.sum() if reduction == "mean" else 1)
    if fault == "incoming gradient taken for one":
        factor = torch.ones_like(factor) / (valid.sum() if reduction == "mean" else 1)
    if fault == "gradient of the first row for all":
        factor = factor[:1]
    factor = torch.where(valid, factor, 0) if fault != "gradient of ignored rows" else factor.expand(t.shape)
    dh, dw = torch.zeros(h.shape, device=h.device), torch.zeros(weight.shape, device=h.device)
    db = torch.zeros(vocab, device=h.device)
    order = _slices(vocab, fault)
    if fault == "slices in the order of arrival" and next(_CALLS) % 2:
        order = order[::-1]
    for entries in order:
        z = _logits(h, weight, bias, entries, softcap, fault)
        softmax = (z - peak[:, None]).exp() / total[:, None]
        hit = t[:, None] == torch.arange(entries.start, entries.stop, device=h.device)
        g = softmax - (1 - smoothing) * hit - smoothing / vocab
        if fault != "gradient of the z-loss dropped":
            g = g + softmax * (2 * z_loss * (peak + total.log())[:, None])
        if fault == "target off by one slice":
            g = g + hit * (entries.start > 0)
        g = g * factor[:, None]
        if softcap is not None and fault != "derivative of the softcap dropped":
            g = g * (1 - (z / softcap).square())
        dh += g @ weight[entries].float()
        if fault == "gradient of hidden rounded at each slice":
            dh = dh.half().float()
        end = h.shape[0] // CHUNK * CHUNK if fault == "rows of the last chunk not in the weight's gradient" else None
        dw[entries] = g[:end].T @ h[:end].float()
        if fault == "slice overwritten before it is read" and entries.start:
            dw[entries] = g.T @ (g @ weight[entries].float())
        db[entries] = g.sum(0)
    return dh.to(h.dtype).view(hidden.shape), dw.to(h.dtype), db.to(h.dtype)


@_bwd.register_fake
def _(dloss, stats, hidden, weight, target, bias, ignore_index, smoothing, softcap, z_loss, reduction, fault):
    return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape[0])


def _save(ctx, inputs, output) -> None:
    hidden, weight, target, bias, *ctx.options = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(hidden, weight, target, bias, output[1])


def _backward(ctx, dloss, _):
    hidden, weight, target, bias, stats = ctx.saved_tensors
    dh, dw, db = _bwd(dloss, stats, hidden, weight, target, bias, *ctx.options)
    return dh, dw, None, None if bias is None else db, *(None,) * len(ctx.options)


_fwd.register_autograd(_backward, setup_context=_save)


def linear_cross_entropy(
    hidden,
    weight,
    target,
    *,
    bias=None,
    ignore_index=-100,
    label_smoothing=0.0,
    softcap=None,
    z_loss=0.0,
    reduction="mean",
    scratch_bytes=None,
    fault="",
):
    """The public op's signature and checks, and a fault."""
    if fault != "no checks":
        check(hidden, weight, target, bias)
    options = (ignore_index, label_smoothing, softcap, z_loss, reduction, fault)
    return _fwd(hidden, weight, target, bias, *options)[0]


def check(hidden, weight, target, bias) -> None:
    """Raises TypeError or ValueError naming the argument."""
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype not in DTYPES:
            raise TypeError(f"{name} must be fp32, fp16 or bf16, got {tensor.dtype}")
        if tensor is not None and tensor.device != target.device:
            raise ValueError(f"{name} must be on target's device {target.device}, got {tensor.device}")
    if weight.shape[1:] != hidden.shape[-1:]:
        raise ValueError(f"weight must be [V, {hidden.shape[-1]}], got {tuple(weight.shape)}")
    if target.shape != hidden.shape[:-1]:
        raise ValueError(f"target must be {tuple(hidden.shape[:-1])}, got {tuple(target.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [{math.prod(weight.shape[:1])}], got {tuple(bias.shape)}")
