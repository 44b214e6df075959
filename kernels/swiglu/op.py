"""The public function: argument checks, the fast eager path, registration with torch.library, autograd."""

from __future__ import annotations

import torch

from .activation import ACTIVATIONS
from .checks import FLOATS, kind, no_tangent, runnable
from .launch import Plans, lean, signature
from .plans import BACKENDS, Backward, Forward, bwd_plan, fwd_plan

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")
_FORWARD, _BACKWARD = Plans(), Plans()
_grad_enabled = torch.is_grad_enabled  # called in every call; bound once, because a dotted name costs a lookup


def swiglu(
    gate: torch.Tensor, up: torch.Tensor | None = None, *, activation: str = "silu", backend: str = "auto"
) -> torch.Tensor:
    """A gated linear unit without its projections, computed in fp32.

        y = act(gate) · up                                    with up
        y = act(gate[..., :D]) · gate[..., D:]                up=None: both packed in one tensor

    activation    act(x)
    "silu"        x · σ(x)                                                       SwiGLU (β = 1)
    "gelu"        x · Φ(x) = x · (1 + erf(x / √2)) / 2                           GEGLU
    "gelu_tanh"   x · (1 + tanh(√(2/π) · (x + 0.044715 · x³))) / 2               GEGLU as in Gemma
    "relu"        max(x, 0)                                                      ReGLU
    "sigmoid"     σ(x) = 1 / (1 + exp(−x))                                       GLU (Dauphin et al. 2017)
    "identity"    x                                                              bilinear

    Differentiable in gate and up, the only saved tensors: the backward recomputes the activation. The gradient of a
    packed tensor is one packed tensor, both halves of which are written by the kernel without a copy.

    gate    any shape and strides, or [..., 2·D] without `up`; fp32, fp16 or bf16
    up      shape, dtype and device of gate
    backend "triton", "cuda" (CUDA C++, compiled by CuPy: rows of fp16 or bf16 with any alignment, as the halves of a
            packed tensor of an odd width, on compute capability 9.0), or "auto", which selects "cuda" where it can run
            and is faster. With "cuda" the backward still runs in Triton where dy's strides require it.

    Tensors are read without a copy where the dimensions of all of them coalesce to rows and columns. Examples are
    slices of rows or columns, hence the two halves of one projection or of a packed tensor, and dense tensors with the
    same order of dimensions. Otherwise they are copied first. The same holds for the incoming gradient.

    Returns y in shape and dtype of gate (or of its half) and in gate's memory order, as torch.empty_like.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape or device or an unknown activation or backend,
    RuntimeError for a CPU tensor outside Triton's interpreter and for backend="cuda" where it cannot run,
    NotImplementedError for forward-mode differentiation.

    Source: Shazeer 2020, arXiv:2002.05202, equations 5 and 6.
    """
    if lean(gate, up):
        plan = _fwd_plan(gate, up, activation, backend)
        if _grad_enabled() and (gate.requires_grad or (up is not None and up.requires_grad)):
            return _apply(gate, up, plan, activation, backend)
        return plan(gate, up)
    _check(gate, up, activation, backend)
    no_tangent("swiglu", gate, up)
    return _fwd_op(gate, up, activation, backend)


