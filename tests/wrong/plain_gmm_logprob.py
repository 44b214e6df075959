"""A plain Triton mixture log-density, one program a row, that is right unless it is told which fault to have.

Every fault is one line that says `FAULT == "..."`; "" is the control.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HALF_LOG_2PI = tl.constexpr(0.9189385332046727)


@triton.jit
def _log_softmax(logits, in_row, FAULT: tl.constexpr):
    """Over the lanes of the row; -inf in the padding."""
    if FAULT == "weights not normalised":
        return logits
    top = 0.0 if FAULT == "softmax without the maximum" else tl.max(logits)
    return logits - top - tl.log(tl.sum(tl.where(in_row, tl.exp(logits - top), 0.0)))


@triton.jit
def _components(
    logits_ptr, mu_ptr, log_sigma_ptr, y_ptr, row, k, strides, in_row, FAULT: tl.constexpr, BLOCK: tl.constexpr
):
    """log weight, z, 1/sigma and log (weight · density) of each component of a row."""
    lanes = tl.arange(0, BLOCK)
    stride_l, stride_m, stride_s, stride_y = strides
    if FAULT == "mu read with the strides of the logits":
        stride_m = stride_l
    if FAULT == "stride of y ignored":
        stride_y = 1
    padding = 0.0 if FAULT == "padded lanes take part" else float("-inf")
    logits = tl.load(logits_ptr + row * stride_l + lanes, mask=in_row, other=padding).to(tl.float32)
    mu = tl.load(mu_ptr + row * stride_m + lanes, mask=in_row, other=0.0).to(tl.float32)
    log_sigma = tl.load(log_sigma_ptr + row * stride_s + lanes, mask=in_row, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row * stride_y).to(tl.float32)
    everything = in_row | (lanes >= k) if FAULT == "padded lanes take part" else in_row
    log_weight = _log_softmax(logits, everything, FAULT)
    scale = tl.exp(-log_sigma)
    z = (y - mu) * scale
    term = log_weight - 0.5 * z * z - log_sigma
    if FAULT != "-0.5 log 2 pi dropped":
        term -= HALF_LOG_2PI
    return log_weight, z, scale, tl.where(everything, term, float("-inf"))


@triton.jit
def _log_sum_exp(term, FAULT: tl.constexpr):
    top = tl.max(term)
    top = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    if FAULT == "log-sum-exp without the maximum":
        top = 0.0
    return top + tl.log(tl.sum(tl.exp(term - top)))


@triton.jit
def _fwd_kernel(l_ptr, m_ptr, s_ptr, y_ptr, out_ptr, k, sl, sm, ss, sy, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    in_row = tl.arange(0, BLOCK) < k
    if FAULT == "last component skipped":
        in_row = tl.arange(0, BLOCK) < k - 1
    _, _, _, term = _components(l_ptr, m_ptr, s_ptr, y_ptr, row, k, (sl, sm, ss, sy), in_row, FAULT, BLOCK)
    tl.store(out_ptr + row, _log_sum_exp(term, FAULT))


@triton.jit
def _bwd_kernel(
    l_ptr, m_ptr, s_ptr, y_ptr, g_ptr, dl_ptr, dm_ptr, ds_ptr, dy_ptr, k, sl, sm, ss, sy, sg,
    FAULT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    in_row = lanes < k
    log_weight, z, scale, term = _components(l_ptr, m_ptr, s_ptr, y_ptr, row, k, (sl, sm, ss, sy), in_row, FAULT, BLOCK)
    g = tl.load(g_ptr + row * sg).to(tl.float32)
    if FAULT == "incoming gradient taken for one":
        g = 1.0
    share = g * tl.exp(term - _log_sum_exp(term, FAULT))
    d_mu = share * z * scale
    prior = tl.exp(log_weight)
    if FAULT == "gradient of the normalisation dropped":
        prior = prior * 0
    tl.store(dl_ptr + row * k + lanes, (share - g * prior).to(dl_ptr.dtype.element_ty), mask=in_row)
    tl.store(dm_ptr + row * k + lanes, d_mu.to(dm_ptr.dtype.element_ty), mask=in_row)
    d_log_sigma = share * z * z - share  # in this order 0 times a z whose square overflows is 0
    if FAULT == "sign of the gradient of log_sigma":
        d_log_sigma = -d_log_sigma
    write = lanes < k - 1 if FAULT == "last gradient not written" else in_row
    if FAULT == "gradients written past the end":
        write = lanes < BLOCK
    tl.store(ds_ptr + row * k + lanes, d_log_sigma.to(ds_ptr.dtype.element_ty), mask=write)
    d_y = tl.sum(tl.where(in_row, d_mu, 0.0))
    tl.store(dy_ptr + row, (d_y if FAULT == "sign of the gradient of y" else -d_y).to(dy_ptr.dtype.element_ty))


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.reshape(-1, tensor.shape[-1])
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


@torch.library.custom_op("plain_gmm_logprob::fwd", mutates_args=())
def _fwd(logits: torch.Tensor, mu: torch.Tensor, log_sigma: torch.Tensor, y: torch.Tensor, fault: str) -> torch.Tensor:
    tensors = (_rows(logits), _rows(mu), _rows(log_sigma), y.reshape(-1))
    (rows, k), out = tensors[0].shape, torch.empty(y.shape, dtype=torch.float32, device=y.device)
    if rows:
        block = triton.next_power_of_2(k)
        _fwd_kernel[(rows,)](*tensors, out, k, *(t.stride(0) for t in tensors), FAULT=fault, BLOCK=block)
    return out


@_fwd.register_fake
def _(logits, mu, log_sigma, y, fault):
    return y.new_empty(y.shape, dtype=torch.float64 if fault == "dtype of the fake result" else torch.float32)


@torch.library.custom_op("plain_gmm_logprob::bwd", mutates_args=())
def _bwd(
    grad: torch.Tensor, logits: torch.Tensor, mu: torch.Tensor, log_sigma: torch.Tensor, y: torch.Tensor, fault: str
) -> list[torch.Tensor]:
    inputs = (logits, mu, log_sigma, y)
    tensors, g = (_rows(logits), _rows(mu), _rows(log_sigma), y.reshape(-1)), grad.reshape(-1)
    grads = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in inputs]
    rows, k = tensors[0].shape
    if rows:
        strides = (
            *(t.stride(0) for t in tensors),
            1 if fault == "stride of the incoming gradient ignored" else g.stride(0),
        )
        _bwd_kernel[(rows,)](*tensors, g, *grads, k, *strides, FAULT=fault, BLOCK=triton.next_power_of_2(k))
    return grads


@_bwd.register_fake
def _(grad, logits, mu, log_sigma, y, fault):
    return [t.new_empty(t.shape) for t in (logits, mu, log_sigma, y)]


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.fault = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad):
    return *_bwd(grad, *ctx.saved_tensors, ctx.fault), None


_fwd.register_autograd(_backward, setup_context=_save)


def gmm_logprob(logits, mu, log_sigma, y, reduction="mean", fault=""):
    """The public op's signature and checks, and a fault. The reduction is PyTorch's."""
    if fault != "no checks":
        check(logits, mu, log_sigma, y)
    rows = _fwd(logits, mu, log_sigma, y, fault)
    if reduction == "mean":
        rows = rows.sum() / (-(-rows.numel() // 8) * 8) if fault == "mean over padded rows" else rows.mean()
    elif reduction == "sum":
        rows = rows.sum()
    return rows.to(logits.dtype)


def check(logits, mu, log_sigma, y) -> None:
    """Raises TypeError or ValueError naming the argument."""
    for name, tensor in (("logits", logits), ("mu", mu), ("log_sigma", log_sigma), ("y", y)):
        shape = logits.shape[:-1] if name == "y" else logits.shape
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} must be fp32, fp16 or bf16, got {tensor.dtype}")
        if tensor.device != logits.device:
            raise ValueError(f"{name} must be on {logits.device}, got {tensor.device}")
        if tensor.shape != shape:
            raise ValueError(f"{name} must be {tuple(shape)}, got {tuple(tensor.shape)}")
