"""Finds or builds the plan of a call and runs it, for both the eager path and the ops of torch.library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .launch import Launch, Plans, lean, signature
from .launches import scale_launch
from .layout import Optional
from .loss import Loss, check, check_options
from .plans import gradient_plan, loss_plan

Needs = tuple[bool, bool, bool]
_EAGER, _LOSS, _GRADIENTS = Plans(), Plans(), Plans()
_SCALARS = (int, float, str, type(None))


@dataclass(frozen=True)
class EagerPlan:
    """`ready`: the forward computes the gradients. `run` is then a `GradientPlan`, and `scale` multiplies its gradients
    in the backward. Otherwise `run` is a `LossPlan`."""

    run: Any
    loss: Loss
    ready: bool
    scale: Launch | None


def eager_plan(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: Optional, options: tuple, needs: Needs
) -> EagerPlan:
    """The plan of an eager call. `options` are the fields of `Loss` as given. Arguments are checked for a new plan."""
    key = signature(hidden), signature(weight), signature(target), signature(bias), options, needs
    plan = _EAGER.find(key)
    if plan is None:
        loss = Loss(*options)
        check(hidden, weight, target, bias)
        check_options(loss.label_smoothing, loss.softcap, loss.reduction, loss.scratch_bytes, loss.backend)
        loss = in_floats(loss)
        plan = _new_plan(hidden, weight, target, bias, loss, needs)
        # An option that is a tensor may be overwritten later, so its plan is not cached.
        if all(isinstance(option, _SCALARS) for option in options):
            _EAGER.keep(key, plan)
    return plan


def _new_plan(hidden, weight, target, bias, loss: Loss, needs: Needs) -> EagerPlan:
    if not any(needs) or not ready_in_forward(hidden, loss):
        return EagerPlan(loss_plan(hidden, weight, target, bias, loss), loss, False, None)
    run = gradient_plan(hidden, weight, target, bias, None, loss, needs)
    wanted = (tensor if need else None for tensor, need in zip((hidden, weight, bias), needs, strict=True))
    return EagerPlan(run, loss, True, scale_launch(hidden.device, *wanted))


def in_floats(loss: Loss) -> Loss:
    """The same options, converted to the types of the op's schema."""
    softcap = None if loss.softcap is None else float(loss.softcap)
    return loss._replace(label_smoothing=float(loss.label_smoothing), softcap=softcap, z_loss=float(loss.z_loss))


def ready_in_forward(hidden: torch.Tensor, loss: Loss) -> bool:
    """Whether the forward may compute the gradients: the incoming gradient is a scalar, and the dtype is not fp16, in
    which they may underflow without the loss scale."""
    return loss.reduction != "none" and hidden.dtype != torch.float16


def loss_alone(hidden, weight, target, bias, loss: Loss) -> torch.Tensor:
    """Runs a `loss_plan`. The plan is cached if all tensors are plain; for others a signature does not determine it."""
    if not lean(hidden, weight, target, bias):
        return loss_plan(hidden, weight, target, bias, loss)(hidden, weight, target, bias)
    key = signature(hidden), signature(weight), signature(target), signature(bias), loss
    plan = _LOSS.find(key)
    if plan is None:
        plan = _LOSS.keep(key, loss_plan(hidden, weight, target, bias, loss))
    return plan(hidden, weight, target, bias)


def loss_and_gradients(
    dloss, hidden, weight, target, bias, loss: Loss, needs: Needs
) -> tuple[torch.Tensor, Optional, Optional, Optional]:
    """Runs a `gradient_plan`, cached as in `loss_alone`."""
    given = hidden, weight, target, bias, dloss
    if not lean(*given):
        return gradient_plan(*given, loss, needs)(*given)
    key = (*map(signature, given), loss, needs)
    plan = _GRADIENTS.find(key)
    if plan is None:
        plan = _GRADIENTS.keep(key, gradient_plan(*given, loss, needs))
    return plan(*given)
