"""The public functions: checks, the fast path of eager calls, registration with torch.library, autograd."""

from __future__ import annotations

import torch

from .arguments import check_block_size, check_blocks, checked, distinct, four
from .checks import kind, no_tangent, runnable
from .index import BlockIndex, index_plan, make_table, table_shape, table_size
from .launch import Plans, lean, signature
from .problem import empty_like
from .versions import bwd_plan, empty_statistics, fwd_plan

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")
_CALL, _FORWARD, _BACKWARD = Plans(), Plans(), Plans()


def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_mask: torch.Tensor | BlockIndex,
    *,
    block_size: int = 128,
    scale: float | None = None,
    causal: bool = False,
    return_lse: bool = False,
    block_bias: torch.Tensor | None = None,
    forward: str = "auto",
    backward: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes attention over the blocks of scores that a mask keeps; dropped blocks are skipped.

        s = scale · q kᵀ + bias of the block      out = softmax(s) v      lse = log Σ exp(s)      over the kept blocks

    q            [B, Hq, Sq, D], 1 <= D <= 256; fp32, fp16 or bf16. Tensors of any strides are read in place if rows of
                 D are contiguous, and copied otherwise. So [B, S, H, D] is passed as x.transpose(1, 2).
    k, v         [B, Hkv, Sk, D], dtype and device of q. Hq is a multiple of Hkv: query head h uses KV head
                 h // (Hq // Hkv).
    block_mask   bool [nq, nk], [1 or Hq, nq, nk] or [1 or B, 1 or Hq, nq, nk], True where a block is kept: block (i, j)
                 has the queries from i · block_size on and the keys from j · block_size on; the last ones may be
                 partial. Or a `BlockIndex`, which is such a mask already compressed.
    block_size   64 or 128
    scale        a positive number in the range of fp32, by default 1 / sqrt(D)
    causal       within kept blocks, query i sees keys j <= i + Sk − Sq: the last query sees all
    return_lse   also return lse [B, Hq, Sq], fp32, natural logarithm. Both outputs are differentiable.
    block_bias   fp32, shaped like a mask: added to all scores of a block. It is differentiable, for example as the
                 logarithm of a gate. −inf has the effect of dropping the block, at the cost of a kept one. A large
                 finite number in its place, such as −1e9, must not be the bias of all blocks that a row sees: fp32
                 rounds its scores away, and probabilities are then wrong and may overflow.
    forward      "cuda" (CUDA C++ for compute capability 9.0: fp16 or bf16, D of 64 or 128, 16-byte aligned rows; CuPy
                 compiles it) or "portable"; "auto" picks one
    backward     likewise; "cuda" only for blocks of 128 without block_bias. Either version works after either forward.
                 "portable" runs if q, or k and v, need no gradient

    Returns out, or (out, lse). out has shape, dtype and memory order of q (row-major if q is copied). A query that sees
    no key has out 0, lse −inf and zero gradient. The bias of a dropped block has zero gradient too. Accumulation is in
    fp32; p and ds are rounded to the dtype for the GEMMs, as in FlashAttention. Results are deterministic, except dq of
    backward "cuda", which CTAs accumulate in no fixed order: "auto" does not pick "cuda" under
    torch.use_deterministic_algorithms(True). Saved for the backward: q, k, v, out, lse, the table of the mask, the
    bias.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or option, RuntimeError for a CPU tensor
    outside Triton's interpreter, or for a version that does not support this GPU or problem.

    Source: Dao et al. 2022, arXiv:2205.14135, algorithm 5; Child et al. 2019, arXiv:1904.10509.
    """
    given = (block_size, scale, causal, forward, backward)
    index = block_mask if isinstance(block_mask, BlockIndex) else None
    table: torch.Tensor = index.table if index is not None else block_mask  # type: ignore[assignment]
    if lean(q, k, v, table, block_bias):
        key = (
            signature(q), signature(k), signature(v), signature(table), signature(block_bias),
            index and index[1:], given,
        )  # fmt: skip
        made = _CALL.find(key) or _CALL.keep(key, _plans(q, k, v, block_mask, block_bias, *given))
        listed, plan, options, shape = made
        if listed is not None:
            table = listed(table)
        if shape is not None and block_bias is not None:
            block_bias = block_bias.expand(shape)
        if torch.is_grad_enabled() and (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (block_bias is not None and block_bias.requires_grad)
        ):
            return _apply(q, k, v, table, block_bias, plan, options, return_lse)
        out, lse, _ = plan(q, k, v, table, block_bias)
        return (out, lse) if return_lse else out
    lists, mask, block_bias, options = checked(q, k, v, block_mask, block_bias, *given)
    no_tangent("block_sparse_attention", q, k, v, block_bias)
    if mask is not None:
        lists = _index_op(mask, q.shape[2], k.shape[2], block_size, causal)
    out, lse, _ = _fwd_op(q, k, v, lists, block_bias, *options)
    return (out, lse) if return_lse else out


def _plans(q, k, v, block_mask, block_bias, block_size, scale, causal, forward, backward):
    """Checks a call, and returns the launch plan of the mask's lists (None for a BlockIndex), the plan of the
    attention, the op's options, and the shape to which block_bias must be expanded, or None."""
    given = (block_size, scale, causal, forward, backward)
    table, mask, bias, options = checked(q, k, v, block_mask, block_bias, *given)
    queries, keys, listed = q.shape[2], k.shape[2], None
    if mask is not None:
        listed = index_plan(mask, queries, keys, block_size, causal)
        table = torch.empty(table_shape(mask, queries, keys, block_size), dtype=torch.int32, device=mask.device)
    plan = _forward_plan(q, k, v, table, bias, options)
    return listed, plan, options, None if bias is None or bias.shape == block_bias.shape else bias.shape


