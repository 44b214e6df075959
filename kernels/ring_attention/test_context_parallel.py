"""`context_parallel` of functions, models and DTensors, under DDP, FSDP2 and checkpointing, on gloo processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..attention import attention
from . import context_parallel, shard
from .test_world import spread

ROWS, DIM, HEADS = 24, 16, 2


class Block(nn.Module):
    def __init__(self, ours: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.ours = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), ours

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if self.ours:
            mixed = attention(q, k, v, causal=True)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, ours: bool = False, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks, self.again = nn.ModuleList([Block(ours), Block(not ours)]), again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x


def _data(batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, ROWS, DIM, generator=torch.Generator().manual_seed(5))


def _loss(out: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns each rank's contribution to the mean over all rows."""
    return out.square().sum() / rows


def _whole(again: bool = False) -> list[torch.Tensor]:
    model, x = Model(again=again), _data()
    _loss(model(x), x.shape[0] * ROWS).backward()
    return [p.grad for p in model.parameters()]


def _summed(model: nn.Module) -> list[torch.Tensor]:
    grads = [p.grad.clone() for p in model.parameters()]
    for grad in grads:
        dist.all_reduce(grad)
    return grads


def _of_a_module(rank: int, world: int, again: bool) -> list[torch.Tensor]:
    model, x = Model(again=again), _data()
    refused = model.blocks[1].register_forward_pre_hook(_refuse)  # before those that enter the mode
    assert context_parallel(model, dist.group.WORLD) is model
    with pytest.raises(LookupError):
        model(shard(x, 1))
    refused.remove()
    _loss(model(shard(x, 1)), x.shape[0] * ROWS).backward()
    grads = _summed(model)
    context_parallel(model, None)
    torch.testing.assert_close(model(x), Model()(x))  # attention covers one rank's rows again
    return grads


def _refuse(module: nn.Module, args: Any) -> None:
    raise LookupError


