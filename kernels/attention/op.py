"""The public function `attention`: checks, fast path of eager calls, registration with torch.library, autograd."""

from __future__ import annotations

import math

import torch

from .checks import FLOATS, kind, no_tangent, runnable
from .launch import Plans, lean, signature
from .problem import LEAST_SCALE, MOST_SCALE, empty_like
from .versions import BACKWARD, FORWARD, attention_fp8_fwd, bwd_plan, empty_statistics, fwd_plan

MAX_DIM = 256

# Named after the package: a copy of this folder under another name then registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")
_FORWARD, _BACKWARD = Plans(), Plans()


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    num_context: int | None = None,
    window: tuple[int, int] | None = None,
    return_lse: bool = False,
    fp8: bool = False,
    forward: str = "auto",
    backward: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes exact scaled dot-product attention without storing the matrix of scores.

        s = scale · q kᵀ        out = softmax(s) v        lse = log Σ exp(s)          over the keys that a query sees

    q            [B, Hq, Sq, D], 1 <= D <= 256; fp32, fp16 or bf16. Tensors of any strides are read in place if rows of
                 D are contiguous, and copied otherwise. So [B, S, H, D] is passed as x.transpose(1, 2).
    k, v         [B, Hkv, Sk, D], dtype and device of q. Hq is a multiple of Hkv: query head h uses KV head
                 h // (Hq // Hkv).
    causal       query i sees keys j <= i + Sk − Sq: the last query sees all, and the first Sq − Sk queries none
    scale        a positive number in the range of fp32, by default 1 / sqrt(D)
    num_context  the number of valid keys: only the first num_context rows of k and v are used, as if Sk were
                 num_context. By default all are valid.
    window       (left, right) as in FlashAttention: query i sees i + Sk − Sq − left <= j <= i + Sk − Sq + right; −1 is
                 no bound. With causal, right is 0.
    return_lse   also return lse [B, Hq, Sq], fp32, natural logarithm. Both outputs are differentiable.
    fp8          round q, k and v to e4m3, with a scale for each 64 queries, 96 or 128 keys, and 768 or 1024 rows of v.
                 Probabilities are rounded to e4m3 too. Accumulation is in about 14 bits over the rows of v that share a
                 scale, else in fp32. For fp16 and bf16, D up to 128, compute capability 9.0, no window, no gradient.
                 ±inf becomes NaN.
    forward      "cuda" (CUDA C++ for compute capability 9.0: fp16 or bf16, D of 64 or 128, no window, 16-byte
                 aligned rows; CuPy compiles it), "gluon" (the same for any D >= 32), "portable" or "split"
                 (split-K over the keys, then combined); "auto" picks one
    backward     "separate" (dQ in a kernel of its own), "fused" (dQ, dK and dV in one kernel) or "cuda" (fused, in
                 CUDA C++, for the problems that forward "cuda" supports); "auto" picks one

    Returns out, or (out, lse). out has shape, dtype and memory order of q (row-major if q is copied). A query that sees
    no key has out 0, lse −inf and zero gradient. Accumulation is in fp32; p and ds are rounded to the dtype for the
    GEMMs, as in FlashAttention. Saved for the backward: q, k, v, out, lse. Results are deterministic, except dq of
    backward "cuda" where several CTAs add to it with atomics: there "auto" does not pick "cuda" under
    torch.use_deterministic_algorithms(True).

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or option, RuntimeError for a CPU tensor
    outside Triton's interpreter, for a version that does not support this GPU or problem, or for fp8 with a gradient.

    Source: Dao et al. 2022, arXiv:2205.14135, algorithm 1.
    """
    if isinstance(window, list):
        window = tuple(window)  # type: ignore[assignment]
    if lean(q, k, v) and not fp8:
        given = (causal, scale, num_context, window, forward, backward)
        key = (signature(q), signature(k), signature(v), given)
        made = _FORWARD.find(key)
        if made is None:
            check_qkv("attention", q, k, v)
            options = attention_options(q, k, *given)
            made = _FORWARD.keep(key, (fwd_plan(q, k, v, *options[:-1]), options))
        plan, options = made
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return _apply(q, k, v, plan, options, return_lse)
        out, lse, _ = plan(q, k, v)
        return (out, lse) if return_lse else out
    if torch._C._is_torch_function_mode_enabled() and not torch.compiler.is_compiling():
        # As PyTorch's own functions do: a mode, such as context parallelism, may replace the implementation.
        options = dict(causal=causal, scale=scale, num_context=num_context, window=window, return_lse=return_lse)
        options |= dict(fp8=fp8, forward=forward, backward=backward)
        return torch.overrides.handle_torch_function(attention, (q, k, v), q, k, v, **options)
    check_qkv("attention", q, k, v)
    no_tangent("attention", q, k, v)
    options = attention_options(q, k, causal, scale, num_context, window, forward, backward)
    if fp8:
        scale, left, right, keys, *_ = options
        if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
            raise RuntimeError(
                "attention: q, k and v must not require grad with fp8=True: detach them, or use torch.no_grad()"
            )
        if left >= 0 or right > 0:
            raise ValueError(f"attention: window must be None with fp8=True, got {window}")
        run = attention_fp8_fwd if lean(q, k, v) else _fp8_op
        out, lse = run(q, k, v, scale, right, keys, return_lse)
    else:
        out, lse, _ = _fwd_op(q, k, v, *options)
    return (out, lse) if return_lse else out


def attention_options(q, k, causal, scale, num_context, window, forward, backward):
    """Returns (scale, left, right, keys, forward, backward), the arguments of the op. ValueError if one is invalid."""
    keys = k.shape[2]
    if num_context is not None:
        if not 0 <= num_context <= keys:
            raise ValueError(f"attention: num_context must be from 0 to k's {keys} rows, got {num_context}")
        keys = num_context
    left, right = _window(window)
    if causal:
        right = 0
    if scale is None:
        scale = 1 / math.sqrt(q.shape[3])
    elif not LEAST_SCALE <= scale <= MOST_SCALE:
        raise ValueError(f"attention: scale must be a positive number in the range of fp32, got {scale}")
    for name, version, known in (("forward", forward, FORWARD), ("backward", backward, BACKWARD)):
        if version not in known:
            raise ValueError(f"attention: {name} must be one of {', '.join(known)}, got {version!r}")
    return float(scale), left, right, keys, forward, backward


def check_qkv(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raises TypeError, ValueError or RuntimeError, in the name of a public function, if no version supports these."""
    if not isinstance(q, torch.Tensor) or q.dtype not in FLOATS:
        raise TypeError(f"{name}: q must be a tensor of float32, float16 or bfloat16, got {kind(q)}")
    if q.dim() != 4 or not 1 <= q.shape[3] <= MAX_DIM:
        raise ValueError(f"{name}: q must be [B, H, S, D] with 1 <= D <= {MAX_DIM}, got shape {tuple(q.shape)}")
    for label, tensor in (("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != q.dtype:
            raise TypeError(f"{name}: {label} must be a tensor of q's dtype {q.dtype}, got {kind(tensor)}")
        if tensor.device != q.device:
            raise ValueError(f"{name}: {label} must be on q's device {q.device}, got {tensor.device}")
        if tensor.dim() != 4 or tensor.shape[0] != q.shape[0] or tensor.shape[3] != q.shape[3]:
            wanted = f"[{q.shape[0]}, Hkv, Sk, {q.shape[3]}] like q"
            raise ValueError(f"{name}: {label} must be {wanted}, got shape {tuple(tensor.shape)}")
    if v.shape != k.shape:
        raise ValueError(f"{name}: v must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{name}: q must have a multiple of k's {k.shape[1]} heads, got {q.shape[1]}")
    runnable(name, "q", q)


def _window(window: tuple[int, int] | None) -> tuple[int, int]:
    if window is None:
        return -1, -1
    if not isinstance(window, tuple) or len(window) != 2 or not all(isinstance(n, int) for n in window):
        raise TypeError(f"attention: window must be (left, right), two integers, or None, got {window!r}")
    left, right = window
    if left < -1 or right < -1:
        raise ValueError(f"attention: window must be (left, right), each -1 or more, got {window}")
    return left, right


def _forward(q, k, v, options):
    """Returns out, lse and statistics. The launch plan is cached if these are plain tensors."""
    if not lean(q, k, v):
        return fwd_plan(q, k, v, *options[:-1])(q, k, v)
    key = signature(q), signature(k), signature(v), options
    made = _FORWARD.find(key) or _FORWARD.keep(key, (fwd_plan(q, k, v, *options[:-1]), options))
    return made[0](q, k, v)


def _backward(tensors, options, need_dq, need_dkv):
    """Returns dq, dk and dv. `tensors`: dout, dlse, q, k, v, out, lse, statistics."""
    rest = (*options[:4], options[5], need_dq, need_dkv)
    if not lean(*tensors):
        return bwd_plan(*tensors, *rest)(*tensors)
    key = (*map(signature, tensors), rest, torch.get_deterministic_debug_mode())
    plan = _BACKWARD.find(key) or _BACKWARD.keep(key, bwd_plan(*tensors, *rest))
    return plan(*tensors)


class _Attention(torch.autograd.Function):
    """The autograd function of eager calls. Its backward goes through torch.library if it is traced, transformed or
    differentiated again."""

    @staticmethod
    def forward(ctx, q, k, v, plan, options, return_lse):
        out, lse, statistics = plan(q, k, v)
        ctx.set_materialize_grads(False)  # lse rarely has a gradient: None, not a tensor of zeros
        ctx.options = options
        ctx.save_for_backward(q, k, v, out, lse, statistics)
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx, dout, dlse=None):
        return *_gradients(ctx, dout, dlse, ctx.options), None, None, None


# torch.autograd.Function.apply checks for functorch first, which `lean` has already ruled out.
_apply = super(torch.autograd.Function, _Attention).apply


def _gradients(ctx, dout, dlse, options):
    """Returns dq, dk and dv, each None if it is not needed or if there is no incoming gradient."""
    if dout is None and dlse is None:
        return None, None, None
    q, k, v, out, lse, statistics = ctx.saved_tensors
    need_dq, need_dk, need_dv = ctx.needs_input_grad[:3]
    need_dkv = need_dk or need_dv
    if dout is None:
        # lse does not depend on v: what is not finite in v or out must not be multiplied by 0.
        dout, v = torch.zeros_like(out), torch.zeros_like(v)
        out = dout
    if lean(dout, dlse, q, k, v, out, lse, statistics) and not torch.is_grad_enabled():
        dq, dk, dv = _backward((dout, dlse, q, k, v, out, lse, statistics), options, need_dq, need_dkv)
    else:
        if statistics is None:
            statistics = empty_statistics(q)
        scale, left, right, keys, _, backward = options
        given = (dout, dlse, q, k, v, out, lse, statistics, scale, left, right, keys, backward)
        dq, dk, dv = _bwd_op(*given, need_dq, need_dkv)
    return dq if need_dq else None, dk if need_dk else None, dv if need_dv else None


@torch.library.custom_op(f"{_NAMESPACE}::attention_fwd", mutates_args=())
def _fwd_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    left: int,
    right: int,
    keys: int,
    forward: str,
    backward: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out, lse, statistics = _forward(q, k, v, (scale, left, right, keys, forward, backward))
    return out, lse, empty_statistics(q) if statistics is None else statistics


@_fwd_op.register_fake
def _(q, k, v, scale, left, right, keys, forward, backward):
    return empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32), empty_statistics(q)


