"""The public function: argument checks, the fast eager path, registration with torch.library, autograd."""

from __future__ import annotations

import torch

from .checks import FLOATS, kind, no_tangent, runnable
from .launch import Plans, lean, signature
from .plans import Backward, Forward, bwd_plan, fwd_plan

FORMS = ("none", "tanh")

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")
_FORWARD, _BACKWARD = Plans(), Plans()
_grad_enabled = torch.is_grad_enabled  # called in every call; bound once, because a dotted name costs a lookup


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """The Gaussian error linear unit (GELU) of each element, computed in fp32.

        "none"   y = x · Φ(x) = x · (1 + erf(x / √2)) / 2
        "tanh"   y = x · (1 + tanh(√(2/π) · (x + 0.044715 · x³))) / 2

    The arguments are those of torch.nn.functional.gelu. Where x is very negative, y and the gradient keep their
    relative accuracy, which the formulas as written above lose. Differentiable in x, the only saved tensor. The
    derivative of a finite x is finite; y of -inf is NaN, as in PyTorch.

    x            any shape and strides, fp32, fp16 or bf16. Read without a copy where the dimensions of x and of the
                 result coalesce to rows and columns, as for every permutation and every row or column slice of a dense
                 tensor; otherwise copied first. The same holds for the incoming gradient.
    approximate  "none" or "tanh"

    Returns y in shape and dtype of x, with the strides of torch.empty_like(x): those of x where x is dense.

    Raises TypeError for a wrong dtype, ValueError for another `approximate`, RuntimeError for a CPU tensor outside
    Triton's interpreter, NotImplementedError for forward-mode differentiation.

    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2.
    """
    if lean(x):
        plan = _fwd_plan(x, approximate)
        if x.requires_grad and _grad_enabled():
            return _apply(x, plan, approximate)
        return plan(x)
    _check(x, approximate)
    no_tangent("gelu", x)
    return _fwd_op(x, approximate == "tanh")


def _check(x: torch.Tensor, approximate: str) -> None:
    if not isinstance(x, torch.Tensor) or x.dtype not in FLOATS:
        raise TypeError(f"gelu: x must be a tensor of float32, float16 or bfloat16, got {kind(x)}")
    if approximate not in FORMS:
        raise ValueError(f"gelu: approximate must be 'none' or 'tanh', got {approximate!r}")
    runnable("gelu", "x", x)


def _fwd_plan(x: torch.Tensor, approximate: str) -> Forward:
    """The cached plan for these arguments, created on the first call. For plain tensors only (see `lean`)."""
    key = (signature(x), approximate)
    plan = _FORWARD.find(key)
    if plan is None:
        _check(x, approximate)
        plan = _FORWARD.keep(key, fwd_plan(x, approximate == "tanh"))
    return plan


def _bwd_plan(dy: torch.Tensor, x: torch.Tensor, tanh: bool) -> Backward:
    key = (signature(dy), signature(x), tanh)
    plan = _BACKWARD.find(key)
    if plan is None:
        plan = _BACKWARD.keep(key, bwd_plan(dy, x, tanh))
    return plan


class _GELU(torch.autograd.Function):
    """The autograd function of eager calls. Its backward calls the custom op where it is traced, transformed by
    functorch or itself differentiated."""

    @staticmethod
    def forward(ctx, x, plan, approximate):
        ctx.set_materialize_grads(False)
        ctx.tanh = approximate == "tanh"
        ctx.save_for_backward(x)
        return plan(x)

    @staticmethod
    def backward(ctx, dy):
        return _gradient(ctx, dy), None, None


# torch.autograd.Function.apply first handles functorch, then calls this method. `lean` is False under functorch.
_apply = super(torch.autograd.Function, _GELU).apply


def _gradient(ctx, dy):
    """Returns dx, or None where y has no incoming gradient."""
    if dy is None:
        return None
    (x,) = ctx.saved_tensors
    if lean(dy, x) and not _grad_enabled():
        return _bwd_plan(dy, x, ctx.tanh)(dy, x)
    return _bwd_op(dy, x, ctx.tanh)


@torch.library.custom_op(f"{_NAMESPACE}::gelu_fwd", mutates_args=())
def _fwd_op(x: torch.Tensor, tanh: bool) -> torch.Tensor:
    plan = _fwd_plan(x, "tanh" if tanh else "none") if lean(x) else fwd_plan(x, tanh)
    return plan(x)


@_fwd_op.register_fake
def _(x, tanh):
    return torch.empty_like(x)


@torch.library.custom_op(f"{_NAMESPACE}::gelu_bwd", mutates_args=())
def _bwd_op(dy: torch.Tensor, x: torch.Tensor, tanh: bool) -> torch.Tensor:
    plan = _bwd_plan if lean(dy, x) else bwd_plan
    return plan(dy, x, tanh)(dy, x)


@_bwd_op.register_fake
def _(dy, x, tanh):
    return torch.empty_like(x)


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    x, ctx.tanh = inputs
    ctx.save_for_backward(x)


def _autograd(ctx, dy):
    return _gradient(ctx, dy), None


_fwd_op.register_autograd(_autograd, setup_context=_save)
