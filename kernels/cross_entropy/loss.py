"""The options of a call, and the checks of its arguments."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .checks import FLOATS, kind, runnable

TARGETS = (torch.int64, torch.int32)
REDUCTIONS = ("none", "sum", "mean")
BACKENDS = ("auto", "triton", "cuda")
MAX_VOCAB = 1 << 24
MAX_ROWS = 2**31 - 2**17  # row indices are 32-bit, including the end of the last iteration of a loop over rows


class Loss(NamedTuple):
    """The options of a call. `dtype` is that of the loss and the z-loss."""

    ignore_index: int
    label_smoothing: float
    reduction: str
    z_loss: float
    softcap: float | None
    dtype: torch.dtype
    return_z_loss: bool
    return_lse: bool

    @property
    def has_z(self) -> bool:
        return self.z_loss != 0 or self.return_z_loss


# The fields of Loss, in the same order, in the schema language of torch.library.
LOSS_SCHEMA = (
    "int ignore_index, float label_smoothing, str reduction, float z_loss, float? softcap, ScalarType dtype, "
    "bool return_z_loss, bool return_lse"
)


def check(logits, target, weight, ignore_index, label_smoothing, reduction, z_loss, softcap, backend) -> None:
    """Raises the errors that the docstring of `cross_entropy` names, except those of `check_inplace`."""
    _check_tensors(logits, target, weight)
    if not isinstance(ignore_index, int):
        raise TypeError(f"cross_entropy: ignore_index must be an int, got {type(ignore_index).__name__}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"cross_entropy: reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"cross_entropy: label_smoothing must be in [0, 1], got {label_smoothing}")
    if not z_loss >= 0:
        raise ValueError(f"cross_entropy: z_loss must be >= 0, got {z_loss}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"cross_entropy: softcap must be > 0 or None, got {softcap}")
    if backend not in BACKENDS:
        raise ValueError(f"cross_entropy: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    runnable("cross_entropy", "logits", logits)


def _check_tensors(logits, target, weight) -> None:
    if not isinstance(logits, torch.Tensor) or logits.dtype not in FLOATS:
        raise TypeError(f"cross_entropy: logits must be a tensor of float32, float16 or bfloat16, got {kind(logits)}")
    if logits.dim() == 0 or logits.shape[-1] > MAX_VOCAB or (logits.shape[-1] == 0 and logits.shape[:-1].numel()):
        raise ValueError(
            f"cross_entropy: logits must be [..., V] with 1 <= V <= {MAX_VOCAB}, got shape {tuple(logits.shape)}"
        )
    if logits.shape[:-1].numel() > MAX_ROWS:
        raise ValueError(f"cross_entropy: logits must have at most {MAX_ROWS} rows, got shape {tuple(logits.shape)}")
    if not isinstance(target, torch.Tensor) or target.dtype not in TARGETS:
        raise TypeError(f"cross_entropy: target must be a tensor of int64 or int32, got {kind(target)}")
    if target.shape != logits.shape[:-1]:
        expected = tuple(logits.shape[:-1])
        raise ValueError(
            f"cross_entropy: target must have logits' leading dimensions {expected}, got {tuple(target.shape)}"
        )
    if weight is not None:
        if not isinstance(weight, torch.Tensor) or weight.dtype not in FLOATS:
            raise TypeError(
                f"cross_entropy: weight must be a tensor of float32, float16 or bfloat16, got {kind(weight)}"
            )
        if weight.shape != logits.shape[-1:]:
            raise ValueError(
                f"cross_entropy: weight must be [{logits.shape[-1]}] like logits' rows, got {tuple(weight.shape)}"
            )
        if weight.requires_grad:
            raise ValueError("cross_entropy: weight must not require grad, as no gradient is defined for it: detach it")
    for name, tensor in (("target", target), ("weight", weight)):
        if tensor is not None and tensor.device != logits.device:
            raise ValueError(f"cross_entropy: {name} must be on logits' device {logits.device}, got {tensor.device}")


def check_inplace(logits: torch.Tensor) -> None:
    """Raises ValueError for logits that a gradient cannot overwrite, as several elements share memory."""
    if any(stride == 0 and size > 1 for stride, size in zip(logits.stride(), logits.shape, strict=True)):
        raise ValueError(
            "cross_entropy: logits must not overlap in memory with inplace=True, "
            f"got strides {tuple(logits.stride())} for shape {tuple(logits.shape)}"
        )
