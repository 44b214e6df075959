"""The public function: argument checks, the eager fast path, registration with torch.library, autograd."""

from __future__ import annotations

import torch

from .checks import FLOATS, kind, no_tangent, runnable
from .heads_backward.plan import Gradients, Needs
from .launch import Plans, lean, signature
from .plans import BACKENDS, bwd_plan, fwd_plan

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
MAX_ROWS = 2**31 - 1
MAX_OUT = 64  # columns of y that fit into registers together with the hidden

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")
_FORWARD, _BACKWARD = Plans(), Plans()


def heads_mlp(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, activation: str = "silu", *, backend: str = "auto"
) -> torch.Tensor:
    """Computes K feed-forward layers (heads) of one input.

        y[..., g, :] = w2[g] · act(w1[g] · x)

    Accumulation is in fp32 (fp32 operands are not rounded to tf32); act(...) is rounded to the dtype of x.
    Differentiable once, in all tensors. All sums have a fixed order: repeated runs agree bit for bit. The hidden is
    never in memory. In the backward its gradient is, for at most 8448 rows at a time.

    x           [..., D], float32, float16 or bfloat16, fewer than 2^31 rows, any strides. It is read in place if its
                leading dimensions flatten to one stride, else copied.
    w1          [K, H, D], dtype of x, any strides
    w2          [K, O, H], likewise, O at most 64
    activation  "silu", "gelu", "gelu_tanh" or "relu"
    backend     of the forward: "triton", "cuda" (CUDA C++, compiled by CuPy, on compute capability 9.0; requires
                float16 or bfloat16, D at most 512, O at most 8, rows of x and w1 that are contiguous and on 16-byte
                boundaries), or "auto": "cuda" where it can run and is faster (`configs.pick_backend`), else "triton"

    Returns y [..., K, O], dtype of x, contiguous.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device, activation or backend, RuntimeError for a
    CPU tensor outside Triton's interpreter and for backend="cuda" where it cannot run, NotImplementedError for a
    forward-mode tangent.

    Source: the feed-forward layer, Vaswani et al. 2017 (arXiv:1706.03762), section 3.3.
    """
    if lean(x, w1, w2):
        plan = _fwd_plan(x, w1, w2, activation, backend)
        if torch.is_grad_enabled() and (x.requires_grad or w1.requires_grad or w2.requires_grad):
            return _apply(x, w1, w2, plan, activation)
        return plan(x, w1, w2)
    _check(x, w1, w2, activation, backend)
    no_tangent("heads_mlp", x, w1, w2)
    return _fwd_op(x, w1, w2, activation, backend)


