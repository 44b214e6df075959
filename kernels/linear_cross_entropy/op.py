"""The public function: checks, registration with torch.library, autograd."""

from __future__ import annotations

import torch
import triton
from torch._subclasses.functional_tensor import FunctionalTensor

from .kernel import Loss, scale_, sum_rows
from .passes import Gradients, Problem, loss_alone, loss_and_gradients

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
REDUCTIONS = ("mean", "sum", "none")

# As @triton.jit decided it when the kernels were imported; torch.compile cannot trace the knob itself.
INTERPRETED: bool = triton.knobs.runtime.interpret

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
    scratch_bytes: int | None = None,
) -> torch.Tensor:
    """The cross entropy of a linear layer's output, without its logits in memory.

        z    = hidden · weightᵀ + bias                    rounded to their dtype, as a linear layer's output is
        l    = softcap · tanh(z / softcap)                z itself without a softcap (Gemma 2, arXiv:2408.00118)
        lse  = log Σ_v exp(l_v)
        loss = lse − (1 − ε) · l_target − ε · mean_v(l_v) + z_loss · lse²

    with ε = label_smoothing (Szegedy et al. 2016, arXiv:1512.00567) and the z-loss of PaLM (arXiv:2204.02311, section
    5). Differentiable, once, in hidden, weight and bias. With reduction "mean" or "sum" the gradients are computed in
    the forward and only scaled in the backward, not even that where the incoming gradient is 1; a second backward
    through a retained graph, reduction "none" and float16, whose gradients need the scale of the loss to be
    representable, compute them in the backward. Without gradients wanted none of that is done.

    hidden         [..., H], float32, float16 or bfloat16, any strides
    weight         [V, H], dtype of hidden, row- or column-major (otherwise copied)
    target         [...], int64 or int32, the right entry of each row, in [0, V) or ignore_index
    bias           [V], dtype of hidden, or None
    ignore_index   rows with this target have loss and gradient 0 and do not count in the mean
    reduction      "mean" over the rows that are not ignored (nan if there are none), "sum" or "none"
    scratch_bytes  upper bound of the memory for logits; None for 64 MiB or a sixteenth of the gradients, whichever is
                   more (256 MiB where weight needs no gradient). With as much as all logits take, none of them are
                   computed twice.

    Returns the loss in float32: a scalar, or in shape of target for "none". Under autocast hidden, weight and bias are
    cast first, like those of a linear layer.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or option, RuntimeError for a CPU tensor
    outside Triton's interpreter. A target out of range is a ValueError on the CPU and a device-side assertion on a GPU.
    """
    hidden, weight, bias = _autocast(hidden), _autocast(weight), _autocast(bias)
    _check(hidden, weight, target, bias)
    _check_options(label_smoothing, softcap, reduction, scratch_bytes)
    options = (
        ignore_index,
        float(label_smoothing),
        None if softcap is None else float(softcap),
        float(z_loss),
        reduction,
        scratch_bytes,
    )
    needs = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    if any(needs) and reduction != "none" and hidden.dtype != torch.float16:
        return _ready_op(hidden, weight, target, bias, *options, *needs)[0]
    return _fwd_op(hidden, weight, target, bias, *options)


def _autocast(tensor):
    """What autocast makes of a linear layer's operand. What is no such thing is left for `_check` to refuse."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in DTYPES or tensor.device.type not in ("cuda", "cpu"):
        return tensor
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor


def _check(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None) -> None:
    name = "linear_cross_entropy"
    if not isinstance(hidden, torch.Tensor) or hidden.dtype not in DTYPES:
        raise TypeError(f"{name}: hidden must be a tensor of float32, float16 or bfloat16, got {_kind(hidden)}")
    if hidden.dim() == 0 or hidden.shape[-1] == 0:
        raise ValueError(f"{name}: hidden must be [..., H] with H >= 1, got shape {tuple(hidden.shape)}")
    for what, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None and what == "bias":
            continue
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != hidden.dtype:
            raise TypeError(f"{name}: {what} must be a tensor of hidden's dtype {hidden.dtype}, got {_kind(tensor)}")
        if tensor.device != hidden.device:
            raise ValueError(f"{name}: {what} must be on hidden's device {hidden.device}, got {tensor.device}")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or weight.shape[0] == 0:
        expected = f"[V, {hidden.shape[-1]}] with V >= 1 like hidden's rows"
        raise ValueError(f"{name}: weight must be {expected}, got {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{name}: bias must be [{weight.shape[0]}] like weight's rows, got {tuple(bias.shape)}")
    if not isinstance(target, torch.Tensor) or target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name}: target must be a tensor of int64 or int32, got {_kind(target)}")
    if target.shape != hidden.shape[:-1]:
        expected = f"{tuple(hidden.shape[:-1])} like hidden without its last dimension"
        raise ValueError(f"{name}: target must be {expected}, got {tuple(target.shape)}")
    if target.device != hidden.device:
        raise ValueError(f"{name}: target must be on hidden's device {hidden.device}, got {target.device}")
    if hidden.device.type == "cpu" and not INTERPRETED:
        raise RuntimeError(f"{name}: hidden must be on a GPU; the CPU needs Triton's interpreter (TRITON_INTERPRET=1)")


def _check_options(label_smoothing: float, softcap: float | None, reduction: str, scratch_bytes: int | None) -> None:
    name = "linear_cross_entropy"
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{name}: label_smoothing must be in [0, 1], got {label_smoothing}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{name}: softcap must be positive or None, got {softcap}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"{name}: reduction must be one of {REDUCTIONS}, got {reduction!r}")
    if scratch_bytes is not None and scratch_bytes < 0:
        raise ValueError(f"{name}: scratch_bytes must not be negative, got {scratch_bytes}")


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__


def _loss(losses: torch.Tensor, factor: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
    return losses.view(target.shape) if reduction == "none" else sum_rows(losses, factor)


def _flat(grads: Gradients, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As an op returns them: hidden's in its shape, and an empty tensor for one that is not wanted."""
    hidden = None if grads.hidden is None else grads.hidden.view(like.shape)
    a, b, c = (like.new_empty(0) if t is None else t for t in (hidden, grads.weight, grads.bias))
    return a, b, c


