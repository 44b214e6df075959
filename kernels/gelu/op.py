"""The public function: checks, registration with torch.library, autograd."""

from __future__ import annotations

import torch
import triton

from .kernel import gelu_bwd, gelu_fwd

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FORMS = ("none", "tanh")

# As @triton.jit decided it when the kernels were imported; torch.compile cannot trace the knob itself.
INTERPRETED: bool = triton.knobs.runtime.interpret

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """The Gaussian error linear unit (Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2), element by element.

        "none"   y = x · Φ(x) = x · (1 + erf(x / √2)) / 2
        "tanh"   y = x · (1 + tanh(√(2/π) · (x + 0.044715 · x³))) / 2

    Takes the arguments of torch.nn.functional.gelu and computes in fp32. Where x is very negative, y and the gradient
    keep their relative accuracy, which the formulas as written above lose. Differentiable in x, which is all that is
    saved for the backward. The derivative of a finite x is finite; y of -inf is NaN, as in PyTorch.

    x            any shape and strides, fp32, fp16 or bf16. Read in place where it and the result can be walked as rows
                 of one stride each, which every permutation and row or column slice of a dense tensor can; copied first
                 otherwise. The same holds for the incoming gradient.
    approximate  "none" or "tanh"

    Returns y in shape and dtype of x and, as torch.empty_like, in the memory order of x: the very strides of x where
    that is dense.

    Raises TypeError for a wrong dtype, ValueError for another `approximate`, RuntimeError for a CPU tensor outside
    Triton's interpreter.
    """
    if not isinstance(x, torch.Tensor) or x.dtype not in DTYPES:
        kind = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"gelu: x must be a tensor of float32, float16 or bfloat16, got {kind}")
    if approximate not in FORMS:
        raise ValueError(f"gelu: approximate must be 'none' or 'tanh', got {approximate!r}")
    if not x.is_cuda and not (x.device.type == "cpu" and INTERPRETED):
        needed = "on a GPU, or on the CPU with TRITON_INTERPRET=1"
        raise RuntimeError(f"gelu: x must be {needed}, got {x.device}")
    return _fwd_op(x, approximate == "tanh")


@torch.library.custom_op(f"{_NAMESPACE}::gelu_fwd", mutates_args=())
def _fwd_op(x: torch.Tensor, tanh: bool) -> torch.Tensor:
    return gelu_fwd(x, tanh)


@_fwd_op.register_fake
def _(x, tanh):
    return torch.empty_like(x)


@torch.library.custom_op(f"{_NAMESPACE}::gelu_bwd", mutates_args=())
def _bwd_op(dy: torch.Tensor, x: torch.Tensor, tanh: bool) -> torch.Tensor:
    return gelu_bwd(dy, x, tanh)


@_bwd_op.register_fake
def _(dy, x, tanh):
    return torch.empty_like(x)


def _save(ctx, inputs, output) -> None:
    x, ctx.tanh = inputs
    ctx.save_for_backward(x)


def _backward(ctx, dy):
    (x,) = ctx.saved_tensors
    return _bwd_op(dy, x, ctx.tanh), None


_fwd_op.register_autograd(_backward, setup_context=_save)
