"""The function adamw: checks, fast path of eager calls, registration with torch.library. `AdamW` is in `optimizer`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import attrgetter
from typing import Any

import torch

from .arguments import check_hyperparameters, check_scalar, check_seed, check_tensors
from .launch import Plans, lean
from .memory import dense
from .optimizer import AdamW as AdamW
from .plans import update_of
from .tables import PointerTables as PointerTables
from .tables import Tensors

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")
# Keys of lists of tensors that have passed the checks. The cache is small, because a key is as long as the lists.
_CHECKED = Plans(size=16)


def adamw(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    step: int | torch.Tensor | Sequence[torch.Tensor],
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
    tables: PointerTables | None = None,
) -> None:
    """Computes one step of AdamW in place, for all parameters in one launch.

        g ← g / grad_scale, −g to maximise
        θ ← θ − lr · weight_decay · θ
        m ← β₁ · m + (1 − β₁) · g
        v ← β₂ · v + (1 − β₂) · g²
        θ ← θ − lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + eps)

    in fp32, in PyTorch's order. t is `step`, and θ is the master weight if there is one. The host reads no tensor: with
    tensors for lr and step, a call can be captured in a CUDA graph and replayed as they change. Results are bit-wise
    repeatable, also with stochastic rounding, whose random bits depend only on the seed, the step, the parameter's
    index in the list and the element's index in memory.

    params         list of fp32, fp16 or bf16 tensors, any shapes and any mixture, all on one device
    grads          list of tensors of the params' shapes, in any of these dtypes
    exp_avgs       m, list of fp32 tensors of the params' shapes
    exp_avg_sqs    v, list of fp32 tensors of the params' shapes
    step           a number, 1 for the first step, a fp32 tensor of one element on the device, or a list of such tensors
    lr             a number, or a floating-point tensor of one element on the device
    betas, eps, weight_decay
                   numbers; (β₁, β₂) and eps of the formula
    maximize       maximise, with −g in place of g
    master_params  None, or a list with, for each parameter, None or the fp32 weights of which it is a rounded copy
    stochastic_rounding
                   bf16 parameters without master weights are rounded to one of the two neighbours, with probabilities
                   such that the expected value is the fp32 result; otherwise to the nearest
    seed           of the random bits, 0 <= seed < 2^63
    grad_scale     None or a fp32 tensor of one element. The gradients themselves are not changed.
    found_inf      None or a fp32 tensor of one element; if it is not 0, nothing is changed
    tables         a PointerTables that caches tables of addresses between calls; otherwise each call builds one

    Tensors of a parameter that are dense with the same memory order are updated in place; others are copied first, and
    copied back. Returns None.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong length, shape, device or range, RuntimeError for
    CPU tensors outside Triton's interpreter.

    AdamW: Loshchilov and Hutter 2019, arXiv:1711.05101, alg. 2. Stochastic rounding: Gupta et al. 2015,
    arXiv:1502.02551, sec. 3.
    """
    check_hyperparameters(lr, betas, eps, weight_decay)
    plain = _plain(params, grads, exp_avgs, exp_avg_sqs, master_params)
    key = _key(params, grads, exp_avgs, exp_avg_sqs, master_params, stochastic_rounding) if plain else None
    if key is None or _CHECKED.find(key) is None:
        check_tensors(params, grads, exp_avgs, exp_avg_sqs, master_params, stochastic_rounding)
        if key is not None:
            _CHECKED.keep(key, True)
    check_seed(seed)
    if tables is not None and not isinstance(tables, PointerTables):
        raise TypeError(f"adamw: tables must be a PointerTables, got {type(tables).__name__}")
    if not params:
        return
    device = params[0].device
    for name, scalar in (("grad_scale", grad_scale), ("found_inf", found_inf)):
        if scalar is not None:
            check_scalar(name, scalar, device)
    lr_tensor = lr if isinstance(lr, torch.Tensor) else None
    if lr_tensor is not None and lr_tensor.device != device:
        raise ValueError(f"adamw: lr must be on the device of params, {device}, got {lr_tensor.device}")
    number, steps = _steps(step, len(params), device)
    masters = [None] * len(params) if master_params is None else list(master_params)
    with torch.no_grad():
        if plain and lean(params[0], lr_tensor, grad_scale, found_inf, *steps):
            given = _tensors(params, grads, exp_avgs, exp_avg_sqs, masters, steps, stochastic_rounding)
            rates = (lr, betas, eps, weight_decay, maximize, seed, grad_scale, found_inf)
            _step(given, tables or PointerTables.of(0), None if steps else number, rates)
            written = [*params, *exp_avgs, *exp_avg_sqs, *(t for t in masters if t is not None)]
            torch.autograd.graph.increment_version(written)
            return
        present = [i for i, master in enumerate(masters) if master is not None]
        _adamw_op(
            list(params),
            list(grads),
            list(exp_avgs),
            list(exp_avg_sqs),
            [masters[i] for i in present],
            present,
            steps,
            number,
            lr_tensor,
            0.0 if lr_tensor is not None else float(lr),
            float(betas[0]),
            float(betas[1]),
            float(eps),
            float(weight_decay),
            maximize,
            stochastic_rounding,
            seed,
            grad_scale,
            found_inf,
            0 if tables is None else tables.handle,
        )


def _plain(*lists: Any) -> bool:
    """Whether these are lists of plain tensors in an eager call."""
    if not all(isinstance(tensors, list | tuple) for tensors in lists[:-1]) or not lists[0]:
        return False
    masters = lists[-1]
    if masters is not None and not isinstance(masters, list | tuple):
        return False
    first, *others = (tensor for tensors in lists if tensors for tensor in tensors)
    return lean(first, *others)


def _key(*lists: Any) -> Hashable:
    """The key with everything that `check_tensors` depends on. None for tensors without strides, which it rejects."""
    *columns, masters, stochastic_rounding = lists
    tensors = [tensor for column in columns for tensor in column]
    present = None if masters is None else tuple([master is not None for master in masters])
    if masters is not None:
        tensors += [master for master in masters if master is not None]
    try:
        strides = tuple(map(torch.Tensor.stride, tensors))
    except (RuntimeError, TypeError):  # a sparse tensor, or None
        return None
    counts = tuple(map(len, columns))
    return (counts, present, bool(stochastic_rounding), strides, *map(_SHAPE_AND_MORE, tensors))


_SHAPE_AND_MORE = attrgetter("shape", "dtype", "device")


def _tensors(params, grads, exp_avgs, exp_avg_sqs, masters, steps, stochastic_rounding) -> Tensors:
    columns = (list(params), list(grads), list(exp_avgs), list(exp_avg_sqs), list(masters), list(steps))
    return Tensors(*columns, sequences=list(range(len(params))), stochastic=stochastic_rounding)


def _step(given: Tensors, tables: PointerTables, step: float | None, rates: tuple[Any, ...]) -> None:
    """Runs one step on checked tensors."""
    with dense(given) as tensors:
        update_of(tensors, tables)(step, *rates)


def _steps(step: object, count: int, device: torch.device) -> tuple[float, list[torch.Tensor]]:
    """(step as a number, [step tensor of each parameter]): either the number is 0 or the list is empty."""
    if isinstance(step, int) and not isinstance(step, bool):
        if step < 1:
            raise ValueError(f"adamw: step must be at least 1, got {step}")
        return float(step), []
    if isinstance(step, torch.Tensor):
        check_scalar("step", step, device)
        return 0.0, [step] * count
    if not isinstance(step, list | tuple):
        raise TypeError(f"adamw: step must be a number, a tensor or a list of tensors, got {type(step).__name__}")
    if len(step) != count:
        raise ValueError(f"adamw: step must be one value or one per parameter, {count}, got {len(step)}")
    for index, tensor in enumerate(step):
        check_scalar(f"step[{index}]", tensor, device)
    return 0.0, list(step)


@torch.library.custom_op(f"{_NAMESPACE}::adamw", mutates_args=("params", "exp_avgs", "exp_avg_sqs", "master_params"))
def _adamw_op(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    master_params: Sequence[torch.Tensor],
    master_of: Sequence[int],
    steps: Sequence[torch.Tensor],
    step: float,
    lr_tensor: torch.Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
    stochastic_rounding: bool,
    seed: int,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    tables: int,
) -> None:
    """The op of `adamw`. master_params has the entries that are not None; master_of has the indices of their
    parameters."""
    masters = dict(zip(master_of, master_params, strict=True))
    every_master = [masters.get(i) for i in range(len(params))]
    given = _tensors(params, grads, exp_avgs, exp_avg_sqs, every_master, steps, stochastic_rounding)
    rate = lr if lr_tensor is None else lr_tensor
    rates = (rate, (beta1, beta2), eps, weight_decay, maximize, seed, grad_scale, found_inf)
    _step(given, PointerTables.of(tables), None if steps else step, rates)


@_adamw_op.register_fake
def _(*args):
    return None
