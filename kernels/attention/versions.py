"""Forward and backward as the op calls them: empty problems, the choice of a version, the memory of the results."""

from __future__ import annotations

import math

import torch

from .configs import backward as backward_configs
from .configs import forward as forward_configs
from .portable.backward import separate_bwd
from .portable.forward import portable_fwd
from .portable.fused_backward import fused_bwd
from .portable.split import split_fwd
from .problem import Problem, Saved, empty_like, readable, zero
from .sm90.backward import cuda_bwd, cuda_bwd_is_deterministic
from .sm90.forward import cuda_fwd, cuda_unsupported_reason
from .sm90.fp8 import fp8_fwd, fp8_unsupported_reason
from .sm90.gluon_launch import gluon_fwd, gluon_unsupported_reason

FORWARD = ("auto", "portable", "split", "gluon", "cuda")
BACKWARD = ("auto", "separate", "fused", "cuda")


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
    hopper = _hopper_fwd(problem, version)
    version, splits = forward_configs.pick_forward(
        version,
        q.dtype,
        problem.queries,
        keys,
        problem.all_kv_heads,
        problem.group,
        problem.sms(),
        hopper,
        problem.dim,
    )
    exact = statistics if statistics.numel() else None
    if version == "cuda":
        cuda_fwd(problem, out, lse)
    elif version == "gluon":
        gluon_fwd(problem, out, lse)
    elif version == "split":
        split_fwd(problem, out, lse, exact, splits)
    else:
        portable_fwd(problem, out, lse, exact)
    return out, lse, statistics


def attention_fp8_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, right: int, keys: int, exact_lse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of `attention` with fp8=True; without `exact_lse` the latter errs as e4m3 does. RuntimeError where
    that cannot be had."""
    out = empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    problem = _problem(q, k, v, scale, -1, right, keys)
    if reason := fp8_unsupported_reason(problem):
        raise RuntimeError(f"attention: fp8=True cannot run here: {reason}")
    if out.numel() == 0 or keys == 0:
        return out.zero_(), lse.fill_(-math.inf)
    fp8_fwd(problem, out, lse, exact_lse)
    return out, lse


def _hopper_fwd(problem: Problem, version: str) -> str:
    """The best version for Hopper that takes the problem, or none. RuntimeError where the one asked for does not."""
    for name, unsupported_reason in (("cuda", cuda_unsupported_reason), ("gluon", gluon_unsupported_reason)):
        if version in (name, "auto"):
            reason = unsupported_reason(problem)
            if reason is None:
                return name
            if version == name:
                raise RuntimeError(f'attention: forward="{name}" cannot run here: {reason}')
    return ""


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
                zero(gradient[:, :, keys:])
        exact = statistics if statistics.numel() else None
        saved = Saved(readable(out), lse, exact, readable(dout), None if dlse is None else dlse.contiguous())
        if dq is None or dk is None or dv is None:
            separate_bwd(problem, saved, dq, dk, dv)
        else:
            _everything(problem, saved, dq, dk, dv, version)
    return (
        q.new_empty(0) if dq is None else dq,
        k.new_empty(0) if dk is None else dk,
        v.new_empty(0) if dv is None else dv,
    )


def _everything(
    problem: Problem, saved: Saved, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, version: str
) -> None:
    """All three gradients. RuntimeError where the form asked for does not take the problem."""
    reason = (
        cuda_unsupported_reason(problem, saved.out, saved.dout, dq, dk, dv)
        if version in ("auto", "cuda")
        else "not asked"
    )
    if version == "cuda" and reason:
        raise RuntimeError(f'attention: backward="cuda" cannot run here: {reason}')
    # 1: nothing but a warning is wanted.
    deterministic = torch.get_deterministic_debug_mode() == 2 and (
        reason is not None or not cuda_bwd_is_deterministic(problem)
    )
    form = backward_configs.pick_backward(version, "" if reason else "cuda", deterministic)
    {"cuda": cuda_bwd, "fused": fused_bwd, "separate": separate_bwd}[form](problem, saved, dq, dk, dv)