@torch.library.custom_op(f"{_NAMESPACE}::attention_fp8_fwd", mutates_args=())
def _fp8_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, right: int, keys: int, exact_lse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return attention_fp8_fwd(q, k, v, scale, right, keys, exact_lse)


@_fp8_op.register_fake
def _(q, k, v, scale, right, keys, exact_lse):
    return empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op(f"{_NAMESPACE}::attention_bwd", mutates_args=())
def _bwd_op(
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
    backward: str,
    need_dq: bool,
    need_dkv: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tensors = (dout, dlse, q, k, v, out, lse, statistics if statistics.numel() else None)
    found = _backward(tensors, (scale, left, right, keys, "auto", backward), need_dq, need_dkv)
    dq, dk, dv = (q.new_empty(0) if gradient is None else gradient for gradient in found)
    return dq, dk, dv


@_bwd_op.register_fake
def _(dout, dlse, q, k, v, out, lse, statistics, scale, left, right, keys, backward, need_dq, need_dkv):
    def like(tensor: torch.Tensor, needed: bool) -> torch.Tensor:
        return empty_like(tensor) if needed else tensor.new_empty(0)

    return like(q, need_dq), like(k, need_dkv), like(v, need_dkv)


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)  # lse rarely has a gradient: None, not a tensor of zeros
    q, k, v, *options = inputs
    ctx.options = tuple(options)
    out, lse, statistics = output
    ctx.save_for_backward(q, k, v, out, lse, statistics if statistics.numel() else None)


def _autograd(ctx, dout, dlse, _):
    return *_gradients(ctx, dout, dlse, ctx.options), *(None,) * 6


_fwd_op.register_autograd(_autograd, setup_context=_save)
