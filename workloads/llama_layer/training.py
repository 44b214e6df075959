"""A training step of one layer: forward, backward, and AdamW in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.adamw import adamw as torch_adamw

from kernels.adamw import PointerTables, adamw

WEIGHTS = ("norm_attention", "w_qkv", "w_o", "norm_ffn", "w_up", "w_down")
HYPER = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
STEP = 10  # the step number, which determines the bias correction
STATES = ("master", "exp_avg", "exp_avg_sq")  # of each weight, in fp32; no master if the weight is fp32

Layer = Callable[..., torch.Tensor]
#: (weights, gradients, masters or None, first and second moments): all but the gradients are updated in place
Update = Callable[[list, Sequence, "list | None", list, list], None]


def state(name: str, kind: str) -> str:
    """The name of the step's argument for this state of a weight."""
    return f"{name}_{kind}"


def train_step(layer: Layer, update: Update) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Returns a training step, `step(dout, **inputs)`, of a differentiable layer.

        dx, dw = gradients of Σ layer(x, w) · dout      w, master, exp_avg, exp_avg_sq ← AdamW(dw)

    The step's arguments are those of the layer, dout, the gradient of its result, and the states of each weight by the
    names of `state`. The step returns dx and the updated tensors: the weights, their masters if there are any, the
    first and second moments. It raises TypeError for a wrong dtype and ValueError for a wrong shape or device of dout
    or a state, TypeError for x or a weight that is not floating-point, and the errors of layer and update.
    """

    def step(dout: torch.Tensor, **inputs: Any) -> tuple[torch.Tensor, ...]:
        names = [name for name in WEIGHTS if name in inputs]
        _check(dout, inputs, names)
        masters, first, second = (_taken(inputs, names, kind) for kind in STATES)
        weights = [inputs[name] for name in names]
        leaves = {name: inputs[name].detach().requires_grad_() for name in ("x", *names)}
        with torch.enable_grad():
            out = layer(**{**inputs, **leaves})
            dx, *grads = torch.autograd.grad(out, list(leaves.values()), dout)
        del out
        with torch.no_grad():
            update(weights, grads, masters or None, first, second)
        return dx, *weights, *masters, *first, *second

    return step


def _check(dout: torch.Tensor, inputs: dict[str, Any], names: list[str]) -> None:
    for name in ("x", *names):
        if not inputs[name].is_floating_point():
            raise TypeError(f"train_step: {name} must be floating-point, got {inputs[name].dtype}")
    like = [("dout", dout, "x", inputs["x"].dtype)]
    for name in names:
        found = ((state(name, kind), inputs.get(state(name, kind))) for kind in STATES)
        like += [(own, tensor, name, torch.float32) for own, tensor in found if tensor is not None]
    for name, tensor, other, dtype in like:
        wanted = inputs[other]
        if tensor.dtype != dtype:
            raise TypeError(f"train_step: {name} must be {dtype}, got {tensor.dtype}")
        if tensor.shape != wanted.shape or tensor.device != wanted.device:
            expected, got = f"{list(wanted.shape)} on {wanted.device}", f"{list(tensor.shape)} on {tensor.device}"
            raise ValueError(f"train_step: {name} must be {expected} like {other}, got {got}")


def _taken(inputs: dict[str, Any], names: list[str], kind: str) -> list[torch.Tensor]:
    return [inputs.pop(state(name, kind)) for name in names if state(name, kind) in inputs]


def our_adamw() -> Update:
    """Our AdamW: one launch for all weights, which also rounds the masters to the weights."""
    tables = PointerTables()

    def update(weights, grads, masters, first, second) -> None:
        adamw(weights, grads, first, second, STEP, master_params=masters, tables=tables, **HYPER)

    return update


def fused_adamw() -> Update:
    """PyTorch's fused AdamW. It requires weights, gradients and moments of the same dtype: for 16-bit weights the
    gradients are converted to fp32 first, and the masters are rounded afterwards."""
    steps: dict[tuple[torch.device, int], list[torch.Tensor]] = {}

    def update(weights, grads, masters, first, second) -> None:
        key = weights[0].device, len(weights)
        if key not in steps:
            steps[key] = [torch.zeros((), device=key[0]) for _ in weights]
        torch._foreach_zero_(steps[key])
        torch._foreach_add_(steps[key], STEP - 1)  # the optimizer adds 1 before it uses the step
        (beta1, beta2), rates = HYPER["betas"], {name: HYPER[name] for name in ("lr", "eps", "weight_decay")}
        wide, given = (weights, list(grads)) if masters is None else (masters, [g.float() for g in grads])
        options = dict(amsgrad=False, maximize=False, fused=True, beta1=beta1, beta2=beta2, **rates)
        torch_adamw(wide, given, first, second, [], steps[key], **options)
        if masters is not None:
            torch._foreach_copy_(weights, masters)

    return update
