"""The public function: argument checks, the eager fast path, registration with torch.library, autograd."""

from __future__ import annotations

import torch

from . import configs
from .activation import ACTIVATIONS
from .checks import FLOATS, kind, no_tangent, runnable
from .launch import Plans, lean, signature
from .plans import BACKENDS, SAVES, Gradients, Needs, bwd_plan, fwd_plan

MAX_SIZE = 2**31 - 512  # tile coordinates are 32-bit, including the end of the last tile

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")
_FORWARD, _BACKWARD = Plans(), Plans()


def fused_mlp(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    *,
    w_gate: torch.Tensor | None = None,
    activation: str = "silu",
    save: str = "activations",
    backend: str = "auto",
) -> torch.Tensor:
    """Computes the feed-forward layer of a transformer: two linear layers with an activation or a gate.

        y = w2 · act(w1 · x + b1) + b2                         without w_gate
        y = w2 · (act(w_gate · x) ⊙ (w1 · x + b1)) + b2        with w_gate

    Accumulation is in fp32 (fp32 operands are not rounded to tf32). Intermediate results in memory have the dtype of x.
    Differentiable once, in all tensors. All sums have a fixed order: repeated runs agree bit for bit.

    x           [..., D], float32, float16 or bfloat16, any strides. It is read in place if its leading dimensions
                flatten to one stride, else copied. Rows, D, H and D_out are at most 2^31 - 512.
    w1          [H, D], dtype of x, any strides, as in torch.nn.Linear
    w2          [D_out, H], likewise
    b1, b2      [H] and [D_out], dtype of x, or None
    w_gate      [H, D], dtype of x, or None
    activation  "silu", "gelu", "gelu_tanh", "relu" or "relu_sq", the square of relu
    save        the tensors saved for the backward: "activations" saves w1 · x + b1 and w_gate · x, in rows of a
                multiple of 16 elements; "input" saves neither and recomputes them, bit-identically
    backend     "fused" (one kernel for the forward, which keeps the hidden out of memory; at most 512 rows of w2),
                "two_gemms" (two kernels, with the hidden in memory between them), "cuda" (the same in CUDA C++,
                compiled by CuPy, on compute capability 9.0, float16 and bfloat16; operands that TMA cannot read go to
                Triton), "narrow" (likewise: for GEMMs with an activation and K of at most 512, a kernel that overlaps
                the activation with the main loop, and cuBLAS for the others), or "auto", the fastest of these and of
                cuBLAS for each GEMM (`configs.pick_versions`)

    Returns y [..., D_out], dtype of x, contiguous.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or option, RuntimeError for a CPU tensor
    outside Triton's interpreter and for a backend that cannot run, NotImplementedError for a forward-mode tangent.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.3; gated, Shazeer 2020 (arXiv:2002.05202).
    """
    # `lean` accepts None, which is valid for optional operands only: not for w1 and w2.
    if lean(x, w1, w2, b1, b2, w_gate) and w1 is not None and w2 is not None:
        needs_grad = torch.is_grad_enabled() and (
            x.requires_grad
            or w1.requires_grad
            or w2.requires_grad
            or (b1 is not None and b1.requires_grad)
            or (b2 is not None and b2.requires_grad)
            or (w_gate is not None and w_gate.requires_grad)
        )
        plan = _fwd_plan(x, w1, w2, b1, b2, w_gate, activation, save, needs_grad, backend)
        if needs_grad:
            return _apply(x, w1, w2, b1, b2, w_gate, plan, activation, backend)
        return plan(x, w1, w2, b1, b2, w_gate)[0]
    _check(x, w1, w2, b1, b2, w_gate, activation, save, backend)
    no_tangent("fused_mlp", x, w1, w2, b1, b2, w_gate)
    tensors = [t for t in (x, w1, w2, b1, b2, w_gate) if t is not None]
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return _fwd_op(x, w1, w2, b1, b2, w_gate, activation, needs_grad and save == "activations", backend)[0]


