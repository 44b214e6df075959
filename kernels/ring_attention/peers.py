"""Other ways to attention over a sequence on several GPUs, with the arguments of `ring_attention` on each rank.

torch's context parallel, and the all-to-all of DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509) around our own
kernel. They take equal lengths. Everything is imported when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..attention import attention
from .layout import positions

Op = Callable[..., torch.Tensor]
BACKENDS = ("flash", "cudnn")
ROTATIONS = ("allgather", "alltoall")


def context_parallel(backend: str, rotate: str) -> Op:
    """torch's context parallel with one of `BACKENDS` and of `ROTATIONS`; causal in a zigzag layout."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental import _attention as torch_cp
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernel = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[backend]
    # The handlers stay: a backward runs outside of the call. They touch DTensors alone.
    torch_cp._enable_context_parallel_dispatcher()

    def attend(q, k, v, *, causal=False, scale=None, **_):
        torch_cp.set_rotate_method(rotate)
        torch_cp._cp_options.enable_load_balance = causal
        mesh = _mesh(q.device.type)
        # It merges steps of query heads, so each has to have keys of its own.
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        split = [DTensor.from_local(t, mesh, [Shard(2)], run_check=False) for t in (q, k, v)]
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(*split, is_causal=causal, scale=scale).to_local()

    return attend


@cache
def _mesh(device: str):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, (dist.get_world_size(),))


def all_to_all() -> Op:
    """Each rank has all rows of some heads while it computes; two exchanges before and after, nothing overlapped."""
    from torch.distributed.nn.functional import all_to_all_single

    def attend(q, k, v, *, causal=False, scale=None, layout="zigzag", **_):
        world = dist.get_world_size()

        def exchange(x: torch.Tensor) -> torch.Tensor:
            """Part i of the first dimension goes to rank i, and comes from there."""
            x = x.contiguous()
            return all_to_all_single(torch.empty_like(x), x)

        def rows(x: torch.Tensor) -> torch.Tensor:
            blocks = exchange(x.unflatten(1, (world, -1)).movedim(1, 0))  # [world, B, H / world, S, D]
            whole = blocks.movedim(0, 2).flatten(2, 3)
            return whole if not causal else whole.index_select(2, _order(layout, x.shape[2], world, x.device).argsort())

        out = attention(rows(q), rows(k), rows(v), causal=causal, scale=scale)
        if causal:
            out = out.index_select(2, _order(layout, q.shape[2], world, q.device))
        return exchange(out.unflatten(2, (world, -1)).movedim(2, 0)).movedim(0, 1).flatten(1, 2)

    return attend


@cache
def _order(layout: str, length: int, world: int, device: torch.device) -> torch.Tensor:
    """Positions of all ranks' rows, one rank behind the other."""
    return torch.cat([positions(length, rank, world, layout, device=device) for rank in range(world)])
