# A copy of parts/checks.py, made by `nox -s vendor`: change it there.
"""Checks that the public functions share."""

from __future__ import annotations

import torch
import triton
from torch.autograd import forward_ad

FLOATS = (torch.float32, torch.float16, torch.bfloat16)

# Read once, as @triton.jit does when the kernels are imported; torch.compile cannot trace the knob itself.
INTERPRETED: bool = triton.knobs.runtime.interpret


def kind(value: object) -> str:
    """How an error message describes an argument: a tensor's dtype, or the type of anything else."""
    return str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__


def runnable(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raises RuntimeError if the tensor is not on a GPU. The CPU is allowed in Triton's interpreter."""
    if not tensor.is_cuda and not (tensor.device.type == "cpu" and INTERPRETED):
        needed = "on a GPU, or on the CPU in Triton's interpreter (TRITON_INTERPRET=1)"
        raise RuntimeError(f"{op}: {name} must be {needed}, got {tensor.device}")


def no_tangent(op: str, *tensors: torch.Tensor | None) -> None:
    """Raises NotImplementedError if a tensor has a forward-mode tangent: a torch.library op would drop it silently."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError(f"{op}: forward-mode automatic differentiation is not supported")


def no_gradient(op: str, **inputs: object) -> None:
    """Raises RuntimeError if grad mode is on and an input requires a gradient: the op has no backward."""
    for name, tensor in inputs.items() if torch.is_grad_enabled() else ():
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            raise RuntimeError(
                f"{op}: {name} must not require grad, as no gradient is defined for it: detach it, or call {op} under "
                "torch.no_grad() or inside an autograd.Function"
            )