def block_index(
    block_mask: torch.Tensor, queries: int, keys: int, *, block_size: int = 128, causal: bool = False
) -> BlockIndex:
    """Compresses a mask into lists of kept blocks, to be passed in its place any number of times.

    block_mask   bool [nq, nk], [H, nq, nk] or [B, H, nq, nk] with B and H 1 or those of q
    queries      Sq; nq = ceil(Sq / block_size)
    keys         Sk; nk = ceil(Sk / block_size)
    block_size   64 or 128
    causal       blocks that a causal mask hides are dropped from the lists; the calls must be causal as well

    Returns a BlockIndex on the mask's device, by two small launches without synchronisation. Heads or batches that
    share their mask, by size 1 or stride 0, share its lists. Raises the errors of `block_sparse_attention`.
    """
    check_block_size(block_size)
    if not isinstance(block_mask, torch.Tensor) or block_mask.dtype != torch.bool:
        raise TypeError(f"block_index: block_mask must be a tensor of bool, got {kind(block_mask)}")
    wanted = (-(-queries // block_size), -(-keys // block_size))
    if queries < 0 or keys < 0 or not 2 <= block_mask.dim() <= 4 or block_mask.shape[-2:] != wanted:
        raise ValueError(
            f"block_index: block_mask must be [.., {wanted[0]}, {wanted[1]}] for {queries} queries and {keys} keys in "
            f"blocks of {block_size}, got shape {tuple(block_mask.shape)}"
        )
    check_blocks(wanted[0], wanted[1], block_size)
    runnable("block_index", "block_mask", block_mask)
    make = make_table if lean(block_mask) else _index_op
    table = make(distinct(four(block_mask)), queries, keys, block_size, causal)
    return BlockIndex(table, queries, keys, block_size, causal)


def _forward_plan(q, k, v, table, bias, options):
    """The plan of a forward; cached if these are plain tensors."""
    tensors, rest = (q, k, v, table, bias), (*options[:3], options[4])
    if not lean(*tensors):
        return fwd_plan(*tensors, *rest)
    key = (*map(signature, tensors), rest)
    return _FORWARD.find(key) or _FORWARD.keep(key, fwd_plan(*tensors, *rest))


def _backward(tensors, options, needed):
    """Returns dq, dk, dv and dbias. `tensors`: dout, dlse, q, k, v, table, bias, out, lse, statistics."""
    rest = (*options[:4], *needed)
    if not lean(*tensors):
        return bwd_plan(*tensors, *rest)(*tensors)
    key = (*map(signature, tensors), rest, torch.get_deterministic_debug_mode())
    plan = _BACKWARD.find(key) or _BACKWARD.keep(key, bwd_plan(*tensors, *rest))
    return plan(*tensors)


class _BlockSparseAttention(torch.autograd.Function):
    """The autograd function of eager calls. Its backward goes through torch.library if it is traced, transformed or
    differentiated again."""

    @staticmethod
    def forward(ctx, q, k, v, table, bias, plan, options, return_lse):
        out, lse, statistics = plan(q, k, v, table, bias)
        ctx.set_materialize_grads(False)  # lse rarely has a gradient: None, not a tensor of zeros
        ctx.options = options
        ctx.save_for_backward(q, k, v, table, bias, out, lse, statistics)
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx, dout, dlse=None):
        return *_gradients(ctx, dout, dlse), None, None, None


# torch.autograd.Function.apply checks for functorch first, which `lean` has already ruled out.
_apply = super(torch.autograd.Function, _BlockSparseAttention).apply


def _gradients(ctx, dout, dlse):
    """Returns gradients of q, k, v, table and bias, each None if not needed or without an incoming gradient."""
    if dout is None and dlse is None:
        return None, None, None, None, None
    need_dq, need_dk, need_dv, _, need_dbias = ctx.needs_input_grad[:5]
    q, k, v, table, bias, out, lse, statistics = ctx.saved_tensors
    if dout is None:
        # lse does not depend on v: what is not finite in v or out must not be multiplied by 0.
        dout, v = torch.zeros_like(out), torch.zeros_like(v)
        out = dout
    tensors, needed = (
        (dout, dlse, q, k, v, table, bias, out, lse, statistics),
        (need_dq, need_dk or need_dv, need_dbias),
    )
    if lean(*tensors) and not torch.is_grad_enabled():
        dq, dk, dv, dbias = _backward(tensors, ctx.options, needed)
    else:
        if statistics is None:
            statistics = empty_statistics(q)
        dq, dk, dv, dbias = _bwd_op(*tensors[:-1], statistics, *ctx.options[:4], *needed)
    return (
        dq if need_dq else None,
        dk if need_dk else None,
        dv if need_dv else None,
        None,
        dbias if need_dbias else None,
    )


@torch.library.custom_op(f"{_NAMESPACE}::block_sparse_attention_index", mutates_args=())
def _index_op(mask: torch.Tensor, queries: int, keys: int, block: int, causal: bool) -> torch.Tensor:
    return make_table(mask, queries, keys, block, causal)


@_index_op.register_fake
def _(mask, queries, keys, block, causal):
    return mask.new_empty((*mask.shape[:2], table_size(queries, keys, block)), dtype=torch.int32)


@torch.library.custom_op(f"{_NAMESPACE}::block_sparse_attention_fwd", mutates_args=())
def _fwd_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    block: int,
    causal: bool,
    backward: str,
    forward: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out, lse, statistics = _forward_plan(q, k, v, table, bias, (scale, block, causal, backward, forward))(
        q, k, v, table, bias
    )
    return out, lse, empty_statistics(q) if statistics is None else statistics


@_fwd_op.register_fake
def _(q, k, v, table, bias, scale, block, causal, backward, forward):
    return empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32), empty_statistics(q)


