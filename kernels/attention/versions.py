"""Launch plans of forward and backward: empty problems, the choice of a version, the allocation of results."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from .configs import backward as backward_configs
from .configs import forward as forward_configs
from .portable.backward import separate_bwd
from .portable.forward import portable_fwd
from .portable.fused_backward import fused_bwd
from .portable.split import split_fwd
from .problem import Problem, Saved, empty_like, keeps_order, readable, zero
from .sm90.backward import cuda_bwd_is_deterministic, cuda_bwd_plan
from .sm90.forward import cuda_fwd_plan, cuda_unsupported_reason
from .sm90.fp8 import fp8_fwd, fp8_unsupported_reason
from .sm90.gluon_launch import gluon_fwd, gluon_unsupported_reason

Optional = torch.Tensor | None
Results = tuple[torch.Tensor, torch.Tensor, Optional]
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Results]
Backward = Callable[..., tuple[Optional, ...]]
FORWARD = ("auto", "portable", "split", "gluon", "cuda")
BACKWARD = ("auto", "separate", "fused", "cuda")


def _problem(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, left: int, right: int, keys: int
) -> Problem:
    # A bound beyond all keys has no effect. It is clamped, as kernels add to it in 32 bits.
    farthest = q.shape[2] + keys
    return Problem(readable(q), readable(k), readable(v), scale, min(left, farthest), min(right, farthest), keys)


def fwd_plan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, left: int, right: int, keys: int, version: str
) -> Forward:
    """Returns a function of (q, k, v), which must have the signatures of these checked tensors. It returns out and lse
    of `attention`, and for fp32 the statistics that the backward needs, else None."""
    shape, device = q.shape[:3], q.device
    lse_strides = (shape[1] * shape[2], shape[2], 1)
    exact = q.dtype == torch.float32

    def allocated(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        out = torch.empty_like(q) if in_place else empty_like(q)
        lse = torch.empty_strided(shape, lse_strides, dtype=torch.float32, device=device)
        return out, lse, empty_statistics(q) if exact else None

    in_place = keeps_order(q)
    if q.numel() == 0 or keys == 0:

        def nothing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Results:
            out, lse, statistics = allocated(q)
            return out.zero_(), lse.fill_(-math.inf), None if statistics is None else statistics.zero_()

        return nothing
    problem = _problem(q, k, v, scale, left, right, keys)
    sizes = (problem.queries, keys, problem.all_kv_heads, problem.group, problem.sms())
    hopper = _hopper_fwd(problem, version)
    version, splits = forward_configs.pick_forward(version, q.dtype, *sizes, hopper, problem.dim)
    if version == "cuda":
        write = cuda_fwd_plan(problem, allocated(q)[0])
        copied = any(readable(t) is not t for t in (q, k, v))

        def by_cuda(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Results:
            out, lse, _ = allocated(q)
            if copied:
                q, k, v = readable(q), readable(k), readable(v)
            write(q, k, v, out, lse)
            return out, lse, None

        return by_cuda

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Results:
        out, lse, statistics = allocated(q)
        problem = _problem(q, k, v, scale, left, right, keys)
        if version == "gluon":
            gluon_fwd(problem, out, lse)
        elif version == "split":
            split_fwd(problem, out, lse, statistics, splits)
        else:
            portable_fwd(problem, out, lse, statistics)
        return out, lse, statistics

    return run


def attention_fp8_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, right: int, keys: int, exact_lse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out and lse of `attention` with fp8=True. Without `exact_lse`, lse has the rounding error of e4m3.
    RuntimeError if the GPU or the problem is not supported."""
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
    """Returns the best version for Hopper that supports the problem, or "". RuntimeError if the requested one does
    not."""
    for name, unsupported_reason in (("cuda", cuda_unsupported_reason), ("gluon", gluon_unsupported_reason)):
        if version in (name, "auto"):
            reason = unsupported_reason(problem)
            if reason is None:
                return name
            if version == name:
                raise RuntimeError(f'attention: forward="{name}" cannot run here: {reason}')
    return ""


