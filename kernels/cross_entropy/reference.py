"""Cross entropy in plain PyTorch: the oracle. Computes in fp32 or, given fp64, in fp64."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def cross_entropy_reference(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    z_loss: float = 0.0,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_lse: bool = False,
    grad_in_forward: bool = False,
    with_grad: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Computes `cross_entropy`, or `cross_entropy_and_grad` if with_grad. With grad_in_forward all outputs but the loss
    are detached."""
    wide, flat = logits.reshape(-1, logits.shape[-1]), target.reshape(-1).long()
    wide = wide.to(torch.promote_types(logits.dtype, torch.float32))
    y = wide if softcap is None else softcap * torch.tanh(wide / softcap)
    live = flat != ignore_index
    w = None if weight is None else weight.to(y.dtype)
    # Otherwise a NaN in the weights would reach the gradient of ignored rows.
    counted = y if w is None else torch.where(live[:, None], y, 0.0)
    loss = F.cross_entropy(
        counted, flat, w, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    z = loss.new_zeros(loss.shape)
    if z_loss:
        each = torch.where(live, z_loss * torch.logsumexp(y, -1).square(), 0.0)
        z = {"none": lambda: each, "sum": each.sum, "mean": lambda: each.sum() / live.sum()}[reduction]()
        loss = loss + z
    found = [loss.to(logits.dtype), z.to(logits.dtype)] if return_z_loss else [loss.to(logits.dtype)]
    if return_lse:
        found.append(torch.logsumexp(y, -1).view(target.shape))
    found[: 1 + return_z_loss] = [
        t.view(target.shape) if reduction == "none" else t for t in found[: 1 + return_z_loss]
    ]
    if grad_in_forward:
        found[1:] = [t.detach() for t in found[1:]]
    if with_grad:
        gradient = _gradient(y, flat, live, w, label_smoothing, reduction, z_loss, softcap)
        found.insert(1, gradient.view(logits.shape).to(logits.dtype))
    return tuple(found) if len(found) > 1 else found[0]


def _gradient(y, target, live, w, label_smoothing, reduction, z_loss, softcap) -> torch.Tensor:
    """d loss.sum() / d logits, written out, because torch.compile does not trace autograd.grad."""
    vocab = y.shape[-1]
    at = torch.where(live, target, 0)[:, None]
    each = y.new_ones(vocab) if w is None else w
    w_target = torch.where(live, each[at[:, 0]], 0.0)
    by_weight, by_row = (w_target.sum(), live.sum()) if reduction == "mean" else (1.0, 1.0)
    m = w_target / by_weight * (1 - label_smoothing)
    spread = torch.where(live, label_smoothing / vocab / by_weight, 0.0)
    lse = torch.logsumexp(y, -1)
    whole = m + spread * each.sum() + torch.where(live, 2 * z_loss * lse / by_row, 0.0)
    d = torch.softmax(y, -1) * whole[:, None] - spread[:, None] * each
    d = d.scatter_add(1, at, -m[:, None])
    d = torch.where(live[:, None], d, 0.0)
    return d if softcap is None else d * (1 - (y / softcap).square())
