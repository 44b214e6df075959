"""A plain Triton cross entropy, one program a row, that is right unless it is told which fault to have.

Every fault is one line that says `FAULT == "..."`; "" is the control. The sums over the batch are PyTorch's.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl

_CALLS = itertools.count()
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCK = 32


@triton.jit
def _capped(x, cap, HAS_CAP: tl.constexpr):
    y = x
    if HAS_CAP:
        y = cap * (1 - 2 / (1 + tl.exp(2 * x / cap)))
    return y


@triton.jit
def _fwd_kernel(
    x_ptr,
    t_ptr,
    w_ptr,
    out_ptr,
    vocab,
    stride_x,
    stride_t,
    ignore_index,
    smoothing,
    z_loss,
    cap,
    HAS_CAP: tl.constexpr,
    FAULT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """For each row: cross entropy, z-loss, weight, and lse in two parts, the maximum and the logarithm of the sum."""
    row = tl.program_id(0).to(tl.int64)
    if FAULT == "row stride ignored":
        stride_x = vocab
    target = tl.load(t_ptr + row * (1 if FAULT == "stride of the target ignored" else stride_t))
    live = target != ignore_index
    column = tl.where(live, target, 0)
    if FAULT == "target one off":
        column = tl.where(column + 1 < vocab, column + 1, column)
    cols = tl.arange(0, BLOCK)
    m, s, y_sum, w_sum = float("-inf"), 0.0, 0.0, tl.load(w_ptr + vocab)
    end = vocab - 1 if FAULT == "last column not read" else vocab
    for start in range(0, end, BLOCK):
        here = start + cols < end
        pad = 0.0 if FAULT == "padding counted" else float("-inf")
        y = _capped(tl.load(x_ptr + row * stride_x + start + cols, mask=here, other=0.0).to(tl.float32), cap, HAS_CAP)
        w = tl.load(w_ptr + start + cols, mask=here, other=0.0)
        y_sum += tl.sum(tl.where(here, w * y, 0.0))
        y = tl.where(here, y, pad)
        new = tl.maximum(m, tl.max(y))
        safe = tl.where(new == float("-inf"), 0.0, new)
        if FAULT == "maximum not subtracted":
            safe = 0.0
        scale = tl.exp(m - safe)
        if FAULT == "sum not rescaled" or FAULT == "maximum not subtracted":
            scale = 1.0
        s = s * scale + tl.sum(tl.exp(y - safe))
        m = new
    log_s = tl.log(s)
    y_target = _capped(tl.load(x_ptr + row * stride_x + column).to(tl.float32), cap, HAS_CAP)
    if FAULT == "maximum not subtracted":
        m = 0.0
    lse = m + log_s
    weight = tl.load(w_ptr + column)
    ce = weight * ((m - y_target) + log_s)
    if FAULT != "label smoothing dropped" and smoothing > 0:
        classes = 1 if FAULT == "label smoothing not divided by the classes" else vocab
        ce = (1 - smoothing) * ce + smoothing / classes * (w_sum * lse - y_sum)
    z = z_loss * lse * lse
    counted = live | (FAULT == "ignored rows counted")
    tl.store(out_ptr + 5 * row, tl.where(counted, ce, 0.0))
    tl.store(out_ptr + 5 * row + 1, tl.where(counted, z, 0.0))
    tl.store(out_ptr + 5 * row + 2, tl.where(live, weight, 0.0))
    tl.store(out_ptr + 5 * row + 3, m)
    tl.store(out_ptr + 5 * row + 4, log_s)


@triton.jit
def _bwd_kernel(
    x_ptr,
    t_ptr,
    w_ptr,
    saved_ptr,
    g_ptr,
    dx_ptr,
    vocab,
    stride_x,
    stride_t,
    stride_dx,
    ignore_index,
    smoothing,
    z_loss,
    cap,
    HAS_CAP: tl.constexpr,
    FAULT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """saved holds what each row's cross entropy and z-loss are divided by and the two parts of lse, g the gradients of
    the three."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(t_ptr + row * stride_t)
    live = target != ignore_index
    column = tl.where(live, target, 0)
    m, log_s = tl.load(saved_ptr + 4 * row + 2), tl.load(saved_ptr + 4 * row + 3)
    g = tl.load(g_ptr + 3 * row) / tl.load(saved_ptr + 4 * row)
    g_z = tl.load(g_ptr + 3 * row + 1) / tl.load(saved_ptr + 4 * row + 1)
    g_lse = tl.load(g_ptr + 3 * row + 2)
    weight = tl.load(w_ptr + column)
    cols = tl.arange(0, BLOCK)
    w_sum = tl.load(w_ptr + vocab)
    for start in range(0, vocab, BLOCK):
        here = start + cols < vocab
        x = tl.load(x_ptr + row * stride_x + start + cols, mask=here, other=0.0).to(tl.float32)
        y = _capped(x, cap, HAS_CAP)
        w = tl.load(w_ptr + start + cols, mask=here, other=0.0)
        p = tl.exp((y - m) - log_s)
        hit = start + cols == column
        d = g * (1 - smoothing) * weight * tl.where(hit, p - 1, p)
        if FAULT == "gradient without the one at the target":
            d = g * (1 - smoothing) * weight * p
        d += g * smoothing / vocab * (w_sum * p - w)
        if FAULT != "gradient of the z-loss dropped":
            d += g_z * 2 * z_loss * (m + log_s) * p
        if FAULT != "ignored rows have a gradient":
            d = tl.where(live, d, 0.0)
        if FAULT != "gradient of lse dropped":
            d += tl.where(g_lse != 0, g_lse * p, 0.0)
        if HAS_CAP and FAULT != "softcap not differentiated":
            d *= 1 - (y / cap) * (y / cap)
        write = start + cols < vocab + (1 if FAULT == "writes past the end" else 0)
        tl.store(dx_ptr + row * stride_dx + start + cols, d.to(dx_ptr.dtype.element_ty), mask=write)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.reshape(-1, tensor.shape[-1])
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


