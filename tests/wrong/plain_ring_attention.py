"""Ring attention over ranks that are simulated in one process, in PyTorch and fp64, that is right unless it is told
which fault to have. What each rank computes is the kernel's own schedule; transfers are views of others' blocks.

Every fault is one line that says `fault == "..."`; "" is the control.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch

from kernels.ring_attention.layout import assemble, cut, even_lengths
from kernels.ring_attention.schedule import Call, Problem, block_calls, schedule

from .plain_attention import check

WORLD = 3


def _problem(q: torch.Tensor, k: torch.Tensor, causal: bool, layout: str) -> Problem:
    return Problem(layout, causal, *(even_lengths(x.shape[2], WORLD, layout) for x in (q, k)))


def _blocks(x: torch.Tensor, layout: str) -> list[torch.Tensor]:
    """The rows of each rank, in fp64."""
    return [cut(x.double(), 2, rank, WORLD, layout) for rank in range(WORLD)]


def _whole(blocks: list[torch.Tensor], layout: str, fault: str) -> torch.Tensor:
    return torch.cat(blocks, 2) if fault == "ranks one behind the other" else assemble(blocks, 2, layout)


def _calls(problem: Problem, rank: int, fault: str) -> Iterator[tuple[int, Call]]:
    """The owner of the keys, and the call, step after step."""
    for s, step in enumerate(schedule(problem, rank, "keys")):
        if fault == "last block skipped" and s == WORLD - 1:
            continue
        owner = (step.partner + 1) % WORLD if fault == "block of the wrong owner" and s == 1 else step.partner
        calls = block_calls(problem, rank, owner) if owner != step.partner else step.calls
        for call in calls:
            if fault == "block of the wrong owner" and s == 1:
                yield step.partner, _within(call, problem.k_lengths[step.partner])
            elif fault == "offset of the keys off by one" and s and call.causal:
                yield owner, dataclasses.replace(call, k_offset=call.k_offset - 1)
            elif fault == "second half of the keys dropped" and s and call.k[1] - call.k[0] > 1:
                yield owner, dataclasses.replace(call, k=(call.k[0], sum(call.k) // 2))
            elif fault == "mask by local positions" and problem.causal:
                yield owner, dataclasses.replace(call, q_offset=call.q[0], k_offset=call.k[0], causal=True)
            elif fault == "no mask" and call.causal:
                yield owner, dataclasses.replace(call, causal=False)
            else:
                yield owner, call


def _within(call: Call, keys: int) -> Call:
    return dataclasses.replace(call, k=(min(call.k[0], keys), min(call.k[1], keys)))


def _scores(call: Call, q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    s = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    if not call.causal:
        return s
    query = torch.arange(s.shape[2], device=s.device)[:, None] + call.q_offset
    return s.masked_fill(torch.arange(s.shape[3], device=s.device) + call.k_offset > query, -math.inf)


def _merge(out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor, fault: str) -> None:
    """In place. A row without keys has the lse −inf."""
    both = torch.logaddexp(lse, more_lse)
    safe = torch.where(both == -math.inf, 0.0, both)[..., None]
    before = torch.exp(lse[..., None] - safe)
    before = torch.ones_like(before) if fault == "output not rescaled" else before
    out.copy_(out * before + more * torch.exp(more_lse[..., None] - safe))
    if fault == "output rounded to fp16 at each step":
        out.copy_(out.half())
    lse.copy_(torch.maximum(lse, more_lse) if fault == "lse of the larger block" else both)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, layout: str, fault: str
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs and lse of each rank."""
    problem = _problem(q, k, causal, layout)
    qs, ks, vs = (_blocks(x, layout) for x in (q, k, v))
    outs = [torch.zeros_like(x) for x in qs]
    lses = [torch.full(x.shape[:3], -math.inf, dtype=x.dtype, device=x.device) for x in qs]
    for rank in range(WORLD):
        for owner, call in _calls(problem, rank, fault):
            rows, keys = slice(*call.q), slice(*call.k)
            s = _scores(call, qs[rank][:, :, rows], ks[owner][:, :, keys], scale)
            if not s.shape[3]:
                continue
            peak = s.amax(-1, keepdim=True)
            peak = torch.where(peak == -math.inf, 0.0, peak)
            total = (s - peak).exp().sum(-1, keepdim=True)
            values = vs[owner][:, :, keys].repeat_interleave(q.shape[1] // v.shape[1], 1)
            more = (s - peak).exp() @ values / torch.where(total == 0, 1.0, total)
            _merge(outs[rank][:, :, rows], lses[rank][:, :, rows], more, (peak + total.log())[..., 0], fault)
    return outs, lses


@torch.library.custom_op("plain_ring_attention::fwd", mutates_args=())
def _fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, layout: str, fault: str
) -> tuple[torch.Tensor, torch.Tensor]:
    outs, lses = _forward(q, k, v, causal, scale, layout, fault)
    return _whole(outs, layout, fault).to(q.dtype), _whole(lses, layout, fault).float()