def _check(x, w1, w2, b1, b2, w_gate, activation, save, backend) -> None:
    if not isinstance(x, torch.Tensor) or x.dtype not in FLOATS:
        raise TypeError(f"fused_mlp: x must be a tensor of float32, float16 or bfloat16, got {kind(x)}")
    if x.dim() == 0 or x.shape[:-1].numel() > MAX_SIZE or x.shape[-1] > MAX_SIZE:
        wanted = f"[..., D] with D and the number of rows at most {MAX_SIZE}"
        raise ValueError(f"fused_mlp: x must be {wanted}, got shape {tuple(x.shape)}")
    for name, tensor in (("w1", w1), ("w2", w2)):
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != x.dtype:
            raise TypeError(f"fused_mlp: {name} must be a tensor of x's dtype {x.dtype}, got {kind(tensor)}")
    if w1.dim() != 2 or w1.shape[1] != x.shape[-1] or w1.shape[0] > MAX_SIZE:
        wanted = f"[H, {x.shape[-1]}] like x's rows with H at most {MAX_SIZE}"
        raise ValueError(f"fused_mlp: w1 must be {wanted}, got {tuple(w1.shape)}")
    if w2.dim() != 2 or w2.shape[1] != w1.shape[0] or w2.shape[0] > MAX_SIZE:
        wanted = f"[D_out, {w1.shape[0]}] like w1's rows with D_out at most {MAX_SIZE}"
        raise ValueError(f"fused_mlp: w2 must be {wanted}, got {tuple(w2.shape)}")
    optional = (("b1", b1, w1.shape[:1]), ("b2", b2, w2.shape[:1]), ("w_gate", w_gate, w1.shape))
    for name, tensor, shape in optional:
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != x.dtype:
            raise TypeError(f"fused_mlp: {name} must be a tensor of x's dtype {x.dtype}, got {kind(tensor)}")
        if tensor.shape != shape:
            raise ValueError(f"fused_mlp: {name} must be {list(shape)}, got {tuple(tensor.shape)}")
    for name, tensor in (("w1", w1), ("w2", w2), ("b1", b1), ("b2", b2), ("w_gate", w_gate)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"fused_mlp: {name} must be on x's device {x.device}, got {tensor.device}")
    for name, value, known in (("activation", activation, ACTIVATIONS), ("save", save, SAVES)):
        if value not in known:
            raise ValueError(f"fused_mlp: {name} must be one of {', '.join(known)}, got {value!r}")
    if backend not in BACKENDS:
        raise ValueError(f"fused_mlp: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    runnable("fused_mlp", "x", x)


def _fwd_plan(x, w1, w2, b1, b2, w_gate, activation, save, needs_grad, backend):
    """The cached plan for these arguments. Only for plain tensors: the key does not describe others completely."""
    tensors = signature(x), signature(w1), signature(w2), signature(b1), signature(b2), signature(w_gate)
    key = tensors, activation, save, needs_grad, backend
    plan = _FORWARD.find(key)
    if plan is None:
        _check(x, w1, w2, b1, b2, w_gate, activation, save, backend)
        keep = needs_grad and save == "activations"
        plan = _FORWARD.keep(key, fwd_plan(x, w1, w2, b1, b2, w_gate, activation, keep, backend))
    return plan


def _backward(dy, x, w1, w2, b1, w_gate, pre, gate, activation: str, needs: Needs, backend: str) -> Gradients:
    tensors = dy, x, w1, w2, b1, w_gate, pre, gate
    if not lean(*tensors):
        return bwd_plan(*tensors, activation, needs, backend)(*tensors)
    key = (*map(signature, tensors), activation, needs, backend)
    plan = _BACKWARD.find(key)
    if plan is None:
        plan = _BACKWARD.keep(key, bwd_plan(*tensors, activation, needs, backend))
    return plan(*tensors)


def _gradients(ctx, dy) -> Gradients:
    """The gradients, None where not needed. A tracer or transform of the call sees the custom op of the backward."""
    if dy is None:
        return (None,) * 6
    x, w1, w2, b1, w_gate, pre, gate = ctx.saved_tensors
    needs = Needs(*ctx.needs_input_grad[:6])
    if lean(dy, x, w1, w2, b1, w_gate, pre, gate) and not torch.is_grad_enabled():
        return _backward(dy, x, w1, w2, b1, w_gate, pre, gate, ctx.activation, needs, ctx.backend)
    grads = _bwd_op(dy, x, w1, w2, b1, w_gate, pre, gate, ctx.activation, *needs, ctx.backend)
    return tuple(grad if need else None for grad, need in zip(grads, needs, strict=True))  # type: ignore[return-value]


class _FusedMLP(torch.autograd.Function):
    """The autograd function of eager calls. Its backward uses the custom op if it is traced, transformed or itself
    differentiated."""

    @staticmethod
    def forward(ctx, x, w1, w2, b1, b2, w_gate, plan, activation, backend):
        y, pre, gate = plan(x, w1, w2, b1, b2, w_gate)
        ctx.set_materialize_grads(False)
        ctx.activation, ctx.backend = activation, backend
        ctx.save_for_backward(x, w1, w2, b1, w_gate, pre, gate)
        return y

    @staticmethod
    def backward(ctx, dy):
        return (*_gradients(ctx, dy), None, None, None)


# Skips the functorch handling of torch.autograd.Function.apply: `lean` has checked that no transform is active.
_apply = super(torch.autograd.Function, _FusedMLP).apply


@torch.library.custom_op(f"{_NAMESPACE}::fused_mlp_fwd", mutates_args=())
def _fwd_op(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    b1: torch.Tensor | None,
    b2: torch.Tensor | None,
    w_gate: torch.Tensor | None,
    activation: str,
    keep: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tensors = x, w1, w2, b1, b2, w_gate
    if lean(*tensors):
        plan = _fwd_plan(*tensors, activation, "activations", keep, backend)
    else:
        plan = fwd_plan(*tensors, activation, keep, backend)
    y, pre, gate = plan(*tensors)
    return y, x.new_empty(0) if pre is None else pre, x.new_empty(0) if gate is None else gate


@_fwd_op.register_fake
def _(x, w1, w2, b1, b2, w_gate, activation, keep, backend):
    kept = (x.shape[:-1].numel(), configs.pick_pitch(w1.shape[0])) if keep else 0
    gate = x.new_empty(kept if w_gate is not None else 0)
    return x.new_empty((*x.shape[:-1], w2.shape[0])), x.new_empty(kept), gate


@torch.library.custom_op(f"{_NAMESPACE}::fused_mlp_bwd", mutates_args=())
def _bwd_op(
    dy: torch.Tensor,
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    b1: torch.Tensor | None,
    w_gate: torch.Tensor | None,
    pre: torch.Tensor | None,
    gate: torch.Tensor | None,
    activation: str,
    need_x: bool,
    need_w1: bool,
    need_w2: bool,
    need_b1: bool,
    need_b2: bool,
    need_w_gate: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    needs = Needs(need_x, need_w1, need_w2, need_b1, need_b2, need_w_gate)
    grads = _backward(dy, x, w1, w2, b1, w_gate, pre, gate, activation, needs, backend)
    return tuple(x.new_empty(0) if grad is None else grad for grad in grads)  # type: ignore[return-value]


@_bwd_op.register_fake
def _(
    dy, x, w1, w2, b1, w_gate, pre, gate, activation, need_x, need_w1, need_w2, need_b1, need_b2, need_w_gate, backend
):
    return (
        x.new_empty(x.shape if need_x else 0),
        x.new_empty(w1.shape if need_w1 else 0),
        x.new_empty(w2.shape if need_w2 else 0),
        x.new_empty(w1.shape[:1] if need_b1 else 0),
        x.new_empty(w2.shape[:1] if need_b2 else 0),
        x.new_empty(w1.shape if need_w_gate and w_gate is not None else 0),
    )


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    x, w1, w2, b1, _, w_gate, ctx.activation, keep, ctx.backend = inputs
    _, pre, gate = output
    ctx.mark_non_differentiable(pre, gate)
    ctx.save_for_backward(x, w1, w2, b1, w_gate, pre if keep else None, gate if keep and w_gate is not None else None)


def _autograd(ctx, dy, _pre, _gate):
    return (*_gradients(ctx, dy), None, None, None)


_fwd_op.register_autograd(_autograd, setup_context=_save)
