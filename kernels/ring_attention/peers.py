"""Other implementations of attention over a sequence on several GPUs, with the arguments of `ring_attention`.

PyTorch's context parallelism, and the all-to-all of DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509) around our
own kernel and around FlashAttention-4. They support equal lengths only. Peers are timed in turn, so a peer changes
PyTorch's state only during each of its forwards and backwards. An adapter whose `layout` is "contiguous" takes rows in
that layout, so that it need not reorder them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ..attention import attention
from .flash_attn_shim import two_results

Op = Callable[..., torch.Tensor]
ROTATIONS = ("allgather", "alltoall")
FA4 = "FA4 with two results"
#: Backends of SDPA, and implementations of its flash attention in PyTorch's registry.
BACKENDS = ("flash", "cudnn", "fa4", "ridgeline")


def context_parallel(backend: str, rotate: str, interface: Any = None) -> Op:
    """Returns PyTorch's context parallelism with one of `BACKENDS` and of `ROTATIONS`; causal with a zigzag layout.
    `interface` is that of FlashAttention-4, for "fa4". ImportError if PyTorch has no such implementation."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental import _attention as torch_cp
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernel = SDPBackend.CUDNN_ATTENTION if backend == "cudnn" else SDPBackend.FLASH_ATTENTION
    implementation = {"fa4": FA4, "ridgeline": "ridgeline"}.get(backend)
    if implementation and not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        raise ImportError("this PyTorch has one implementation of flash attention")
    if implementation == FA4:
        _register_fa4(interface)
    # The handlers are not removed: they affect DTensors only.
    torch_cp._enable_context_parallel_dispatcher()

    @contextmanager
    def within(causal: bool) -> Iterator[None]:
        options = torch_cp._cp_options
        before = options.rotate_method, options.enable_load_balance
        try:
            torch_cp.set_rotate_method(rotate)
            options.enable_load_balance = causal
            with activated(implementation):
                yield
        finally:
            options.rotate_method, options.enable_load_balance = before

    def local(q, k, v, *, causal, scale):
        mesh = _mesh(q.device.type)
        # Its merge of steps is per query head, so each query head needs keys of its own.
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        split = [DTensor.from_local(t, mesh, [Shard(2)], run_check=False) for t in (q, k, v)]
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(*split, is_causal=causal, scale=scale).to_local()

    def attend(q, k, v, *, causal=False, scale=None, **_):
        return run_within(partial(within, causal), partial(local, causal=causal, scale=scale), q, k, v)

    return attend


@contextmanager
def activated(implementation: str | None) -> Iterator[None]:
    """A context in which PyTorch's flash attention is this implementation of its registry, or its own for None. It
    restores the previous one, also after an error."""
    registry = torch.nn.attention
    if not hasattr(registry, "activate_flash_attention_impl"):
        yield
        return
    before = registry.current_flash_attention_impl()
    try:
        _activate(implementation)
        yield
    finally:
        _activate(before)


def _activate(implementation: str | None) -> None:
    registry = torch.nn.attention
    if registry.current_flash_attention_impl() == implementation:
        return
    if implementation is None:
        registry.restore_flash_attention_impl()
    else:
        registry.activate_flash_attention_impl(implementation)


def _register_fa4(interface: Any) -> None:
    """Registers FlashAttention-4 in PyTorch's registry, like PyTorch's own "FA4" except for the number of results."""
    from torch.nn.attention import _fa4

    path = f"{__package__}.flash_attention_4_{id(interface):x}"
    functions = ModuleType(path)
    vars(functions).update(vars(two_results(interface)))

    def register() -> Any:
        sys.modules[path] = functions  # PyTorch imports it by name, and keeps a reference
        try:
            return _fa4.register_flash_attention_fa4(path)
        finally:
            del sys.modules[path]

    torch.nn.attention.register_flash_attention_impl(FA4, register_fn=register)


def run_within(within: Callable[[], AbstractContextManager[None]], attend: Op, *tensors: torch.Tensor) -> torch.Tensor:
    """Returns attend(*tensors). Forward and backward each run in a context of their own."""
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        with within():
            return attend(*tensors)
    return _Within.apply(within, attend, *tensors)


class _Within(torch.autograd.Function):
    @staticmethod
    def forward(ctx, within, attend, *tensors):
        needed = ctx.needs_input_grad[2:]
        leaves = [t.detach().requires_grad_(need) for t, need in zip(tensors, needed, strict=True)]
        with within(), torch.enable_grad():
            out = attend(*leaves)
        ctx.within, ctx.leaves, ctx.out = within, leaves, out
        return out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        needed = [leaf for leaf in ctx.leaves if leaf.requires_grad]
        with ctx.within():
            found = iter(torch.autograd.grad(ctx.out, needed, dout, retain_graph=True))
        return None, None, *(next(found) if leaf.requires_grad else None for leaf in ctx.leaves)


@cache
def _mesh(device: str):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, (dist.get_world_size(),))


def all_to_all() -> Op:
    """Returns attention by all-to-all: during the kernel each rank has all rows of some heads. The exchanges before and
    after it are not overlapped."""
    from torch.distributed.nn.functional import all_to_all_single

    def attend(q, k, v, *, causal=False, scale=None, **_):
        world = dist.get_world_size()

        def exchange(x: torch.Tensor) -> torch.Tensor:
            """Sends slice i of the first dimension to rank i, and receives slice i from there."""
            x = x.contiguous()
            return all_to_all_single(torch.empty_like(x), x)

        def rows(x: torch.Tensor) -> torch.Tensor:
            blocks = exchange(x.unflatten(1, (world, -1)).movedim(1, 0))  # [world, B, H / world, S, D]
            return blocks.movedim(0, 2).flatten(2, 3)

        out = attention(rows(q), rows(k), rows(v), causal=causal, scale=scale)
        return exchange(out.unflatten(2, (world, -1)).movedim(2, 0)).movedim(0, 1).flatten(1, 2)

    attend.layout = "contiguous"  # type: ignore[attr-defined]
    return attend


def zigzag(zigzag_ring_flash_attn_func: Op) -> Op:
    """Returns an adapter of ring-flash-attn. Its layout is [B, S, H, D]."""

    def attend(q, k, v, *, causal=False, scale=None, **_):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return zigzag_ring_flash_attn_func(q, k, v, softmax_scale=scale, causal=causal).transpose(1, 2)

    return attend


def ulysses(module: Op) -> Op:
    """Returns yunchang's UlyssesAttention over all ranks. Its layout is [B, S, H, D], rows in sequence order."""

    def attend(q, k, v, *, causal=False, scale=None, **_):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return module(q, k, v, softmax_scale=scale, causal=causal).transpose(1, 2)

    attend.layout = "contiguous"  # type: ignore[attr-defined]
    return attend
