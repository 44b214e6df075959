"""Finds or builds the plan of a call and runs it, for both the eager path and the ops of torch.library."""

from __future__ import annotations

import torch

from .launch import Plans, lean, signature
from .layout import place
from .loss import Loss, check, check_inplace
from .plans import Forward, bwd_plan, fwd_plan, scale_plan

_EAGER, _FORWARD, _BACKWARD, _SCALE = Plans(), Plans(), Plans(), Plans()
_SCALARS = (int, float, str, bool, type(None))


def eager_plan(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    options: tuple,
    save: bool,
    gradient: str | None,
    inplace: bool,
    backend: str,
) -> tuple[Forward, Loss]:
    """(plan of an eager call, options of its loss). `options` are the arguments of the public functions from
    label_smoothing to return_lse, followed by whether autocast is on. Arguments are checked when a plan is built."""
    key = (
        signature(logits),
        place(logits),
        signature(target),
        signature(weight),
        weight is not None and weight.requires_grad,
        ignore_index,
        ignore_index.__class__,
        options,
        save,
        gradient,
        inplace,
        backend,
    )
    found = _EAGER.find(key)
    if found is None:
        label_smoothing, reduction, z_loss, softcap, *_ = options
        check(logits, target, weight, ignore_index, label_smoothing, reduction, z_loss, softcap, backend)
        if inplace:
            check_inplace(logits)
        loss = loss_of(logits, ignore_index, options)
        found = fwd_plan(logits, target, weight, loss, save, gradient, backend), loss
        # An option that is a tensor may change its value in place, so such a plan is not cached.
        if all(isinstance(option, _SCALARS) for option in options):
            _EAGER.keep(key, found)
    return found


def loss_of(logits: torch.Tensor, ignore_index: int, options: tuple) -> Loss:
    """The options of a call of a public function as a `Loss`. `options` are those of `eager_plan`."""
    label_smoothing, reduction, z_loss, softcap, return_z_loss, return_lse, autocast = options
    dtype = torch.float32 if autocast else logits.dtype
    softcap = None if softcap is None else float(softcap)
    return Loss(
        ignore_index, float(label_smoothing), reduction, float(z_loss), softcap, dtype, return_z_loss, return_lse
    )


def forward(logits, target, weight, loss: Loss, save: bool, gradient: str | None, backend: str):
    """Runs a `fwd_plan`. The plan is cached if all tensors are plain; for others a signature does not determine it."""
    if not lean(logits, target, weight):
        return fwd_plan(logits, target, weight, loss, save, gradient, backend)(logits, target, weight)
    key = (signature(logits), place(logits), signature(target), signature(weight), loss, save, gradient, backend)
    plan = _FORWARD.find(key)
    if plan is None:
        plan = _FORWARD.keep(key, fwd_plan(logits, target, weight, loss, save, gradient, backend))
    return plan(logits, target, weight)


def backward(g_loss, g_z, g_lse, logits, target, weight, stats, loss: Loss, inplace: bool) -> torch.Tensor:
    """Runs a `bwd_plan`, cached as in `forward`."""
    given = (g_loss, g_z, g_lse, logits, target, weight)
    if not lean(logits, g_loss, g_z, g_lse, target, weight, stats):
        return bwd_plan(*given, loss, inplace)(*given, stats)
    key = (
        signature(g_loss),
        signature(g_z),
        signature(g_lse),
        signature(logits),
        place(logits),
        signature(target),
        signature(weight),
        stats.data_ptr() % 16,
        loss,
        inplace,
    )
    plan = _BACKWARD.find(key)
    if plan is None:
        plan = _BACKWARD.keep(key, bwd_plan(*given, loss, inplace))
    return plan(*given, stats)


def scale(
    grad: torch.Tensor, g_loss: torch.Tensor, target: torch.Tensor, ignore_index: int, inplace: bool
) -> torch.Tensor:
    """Runs a `scale_plan`, cached as in `forward`."""
    given = grad, g_loss, target
    if not lean(*given):
        return scale_plan(*given, ignore_index, inplace)(*given)
    key = (*map(signature, given), ignore_index, inplace)
    plan = _SCALE.find(key)
    if plan is None:
        plan = _SCALE.keep(key, scale_plan(*given, ignore_index, inplace))
    return plan(*given)
