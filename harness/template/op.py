"""The public function: checks, registration with torch.library, autograd."""

from __future__ import annotations

import torch
import triton

from .kernel import TEMPLATE_bwd, TEMPLATE_fwd

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Read once, like @triton.jit does. torch.compile cannot trace the reading.
INTERPRETED: bool = triton.knobs.runtime.interpret

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")


def TEMPLATE(x: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    """y = alpha · x, computed in fp32. Differentiable in x.

    x      [..., D], fp32, fp16 or bf16, any strides. Rows are read in place when the leading dimensions flatten to one
           stride and the last stride is 1; otherwise they are copied first.

    Returns y in shape and dtype of x, contiguous.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, RuntimeError for a CPU tensor outside Triton's
    interpreter.
    """
    if not isinstance(x, torch.Tensor) or x.dtype not in DTYPES:
        kind = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"TEMPLATE: x must be float32, float16 or bfloat16, got {kind}")
    if x.dim() == 0:
        raise ValueError("TEMPLATE: x must be [..., D], got a tensor without dimensions")
    if not x.is_cuda and not (x.device.type == "cpu" and INTERPRETED):
        needed = "on a GPU, or on the CPU with TRITON_INTERPRET=1"
        raise RuntimeError(f"TEMPLATE: x must be {needed}, got {x.device}")
    return _fwd_op(x, alpha)


@torch.library.custom_op(f"{_NAMESPACE}::TEMPLATE_fwd", mutates_args=())
def _fwd_op(x: torch.Tensor, alpha: float) -> torch.Tensor:
    return TEMPLATE_fwd(x, alpha)


@_fwd_op.register_fake
def _(x, alpha):
    return x.new_empty(x.shape)


@torch.library.custom_op(f"{_NAMESPACE}::TEMPLATE_bwd", mutates_args=())
def _bwd_op(dy: torch.Tensor, alpha: float) -> torch.Tensor:
    return TEMPLATE_bwd(dy, alpha)


@_bwd_op.register_fake
def _(dy, alpha):
    return dy.new_empty(dy.shape)


def _save(ctx, inputs, output) -> None:
    _, ctx.alpha = inputs


def _backward(ctx, dy):
    return _bwd_op(dy, ctx.alpha), None


_fwd_op.register_autograd(_backward, setup_context=_save)
