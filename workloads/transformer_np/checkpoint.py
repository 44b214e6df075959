"""Activation checkpointing: intermediate results that the backward of a block computes again instead of saving them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as checkpointed

Result = tuple[torch.Tensor, torch.Tensor]
Again = Callable[[torch.Tensor], torch.Tensor]


def recomputed(function: Callable[..., Result], *args: object) -> Result:
    """function(*args), of which only the arguments are saved."""
    # There is nothing random in a block, and a generator's state cannot be read while a CUDA graph is captured.
    return checkpointed(function, *args, use_reentrant=False, preserve_rng_state=False)


def recomputed_but_attention(function: Callable[..., Result], *args: object) -> Result:
    """As `recomputed`, but the output of attention is saved as well, for every attention op of PyTorch or ridgeline.
    Attention by any other function is computed again."""
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    return checkpointed(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if "attention" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


class _Source(NamedTuple):
    tensor: torch.Tensor


def from_source(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, again: Again, source: torch.Tensor
) -> torch.Tensor:
    """function(x), whose backward uses again(source) instead of a saved x. Another op must save the source. Unlike a
    checkpoint, this does not call `function` again."""
    address, shape, source = x.data_ptr(), x.shape, source.detach()

    def pack(tensor: torch.Tensor) -> torch.Tensor | _Source:
        return _Source(source) if tensor.data_ptr() == address and tensor.shape == shape else tensor

    def unpack(kept: torch.Tensor | _Source) -> torch.Tensor:
        return again(kept.tensor) if isinstance(kept, _Source) else kept

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return function(x)
