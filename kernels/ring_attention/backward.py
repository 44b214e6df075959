"""The backward on one rank: gradients of its own queries, keys and values, from the global log-sum-exp.

All sums over ranks are fp32. A rank sends the gradients that it computes for the block of another rank to the owner.
The owner adds these contributions in the order of the steps, so the order is the same in each run. Where keys move, the
work on the own block is split into two halves: the first fetch is overlapped with the first half, and the last transfer
of gradients with the second.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .blocks import Fetched, Handed, Ring, fp32, like
from .chains import Cut
from .compute import attend_backward, attention_delta, zero
from .gather import gather, scatter
from .rows import rows_like
from .schedule import schedule
from .sums import Sums, of_all, of_keys, of_queries

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def ring_backward(
    ring: Ring,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> Gradients:
    """Returns dq, dk and dv in the dtype of q."""
    dout = dout if dout.stride(3) == 1 else dout.contiguous()  # copied once here, not at each step
    delta = attention_delta(dout, out, None if dlse is None else dlse.contiguous())
    run = {"keys": _keys, "queries": _queries, "gather": _gathered}[ring.rotate]
    return run(ring, dout, q, k, v, lse, delta)


def _keys(ring: Ring, dout, q, k, v, lse, delta) -> Gradients:
    """Keys and values are fetched again; their gradients are sent to their owners."""
    steps = schedule(ring.problem, ring.rank, "keys")

    def shapes(rows: int) -> list[tuple[int, ...]]:
        return [(*k.shape[:2], rows, k.shape[3])] * 2

    most = max(ring.problem.k_lengths)
    transport = ring.transport(q.device, fp32(shapes(most)), like((k, v), most))
    plan, handed = of_keys(ring.problem, ring.rank), Handed(transport, steps, shapes, q.device)
    dq, result, mine = _empty(q), rows_like(q), [_empty(k), _empty(v)]
    chains = ring.chains(q, k)  # after all allocations, which belong to this stream
    fetched = Fetched(transport, steps, (k, v), chains)

    def add(s: int, block: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
        def work(cut: Cut) -> None:
            parts = [cut(t) for t in (dout, q, *block, lse, delta, dq, *given)]
            for call, of_q, of_k in plan.stages[s]:
                attend_backward(call, *parts, scale=ring.scale, of_q=of_q, of_k=of_k, result=cut(result))
            zero(plan.gaps[s], *parts[-2:])

        chains.run(work)

    def collect(like: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        if handed.pending is None and like is None:
            return []
        chains.join()
        results = _collect(handed, mine, like)
        chains.fork()
        return results

    for s in range(len(steps)):
        block = fetched.take(s)
        given = handed.staging(s) if s else mine
        add(s, block, given)
        collect()
        if s:
            chains.precede(transport)
            handed.hand(s, given)
    add(len(steps), (k, v), mine)
    dk, dv = collect((k, v))
    transport.close()
    return _rounded(dq, result, plan), dk, dv


def _queries(ring: Ring, dout, q, k, v, lse, delta) -> Gradients:
    """Queries are sent to all keys, with dout, lse and delta; their gradients are sent back. Queries are few here, and
    each call reads and writes the gradients of all keys: so the own block is not split into halves."""
    steps = schedule(ring.problem, ring.rank, "queries")
    own = q, dout, lse, delta

    def shapes(rows: int) -> list[tuple[int, ...]]:
        return [(*q.shape[:2], rows, q.shape[3])]

    most = max(ring.problem.q_lengths)
    transport = ring.transport(q.device, fp32(shapes(most)), like(own, most))
    fetched, handed = Fetched(transport, steps, own), Handed(transport, steps, shapes, q.device)
    plan = of_queries(ring.problem, ring.rank)
    mine, dk, dv = [_empty(q)], _empty(k), _empty(v)

    for s, stage in enumerate(plan.stages):
        queries, incoming, their_lse, their_delta = fetched.take(s)
        given = handed.staging(s) if s else mine
        for call, of_q, of_k in stage:
            parts = incoming, queries, k, v, their_lse, their_delta, given[0], dk, dv
            attend_backward(call, *parts, scale=ring.scale, of_q=of_q, of_k=of_k)
        zero(plan.gaps[s], *given)
        _collect(handed, mine)
        if s:
            handed.hand(s, given)
    (dq,) = _collect(handed, mine, (q,))
    zero(plan.unseen, dk, dv)
    transport.close()
    return dq, torch.empty_like(k).copy_(dk), torch.empty_like(v).copy_(dv)


def _gathered(ring: Ring, dout, q, k, v, lse, delta) -> Gradients:
    """All keys and values are gathered again; their owners sum the gradients of all ranks."""
    keys, values, transport = gather(ring, k, v, gradients=True)
    plan = of_all(ring.problem, ring.rank)
    dq, result, whole = _empty(q), rows_like(q), [_empty(keys), _empty(values)]
    parts = dout, q, keys, values, lse, delta, dq, *whole
    for call, of_q, of_k in plan.stages[0]:
        attend_backward(call, *parts, scale=ring.scale, of_q=of_q, of_k=of_k, result=result)
    zero(plan.gaps[0], *whole)
    found = scatter(ring, transport, *whole)
    transport.close()
    results = [torch.empty_like(t).copy_(g) for t, g in zip((k, v), found, strict=True)]
    return _rounded(dq, result, plan), results[0], results[1]


def _rounded(dq: torch.Tensor, result: torch.Tensor, plan: Sums) -> torch.Tensor:
    """Returns `result`, after writing the rows that no final call has written."""
    zero(plan.unseen, dq)
    for first, last in plan.rest:
        result[:, :, first:last] = dq[:, :, first:last]
    return result


def _collect(
    handed: Handed, mine: Sequence[torch.Tensor], like: Sequence[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Adds the contributions sent to this rank. With `like`, the last time: returns the sums, rounded to its dtypes."""
    found = handed.collect()
    if found:
        (first, last), more = found
        if like is not None and last - first == mine[0].shape[2]:
            return [torch.add(a, b, out=torch.empty_like(t)) for t, a, b in zip(like, mine, more, strict=True)]
        for sums, contribution in zip(mine, more, strict=True):
            sums[:, :, first:last].add_(contribution)
    return [torch.empty_like(t).copy_(sums) for t, sums in zip(like or (), mine, strict=False)]


def _empty(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=torch.float32, device=x.device)
