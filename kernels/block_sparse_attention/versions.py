"""Launch plans of the forward and the backward: empty problems, the choice of a version, allocation of the results."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from . import configs
from .portable.backward import portable_bwd
from .portable.forward import portable_fwd
from .problem import Problem, Saved, empty_like, keeps_order, readable
from .sm90.backward import cuda_bwd_plan, cuda_bwd_unsupported_reason
from .sm90.forward import cuda_fwd_plan, cuda_unsupported_reason

Optional = torch.Tensor | None
Forward = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Optional], tuple[torch.Tensor, torch.Tensor, Optional]
]
Backward = Callable[..., tuple[Optional, Optional, Optional, Optional]]
FORWARD = BACKWARD = ("auto", "portable", "cuda")


def fwd_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    bias: Optional,
    scale: float,
    block: int,
    causal: bool,
    version: str,
) -> Forward:
    """Returns a function of (q, k, v, table, bias), which must have the signatures of these checked tensors. It returns
    out and lse of `block_sparse_attention` and, for fp32, the statistics that the backward needs, else None. The host
    does not read the contents of the table."""
    shape, device = q.shape[:3], q.device
    lse_strides = (shape[1] * shape[2], shape[2], 1)
    in_place, exact = keeps_order(q), q.dtype == torch.float32

    def allocated(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Optional]:
        out = torch.empty_like(q) if in_place else empty_like(q)
        lse = torch.empty_strided(shape, lse_strides, dtype=torch.float32, device=device)
        return out, lse, empty_statistics(q) if exact else None

    if q.numel() == 0 or k.shape[2] == 0:

        def nothing(q, k, v, table, bias):
            out, lse, statistics = allocated(q)
            return out.zero_(), lse.fill_(-math.inf), None if statistics is None else statistics.zero_()

        return nothing
    problem = Problem(readable(q), readable(k), readable(v), table, bias, scale, block, causal)
    out = allocated(q)[0]
    if configs.pick_forward(version, _hopper_fwd(problem, version, out)) == "cuda":
        write = cuda_fwd_plan(problem, out)
        copied = any(readable(t) is not t for t in (q, k, v))

        def by_cuda(q, k, v, table, bias):
            out, lse, _ = allocated(q)
            if copied:
                q, k, v = readable(q), readable(k), readable(v)
            write(q, k, v, table, bias, out, lse)
            return out, lse, None

        return by_cuda

    def portable(q, k, v, table, bias):
        out, lse, statistics = allocated(q)
        problem = Problem(readable(q), readable(k), readable(v), table, bias, scale, block, causal)
        portable_fwd(problem, out, lse, statistics)
        return out, lse, statistics

    return portable


def _hopper_fwd(problem: Problem, version: str, out: torch.Tensor) -> str:
    """Returns "cuda" if that supports the problem, else "". RuntimeError if it was requested and does not."""
    if version == "portable":
        return ""
    reason = cuda_unsupported_reason(problem, out)
    if reason and version == "cuda":
        raise RuntimeError(f'block_sparse_attention: forward="cuda" cannot run here: {reason}')
    return "" if reason else "cuda"


def empty_statistics(q: torch.Tensor) -> torch.Tensor:
    """Allocates maximum and sum of each row, [2, B, Hq, Sq], for fp32. Other dtypes need lse only: no elements."""
    return q.new_empty((2, *q.shape[:3]) if q.dtype == torch.float32 else 0, dtype=torch.float32)


def bwd_plan(
    dout: torch.Tensor,
    dlse: Optional,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    bias: Optional,
    out: torch.Tensor,
    lse: torch.Tensor,
    statistics: Optional,
    scale: float,
    block: int,
    causal: bool,
    version: str,
    need_dq: bool,
    need_dkv: bool,
    need_dbias: bool,
) -> Backward:
    """Returns a function of (dout, dlse, q, k, v, table, bias, out, lse, statistics) like these. It returns dq, dk, dv
    and dbias, None if not needed. "cuda" computes all of dq, dk and dv; if some are not needed, "portable" runs and
    omits them. RuntimeError if the requested version does not support the problem."""

    def allocated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Optional, Optional, Optional]:
        dq = empty_like(q) if need_dq or need_dbias else None  # the kernel of dbias writes dq as well
        return (dq, empty_like(k), empty_like(v)) if need_dkv else (dq, None, None)

    if q.numel() == 0 or k.shape[2] == 0:

        def nothing(dout, dlse, q, k, v, table, bias, out, lse, statistics):
            dq, dk, dv = (None if gradient is None else gradient.zero_() for gradient in allocated(q, k, v))
            return dq if need_dq else None, dk, dv, torch.zeros_like(bias) if need_dbias else None

        return nothing
    problem = Problem(readable(q), readable(k), readable(v), table, bias, scale, block, causal)
    saved = _saved(dout, dlse, out, lse, statistics)
    dq, dk, dv = allocated(q, k, v)
    if dq is not None and dk is not None and dv is not None and _in_cuda(problem, saved, version, dq, dk, dv):
        write = cuda_bwd_plan(problem, saved, dq, dk, dv)
        copied = any(readable(t) is not t for t in (q, k, v, out, dout)) or saved.dlse is not dlse

        def by_cuda(dout, dlse, q, k, v, table, bias, out, lse, statistics):
            dq, dk, dv = allocated(q, k, v)
            if copied:
                q, k, v, out, dout = map(readable, (q, k, v, out, dout))
                dlse = None if dlse is None else dlse.contiguous()
            write(q, k, v, table, out, lse, dout, dlse, dq, dk, dv)
            return dq, dk, dv, None

        return by_cuda

    def portable(dout, dlse, q, k, v, table, bias, out, lse, statistics):
        dq, dk, dv = allocated(q, k, v)
        problem = Problem(readable(q), readable(k), readable(v), table, bias, scale, block, causal)
        dbias = portable_bwd(problem, _saved(dout, dlse, out, lse, statistics), dq, dk, dv, need_dbias)
        return dq if need_dq else None, dk, dv, dbias

    return portable


def _saved(dout: torch.Tensor, dlse: Optional, out: torch.Tensor, lse: torch.Tensor, statistics: Optional) -> Saved:
    return Saved(readable(out), lse, statistics, readable(dout), None if dlse is None else dlse.contiguous())


def _in_cuda(problem: Problem, saved: Saved, version: str, *gradients: torch.Tensor) -> bool:
    """Returns whether "cuda" runs. RuntimeError if it was requested and does not support the problem."""
    reason: str | None = "not asked"
    if version != "portable":
        reason = cuda_bwd_unsupported_reason(problem, saved.out, saved.dout, *gradients)
    if reason and version == "cuda":
        raise RuntimeError(f'block_sparse_attention: backward="cuda" cannot run here: {reason}')
    deterministic = torch.get_deterministic_debug_mode() == 2  # 1: warnings only
    return configs.pick_backward(version, "" if reason else "cuda", deterministic) == "cuda"
