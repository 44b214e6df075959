"""The same step with the unpatched model, with torch.compile and with Liger's model: `loss_fn` of `patched_model`."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from .architectures import own_architectures
from .step import Loss, Sizes, loss_of, made


@lru_cache(maxsize=8)
def plain(sizes: Sizes, device: torch.device) -> Loss:
    return loss_of(made(sizes, device))


@lru_cache(maxsize=8)
def compiled(sizes: Sizes, device: torch.device) -> Loss:
    """The loss of the entire model under torch.compile, which specialises on its shapes."""
    return torch.compile(loss_of(made(sizes, device)), dynamic=False)


def liger(apply: dict[str, Callable[..., None]]) -> Callable[[Sizes, torch.device], Loss]:
    """The loss of a model to which Liger's function for its family was applied."""

    @lru_cache(maxsize=8)
    def loss_fn(sizes: Sizes, device: torch.device) -> Loss:
        with own_architectures(sizes.family) as architectures:
            apply[sizes.family](fused_linear_cross_entropy=True)
            return loss_of(made(sizes, device, architectures))

    return loss_fn
