"""A plain block-sparse attention in PyTorch, a column of blocks after the other, that is right unless it is told which
fault to have.

Every fault is one line that says `fault == "..."`; "" is the control.
"""

from __future__ import annotations

import itertools
import math

import torch

_CALLS = itertools.count()
_LISTS: dict[tuple, torch.Tensor] = {}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _kept(mask: torch.Tensor, queries: int, keys: int, block: int, causal: bool, fault: str) -> torch.Tensor:
    """[B, Hq, nq, nk]: the blocks that are gone over."""
    rows, columns = mask.shape[-2:]
    if fault == "lists of the first head":
        mask = mask[:, :1].expand(mask.shape)
    if fault == "lists of the first batch":
        mask = mask[:1].expand(mask.shape)
    if fault == "rows taken for columns":
        mask = mask.flatten(-2).unflatten(-1, (columns, rows)).transpose(-1, -2)
    position = torch.arange(rows, device=mask.device)[:, None]
    column = torch.arange(columns, device=mask.device)
    if causal:
        last = ((position + 1) * block).clamp(max=queries) - 1 + keys - queries
        if fault == "diagonal block dropped":
            last = last - block
        mask = mask & (column * block <= last)
    rank = mask.cumsum(-1)
    if fault == "last kept block dropped":
        mask = mask & (rank < rank[..., -1:])
    if fault == "one block too many":
        first_dropped = (~mask).cumsum(-1) == 1
        mask = mask | (first_dropped & ~mask)
    if fault == "no more than one block":
        mask = mask & (rank <= 1)
    return mask


def _seen(kept: torch.Tensor, column: int, queries: int, keys: int, block: int, causal: bool, fault: str):
    """[B, Hq, queries, keys of the column]: which pairs see each other."""
    size = block if fault == "padded keys counted" else min((column + 1) * block, keys) - column * block
    key = torch.arange(column * block, column * block + size, device=kept.device)
    seen = kept[..., column].repeat_interleave(block, dim=-1)[..., :queries, None] & (key >= 0)
    if causal and fault != "diagonal block not masked":
        shift = 0 if fault == "diagonal at the top left" else keys - queries
        seen = seen & (key <= torch.arange(queries, device=kept.device)[:, None] + shift)
    return seen


def _bias(bias: torch.Tensor | None, column: int, queries: int, block: int, fault: str):
    """[B, Hq, queries, 1], or 0."""
    if bias is None or fault == "bias ignored":
        return 0.0
    if fault == "bias of the next block":
        bias = bias.roll(1, -1)
    return bias[..., column].repeat_interleave(block, dim=-1)[..., :queries, None]


def _part(tensor: torch.Tensor, column: int, block: int, size: int) -> torch.Tensor:
    """Rows of a block in fp32, with zeros past the last one."""
    rows = tensor[:, :, column * block : (column + 1) * block].float()
    return torch.nn.functional.pad(rows, (0, 0, 0, size - rows.shape[2]))


def _shared(tensor: torch.Tensor, heads: int, fault: str) -> torch.Tensor:
    """Key heads as the query heads see them."""
    group = heads // tensor.shape[1]
    if fault == "key heads interleaved":
        return tensor.repeat(1, group, 1, 1)
    return tensor.repeat_interleave(group, dim=1)


def _scores(q, k, bias, scale: float, fault: str) -> torch.Tensor:
    if fault == "scale dropped":
        scale = 1.0
    if fault == "bias before the scale":
        return (q.float() @ k.transpose(-1, -2) + bias) * scale
    return q.float() @ k.transpose(-1, -2) * scale + bias


@torch.library.custom_op("plain_block_sparse_attention::fwd", mutates_args=())
def _fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    block: int,
    causal: bool,
    fault: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    (batch, heads, queries, dim), keys = q.shape, k.shape[2]
    kept = _kept(mask, queries, keys, block, causal, fault)
    wide_k, wide_v = _shared(k, heads, fault), _shared(v, heads, fault)
    peak = torch.full((batch, heads, queries, 1), -math.inf, device=q.device)
    total, acc = torch.zeros_like(peak), torch.zeros(batch, heads, queries, dim, device=q.device)
    for column in range(kept.shape[-1]):
        seen = _seen(kept, column, queries, keys, block, causal, fault)
        size = seen.shape[-1]
        own = _bias(bias, column, queries, block, fault)
        s = _scores(q, _part(wide_k, column, block, size), own, scale, fault).masked_fill(~seen, -math.inf)
        higher = torch.maximum(peak, s.amax(-1, keepdim=True))
        guarded = torch.where(higher == -math.inf, 0, higher) if fault != "empty rows not a number" else higher
        p, rescale = (s - guarded).exp(), (peak - guarded).exp()
        total = total * rescale + p.sum(-1, keepdim=True)
        acc = acc * (1 if fault == "accumulator not rescaled" else rescale) + p @ _part(wide_v, column, block, size)
        peak = higher
    safe = torch.where(total == 0, 1, total)
    lse = peak + (torch.log2(safe) if fault == "lse in base 2" else safe.log())
    return (acc / safe).to(q.dtype), lse.squeeze(-1)