_OPTIONS = "int ignore_index, float smoothing, str reduction, float z_loss, float? cap, str fault"


@torch.library.custom_op(
    "plain_cross_entropy::fwd",
    mutates_args=(),
    schema=f"(Tensor x, Tensor t, Tensor? weight, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _fwd(x, t, weight, ignore_index, smoothing, reduction, z_loss, cap, fault):
    """loss, z-loss, lse and what `_bwd_kernel` calls saved, [rows, 4]."""
    x2, flat = _rows(x), t.reshape(-1)
    rows, vocab = x2.shape
    out = torch.zeros(rows, 5, dtype=torch.float32, device=x.device)
    w = _weights(weight, vocab, x.device)
    if rows:
        args = (vocab, x2.stride(0), flat.stride(0), ignore_index, smoothing, z_loss, 1.0 if cap is None else cap)
        _fwd_kernel[(rows,)](x2, flat, w, out, *args, HAS_CAP=cap is not None, FAULT=fault, BLOCK=BLOCK)
    if fault == "rows in half precision":
        out = out.half().float()
    ce, z, weights, m, log_s = out.unbind(1)
    count, total = (flat != ignore_index).float().sum(), weights.sum()
    if fault == "mean over all rows":
        count = total = torch.full_like(count, rows)
    if fault == "mean over rows in place of weights":
        total = count
    by = torch.stack([total, count]) if reduction == "mean" else torch.ones(2, device=x.device)
    loss, zs = ce + z, z.clone()
    if reduction != "none":
        zs = z.sum() / by[1]
        loss = _sum(ce, fault) / by[0] + zs
    shape = t.shape if reduction == "none" else ()
    saved = torch.cat([by.expand(rows, 2), out[:, 3:]], 1)
    return loss.to(x.dtype).view(shape), zs.to(x.dtype).view(shape), (m + log_s).view(t.shape), saved


@_fwd.register_fake
def _(x, t, weight, ignore_index, smoothing, reduction, z_loss, cap, fault):
    shape = t.shape if reduction == "none" else ()
    loss = x.new_empty((1,) if fault == "shape of the fake result" else shape)
    lse = x.new_empty(t.shape, dtype=torch.float32)
    return loss, x.new_empty(shape), lse, x.new_empty((t.numel(), 4), dtype=torch.float32)


@torch.library.custom_op(
    "plain_cross_entropy::bwd",
    mutates_args=(),
    schema="(Tensor? g, Tensor? gz, Tensor? gl, Tensor x, Tensor t, Tensor? weight, Tensor saved, "
    f"{_OPTIONS}) -> Tensor",
)
def _bwd(g, gz, gl, x, t, weight, saved, *options):
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _gradient(g, gz, gl, x, t, weight, saved, dx.view(-1, x.shape[-1]), *options)
    return dx


@_bwd.register_fake
def _(g, gz, gl, x, *rest):
    return x.new_empty(x.shape)


@torch.library.custom_op(
    "plain_cross_entropy::bwd_in_place",
    mutates_args=("x",),
    schema=f"(Tensor g, Tensor(a!) x, Tensor t, Tensor? weight, Tensor saved, {_OPTIONS}) -> ()",
)
def _bwd_in_place(g, x, t, weight, saved, *options):
    x2 = _rows(x)
    if x.numel():
        _gradient(g, None, None, x2, t, weight, saved, x2, *options)
        x.copy_(x2.view(x.shape))


def _gradient(g, gz, gl, x, t, weight, saved, dx, ignore_index, smoothing, reduction, z_loss, cap, fault) -> None:
    x2, flat = _rows(x), t.reshape(-1)
    rows, vocab = x2.shape
    zero = torch.zeros(rows, dtype=torch.float32, device=x.device)
    ce = zero if g is None else zero + g.reshape(-1).float()
    if fault == "incoming gradient taken for ones":
        ce = zero + 1
    z = ce if gz is None else ce + gz.reshape(-1).float()
    given = torch.stack([ce, z, zero if gl is None else gl.reshape(-1).float()], 1).contiguous()
    if rows:
        cap_or_one = 1.0 if cap is None else cap
        args = (vocab, x2.stride(0), flat.stride(0), dx.stride(0), ignore_index, smoothing, z_loss, cap_or_one)
        w, saved = _weights(weight, vocab, x.device), saved.contiguous()
        _bwd_kernel[(rows,)](x2, flat, w, saved, given, dx, *args, HAS_CAP=cap is not None, FAULT=fault, BLOCK=BLOCK)


def _weights(weight, vocab, device) -> torch.Tensor:
    """The weights, and their sum behind them."""
    weight = torch.ones(vocab, device=device) if weight is None else weight.float()
    return torch.cat([weight, weight.sum()[None]])


def _sum(values: torch.Tensor, fault: str) -> torch.Tensor:
    if fault == "summed in the order of arrival":
        total = torch.zeros((), dtype=torch.float32, device=values.device)
        for value in values.flip(0) if next(_CALLS) % 2 else values:
            total += value
        return total
    return values.sum()


def _save(ctx, inputs, output) -> None:
    x, t, weight, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, t, weight, output[3])


