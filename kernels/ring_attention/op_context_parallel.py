"""`context_parallel`: replaces the attention of a model whose sequences are sharded over ranks by ring attention."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode

from ..attention import attention
from .layout import check_layout
from .op import ring_attention

Model = TypeVar("Model", bound=Callable[..., Any])
_HOOKS = "_ridgeline_context_parallel"


def context_parallel(
    model_or_fn: Model,
    mesh: DeviceMesh | dist.ProcessGroup | None,
    *,
    layout: str = "zigzag",
    rotate: str = "auto",
) -> Model:
    """Makes a model, or any function, compute attention over the sequences of all ranks.

    Each rank calls the model with its own rows of the sequence, as `shard` selects them. All layers except attention
    process rows independently, so they need no change; positions for RoPE are `positions(...)`. Calls of

        F.scaled_dot_product_attention(q, k, v, is_causal=, scale=, enable_gqa=)       and
        attention(q, k, v, causal=, scale=, return_lse=)                               of this package

    become `ring_attention` with group, layout and rotate, for q, k and v [B, H, S, D] (or [B, S, D], one head).
    DTensors must be sharded along S over the mesh's dimension, and over others along B or H or not at all, all three
    alike, and so is the result.

    model_or_fn  An nn.Module is changed in place: hooks on each of its modules replace attention, also when activation
                 checkpointing recomputes a module in the backward. A function is wrapped, and the backward of its
                 attention is that of ring attention. If the function checkpoints anything but modules, it must call
                 `backward()` itself.
    mesh         a DeviceMesh of one dimension (`mesh["cp"]` of one with more), or a ProcessGroup; None undoes the
                 change of a module

    Returns the module itself, or the wrapped function. Gradients of parameters are each rank's contribution to the sum
    over the sequence: DDP and FSDP2 over the same ranks, or over a mesh of data and sequence, reduce them as those of a
    batch. Every rank must have the same number of rows.

    A Hugging Face model supports only layout="contiguous": it interprets positions that are not consecutive, as in the
    other layouts, as several sequences, and passes a mask to attention.

    Raises TypeError for another mesh, ValueError for one with more dimensions and for an unknown layout, RuntimeError
    for a call without such attention, and NotImplementedError for nn.MultiheadAttention. Attention raises ValueError
    for options that ring attention does not support: a mask other than causal, dropout, a window, fp8, num_context,
    and, in F.scaled_dot_product_attention, a causal mask with more or fewer queries than keys.
    """
    if isinstance(model_or_fn, nn.Module):
        _unhook(model_or_fn)
        if mesh is not None:
            _hook(model_or_fn, _Ring(_group(mesh), layout, rotate))
        return model_or_fn
    if mesh is None:
        raise TypeError("context_parallel: mesh must be a DeviceMesh or a ProcessGroup for a function, got None")
    ring = _Ring(_group(mesh), layout, rotate)

    @functools.wraps(model_or_fn)
    def within(*args: Any, **kwargs: Any) -> Any:
        with ring:
            begun = ring.met()
            found = model_or_fn(*args, **kwargs)
            ring.check(begun)
        return found

    return within  # type: ignore[return-value]


class _Mode(TorchFunctionMode):
    """A function mode that runs attention as ring attention, and all other functions unchanged."""

    def __init__(self, group: dist.ProcessGroup, options: dict[str, Any]) -> None:
        super().__init__()
        self.group, self.options = group, options
        self.met = 0  # calls of attention in eager code

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._run(*_of_sdpa(*args, **kwargs))
        if func is attention:
            return self._run(*_of_attention(*args, **kwargs))
        if func is F.multi_head_attention_forward:
            raise NotImplementedError(
                "context_parallel: nn.MultiheadAttention, also in nn.TransformerEncoderLayer, is not supported, as it "
                "would attend to this rank's rows only: use F.scaled_dot_product_attention"
            )
        return func(*args, **kwargs)

    def _run(self, tensors: tuple[torch.Tensor, ...], causal: bool, scale: float | None, return_lse: bool = False):
        """Runs ring attention on local tensors in four dimensions. Results have the form of the given tensors."""
        self.met += 1
        meshes = {t.device_mesh for t in tensors if isinstance(t, DTensor)}
        placements = [_placements(t, self.group) for t in tensors if isinstance(t, DTensor)]
        local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        if meshes and (len(placements) < len(tensors) or len(meshes) > 1):
            raise ValueError("context_parallel: q, k and v must all be DTensors of one mesh, or none of them")
        if len(set(placements)) > 1:  # query heads would meet other KV heads than in the whole tensors
            told = ", ".join(map(str, placements))
            raise ValueError(f"context_parallel: q, k and v must have the same placements, got {told}")
        flat = local[0].dim() == 3
        q, k, v = (t.unsqueeze(1) for t in local) if flat else local
        shared: dict[str, Any] = {"causal": causal, "scale": scale, "return_lse": return_lse}
        found = ring_attention(q, k, v, group=self.group, **shared, **self.options)
        results = found if isinstance(found, tuple) else (found,)
        if flat:
            results = tuple(t.squeeze(1) for t in results)
        if meshes:
            (mesh,) = meshes
            results = tuple(DTensor.from_local(t, mesh, placements[0], run_check=False) for t in results)
        return results if return_lse else results[0]


class _Ring:
    """Enters the mode once per thread, for any depth of nested calls."""

    def __init__(self, group: dist.ProcessGroup, layout: str, rotate: str) -> None:
        check_layout(layout)
        self.group, self.options = group, {"layout": layout, "rotate": rotate}
        self.here = threading.local()

    def __enter__(self) -> None:
        self.here.depth = getattr(self.here, "depth", 0) + 1
        if self.here.depth == 1:
            self.here.mode = _Mode(self.group, self.options)
            self.here.mode.__enter__()

    def __exit__(self, *exception: object) -> None:
        self.here.depth -= 1
        if self.here.depth == 0:
            self.here.mode.__exit__(*exception)

    def entered(self) -> list[nn.Module]:
        """The modules whose calls are running on this thread, the innermost last."""
        if not hasattr(self.here, "entered"):
            self.here.entered = []
        return self.here.entered

    def met(self) -> int | None:
        """Number of calls of attention that ran as ring attention since it was entered; None in compiled code."""
        return None if torch.compiler.is_compiling() else self.here.mode.met

    def check(self, begun: int | None) -> None:
        """Raises RuntimeError if there were none since `begun`: other attention would cover this rank's rows only."""
        if begun is not None and self.met() == begun:
            raise RuntimeError(
                "context_parallel: no attention ran over all ranks: the call must use "
                "F.scaled_dot_product_attention or this package's attention"
            )


