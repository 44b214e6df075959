"""A plain Triton rope, q and k in a launch each, that is right unless it is told which fault to have.

Every fault is one line that says `FAULT == "..."` or `fault == "..."`; "" is the control.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def _kernel(
    x_ptr,
    y_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    x_strides,
    y_strides,
    table_strides,
    position_strides,
    rows,
    seq,
    heads,
    sign,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INPLACE: tl.constexpr,
    FAULT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    b, s, h = row // (seq * heads), row // heads % seq, row % heads
    x_rows = x_ptr + (b * x_strides[0] + s * x_strides[1] + h * x_strides[2])[:, None]
    y_rows = y_ptr + (b * y_strides[0] + s * y_strides[1] + h * y_strides[2])[:, None]
    in_rows = (row < rows)[:, None]
    if FAULT == "last token not written":
        in_rows = in_rows & (s < seq - 1)[:, None]

    col = tl.arange(0, BLOCK)[None, :]
    mask = in_rows & (col < HALF)
    p = s
    if FAULT == "tables indexed by the token of the batch":
        p = b * seq + s
    if position_ptr is not None and FAULT != "position_ids ignored":
        p_b = b * 0 if FAULT == "positions of the first sequence for all" else b
        p = tl.load(position_ptr + p_b * position_strides[0] + s * position_strides[1], mask=row < rows, other=0)
    table = (b * table_strides[0] + p * table_strides[1])[:, None] + col * table_strides[2]
    cos = tl.load(cos_ptr + table, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + table, mask=mask, other=0.0).to(tl.float32)
    sin = sin * (-sign if FAULT == "sign of the sine" else sign)

    if REST > 0:
        cols = 2 * HALF + tl.arange(0, triton.next_power_of_2(REST))[None, :]
        in_rest = in_rows & (cols < 2 * HALF + REST)
        rest = tl.load(x_rows + cols * x_strides[3], mask=in_rest, other=0.0)
        if FAULT == "rest zeroed in place" and INPLACE:
            rest = rest * 0
        if FAULT != "rest not copied" or INPLACE:
            tl.store(y_rows + cols * y_strides[3], rest, mask=in_rest)

    neighbours: tl.constexpr = not INTERLEAVED if FAULT == "halves taken for neighbours" else INTERLEAVED
    first_col = 2 * col if neighbours else col
    second_col = first_col + (1 if neighbours else HALF)
    first = tl.load(x_rows + first_col * x_strides[3], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_rows + second_col * x_strides[3], mask=mask, other=0.0).to(tl.float32)
    rotated = first * cos - second * sin
    if FAULT == "second of a pair from the new first":
        first = rotated
    write = in_rows & (col < BLOCK) if FAULT == "no mask on the columns" else mask
    tl.store(y_rows + first_col * y_strides[3], rotated.to(y_ptr.dtype.element_ty), mask=write)
    rotated = second * cos + first * sin
    tl.store(y_rows + second_col * y_strides[3], rotated.to(y_ptr.dtype.element_ty), mask=write)


def _launch(x, y, cos, sin, position_ids, interleaved, inverse, fault, strides=None) -> None:
    batch, seq, heads, dim = x.shape
    half, rows = cos.shape[-1], batch * seq * heads
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    contiguous = (seq * heads * dim, heads * dim, dim, 1)
    x_strides, y_strides = strides or x.stride(), y.stride()
    if fault == "strides of a contiguous tensor" or (fault == "strides of the gradient ignored" and inverse):
        x_strides = contiguous
    if fault == "packed strides in place" and y is x:
        y_strides = contiguous
    if rows:
        _kernel[(triton.cdiv(rows, 64),)](
            x,
            y,
            cos,
            sin,
            position_ids,
            x_strides,
            y_strides,
            cos.stride() if cos.dim() == 3 else (0, *cos.stride()),
            None if position_ids is None else (0,) * (2 - position_ids.dim()) + position_ids.stride(),
            rows,
            seq,
            heads,
            -1.0 if inverse else 1.0,
            HALF=half,
            REST=dim - 2 * half,
            INTERLEAVED=interleaved,
            INPLACE=y is x,
            FAULT=fault,
            BLOCK=triton.next_power_of_2(half),
            ROWS=64,
        )


def _fwd_fake(q, k, cos, sin, position_ids, interleaved, inverse, fault):
    if fault == "shape of the fake result":
        return q.new_empty(1), q.new_empty(1)
    return q.new_empty(q.shape), q.new_empty(0) if k is None else k.new_empty(k.shape)


@torch.library.custom_op("plain_rope::fwd", mutates_args=())
def _fwd(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    interleaved: bool,
    inverse: bool,
    fault: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    if fault == "angle not reversed in the backward":
        inverse = False
    outputs = _fwd_fake(q, k, cos, sin, position_ids, interleaved, inverse, "")
    _launch(q, outputs[0], cos, sin, position_ids, interleaved, inverse, fault)
    if k is not None:
        strides = q.stride() if fault == "k read with the strides of q" else None
        _launch(k, outputs[1], cos, sin, position_ids, interleaved, inverse, fault, strides)
    if fault == "writes over q":
        q.copy_(outputs[0])
    return outputs


_fwd.register_fake(_fwd_fake)


def _in_place_body(q, k, cos, sin, position_ids, interleaved, fault) -> None:
    for x in (q,) if k is None else (q, k):
        _launch(x, x, cos, sin, position_ids, interleaved, False, fault)


@torch.library.custom_op("plain_rope::in_place", mutates_args=("q", "k"))
def _in_place(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    interleaved: bool,
    fault: str,
) -> None:
    _in_place_body(q, k, cos, sin, position_ids, interleaved, fault)


@torch.library.custom_op("plain_rope::secretly_in_place", mutates_args=())
def _secretly_in_place(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    interleaved: bool,
    fault: str,
) -> None:
    _in_place_body(q, k, cos, sin, position_ids, interleaved, fault)


for _op in (_in_place, _secretly_in_place):
    _op.register_fake(lambda *args: None)


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    _, _, cos, sin, position_ids, ctx.interleaved, ctx.inverse, ctx.fault = inputs
    ctx.save_for_backward(cos, sin, position_ids)


def _backward(ctx, dq, dk):
    need_q, need_k = ctx.needs_input_grad[:2]
    options = (*ctx.saved_tensors, ctx.interleaved, not ctx.inverse, ctx.fault)
    dq = _fwd(dq, None, *options)[0] if need_q and dq is not None else None
    if need_k and dk is not None:
        dk = (
            torch.zeros_like(dk)
            if ctx.fault == "no gradient of k alone" and not need_q
            else _fwd(dk, None, *options)[0]
        )
    return dq, dk if need_k else None, *[None] * 6


_fwd.register_autograd(_backward, setup_context=_save)


def rope(
    q,
    k,
    cos,
    sin,
    *,
    position_ids=None,
    rotary_dim=None,
    interleaved=False,
    layout="bshd",
    inplace=False,
    fault="",
):
    """The public op's signature and checks, and a fault."""
    if fault != "no checks":
        check(q, k, cos, sin, position_ids, layout)
    if cos.shape[-1] == rotary_dim:
        pairs = interleaved and fault != "first half of a table of pairs"
        step = slice(0, rotary_dim, 2) if pairs else slice(0, rotary_dim // 2)
        cos, sin = cos[..., step], sin[..., step]
    if fault == "in place on a copy" and inplace:
        q, k = q.clone(), None if k is None else k.clone()
    if inplace:
        op = _secretly_in_place if fault == "not declared as mutating" else _in_place
        op(q, k, cos, sin, position_ids, interleaved, fault)
        return q if k is None else (q, k)
    outputs = _fwd(q, k, cos, sin, position_ids, interleaved, False, fault)
    return outputs[0] if k is None else outputs


def check(q, k, cos, sin, position_ids, layout) -> None:
    """Raises TypeError or ValueError naming the argument."""
    if layout != "bshd":
        raise ValueError(f"layout must be bshd here, got {layout!r}")
    tensors = {"q": q, "k": k, "cos": cos, "sin": sin, "position_ids": position_ids}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in tensors.items():
        if name != "position_ids" and tensor.dtype not in DTYPES:
            raise TypeError(f"{name} must be fp32, fp16 or bf16, got {tensor.dtype}")
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on {q.device}, got {tensor.device}")
    if q.dim() != 4:
        raise ValueError(f"q must be [B, S, heads, D], got {tuple(q.shape)}")
    batch, seq, _, dim = q.shape
    if k is not None and (k.dim() != 4 or (*k.shape[:2], k.shape[3]) != (batch, seq, dim)):
        raise ValueError(f"k must be {tuple(q.shape)} but for the heads, got {tuple(k.shape)}")
    if cos.shape != sin.shape or cos.shape[-1] > dim or (position_ids is None and cos.shape[-2] < seq):
        raise ValueError(f"cos and sin must be alike and have {seq} rows, got {tuple(cos.shape)}, {tuple(sin.shape)}")
    if position_ids is not None and tuple(position_ids.shape) not in ((seq,), (batch, seq)):
        raise ValueError(f"position_ids must be [{seq}] or [{batch}, {seq}], got {tuple(position_ids.shape)}")
