"""The oracle of a training step in plain PyTorch: every formula written out, on slices of the vector of parameters."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from .step import BETAS, EPS, WEIGHT_DECAY, Sizes, views

NORM_EPS = 1e-6
SCORES = 2**28  # scores of the queries that are computed at once
FP64_SCORES = 2**36  # scores of all queries for which fp64 takes some 40 s for 12 layers on an H200


def transformer_np_reference(
    x_context,
    y_context,
    x_target,
    y_target,
    weights,
    exp_avg,
    exp_avg_sq,
    step,
    *,
    sizes: Sizes,
    dtype: torch.dtype | None = None,
    checkpoint: str = "none",
    lr: float = 1e-3,
    clip: float = 1.0,
) -> tuple[torch.Tensor, ...]:
    """(loss, weights, exp_avg, exp_avg_sq, step) after one step, as new tensors. In fp64 if weights are fp64, otherwise
    with GEMMs in `dtype`. Options of checkpointing have no effect here."""
    products = _products(weights, dtype)
    with torch.enable_grad():
        leaf = weights.detach().clone().requires_grad_()
        p = {name: view.to(products) for name, view in views(leaf, sizes).items()}
        batch = (x_context, y_context, x_target, y_target)
        loss = _loss(p, views(leaf, sizes)["heads.bias"], *batch, sizes, products)
        (grad,) = torch.autograd.grad(loss, leaf)
    grad = grad / ((grad.norm() + 1e-6) / clip).clamp(min=1.0)
    used = torch.zeros_like(weights, dtype=torch.bool)  # the gaps between the parameters are not written
    for view in views(used, sizes).values():
        view.fill_(True)
    number = step + 1
    m = BETAS[0] * exp_avg + (1 - BETAS[0]) * grad
    v = BETAS[1] * exp_avg_sq + (1 - BETAS[1]) * grad * grad
    m_hat, v_hat = m / (1 - BETAS[0] ** number), v / (1 - BETAS[1] ** number)
    updated = weights * (1 - lr * WEIGHT_DECAY) - lr * m_hat / (v_hat.sqrt() + EPS)
    kept = ((updated, weights), (m, exp_avg), (v, exp_avg_sq))
    return loss.detach(), *(torch.where(used, new, old) for new, old in kept), number


def loss_reference(
    x_context, y_context, x_target, y_target, weights, *, sizes: Sizes, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The loss before the step, computed without saving tensors for a backward."""
    products = _products(weights, dtype)
    with torch.no_grad():
        p = {name: view.to(products) for name, view in views(weights, sizes).items()}
        batch = (x_context, y_context, x_target, y_target)
        return _loss(p, views(weights, sizes)["heads.bias"], *batch, sizes, products)


def _products(weights: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the GEMMs: `dtype`, but fp64 for the oracle."""
    return weights.dtype if weights.dtype == torch.float64 or dtype is None else dtype


def _loss(p, bias, x_context, y_context, x_target, y_target, sizes: Sizes, products: torch.dtype) -> torch.Tensor:
    zeros, ones = torch.zeros_like(y_target), torch.ones_like(y_context)
    context = torch.cat((x_context, y_context[..., None], ones[..., None]), -1)
    targets = torch.cat((x_target, zeros[..., None], zeros[..., None]), -1)
    x = torch.cat((context, targets), 1).to(products)
    x = F.silu(x @ p["embed.0.weight"].T + p["embed.0.bias"]) @ p["embed.2.weight"].T + p["embed.2.bias"]
    length = x_context.shape[1]
    for i in range(sizes.layers):
        at, mlp = f"blocks.{i}.attention.", f"blocks.{i}.mlp."
        h = F.rms_norm(x, x.shape[-1:], p[f"{at}norm.weight"], NORM_EPS)
        keys, values = (h[:, :length] @ p[f"{at}kv.weight"].T).chunk(2, -1)
        q, k, v = (_split(t, sizes.heads) for t in (h @ p[f"{at}q.weight"].T, keys, values))
        attended = _attend(q, k, v).transpose(1, 2).flatten(2)
        x = x + attended @ p[f"{at}out.weight"].T
        h = F.rms_norm(x, x.shape[-1:], p[f"blocks.{i}.norm.weight"], NORM_EPS)
        x = x + F.silu(h @ p[f"{mlp}up"].T) @ p[f"{mlp}down"].T
    h = F.rms_norm(x[:, length:], x.shape[-1:], p["norm.weight"], NORM_EPS)
    ups, downs = p["heads.up"], p["heads.down"]
    out = torch.stack([F.silu(h @ up.T) @ down.T for up, down in zip(ups, downs, strict=True)], -2)
    wide = torch.promote_types(products, torch.float32)
    logits, mu, log_sigma = (out.to(wide) + bias).unbind(-1)
    z = (y_target[..., None] - mu) / log_sigma.exp()
    log_density = logits.log_softmax(-1) - z * z / 2 - log_sigma - math.log(2 * math.pi) / 2
    return -log_density.logsumexp(-1).mean()


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q kᵀ / √d) v. Without a backward, at most SCORES scores are computed at once, as PyTorch in fp64 has them
    all in memory. If there are more than FP64_SCORES in all, they are computed in fp32, for which PyTorch has none in
    memory: the loss of that many points is compared to 2e-3."""
    if torch.is_grad_enabled() or q.dtype.itemsize == 2:
        return F.scaled_dot_product_attention(q, k, v)
    each = k.shape[0] * k.shape[1] * k.shape[2]
    if each * q.shape[2] > FP64_SCORES:
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float()).to(q.dtype)
    some = q.split(max(1, SCORES // each), 2)
    return torch.cat([F.scaled_dot_product_attention(queries, k, v) for queries in some], 2)


def _split(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)
