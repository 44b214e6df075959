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
    """The loss of the entire model under torch.compile, which specialises on its shapes. Its attention is that of
    `plain`: by itself, transformers gives SDPA a causal mask in memory and copies of k and v for all heads when it is
    compiled, with which flash attention cannot run."""
    return torch.compile(loss_of(made(sizes, device, attention=_causal())), dynamic=False)


def _causal() -> str:
    """The name of transformers' SDPA without a mask, that is, with `is_causal`."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("sdpa_causal", ALL_ATTENTION_FUNCTIONS["sdpa"])
    ALL_MASK_ATTENTION_FUNCTIONS.register("sdpa_causal", lambda *args, **kwargs: None)
    return "sdpa_causal"


def liger(apply: dict[str, Callable[..., None]]) -> Callable[[Sizes, torch.device], Loss]:
    """The loss of a model to which Liger's function for its family was applied."""

    @lru_cache(maxsize=8)
    def loss_fn(sizes: Sizes, device: torch.device) -> Loss:
        with own_architectures(sizes.family) as architectures:
            apply[sizes.family](fused_linear_cross_entropy=True)
            return loss_of(made(sizes, device, architectures))

    return loss_fn
