"""The parts of a block, whose backward defers the gradients of weights to a `Place` of `weight_gradients`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.attention import attention, attention_backward
from kernels.rmsnorm import rmsnorm_backward, rmsnorm_forward

from .weight_gradients import Place, as_they_lie, pick_projections


def stacked_weights(w_q: torch.Tensor, w_kv: torch.Tensor) -> torch.Tensor | None:
    """[w_q; w_kv] as a view [3 d, d] if w_kv directly follows w_q in memory, otherwise None."""
    halves = as_they_lie([w_q, *w_kv.chunk(2)]) if w_kv.shape[0] == 2 * w_q.shape[0] else None
    return None if halves is None else halves.flatten(0, 1)


def norm(
    x: torch.Tensor, branch: torch.Tensor | None, weight: torch.Tensor, eps: float, place: Place, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normalised rows of x + branch, x + branch). The gradient of the weight is deferred to `place`."""
    return _Norm.apply(x, branch, place.token, place, kind, eps, weight.detach())


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, branch, token, place, kind, eps, weight):
        ctx.set_materialize_grads(False)
        ctx.place, ctx.kind = place, kind
        first, residual = (x, None) if branch is None else (branch, x)
        y, h, rstd = rmsnorm_forward(first, weight, eps, residual)
        ctx.save_for_backward(h, rstd, weight)
        return y, h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy, dh):
        h, rstd, weight = ctx.saved_tensors
        dx = dh
        if dy is not None:
            dx, partial = rmsnorm_backward(dy, h, rstd, weight, dh)
            if ctx.needs_input_grad[2]:
                ctx.place.operands.add_partial(ctx.place.layer, ctx.kind, partial, weight.dtype)
        need_x, need_branch, *_ = ctx.needs_input_grad
        return dx if need_x else None, dx if need_branch else None, *[None] * 5


def projected_attention(
    x: torch.Tensor,
    w_q: torch.Tensor,
    w_kv: torch.Tensor,
    w_out: torch.Tensor,
    place: Place,
    context: int,
    heads: int,
    backward: str = "auto",
    projections: str = "auto",
) -> torch.Tensor:
    """softmax(q kᵀ / √D) v W_outᵀ with q = x W_qᵀ and k, v = x[:, :context] W_kvᵀ: `context_attention` with the output
    projection. The gradients of the weights are deferred to `place`.

    projections  "joint": one GEMM computes q, k and v of all rows, if the weights are consecutive in memory; "apart":
                 two GEMMs; "auto": the choice of `pick_projections`
    """
    wanted = projections if projections != "auto" else pick_projections(len(x), x.shape[1] - context)
    given = [weight.to(x.dtype).detach() for weight in (w_q, w_kv, w_out)]
    joint = stacked_weights(*given[:2]) if wanted == "joint" else None
    function = _ApartAttention if joint is None else _JointAttention
    weights = given if joint is None else (joint, given[2])
    return function.apply(x, place.token, place, context, heads, backward, *weights)


