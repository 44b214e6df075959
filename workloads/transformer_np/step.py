"""`transformer_np`: one training step as a function of tensors, for checks and timing. Users use `ridgeline.train`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch

from kernels.adamw import PointerTables, adamw, clip_scale
from kernels.train import total_norm

from .layers import rounded_up
from .model import ALIGNMENT, TransformerNP

BETAS, EPS, WEIGHT_DECAY = (0.9, 0.999), 1e-8, 1e-2
STATES = ("weights", "exp_avg", "exp_avg_sq")
States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model, under the names of TransformerNP's arguments."""

    layers: int = 12
    d_model: int = 512
    heads: int = 8
    d_ff: int = 1365
    components: int = 10
    x_dim: int = 1
    padding: int = 128

    def model(self, **options: Any) -> TransformerNP:
        return TransformerNP(
            self.layers,
            self.d_model,
            self.heads,
            self.d_ff,
            self.components,
            x_dim=self.x_dim,
            padding=self.padding,
            **options,
        )


@lru_cache(maxsize=16)
def places(sizes: Sizes) -> tuple[tuple[tuple[str, int, tuple[int, ...]], ...], int]:
    """((name, offset, shape) of each parameter in one vector, length of the vector)."""
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in sizes.model().named_parameters()}
    found, offset = [], 0
    for name, shape in shapes.items():
        found.append((name, offset, shape))
        offset += rounded_up(prod(shape), ALIGNMENT)
    return tuple(found), offset


def views(vector: torch.Tensor, sizes: Sizes) -> dict[str, torch.Tensor]:
    """The parameters as views of a vector, by name."""
    return {name: vector[at : at + prod(shape)].view(shape) for name, at, shape in places(sizes)[0]}


def _exact(name: str) -> bool:
    """Whether a parameter is used in fp32, not rounded to the dtype of the GEMMs."""
    return name.endswith("norm.weight") or name == "heads.bias"


Gradients = Callable[[dict[str, torch.Tensor], tuple[torch.Tensor, ...]], tuple[torch.Tensor, list[torch.Tensor]]]


@lru_cache(maxsize=64)
def _gradients(
    sizes: Sizes, dtype: torch.dtype | None, compile: str | None, options: tuple[tuple[str, Any], ...]
) -> Gradients:
    """Returns a function (parameters by name, batch) -> loss and the gradients of all parameters, in order."""
    with torch.device("meta"):
        model = _Loss(sizes.model(dtype=dtype, **dict(options)))
    if compile is not None:
        model.loss = torch.compile(model.loss, dynamic=False, mode=None if compile == "default" else compile)

    def gradients(parameters: dict[str, torch.Tensor], batch: tuple[torch.Tensor, ...]) -> tuple:
        # The backward must be inside the call: a checkpointed block that is not compiled as a whole reads the
        # parameters again.
        inner = {f"model.{name}": parameter for name, parameter in parameters.items()}
        return torch.func.functional_call(model, inner, (batch, list(parameters.values())))

    return gradients


