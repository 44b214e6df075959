"""The forward on one rank: out and lse of its own queries over the keys of all ranks."""

from __future__ import annotations

import torch

from .blocks import Fetched, Handed, Ring, fp32, like
from .chains import Cut
from .compute import attend, merge
from .gather import gather
from .rows import rows_like
from .schedule import gathered_calls, schedule, shifted


def ring_forward(ring: Ring, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out, like q, and lse [B, Hq, Sq], fp32."""
    if ring.rotate == "queries":
        return _queries(ring, q, k, v)
    result = rows_like(q)
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    lse = _no_key(q)
    if ring.rotate == "gather":
        keys, values, transport = gather(ring, k, v)
        for call in gathered_calls(ring.problem, ring.rank):
            attend(call, q, keys, values, out, lse, ring.scale, result)
        transport.close()
        return result, lse
    steps = schedule(ring.problem, ring.rank, "keys", results=True)
    transport = ring.transport(q.device, [], like((k, v), max(ring.problem.k_lengths)))
    chains = ring.chains(q, k)
    fetched = Fetched(transport, steps, (k, v), chains)
    for s, step in enumerate(steps):
        block = fetched.take(s)

        def work(cut: Cut, step=step, block=block, start=step.rows[0] if s else 0) -> None:
            mine, keys, values, sums, lines, last = map(cut, (q, *block, out, lse, result))
            for call in step.calls:
                first = start if call.k[0] < call.k[1] else 0
                attend(shifted(call, k=first), mine, keys, values, sums, lines, ring.scale, last)

        chains.run(work)
    chains.join()
    transport.close()
    return result, lse


def _queries(ring: Ring, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each rank computes outputs over its own keys for the queries of all ranks. The owners of the queries merge them
    step by step."""
    batch, heads, _, dim = q.shape
    out, lse = torch.zeros(q.shape, dtype=torch.float32, device=q.device), _no_key(q)

    def shapes(rows: int) -> list[tuple[int, ...]]:
        return [(batch, heads, rows, dim), (batch, heads, rows)]

    steps = schedule(ring.problem, ring.rank, "queries")
    most = max(ring.problem.q_lengths)
    transport = ring.transport(q.device, fp32(shapes(most)), like((q,), most))
    fetched = Fetched(transport, steps, (q,))
    handed = Handed(transport, steps, shapes, q.device)

    def collect() -> None:
        if found := handed.collect():
            (first, last), (more, more_lse) = found
            merge(out[:, :, first:last], lse[:, :, first:last], more, more_lse)

    for s, step in enumerate(steps):
        (queries,) = fetched.take(s)
        if s == 0:
            part, part_lse, given = out, lse, []
        else:
            given = handed.staging(s)
            part, part_lse = given[0].zero_(), given[1].fill_(-torch.inf)
        first = step.rows[0] if s else 0
        for call in step.calls:
            attend(shifted(call, q=first), queries, k, v, part, part_lse, ring.scale)
        collect()
        if s:
            handed.hand(s, given)
    collect()
    transport.close()
    return torch.empty_like(q).copy_(out), lse


def _no_key(q: torch.Tensor) -> torch.Tensor:
    return torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
