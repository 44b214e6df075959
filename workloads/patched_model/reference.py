"""The oracle of a training step in plain PyTorch, every formula written out: the models of `Sizes`, and AdamW.

Only the input of each layer is saved for the backward, so that fp64 fits in memory wherever the weights do.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from .step import BETAS, EPS, WEIGHT_DECAY, Sizes, places, views

ROWS = 1024  # rows of logits that are computed at once

_kept_input = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def patched_model_reference(
    tokens: torch.Tensor,
    weights: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    step: torch.Tensor,
    *,
    sizes: Sizes,
    lr: float = 1e-4,
) -> tuple[torch.Tensor, ...]:
    """(loss, weights, exp_avg, exp_avg_sq, step) after one step, as new tensors. The model is computed in the dtype of
    weights, AdamW at least in fp32."""
    names = [name for name, _, _ in places(sizes)[0]]
    loss, grads = _differentiated(tokens, weights, sizes, names)
    wide = torch.promote_types(weights.dtype, torch.float32)
    number = step + 1
    corrections = [1 - beta ** number.to(wide) for beta in BETAS]
    updated = [vector.clone() for vector in (weights, exp_avg, exp_avg_sq)]
    parts = [views(vector, sizes) for vector in updated]
    for name, grad in zip(names, grads, strict=True):
        p, m, v = (part[name] for part in parts)
        grad = grad.to(wide)
        new_m = BETAS[0] * m.to(wide) + (1 - BETAS[0]) * grad
        new_v = BETAS[1] * v.to(wide) + (1 - BETAS[1]) * grad * grad
        root = (new_v / corrections[1]).sqrt() + EPS
        p.copy_(p.to(wide) * (1 - lr * WEIGHT_DECAY) - lr * new_m / corrections[0] / root)
        m.copy_(new_m)
        v.copy_(new_v)
    return loss, *updated, number


def loss_and_norms(
    tokens: torch.Tensor, weights: torch.Tensor, norms_avg: torch.Tensor, *, sizes: Sizes
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, exp_avg of the weights of all norms after one step). `norms_avg` is that exp_avg before the step. Each
    part of a layer has a norm before, in or after it, so these gradients depend on the entire model."""
    names = norms(sizes)
    loss, grads = _differentiated(tokens, weights, sizes, names)
    wide = torch.promote_types(weights.dtype, torch.float32)
    new = BETAS[0] * norms_avg.to(wide) + (1 - BETAS[0]) * torch.cat([grad.to(wide) for grad in grads])
    return loss, new.to(weights.dtype)


def norms(sizes: Sizes) -> list[str]:
    """The names of the parameters that are vectors."""
    return [name for name, _, shape in places(sizes)[0] if len(shape) == 1]


def of_norms(vector: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """The elements of the norms in a vector of all parameters, concatenated."""
    found = views(vector, sizes)
    return torch.cat([found[name] for name in norms(sizes)])


def _differentiated(
    tokens: torch.Tensor, weights: torch.Tensor, sizes: Sizes, names: list[str]
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """(loss, at least in fp32; gradients of the parameters with these names)."""
    with torch.enable_grad():
        p = {name: view.detach() for name, view in views(weights, sizes).items()}
        leaves = [p[name].requires_grad_() for name in names]
        loss = _loss(tokens, p, sizes)
        return loss.detach(), torch.autograd.grad(loss, leaves)


def _loss(tokens: torch.Tensor, p: dict[str, torch.Tensor], sizes: Sizes) -> torch.Tensor:
    embedding, length = p["model.embed_tokens.weight"], tokens.shape[1]
    wide = torch.promote_types(embedding.dtype, torch.float32)
    pairs = torch.arange(0, sizes.head_dim, 2, device=tokens.device, dtype=wide) / sizes.head_dim
    angles = torch.outer(torch.arange(length, device=tokens.device, dtype=wide), sizes.rope_theta**-pairs)
    cos, sin = (table.to(embedding.dtype) for table in (angles.cos(), angles.sin()))
    x = F.embedding(tokens, embedding)
    for i in range(sizes.num_hidden_layers):
        prefix = f"model.layers.{i}."
        layer = {name.removeprefix(prefix): value for name, value in p.items() if name.startswith(prefix)}
        x = _kept_input(_layer, x, layer, cos, sin, sizes)
    x = _normed(x, p["model.norm.weight"], sizes)[:, :-1].flatten(0, 1)
    targets = tokens[:, 1:].flatten()
    pieces = zip(x.split(ROWS), targets.split(ROWS), strict=True)
    sums = [_kept_input(_negative_log_likelihood, rows, embedding, t, wide) for rows, t in pieces]
    return torch.stack(sums).sum() / targets.numel()


def _layer(x, p, cos, sin, s: Sizes) -> torch.Tensor:
    h = _normed(x, p["input_layernorm.weight"], s)
    q, k, v = (F.linear(h, p[f"self_attn.{n}_proj.weight"]).unflatten(-1, (-1, s.head_dim)) for n in "qkv")
    if s.family == "qwen3":
        q, k = _normed(q, p["self_attn.q_norm.weight"], s), _normed(k, p["self_attn.k_norm.weight"], s)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
    k, v = (t.repeat_interleave(s.num_attention_heads // s.num_key_value_heads, 1) for t in (k, v))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    x = x + F.linear(attended, p["self_attn.o_proj.weight"])
    h = _normed(x, p["post_attention_layernorm.weight"], s)
    gate, up = (F.linear(h, p[f"mlp.{n}_proj.weight"]) for n in ("gate", "up"))
    return x + F.linear(F.silu(gate) * up, p["mlp.down_proj.weight"])


def _negative_log_likelihood(x, embedding, targets, wide: torch.dtype) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, embedding).to(wide), targets, reduction="sum")


def _normed(x: torch.Tensor, weight: torch.Tensor, s: Sizes) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, s.rms_norm_eps)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
