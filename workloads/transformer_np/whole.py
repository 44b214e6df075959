"""All layers but the last of a model in one kernel, and their backward in another, for few rows, where launch overhead
dominates.

The operands of the weights' gradients are passed to `weight_gradients`, which multiplies them after the backward has
passed all layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .sm90 import layers as launches
from .sm90.layers import Saved, Weights, weights_of
from .weight_gradients import Place

__all__ = ["CHOICES", "Weights", "layers", "missing", "pick_layers", "weights_of"]

CHOICES = ("auto", "whole", "apart")
MOST_CLUSTERS = 14  # clusters of 8 CTAs that run at once: each is within a GPC, whose SMs are not a multiple of 8


def pick_layers(batch: int, context: int, targets: int) -> str:
    """Whether the layers for few rows are one launch ("whole") or several per layer ("apart"). Pure.

    A cluster of 8 CTAs processes 64 rows in all layers, and reads all weights: more clusters than run at once would
    take twice the time. Targets and context do not share a cluster.
    """
    fits = 0 < launches.clusters(batch, context, targets) <= MOST_CLUSTERS
    return "whole" if context <= launches.ROWS and fits else "apart"


def missing(x: torch.Tensor, context: int, heads: int, weights: Weights | None) -> str | None:
    """Why layers with these weights (None if they are not in one buffer) cannot be one launch for the rows
    x [B, M + N, d]. None if they can."""
    if weights is None:
        return "it requires weights in one buffer (TransformerNP.flatten_parameters)"
    return launches.missing(x, context, heads, weights)


def layers(x: torch.Tensor, weights: Weights, places: Sequence[Place] | None, context: int, eps: float) -> torch.Tensor:
    """The output rows [B, M + N, d] of all these layers for the input rows x. The gradients of the weights are deferred
    to `places`, which is None if nothing is differentiated."""
    if places is None:
        return launches.forward(x.detach().contiguous(), weights, context, eps, save=False)[0]
    return _Layers.apply(x, places[0].token, places, weights, context, eps)


class _Layers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, token, places, weights, context, eps):
        ctx.set_materialize_grads(False)
        ctx.places, ctx.context, ctx.eps = places, context, eps
        ctx.sizes = weights[6:]
        x = x.contiguous()
        y, saved = launches.forward(x, weights, context, eps, save=True)
        ctx.save_for_backward(x, *saved, *weights[:6])
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        if dy is None:
            return (None,) * 6
        x, *others = ctx.saved_tensors
        kept = len(Saved._fields)
        saved, weights = Saved(*others[:kept]), Weights(*others[kept:], *ctx.sizes)
        dy = dy.contiguous()
        dy = dy.clone() if dy.data_ptr() % launches.ALIGNMENT else dy
        found = launches.backward(dy, x, saved, weights, ctx.context, ctx.eps)
        if ctx.needs_input_grad[1]:
            after_attention, after_mlp = found.dx_at
            for layer, place in enumerate(ctx.places):
                place.operands.add(
                    layer,
                    qkv=(saved.n[0, layer], found.dqkv[layer]),
                    out=(saved.attended[layer], after_attention[layer]),
                    up=(saved.n[1, layer], found.dpre[layer]),
                    down=(saved.hidden[layer], after_mlp[layer]),
                )
                for kind, partial in zip(("before attention", "before mlp"), found.dgamma[layer], strict=True):
                    place.operands.add_partial(layer, kind, partial, weights.attention_gamma.dtype)
        return found.dx if ctx.needs_input_grad[0] else None, ctx.places[0].gradient_of_token(), *[None] * 4
