"""The public functions: checks, registration with torch.library, autograd."""

from __future__ import annotations

import torch
import triton

from .kernel import REDUCTIONS, Loss, cross_entropy_bwd, cross_entropy_fwd, cross_entropy_fwd_grad, cross_entropy_scale

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TARGETS = (torch.int64, torch.int32)
MAX_VOCAB = 1 << 24

# As @triton.jit decided it when the kernels were imported; torch.compile cannot trace the knob itself.
INTERPRETED: bool = triton.knobs.runtime.interpret

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    z_loss: float = 0.0,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_lse: bool = False,
    grad_in_forward: bool = False,
    inplace: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Cross entropy of logits against the indices of classes, as torch.nn.functional.cross_entropy defines it, with the
    z-loss of PaLM (Chowdhery et al. 2022, arXiv:2204.02311, section 5) and the softcap of Gemma 2 (arXiv:2408.00118).

        y    = softcap · tanh(logits / softcap)          (the logits without a softcap),   lse = logsumexp(y)
        ce_i = w_t · (1 − ε) · (lse − y_t) + ε / V · Σ_c w_c · (lse − y_c)        t = target_i, ε = label_smoothing
        z_i  = z_loss · lse²

    "none": ce_i + z_i. "sum": their sum. "mean": Σ ce_i / Σ w_t + Σ z_i / R, over the R rows whose target is not
    ignore_index. Rows that are ignored count 0 and have a gradient of 0, whatever is in them; the forward does not read
    them, the backward may. Without any other, the sum is 0 and the mean NaN. All arithmetic is fp32, and every sum has
    a fixed order: repeats agree bit for bit.

    logits           [..., V], 1 <= V <= 2²⁴, fp32, fp16 or bf16, any strides. Rows are read in place when the leading
                     dimensions flatten to one stride and the last stride is 1; otherwise they are copied first.
    target           [...], int64 or int32, any strides. What is neither ignore_index nor in [0, V) is an error: on a
                     GPU a device-side assertion, as in PyTorch, which the next synchronisation reports.
    weight           [V], floating point, finite, not differentiated
    return_z_loss    also the z-loss that the loss has in it, by the same reduction
    return_lse       also lse, [...] in fp32; of ignored rows too, which are then read
    grad_in_forward  the forward writes the gradient of the loss's sum as well, and the backward only scales it, if need
                     be (an incoming gradient of 1 costs nothing): the logits are read once in all. z-loss and lse are
                     then not differentiable. Not for fp16 with a loss scale: what the scale was to save is lost before.
    inplace          the gradient may take the memory of the logits, in the forward with grad_in_forward, else in the
                     backward. Where no gradient is wanted, the graph is retained or torch.compile decides about memory,
                     they are left alone.

    Returns loss, or (loss, z_loss), (loss, lse), (loss, z_loss, lse); loss and z_loss in the dtype of the logits, under
    autocast in fp32, like PyTorch.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, device, value or strides, RuntimeError for
    CPU tensors outside Triton's interpreter.
    """
    _check(logits, target, weight, ignore_index, label_smoothing, reduction, z_loss, softcap)
    loss = _loss(logits, ignore_index, label_smoothing, reduction, z_loss, softcap, return_z_loss, return_lse)
    wanted = torch.is_grad_enabled() and logits.requires_grad
    inplace = inplace and wanted and not torch.compiler.is_compiling()
    if inplace:
        _check_inplace(logits)
        if logits.is_leaf:
            raise ValueError("cross_entropy: inplace needs logits that are not a leaf of the graph, got one")
    if not (grad_in_forward and wanted):
        found = _fwd_op(logits, target, weight, wanted, inplace, *loss)
    elif inplace:
        found = _GradientInPlace.apply(logits, target, weight, loss)
    else:
        found = _fwd_grad_op(logits, target, weight, *loss)
    value, z, lse = found[:3]
    if grad_in_forward:
        z, lse = z.detach(), lse.detach()
    asked = _asked(z if return_z_loss else None, lse if return_lse else None)
    return (value, *asked) if asked else value


def cross_entropy_and_grad(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    z_loss: float = 0.0,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_lse: bool = False,
    inplace: bool = False,
) -> tuple[torch.Tensor, ...]:
    """The loss and its gradient with respect to the logits in one pass, without autograd: for a backward of one's own.

    Everything as in `cross_entropy`; the gradient is that of the loss, or with reduction="none" of its sum, in shape
    and dtype of the logits. With `inplace` it takes their memory and is returned as the very tensor that was given.

    Returns (loss, gradient), and then what is asked for of z_loss and lse.
    """
    _check(logits, target, weight, ignore_index, label_smoothing, reduction, z_loss, softcap)
    loss = _loss(logits, ignore_index, label_smoothing, reduction, z_loss, softcap, return_z_loss, return_lse)
    if inplace:
        _check_inplace(logits)
        value, z, lse = _fwd_grad_in_place_op(logits.detach(), target, weight, *loss)
        gradient = logits
    else:
        value, z, lse, gradient = _fwd_grad_op(logits.detach(), target, weight, *loss)
    return value, gradient, *_asked(z if return_z_loss else None, lse if return_lse else None)


def _loss(logits, ignore_index, label_smoothing, reduction, z_loss, softcap, return_z_loss, return_lse) -> tuple:
    """The fields of `Loss`, as the ops take them."""
    dtype = torch.float32 if torch.is_autocast_enabled(logits.device.type) else logits.dtype
    softcap = None if softcap is None else float(softcap)
    return ignore_index, float(label_smoothing), reduction, float(z_loss), softcap, dtype, return_z_loss, return_lse


def _asked(*values: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return tuple(value for value in values if value is not None)


def _check(logits, target, weight, ignore_index, label_smoothing, reduction, z_loss, softcap) -> None:
    if not isinstance(logits, torch.Tensor) or logits.dtype not in DTYPES:
        raise TypeError(f"cross_entropy: logits must be a tensor of float32, float16 or bfloat16, got {_kind(logits)}")
    if logits.dim() == 0 or logits.shape[-1] > MAX_VOCAB or (logits.shape[-1] == 0 and logits.shape[:-1].numel()):
        raise ValueError(
            f"cross_entropy: logits must be [..., V] with 1 <= V <= {MAX_VOCAB}, got shape {tuple(logits.shape)}"
        )
    if not isinstance(target, torch.Tensor) or target.dtype not in TARGETS:
        raise TypeError(f"cross_entropy: target must be a tensor of int64 or int32, got {_kind(target)}")
    if target.shape != logits.shape[:-1]:
        expected = tuple(logits.shape[:-1])
        raise ValueError(
            f"cross_entropy: target must have logits' leading dimensions {expected}, got {tuple(target.shape)}"
        )
    if weight is not None:
        if not isinstance(weight, torch.Tensor) or weight.dtype not in DTYPES:
            raise TypeError(
                f"cross_entropy: weight must be a tensor of float32, float16 or bfloat16, got {_kind(weight)}"
            )
        if weight.shape != logits.shape[-1:]:
            raise ValueError(
                f"cross_entropy: weight must be [{logits.shape[-1]}] like logits' rows, got {tuple(weight.shape)}"
            )
        if weight.requires_grad:
            raise ValueError("cross_entropy: weight must not require a gradient, for it is not differentiated")
    for name, tensor in (("target", target), ("weight", weight)):
        if tensor is not None and tensor.device != logits.device:
            raise ValueError(f"cross_entropy: {name} must be on logits' device {logits.device}, got {tensor.device}")
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
    if logits.device.type != "cuda" and not (logits.device.type == "cpu" and INTERPRETED):
        raise RuntimeError(
            f"cross_entropy: logits must be on a GPU, got {logits.device}; "
            "on the CPU it runs only in Triton's interpreter (TRITON_INTERPRET=1)"
        )


def _check_inplace(logits: torch.Tensor) -> None:
    if any(stride == 0 and size > 1 for stride, size in zip(logits.stride(), logits.shape, strict=True)):
        raise ValueError(
            "cross_entropy: inplace needs logits whose elements do not share memory, "
            f"got strides {tuple(logits.stride())} for shape {tuple(logits.shape)}"
        )


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__


# The fields of `Loss` in their order.
_LOSS = (
    "int ignore_index, float label_smoothing, str reduction, float z_loss, float? softcap, ScalarType dtype, "
    "bool return_z_loss, bool return_lse"
)


def _empty_outputs(logits: torch.Tensor, target: torch.Tensor, loss: Loss) -> tuple[torch.Tensor, ...]:
    """loss, z-loss and lse as `cross_entropy_fwd` shapes them."""
    shape = target.shape if loss.reduction == "none" else ()
    value = logits.new_empty(shape, dtype=loss.dtype)
    z = logits.new_empty(shape if loss.return_z_loss else 0, dtype=loss.dtype)
    return value, z, logits.new_empty(target.shape if loss.return_lse else 0, dtype=torch.float32)


@torch.library.custom_op(
    f"{_NAMESPACE}::cross_entropy_fwd",
    mutates_args=(),
    schema=f"(Tensor logits, Tensor target, Tensor? weight, bool save, bool inplace, {_LOSS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _fwd_op(logits, target, weight, save, inplace, *loss):
    return cross_entropy_fwd(logits, target, weight, Loss(*loss), save)


@_fwd_op.register_fake
def _(logits, target, weight, save, inplace, *loss):
    stats = logits.new_empty((2, target.numel()) if save else 0, dtype=torch.float32)
    scale = logits.new_empty(2 if save and Loss(*loss).reduction == "mean" else 0, dtype=torch.float32)
    return *_empty_outputs(logits, target, Loss(*loss)), stats, scale


_BWD = "Tensor? g_loss, Tensor? g_z, Tensor? g_lse"
_SAVED = "Tensor target, Tensor? weight, Tensor stats, Tensor scale"


@torch.library.custom_op(
    f"{_NAMESPACE}::cross_entropy_bwd",
    mutates_args=(),
    schema=f"({_BWD}, Tensor logits, {_SAVED}, {_LOSS}) -> Tensor",
)
def _bwd_op(g_loss, g_z, g_lse, logits, target, weight, stats, scale, *loss):
    return cross_entropy_bwd(g_loss, g_z, g_lse, logits, target, weight, stats, scale, Loss(*loss), False)


@_bwd_op.register_fake
def _(g_loss, g_z, g_lse, logits, *rest):
    return logits.new_empty(logits.shape)


@torch.library.custom_op(
    f"{_NAMESPACE}::cross_entropy_bwd_in_place",
    mutates_args=("logits",),
    schema=f"({_BWD}, Tensor(a!) logits, {_SAVED}, {_LOSS}) -> ()",
)
def _bwd_in_place_op(g_loss, g_z, g_lse, logits, target, weight, stats, scale, *loss):
    cross_entropy_bwd(g_loss, g_z, g_lse, logits, target, weight, stats, scale, Loss(*loss), True)


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)  # an output that is not used has no gradient, rather than one of zeros
    logits, target, weight, _, ctx.inplace, *ctx.loss = inputs
    ctx.save_for_backward(logits, target, weight, *output[3:])


def _backward(ctx, g_loss, g_z, g_lse, _stats, _scale):
    unused, loss = (None,) * (4 + len(ctx.loss)), Loss(*ctx.loss)
    # An output that was not asked for is empty, and whoever differentiates the op itself gives it an empty gradient.
    given = (g_loss, g_z if loss.return_z_loss else None, g_lse if loss.return_lse else None)
    if not ctx.needs_input_grad[0] or all(g is None for g in given):
        return None, *unused
    logits, *saved = ctx.saved_tensors
    if ctx.inplace and _last_use(logits):
        _bwd_in_place_op(*given, logits, *saved, *ctx.loss)
        return logits.detach(), *unused
    return _bwd_op(*given, logits, *saved, *ctx.loss), *unused


_fwd_op.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op(
    f"{_NAMESPACE}::cross_entropy_fwd_grad",
    mutates_args=(),
    schema=f"(Tensor logits, Tensor target, Tensor? weight, {_LOSS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _fwd_grad_op(logits, target, weight, *loss):
    return cross_entropy_fwd_grad(logits, target, weight, Loss(*loss), False)


@_fwd_grad_op.register_fake
def _(logits, target, weight, *loss):
    return *_empty_outputs(logits, target, Loss(*loss)), logits.new_empty(logits.shape)


@torch.library.custom_op(
    f"{_NAMESPACE}::cross_entropy_fwd_grad_in_place",
    mutates_args=("logits",),
    schema=f"(Tensor(a!) logits, Tensor target, Tensor? weight, {_LOSS}) -> (Tensor, Tensor, Tensor)",
)
def _fwd_grad_in_place_op(logits, target, weight, *loss):
    return cross_entropy_fwd_grad(logits, target, weight, Loss(*loss), True)[:3]


@_fwd_grad_in_place_op.register_fake
def _(logits, target, weight, *loss):
    return _empty_outputs(logits, target, Loss(*loss))


@torch.library.custom_op(f"{_NAMESPACE}::cross_entropy_scale", mutates_args=())
def _scale_op(grad: torch.Tensor, g_loss: torch.Tensor) -> torch.Tensor:
    return cross_entropy_scale(grad, g_loss, False)


@_scale_op.register_fake
def _(grad, g_loss):
    return grad.new_empty(grad.shape)


@torch.library.custom_op(f"{_NAMESPACE}::cross_entropy_scale_in_place", mutates_args=("grad",))
def _scale_in_place_op(grad: torch.Tensor, g_loss: torch.Tensor) -> None:
    cross_entropy_scale(grad, g_loss, True)


def _scaled(grad: torch.Tensor, g_loss: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient that the forward wrote for a loss of gradient 1, for the one that came in."""
    if g_loss is None:
        return None
    if not _last_use(grad):
        return _scale_op(grad, g_loss)
    _scale_in_place_op(grad, g_loss)
    return grad.detach()


def _last_use(saved: torch.Tensor) -> bool:
    """Whether a saved tensor may be overwritten: not where the graph is retained, nor where it is being traced."""
    if type(saved) not in (torch.Tensor, torch.nn.Parameter) or torch.compiler.is_compiling():
        return False
    return not torch._C._autograd._get_current_graph_task_keep_graph()


def _save_gradient(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.inputs = len(inputs)
    ctx.save_for_backward(output[3])


def _backward_of_gradient(ctx, g_loss, *_):
    return _scaled(ctx.saved_tensors[0], g_loss), *((None,) * (ctx.inputs - 1))


_fwd_grad_op.register_autograd(_backward_of_gradient, setup_context=_save_gradient)


class _GradientInPlace(torch.autograd.Function):
    """The same in the memory of the logits. An op that mutates its input cannot have an autograd formula of its own."""

    @staticmethod
    def forward(ctx, logits, target, weight, loss):
        ctx.set_materialize_grads(False)
        found = _fwd_grad_in_place_op(logits, target, weight, *loss)
        ctx.save_for_backward(logits)
        return found

    @staticmethod
    def backward(ctx, g_loss, *_):
        return _scaled(ctx.saved_tensors[0], g_loss), None, None, None
