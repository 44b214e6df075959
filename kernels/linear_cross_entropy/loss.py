"""The options of a call, and the checks of its arguments."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .checks import FLOATS, kind, runnable

REDUCTIONS = ("mean", "sum", "none")
BACKENDS = ("auto", "triton", "cuda")
TARGETS = (torch.int64, torch.int32)
MAX_SIZE = 2**31 - 2**16  # of rows and of V: indices are 32-bit, including the end of the last tile
_NAME = "linear_cross_entropy"


class Loss(NamedTuple):
    """The options of a call. `scratch_bytes` bounds the memory for logits; `backend` selects how they are computed."""

    ignore_index: int
    label_smoothing: float
    softcap: float | None
    z_loss: float
    reduction: str
    scratch_bytes: int | None
    backend: str


def check(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raises the errors of the tensors that the docstring of `linear_cross_entropy` names."""
    if not isinstance(hidden, torch.Tensor) or hidden.dtype not in FLOATS:
        raise TypeError(f"{_NAME}: hidden must be a tensor of float32, float16 or bfloat16, got {kind(hidden)}")
    if hidden.dim() == 0 or hidden.shape[-1] == 0:
        raise ValueError(f"{_NAME}: hidden must be [..., H] with H >= 1, got shape {tuple(hidden.shape)}")
    for what, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None and what == "bias":
            continue
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != hidden.dtype:
            raise TypeError(f"{_NAME}: {what} must be a tensor of hidden's dtype {hidden.dtype}, got {kind(tensor)}")
        if tensor.device != hidden.device:
            raise ValueError(f"{_NAME}: {what} must be on hidden's device {hidden.device}, got {tensor.device}")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or weight.shape[0] == 0:
        expected = f"[V, {hidden.shape[-1]}] with V >= 1 like hidden's rows"
        raise ValueError(f"{_NAME}: weight must be {expected}, got {tuple(weight.shape)}")
    if max(hidden.shape[:-1].numel(), weight.shape[0]) > MAX_SIZE:
        shapes = f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        raise ValueError(f"{_NAME}: hidden and weight must have at most {MAX_SIZE} rows, got shapes {shapes}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{_NAME}: bias must be [{weight.shape[0]}] like weight's rows, got {tuple(bias.shape)}")
    if not isinstance(target, torch.Tensor) or target.dtype not in TARGETS:
        raise TypeError(f"{_NAME}: target must be a tensor of int64 or int32, got {kind(target)}")
    if target.shape != hidden.shape[:-1]:
        expected = f"{tuple(hidden.shape[:-1])} like hidden without its last dimension"
        raise ValueError(f"{_NAME}: target must be {expected}, got {tuple(target.shape)}")
    if target.device != hidden.device:
        raise ValueError(f"{_NAME}: target must be on hidden's device {hidden.device}, got {target.device}")
    if hidden.device.type == "cpu":
        runnable(_NAME, "hidden", hidden)


def check_options(
    label_smoothing: float, softcap: float | None, reduction: str, scratch_bytes: int | None, backend: str
) -> None:
    """Raises the errors of the options that the docstring of `linear_cross_entropy` names."""
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{_NAME}: label_smoothing must be in [0, 1], got {label_smoothing}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{_NAME}: softcap must be positive or None, got {softcap}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"{_NAME}: reduction must be one of {REDUCTIONS}, got {reduction!r}")
    if scratch_bytes is not None and scratch_bytes < 0:
        raise ValueError(f"{_NAME}: scratch_bytes must not be negative, got {scratch_bytes}")
    if backend not in BACKENDS:
        raise ValueError(f"{_NAME}: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
