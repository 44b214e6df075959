"""Attention of all points over the context, with a choice of implementations, and a query for PyTorch's own choice.

`context_attention` combines ridgeline's attention and the projections of q, k and v in one autograd function: gradients
are written where the next GEMM reads them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.attention import attention, attention_backward

from .checkpoint import Again

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _sdpa(backend: SDPBackend) -> Attend:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v)

    return attend


#: The implementations that `attend` finds by name. "fp8" has no gradient.
IMPLEMENTATIONS: dict[str, Attend] = {
    "auto": attention,
    "separate": partial(attention, backward="separate"),
    "fused": partial(attention, backward="fused"),
    "fp8": partial(attention, fp8=True),
    "sdpa": F.scaled_dot_product_attention,
    "sdpa-flash": _sdpa(SDPBackend.FLASH_ATTENTION),
    "sdpa-cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
}


#: The names that `context_attention` supports, and ridgeline's backward of each.
WITH_PROJECTIONS = {"auto": "auto", "separate": "separate", "fused": "fused"}


def attend(name: str | Attend) -> Attend:
    """The implementation of a name: (q [B, H, M + N, D], k and v [B, H, M, D]) -> [B, H, M + N, D]. A function is
    returned unchanged. Raises ValueError for an unknown name."""
    if not isinstance(name, str):
        return name
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"TransformerNP: attention must be one of {', '.join(IMPLEMENTATIONS)}, got {name!r}")
    return IMPLEMENTATIONS[name]


def context_attention(
    x: torch.Tensor,
    w_q: torch.Tensor,
    w_kv: torch.Tensor,
    context: int,
    heads: int,
    start: int = 0,
    backward: str = "auto",
    again: tuple[Again, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Computes attention of the rows of x from `start` on over the first `context` rows, before the output projection.

        q = x[:, start:] W_qᵀ     k, v = x[:, :context] W_kvᵀ     out = softmax(q kᵀ / √D) v

    x         [B, S, d]
    w_q       [d, d]
    w_kv      [2 d, d], the rows of W_k first; both of x's dtype
    start     0, or `context`
    backward  as in `attention`
    again     a function, and a tensor from which it computes x. Then x, q, k and v are not saved: the backward computes
              them from that tensor. The output of attention is saved in either case

    Returns [B, S − start, d], differentiable in x and both weights. Compared to autograd over `attention`, its backward
    saves three passes: the copy that concatenates the gradients of k and v, the copy that pads the gradient of a slice
    of x with zeros, and the sum of the two gradients of x, as the second GEMM accumulates onto the first. With a batch
    of more than 1 the context's rows are copied to contiguous memory once.

    Raises ValueError for another start, and the errors of `attention`.
    """
    if start not in (0, context):
        raise ValueError(f"context_attention: start must be 0 or context, {context}, got {start}")
    make, source = (None, None) if again is None else (again[0], again[1].detach())
    return _ContextAttention.apply(x, w_q, w_kv, context, heads, start, backward, make, source)


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w_q, w_kv, context, heads, start, backward, again, source):
        ctx.context, ctx.heads, ctx.start, ctx.backward, ctx.again = context, heads, start, backward, again
        projected = _projected(x, w_q, w_kv, context, start)
        out, lse = attention(*_by_heads(*projected[2:], heads), return_lse=True, backward=backward)
        ctx.save_for_backward(w_q, w_kv, out, lse, *(projected if again is None else (source,)))
        return out.transpose(1, 2).flatten(2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        w_q, w_kv, out, lse, *kept = ctx.saved_tensors
        if ctx.again is not None:
            kept = _projected(ctx.again(*kept), w_q, w_kv, ctx.context, ctx.start)
        asking, asked, q, kv = kept
        dout = dout.contiguous().unflatten(-1, (ctx.heads, -1)).transpose(1, 2)
        dq, dkv = torch.empty_like(q), torch.empty_like(kv)
        into = dict(zip(("dq", "dk", "dv"), _by_heads(dq, dkv, ctx.heads), strict=True))
        attention_backward(dout, *_by_heads(q, kv, ctx.heads), out, lse, backward=ctx.backward, **into)
        dx = _joined(dq @ w_q, dkv, w_kv, ctx) if ctx.needs_input_grad[0] else None
        dw_q, dw_kv = (
            gradient.flatten(0, 1).t() @ rows.flatten(0, 1) if need else None
            for gradient, rows, need in zip((dq, dkv), (asking, asked), ctx.needs_input_grad[1:3], strict=True)
        )
        return dx, dw_q, dw_kv, *[None] * 6


def _projected(
    x: torch.Tensor, w_q: torch.Tensor, w_kv: torch.Tensor, context: int, start: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows of the queries, rows of the context, q, k and v concatenated along columns)."""
    asking, asked = _together(x[:, start:]), _together(x[:, :context])
    return asking, asked, F.linear(asking, w_q), F.linear(asked, w_kv)


def _joined(of_q: torch.Tensor, dkv: torch.Tensor, w_kv: torch.Tensor, ctx) -> torch.Tensor:
    """The gradient of x: the sum of of_q [B, S − start, d] and dkv · W_kv [B, context, d], each added to its rows."""
    if ctx.start:
        return torch.cat((dkv @ w_kv, of_q), 1)
    if len(of_q) == 1:
        of_q[0, : ctx.context].addmm_(dkv[0], w_kv)
    else:
        of_q[:, : ctx.context].baddbmm_(dkv, w_kv.expand(len(of_q), -1, -1))
    return of_q


def _by_heads(q: torch.Tensor, kv: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q [B, H, S, D], k and v [B, H, M, D]) as views of q and kv."""
    k, v = kv.unflatten(-1, (2, heads, -1)).unbind(2)
    return q.unflatten(-1, (heads, -1)).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _together(rows: torch.Tensor) -> torch.Tensor:
    """The rows, contiguous. They are copied 8 bytes at a time if alignment allows, since PyTorch copies a slice by
    elements."""
    if rows.is_contiguous():
        return rows
    wide = 8 // rows.element_size()
    if rows.stride(-1) == 1 and not any(n % wide for n in (rows.shape[-1], rows.storage_offset(), *rows.stride()[:-1])):
        return rows.view(torch.int64).contiguous().view(rows.dtype)
    return rows.contiguous()


def require_flash(
    context: int,
    targets: int,
    batch: int = 1,
    heads: int = 8,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
) -> str:
    """Returns the backend that F.scaled_dot_product_attention selects for a TransformerNP of these sizes in training:
    "flash_attention", "cudnn_attention", "efficient_attention" or "math". Allocates q and k for the query.

    Warns, with PyTorch's reasons, if it is "math", which holds the matrix of scores in memory, or
    "efficient_attention".
    """
    made = (torch.empty(batch, n, heads, head_dim, dtype=dtype, device=device) for n in (context + targets, context))
    q, k = (t.transpose(1, 2).requires_grad_() for t in made)
    found = SDPBackend(torch._fused_sdp_choice(q, k, k)).name.lower()
    if found in ("math", "efficient_attention"):
        reasons = _reasons(q, k) if q.is_cuda else []
        text = f"scaled_dot_product_attention falls back to {found} for q {tuple(q.shape)} in {dtype} on {q.device}"
        warnings.warn("; ".join([text, *reasons]), stacklevel=2)
    return found


def _reasons(q: torch.Tensor, k: torch.Tensor) -> list[str]:
    params = torch.backends.cuda.SDPAParams(q, k, k, None, 0.0, False, False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.backends.cuda.can_use_flash_attention(params, debug=True)
        torch.backends.cuda.can_use_cudnn_attention(params, debug=True)
    return [str(w.message).split(" (Triggered")[0] for w in caught]