@_fwd.register_fake
def _(q, k, v, mask, bias, scale, block, causal, fault):
    shape = (*q.shape[:3], 1) if fault == "shape of the fake result" else q.shape
    return q.new_empty(shape), q.new_empty(q.shape[:3], dtype=torch.float32)


def _exact_lse(q, wide_k, kept, bias, scale: float, block: int, causal: bool, fault: str) -> torch.Tensor:
    """Anew and in fp64: the rounding of a large lse would be all of p's error. +inf where nothing is seen."""
    queries, keys = q.shape[2], wide_k.shape[2]
    pieces = []
    for column in range(kept.shape[-1]):
        k = wide_k[:, :, column * block : (column + 1) * block].double()
        own = _bias(bias, column, queries, block, fault)
        seen = _seen(kept, column, queries, keys, block, causal, "")
        pieces.append((q.double() @ k.transpose(-1, -2) * scale + own).masked_fill(~seen, -math.inf))
    lse = torch.cat(pieces, dim=-1).logsumexp(-1, keepdim=True)
    return torch.where(lse == -math.inf, math.inf, lse)


@torch.library.custom_op("plain_block_sparse_attention::bwd", mutates_args=())
def _bwd(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    scale: float,
    block: int,
    causal: bool,
    fault: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    (_, heads, queries, _), keys = q.shape, k.shape[2]
    group = heads // k.shape[1]
    kept = _kept(mask, queries, keys, block, causal, "")
    wide_k, wide_v, wide_q, do = _shared(k, heads, ""), _shared(v, heads, ""), q.float(), dout.float()
    delta = (do * out.float()).sum(-1, keepdim=True)
    if fault == "delta dropped":
        delta = torch.zeros_like(delta)
    if dlse is not None and fault != "gradient of lse dropped":
        delta = delta - dlse.unsqueeze(-1)
    dq, dk, dv = torch.zeros_like(wide_q), torch.zeros_like(wide_k.float()), torch.zeros_like(wide_v.float())
    dbias = torch.zeros(kept.shape, device=q.device)
    columns = range(kept.shape[-1])
    lse = _exact_lse(q, wide_k, kept, bias, scale, block, causal, "") if columns else None
    for_keys = kept
    if fault == "keys by the lists of the rows":
        for_keys = kept.transpose(-1, -2)
    if fault == "keys by the lists of a group's first head":
        for_keys = kept[:, ::group].repeat_interleave(group, dim=1)
    backwards = fault == "queries in the order of arrival" and next(_CALLS) % 2
    for column in columns:
        where = slice(column * block, min((column + 1) * block, keys))
        kt, vt = wide_k[:, :, where].float(), wide_v[:, :, where].float()
        own = _bias(bias, column, queries, block, "")
        p = (q.double() @ kt.double().transpose(-1, -2) * scale + own - lse).exp().float()
        hidden = "diagonal block not masked" if fault == "no causal mask in the backward" else ""
        seen = _seen(kept, column, queries, keys, block, causal, hidden)
        ds = torch.where(seen, p, 0) * (do @ vt.transpose(-1, -2) - delta)
        p = torch.where(_seen(for_keys, column, queries, keys, block, causal, hidden), p, 0)
        dv[:, :, where] += p.flip(-2).transpose(-1, -2) @ do.flip(-2) if backwards else p.transpose(-1, -2) @ do
        dk[:, :, where] += (p * (do @ vt.transpose(-1, -2) - delta)).transpose(-1, -2) @ wide_q * scale
        dq += ds @ kt * (1 if fault == "scale missing in dq" else scale)
        sums = torch.nn.functional.pad(ds.sum(-1), (0, -queries % block)).unflatten(-1, (-1, block))
        if fault == "gradient of the bias from one tile":
            sums = sums[..., : block // 2]
        dbias[..., column] = sums.sum(-1)
    if fault == "gradient of the bias dropped":
        dbias = torch.zeros_like(dbias)
    if fault == "gradient of the bias scaled":
        dbias = dbias * scale
    dk, dv = (t.unflatten(1, (k.shape[1], group)) for t in (dk, dv))
    dk = dk[:, :, 0] if fault == "dk of one head of the group" else dk.sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.sum(2).to(v.dtype), dbias


@_bwd.register_fake
def _(dout, dlse, q, k, v, mask, bias, out, scale, block, causal, fault):
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        q.new_empty(mask.shape, dtype=torch.float32),
    )


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    q, k, v, mask, bias, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, mask, bias, output[0])


