"""Launch plans of rope: everything in a call that does not depend on the tensors' values and addresses."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import triton

from . import configs
from .kernel import _rope_kernel
from .launch import Launch

Optional = torch.Tensor | None
Plan = Callable[[torch.Tensor, Optional, torch.Tensor, torch.Tensor, Optional], tuple[torch.Tensor, Optional]]
Strides = tuple[int, ...]


def rope_plan(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    interleaved: bool,
    half: int,
    layout: str,
    inplace: bool,
    inverse: bool,
) -> Plan:
    """Returns a function of (q, k, cos, sin, position_ids), for all tensors with these signatures. It returns q and k
    rotated by the angle or, with `inverse`, by its negative: q and k themselves if `inplace`, otherwise new tensors of
    the same shape and layout. With k=None its result is None. `half` is R / 2. `op` has checked the inputs."""
    device, dtype = q.device, q.dtype
    table_step = slice(None) if cos.shape[-1] == half else _half_of_table(half, interleaved)
    # In a table of width R each value is stored twice. The first copies are a view that differs only in its strides.
    cos_half, sin_half = cos[..., table_step], sin[..., table_step]
    tables_copied = cos_half.stride() != sin_half.stride()
    if tables_copied:
        cos_half = cos_half.contiguous()
    q_new = None if inplace else _new(q, layout)
    k_new = None if inplace or k is None else _new(k, layout)
    launch = _launch(q, k, q_new, k_new, cos_half, position_ids, interleaved, layout, inverse)

    def run(
        q: torch.Tensor, k: Optional, cos: torch.Tensor, sin: torch.Tensor, position_ids: Optional
    ) -> tuple[torch.Tensor, Optional]:
        q_out, k_out = q, k
        if q_new is not None:
            q_out = torch.empty_strided(*q_new, dtype=dtype, device=device)
            if k_new is not None:
                k_out = torch.empty_strided(*k_new, dtype=dtype, device=device)
        if launch is not None:
            if tables_copied:
                cos, sin = cos[..., table_step].contiguous(), sin[..., table_step].contiguous()
            launch(q, q_out, k, k_out, cos, sin, position_ids)
        return q_out, k_out

    return run


def _launch(
    q: torch.Tensor,
    k: torch.Tensor | None,
    q_new: tuple[torch.Size, Strides] | None,
    k_new: tuple[torch.Size, Strides] | None,
    table: torch.Tensor,
    position_ids: torch.Tensor | None,
    interleaved: bool,
    layout: str,
    inverse: bool,
) -> Launch | None:
    """The launch, a function of (q, q_out, k, k_out, cos, sin, position_ids), or None where q and k have no elements.
    `table`, [P, R / 2] or [B, S, R / 2], has the strides of cos and sin. q_new and k_new are shape and strides of the
    results, or None with inplace."""
    batch, seq, heads, dim = _bshd(q, layout, q.shape, fill=1)
    k_heads = 0 if k is None else _bshd(k, layout, k.shape, fill=1)[2]
    if not batch * seq * dim * (heads + k_heads):
        return None
    half, inplace = table.shape[-1], q_new is None
    q_strides = _bshd(q, layout, q.stride())
    k_strides = None if k is None else _bshd(k, layout, k.stride())
    q_out_strides = q_strides if q_new is None else _bshd(q, layout, q_new[1])
    k_out_strides = k_strides if k is None or k_new is None else _bshd(k, layout, k_new[1])
    # Triton specialises only for multiples of 16. Strides with a head dimension of 40 or 72 need not be such.
    strides = (q_strides, q_out_strides, k_strides or (), k_out_strides or (), table.stride())
    align = math.gcd(8, *(n for each in strides for n in each[:-1]))
    rest = 0 if inplace else dim - 2 * half  # in place, columns that are not rotated need no copy
    heads_outer = (q_strides[2] > q_strides[1], k_strides is not None and k_strides[2] > k_strides[1])
    # The interpreter has no device; sm_80 is assumed.
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (8, 0)
    config = configs.pick_config(batch, seq, (heads, k_heads), heads_outer, (2 * half, rest), q.dtype, capability)
    # A group of tiles has as many tokens as a tile of q or of k, whichever has more.
    tokens = config.rows // (config.q_heads if k is None else min(config.q_heads, config.k_heads))
    padded = sum(-(-n // block) * block for n, block in ((heads, config.q_heads), (k_heads, config.k_heads)))
    tiles = padded * tokens // config.rows
    return Launch(
        _rope_kernel,
        (tiles * batch * triton.cdiv(seq, tokens),),
        q.device,
        (
            q_strides,
            q_out_strides,
            k_strides,
            k_out_strides,
            _with_batch(table, 3),
            None if position_ids is None else _with_batch(position_ids, 2),
            -1.0 if inverse else 1.0,
            seq,
            table.shape[-2],
            heads,
            k_heads,
        ),
        HAS_K=k is not None,
        HAS_POSITION=position_ids is not None,
        INTERLEAVED=interleaved,
        HALF=half,
        REST=rest,
        EVEN_Q=seq % tokens == 0 and heads % config.q_heads == 0,
        EVEN_K=seq % tokens == 0 and k_heads % config.k_heads == 0,
        ROWS=config.rows,
        BLOCK_HQ=config.q_heads,
        BLOCK_HK=config.k_heads,
        ALIGN=align,
        EVICTION=config.eviction,
        num_warps=config.num_warps,
    )


def _half_of_table(half: int, interleaved: bool) -> slice:
    """The columns that hold each value once, in a table of width R that stores each value twice."""
    return slice(0, 2 * half, 2) if interleaved else slice(0, half)


def _bshd(x: torch.Tensor, layout: str, sizes: Strides, fill: int = 0) -> Strides:
    """`sizes` (shape or strides of x) in the order [B, S, heads, D]; `fill` for B where x has no batch dimension."""
    sizes = tuple(sizes) if x.dim() == 4 else (fill, *sizes)
    return sizes if layout == "bshd" else (sizes[0], sizes[2], sizes[1], sizes[3])


def _new(x: torch.Tensor, layout: str) -> tuple[torch.Size, Strides]:
    """Shape and strides of a dense tensor like x, with heads and tokens in the memory order of x."""
    strides = _bshd(x, layout, x.stride())
    outer, inner = (-2, -3) if layout == "bshd" else (-3, -2)  # heads and tokens
    if strides[2] <= strides[1]:
        outer, inner = inner, outer
    count = [max(1, n) for n in x.shape]
    new = [count[-3] * count[-2] * count[-1]] * x.dim()
    new[-1], new[inner], new[outer] = 1, count[-1], count[inner] * count[-1]
    return x.shape, tuple(new)


def _with_batch(tensor: torch.Tensor, dims: int) -> Strides:
    """The strides of a tensor, with 0 for a batch dimension that is missing or of size 1."""
    strides = tensor.stride()
    if tensor.dim() < dims:
        return (0, *strides)
    return (0, *strides[1:]) if tensor.shape[0] == 1 else strides
