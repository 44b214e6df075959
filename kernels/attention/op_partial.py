"""Attention over one block of keys of several: the public functions on which ring attention is built.

The kernel that computes a block also merges it into a running (out, lse), so merging needs no pass of its own over
memory. The gradients of a block are added to fp32 accumulators; the first block may write them instead. These functions
are not differentiable: the caller defines the autograd function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from .checks import FLOATS, kind, runnable
from .launch import Plans, lean, signature
from .op import check_qkv
from .portable.delta import given_terms, row_sums
from .portable.forward import portable_fwd
from .portable.key_gradients import key_gradients
from .portable.query_gradient import query_gradient
from .problem import LEAST_SCALE, MOST_SCALE, MOST_STRIDE, Problem, readable
from .sm90.backward_accumulate import accumulators_unsupported_reason, cuda_partial_bwd_plan
from .sm90.forward import cuda_partial_fwd_plan, cuda_unsupported_reason

_NAMESPACE = __package__.replace(".", "_")
_FORWARD, _BACKWARD = Plans(), Plans()
VERSIONS = ("auto", "portable", "cuda")


def attention_partial(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    q_offset: int = 0,
    k_offset: int = 0,
    result: torch.Tensor | None = None,
    version: str = "auto",
) -> None:
    """Merges attention over a block of keys and values into a running (out, lse), in place.

        s = scale · q kᵀ     L = log(exp(lse) + Σ exp(s))     out ← exp(lse − L) out + Σ exp(s − L) v     lse ← L

    q          [B, Hq, Sq, D], 1 <= D <= 256; fp32, fp16 or bf16
    k, v       [B, Hkv, Sk, D], dtype and device of q; Hq is a multiple of Hkv
    out        [B, Hq, Sq, D], fp32, rows of D contiguous: attention over the keys so far. A row whose lse is −inf is
               undefined. It is not read, so the first block needs no zeros. It may be left unwritten.
    lse        [B, Hq, Sq], fp32, rows contiguous: natural logarithm; −inf where no key has been seen
    causal     query i, at position q_offset + i, sees keys j with k_offset + j <= q_offset + i
    scale      a positive number in the range of fp32, by default 1 / sqrt(D)
    q_offset   position of query 0 (an integer; used with causal only)
    k_offset   position of key 0
    result     [B, Hq, Sq, D] of q's dtype, for the last block: the rounded output is written to `result`, and not to
               `out`. A query that saw no key in any block has 0.
    version    "cuda" (CUDA C++ for compute capability 9.0: fp16 or bf16, D of 64 or 128, 16-byte aligned rows),
               "portable" (Triton), or "auto": "cuda" where it supports the problem, else "portable"

    Returns None: out, or result, and lse are updated. Accumulation is in fp32, and results are deterministic. The
    backward uses lse alone, whose rounding error grows with the largest score: where fp32 scores are in the thousands,
    its gradients are less exact than those of `attention`.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, layout, device or option, RuntimeError for a
    tensor that requires grad while grad mode is on, for a CPU tensor outside Triton's interpreter, or for a version
    that does not support the problem.

    Source: Milakov and Gimelshein 2018, arXiv:1805.02867.
    """
    tensors, given = (q, k, v, out, lse, result), (causal, scale, q_offset, k_offset, version)
    if lean(*tensors) and not torch.is_grad_enabled() and q.dim() == k.dim() == 4:
        key = (*map(signature, tensors), bool(causal), scale, _shift(q, k, causal, q_offset, k_offset), version)
        plan = _FORWARD.find(key)
        if plan is None:
            _check_forward(*tensors, version)
            plan = _FORWARD.keep(key, _forward_plan(*tensors, *_options(q, k, *given)))
        return plan(*tensors)
    _check_forward(*tensors, version)
    _refuse_grad("attention_partial", q=q, k=k, v=v, out=out, lse=lse, result=result)
    return _fwd_op(*tensors, *_options(q, k, *given))


def attention_delta(dout: torch.Tensor, out: torch.Tensor, dlse: torch.Tensor | None = None) -> torch.Tensor:
    """Computes delta, which `attention_partial_backward` needs for each query and which is the same for all key blocks.

        delta = rowsum(dout ∘ out) − dlse

    dout, out  [B, H, S, D], fp32, fp16 or bf16, the same shape, dtype and device
    dlse       [B, H, S], fp32: gradient of lse; None is 0

    Returns delta, fp32 [B, H, S].

    Raises TypeError for a wrong dtype, ValueError for a wrong shape or device, RuntimeError for a CPU tensor outside
    Triton's interpreter.
    """
    name = "attention_delta"
    for label, tensor in (("dout", dout), ("out", out)):
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in FLOATS or tensor.dtype != dout.dtype:
            raise TypeError(f"{name}: {label} must be float32, float16 or bfloat16 like dout, got {kind(tensor)}")
        if tensor.dim() != 4 or tensor.shape != dout.shape or tensor.device != dout.device:
            raise ValueError(f"{name}: {label} must be [B, H, S, D] like dout, got shape {tuple(tensor.shape)}")
    if dlse is not None:
        _check_fp32(name, "dlse", dlse, dout.shape[:3], dout)
    runnable(name, "dout", dout)
    _refuse_grad(name, dout=dout, out=out, dlse=dlse)
    run = _delta if lean(dout, out, dlse) else _delta_op
    return run(dout, out, dlse)


def _delta(dout: torch.Tensor, out: torch.Tensor, dlse: torch.Tensor | None) -> torch.Tensor:
    if dout.numel() == 0:
        delta = torch.zeros(dout.shape[:3], dtype=torch.float32, device=dout.device)
        return delta if dlse is None else delta - dlse
    return row_sums(readable(out), readable(dout), None if dlse is None else dlse.contiguous())


def attention_partial_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    *,
    delta: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    q_offset: int = 0,
    k_offset: int = 0,
    add_dq: bool = True,
    add_dkdv: bool = True,
    result: torch.Tensor | None = None,
    version: str = "auto",
) -> None:
    """Adds the contribution of a block of keys and values to the gradients, in place, from lse and out over all keys.

        p = exp(s − lse)     ds = p ∘ (dout vᵀ − delta)     dq += scale · ds k     dk += scale · dsᵀ q     dv += pᵀ dout

    dout         [B, Hq, Sq, D], dtype of q: gradient of out
    q, k, v      as in `attention_partial`, as are causal, scale, the offsets and version
    out          [B, Hq, Sq, D], dtype of q: attention over all keys; may be None where delta is given
    lse          [B, Hq, Sq], fp32, rows contiguous: over all keys
    dq, dk, dv   fp32, shapes of q, k and v, rows of D contiguous; None if it is not needed
    delta        `attention_delta(dout, out, dlse)`; None: it is computed here, with dlse 0
    add_dq       False: dq is written without being read, so the first block needs no zeros; 0 where no key is seen
    add_dkdv     the same for dk and dv
    result       [B, Hq, Sq, D] of q's dtype, for the last block: the total dq is written to `result`, rounded. dq must
                 be given, and is undefined afterwards.

    Returns None: dq, dk and dv, or result, are updated. dk and dv are deterministic, and so is dq of "portable".
    "cuda" accumulates dq with atomics, in no fixed order: "auto" does not pick it under
    torch.use_deterministic_algorithms(True).

    Raises the errors of `attention_partial`.

    Source: Dao et al. 2022, arXiv:2205.14135, algorithm 4.
    """
    tensors, given = (dout, q, k, v, lse, dq, dk, dv), (causal, scale, q_offset, k_offset, version)
    adding = bool(add_dq), bool(add_dkdv)
    if delta is not None and lean(*tensors, delta, result) and not torch.is_grad_enabled() and q.dim() == k.dim() == 4:
        options = bool(causal), scale, _shift(q, k, causal, q_offset, k_offset), version
        mode = torch.get_deterministic_debug_mode()
        key = (*map(signature, tensors), signature(delta), signature(result), options, adding, mode)
        plan = _BACKWARD.find(key)
        if plan is None:
            _check_backward(dout, q, k, v, out, lse, dq, dk, dv, delta, result, version)
            plan = _BACKWARD.keep(key, _backward_plan(*tensors, delta, result, *_options(q, k, *given), *adding))
        return plan(*tensors, delta, result)
    _check_backward(dout, q, k, v, out, lse, dq, dk, dv, delta, result, version)
    if delta is None:
        assert out is not None
        delta = attention_delta(dout, out)
    return _bwd_op(*tensors, delta, result, *_options(q, k, *given), *adding)


def _shift(q: torch.Tensor, k: torch.Tensor, causal: bool, q_offset: int, k_offset: int) -> int:
    """Returns the shift: query i is aligned with key i + shift. It is clamped to the range in which it changes the
    mask, so that few launch plans are cached."""
    if not isinstance(q_offset, int | torch.SymInt) or not isinstance(k_offset, int | torch.SymInt):
        raise TypeError(f"attention_partial: q_offset and k_offset must be integers, got {q_offset!r} and {k_offset!r}")
    return max(-q.shape[2], min(q_offset - k_offset, k.shape[2])) if causal else 0


def _options(
    q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float | None, q_offset: int, k_offset: int, version: str
) -> tuple[bool, float, int, str]:
    """Returns (causal, scale, shift, version), the arguments of the ops."""
    if scale is None:
        scale = 1 / math.sqrt(q.shape[3])
    elif not LEAST_SCALE <= scale <= MOST_SCALE:
        raise ValueError(f"attention_partial: scale must be a positive number in the range of fp32, got {scale}")
    return bool(causal), float(scale), _shift(q, k, causal, q_offset, k_offset), version


class _Seen(NamedTuple):
    """The part of the problem that has visible pairs: queries from `start` on, and the first `keys` keys. With `masked`
    query i, counted from `start`, sees keys up to i + shift; otherwise it sees all."""

    start: int
    keys: int
    shift: int
    masked: bool

    @classmethod
    def of(cls, queries: int, keys: int, causal: bool, shift: int) -> _Seen | None:
        """Returns None if no query sees a key."""
        start = max(0, -shift) if causal else 0
        seen = min(keys, queries + shift) if causal else keys
        if start >= queries or seen <= 0:
            return None
        return cls(start, seen, shift + start, causal and shift + start < seen - 1)

    def problem(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Problem:
        """The problem for the portable kernels, which align the last query with the last key."""
        right = self.shift - (self.keys - q.shape[2]) if self.masked else -1
        return Problem(readable(q), readable(k), readable(v), scale, -1, right, self.keys)

    def hopper_problem(self, problem: Problem) -> Problem:
        """The problem for the kernels in CUDA C++, to which the shift is passed separately."""
        return Problem(problem.q, problem.k, problem.v, problem.scale, -1, 0 if self.masked else -1, self.keys)


def _forward_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    result: torch.Tensor | None,
    causal: bool,
    scale: float,
    shift: int,
    version: str,
) -> Callable[..., None]:
    """Returns a function of (q, k, v, out, lse, result), which must have the signatures of these checked tensors."""
    seen = _Seen.of(q.shape[2], k.shape[2], causal, shift) if q.numel() else None
    start = seen.start if seen else q.shape[2]

    def rest(out: torch.Tensor, lse: torch.Tensor, result: torch.Tensor | None) -> None:
        """Writes result for the queries that see none of the keys."""
        if result is not None and start:
            none = (lse[:, :, :start] == -math.inf)[..., None]
            result[:, :, :start] = torch.where(none, 0.0, out[:, :, :start])

    if seen is None:
        return lambda q, k, v, out, lse, result: rest(out, lse, result)

    def rows(x: torch.Tensor) -> torch.Tensor:
        return x[:, :, start:] if start else x

    problem = seen.problem(rows(q), k, v, scale)
    hopper = seen.hopper_problem(problem)
    last = None if result is None else rows(result)
    if _by_cuda(hopper, version, (rows(out),), () if last is None else (last,)):
        write = cuda_partial_fwd_plan(hopper, seen.shift, rows(out), rows(lse), last)
        copied = any(readable(t) is not t for t in (q, k, v))

        def by_cuda(q, k, v, out, lse, result):
            rest(out, lse, result)
            q = rows(q)
            if copied:
                q, k, v = readable(q), readable(k), readable(v)
            write(q, k, v, rows(out), rows(lse), None if result is None else rows(result))

        return by_cuda

    def by_triton(q, k, v, out, lse, result):
        rest(out, lse, result)
        out = rows(out)
        portable_fwd(seen.problem(rows(q), k, v, scale), out if result is None else rows(result), rows(lse), None, out)

    return by_triton


def _backward_plan(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    delta: torch.Tensor,
    result: torch.Tensor | None,
    causal: bool,
    scale: float,
    shift: int,
    version: str,
    add_dq: bool,
    add_dkdv: bool,
) -> Callable[..., None]:
    """Returns a function of (dout, q, k, v, lse, dq, dk, dv, delta, result), which must have the signatures of these
    checked tensors."""
    seen = _Seen.of(q.shape[2], k.shape[2], causal, shift) if q.numel() else None
    start, keys = (seen.start, seen.keys) if seen else (q.shape[2], 0)

    def rest(dq, dk, dv, result) -> None:
        """Writes zeros for queries that see no key and keys that no query sees, unless gradients are added."""
        if result is not None and start:
            result[:, :, :start] = dq[:, :, :start] if add_dq else 0
        elif dq is not None and start and not add_dq:
            dq[:, :, :start].zero_()
        for gradient in () if add_dkdv else (dk, dv):
            if gradient is not None and keys < gradient.shape[2]:
                gradient[:, :, keys:].zero_()

    if seen is None or (dq is None and dk is None and dv is None):
        return lambda dout, q, k, v, lse, dq, dk, dv, delta, result: rest(dq, dk, dv, result)

    def rows(x: torch.Tensor) -> torch.Tensor:
        return x[:, :, seen.start :] if seen.start else x

    def sums(x: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=torch.float32, device=like.device) if x is None else x

    problem = seen.problem(rows(q), k, v, scale)
    hopper = seen.hopper_problem(problem)
    made = sums(dq, q), sums(dk, k), sums(dv, v)
    # The kernel has one head stride for both lse and delta.
    alike = lse.stride() == delta.stride()
    last = None if result is None else rows(result)
    others = (readable(rows(dout)), *(() if last is None else (last,)))
    deterministic = version == "auto" and torch.get_deterministic_debug_mode() == 2
    if not deterministic and _by_cuda(hopper, version, (rows(made[0]), *made[1:]), others):
        lines = (rows(lse), rows(delta)) if alike else (rows(lse).contiguous(), rows(delta).contiguous())
        written = (rows(made[0]), *made[1:], last)
        write = cuda_partial_bwd_plan(hopper, seen.shift, others[0], lines[0], *written, add_dq, add_dkdv)

        def by_cuda(dout, q, k, v, lse, dq, dk, dv, delta, result):
            rest(dq, dk, dv, result)
            dq, dk, dv = sums(dq, q), sums(dk, k), sums(dv, v)
            dout, q, k, v = map(readable, (rows(dout), rows(q), k, v))
            lse, delta = rows(lse), rows(delta)
            if not alike:
                lse, delta = lse.contiguous(), delta.contiguous()
            write(q, k, v, dout, lse, delta, rows(dq), dk, dv, None if result is None else rows(result))

        return by_cuda

    def by_triton(dout, q, k, v, lse, dq, dk, dv, delta, result):
        rest(dq, dk, dv, result)
        problem, dout = seen.problem(rows(q), k, v, scale), readable(rows(dout))
        terms = given_terms(rows(lse), rows(delta))
        if dk is not None or dv is not None:
            key_gradients(problem, dout, terms, sums(dk, k), sums(dv, v), add=add_dkdv)
        if dq is not None:
            query_gradient(problem, dout, terms, rows(dq), add=add_dq)
        if result is not None:
            rows(result).copy_(rows(dq))

    return by_triton


def _by_cuda(problem: Problem, version: str, sums: tuple[torch.Tensor, ...], others: tuple[torch.Tensor, ...]) -> bool:
    """Returns whether the version in CUDA C++ runs. RuntimeError if it was requested and cannot run."""
    if version == "portable":
        return False
    reason = cuda_unsupported_reason(problem, *others) or accumulators_unsupported_reason(*sums)
    if version == "cuda" and reason:
        raise RuntimeError(f'attention_partial: version="cuda" cannot run here: {reason}')
    return reason is None


def _check_forward(q, k, v, out, lse, result, version) -> None:
    name = "attention_partial"
    check_qkv(name, q, k, v)
    _check_fp32(name, "out", out, q.shape, q)
    _check_lse(name, "lse", lse, q)
    if lse.numel() and _expanded(lse):
        raise ValueError(f"{name}: lse must not be expanded, as it is written, got strides {lse.stride()}")
    _check_result(name, result, q)
    _check_version(name, version)


def _check_backward(dout, q, k, v, out, lse, dq, dk, dv, delta, result, version) -> None:
    name = "attention_partial_backward"
    check_qkv(name, q, k, v)
    for label, tensor in (("dout", dout), ("out", out)):
        if tensor is None and label == "out" and delta is not None:
            continue
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != q.dtype:
            raise TypeError(f"{name}: {label} must be a tensor of q's dtype {q.dtype}, got {kind(tensor)}")
        if tensor.shape != q.shape or tensor.device != q.device:
            raise ValueError(f"{name}: {label} must have q's shape {tuple(q.shape)}, got {tuple(tensor.shape)}")
    _check_lse(name, "lse", lse, q)
    if delta is not None:
        _check_lse(name, "delta", delta, q)
    for label, tensor, like in (("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
        if tensor is not None:
            _check_fp32(name, label, tensor, like.shape, q)
    _check_result(name, result, q)
    if result is not None and dq is None:
        raise ValueError(f"{name}: dq must be given with result, got None")
    _check_version(name, version)
    _refuse_grad(name, dout=dout, q=q, k=k, v=v, out=out, lse=lse, dq=dq, dk=dk, dv=dv, delta=delta, result=result)


def _check_result(name: str, result: object, q: torch.Tensor) -> None:
    if result is None:
        return
    if not isinstance(result, torch.Tensor) or result.dtype != q.dtype:
        raise TypeError(f"{name}: result must be a tensor of q's dtype {q.dtype}, got {kind(result)}")
    if result.shape != q.shape or result.device != q.device or (result.numel() and result.stride(3) != 1):
        raise ValueError(
            f"{name}: result must be like q with contiguous rows, got {tuple(result.shape)} on {result.device}"
        )
    _check_rows(name, "result", result)


def _check_fp32(name: str, label: str, tensor: object, shape: torch.Size, q: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32:
        raise TypeError(f"{name}: {label} must be a tensor of float32, got {kind(tensor)}")
    if tensor.shape != shape or tensor.device != q.device:
        wanted = f"shape {tuple(shape)} on {q.device}"
        raise ValueError(f"{name}: {label} must have {wanted}, got {tuple(tensor.shape)} on {tensor.device}")
    if tensor.dim() == 4:
        _check_rows(name, label, tensor)


def _check_rows(name: str, label: str, tensor: torch.Tensor) -> None:
    """Raises ValueError for memory to which the kernels cannot write rows of D."""
    if tensor.numel() and (tensor.stride(3) != 1 or tensor.stride(2) > MOST_STRIDE or _expanded(tensor)):
        raise ValueError(f"{name}: {label} must have contiguous rows, not expanded, got strides {tensor.stride()}")


def _expanded(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _check_lse(name: str, label: str, tensor: torch.Tensor, q: torch.Tensor) -> None:
    _check_fp32(name, label, tensor, q.shape[:3], q)
    batch, heads, queries = tensor.shape
    apart = batch == 1 or heads == 1 or tensor.stride(0) == heads * tensor.stride(1)
    if tensor.numel() and (not apart or (queries > 1 and tensor.stride(2) != 1)):
        raise ValueError(f"{name}: {label} must be contiguous, or rows of such a tensor, got strides {tensor.stride()}")


def _check_version(name: str, version: str) -> None:
    if version not in VERSIONS:
        raise ValueError(f"{name}: version must be one of {', '.join(VERSIONS)}, got {version!r}")


def _refuse_grad(name: str, **tensors: torch.Tensor | None) -> None:
    for label, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(f"{name}: {label} must not require grad, as {name} has no backward: use torch.no_grad()")


@torch.library.custom_op(f"{_NAMESPACE}::attention_partial", mutates_args=("out", "lse", "result"))
def _fwd_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    result: torch.Tensor | None,
    causal: bool,
    scale: float,
    shift: int,
    version: str,
) -> None:
    _forward_plan(q, k, v, out, lse, result, causal, scale, shift, version)(q, k, v, out, lse, result)


@torch.library.custom_op(f"{_NAMESPACE}::attention_delta", mutates_args=())
def _delta_op(dout: torch.Tensor, out: torch.Tensor, dlse: torch.Tensor | None) -> torch.Tensor:
    return _delta(dout, out, dlse)


@torch.library.custom_op(f"{_NAMESPACE}::attention_partial_backward", mutates_args=("dq", "dk", "dv", "result"))
def _bwd_op(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    delta: torch.Tensor,
    result: torch.Tensor | None,
    causal: bool,
    scale: float,
    shift: int,
    version: str,
    add_dq: bool,
    add_dkdv: bool,
) -> None:
    tensors = (dout, q, k, v, lse, dq, dk, dv, delta, result)
    _backward_plan(*tensors, causal, scale, shift, version, add_dq, add_dkdv)(*tensors)


@_fwd_op.register_fake
def _(q, k, v, out, lse, result, causal, scale, shift, version):
    return None


@_delta_op.register_fake
def _(dout, out, dlse):
    return dout.new_empty(dout.shape[:3], dtype=torch.float32)


@_bwd_op.register_fake
def _(dout, q, k, v, lse, dq, dk, dv, delta, result, causal, scale, shift, version, add_dq, add_dkdv):
    return None
