"""Runs the calls of a schedule on tensors [B, H, S, D]. All computation is that of kernels/attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..attention import attention_delta as attention_delta
from ..attention import attention_partial, attention_partial_backward
from . import configs
from .schedule import Call
from .sums import Share


def attend(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float | None,
    result: torch.Tensor | None = None,
) -> None:
    """Merges the call's keys into the running (out, lse) of its queries. Rows are those of the call. With `final`,
    their outputs are written to `result` instead, if given. Many keys are processed in segments."""
    (a, b), (c, d) = call.q, call.k
    segment = configs.pick_segment(k.shape[3], k.element_size())
    for first in range(c, max(d, c + 1), segment):
        last = min(first + segment, d)
        attention_partial(
            q[:, :, a:b],
            k[:, :, first:last],
            v[:, :, first:last],
            out[:, :, a:b],
            lse[:, :, a:b],
            causal=call.causal,
            scale=scale,
            q_offset=call.q_offset,
            k_offset=call.k_offset + first - c,
            result=result[:, :, a:b] if call.final and result is not None and last == d else None,
        )


def attend_backward(
    call: Call,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    *,
    scale: float | None,
    of_q: Share,
    of_k: Share,
    result: torch.Tensor | None = None,
) -> None:
    """Adds the call's contribution to the fp32 gradients, or writes it. Rows are those of the call. Final rows of dq
    are written to `result` instead, if given. Requires at least one key."""
    (a, b), (c, d) = call.q, call.k
    zero(of_q.zeros, dq)
    zero(of_k.zeros, dk, dv)
    attention_partial_backward(
        dout[:, :, a:b],
        q[:, :, a:b],
        k[:, :, c:d],
        v[:, :, c:d],
        None,
        lse[:, :, a:b],
        dq[:, :, a:b],
        dk[:, :, c:d],
        dv[:, :, c:d],
        delta=delta[:, :, a:b],
        causal=call.causal,
        scale=scale,
        q_offset=call.q_offset,
        k_offset=call.k_offset,
        add_dq=of_q.add,
        add_dkdv=of_k.add,
        result=result[:, :, a:b] if of_q.final and result is not None else None,
    )


def zero(rows: Sequence[tuple[int, int]], *sums: torch.Tensor) -> None:
    for first, last in rows:
        for tensor in sums:
            tensor[:, :, first:last].zero_()


def merge(out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> None:
    """Merges normalised outputs over other keys into (out, lse), in place, in fp32; lse −inf means no key."""
    both = torch.logaddexp(lse, more_lse)
    safe = torch.where(both == -torch.inf, 0.0, both)
    out.mul_((lse - safe).exp_().unsqueeze(-1)).addcmul_(more, (more_lse - safe).exp_().unsqueeze(-1))
    lse.copy_(both)
