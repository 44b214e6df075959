"""The backward in its separate form: one kernel for dK and dV, one for dQ. No atomics, so it is deterministic.

    p = exp2(s·c − lse2)    dp = do·vᵀ             ds = p ∘ (dp − delta)     lse2, delta: see `delta`
    dv = pᵀ·do              dk = scale · dsᵀ·q     dq = scale · ds·k

FLOPs: a backward needs five GEMMs of 2·D per visible pair, 2.5 times the forward. Here both kernels compute s and dp,
which makes seven. At H8 D64, Q = 205 000, K = 200 000, five are 210 TFLOP, 300 ms at 700 TFLOP/s; seven take 420 ms.
Nothing of size queries × keys is stored: lse2 and delta are 8 bytes per query.
"""

from __future__ import annotations

import torch

from ..problem import Problem, Saved
from .delta import row_terms
from .key_gradients import key_gradients
from .query_gradient import query_gradient


def separate_bwd(
    problem: Problem, saved: Saved, dq: torch.Tensor | None, dk: torch.Tensor | None, dv: torch.Tensor | None
) -> None:
    """Writes dq unless it is None, and the first `keys` rows of dk and dv unless they are None. Requires at least one
    query and one key."""
    terms = row_terms(problem, saved)
    if dk is not None and dv is not None:
        key_gradients(problem, saved.dout, terms, dk, dv)
    if dq is not None:
        query_gradient(problem, saved.dout, terms, dq)