@torch.library.custom_op(f"{_NAMESPACE}::block_sparse_attention_bwd", mutates_args=())
def _bwd_op(
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
    backward: str,
    need_dq: bool,
    need_dkv: bool,
    need_dbias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tensors = (dout, dlse, q, k, v, table, bias, out, lse, statistics if statistics.numel() else None)
    options, needed = (scale, block, causal, backward), (need_dq, need_dkv, need_dbias)
    dq, dk, dv, dbias = _backward(tensors, options, needed)
    return (
        q.new_empty(0) if dq is None else dq,
        k.new_empty(0) if dk is None else dk,
        v.new_empty(0) if dv is None else dv,
        q.new_empty(0, dtype=torch.float32) if dbias is None else dbias,
    )


@_bwd_op.register_fake
def _(
    dout, dlse, q, k, v, table, bias, out, lse, statistics, scale, block, causal, backward,
    need_dq, need_dkv, need_dbias,
):  # fmt: skip
    def like(tensor: torch.Tensor, needed: bool) -> torch.Tensor:
        return empty_like(tensor) if needed else tensor.new_empty(0)

    dbias = q.new_empty(bias.shape if bias is not None and need_dbias else 0, dtype=torch.float32)
    return like(q, need_dq), like(k, need_dkv), like(v, need_dkv), dbias


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)  # lse rarely has a gradient: None, not a tensor of zeros
    q, k, v, table, bias, *options = inputs
    ctx.options = tuple(options)
    out, lse, statistics = output
    ctx.save_for_backward(q, k, v, table, bias, out, lse, statistics if statistics.numel() else None)


def _autograd(ctx, dout, dlse, _):
    return *_gradients(ctx, dout, dlse), *(None,) * 5


_fwd_op.register_autograd(_autograd, setup_context=_save)