def _backward(ctx, dout, dlse):
    *inputs, out = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, dbias = _bwd(dout, dlse, *inputs, out, *ctx.options)
    return dq, dk, dv, None, None if inputs[4] is None else dbias, *(None,) * 4


_fwd.register_autograd(_backward, setup_context=_save)


def _as_if_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """What one reads who ignores the strides, within the tensor's memory."""
    room = tensor.untyped_storage().nbytes() - int(tensor.storage_offset())
    if tensor.numel() > room or tensor.dim() < 2:
        return tensor
    columns = tensor.shape[-1]
    strides = [columns, 1] if tensor.dim() == 2 else [tensor.shape[-2] * columns, columns, 1]
    strides = [tensor.shape[-3] * strides[0], *strides] if tensor.dim() == 4 else strides
    return torch.as_strided(tensor.view(torch.uint8), tensor.shape, strides) != 0


def block_sparse_attention(
    q,
    k,
    v,
    block_mask,
    *,
    block_size=128,
    scale=None,
    causal=False,
    return_lse=False,
    block_bias=None,
    fault="",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The public op's signature and checks, and a fault."""
    if fault != "no checks":
        check(q, k, v, block_mask, block_bias, block_size)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None or fault == "scale ignored" else scale
    shape = (*q.shape[:2], -(-q.shape[2] // block_size), -(-k.shape[2] // block_size))
    mask = block_mask
    if fault == "strides of the mask ignored":
        mask = _as_if_contiguous(mask)
    if fault == "lists cached by address":
        key = (mask.data_ptr(), mask.shape, q.shape, k.shape)
        mask = _LISTS.setdefault(key, mask.clone())
    # Copies, where a mask or bias is shared: how its gradient is summed is then autograd's affair.
    mask = mask.expand(shape).contiguous()
    bias = None if block_bias is None else block_bias.expand(shape).contiguous()
    causal = causal and fault != "not causal"
    out, lse = _fwd(q, k, v, mask, bias, scale, block_size, causal, fault)
    return (out, lse) if return_lse else out


def check(q, k, v, block_mask, block_bias, block_size) -> None:
    """Raises TypeError or ValueError naming the argument."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} must be fp32, fp16 or bf16, got {tensor.dtype}")
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {tensor.device}")
        if tensor.dim() != 4:
            raise ValueError(f"{name} must be [B, H, S, D], got {tuple(tensor.shape)}")
    if (k.shape[0], k.shape[3]) != (q.shape[0], q.shape[3]) or q.shape[1] % k.shape[1]:
        raise ValueError(f"k must fit q's shape {tuple(q.shape)}, got {tuple(k.shape)}")
    if v.shape != k.shape:
        raise ValueError(f"v must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}")
    shape = (*q.shape[:2], -(-q.shape[2] // block_size), -(-k.shape[2] // block_size))
    for name, tensor, dtype in (("block_mask", block_mask, torch.bool), ("block_bias", block_bias, torch.float32)):
        if tensor is None:
            continue
        if tensor.dtype != dtype or tensor.device != q.device:
            raise ValueError(f"{name} must be {dtype} on {q.device}, got {tensor.dtype} on {tensor.device}")
        leading = zip(reversed(tensor.shape[:-2]), (shape[1], shape[0]), strict=False)
        if tensor.shape[-2:] != shape[2:] or any(n not in (1, whole) for n, whole in leading):
            raise ValueError(f"{name} must fit {shape}, got {tuple(tensor.shape)}")
