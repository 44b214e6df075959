"""The public function: checks, registration with torch.library, autograd."""

from __future__ import annotations

import torch

from .kernel import INTERPRETED, MAX_K, REDUCTIONS, gmm_logprob_bwd, gmm_logprob_fwd

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")


def gmm_logprob(
    logits: torch.Tensor, mu: torch.Tensor, log_sigma: torch.Tensor, y: torch.Tensor, reduction: str = "mean"
) -> torch.Tensor:
    """Log-density of y under a mixture of K Gaussians with parameters of its own in every row.

        log p(y) = logsumexp_k( log_softmax(logits)_k − ½ z_k² − log_sigma_k − ½ log 2π ),   z_k = (y − mu_k) / sigma_k

    (Bishop 1994, Mixture Density Networks, eq. 22 and 23, up to the sign and the parametrisation by logarithms.)
    All arithmetic is fp32. Differentiable in all four inputs; the backward recomputes from them and nothing else is
    kept. Right for |log_sigma| up to 87, beyond which sigma or its inverse leaves fp32. A component whose logit is −inf
    is off; a row whose logits are all −inf is NaN, as in PyTorch.

    logits, mu, log_sigma  [..., K] with 1 <= K <= 128, of one shape. Rows are read in place when the leading dimensions
                           flatten to one stride and the last stride is 1, so the chunks of one [..., 3K] are not
                           copied; otherwise they are copied first.
    y                      [...], the leading dimensions of logits, any strides
    reduction              "none": [...], contiguous. "mean" and "sum" over all rows: a scalar, accumulated in fp32
                           within a program and in fixed point between them, whatever their order, so repeats agree
                           bit for bit. Without rows they are NaN and 0.

    All inputs are fp32, all fp16 or all bf16, on one device; the result has their dtype, as in PyTorch.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, device or reduction, RuntimeError for CPU
    tensors outside Triton's interpreter.
    """
    _check(logits, mu, log_sigma, y, reduction)
    return _fwd_op(logits, mu, log_sigma, y, reduction)


def _check(logits: torch.Tensor, mu: torch.Tensor, log_sigma: torch.Tensor, y: torch.Tensor, reduction: str) -> None:
    if not isinstance(logits, torch.Tensor) or logits.dtype not in DTYPES:
        raise TypeError(f"gmm_logprob: logits must be a tensor of float32, float16 or bfloat16, got {_kind(logits)}")
    if logits.dim() == 0 or not 1 <= logits.shape[-1] <= MAX_K:
        raise ValueError(
            f"gmm_logprob: logits must be [..., K] with 1 <= K <= {MAX_K}, got shape {tuple(logits.shape)}"
        )
    for name, tensor in (("mu", mu), ("log_sigma", log_sigma), ("y", y)):
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != logits.dtype:
            raise TypeError(
                f"gmm_logprob: {name} must be a tensor of logits' dtype {logits.dtype}, got {_kind(tensor)}"
            )
        shape = logits.shape[:-1] if name == "y" else logits.shape
        if tensor.shape != shape:
            whose = "logits' leading dimensions" if name == "y" else "logits' shape"
            raise ValueError(f"gmm_logprob: {name} must have {whose} {tuple(shape)}, got {tuple(tensor.shape)}")
        if tensor.device != logits.device:
            raise ValueError(f"gmm_logprob: {name} must be on logits' device {logits.device}, got {tensor.device}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"gmm_logprob: reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    if logits.device.type != "cuda" and not (logits.device.type == "cpu" and INTERPRETED):
        raise RuntimeError(
            f"gmm_logprob: logits must be on a GPU, got {logits.device}; "
            "on the CPU it runs only in Triton's interpreter (TRITON_INTERPRET=1)"
        )


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__


@torch.library.custom_op(f"{_NAMESPACE}::gmm_logprob_fwd", mutates_args=())
def _fwd_op(
    logits: torch.Tensor, mu: torch.Tensor, log_sigma: torch.Tensor, y: torch.Tensor, reduction: str
) -> torch.Tensor:
    return gmm_logprob_fwd(logits, mu, log_sigma, y, reduction)


@_fwd_op.register_fake
def _(logits, mu, log_sigma, y, reduction):
    return y.new_empty(y.shape if reduction == "none" else ())


@torch.library.custom_op(f"{_NAMESPACE}::gmm_logprob_bwd", mutates_args=())
def _bwd_op(
    grad: torch.Tensor,
    logits: torch.Tensor,
    mu: torch.Tensor,
    log_sigma: torch.Tensor,
    y: torch.Tensor,
    reduction: str,
    needed: list[bool],
) -> list[torch.Tensor]:
    # An op may not return None among tensors: a gradient that nobody needs is an empty tensor, without elements.
    grads = gmm_logprob_bwd(grad, logits, mu, log_sigma, y, reduction, needed)
    return [logits.new_empty(0) if grad is None else grad for grad in grads]


@_bwd_op.register_fake
def _(grad, logits, mu, log_sigma, y, reduction, needed):
    inputs = (logits, mu, log_sigma, y)
    return [x.new_empty(x.shape if need else 0) for x, need in zip(inputs, needed, strict=True)]


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.reduction = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad):
    needed = list(ctx.needs_input_grad[:4])
    grads = _bwd_op(grad, *ctx.saved_tensors, ctx.reduction, needed)
    return *(grad if need else None for grad, need in zip(grads, needed, strict=True)), None


_fwd_op.register_autograd(_backward, setup_context=_save)