def _fake_loss(hidden, reduction):
    return hidden.new_empty(hidden.shape[:-1] if reduction == "none" else (), dtype=torch.float32)


def _fake_gradients(hidden, weight, bias, *needs):
    dtypes = (hidden.dtype, hidden.dtype, torch.float32)
    return tuple(
        like.new_empty(like.shape, dtype=dtype) if need else hidden.new_empty(0)
        for like, dtype, need in zip((hidden, weight, bias), dtypes, needs, strict=True)
    )


@torch.library.custom_op(f"{_NAMESPACE}::linear_cross_entropy_fwd", mutates_args=())
def _fwd_op(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    reduction: str,
    scratch_bytes: int | None,
) -> torch.Tensor:
    p = Problem.of(hidden, weight, target, bias, Loss(ignore_index, label_smoothing, softcap, z_loss, reduction))
    return _loss(*loss_alone(p, scratch_bytes), target, reduction)


@_fwd_op.register_fake
def _(hidden, weight, target, bias, ignore_index, label_smoothing, softcap, z_loss, reduction, scratch_bytes):
    return _fake_loss(hidden, reduction)


@torch.library.custom_op(f"{_NAMESPACE}::linear_cross_entropy_ready", mutates_args=())
def _ready_op(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    reduction: str,
    scratch_bytes: int | None,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss, and the gradients of hidden, weight and bias for an incoming gradient of 1."""
    p = Problem.of(hidden, weight, target, bias, Loss(ignore_index, label_smoothing, softcap, z_loss, reduction))
    losses, factor, grads = loss_and_gradients(p, None, (need_hidden, need_weight, need_bias), scratch_bytes)
    return _loss(losses, factor, target, reduction), *_flat(grads, hidden)


@_ready_op.register_fake
def _(
    hidden,
    weight,
    target,
    bias,
    ignore_index,
    label_smoothing,
    softcap,
    z_loss,
    reduction,
    scratch_bytes,
    need_hidden,
    need_weight,
    need_bias,
):
    grads = _fake_gradients(hidden, weight, bias, need_hidden, need_weight, need_bias)
    return _fake_loss(hidden, reduction), *grads


@torch.library.custom_op(f"{_NAMESPACE}::linear_cross_entropy_bwd", mutates_args=())
def _bwd_op(
    dloss: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    reduction: str,
    scratch_bytes: int | None,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of hidden, weight and bias, from nothing but the inputs."""
    p = Problem.of(hidden, weight, target, bias, Loss(ignore_index, label_smoothing, softcap, z_loss, reduction))
    dloss = dloss.reshape(-1).expand(target.numel())
    return _flat(loss_and_gradients(p, dloss, (need_hidden, need_weight, need_bias), scratch_bytes)[2], hidden)


@_bwd_op.register_fake
def _(
    dloss,
    hidden,
    weight,
    target,
    bias,
    ignore_index,
    label_smoothing,
    softcap,
    z_loss,
    reduction,
    scratch_bytes,
    need_hidden,
    need_weight,
    need_bias,
):
    return _fake_gradients(hidden, weight, bias, need_hidden, need_weight, need_bias)


@torch.library.custom_op(f"{_NAMESPACE}::linear_cross_entropy_scale_", mutates_args=("dhidden", "dweight", "dbias"))
def _scale_op(dloss: torch.Tensor, dhidden: torch.Tensor, dweight: torch.Tensor, dbias: torch.Tensor) -> None:
    for grad in (dhidden, dweight, dbias):
        scale_(grad, dloss)


@_scale_op.register_fake
def _(dloss, dhidden, dweight, dbias):
    return None


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.options = inputs[4:]
    ctx.save_for_backward(*inputs[:4])


def _backward(ctx, dloss, *_):
    if dloss is None:
        return (None,) * (4 + len(ctx.options))
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 3)]
    return _handed_out(ctx, _bwd_op(dloss, *ctx.saved_tensors, *ctx.options[:6], *needs), needs)


def _ready_save(ctx, inputs, output) -> None:
    _save(ctx, inputs, output)
    ctx.mark_non_differentiable(*output[1:])
    # Not saved for backward: they are scaled in place and handed out, so they serve once.
    ctx.ready = output[1:]


def _ready_backward(ctx, dloss, *_):
    if dloss is None or ctx.ready is None:
        return _backward(ctx, dloss)
    grads, ctx.ready = ctx.ready, None
    if isinstance(dloss, FunctionalTensor):
        # torch.compile traces: what may be overwritten is for it to see, and it fuses a multiplication by itself.
        grads = [grad * dloss for grad in grads]
    else:
        _scale_op(dloss, *grads)
    return _handed_out(ctx, grads, ctx.options[6:])


def _handed_out(ctx, grads, needs):
    """What autograd is given: a gradient or None for each input. bias's is fp32 until here."""
    hidden, weight, bias = (grad if need else None for grad, need in zip(grads, needs, strict=True))
    bias = None if bias is None else bias.to(ctx.saved_tensors[3].dtype)
    return hidden, weight, None, bias, *(None,) * len(ctx.options)


_fwd_op.register_autograd(_backward, setup_context=_save)
_ready_op.register_autograd(_ready_backward, setup_context=_ready_save)
