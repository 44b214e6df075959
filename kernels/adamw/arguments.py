"""The checks of adamw's arguments: errors before any launch, which name the argument."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .checks import FLOATS, kind, runnable

NAMES = "float32, float16 or bfloat16"


def check_hyperparameters(
    lr: float | torch.Tensor, betas: tuple[float, float], eps: float, weight_decay: float
) -> None:
    """Checks ranges and types. The device of a tensor lr is checked with the tensors."""
    if isinstance(lr, torch.Tensor):
        if lr.numel() != 1 or not lr.is_floating_point():
            raise ValueError(f"adamw: lr must have one floating-point element, got {lr.dtype} {tuple(lr.shape)}")
    else:
        _check_number("lr", lr, math.inf)
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise ValueError(f"adamw: betas must be two numbers, got {betas!r}")
    for index, beta in enumerate(betas):
        _check_number(f"betas[{index}]", beta, 1.0)
    _check_number("eps", eps, math.inf)
    _check_number("weight_decay", weight_decay, math.inf)


def _check_number(name: str, value: object, end: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"adamw: {name} must be a number, got {type(value).__name__}")
    if not 0.0 <= value < end:
        raise ValueError(f"adamw: {name} must be in [0, {end}), got {value}")


def check_seed(seed: object) -> None:
    """Checks that the seed fits the 64-bit key of Philox, which is one argument of a kernel."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"adamw: seed must be a number in [0, 2^63), got {seed!r}")


def check_tensors(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    master_params: Sequence[torch.Tensor | None] | None,
    stochastic_rounding: bool,
) -> None:
    """Checks the lengths of the lists, and dtypes, shapes, devices and overlap of their tensors."""
    lists: dict[str, Sequence[Any]] = {
        "params": params,
        "grads": grads,
        "exp_avgs": exp_avgs,
        "exp_avg_sqs": exp_avg_sqs,
    }
    if master_params is not None:
        lists["master_params"] = master_params
    for name, tensors in lists.items():
        if not isinstance(tensors, list | tuple):
            raise TypeError(f"adamw: {name} must be a list of tensors, got {type(tensors).__name__}")
        if len(tensors) != len(params):
            raise ValueError(f"adamw: {name} must have as many entries as params, {len(params)}, got {len(tensors)}")
    for index, param in enumerate(params):
        _check_tensor(f"params[{index}]", param, FLOATS, NAMES, written=True)
        has_master = master_params is not None and master_params[index] is not None
        check_kind(f"params[{index}]", param.dtype, has_master, stochastic_rounding)
        for name, tensors in lists.items():
            tensor, item, state = tensors[index], f"{name}[{index}]", name not in ("params", "grads")
            if tensor is None and name == "master_params":
                continue
            _check_tensor(item, tensor, FLOATS[:1] if state else FLOATS, "float32" if state else NAMES, written=state)
            if tensor.shape != param.shape:
                expected = f"the shape of params[{index}], {tuple(param.shape)}"
                raise ValueError(f"adamw: {item} must have {expected}, got {tuple(tensor.shape)}")
            if tensor.device != params[0].device:
                expected = f"the device of params[0], {params[0].device}"
                raise ValueError(f"adamw: {item} must be on {expected}, got {tensor.device}")
    if params:
        runnable("adamw", "params", params[0])


def check_grads(grads: Sequence[torch.Tensor]) -> None:
    """Checks the gradients of clip_scale."""
    if not isinstance(grads, list | tuple):
        raise TypeError(f"clip_scale: grads must be a list of tensors, got {type(grads).__name__}")
    if not grads:
        raise ValueError("clip_scale: grads must not be empty")
    for index, grad in enumerate(grads):
        _check_tensor(f"grads[{index}]", grad, FLOATS, NAMES, written=False, op="clip_scale")
        if grad.device != grads[0].device:
            expected = f"the device of grads[0], {grads[0].device}"
            raise ValueError(f"clip_scale: grads[{index}] must be on {expected}, got {grad.device}")
    runnable("clip_scale", "grads", grads[0])


def check_max_norm(max_norm: object) -> None:
    if isinstance(max_norm, bool) or not isinstance(max_norm, int | float):
        raise TypeError(f"clip_scale: max_norm must be a number, got {type(max_norm).__name__}")
    if not max_norm > 0:
        raise ValueError(f"clip_scale: max_norm must be positive, got {max_norm}")


def check_kind(name: str, dtype: torch.dtype, has_master: bool, stochastic_rounding: bool) -> None:
    """Raises ValueError if a parameter of this dtype cannot have this rounding."""
    if has_master and dtype == torch.float32:
        raise ValueError(f"adamw: {name} is float32, so that its entry of master_params must be None")
    if stochastic_rounding and not has_master and dtype == torch.float16:
        raise ValueError(f"adamw: {name} must be bfloat16 or float32 for stochastic rounding, got float16")


def check_scalar(name: str, tensor: object, device: torch.device, op: str = "adamw") -> None:
    """Checks that `tensor` has one fp32 element and is on the device."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32:
        raise TypeError(f"{op}: {name} must be a tensor of float32, got {kind(tensor)}")
    if tensor.numel() != 1:
        raise ValueError(f"{op}: {name} must have one element, got shape {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{op}: {name} must be on the device of the gradients, {device}, got {tensor.device}")


def _check_tensor(
    name: str, tensor: object, dtypes: Sequence[torch.dtype], names: str, written: bool, op: str = "adamw"
) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in dtypes:
        raise TypeError(f"{op}: {name} must be a tensor of {names}, got {kind(tensor)}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{op}: {name} must be a dense tensor, got layout {tensor.layout}")
    if written and any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ValueError(f"{op}: {name} must not overlap itself, got strides {tensor.stride()}")
