"""The new forward of a causal language model: with labels, in training, the loss without the logits."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from ..linear_cross_entropy import linear_cross_entropy
from .layers import FAMILIES, called_only


def fused(module: nn.Module, scratch_bytes: int | None) -> Callable | None:
    if not re.fullmatch(f"({FAMILIES})ForCausalLM", type(module).__name__):
        return None
    return _training_or(type(module).forward, scratch_bytes)


@cache
def _training_or(original: Callable, scratch_bytes: int | None) -> Callable:
    """A forward that computes the loss itself if it can, and calls `original` otherwise."""
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.utils import can_return_tuple

    @can_return_tuple
    def with_loss(self, labels: torch.Tensor, options: dict[str, Any], inputs: dict[str, Any]) -> Any:
        outputs = self.model(**inputs, **options)
        loss = _loss(self, outputs.last_hidden_state, labels, scratch_bytes, **options)
        return CausalLMOutputWithPast(
            loss=loss,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        **kwargs,
    ):
        inputs = dict(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
        )
        whole = isinstance(logits_to_keep, int) and logits_to_keep == 0
        if labels is not None and self.training and whole and _plain(self):
            # A training step needs no cache. With positions it decides whether transformers looks for packed sequences.
            if use_cache is None and past_key_values is None and position_ids is None:
                inputs["use_cache"] = False
            asked = {"return_dict": kwargs.pop("return_dict")} if "return_dict" in kwargs else {}
            return with_loss(self, labels, kwargs, inputs, **asked)
        return original(self, **inputs, labels=labels, logits_to_keep=logits_to_keep, **kwargs)

    return forward


def _plain(model: Any) -> bool:
    """Whether the logits are the output of a linear layer, and the loss is the usual one of a causal model."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    head = model.lm_head
    return type(head) is nn.Linear and called_only(head) and model.loss_function is ForCausalLMLoss


def _loss(
    model: Any,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    scratch_bytes: int | None,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """transformers' loss: each token predicts the next one. It is the sum divided by num_items_in_batch if that is
    given, which counts the tokens of all micro-batches of a step, otherwise the mean. Labels are flattened, as there:
    they may have another shape than the tokens."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    loss = linear_cross_entropy(
        hidden.flatten(0, -2),
        model.lm_head.weight.to(hidden.dtype),
        shift_labels.to(hidden.device).flatten(),
        bias=model.lm_head.bias,
        ignore_index=ignore_index,
        softcap=getattr(model.config, "final_logit_softcapping", None),
        reduction="mean" if num_items_in_batch is None else "sum",
        scratch_bytes=scratch_bytes,
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch
