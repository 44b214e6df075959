"""A plain Triton AdamW, one launch a parameter, that is right unless it is told which fault to have.

Every fault is one line that says `FAULT == "..."` or `fault == "..."`; "" is the control.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCK = 64


@triton.jit
def _kernel(
    p_ptr,
    g_ptr,
    m_ptr,
    v_ptr,
    w_ptr,
    numel,
    lr,
    beta1,
    beta2,
    new1,
    new2,
    eps,
    weight_decay,
    bias1,
    bias2,
    scale,
    HAS_W: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    FAULT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    p = tl.load((w_ptr if HAS_W else p_ptr) + at, mask=inside).to(tl.float32)
    g = tl.load(g_ptr + at, mask=inside).to(tl.float32)
    if FAULT != "scale dropped":
        g = g / scale
    if FAULT == "gradient scaled in place":
        tl.store(g_ptr + at, g.to(g_ptr.dtype.element_ty), mask=inside)
    if MAXIMIZE and FAULT != "maximize ignored":
        g = -g
    if FAULT == "decay in the gradient":
        g += weight_decay * p
    elif FAULT != "decay dropped":
        p -= lr * weight_decay * p
    if FAULT == "decay without the learning rate":
        p -= (1 - lr) * weight_decay * p
    m = tl.load(m_ptr + at, mask=inside)
    old = m
    m = beta1 * m + new1 * g
    if FAULT == "m from before the step":
        old, m = m, old
    v = beta2 * tl.load(v_ptr + at, mask=inside) + new2 * (g if FAULT == "g not squared" else g * g)
    root = tl.sqrt(v / bias2)
    if FAULT == "eps inside the root":
        root = tl.sqrt(v / bias2 + eps) - eps
    if FAULT == "eps before the correction":
        root = (tl.sqrt(v) + eps) / tl.sqrt(bias2 + 0.0) - eps
    p -= lr * m / bias1 / (root + eps)
    if FAULT == "m from before the step":
        m = old
    written = inside
    if FAULT == "last element not written":
        written = at < numel - 1
    if FAULT == "writes past the end":
        written = at < numel + 1
    if FAULT == "nothing after the first block":
        written = inside & (at < BLOCK)
    tl.store(p_ptr + at, p.to(p_ptr.dtype.element_ty), mask=written)
    tl.store(m_ptr + at, m, mask=inside)
    if FAULT != "v not written":
        tl.store(v_ptr + at, v, mask=inside)
    if HAS_W and FAULT != "master not written":
        if FAULT == "master rounded like its copy":
            p = p.to(p_ptr.dtype.element_ty).to(tl.float32)
        tl.store(w_ptr + at, p, mask=inside)


@torch.library.custom_op("plain_adamw::step", mutates_args=("p", "m", "v", "w"))
def _step(
    p: torch.Tensor,
    g: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    w: torch.Tensor | None,
    numbers: Sequence[float],
    maximize: bool,
    fault: str,
) -> None:
    """Copies of everything but what is contiguous as it is; the results are copied back."""
    if fault == "strides of the gradient ignored":
        g = torch.as_strided(g, p.shape, p.contiguous().stride())
    given = (p, g, m, v, w)
    flat = [None if t is None else t.contiguous() for t in given]
    if p.numel():
        flags = dict(HAS_W=w is not None, MAXIMIZE=maximize, FAULT=fault, BLOCK=BLOCK)
        with torch.cuda.device_of(p):
            _kernel[(triton.cdiv(p.numel(), BLOCK),)](*flat, p.numel(), *numbers, **flags)
    for tensor, copy in zip(given, flat, strict=True):
        if tensor is not None and copy is not tensor and tensor is not g:
            tensor.copy_(copy)


@_step.register_fake
def _(p, g, m, v, w, numbers, maximize, fault):
    return None


def adamw(
    params,
    grads,
    exp_avgs,
    exp_avg_sqs,
    step,
    *,
    lr,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=1e-2,
    maximize=False,
    master_params=None,
    grad_scale=1.0,
    fault="",
):
    """What the cases of the zoo need of the public function, and a fault. The scale is a number here."""
    if fault != "no checks":
        check(params, grads, exp_avgs, exp_avg_sqs, master_params)
    masters = master_params or [None] * len(params)
    if fault == "the next parameter's m":
        exp_avgs = _swapped(exp_avgs)
    beta1, beta2 = betas
    number = step - 1 if fault == "step counted from 0" else step
    bias1, bias2 = 1 - beta1**number, 1 - beta2**number
    if fault == "no bias correction":
        bias1 = bias2 = 1.0
    if fault == "bias of v taken for that of m":
        bias1 = bias2
    numbers = [float(x) for x in (lr, beta1, beta2, 1 - beta1, 1 - beta2, eps, weight_decay, bias1, bias2, grad_scale)]
    for index, given in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, masters, strict=True)):
        if fault == "last parameter forgotten" and index == len(params) - 1:
            continue
        _step(*given, numbers, maximize, fault)


def _swapped(tensors):
    """The first two in each other's place, where they have the same shape."""
    first, second, *rest = tensors
    return [second, first, *rest] if first.shape == second.shape else tensors


def check(params, grads, exp_avgs, exp_avg_sqs, master_params) -> None:
    """Raises TypeError or ValueError naming the argument by its list and place."""
    lists = dict(params=params, grads=grads, exp_avgs=exp_avgs, exp_avg_sqs=exp_avg_sqs, master_params=master_params)
    for name, tensors in lists.items():
        for index, tensor in enumerate(tensors or ()):
            if tensor is None:
                continue
            if tensor.dtype not in (DTYPES if name in ("params", "grads") else DTYPES[:1]):
                raise TypeError(f"{name}[{index}] must be of another dtype than {tensor.dtype}")
            if tensor.shape != params[index].shape:
                raise ValueError(f"{name}[{index}] must have the shape of params[{index}], got {tuple(tensor.shape)}")
            if tensor.device != params[0].device:
                raise ValueError(f"{name}[{index}] must be on {params[0].device}, got {tensor.device}")
