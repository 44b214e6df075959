"""A plain attention in PyTorch, a tile of keys after the other, that is right unless it is told which fault to have.

Every fault is one line that says `fault == "..."`; "" is the control.
"""

from __future__ import annotations

import itertools
import math

import torch

_CALLS = itertools.count()
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TILE = 8


def _visible(rows: range, tile: slice, queries: int, keys: int, left: int, right: int, fault: str) -> torch.Tensor:
    """[rows, keys of the tile]: which pairs see each other."""
    shift = 0 if fault == "mask aligned at the top left" else keys - queries
    query = torch.arange(rows.start, rows.stop)[:, None] + shift
    key = torch.arange(tile.start, tile.stop)[None, :]
    if fault == "mask off by one":
        query = query - 1
    if fault == "left bound off by one":
        left -= left > 0
    seen = key < keys if fault != "last key dropped" else key < keys - 1
    seen = seen & (query == query)
    if left >= 0 and fault != "left bound ignored":
        seen &= key >= query - left
    if right >= 0:
        seen &= key <= query + right
    return seen


def _tiles(keys: int, fault: str) -> list[slice]:
    """A ragged last tile is padded where the fault says so."""
    end = -(-keys // TILE) * TILE if fault == "padded keys counted" else keys
    return [slice(first, min(first + TILE, end)) for first in range(0, end, TILE)]


def _part(tensor: torch.Tensor, tile: slice, keys: int) -> torch.Tensor:
    """Rows of a tile in fp32, with zeros past the last key."""
    rows = tensor[:, :, tile.start : min(tile.stop, keys)].float()
    return torch.nn.functional.pad(rows, (0, 0, 0, tile.stop - tile.start - rows.shape[2]))


def _shared(tensor: torch.Tensor, heads: int, fault: str) -> torch.Tensor:
    """Key heads as the query heads see them."""
    group = heads // tensor.shape[1]
    if fault == "key heads interleaved":
        return tensor.repeat(1, group, 1, 1)
    return tensor.repeat_interleave(group, dim=1)


def _strided_as(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """What one reads in `tensor` who takes its strides to be those of `other`, within its memory."""
    room = tensor.untyped_storage().nbytes() // tensor.element_size() - int(tensor.storage_offset())
    reach = 1 + sum((n - 1) * s for n, s in zip(other.shape, other.stride(), strict=True))
    return tensor if not tensor.numel() or reach > room else torch.as_strided(tensor, other.shape, other.stride())


@torch.library.custom_op("plain_attention::fwd", mutates_args=())
def _fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, left: int, right: int, keys: int, fault: str
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, queries, dim = q.shape
    if fault == "v read with the strides of k":
        v = _strided_as(v, k)
    if fault == "scale dropped":
        scale = 1.0
    wide_k, wide_v = _shared(k, heads, fault), _shared(v, heads, fault)
    peak = torch.full((batch, heads, queries, 1), -math.inf, device=q.device)
    total, acc = torch.zeros_like(peak), torch.zeros(batch, heads, queries, dim, device=q.device)
    for tile in _tiles(keys, fault):
        s = q.float() @ _part(wide_k, tile, keys).transpose(-1, -2)
        if fault == "scores in half precision" and q.dtype == torch.float16:
            s = s.half().float()
        s = s * scale
        seen = _visible(range(queries), tile, queries, keys, left, right, fault).to(q.device)
        s = s.masked_fill(~seen, -math.inf) if fault != "padded keys counted" or right >= 0 else s
        higher = torch.maximum(peak, s.amax(-1, keepdim=True))
        if fault == "no maximum":
            higher = torch.zeros_like(peak)
        if fault == "maximum of the first tile":
            higher = higher if tile.start == 0 else peak
        guarded = torch.where(higher == -math.inf, 0, higher) if fault != "empty rows not a number" else higher
        p = (s - guarded).exp()
        rescale = (peak - guarded).exp()
        total = total * rescale + p.sum(-1, keepdim=True)
        p = p.half().float() if fault == "probabilities rounded to fp16" else p
        acc = acc * (1 if fault == "accumulator not rescaled" else rescale) + p @ _part(wide_v, tile, keys)
        peak = higher
    safe = torch.where(total == 0, 1, total)
    lse = peak + (torch.log2(safe) if fault == "lse in base 2" else safe.log())
    if fault == "no maximum":
        lse = torch.where(total == 0, -math.inf, lse)
    out = acc / (1 if fault == "not divided by the sum" else safe)
    return out.to(q.dtype), lse.squeeze(-1)


@_fwd.register_fake
def _(q, k, v, scale, left, right, keys, fault):
    shape = (*q.shape[:3], 1) if fault == "shape of the fake result" else q.shape
    return q.new_empty(shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("plain_attention::bwd", mutates_args=())
def _bwd(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    left: int,
    right: int,
    keys: int,
    fault: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads, queries = q.shape[1], q.shape[2]
    if fault == "context ignored in the backward":
        keys = k.shape[2]
    wide_k, wide_v, wide_q, do = _shared(k, heads, fault), _shared(v, heads, fault), q.float(), dout.float()
    delta = (do * out.float()).sum(-1, keepdim=True)
    if fault == "delta dropped":
        delta = torch.zeros_like(delta)
    if dlse is not None and fault != "gradient of lse dropped":
        delta = delta - dlse.unsqueeze(-1)
    if fault == "incoming gradient taken for ones":
        do = torch.ones_like(do)
    if keys:
        # Anew and in fp64: the rounding of a large lse would be all of p's error.
        s = q.double() @ wide_k[:, :, :keys].double().transpose(-1, -2) * scale
        s = s.masked_fill(
            ~_visible(range(queries), slice(0, keys), queries, keys, left, right, fault).to(q.device), -math.inf
        )
        peak = torch.where(s.amax(-1, keepdim=True) == -math.inf, 0, s.amax(-1, keepdim=True))
        lse = (peak + (s - peak).exp().sum(-1, keepdim=True).log()).squeeze(-1)
    dq, dk, dv = torch.zeros_like(wide_q), torch.zeros(wide_k.shape), torch.zeros(wide_v.shape)
    dk, dv = dk.to(q.device), dv.to(q.device)
    tiles = _tiles(keys, "")
    if fault == "tiles in the order of arrival" and next(_CALLS) % 2:
        tiles = tiles[::-1]
    for tile in tiles:
        kt, vt = _part(wide_k, tile, keys), _part(wide_v, tile, keys)
        seen = _visible(range(queries), tile, queries, keys, left, right, fault).to(q.device)
        shift = torch.where(lse == -math.inf, math.inf, lse).unsqueeze(-1)
        p = (q.double() @ kt.double().transpose(-1, -2) * scale - shift).exp().float()
        p = p if fault == "no mask in the backward" else torch.where(seen, p, 0)
        dv[:, :, tile] += p.transpose(-1, -2) @ do
        ds = p * (do @ vt.transpose(-1, -2) - delta)
        dk[:, :, tile] += ds.transpose(-1, -2) @ wide_q * scale
        dq += ds @ kt * (1 if fault == "scale missing in dq" else scale)
        if fault == "dq rounded at each tile":
            dq = dq.half().float()
    group = heads // k.shape[1]
    dk, dv = (t.unflatten(1, (k.shape[1], group)) for t in (dk, dv))
    dk = dk[:, :, 0] if fault == "dk of one head of the group" else dk.sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.sum(2).to(v.dtype)


@_bwd.register_fake
def _(dout, dlse, q, k, v, out, lse, scale, left, right, keys, fault):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx, dout, dlse):
    saved = ctx.saved_tensors
    dout = torch.zeros_like(saved[3]) if dout is None else dout
    return *_bwd(dout, dlse, *saved, *ctx.options), *(None,) * 5


_fwd.register_autograd(_backward, setup_context=_save)


def attention(
    q, k, v, *, causal=False, scale=None, num_context=None, window=None, return_lse=False, fault=""
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The public op's signature and checks, and a fault."""
    if fault != "no checks":
        check(q, k, v)
    left, right = (-1, -1) if window is None else window
    right = 0 if causal and fault != "not causal" else right
    keys = k.shape[2] if num_context is None or fault == "context ignored" else num_context
    scale = 1 / math.sqrt(q.shape[3]) if scale is None or fault == "scale ignored" else scale
    out, lse = _fwd(q, k, v, scale, left, right, keys, fault)
    return (out, lse) if return_lse else out


def check(q, k, v) -> None:
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