class _Loss(torch.nn.Module):
    """A module whose forward returns the model's loss and the gradients of the given tensors. `loss` may be replaced,
    for example by its compiled version."""

    def __init__(self, model: TransformerNP) -> None:
        super().__init__()
        self.model = model
        self.loss = model.loss

    def forward(
        self, batch: tuple[torch.Tensor, ...], differentiate: list[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        loss = self.loss(*batch)
        return loss, list(torch.autograd.grad(loss, differentiate))


def transformer_np(
    x_context: torch.Tensor,
    y_context: torch.Tensor,
    x_target: torch.Tensor,
    y_target: torch.Tensor,
    weights: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    step: torch.Tensor,
    *,
    sizes: Sizes,
    dtype: torch.dtype | None = None,
    checkpoint: str = "none",
    lr: float = 1e-3,
    clip: float = 1.0,
    optimizer: str = "ours",
    compile: str | None = None,
    rounded: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """Computes one training step in place: loss, gradients, clipping by their norm, and AdamW.

    x_context, y_context  [B, M, x_dim] and [B, M]; x_target and y_target likewise with N; fp32
    weights, exp_avg, exp_avg_sq  fp32 vectors of all parameters, concatenated as `places` defines
    step        fp32 scalar, the number of steps before this one
    dtype       of the GEMMs; None is fp32
    optimizer   "ours" (ridgeline's adamw), "torch" (torch.optim's fused AdamW) or "torch-compile"
    compile     None, "default" or a mode of torch.compile, for the model
    rounded     None: each step begins by rounding the weights. Or a vector like weights in `dtype`, initially
                weights.to(dtype): the GEMMs read it, and the optimizer's pass writes it
    options     of TransformerNP

    Returns (loss, weights, exp_avg, exp_avg_sq, step), and `rounded` if it is given.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape or device.
    """
    batch = (x_context, y_context, x_target, y_target)
    _check(batch, (weights, exp_avg, exp_avg_sq, step), sizes)
    _check_rounded(rounded, weights, dtype)
    gradients = _gradients(sizes, dtype, compile, tuple(sorted({"checkpoint": checkpoint, **options}.items())))
    params = views(weights, sizes)
    # Gradients of the GEMMs' weights stay in `dtype` until the optimizer reads them.
    products = {} if dtype is None else views(weights.to(dtype) if rounded is None else rounded, sizes)
    with torch.enable_grad():
        used = {name: view if _exact(name) else products.get(name, view) for name, view in params.items()}
        loss, grads = gradients({name: view.detach().requires_grad_() for name, view in used.items()}, batch)
    grads = [grad.contiguous() for grad in grads]  # like the parameters, as the optimizers require
    if optimizer == "ours":
        _, scale = clip_scale(grads, clip, tables=_tables(weights.device))
    else:
        scale = ((total_norm(grads) + 1e-6) / clip).clamp(min=1.0)
    step.add_(1)
    states = (weights, exp_avg, exp_avg_sq)
    _update(optimizer, sizes, dict(zip(params, grads, strict=True)), states, step, lr, scale, rounded)
    results = (loss.detach(), weights, exp_avg, exp_avg_sq, step)
    return results if rounded is None else (*results, rounded)


def _ours(sizes: Sizes, grads: dict[str, torch.Tensor], states: States, step, lr, scale, rounded) -> None:
    """ridgeline's AdamW. One pass writes the weights and, if `rounded` is given, the rounded weights."""
    params, grad_list, *moments = _lists(sizes, grads, states)
    masters: list[torch.Tensor | None] | None = None
    if rounded is not None:
        copies = views(rounded, sizes)
        masters = [None if _exact(name) else weight for name, weight in zip(grads, params, strict=True)]
        params = [weight if _exact(name) else copies[name] for name, weight in zip(grads, params, strict=True)]
    rates = dict(lr=lr, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    tables = _tables(states[0].device)
    adamw(params, grad_list, *moments, step=step, grad_scale=scale, master_params=masters, tables=tables, **rates)


@lru_cache(maxsize=16)
def _tables(device: torch.device) -> PointerTables:
    """The cached tables, so that a captured step need not copy the CTAs' row indices to the device: these depend only
    on sizes."""
    return PointerTables()


def _torch(sizes: Sizes, grads: dict[str, torch.Tensor], states: States, step, lr, scale, rounded) -> None:
    """torch.optim's fused AdamW, which supports only gradients in the parameters' dtype."""
    lists = _lists(sizes, {name: grad.float() for name, grad in grads.items()}, states)
    rates = dict(lr=lr, beta1=BETAS[0], beta2=BETAS[1], weight_decay=WEIGHT_DECAY, eps=EPS)
    rates |= dict(amsgrad=False, maximize=False, grad_scale=scale)
    torch._fused_adamw_(*lists, [], [step] * len(grads), **rates)
    if rounded is not None:
        copies = views(rounded, sizes)
        written = [(copies[name], weight) for name, weight in zip(grads, lists[0], strict=True) if not _exact(name)]
        torch._foreach_copy_(*map(list, zip(*written, strict=True)))


def _compiled(sizes: Sizes, grads: dict[str, torch.Tensor], states: States, step, lr, scale, rounded) -> None:
    """AdamW by torch.compile: one kernel over the vectors, which reads gradients in their dtype. Parameters that are
    used in fp32 while others are rounded have a few thousand elements; the fused AdamW updates them."""
    fp32 = {name: grad for name, grad in grads.items() if grad.dtype == torch.float32}
    fp32 = fp32 if len(fp32) < len(grads) else {}
    whole = {name: grad for name, grad in grads.items() if name not in fp32}
    first = next(iter(whole.values()))
    used, rooms = _layout(sizes, tuple(whole), first.dtype, first.device)
    pieces = [piece for name, room in rooms for piece in ((whole[name].flatten(), room) if name in whole else (room,))]
    _flat_update()(*states, torch.cat(pieces), used, step, lr, scale, rounded)
    if fp32:
        _torch(sizes, fp32, states, step, lr, scale, None)


@lru_cache(maxsize=16)
def _layout(
    sizes: Sizes, names: tuple[str, ...], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, list[tuple[str, torch.Tensor]]]:
    """(mask of the elements of `names` in a vector of all parameters, zeros that follow each parameter's gradient in
    such a vector). The zeros fill the gap up to the next parameter, and replace parameters not in `names`."""
    found, length = places(sizes)
    used = torch.zeros(length, dtype=torch.bool, device=device)
    ends = [at for _, at, _ in found[1:]] + [length]
    rooms = []
    for (name, at, shape), end in zip(found, ends, strict=True):
        begin = at + prod(shape) if name in names else at
        used[at:begin] = True
        rooms.append((name, torch.zeros(end - begin, dtype=dtype, device=device)))
    return used, rooms


@lru_cache(maxsize=1)
def _flat_update() -> Callable[..., None]:
    def update(weights, exp_avg, exp_avg_sq, grad, used, step, lr, scale, rounded) -> None:
        g = grad.float() / scale
        m = torch.where(used, torch.lerp(exp_avg, g, 1 - BETAS[0]), exp_avg)
        v = torch.where(used, exp_avg_sq * BETAS[1] + g * g * (1 - BETAS[1]), exp_avg_sq)
        size = lr / (1 - BETAS[0] ** step)
        new = weights * (1 - lr * WEIGHT_DECAY) - size * m / (v.sqrt() / (1 - BETAS[1] ** step).sqrt() + EPS)
        if rounded is not None:
            rounded.copy_(torch.where(used, new.to(rounded.dtype), rounded))
        weights.copy_(torch.where(used, new, weights))
        exp_avg.copy_(m)
        exp_avg_sq.copy_(v)

    return torch.compile(update, dynamic=False)


def _lists(sizes: Sizes, grads: dict[str, torch.Tensor], states: States) -> tuple[list[torch.Tensor], ...]:
    """Lists of the parameters, gradients and moments for the names in `grads`."""
    params, exp_avg, exp_avg_sq = (views(state, sizes) for state in states)
    columns = (params, grads, exp_avg, exp_avg_sq)
    return tuple([column[name] for name in grads] for column in columns)


_UPDATES = {"ours": _ours, "torch": _torch, "torch-compile": _compiled}


def _update(optimizer: str, *arguments: Any) -> None:
    _UPDATES[optimizer](*arguments)


def _check(batch: tuple[torch.Tensor, ...], state: tuple[torch.Tensor, ...], sizes: Sizes) -> None:
    names = ("x_context", "y_context", "x_target", "y_target", *STATES, "step")
    x_context, x_target, length = batch[0], batch[2], places(sizes)[1]
    for name, tensor in zip(names, (*batch, *state), strict=True):
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32:
            raise TypeError(f"transformer_np: {name} must be a float32 tensor, got {getattr(tensor, 'dtype', tensor)}")
        if tensor.device != x_context.device:
            raise ValueError(f"transformer_np: {name} must be on {x_context.device}, x_context's, got {tensor.device}")
    for name, x, y in (("context", x_context, batch[1]), ("target", x_target, batch[3])):
        if x.dim() != 3 or x.shape[2] != sizes.x_dim or x.shape[0] != x_context.shape[0] or 0 in x.shape:
            wanted = f"[{x_context.shape[0]}, at least 1, {sizes.x_dim}]"
            raise ValueError(f"transformer_np: x_{name} must be {wanted}, got {tuple(x.shape)}")
        if y.shape != x.shape[:2]:
            raise ValueError(
                f"transformer_np: y_{name} must be {tuple(x.shape[:2])} like x_{name}, got {tuple(y.shape)}"
            )
    for name, tensor in zip(STATES, state[:3], strict=True):
        if tensor.shape != (length,):
            raise ValueError(f"transformer_np: {name} must be [{length}], got {tuple(tensor.shape)}")
    if state[3].dim():
        raise ValueError(f"transformer_np: step must be a scalar, got shape {tuple(state[3].shape)}")


def _check_rounded(rounded: torch.Tensor | None, weights: torch.Tensor, dtype: torch.dtype | None) -> None:
    if rounded is None:
        return
    if not isinstance(rounded, torch.Tensor) or dtype is None or rounded.dtype != dtype:
        given = getattr(rounded, "dtype", rounded)
        raise TypeError(f"transformer_np: rounded must be None or a tensor of dtype {dtype}, got {given}")
    if rounded.shape != weights.shape or rounded.device != weights.device:
        wanted = f"{list(weights.shape)} on {weights.device}, like weights"
        raise ValueError(f"transformer_np: rounded must be {wanted}, got {tuple(rounded.shape)} on {rounded.device}")
