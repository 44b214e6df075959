"""The portable backward: one kernel for dK and dV, one for dQ and dbias. The first loops over the lists of columns of
the mask, the second over those of rows."""

from __future__ import annotations

import torch

from ..problem import Problem, Saved
from .delta import row_terms
from .key_gradients import key_gradients
from .query_gradient import query_gradient


def portable_bwd(
    problem: Problem,
    saved: Saved,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    need_dbias: bool,
) -> torch.Tensor | None:
    """Writes dq unless it is None, and dk and dv unless they are None; returns dbias if it is needed.

    There are no atomics, so it is deterministic. Both kernels compute s and dp, which makes seven GEMMs of 2·D FLOPs
    per kept pair where five are needed. Nothing of size queries × keys is stored.
    """
    terms = row_terms(problem, saved)
    if dk is not None and dv is not None:
        key_gradients(problem, saved.dout, terms, dk, dv)
    return None if dq is None else query_gradient(problem, saved.dout, terms, dq, need_dbias)
