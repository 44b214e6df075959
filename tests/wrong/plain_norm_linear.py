"""A plain norm_linear, one program a row forward and PyTorch backward, that is right unless it is told which fault to
have.

Every fault is one line that says `FAULT == "..."` or `fault == "..."`; "" is the control.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def _fwd_kernel(
    x_ptr,
    r_ptr,
    g_ptr,
    w_ptr,
    pre_ptr,
    h_ptr,
    rstd_ptr,
    dim,
    cols,
    stride_x,
    stride_r,
    stride_w,
    eps,
    HAS_R: tl.constexpr,
    FAULT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    if FAULT == "row stride ignored":
        stride_x = dim
    if FAULT == "residual read with the strides of x":
        stride_r = stride_x
    if FAULT == "stride of the weight ignored":
        stride_w = dim
    h = tl.load(x_ptr + row * stride_x + k, mask=k < dim, other=0.0)
    if HAS_R:
        residual = tl.load(r_ptr + row * stride_r + k, mask=k < dim, other=0.0)
        total = (h.to(tl.float32) + residual.to(tl.float32)).to(h.dtype)
        tl.store(h_ptr + row * dim + k, residual if FAULT == "residual returned unsummed" else total, mask=k < dim)
        h = h if FAULT == "residual not added" else total
    wide = h.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(wide * wide) / (BLOCK if FAULT == "mean over the padding" else dim) + eps)
    gain = tl.load(g_ptr + k, mask=k < dim, other=0.0).to(tl.float32)
    if FAULT == "gain dropped":
        gain = tl.full(gain.shape, 1.0, tl.float32)
    normed = (wide * rstd * gain).to(h.dtype).to(tl.float32)
    last = cols - 1 if FAULT == "last column not written" else cols
    for j in range(last):
        w = tl.load(w_ptr + j * stride_w + k, mask=k < dim, other=0.0).to(tl.float32)
        y = tl.sum(normed * w)
        if FAULT == "scaled twice":
            y *= rstd
        tl.store(pre_ptr + row * cols + j, y.to(pre_ptr.dtype.element_ty))
    tl.store(rstd_ptr + row, rstd)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.reshape(-1, tensor.shape[-1])
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


@torch.library.custom_op("plain_norm_linear::fwd", mutates_args=())
def _fwd(
    x: torch.Tensor, gain: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float, fault: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x2, r2, w = _rows(x), None if residual is None else _rows(residual), _rows(weight)
    (rows, dim), cols = x2.shape, w.shape[0]
    pre = torch.empty((*x.shape[:-1], cols), dtype=x.dtype, device=x.device)
    h = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    if residual is None:
        h.copy_(x)
    if rows:
        strides = x2.stride(0), 0 if r2 is None else r2.stride(0), w.stride(0)
        flags = dict(HAS_R=r2 is not None, FAULT=fault, BLOCK=triton.next_power_of_2(dim))
        _fwd_kernel[(rows,)](x2, r2, gain.contiguous(), w, pre, h, rstd, dim, cols, *strides, eps, **flags)
    return pre, h, rstd


@_fwd.register_fake
def _(x, gain, weight, residual, eps, fault):
    shape = (1,) if fault == "shape of the fake result" else (*x.shape[:-1], weight.shape[0])
    return x.new_empty(shape), x.new_empty(x.shape), x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)


@torch.library.custom_op("plain_norm_linear::bwd", mutates_args=())
def _bwd(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    pre: torch.Tensor,
    h: torch.Tensor,
    rstd: torch.Tensor,
    gain: torch.Tensor,
    weight: torch.Tensor,
    fault: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dy2, h2, w = (t.reshape(-1, t.shape[-1]).float() for t in (dy, h, weight))
    if fault == "incoming gradient taken for ones":
        dy2 = torch.ones_like(dy2)
    x_hat, dn = h2 * rstd[:, None], dy2 @ w
    dot = (dn * gain.float() * x_hat).sum(1, keepdim=True)
    if fault == "mean from the rounded result":
        dot = (dy2 * pre.reshape(dy2.shape).float()).sum(1, keepdim=True)
    if fault == "mean over the columns of y":
        dot = dot * h2.shape[1] / dy2.shape[1]
    if fault == "gradient that ignores the statistics":
        dot = torch.zeros_like(dot)
    dx = (dn * gain.float() - x_hat * dot / h2.shape[1]) * rstd[:, None]
    if dh is not None and fault != "gradient of h dropped":
        dx = dx + dh.reshape(dx.shape).float()
    dgain = (dn * (h2 if fault == "dgain of rows that are not normalised" else x_hat)).sum(0)
    normed = x_hat if fault == "dW of rows without the gain" else x_hat * gain.float()
    dw = dy2.t() @ normed
    return dx.reshape(h.shape).to(h.dtype), dgain.to(gain.dtype), dw.to(weight.dtype)


@_bwd.register_fake
def _(dy, dh, pre, h, rstd, gain, weight, fault):
    return h.new_empty(h.shape), gain.new_empty(gain.shape), weight.new_empty(weight.shape)


def _save(ctx, inputs, output) -> None:
    _, gain, weight, residual, _, ctx.fault = inputs
    ctx.has_residual = residual is not None
    ctx.save_for_backward(*output, gain, weight)


def _backward(ctx, dy, dh, _drstd):
    pre, h, rstd, gain, weight = ctx.saved_tensors
    dx, dgain, dw = _bwd(dy, dh if ctx.has_residual else None, pre, h, rstd, gain, weight, ctx.fault)
    return dx, dgain, dw, dx.clone() if ctx.has_residual else None, None, None


_fwd.register_autograd(_backward, setup_context=_save)


def norm_linear(x, norm_weight, weight, residual=None, *, eps=1e-6, activation=None, fault=""):
    """The public op's signature and checks, and a fault. It knows silu alone."""
    if fault != "no checks":
        check(x, norm_weight, weight, residual, activation)
    y, h, _ = _fwd(x, norm_weight, weight, residual, eps, fault)
    if activation == "silu" and fault != "activation dropped":
        y = torch.nn.functional.silu(y)
    return y if residual is None else (y, h)


def check(x, norm_weight, weight, residual, activation) -> None:
    """Raises TypeError or ValueError naming the argument."""
    cols = weight.shape[:1]
    for name, tensor, shape in (
        ("x", x, x.shape),
        ("norm_weight", norm_weight, x.shape[-1:]),
        ("weight", weight, (*cols, *x.shape[-1:])),
        ("residual", residual, x.shape),
    ):
        if tensor is None:
            continue
        if tensor.dtype not in DTYPES or (name != "norm_weight" and tensor.dtype != x.dtype):
            raise TypeError(f"{name} must be fp32, fp16 or bf16, and x's dtype, got {tensor.dtype}")
        if tensor.device != x.device:
            raise ValueError(f"{name} must be on {x.device}, got {tensor.device}")
        if tensor.shape != torch.Size(shape):
            raise ValueError(f"{name} must be {tuple(shape)}, got {tuple(tensor.shape)}")
    if activation not in (None, "silu"):
        raise ValueError(f"activation must be None or silu, got {activation!r}")
