"""Tests on all GPUs of this host, two or more, for properties that processes on the CPU cannot show: dtypes, head
dimensions, NCCL, and PyTorch's context parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from harness.spec import Case

from ..attention import attention
from . import bench, context_parallel, peers, release, ring_attention
from .layout import cut, positions
from .test_world import spread

pytestmark = [
    pytest.mark.gpu(min_capability=(9, 0)),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

WORLD = max(2, torch.cuda.device_count())
LENGTH, SAMPLED = 65536 // (2 * WORLD) * 2 * WORLD, 48


def _small(dim: int, dtype: torch.dtype, **params: Any) -> Case:
    """Returns a case. `check_shard` reduces it to some 768 rows."""
    dims = dict(batch=1, kv_heads=2, group=2, queries=LENGTH, keys=LENGTH, dim=dim)
    words = (f"d{dim}", str(dtype).removeprefix("torch."), *(f"{name}={value}" for name, value in params.items()))
    return Case("-".join(words), dims, dtype, params, world_size=WORLD)


CASES = [
    _small(dim, dtype, causal=causal, layout=layout, rotate=rotate)
    for dim, dtype, causal, layout, rotate in (
        (64, torch.float16, True, "zigzag", "keys"),
        (128, torch.float16, True, "striped", "keys"),
        (128, torch.float16, False, "contiguous", "queries"),
        (128, torch.bfloat16, True, "contiguous", "keys"),
        (64, torch.bfloat16, True, "striped", "gather"),
        (256, torch.bfloat16, True, "zigzag", "keys"),
        (256, torch.float16, False, "contiguous", "gather"),
        (80, torch.bfloat16, True, "zigzag", "queries"),
    )
]


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _in_deterministic_mode(q, k, v, **options):
    return peers.run_within(_deterministic, partial(ring_attention, **options), q, k, v)


def _checked(rank: int, world: int, case: Case) -> str | None:
    found = bench.check_shard(ring_attention, case, "bwd", f"cuda:{rank}")
    release()
    return found


def _deterministically(rank: int, world: int) -> str | None:
    case = _small(128, torch.bfloat16, causal=True)
    found = bench.check_shard(_in_deterministic_mode, case, "bwd", f"cuda:{rank}") or _repeats(f"cuda:{rank}")
    release()
    return found


def _within_a_context(rank: int, world: int) -> str | None:
    def of_a_model(q, k, v, causal=False, **_):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    within = context_parallel(of_a_model, dist.group.WORLD)
    found = bench.check_shard(within, _small(128, torch.bfloat16, causal=True), "bwd", f"cuda:{rank}")
    release()
    return found


def _repeats(device: str) -> str | None:
    """Returns why the gradients are not bitwise equal in deterministic mode, or None."""
    shape = (1, 4, 2048, 128)
    q, k, v, dout = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4))
    runs = []
    for _ in range(3):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = _in_deterministic_mode(*leaves, causal=True)
        runs.append((out, *torch.autograd.grad(out, leaves, dout)))
    same = all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))
    return None if same else "runs differ"


def _long(rank: int, world: int) -> str | None:
    """Compares some rows of out and dq with fp64; the error may be 1.5 times that of the one-GPU kernel on the same
    rows. Compares all rows of dk and dv with the one-GPU kernel, from which they may differ by some roundings."""
    device = f"cuda:{rank}"
    generator = torch.Generator(device).manual_seed(3)
    shapes = [(1, heads, LENGTH, 128) for heads in (8, 2, 2, 8)]
    q, k, v, dout = (torch.randn(s, device=device, dtype=torch.bfloat16, generator=generator) for s in shapes)

    def results(attend: Any, tensors: list[torch.Tensor], dout: torch.Tensor) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = attend(*leaves, causal=True)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    mine = partial(cut, dim=2, rank=rank, world=world, layout="zigzag")
    rows = torch.linspace(0, LENGTH // world - 1, SAMPLED, device=device).long()
    place = positions(LENGTH // world, rank, world, "zigzag").to(device)[rows]
    *found, dk, dv = results(ring_attention, [mine(x) for x in (q, k, v)], mine(dout))
    *alone, dk_alone, dv_alone = results(attention, [q, k, v], dout)
    for name, ours, one in (("dk", dk, mine(dk_alone)), ("dv", dv, mine(dv_alone))):
        error, size = (float(x.double().square().mean().sqrt()) for x in (ours - one, one))
        if not error <= 4 * 2**-9 * size:
            return f"rank {rank}: {name} differs from that of one GPU by {error:.3g}, of {size:.3g}"
    found, alone = [x[:, :, rows] for x in found], [x[:, :, place] for x in alone]

    wide_k, wide_v = (x.double().repeat_interleave(4, 1) for x in (k, v))
    scale = 128**-0.5
    s = q[:, :, place].double() @ wide_k.mT * scale
    p = s.masked_fill(torch.arange(LENGTH, device=device) > place[:, None], -torch.inf).softmax(3)
    out, do = p @ wide_v, dout[:, :, place].double()
    dp = do @ wide_v.mT
    exact = [out, p * (dp - (do * out).sum(3, keepdim=True)) @ wide_k * scale]
    for name, ours, one, right in zip(("out", "dq"), found, alone, exact, strict=True):
        error, allowed = (float((x.double() - right).square().mean().sqrt()) for x in (ours, one))
        if not error <= 1.5 * allowed + 2**-9 * float(right.square().mean().sqrt()):
            return f"rank {rank}: {name} is off by {error:.3g}, on one GPU by {allowed:.3g}"
    return None


def right(run: Callable[..., Any], folder: Path, *arguments: Any) -> None:
    """On every rank. Each is a test of its own, which -n distributes, as a first call compiles for half a minute."""
    assert not any(spread(WORLD, run, folder, *arguments, backend="nccl"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_dtypes_widths_and_layouts(case: Case, tmp_path: Path) -> None:
    right(_checked, tmp_path, case)


def test_the_deterministic_mode(tmp_path: Path) -> None:
    right(_deterministically, tmp_path)


def test_attention_of_a_model_within_a_context(tmp_path: Path) -> None:
    right(_within_a_context, tmp_path)


def test_a_long_sequence(tmp_path: Path) -> None:
    right(_long, tmp_path)


def _torchs(rank: int, world: int) -> dict[str, Any]:
    """Runs PyTorch's context parallelism with several backends in turn: state left by one would show in the next."""
    device, found = f"cuda:{rank}", {}
    for mask in (True, False):
        case = _small(128, torch.bfloat16, causal=mask)
        for name, (backend, rotate) in (
            ("ridgeline", ("ridgeline", "allgather")),
            ("flash", ("flash", "alltoall")),
            ("ridgeline again", ("ridgeline", "alltoall")),
            ("cudnn", ("cudnn", "allgather")),
        ):
            attend = peers.context_parallel(backend, rotate)
            found[f"{name} {mask}"] = bench.check_shard(attend, case, "bwd", device)
            if torch.nn.attention.current_flash_attention_impl() is not None:
                found[f"{name} {mask} after"] = "left its flash attention behind"
    return found


@pytest.mark.skipif(not hasattr(torch.nn.attention, "activate_flash_attention_impl"), reason="no such registry")
def test_torchs_context_parallel_on_our_kernels_and_on_its_own(tmp_path: Path) -> None:
    for found in spread(WORLD, _torchs, tmp_path, backend="nccl"):
        assert {name: reason for name, reason in found.items() if reason} == {}
