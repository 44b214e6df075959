"""Runs ring attention on a few gloo processes: shared code, no tests. The tests are in the other files."""

from __future__ import annotations

import math
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from . import backward, compute
from .layout import assemble, positions
from .op import ring_attention
from .reference import ring_attention_reference

SECONDS = 240


@dataclass(frozen=True)
class Run:
    """One call on all ranks, with its backward. `kernels`: by the interpreted kernels, else by `plain`."""

    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    heads: tuple[int, int] = (2, 1)
    batch: int = 2
    dim: int = 8
    dtype: torch.dtype = torch.float32
    kernels: bool = False
    told: bool = True

    @property
    def layout(self) -> str:
        return self.options.get("layout", "zigzag")

    def whole(self, dtype: torch.dtype | None = None, device: str = "cpu") -> list[torch.Tensor]:
        """Returns q, k, v, dout and dlse of the whole sequence."""
        generator = torch.Generator().manual_seed(7)
        shapes = [
            (self.batch, heads, sum(lengths), self.dim)
            for heads, lengths in ((self.heads[0], self.q_lengths), *[(self.heads[1], self.k_lengths)] * 2)
        ]
        tensors = [torch.randn(shape, generator=generator) for shape in (*shapes, shapes[0], shapes[0][:3])]
        return [t.to(self.dtype).to(dtype or self.dtype).to(device) for t in tensors]

    def expected(self, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
        """Returns the results of one process, in fp64 unless another dtype is given."""
        q, k, v, dout, dlse = self.whole(dtype)
        inputs = [t.requires_grad_() for t in (q, k, v)]
        options = {name: value for name, value in self.options.items() if name in ("causal", "scale")}
        out, lse = ring_attention_reference(*inputs, return_lse=True, **options)
        both = self.options.get("return_lse")
        grads = torch.autograd.grad((out, lse)[: 1 + bool(both)], inputs, (dout, dlse)[: 1 + bool(both)])
        return dict(zip(("out", "dq", "dk", "dv", "lse"), (out.detach(), *grads, lse.detach()), strict=True))

    def eager(self) -> dict[str, torch.Tensor]:
        """Returns the results of one process in the dtype of the run, whose error is the yardstick for others."""
        return self.expected(self.dtype)

    def assembled(self, ranks: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Returns the whole results, assembled from those of the ranks."""
        return {name: assemble([found[name] for found in ranks], 2, self.layout) for name in ranks[0]}


def call(run: Run, rank: int, world: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Returns this rank's results."""

    def mine(x: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
        rows = positions(lengths[rank], rank, world, run.layout, lengths)
        return x.index_select(2, rows).to(device)

    whole, lengths = run.whole(), (run.q_lengths, *[run.k_lengths] * 2, *[run.q_lengths] * 2)
    *inputs, dout, dlse = [mine(x, n) for x, n in zip(whole, lengths, strict=True)]
    inputs = [x.requires_grad_() for x in inputs]
    told = dict(q_lengths=run.q_lengths, k_lengths=run.k_lengths) if run.told else {}
    found = ring_attention(*inputs, **run.options, **told)
    results = found if isinstance(found, tuple) else (found,)
    grads = torch.autograd.grad(results, inputs, (dout, dlse)[: len(results)])
    names = ("out", "dq", "dk", "dv", "lse")
    return {n: t.detach().cpu() for n, t in zip(names, (results[0], *grads, *results[1:]), strict=False)}


def spread(world: int, work: Callable[..., Any], folder: Path, *arguments: Any, backend: str = "gloo") -> list[Any]:
    """Returns the results of `work(rank, world, *arguments)` on each of `world` new processes of one group."""
    context = mp.spawn(_process, (world, str(folder), backend, work, arguments), world, join=False)
    assert context is not None
    end = time.monotonic() + SECONDS
    while not context.join(timeout=1):
        if time.monotonic() > end:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"{world} ranks were not done after {SECONDS} s")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _process(rank: int, world: int, folder: str, backend: str, work: Callable, arguments: tuple) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        torch.cuda.set_device(rank)
    try:
        dist.init_process_group(backend, f"file://{folder}/store", rank=rank, world_size=world)
        torch.save(work(rank, world, *arguments), Path(folder, f"{rank}.pt"))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        raise


def call_all(rank: int, world: int, runs: dict[str, Run]) -> dict[str, dict[str, torch.Tensor]]:
    """Returns the results of all runs, by name."""
    kernels = compute.attention_partial, compute.attention_partial_backward, backward.attention_delta
    found = {}
    for name, run in runs.items():
        chosen = kernels if run.kernels else (partial, partial_backward, delta)
        compute.attention_partial, compute.attention_partial_backward, backward.attention_delta = chosen
        found[name] = call(run, rank, world)
    return found


def _scores(q, k, causal, scale, q_offset, k_offset):
    scores = q.float() @ k.float().repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    scores = scores * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    if causal:
        query, key = torch.arange(q.shape[2])[:, None] + q_offset, torch.arange(k.shape[2]) + k_offset
        scores = scores.masked_fill(key > query, -math.inf)
    return scores


def partial(q, k, v, out, lse, *, causal=False, scale=None, q_offset=0, k_offset=0, result=None) -> None:
    """`attention_partial` in PyTorch, many times faster than the interpreter, with strict checks of its arguments."""
    assert out.dtype == lse.dtype == torch.float32 and lse.stride(2) == out.stride(3) == 1
    assert out.shape == q.shape and (result is None or (result.shape, result.dtype) == (q.shape, q.dtype))
    assert result is None or not result.numel() or result.stride(3) == 1
    keys = torch.cat([torch.full((*lse.shape, 1), -math.inf), _scores(q, k, causal, scale, q_offset, k_offset)], 3)
    keys[..., 0] = lse
    new = keys.logsumexp(3)
    p = (keys - torch.where(new == -math.inf, 0, new)[..., None]).exp()
    seen = torch.where((lse == -math.inf)[..., None], 0, out)
    values = v.float().repeat_interleave(q.shape[1] // v.shape[1], 1)
    both = p[..., :1] * seen + p[..., 1:] @ values
    if q.shape[2] and (k.shape[2] or result is not None):
        (out if result is None else result).copy_(both)
    lse.copy_(new)


def delta(dout, out, dlse=None) -> torch.Tensor:
    """`attention_delta` in PyTorch."""
    assert dout.stride(3) == 1 and (dlse is None or dlse.is_contiguous())
    found = (dout.float() * out.float()).sum(3)
    return found if dlse is None else found - dlse


def partial_backward(
    dout, q, k, v, out, lse, dq, dk, dv, *, delta=None, causal=False, scale=None, q_offset=0, k_offset=0,
    add_dq=True, add_dkdv=True, result=None,
) -> None:  # fmt: skip
    """`attention_partial_backward` in PyTorch. Undefined outputs are set to NaN."""
    assert all(t is None or t.dtype == torch.float32 for t in (dq, dk, dv, delta))
    assert all(t.stride(2) == 1 or t.is_contiguous() for t in (lse, delta))
    shared = q.shape[1] // k.shape[1]
    wide_k, wide_v = (t.float().repeat_interleave(shared, 1) for t in (k, v))
    p = (
        _scores(q, k, causal, scale, q_offset, k_offset) - torch.where(lse == -math.inf, math.inf, lse)[..., None]
    ).exp()
    ds = p * (dout.float() @ wide_v.mT - delta[..., None]) * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    for gradient, share in ((dk, ds.mT @ q.float()), (dv, p.mT @ dout.float())):
        share = share.unflatten(1, (k.shape[1], shared)).sum(2)
        gradient.copy_(gradient + share if add_dkdv else share)
    dq.copy_(dq + ds @ wide_k if add_dq else ds @ wide_k)
    if result is not None:
        assert not result.numel() or result.stride(3) == 1
        result.copy_(dq)
        dq.fill_(math.nan)
