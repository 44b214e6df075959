"""The public function: argument checks, the fast eager path, registration with torch.library, autograd."""

from __future__ import annotations

import torch

from .checks import FLOATS, kind, no_tangent, runnable
from .launch import Plans, lean, signature
from .plans import rope_plan

LAYOUTS = ("bshd", "bhsd")
MAX_DIM = 1024

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")
_PLANS = Plans()


def rope(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    position_ids: torch.Tensor | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    layout: str = "bshd",
    inplace: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding of q and k in one launch.

    The first R columns of each head are R / 2 pairs (a, b). Pair i of a token at position p becomes

        a' = a · cos[p, i] − b · sin[p, i]
        b' = b · cos[p, i] + a · sin[p, i]

    Pair i is columns (i, i + R/2), as in Llama and GPT-NeoX, or, with `interleaved`, columns (2i, 2i + 1), as in
    RoFormer and GPT-J. The other D − R columns are copied unchanged. All arithmetic is fp32.

    q, k          [B, S, heads, D] (layout="bshd") or [B, heads, S, D] ("bhsd"), or either without B; D <= 1024; fp32,
                  fp16 or bf16; any strides, read without a copy. k may have another number of heads and other
                  strides; with k=None only q is rotated.
    cos, sin      [P, W] with P >= S, or [B, S, W] or [1, S, W]; fp32, fp16 or bf16, independent of q's dtype. W is
                  R / 2, or R with each value twice, as in Hugging Face (halves: cat(c, c); interleaved:
                  c.repeat_interleave(2)); the second copy is not read. They get no gradient.
    position_ids  [S], [1, S] or [B, S], int32 or int64: the row of the table [P, W] for each token, by default
                  0 .. S − 1. A position outside the table is not read and gives NaN in the rotated columns.
    rotary_dim    R. By default R = D if W = D, else R = 2 W; so it is needed only for tables of width R < D.
    inplace       overwrite q and k, and return them. Neither may then require a gradient: autograd would save a copy of
                  the overwritten tensors, and the backward of rope needs neither q nor k.

    Returns (q', k'), or q' without k, in shape and dtype of the inputs; dense, with heads and tokens in the memory
    order of the input. Differentiable in q and k, any number of times.

    Raises TypeError for a wrong dtype; ValueError for a wrong shape, device, layout or rotary_dim, and with inplace for
    expanded tensors or k that is q; RuntimeError for a CPU tensor outside Triton's interpreter, for cos or sin that
    require a gradient, and with inplace for q or k that do; NotImplementedError for forward-mode differentiation.

    Source: Su et al. 2021, RoFormer, arXiv:2104.09864, eq. 34.
    """
    if lean(q, k, cos, sin, position_ids):
        plan = _plan(q, k, cos, sin, position_ids, rotary_dim, interleaved, layout, inplace, False)
        recorded = torch.is_grad_enabled() and _requires_grad(q, k, cos, sin, inplace)
        if inplace:
            _check_distinct(q, k)
            plan(q, k, cos, sin, position_ids)
            torch.autograd.graph.increment_version((q,) if k is None else (q, k))
            return q if k is None else (q, k)
        if recorded:
            return _apply(q, k, cos, sin, position_ids, plan, rotary_dim, interleaved, layout)
        rotated = plan(q, k, cos, sin, position_ids)
        return rotated[0] if k is None else rotated
    half = _check(q, k, cos, sin, position_ids, rotary_dim, layout, inplace)
    no_tangent("rope", q, k, cos, sin)
    if torch.is_grad_enabled():
        _requires_grad(q, k, cos, sin, inplace)
    if inplace:
        _check_distinct(q, k)
        _by_library(_rope_inplace_op, q, k, cos, sin, position_ids, half, interleaved, layout)
        return q if k is None else (q, k)
    rotated = _by_library(_rope_op, q, k, cos, sin, position_ids, half, interleaved, layout, False)
    return rotated[0] if k is None else rotated


def _plan(q, k, cos, sin, position_ids, rotary_dim, interleaved, layout, inplace, inverse):
    """The cached plan for these arguments, created on the first call. For plain tensors only (see `lean`)."""
    tensors = (signature(q), signature(k), signature(cos), signature(sin), signature(position_ids))
    key = (*tensors, rotary_dim, interleaved, layout, inplace, inverse)
    plan = _PLANS.find(key)
    if plan is None:
        half = _check(q, k, cos, sin, position_ids, rotary_dim, layout, inplace)
        plan = rope_plan(q, k, cos, sin, position_ids, interleaved, half, layout, inplace, inverse)
        _PLANS.keep(key, plan)
    return plan


def _requires_grad(q, k, cos, sin, inplace) -> bool:
    """Whether autograd has to record the call. Raises RuntimeError where a gradient is required that rope does not
    compute."""
    if cos.requires_grad or sin.requires_grad:
        raise RuntimeError("rope: cos and sin must not require grad, as no gradient is defined for them: detach them")
    if not q.requires_grad and (k is None or not k.requires_grad):
        return False
    if inplace:
        name = "q" if q.requires_grad else "k"
        raise RuntimeError(
            f"rope: {name} must not require grad with inplace=True, which autograd does not record: "
            "use inplace=False, or torch.no_grad()"
        )
    return True


def _by_library(op, q, k, cos, sin, position_ids, half, interleaved, layout, *inverse):
    """Calls a custom op, whose arguments are q and k [B, S, heads, D] and tables of width R / 2."""
    if cos.shape[-1] != half:
        step = slice(0, 2 * half, 2) if interleaved else slice(0, half)
        cos, sin = cos[..., step], sin[..., step]
    k_rows = None if k is None else _as_bshd(k, layout)
    made = op(_as_bshd(q, layout), k_rows, cos, sin, position_ids, interleaved, *inverse)
    if made is None:
        return None
    q_out, k_out = made
    return _from_bshd(q_out, q.dim(), layout), None if k is None else _from_bshd(k_out, q.dim(), layout)


def _as_bshd(x: torch.Tensor, layout: str) -> torch.Tensor:
    x = x if x.dim() == 4 else x.unsqueeze(0)
    return x if layout == "bshd" else x.transpose(1, 2)


def _from_bshd(x: torch.Tensor, dims: int, layout: str) -> torch.Tensor:
    x = x if layout == "bshd" else x.transpose(1, 2)
    return x if dims == 4 else x.squeeze(0)


def _check(q, k, cos, sin, position_ids, rotary_dim, layout, inplace) -> int:
    """Checks everything that a plan's key determines and returns R / 2. `_requires_grad` and `_check_distinct` check
    the rest."""
    if layout not in LAYOUTS:
        raise ValueError(f"rope: layout must be one of {LAYOUTS}, got {layout!r}")
    tokens = -3 if layout == "bshd" else -2
    given = {"q": q} if k is None else {"q": q, "k": k}
    _check_rows(given, tokens)
    half = _check_tables(q, cos, sin, position_ids, tokens, rotary_dim)
    if inplace:
        for name, x in given.items():
            if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
                raise ValueError(f"rope: {name} must not be expanded with inplace=True, got strides {x.stride()}")
    return half


def _check_rows(given: dict[str, torch.Tensor], tokens: int) -> None:
    q, heads = given["q"], -5 - tokens
    for name, x in given.items():
        if not isinstance(x, torch.Tensor) or x.dtype not in FLOATS:
            raise TypeError(f"rope: {name} must be a tensor of float32, float16 or bfloat16, got {kind(x)}")
        if x.dtype != q.dtype:
            raise TypeError(f"rope: k must have q's dtype {q.dtype}, got {x.dtype}")
        if x.dim() not in (3, 4) or not 2 <= x.shape[-1] <= MAX_DIM:
            order = "S, heads" if tokens == -3 else "heads, S"
            expected = f"[B, {order}, D] or [{order}, D] with 2 <= D <= {MAX_DIM}"
            raise ValueError(f"rope: {name} must be {expected}, got shape {tuple(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"rope: k must be on q's device {q.device}, got {x.device}")
        if _but_for(x, heads) != _but_for(q, heads):
            raise ValueError(f"rope: k must have q's shape {tuple(q.shape)} except for the heads, got {tuple(x.shape)}")
    runnable("rope", "q", q)


def _check_tables(
    q: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    tokens: int,
    rotary_dim: int | None,
) -> int:
    """Checks the tables and returns R / 2."""
    batch, seq, dim = 1 if q.dim() == 3 else q.shape[0], q.shape[tokens], q.shape[-1]
    for name, table in (("cos", cos), ("sin", sin)):
        if not isinstance(table, torch.Tensor) or table.dtype not in FLOATS:
            raise TypeError(f"rope: {name} must be a tensor of float32, float16 or bfloat16, got {kind(table)}")
        if table.dtype != cos.dtype:
            raise TypeError(f"rope: sin must have cos's dtype {cos.dtype}, got {table.dtype}")
        if table.device != q.device:
            raise ValueError(f"rope: {name} must be on q's device {q.device}, got {table.device}")
        if table.shape != cos.shape:
            raise ValueError(f"rope: sin must have cos's shape {tuple(cos.shape)}, got {tuple(table.shape)}")
    width = cos.shape[-1] if cos.dim() else 0
    rotary = _rotary(dim, width, rotary_dim)
    if rotary % 2 or not 2 <= rotary <= dim or width not in (rotary, rotary // 2):
        raise ValueError(
            f"rope: cos and sin must be R / 2 or R wide with rotary_dim = R even and 2 <= R <= D = {dim}, "
            f"got {width} and rotary_dim={rotary_dim}"
        )
    if cos.dim() not in (2, 3) or (cos.dim() == 3 and (cos.shape[0] not in (1, batch) or cos.shape[1] != seq)):
        expected = f"[P, W], [1, {seq}, W] or [{batch}, {seq}, W]"
        raise ValueError(f"rope: cos and sin must be {expected} for q {tuple(q.shape)}, got {tuple(cos.shape)}")
    if position_ids is None:
        if cos.shape[-2] < seq:
            raise ValueError(f"rope: cos and sin must have a row for each of {seq} positions, got {cos.shape[-2]}")
        return rotary // 2
    if not isinstance(position_ids, torch.Tensor) or position_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"rope: position_ids must be a tensor of int32 or int64, got {kind(position_ids)}")
    if cos.dim() == 3:
        raise ValueError(f"rope: position_ids need tables [P, W], but cos is {tuple(cos.shape)}")
    if tuple(position_ids.shape) not in ((seq,), (1, seq), (batch, seq)):
        expected = f"[{seq}], [1, {seq}] or [{batch}, {seq}]"
        raise ValueError(f"rope: position_ids must be {expected}, got {tuple(position_ids.shape)}")
    if position_ids.device != q.device:
        raise ValueError(f"rope: position_ids must be on q's device {q.device}, got {position_ids.device}")
    return rotary // 2


def _check_distinct(q: torch.Tensor, k: torch.Tensor | None) -> None:
    if k is q:
        raise ValueError("rope: k must not be q itself with inplace=True")


def _rotary(dim: int, width: int, rotary_dim: int | None) -> int:
    """R, the rotated columns of a head."""
    if rotary_dim is not None:
        return rotary_dim
    return dim if width == dim else 2 * width


def _but_for(x: torch.Tensor, dim: int) -> list[int]:
    """The shape of x without dimension `dim`, which is negative (counted from the end)."""
    return [*x.shape[:dim], *x.shape[x.dim() + dim + 1 :]]


class _Rope(torch.autograd.Function):
    """The autograd function of eager calls. Its backward calls the custom op where it is traced, transformed by
    functorch or itself differentiated."""

    @staticmethod
    def forward(ctx, q, k, cos, sin, position_ids, plan, rotary_dim, interleaved, layout):
        ctx.set_materialize_grads(False)
        ctx.options = rotary_dim, interleaved, layout
        ctx.save_for_backward(cos, sin, position_ids)  # the gradient is the inverse rotation: neither q nor k is needed
        rotated = plan(q, k, cos, sin, position_ids)
        return rotated[0] if k is None else rotated

    @staticmethod
    def backward(ctx, dq, dk=None):
        need_dq, need_dk, *_ = ctx.needs_input_grad
        dq, dk = dq if need_dq else None, dk if need_dk else None
        if dq is not None:
            dq, dk = _gradients(dq, dk, *ctx.saved_tensors, *ctx.options)
        elif dk is not None:
            dk, _ = _gradients(dk, None, *ctx.saved_tensors, *ctx.options)
        return dq, dk, None, None, None, None, None, None, None


# torch.autograd.Function.apply first handles functorch, then calls this method. `lean` is False under functorch.
_apply = super(torch.autograd.Function, _Rope).apply


def _gradients(dq, dk, cos, sin, position_ids, rotary_dim, interleaved, layout):
    """Returns dq and dk rotated by the negative angle; dk may be None."""
    if lean(dq, dk, cos, sin, position_ids) and not torch.is_grad_enabled():
        plan = _plan(dq, dk, cos, sin, position_ids, rotary_dim, interleaved, layout, False, True)
        return plan(dq, dk, cos, sin, position_ids)
    half = _rotary(dq.shape[-1], cos.shape[-1], rotary_dim) // 2
    return _by_library(_rope_op, dq, dk, cos, sin, position_ids, half, interleaved, layout, True)


def _run(q, k, cos, sin, position_ids, interleaved, inplace, inverse):
    half = cos.shape[-1]
    if lean(q, k, cos, sin, position_ids):
        plan = _plan(q, k, cos, sin, position_ids, 2 * half, interleaved, "bshd", inplace, inverse)
    else:
        plan = rope_plan(q, k, cos, sin, position_ids, interleaved, half, "bshd", inplace, inverse)
    return plan(q, k, cos, sin, position_ids)


def _empty_like(x: torch.Tensor) -> torch.Tensor:
    """A dense empty tensor [B, S, heads, D], with heads and tokens in the memory order of x."""
    if x.stride(2) > x.stride(1):
        return torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op(f"{_NAMESPACE}::rope", mutates_args=())
def _rope_op(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    interleaved: bool,
    inverse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns q and k [B, S, heads, D] of any strides, rotated by the angle or, with `inverse`, by its negative."""
    q_out, k_out = _run(q, k, cos, sin, position_ids, interleaved, False, inverse)
    return q_out, q.new_empty(0) if k_out is None else k_out


@_rope_op.register_fake
def _(q, k, cos, sin, position_ids, interleaved, inverse):
    return _empty_like(q), q.new_empty(0) if k is None else _empty_like(k)


@torch.library.custom_op(f"{_NAMESPACE}::rope_", mutates_args=("q", "k"))
def _rope_inplace_op(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    interleaved: bool,
) -> None:
    _run(q, k, cos, sin, position_ids, interleaved, True, False)


@_rope_inplace_op.register_fake
def _(q, k, cos, sin, position_ids, interleaved):
    return None


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    _, _, cos, sin, position_ids, ctx.interleaved, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin, position_ids)  # the gradient is the inverse rotation: neither q nor k is needed


def _backward(ctx, dq, dk):
    dq, dk = (d if needed else None for d, needed in zip((dq, dk), ctx.needs_input_grad, strict=False))
    if dq is not None or dk is not None:
        options = (*ctx.saved_tensors, ctx.interleaved, not ctx.inverse)
        if dq is None:
            dk, _ = _rope_op(dk, None, *options)
        elif dk is None:
            dq, _ = _rope_op(dq, None, *options)
        else:
            dq, dk = _rope_op(dq, dk, *options)
    return dq, dk, None, None, None, None, None


_rope_op.register_autograd(_backward, setup_context=_save)