@_fwd.register_fake
def _(q, k, v, causal, scale, layout, fault):
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("plain_ring_attention::bwd", mutates_args=())
def _bwd(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    layout: str,
    fault: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    problem = _problem(q, k, causal, layout)
    outs, lses = _forward(q, k, v, causal, scale, layout, "")
    qs, ks, vs, douts = (_blocks(x, layout) for x in (q, k, v, dout))
    dlses = None if dlse is None else _blocks(dlse, layout)
    dq, dk, dv = ([torch.zeros_like(x) for x in blocks] for blocks in (qs, ks, vs))
    for rank in range(WORLD):
        delta = (douts[rank] * outs[rank]).sum(-1)
        if dlses is not None and fault != "gradient of lse dropped":
            delta = delta - dlses[rank]
        for owner, call in _calls(problem, rank, ""):
            rows, keys = slice(*call.q), slice(*call.k)
            s = _scores(call, qs[rank][:, :, rows], ks[owner][:, :, keys], scale)
            lse = s.logsumexp(-1) if fault == "lse of one block in the backward" else lses[rank][:, :, rows]
            p = (s - torch.where(lse == -math.inf, math.inf, lse)[..., None]).exp()
            group = q.shape[1] // k.shape[1]
            wide_k, wide_v = (x[owner][:, :, keys].repeat_interleave(group, 1) for x in (ks, vs))
            do = douts[rank][:, :, rows]
            ds = p * (do @ wide_v.mT - delta[:, :, rows, None]) * scale
            dq[rank][:, :, rows] += ds @ wide_k
            if fault == "gradients of another rank's block dropped" and owner != rank:
                continue
            to = (owner + 1) % WORLD if fault == "gradients handed to the wrong owner" else owner
            for sums, share in ((dk, ds.mT @ qs[rank][:, :, rows]), (dv, p.mT @ do)):
                share = share.unflatten(1, (k.shape[1], group)).sum(2)
                room = sums[to][:, :, keys]
                room += share[:, :, : room.shape[2]]
                if fault == "gradients rounded to fp16 at each step":
                    room.copy_(room.half())
    if fault == "gradients of the first rank twice":
        dk[0] *= 2
    return tuple(_whole(blocks, layout, "").to(q.dtype) for blocks in (dq, dk, dv))


@_bwd.register_fake
def _(dout, dlse, q, k, v, causal, scale, layout, fault):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v)


def _backward(ctx, dout, dlse):
    q, k, v = ctx.saved_tensors
    dout = torch.zeros_like(q) if dout is None else dout
    return *_bwd(dout, dlse, q, k, v, *ctx.options), *(None,) * 4


_fwd.register_autograd(_backward, setup_context=_save)


def ring_attention(
    q, k, v, *, causal=False, scale=None, layout="zigzag", rotate="auto", return_lse=False, fault=""
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The public op's signature and checks, and a fault, over WORLD ranks."""
    if fault != "no checks":
        check(q, k, v)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    out, lse = _fwd(q, k, v, causal, scale, layout, fault)
    return (out, lse) if return_lse else out