def empty_statistics(q: torch.Tensor) -> torch.Tensor:
    """Allocates maximum and sum of each row, [2, B, Hq, Sq], for fp32. Other dtypes need lse only: no elements."""
    return q.new_empty((2, *q.shape[:3]) if q.dtype == torch.float32 else 0, dtype=torch.float32)


def bwd_plan(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    statistics: torch.Tensor | None,
    scale: float,
    left: int,
    right: int,
    keys: int,
    version: str,
    need_dq: bool,
    need_dkv: bool,
    into: tuple[Optional, Optional, Optional] = (None, None, None),
) -> Backward:
    """Returns a function of (dout, dlse, q, k, v, out, lse, statistics), which must have the signatures of these. It
    returns dq, dk and dv, None if not needed. It also accepts memory for the gradients, with the layout of `into`."""

    def allocated(q, k, v, dq=None, dk=None, dv=None) -> tuple[Optional, Optional, Optional]:
        needed = ((q, dq, need_dq), (k, dk, need_dkv), (v, dv, need_dkv))
        dq, dk, dv = ((empty_like(x) if to is None else to) if need else None for x, to, need in needed)
        return dq, dk, dv

    if q.numel() == 0 or keys == 0:
        return lambda dout, dlse, q, k, v, out, lse, statistics, *given: tuple(
            None if gradient is None else gradient.zero_() for gradient in allocated(q, k, v, *given)
        )
    tail = keys < k.shape[2]  # rows of k and v beyond num_context
    form, write = "separate", None
    if need_dq and need_dkv:
        problem = _problem(q, k, v, scale, left, right, keys)
        saved = _saved(dout, dlse, out, lse, statistics)
        dq, dk, dv = (empty_like(x) if to is None else to for x, to in zip((q, k, v), into, strict=True))
        gradients = dq, dk, dv
        form = _form(problem, saved, gradients, version)
        if form == "cuda":
            write = cuda_bwd_plan(problem, saved, *gradients)
            copied = any(readable(t) is not t for t in (q, k, v, out, dout)) or (
                dlse is not None and not dlse.is_contiguous()
            )

    def run(dout, dlse, q, k, v, out, lse, statistics, *given):
        dq, dk, dv = allocated(q, k, v, *given)
        if tail and need_dkv:
            zero(dk[:, :, keys:])
            zero(dv[:, :, keys:])
        if write is not None:
            if copied:
                q, k, v, out, dout = map(readable, (q, k, v, out, dout))
                dlse = None if dlse is None else dlse.contiguous()
            write(q, k, v, out, lse, dout, dlse, dq, dk, dv)
            return dq, dk, dv
        problem = _problem(q, k, v, scale, left, right, keys)
        saved = _saved(dout, dlse, out, lse, statistics)
        (fused_bwd if form == "fused" else separate_bwd)(problem, saved, dq, dk, dv)
        return dq, dk, dv

    return run


def _saved(
    dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, statistics: Optional
) -> Saved:
    return Saved(readable(out), lse, statistics, readable(dout), None if dlse is None else dlse.contiguous())


def _form(problem: Problem, saved: Saved, gradients: tuple[torch.Tensor, ...], version: str) -> str:
    """Returns the version of the backward that computes all three gradients. RuntimeError if the requested one does not
    support the problem."""
    reason: str | None = "not asked"
    if version in ("auto", "cuda"):
        reason = cuda_unsupported_reason(problem, saved.out, saved.dout, *gradients)
    if version == "cuda" and reason:
        raise RuntimeError(f'attention: backward="cuda" cannot run here: {reason}')
    # Debug mode 1 only asks for warnings; 2 requires determinism.
    deterministic = torch.get_deterministic_debug_mode() == 2 and (
        reason is not None or not cuda_bwd_is_deterministic(problem)
    )
    return backward_configs.pick_backward(version, "" if reason else "cuda", deterministic)
