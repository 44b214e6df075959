"""Forward and backward as the op calls them: empty problems, the choice of a version, the memory of the results."""

from __future__ import annotations

import math

import torch

from . import dispatch
from .backward import separate_bwd
from .delta import Saved
from .forward import portable_fwd
from .fused_backward import fused_bwd
from .hopper_launch import hopper_fwd, hopper_refuses
from .problem import Problem, empty_like, readable
from .split import split_fwd

FORWARD = ("auto", "portable", "split", "hopper")
BACKWARD = ("auto", "separate", "fused")


def _problem(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, left: int, right: int, keys: int
) -> Problem:
    # Beyond every key a bound is none; kept small, it can be added to without leaving 32 bits.
    farthest = q.shape[2] + keys
    return Problem(readable(q), readable(k), readable(v), scale, min(left, farthest), min(right, farthest), keys)


def attention_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, left: int, right: int, keys: int, version: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out and lse of `attention`, whose arguments are checked, and the statistics that the backward wants in fp32."""
    out = empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    statistics = empty_statistics(q)
    if out.numel() == 0 or keys == 0:
        return out.zero_(), lse.fill_(-math.inf), statistics.zero_()
    problem = _problem(q, k, v, scale, left, right, keys)
    refused = hopper_refuses(problem)
    if version == "hopper" and refused:
        raise RuntimeError(f"attention: the forward for Hopper cannot run here: {refused}")
    version, splits = dispatch.pick_forward(
        version,
        q.dtype,
        problem.queries,
        keys,
        problem.all_kv_heads,
        problem.group,
        problem.multiprocessors(),
        refused is None,
    )
    if version == "hopper":
        hopper_fwd(problem, out, lse)
    elif version == "split":
        split_fwd(problem, out, lse, statistics if statistics.numel() else None, splits)
    else:
        portable_fwd(problem, out, lse, statistics if statistics.numel() else None)
    return out, lse, statistics


def empty_statistics(q: torch.Tensor) -> torch.Tensor:
    """Maximum and sum of each row, [2, B, Hq, Sq], for fp32; for other dtypes, which do with lse, no element."""
    return q.new_empty((2, *q.shape[:3]) if q.dtype == torch.float32 else 0, dtype=torch.float32)


def attention_bwd(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    statistics: torch.Tensor,
    scale: float,
    left: int,
    right: int,
    keys: int,
    version: str,
    need_dq: bool,
    need_dkv: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv; tensors of no element for what is not needed."""
    dq = empty_like(q) if need_dq else None
    dk, dv = (empty_like(k), empty_like(v)) if need_dkv else (None, None)
    if q.numel() == 0 or keys == 0:
        for gradient in (dq, dk, dv):
            if gradient is not None:
                gradient.zero_()
    else:
        problem = _problem(q, k, v, scale, left, right, keys)
        for gradient in (dk, dv):
            if gradient is not None:
                gradient[:, :, keys:].zero_()
        exact = statistics if statistics.numel() else None
        saved = Saved(readable(out), lse, exact, readable(dout), None if dlse is None else dlse.contiguous())
        if dispatch.pick_backward(version) == "fused" and dq is not None and dk is not None and dv is not None:
            fused_bwd(problem, saved, dq, dk, dv)
        else:
            separate_bwd(problem, saved, dq, dk, dv)
    return (
        q.new_empty(0) if dq is None else dq,
        k.new_empty(0) if dk is None else dk,
        v.new_empty(0) if dv is None else dv,
    )