def _hook(model: nn.Module, ring: _Ring) -> None:
    """Adds hooks that enter the ring to each module, as activation checkpointing recomputes inner modules without the
    outer ones."""

    def enter(module: nn.Module, args: Any) -> None:
        ring.__enter__()
        ring.entered().append(module)
        if module is model:
            ring.here.begun = ring.met()

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if module not in ring.entered()[-1:]:  # another hook raised before `enter`
            return
        ring.entered().pop()
        ring.__exit__(None, None, None)
        if module is model:
            ring.check(ring.here.begun)

    handles = []
    for module in model.modules():
        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]
    setattr(model, _HOOKS, handles)


def _unhook(model: nn.Module) -> None:
    for handle in getattr(model, _HOOKS, ()):
        handle.remove()


def _group(mesh: DeviceMesh | dist.ProcessGroup) -> dist.ProcessGroup:
    if isinstance(mesh, dist.ProcessGroup):
        return mesh
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"context_parallel: mesh must be a DeviceMesh or a ProcessGroup, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f'context_parallel: mesh must have one dimension, as mesh["cp"] has, got {mesh.ndim}')
    return mesh.get_group()


def _placements(x: DTensor, group: dist.ProcessGroup) -> tuple:
    """Returns the placements of a DTensor that is sharded along the sequence over the group, and has whole rows. Raises
    ValueError for another."""
    sequence, found = x.dim() - 2, False
    for dimension, placement in enumerate(x.placements):
        if x.device_mesh.get_group(dimension) == group:
            found = True
            if placement != Shard(sequence):
                raise ValueError(
                    f"context_parallel: DTensors must have {Shard(sequence)} over the mesh, got {placement}"
                )
        elif placement.is_partial() or getattr(placement, "dim", 0) >= sequence:
            # Attention of addends, or of some of the columns, is no addend and no part of the result.
            raise ValueError(
                "context_parallel: DTensors may only be replicated, or sharded along batch or heads, over other "
                f"dimensions of their mesh, got {placement}"
            )
    if not found:
        raise ValueError("context_parallel: DTensors must be on the mesh passed to context_parallel")
    return tuple(x.placements)


def _of_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple:
    """Converts the arguments of F.scaled_dot_product_attention to those of `_Mode._run`."""
    if attn_mask is not None:
        raise ValueError(
            "context_parallel: attn_mask must be None, as the only mask that ring attention supports is is_causal"
        )
    if dropout_p:
        raise ValueError(f"context_parallel: dropout_p must be 0 with ring attention, got {dropout_p}")
    if query.dim() not in (3, 4):
        raise ValueError(f"context_parallel: query must be [B, H, S, D] or [B, S, D], got shape {tuple(query.shape)}")
    if not enable_gqa and query.dim() == 4 and query.shape[1] != key.shape[1]:
        heads = f"{query.shape[1]} heads of query and {key.shape[1]} of key"
        raise ValueError(f"context_parallel: enable_gqa must be True for {heads}, got False")
    if is_causal and query.shape[-2] != key.shape[-2]:
        rows = f"{query.shape[-2]} queries and {key.shape[-2]} keys"
        raise ValueError(f"context_parallel: is_causal requires as many queries as keys, got {rows}")
    tensors = (query, key, value)
    if torch.is_autocast_enabled(query.device.type):  # which the mode precedes
        tensors = tuple(t.to(torch.get_autocast_dtype(query.device.type)) for t in tensors)
    return tensors, is_causal, scale


def _of_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    num_context: int | None = None,
    window: tuple[int, int] | None = None,
    return_lse: bool = False,
    fp8: bool = False,
    forward: str = "auto",
    backward: str = "auto",
) -> tuple:
    """Converts the arguments of `attention`. Ring attention chooses the versions."""
    absent = {"num_context": num_context is not None, "window": window not in (None, (-1, -1)), "fp8": fp8}
    for name in (name for name, given in absent.items() if given):
        raise ValueError(f"context_parallel: {name} must be left at its default, as ring attention does not support it")
    return (q, k, v), causal, scale, return_lse