def _check(gate: torch.Tensor, up: torch.Tensor | None, activation: str, backend: str) -> None:
    if not isinstance(gate, torch.Tensor) or gate.dtype not in FLOATS:
        raise TypeError(f"swiglu: gate must be a tensor of float32, float16 or bfloat16, got {kind(gate)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"swiglu: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if up is None:
        if gate.dim() == 0 or gate.shape[-1] % 2:
            raise ValueError(f"swiglu: gate must be [..., 2·D] where up is not given, got shape {tuple(gate.shape)}")
    else:
        if not isinstance(up, torch.Tensor) or up.dtype != gate.dtype:
            raise TypeError(f"swiglu: up must be a tensor of gate's dtype {gate.dtype}, got {kind(up)}")
        if up.shape != gate.shape:
            raise ValueError(f"swiglu: up must have gate's shape {tuple(gate.shape)}, got {tuple(up.shape)}")
        if up.device != gate.device:
            raise ValueError(f"swiglu: up must be on gate's device {gate.device}, got {up.device}")
    if backend not in BACKENDS:
        raise ValueError(f"swiglu: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    runnable("swiglu", "gate", gate)


def _signature(gate, up):
    """The key of gate and up. For a packed tensor it includes the address modulo 16, on which the alignment of the
    second half depends."""
    return signature(gate), gate.data_ptr() % 16 if up is None else signature(up)


def _fwd_plan(gate, up, activation, backend) -> Forward:
    """The cached plan for these arguments, created on the first call. For plain tensors only (see `lean`)."""
    key = (_signature(gate, up), activation, backend)
    plan = _FORWARD.find(key)
    if plan is None:
        _check(gate, up, activation, backend)
        plan = _FORWARD.keep(key, fwd_plan(gate, up, activation, backend))
    return plan


def _bwd_plan(dy, gate, up, *options) -> Backward:
    key = (signature(dy), _signature(gate, up), options)
    plan = _BACKWARD.find(key)
    if plan is None:
        plan = _BACKWARD.keep(key, bwd_plan(dy, gate, up, *options))
    return plan


class _SwiGLU(torch.autograd.Function):
    """The autograd function of eager calls. Its backward calls the custom op where it is traced, transformed by
    functorch or itself differentiated."""

    @staticmethod
    def forward(ctx, gate, up, plan, activation, backend):
        ctx.set_materialize_grads(False)
        ctx.options = activation, backend
        ctx.save_for_backward(gate, up)
        return plan(gate, up)

    @staticmethod
    def backward(ctx, dy):
        dgate, dup = _gradients(ctx, dy)
        return dgate, dup, None, None, None


# torch.autograd.Function.apply first handles functorch, then calls this method. `lean` is False under functorch.
_apply = super(torch.autograd.Function, _SwiGLU).apply


def _gradients(ctx, dy):
    """Returns dgate and dup; each is None if it is not needed or y has no incoming gradient."""
    if dy is None:
        return None, None
    gate, up = ctx.saved_tensors
    options = (*ctx.options, *ctx.needs_input_grad[:2])
    if lean(dy, gate, up) and not _grad_enabled():
        return _bwd_plan(dy, gate, up, *options)(dy, gate, up)
    dgate, dup = _bwd_op(dy, gate, up, *options)
    need_dgate, need_dup = ctx.needs_input_grad[:2]
    return dgate if need_dgate else None, dup if need_dup else None


@torch.library.custom_op(f"{_NAMESPACE}::swiglu_fwd", mutates_args=())
def _fwd_op(gate: torch.Tensor, up: torch.Tensor | None, activation: str, backend: str) -> torch.Tensor:
    make = _fwd_plan if lean(gate, up) else fwd_plan
    return make(gate, up, activation, backend)(gate, up)


@_fwd_op.register_fake
def _(gate, up, activation, backend):
    return torch.empty_like(gate.chunk(2, dim=-1)[0] if up is None else gate)


@torch.library.custom_op(f"{_NAMESPACE}::swiglu_bwd", mutates_args=())
def _bwd_op(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    activation: str,
    backend: str,
    need_dgate: bool,
    need_dup: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    make = _bwd_plan if lean(dy, gate, up) else bwd_plan
    dgate, dup = make(dy, gate, up, activation, backend, need_dgate, need_dup)(dy, gate, up)
    return gate.new_empty(0) if dgate is None else dgate, gate.new_empty(0) if dup is None else dup


@_bwd_op.register_fake
def _(dy, gate, up, activation, backend, need_dgate, need_dup):
    def like(needed: bool) -> torch.Tensor:
        return torch.empty_like(gate) if needed else gate.new_empty(0)

    return like(need_dgate), like(need_dup and up is not None)


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    gate, up, *ctx.options = inputs
    ctx.save_for_backward(gate, up)


def _autograd(ctx, dy):
    return *_gradients(ctx, dy), None, None


_fwd_op.register_autograd(_autograd, setup_context=_save)