def _check(x, w1, w2, activation, backend) -> None:
    if not isinstance(x, torch.Tensor) or x.dtype not in FLOATS:
        raise TypeError(f"heads_mlp: x must be a tensor of float32, float16 or bfloat16, got {kind(x)}")
    if x.dim() == 0 or x.shape[:-1].numel() > MAX_ROWS:
        raise ValueError(f"heads_mlp: x must be [..., D] with less than 2^31 rows, got shape {tuple(x.shape)}")
    for name, tensor in (("w1", w1), ("w2", w2)):
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != x.dtype:
            raise TypeError(f"heads_mlp: {name} must be a tensor of x's dtype {x.dtype}, got {kind(tensor)}")
    if w1.dim() != 3 or w1.shape[2] != x.shape[-1]:
        raise ValueError(f"heads_mlp: w1 must be [K, H, {x.shape[-1]}] like x's rows, got {tuple(w1.shape)}")
    if w2.dim() != 3 or w2.shape[0] != w1.shape[0] or w2.shape[2] != w1.shape[1]:
        expected = f"[{w1.shape[0]}, O, {w1.shape[1]}] like w1"
        raise ValueError(f"heads_mlp: w2 must be {expected}, got {tuple(w2.shape)}")
    if w2.shape[1] > MAX_OUT:
        raise ValueError(f"heads_mlp: w2 must have at most {MAX_OUT} rows a head, got {w2.shape[1]}")
    for name, tensor in (("w1", w1), ("w2", w2)):
        if tensor.device != x.device:
            raise ValueError(f"heads_mlp: {name} must be on x's device {x.device}, got {tensor.device}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"heads_mlp: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if backend not in BACKENDS:
        raise ValueError(f"heads_mlp: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    runnable("heads_mlp", "x", x)


def _fwd_plan(x, w1, w2, activation, backend):
    """The cached plan for these arguments. Only for plain tensors: the key does not describe others completely."""
    key = signature(x), signature(w1), signature(w2), activation, backend
    plan = _FORWARD.find(key)
    if plan is None:
        _check(x, w1, w2, activation, backend)
        plan = _FORWARD.keep(key, fwd_plan(x, w1, w2, activation, backend))
    return plan


def _backward(dy, x, w1, w2, activation: str, needs: Needs) -> Gradients:
    tensors = dy, x, w1, w2
    if not lean(*tensors):
        return bwd_plan(*tensors, activation, needs)(*tensors)
    key = (*map(signature, tensors), activation, needs)
    plan = _BACKWARD.find(key)
    if plan is None:
        plan = _BACKWARD.keep(key, bwd_plan(*tensors, activation, needs))
    return plan(*tensors)


def _gradients(ctx, dy) -> Gradients:
    """The gradients, None where not needed. A tracer or transform of the call sees the custom op of the backward."""
    if dy is None:
        return None, None, None
    x, w1, w2 = ctx.saved_tensors
    needs = ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2]
    if lean(dy, x, w1, w2) and not torch.is_grad_enabled():
        return _backward(dy, x, w1, w2, ctx.activation, needs)
    grads = _bwd_op(dy, x, w1, w2, ctx.activation, *needs)
    dx, dw1, dw2 = (grad if need else None for grad, need in zip(grads, needs, strict=True))
    return dx, dw1, dw2


class _HeadsMLP(torch.autograd.Function):
    """The autograd function of eager calls. Its backward uses the custom op if it is traced, transformed or itself
    differentiated."""

    @staticmethod
    def forward(ctx, x, w1, w2, plan, activation):
        ctx.set_materialize_grads(False)
        ctx.activation = activation
        ctx.save_for_backward(x, w1, w2)
        return plan(x, w1, w2)

    @staticmethod
    def backward(ctx, dy):
        return (*_gradients(ctx, dy), None, None)


# Skips the functorch handling of torch.autograd.Function.apply: `lean` has checked that no transform is active.
_apply = super(torch.autograd.Function, _HeadsMLP).apply


@torch.library.custom_op(f"{_NAMESPACE}::heads_mlp_fwd", mutates_args=())
def _fwd_op(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, activation: str, backend: str) -> torch.Tensor:
    return (_fwd_plan if lean(x, w1, w2) else fwd_plan)(x, w1, w2, activation, backend)(x, w1, w2)


@_fwd_op.register_fake
def _(x, w1, w2, activation, backend):
    return x.new_empty((*x.shape[:-1], w2.shape[0], w2.shape[1]))


@torch.library.custom_op(f"{_NAMESPACE}::heads_mlp_bwd", mutates_args=())
def _bwd_op(
    dy: torch.Tensor,
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    activation: str,
    need_x: bool,
    need_w1: bool,
    need_w2: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grads = _backward(dy, x, w1, w2, activation, (need_x, need_w1, need_w2))
    dx, dw1, dw2 = (x.new_empty(0) if grad is None else grad for grad in grads)
    return dx, dw1, dw2


@_bwd_op.register_fake
def _(dy, x, w1, w2, activation, need_x, need_w1, need_w2):
    return (
        x.new_empty(x.shape if need_x else 0),
        x.new_empty(w1.shape if need_w1 else 0),
        x.new_empty(w2.shape if need_w2 else 0),
    )


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    x, w1, w2, ctx.activation, _ = inputs
    ctx.save_for_backward(x, w1, w2)


def _autograd(ctx, dy):
    return (*_gradients(ctx, dy), None, None)


_fwd_op.register_autograd(_autograd, setup_context=_save)
