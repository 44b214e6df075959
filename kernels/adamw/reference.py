"""AdamW in plain PyTorch, one parameter at a time: the oracle. Computes in fp32 or, given fp64, in fp64."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Lists = tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]


def adamw_reference(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    step: int | torch.Tensor,
    *,
    lr: float | torch.Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    maximize: bool = False,
    master_params: Sequence[torch.Tensor | None] | None = None,
    stochastic_rounding: bool = False,
    seed: int = 0,
    grad_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
) -> Lists:
    """The new params, exp_avgs, exp_avg_sqs and those of master_params that are not None. Stochastic rounding is
    replaced by rounding to nearest: only its mean is defined."""
    beta1, beta2 = betas
    if isinstance(step, torch.Tensor):
        step = step.double()
    bias1, bias2 = 1 - beta1**step, 1 - beta2**step
    new: Lists = ([], [], [], [])
    for index, (p, g, m, v) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
        master = None if master_params is None else master_params[index]
        w = (p if master is None else master).to(m.dtype)
        g = g.to(m.dtype)
        if grad_scale is not None:
            g = g / grad_scale
        if maximize:
            g = -g
        m_new = beta1 * m + (1 - beta1) * g
        v_new = beta2 * v + (1 - beta2) * g * g
        w_new = w - lr * weight_decay * w if weight_decay else w
        w_new = w_new - lr / bias1 * m_new / (v_new.sqrt() / bias2**0.5 + eps)
        if found_inf is not None:
            w_new, m_new, v_new = (torch.where(found_inf == 0, b, a) for a, b in ((w, w_new), (m, m_new), (v, v_new)))
        new[0].append(w_new.to(p.dtype))
        new[1].append(m_new)
        new[2].append(v_new)
        if master is not None:
            new[3].append(w_new)
    return new


def clip_scale_reference(
    grads: Sequence[torch.Tensor], max_norm: float, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """(2-norm of all gradients, scale by which to divide them so that it is at most max_norm)."""
    norm = torch.stack([g.to(dtype).square().sum() for g in grads]).sum().sqrt()
    return norm, ((norm + 1e-6) / max_norm).clamp(min=1.0)
