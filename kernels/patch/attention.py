"""`attention` as an implementation of transformers' AttentionInterface, under the name "ridgeline"."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import Any

import torch
from torch import nn

from ..attention import attention
from .layers import FAMILIES

NAME = "ridgeline"
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3")
MAX_HEAD_DIM = 256
_KEPT = "_ridgeline_attention"  # attribute of a model: its original implementation
_DECIDING = ("attention_mask", "position_ids", "past_key_values", "cache_position")  # determine what a query attends to


def use(model: nn.Module) -> None:
    """Makes every known model inside `model` call `attend`."""
    for known in _models(model):
        _register()
        before = known.config._attn_implementation
        known.set_attn_implementation(NAME)
        if known.config._attn_implementation == NAME:
            setattr(known, _KEPT, before)


def give_back(model: nn.Module) -> None:
    for module in list(_owners(model)):
        # If the kept one is ours, another model that shares the configuration was patched first, and restores it. If
        # the present one is not, it was chosen after the patch.
        if getattr(module, _KEPT) != NAME and module.config._attn_implementation == NAME:
            module.set_attn_implementation(getattr(module, _KEPT))
        delattr(module, _KEPT)


def used(model: nn.Module) -> int:
    """The number of layers that call `attend`."""
    owners = [module for module in _owners(model) if module.config._attn_implementation == NAME]
    layers = (m for owner in owners for m in owner.modules() if type(m).__name__.endswith("Attention"))
    return sum(1 for _ in layers)


def _owners(model: nn.Module) -> Iterator[Any]:
    """Yields the models whose implementation was replaced. Wrappers, such as PEFT's and torch.compile's, have the
    attributes of the model inside as well, so that hasattr does not tell them from it."""
    yield from (module for module in model.modules() if _KEPT in vars(module))


def _models(model: nn.Module) -> Iterator[Any]:
    """Yields the outermost models of a known type that do not cap their scores."""
    inside: set[nn.Module] = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        if module in inside or not hasattr(type(module), "set_attn_implementation"):
            continue
        if getattr(config, "model_type", None) in MODEL_TYPES:
            inside.update(module.modules())
            if getattr(config, "attn_logit_softcapping", None) is None:
                yield module


def unmasked(module: nn.Module) -> Callable | None:
    """The new forward of a known model, which builds no mask if every row is one sequence from its beginning."""
    named = re.fullmatch(f"({FAMILIES})(Text)?Model", type(module).__name__)
    if named is None or getattr(getattr(module, "config", None), "_attn_implementation", None) != NAME:
        return None
    return _without_a_mask(type(module).forward)


@cache
def _without_a_mask(original: Callable) -> Callable:
    """Wraps `original` and passes it an empty mask [1, 1, 0, 0] if no mask is needed. transformers passes a mask of
    four dimensions on unchanged. Without one it reads the positions, even those that it has computed itself, to find
    the borders of packed sequences. The host then synchronises, which a CUDA graph does not allow. During a capture, as
    under torch.compile, it builds the mask of all pairs of tokens."""

    @wraps(original)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tokens = args[0] if args else kwargs.get("input_ids")
        tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
        given = len(args) > 1 or any(kwargs.get(name) is not None for name in _DECIDING)
        if tokens is not None and not given and _is_causal(self.config, kwargs):
            kwargs["attention_mask"] = torch.empty((1, 1, 0, 0), dtype=torch.bool, device=tokens.device)
        return original(self, *args, **kwargs)

    return forward


def _is_causal(config: Any, asked: dict[str, Any]) -> bool:
    """Whether the model calls `attend`, and its attention is causal."""
    causal = asked.get("is_causal", getattr(config, "is_causal", True)) is not False
    return causal and config._attn_implementation == NAME and not getattr(config, "use_bidirectional_attention", False)


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)


def mask(*args: Any, local_size: int | None = None, **kwargs: Any) -> torch.Tensor | None:
    """None if positions alone determine what a query attends to: causal attention, with a window or without. Otherwise
    SDPA's mask, which includes padding, the borders of packed sequences, and windows to both sides."""
    from transformers.masking_utils import sdpa_mask

    causal = kwargs.get("allow_is_causal_skip", True)
    return sdpa_mask(*args, local_size=None if causal else local_size, **kwargs)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [B, H, Sq, D], key and value [B, Hkv, Sk, D] -> ([B, Sq, H, D], None for the weights). The last query
    attends to all keys, or to its window of them. A mask without keys, which is that of `unmasked`, means no mask.
    Inside of autocast all are cast to its dtype, as by SDPA.
    Raises ValueError for scores with a cap, which SDPA does not support either; older versions of it ignore the cap.
    Weights that are asked for are not there either, of which SDPA warns."""
    if kwargs.get("softcap") is not None:
        raise ValueError("patch: ridgeline's attention does not support `softcap`; patch with except_=('attention',)")
    if attention_mask is not None and attention_mask.shape[-1] == 0:
        attention_mask = None
    if torch.is_autocast_enabled(query.device.type):  # norms or rotations in fp32 leave q and k so
        lower = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(lower), key.to(lower), value.to(lower)
    queries, keys = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # Without a mask of `mask` a window that hides keys is a causal one, whatever the argument is_causal says.
    windowed = attention_mask is None and sliding_window is not None and keys >= sliding_window
    causal = bool(causal or windowed) and queries > 1
    others = any(kwargs.get(name) is not None for name in ("position_bias", "cache")) or kwargs.get("output_attentions")
    ours = attention_mask is None and not dropout and not others
    if not ours or query.shape[-1] > MAX_HEAD_DIM or value.shape != key.shape:
        return _by_sdpa(
            module,
            query,
            key,
            value,
            attention_mask,
            causal,
            sliding_window,
            dropout=dropout,
            scaling=scaling,
            **kwargs,
        )
    if causal and keys > queries:  # the cache may have rows that are still empty
        key, value = key[:, :, :queries], value[:, :, :queries]
    window = None if sliding_window is None else (sliding_window - 1, 0 if causal or queries == 1 else -1)
    out = attention(query, key, value, causal=causal, scale=scaling, window=window)
    assert isinstance(out, torch.Tensor)
    return out.transpose(1, 2), None


def _by_sdpa(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    causal: bool,
    sliding_window: int | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The cases that PyTorch's SDPA computes. If the mask does not include the window yet, it is added; a single query
    needs only the last keys."""
    sdpa = sys.modules["transformers.integrations.sdpa_attention"].sdpa_attention_forward
    queries, keys = query.shape[2], key.shape[2]
    if attention_mask is None and queries == 1 and sliding_window is not None:
        key, value = key[:, :, -sliding_window:], value[:, :, -sliding_window:]
    if attention_mask is None and causal and sliding_window is not None and keys >= sliding_window:
        keys = queries  # as above
        key, value = key[:, :, :keys], value[:, :, :keys]
        behind = torch.arange(queries, device=query.device)[:, None] - torch.arange(keys, device=query.device)
        attention_mask = ((behind >= 0) & (behind < sliding_window))[None, None]
    return sdpa(module, query, key, value, attention_mask, is_causal=causal, **kwargs)
