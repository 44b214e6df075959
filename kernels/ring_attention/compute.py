"""Calls of a schedule on tensors [B, H, S, D]: what a rank computes. All of it is kernels/attention's."""

from __future__ import annotations

import torch

from ..attention import attention_delta as attention_delta
from ..attention import attention_partial, attention_partial_backward
from .schedule import Call


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
    """Adds the call's keys to the running (out, lse) of its queries, rows as the call has them; with `final` their
    outputs go to `result` instead, where that is given."""
    (a, b), (c, d) = call.q, call.k
    attention_partial(
        q[:, :, a:b],
        k[:, :, c:d],
        v[:, :, c:d],
        out[:, :, a:b],
        lse[:, :, a:b],
        causal=call.causal,
        scale=scale,
        q_offset=call.q_offset,
        k_offset=call.k_offset,
        result=result[:, :, a:b] if call.final and result is not None else None,
    )


def attend_backward(
    call: Call,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    scale: float | None,
) -> None:
    """Adds the call's share to those of the fp32 gradients that are given; rows as the call has them."""
    (a, b), (c, d) = call.q, call.k
    if c == d:
        return
    attention_partial_backward(
        dout[:, :, a:b],
        q[:, :, a:b],
        k[:, :, c:d],
        v[:, :, c:d],
        None,
        lse[:, :, a:b],
        None if dq is None else dq[:, :, a:b],
        None if dk is None else dk[:, :, c:d],
        None if dv is None else dv[:, :, c:d],
        delta=delta[:, :, a:b],
        causal=call.causal,
        scale=scale,
        q_offset=call.q_offset,
        k_offset=call.k_offset,
    )


def shifted(call: Call, q: int = 0, k: int = 0) -> Call:
    """The call with rows counted from row q of the queries' block and row k of the keys' block on."""
    return Call(
        (call.q[0] - q, call.q[1] - q),
        (call.k[0] - k, call.k[1] - k),
        call.q_offset,
        call.k_offset,
        call.causal,
        call.final,
    )


def merge(out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> None:
    """Adds normalised outputs over other keys to (out, lse), in place, in fp32; −inf is the lse of no key."""
    both = torch.logaddexp(lse, more_lse)
    safe = torch.where(both == -torch.inf, 0.0, both)
    out.mul_((lse - safe).exp_().unsqueeze(-1)).addcmul_(more, (more_lse - safe).exp_().unsqueeze(-1))
    lse.copy_(both)