class _JointAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, token, place, context, heads, backward, w_qkv, w_out):
        ctx.place, ctx.context, ctx.heads, ctx.backward = place, context, heads, backward
        qkv = F.linear(x, w_qkv)
        out, lse = attention(*_heads_of(qkv, context, heads), return_lse=True, backward=backward)
        attended = out.transpose(1, 2).flatten(2)
        ctx.save_for_backward(x, qkv, out, lse, w_qkv, w_out)
        return F.linear(attended, w_out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, qkv, out, lse, w_qkv, w_out = ctx.saved_tensors
        operands, _, layer = ctx.place
        dy = dy.contiguous()
        # Keys and values of the targets have no gradient.
        dqkv = operands.room("dqkv", layer, qkv, qkv.shape, zero=True)
        into = dict(zip(("dq", "dk", "dv"), _heads_of(dqkv, ctx.context, ctx.heads), strict=True))
        _attention_backward(ctx, dy @ w_out, _heads_of(qkv, ctx.context, ctx.heads), out, lse, into)
        if ctx.needs_input_grad[1]:
            operands.add(layer, qkv=(x, dqkv), out=(out.transpose(1, 2).flatten(2), dy))
            operands.end_of_layer()
        dx = dqkv @ w_qkv if ctx.needs_input_grad[0] else None
        return dx, ctx.place.gradient_of_token(), *[None] * 6


class _ApartAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, token, place, context, heads, backward, w_q, w_kv, w_out):
        ctx.place, ctx.context, ctx.heads, ctx.backward = place, context, heads, backward
        asked = x[:, :context].contiguous()
        q, kv = F.linear(x, w_q), F.linear(asked, w_kv)
        out, lse = attention(*_by_heads(q, kv, heads), return_lse=True, backward=backward)
        ctx.save_for_backward(x, asked, q, kv, out, lse, w_q, w_kv, w_out)
        return F.linear(out.transpose(1, 2).flatten(2), w_out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, asked, q, kv, out, lse, w_q, w_kv, w_out = ctx.saved_tensors
        operands, _, layer = ctx.place
        dy = dy.contiguous()
        dq, dkv = operands.room("dq", layer, q, q.shape), operands.room("dkv", layer, kv, kv.shape)
        into = dict(zip(("dq", "dk", "dv"), _by_heads(dq, dkv, ctx.heads), strict=True))
        _attention_backward(ctx, dy @ w_out, _by_heads(q, kv, ctx.heads), out, lse, into)
        if ctx.needs_input_grad[1]:
            operands.add(layer, q=(x, dq), kv=(asked, dkv), out=(out.transpose(1, 2).flatten(2), dy))
            operands.end_of_layer()
        dx = None
        if ctx.needs_input_grad[0]:
            dx = dq @ w_q
            if len(dx) == 1:
                dx[0, : ctx.context].addmm_(dkv[0], w_kv)
            else:
                dx[:, : ctx.context].baddbmm_(dkv, w_kv.expand(len(dx), -1, -1))
        return dx, ctx.place.gradient_of_token(), *[None] * 7


def _attention_backward(ctx, dout, qkv, out, lse, into) -> None:
    dout = dout.unflatten(-1, (ctx.heads, -1)).transpose(1, 2)
    attention_backward(dout, *qkv, out, lse, backward=ctx.backward, **into)


def _heads_of(qkv: torch.Tensor, context: int, heads: int) -> tuple[torch.Tensor, ...]:
    """(q [B, H, S, D], k and v [B, H, context, D]) as views of [B, S, 3 d]."""
    q, k, v = (t.transpose(1, 2) for t in qkv.unflatten(-1, (3, heads, -1)).unbind(2))
    return q, k[:, :, :context], v[:, :, :context]


def _by_heads(q: torch.Tensor, kv: torch.Tensor, heads: int) -> tuple[torch.Tensor, ...]:
    """The views of `_heads_of` for q [B, S, d] and kv [B, context, 2 d]."""
    k, v = (t.transpose(1, 2) for t in kv.unflatten(-1, (2, heads, -1)).unbind(2))
    return q.unflatten(-1, (heads, -1)).transpose(1, 2), k, v


def feed_forward(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, place: Place) -> torch.Tensor:
    """down · silu(up · x). The gradients of the weights are deferred to `place`. For few rows, cuBLAS and a separate
    activation kernel take no longer than a GEMM with a fused epilogue."""
    return _FeedForward.apply(x, place.token, place, *(weight.to(x.dtype).detach() for weight in (up, down)))


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, token, place, up, down):
        pre = F.linear(x, up)
        # Not a saved tensor: other layers write to the same buffer, which autograd would treat as an in-place change.
        ctx.place, ctx.hidden = place, place.operands.room("hidden", place.layer, pre, pre.shape)
        torch.ops.aten.silu.out(pre, out=ctx.hidden)
        ctx.save_for_backward(x, pre, up, down)
        return F.linear(ctx.hidden, down)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, pre, up, down = ctx.saved_tensors
        operands, _, layer = ctx.place
        dy = dy.contiguous()
        dpre = operands.room("dpre", layer, pre, pre.shape)
        torch.ops.aten.silu_backward.grad_input(dy @ down, pre, grad_input=dpre)
        if ctx.needs_input_grad[1]:
            operands.add(layer, up=(x, dpre), down=(ctx.hidden, dy))
        return dpre @ up if ctx.needs_input_grad[0] else None, *[None] * 4
