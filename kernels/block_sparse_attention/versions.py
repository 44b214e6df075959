"""Forward and backward as the op calls them: empty problems, the choice of a version, what runs for which gradient,
the memory of the results."""

from __future__ import annotations

import math

import torch

from . import configs
from .portable.backward import portable_bwd
from .portable.forward import portable_fwd
from .problem import Problem, Saved, empty_like, readable
from .sm90.backward import cuda_bwd, cuda_bwd_unsupported_reason
from .sm90.forward import cuda_fwd, cuda_unsupported_reason

FORWARD = BACKWARD = ("auto", "portable", "cuda")


def sparse_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    block: int,
    causal: bool,
    version: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out and lse of `block_sparse_attention`, whose arguments are checked, and the statistics that the backward wants
    in fp32."""
    out = empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    statistics = empty_statistics(q)
    if out.numel() == 0 or k.shape[2] == 0:
        return out.zero_(), lse.fill_(-math.inf), statistics.zero_()
    problem = Problem(readable(q), readable(k), readable(v), table, bias, scale, block, causal)
    if configs.pick_forward(version, _hopper_fwd(problem, version, out)) == "cuda":
        cuda_fwd(problem, out, lse)
    else:
        portable_fwd(problem, out, lse, statistics if statistics.numel() else None)
    return out, lse, statistics


def _hopper_fwd(problem: Problem, version: str, out: torch.Tensor) -> str:
    """The version for Hopper if it takes the problem. RuntimeError where it was asked for and does not."""
    if version == "portable":
        return ""
    reason = cuda_unsupported_reason(problem, out)
    if reason and version == "cuda":
        raise RuntimeError(f'block_sparse_attention: forward="cuda" cannot run here: {reason}')
    return "" if reason else "cuda"


def empty_statistics(q: torch.Tensor) -> torch.Tensor:
    """Maximum and sum of each row, [2, B, Hq, Sq], for fp32; for other dtypes, which do with lse, no element."""
    return q.new_empty((2, *q.shape[:3]) if q.dtype == torch.float32 else 0, dtype=torch.float32)


def sparse_bwd(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    statistics: torch.Tensor,
    scale: float,
    block: int,
    causal: bool,
    version: str,
    need_dq: bool,
    need_dkv: bool,
    need_dbias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv, dbias; tensors of no element for what is not needed. RuntimeError where the version asked for does
    not take the problem. Where less is needed than dq, dk and dv, the portable one runs, which leaves out the rest.
    """
    dq = empty_like(q) if need_dq or need_dbias else None
    dk, dv = (empty_like(k), empty_like(v)) if need_dkv else (None, None)
    dbias = None
    if q.numel() == 0 or k.shape[2] == 0:
        for gradient in (dq, dk, dv):
            if gradient is not None:
                gradient.zero_()
        if bias is not None and need_dbias:
            dbias = torch.zeros(bias.shape, dtype=bias.dtype, device=bias.device)
    else:
        problem = Problem(readable(q), readable(k), readable(v), table, bias, scale, block, causal)
        exact = statistics if statistics.numel() else None
        saved = Saved(readable(out), lse, exact, readable(dout), None if dlse is None else dlse.contiguous())
        if dq is not None and dk is not None and dv is not None and _in_cuda(problem, saved, version, dq, dk, dv):
            cuda_bwd(problem, saved, dq, dk, dv)
        else:
            dbias = portable_bwd(problem, saved, dq, dk, dv, need_dbias)
    return (
        dq if dq is not None and need_dq else q.new_empty(0),
        k.new_empty(0) if dk is None else dk,
        v.new_empty(0) if dv is None else dv,
        q.new_empty(0, dtype=torch.float32) if dbias is None else dbias,
    )


def _in_cuda(problem: Problem, saved: Saved, version: str, *gradients: torch.Tensor) -> bool:
    """Whether the version for Hopper runs. RuntimeError where it was asked for and does not take the problem."""
    reason = (
        "not asked"
        if version == "portable"
        else cuda_bwd_unsupported_reason(problem, saved.out, saved.dout, *gradients)
    )
    if reason and version == "cuda":
        raise RuntimeError(f'block_sparse_attention: backward="cuda" cannot run here: {reason}')
    repeatable = torch.get_deterministic_debug_mode() == 2  # 1: nothing but a warning is wanted
    return configs.pick_backward(version, "" if reason else "cuda", repeatable) == "cuda"