def _backward(ctx, g, gz, gl, _):
    return _bwd(g, gz, gl, *ctx.saved_tensors, *ctx.options), *((None,) * (2 + len(ctx.options)))


_fwd.register_autograd(_backward, setup_context=_save)


def cross_entropy(
    logits,
    target,
    *,
    weight=None,
    ignore_index=-100,
    label_smoothing=0.0,
    reduction="mean",
    z_loss=0.0,
    softcap=None,
    return_z_loss=False,
    return_lse=False,
    with_grad=False,
    fault="",
):
    """The signature and checks of the implementation in SPEC, and a fault."""
    if fault != "no checks":
        check(logits, target, weight)
    options = (ignore_index, label_smoothing, reduction, z_loss, softcap, fault)
    loss, z, lse, saved = _fwd(logits, target, weight, *options)
    found = [loss, *([z] if return_z_loss else []), *([lse] if return_lse else [])]
    if with_grad:
        given = logits.clone() if fault == "gradient in a tensor of its own" else logits
        one = torch.ones((), dtype=torch.float32, device=logits.device)
        _bwd_in_place(one, given, target, weight, saved, *options)
        if fault == "logits read after the gradient is in their place":
            found[0] = _fwd(given, target, weight, *options)[0]
        found.insert(1, given)
    return tuple(found) if len(found) > 1 else found[0]


def check(logits, target, weight=None) -> None:
    """Raises TypeError or ValueError naming the argument."""
    if logits.dtype not in DTYPES:
        raise TypeError(f"logits must be fp32, fp16 or bf16, got {logits.dtype}")
    if weight is not None and weight.dtype not in DTYPES:
        raise TypeError(f"weight must be fp32, fp16 or bf16, got {weight.dtype}")
    for name, tensor, shape in (("target", target, logits.shape[:-1]), ("weight", weight, logits.shape[-1:])):
        if tensor is None:
            continue
        if tensor.device != logits.device:
            raise ValueError(f"{name} must be on {logits.device}, got {tensor.device}")
        if tensor.shape != shape:
            raise ValueError(f"{name} must be {tuple(shape)}, got {tuple(tensor.shape)}")