def _of_a_mesh(rank: int, world: int, kind: str) -> list[torch.Tensor]:
    """Data parallelism and sequence parallelism over two ranks each; DDP or FSDP2 over all four."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model, x = Model(), _data(4)
    context_parallel(model, mesh["cp"])
    mine = shard(x.chunk(2)[mesh["dp"].get_local_rank()], 1, mesh["cp"].get_group())
    if kind == "ddp":
        parallel: Any = DistributedDataParallel(model)
    else:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp", "cp"]._flatten("all"))
        parallel = fully_shard(model, mesh=mesh["all"])
    # DDP and FSDP2 average over the ranks.
    (_loss(parallel(mine), x.shape[0] * ROWS) * world).backward()
    return [getattr(p.grad, "full_tensor", lambda p=p: p.grad)().clone() for p in model.parameters()]


def _data_parallel(rank: int, world: int) -> list[list[torch.Tensor]]:
    return [_of_a_mesh(rank, world, kind) for kind in ("ddp", "fsdp2")]


def test_under_ddp_and_fsdp2(tmp_path):
    model, x = Model(), _data(4)
    _loss(model(x), x.shape[0] * ROWS).backward()
    for kinds in spread(4, _data_parallel, tmp_path):
        for grads in kinds:
            for mine, p in zip(grads, model.parameters(), strict=True):
                torch.testing.assert_close(mine, p.grad, atol=1e-5, rtol=1e-4)


def _of_a_function(rank: int, world: int) -> tuple[torch.Tensor, ...]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh, pair = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (1, world), mesh_dim_names=("cp", "tp"))
    attend = context_parallel(F.scaled_dot_product_attention, mesh, layout="contiguous")
    q, k, v = (shard(t, 2, layout="contiguous").requires_grad_() for t in _qkv())
    out = attend(q, k, v, is_causal=True, enable_gqa=True)
    (dq,) = torch.autograd.grad(out.sum(), q)
    tensors = [DTensor.from_local(t.detach(), mesh, [Shard(2)]) for t in (q, k, v)]
    cut = attend(*tensors, is_causal=True, enable_gqa=True)
    assert isinstance(cut, DTensor) and cut.placements == (Shard(2),)
    torch.testing.assert_close(cut.to_local(), out.detach())
    with pytest.raises(ValueError, match="must have the same placements"):
        whole = [DTensor.from_local(t.detach(), pair, [Shard(2), Shard(1)]) for t in (q, k)]
        other = DTensor.from_local(v.detach(), pair, [Shard(2), Replicate()])
        context_parallel(F.scaled_dot_product_attention, pair["cp"])(*whole, other, enable_gqa=True)
    for placement in (Partial(), Shard(3), Shard(2)):  # addends, or parts of rows or of a rank's sequence
        tensors = [DTensor.from_local(t.detach(), pair, [Shard(2), placement]) for t in (q, k, v)]
        with pytest.raises(ValueError, match="along batch or heads"):
            context_parallel(F.scaled_dot_product_attention, pair["cp"])(*tensors, enable_gqa=True)
    tensors = [DTensor.from_local(t[:, 0].detach(), mesh, [Shard(1)]) for t in (q, k, v)]  # [B, S, D]
    flat = attend(*tensors, is_causal=True)
    assert isinstance(flat, DTensor) and flat.placements == (Shard(1),)
    torch.testing.assert_close(flat.to_local(), out[:, 0].detach())
    with pytest.raises(ValueError, match="DTensors must have"):
        attend(*(DTensor.from_local(t.to_local(), mesh, [Shard(2)]) for t in tensors))
    for options, words in (
        (dict(attn_mask=torch.ones(1)), "attn_mask must be None"),
        (dict(dropout_p=0.1), "dropout_p must be 0"),
        (dict(), "enable_gqa must be True"),
    ):
        with pytest.raises(ValueError, match=words):
            attend(q, k, v, **options)
    ours = context_parallel(lambda *tensors, **options: attention(*tensors, **options), mesh, layout="contiguous")
    same, lse = ours(q, k, v, causal=True, return_lse=True)
    torch.testing.assert_close(same, out)
    assert lse.shape == q.shape[:3]
    with pytest.raises(ValueError, match="window must be left at its default"):
        ours(q, k, v, window=(3, 0))
    causal = torch.compile(
        lambda *t: F.scaled_dot_product_attention(*t, is_causal=True, enable_gqa=True), backend="eager"
    )
    torch.testing.assert_close(context_parallel(causal, mesh, layout="contiguous")(q, k, v), out)
    with torch.autocast("cpu", dtype=torch.float16):
        mixed = attend(q, k.half(), v, is_causal=True, enable_gqa=True)
    assert mixed.dtype == torch.float16
    torch.testing.assert_close(mixed.float(), out, atol=5e-3, rtol=5e-3)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    with pytest.raises(NotImplementedError, match="nn.MultiheadAttention"):
        context_parallel(layer, mesh)(q[:, 0].detach())
    for blind in (nn.Linear(8, 8), lambda x: (x @ x.mT).softmax(-1) @ x):
        with pytest.raises(RuntimeError, match="no attention ran over all ranks"):
            context_parallel(blind, mesh)(q.detach())
    return out.detach(), dq


def _qkv() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, heads, ROWS, 8, generator=generator) for heads in (4, 2, 2)]


def _on_two_ranks(rank: int, world: int) -> tuple[list[list[torch.Tensor]], tuple[torch.Tensor, ...]]:
    """All checks that need two ranks, in one test, as starting processes takes longer than the checks."""
    return [_of_a_module(rank, world, again) for again in (False, True)], _of_a_function(rank, world)


def test_modules_functions_and_dtensors(tmp_path):
    """Gradients of a module, with and without activation checkpointing, are those of one process."""
    q, k, v = _qkv()
    out = F.scaled_dot_product_attention(q.requires_grad_(), k, v, is_causal=True, enable_gqa=True)
    (dq,) = torch.autograd.grad(out.sum(), q)
    ranks = spread(2, _on_two_ranks, tmp_path)
    for i, right in enumerate((out, dq)):
        found = torch.cat([functions[i] for _, functions in ranks], 2)
        torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-4)
    for modules, _ in ranks:
        for grads in modules:
            for mine, right in zip(grads, _whole(), strict=True):
                torch.testing.assert_close(mine, right, atol=1e-5, rtol=1e-4)


def test_without_a_group_the_mesh_is_checked():
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh or a ProcessGroup"):
        context_parallel(nn.Linear(2, 2), "cp")
    with pytest.raises(TypeError, match="for a function, got None"):
        context_parallel(F.relu, None)
