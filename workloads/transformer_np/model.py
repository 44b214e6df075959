"""TransformerNP: a transformer that predicts a function's values at target points from its values at context points."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from kernels.gmm_logprob import gmm_logprob
from kernels.rmsnorm import rmsnorm

from . import deferred, embedding, whole
from . import weight_gradients as gradients
from .attention import WITH_PROJECTIONS, Attend, attend, context_attention
from .checkpoint import Again, from_source, recomputed, recomputed_but_attention
from .layers import FeedForward, Linear, MixtureHeads, rounded_up

CHECKPOINTS = ("none", "block", "attention")
EPS = 1e-6
ALIGNMENT = 64  # flattened parameters begin at multiples of this many elements, so that all are aligned


class Norm(nn.Module):
    """RMS normalisation of the sum of a residual stream and a branch's output: ridgeline's in one launch, or for
    "torch" PyTorch's. Returns (normalised rows, sum)."""

    def __init__(self, dim: int, implementation: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.plain = implementation == "torch"

    def forward(self, x: torch.Tensor, branch: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        if self.plain:
            x = x if branch is None else x + branch
            return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), EPS), x
        if branch is None:
            return rmsnorm(x, self.weight, EPS), x
        return rmsnorm(branch, self.weight, EPS, x)

    def again(self) -> Again:
        """Returns a function from the sum that a call returned to the rows that it returned, without a gradient. It
        holds the present weight: before the backward, `torch.func.functional_call` may have restored another one."""
        weight, plain = self.weight.detach(), self.plain

        @torch.no_grad()
        def normalised(rows: torch.Tensor) -> torch.Tensor:
            if plain:
                return F.rms_norm(rows, rows.shape[-1:], weight.to(rows.dtype), EPS)
            return rmsnorm(rows, weight, EPS)

        return normalised


class ContextAttention(nn.Module):
    """The norm, then attention of the rows from `start` on over the first `context`, and the output projection. Returns
    (output of the branch, rows to which it is to be added)."""

    def __init__(self, dim: int, heads: int, implementation: str | Attend, norm: str) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend(implementation)
        self.whole = WITH_PROJECTIONS.get(implementation) if isinstance(implementation, str) else None
        self.norm = Norm(dim, norm)
        self.q, self.kv, self.out = Linear(dim, dim, False), Linear(dim, 2 * dim, False), Linear(dim, dim, False)

    def forward(
        self, rows: torch.Tensor, branch: torch.Tensor | None, context: int, start: int = 0, keep: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As the class describes. Without `keep`, which only ridgeline's attention supports, the backward computes the
        norm, q, k and v again, from the sum that the norm saves."""
        x, rows = self.norm(rows, branch)
        again = None if keep else (self.norm.again(), rows)
        rows = rows[:, start:] if start else rows
        if self.whole is not None:
            weights = self.q.weight.to(x.dtype), self.kv.weight.to(x.dtype)
            return self.out(context_attention(x, *weights, context, self.heads, start, self.whole, again)), rows
        q = self.q(x[:, start:] if start else x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(x[:, :context]).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2)), rows


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). x is a pair of summands, in the arguments and the results, since
    the next norm adds them in its launch. Rows before `start` are only keys and values, and are not returned."""

    def __init__(self, attention: ContextAttention, norm: Norm, mlp: FeedForward, checkpoint: str) -> None:
        super().__init__()
        self.attention, self.norm, self.mlp, self.checkpoint = attention, norm, mlp, checkpoint

    def forward(
        self,
        rows: torch.Tensor,
        branch: torch.Tensor | None,
        context: int,
        start: int = 0,
        place: gradients.Place | None = None,
        projections: str = "auto",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As the class describes. With a `place` the gradients of the weights are deferred to it, and nothing is
        computed again."""
        if place is not None:
            return self._deferring(rows, branch, context, place, projections)
        if self.checkpoint == "none" or not torch.is_grad_enabled():
            return self._whole(rows, branch, context, start)
        if self.checkpoint == "attention" and self.attention.whole is not None and self.mlp.fused:
            return self._keeping_attention(rows, branch, context, start)
        if branch is not None:
            rows = rows + branch  # one tensor to save, not two
        keep = recomputed if self.checkpoint == "block" else recomputed_but_attention
        return keep(self._whole, rows, None, context, start)

    def _whole(
        self, rows: torch.Tensor, branch: torch.Tensor | None, context: int, start: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        branch, rows = self.attention(rows, branch, context, start)
        x, rows = self.norm(rows, branch)
        return rows, self.mlp(x)

    def _keeping_attention(
        self, rows: torch.Tensor, branch: torch.Tensor | None, context: int, start: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Saves the two sums that the norms return, and the output of attention. Unlike in a checkpoint of the block,
        neither the output projection nor the MLP's second GEMM is computed again."""
        branch, rows = self.attention(rows, branch, context, start, keep=False)
        x, rows = self.norm(rows, branch)
        return rows, from_source(partial(self.mlp, save="input"), x, self.norm.again(), rows)

    def _deferring(
        self, rows: torch.Tensor, branch: torch.Tensor | None, context: int, place: gradients.Place, projections: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        branch, rows = self.deferring_attention(rows, branch, context, place, projections)
        return self.deferring_mlp(rows, branch, place)

    def deferring_attention(
        self, rows: torch.Tensor, branch: torch.Tensor | None, context: int, place: gradients.Place, projections: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, attention = self.weights(), self.attention
        assert attention.whole is not None
        x, rows = deferred.norm(rows, branch, weights["before attention"], EPS, place, "before attention")
        products = (weights[kind] for kind in ("q", "kv", "out"))
        heads, whole = attention.heads, attention.whole
        return deferred.projected_attention(x, *products, place, context, heads, whole, projections), rows

    def deferring_mlp(
        self, rows: torch.Tensor, branch: torch.Tensor, place: gradients.Place
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights = self.weights()
        x, rows = deferred.norm(rows, branch, weights["before mlp"], EPS, place, "before mlp")
        return rows, deferred.feed_forward(x, weights["up"], weights["down"], place)

    def hooked(self) -> bool:
        """Whether a hook is registered on a part of the block. A call that defers gradients does not call all parts,
        and the gradients come after the hooks of the backward: FSDP, for example, would not reduce them."""
        parts = (self, *self._modules.values(), *self.attention._modules.values())
        return any(
            part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
            for part in parts
            if part is not None
        )

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights whose gradients can be deferred to a place, by kind."""
        products, mlp = self.attention, self.mlp
        norms = self.attention.norm.weight, self.norm.weight
        found = (products.q.weight, products.kv.weight, products.out.weight, mlp.up, mlp.down, *norms)
        return dict(zip(gradients.KINDS, found, strict=True))


class TransformerNP(nn.Module):
    """A transformer neural process: from M context points (x, y) and N target points x it computes a mixture of
    Gaussians for y at each target (Nguyen and Grover 2022, arXiv:2207.04179, but all points attend to the context
    alone).

    Blocks are pre-norm with RMSNorm and have no biases; the MLP has two matrices and SiLU. The points of a task are a
    set, so there are no positions. One MLP embeds both kinds of points; a target has y = 0 and a flag.

    x_dim       columns of x
    d_ff        hidden size of the MLPs, padded to a multiple of `padding` with zeros that stay zero
    components  number of components of the mixture, one MLP each
    attention   "auto", "separate" or "fused" (ridgeline's attention with that backward), "fp8" (ridgeline's, without a
                gradient), "sdpa", "sdpa-flash", "sdpa-cudnn" (PyTorch's), or a function of q, k and v
    mlp         "fused" (ridgeline's fused_mlp), "torch", or "auto", which is "fused"
    heads_impl  the same with heads_mlp
    norm        "auto" (ridgeline's rmsnorm) or "torch"
    loss_impl   "fused" with the heads (ridgeline's heads_gmm), "separate" (gmm_logprob), "torch", or "auto", which is
                "fused" if the heads are ridgeline's, otherwise "separate"
    checkpoint  the part of a block that is saved for the backward, which computes the rest again: everything for
                "none", the input for "block", the residual sums and the output of attention for "attention"
    weight_gradients
                of all layers but the last: "inline", in each layer's backward; "deferred", as one batched GEMM per kind
                of weight after the backward has passed all layers; "overlapped", on a side stream concurrently with the
                backward; "auto", the choice of `pick_weight_gradients`. All but "inline" require eager calls with
                ridgeline's attention, MLP and norm, without a checkpoint, and blocks without hooks of modules and
                without wrappers, such as those of FSDP
    projections "joint" (one GEMM for q, k and v of all rows, if weights are flattened and their gradients are not
                inline), "apart", or "auto", the choice of `pick_projections`. Layers in one kernel ignore it
    layers_impl "apart" (separate launches per layer), "whole" (one kernel for the forward of all layers but the last
                and one for the backward: on Hopper, in bf16, with attention "auto", for at most 64 context points,
                d_model 512, 8 heads, blocks without hooks and wrappers, and flattened weights, whose gradients are
                deferred unless grad mode is off), or "auto": "whole" if that is possible and `pick_layers` selects it
    dtype       of the GEMMs and of intermediate results; None is that of the parameters

    Parameters are fp32 unless the model is converted; their values come from `generator`. Raises ValueError for an
    unknown option. A call raises RuntimeError if `layers_impl` is "whole" and that is not possible; a single layer has
    nothing to fuse.
    """

    def __init__(
        self,
        layers: int = 12,
        d_model: int = 512,
        heads: int = 8,
        d_ff: int = 1365,
        components: int = 10,
        attention: str | Attend = "auto",
        mlp: str = "auto",
        heads_impl: str = "auto",
        checkpoint: str = "none",
        *,
        x_dim: int = 1,
        norm: str = "auto",
        loss_impl: str = "auto",
        weight_gradients: str = "auto",
        projections: str = "auto",
        layers_impl: str = "auto",
        padding: int = 128,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        for option, value, known in (
            ("checkpoint", checkpoint, CHECKPOINTS),
            ("norm", norm, ("auto", "torch")),
            ("loss_impl", loss_impl, ("auto", "fused", "separate", "torch")),
            ("weight_gradients", weight_gradients, gradients.MODES),
            ("projections", projections, gradients.PROJECTIONS),
            ("layers_impl", layers_impl, whole.CHOICES),
        ):
            if value not in known:
                raise ValueError(f"TransformerNP: {option} must be one of {', '.join(known)}, got {value!r}")
        if d_model % heads:
            raise ValueError(f"TransformerNP: d_model must be a multiple of heads, got {d_model, heads}")
        if loss_impl == "fused" and heads_impl == "torch":
            raise ValueError("TransformerNP: loss_impl 'fused' requires heads_impl 'fused' or 'auto', got 'torch'")
        self.dtype, self.plain_loss = dtype, loss_impl == "torch"
        self.weight_gradients, self.projections, self.layers_impl = weight_gradients, projections, layers_impl
        with_projections = isinstance(attention, str) and attention in WITH_PROJECTIONS
        self.may_defer = with_projections and mlp != "torch" and norm != "torch" and checkpoint == "none"
        self.fused_loss = loss_impl == "fused" or (loss_impl == "auto" and heads_impl != "torch")
        self.fused_embedding = mlp != "torch"
        self.embed = nn.Sequential(Linear(x_dim + 2, d_model), nn.SiLU(), Linear(d_model, d_model))
        self.blocks = nn.ModuleList(
            Block(
                ContextAttention(d_model, heads, attention, norm),
                Norm(d_model, norm),
                FeedForward(d_model, d_ff, padding, mlp),
                checkpoint,
            )
            for _ in range(layers)
        )
        self.norm = Norm(d_model, norm)
        self.heads = MixtureHeads(d_model, d_ff, components, padding, heads_impl)
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialises weights with variance 1 / columns, divided by the number of branches in the last weight of each
        branch and of the heads, and the components' means spread over [−1, 1]."""
        residual = (2 * len(self.blocks)) ** -0.5 if len(self.blocks) else 1.0
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0 if "norm" in name else 0.0)
            elif parameter is not self.heads.bias:
                columns = self.heads.hidden if name.endswith("down") else parameter.shape[-1]
                scale = residual if name.endswith(("down", "out.weight")) else 1.0
                parameter.normal_(0.0, scale / math.sqrt(columns), generator=generator)
        for module in (*(block.mlp for block in self.blocks), self.heads):
            module.up[..., module.hidden :, :] = 0
            module.down[..., module.hidden :] = 0
        self.heads.bias.zero_()
        self.heads.bias[:, 1] = torch.linspace(-1, 1, self.heads.bias.shape[0])

    @torch.no_grad()
    def flatten_parameters(self) -> None:
        """Moves the parameters into one buffer for each dtype, each at a multiple of 64 elements, as for an RNN. q, k
        and v can then be one GEMM. The parameters remain the same objects, so an optimizer is not affected. Call it
        again after a conversion, which allocates each parameter separately."""
        for dtype in dict.fromkeys(parameter.dtype for parameter in self.parameters()):
            alike = [parameter for parameter in self.parameters() if parameter.dtype == dtype]
            sizes = [rounded_up(parameter.numel(), ALIGNMENT) for parameter in alike]
            room = alike[0].new_zeros(sum(sizes))
            for parameter, place in zip(alike, room.split(sizes), strict=True):
                place = place[: parameter.numel()].view(parameter.shape)
                parameter.data = place.copy_(parameter)

    def embedded(self, x_context: torch.Tensor, y_context: torch.Tensor, x_target: torch.Tensor) -> torch.Tensor:
        """The rows [B, M + N, d_model] that are the input of the first block."""
        dtype = self.norm.weight.dtype if self.dtype is None else self.dtype
        first, _, second = self.embed
        if self.fused_embedding and embedding.takes(first, second, x_context, y_context, x_target):
            return embedding.embedded(x_context, y_context, x_target, first, second, dtype)
        targets = x_target.new_zeros(*x_target.shape[:-1], 2)
        context = torch.stack((y_context, torch.ones_like(y_context)), -1)
        points = torch.cat((torch.cat((x_context, context), -1), torch.cat((x_target, targets), -1)), 1)
        return self.embed(points.to(dtype))

    def forward(
        self, x_context: torch.Tensor, y_context: torch.Tensor, x_target: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(logits, means, log standard deviations), [B, N, components] each, fp32, from x_context [B, M, x_dim],
        y_context [B, M] and x_target [B, N, x_dim]."""
        logits, mu, log_sigma = self.heads(self.answers(x_context, y_context, x_target)).unbind(-2)
        return logits, mu, log_sigma

    def answers(self, x_context: torch.Tensor, y_context: torch.Tensor, x_target: torch.Tensor) -> torch.Tensor:
        """The rows of the targets [B, N, d_model] that are the input of the heads."""
        context = x_context.shape[1]
        rows, branch = self.embedded(x_context, y_context, x_target), None
        places = self.places(rows)
        weights = self.whole_layers(rows, context, places)
        if weights is not None:
            given = [place for place in places if place is not None]
            rows = whole.layers(rows, weights, given or None, context, EPS)
        else:
            for block, place in zip(self.blocks[:-1], places, strict=True):
                rows, branch = block(rows, branch, context, place=place, projections=self.projections)
        for block in self.blocks[-1:]:  # nothing reads the context rows of the last block
            rows, branch = block(rows, branch, context, start=context)
        return self.norm(rows if len(self.blocks) else rows[:, context:], branch)[0]

    def places(self, rows: torch.Tensor) -> list[gradients.Place] | list[None]:
        """The places to which all layers but the last defer the gradients of their weights, or a list of None."""
        layers = self.blocks[:-1]
        if not (self.may_defer and torch.is_grad_enabled() and len(layers)) or torch.compiler.is_compiling():
            return [None] * len(layers)
        if not self.unwrapped():
            return [None] * len(layers)
        weights = [block.weights() for block in layers]
        if not any(weight.requires_grad for layer in weights for weight in layer.values()):
            return [None] * len(layers)
        how, hidden = self.weight_gradients, weights[0]["up"].shape[0]
        if how == "auto":
            how = gradients.pick_weight_gradients(
                len(layers), rows.shape[:-1].numel(), rows.shape[-1], hidden, rows.itemsize
            )
        return [None] * len(layers) if how == "inline" else gradients.places(weights, how == "overlapped")

    def unwrapped(self) -> bool:
        """Whether all layers but the last are called as they were built: without a wrapper, and without hooks."""
        return all(isinstance(block, Block) and not block.hooked() for block in self.blocks[:-1])

    def whole_layers(
        self, rows: torch.Tensor, context: int, places: list[gradients.Place] | list[None]
    ) -> whole.Weights | None:
        """The weights of all layers but the last if these are one launch for such rows, otherwise None."""
        if self.layers_impl == "apart" or not len(self.blocks[:-1]):
            return None
        batch, points, _ = rows.shape
        if self.layers_impl == "auto" and whole.pick_layers(batch, context, points - context) == "apart":
            return None
        weights, reason = None, self._why_apart(rows, places)
        if reason is None:
            weights = whole.weights_of([block.weights() for block in self.blocks[:-1]])
            reason = whole.missing(rows, context, self.blocks[0].attention.heads, weights)
        if reason is not None and self.layers_impl == "whole":
            raise RuntimeError(f"TransformerNP: layers_impl must not be 'whole' here: {reason}")
        return weights if reason is None else None

    def _why_apart(self, rows: torch.Tensor, places: list[gradients.Place] | list[None]) -> str | None:
        """Why the layers cannot be one launch, apart from their sizes and weights; None if they can."""
        backward = self.blocks[0].attention.whole if self.may_defer else None
        if backward not in (None, "auto"):
            return f"it has a backward of attention of its own, so attention must be 'auto', got {backward!r}"
        if not rows.is_cuda:
            return "it needs a GPU"
        if not self.may_defer or torch.compiler.is_compiling():
            return "it requires eager calls, ridgeline's attention, MLP and norm, and no checkpointing"
        if None in places and not self.unwrapped():  # places are given only to unwrapped layers
            return "it calls no hook of a module, and no wrapper"
        deferred_ = all(place is not None and not place.operands.overlapped for place in places)
        if torch.is_grad_enabled() and not deferred_:
            return "it requires deferred weight gradients (weight_gradients)"
        return None

    def loss(
        self, x_context: torch.Tensor, y_context: torch.Tensor, x_target: torch.Tensor, y_target: torch.Tensor
    ) -> torch.Tensor:
        """The mean negative log-density of y_target [B, N]."""
        if self.fused_loss:
            return self.heads.negative_log_density(self.answers(x_context, y_context, x_target), y_target)
        return self.negative_log_density(*self(x_context, y_context, x_target), y_target)

    def negative_log_density(
        self, logits: torch.Tensor, mu: torch.Tensor, log_sigma: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        """The mean negative log-density over all targets (Bishop 1994, Mixture Density Networks, eq. 29)."""
        y = y.to(mu.dtype)
        if not self.plain_loss:
            return -gmm_logprob(logits, mu, log_sigma, y)
        z = (y.unsqueeze(-1) - mu) * torch.exp(-log_sigma)
        terms = logits.log_softmax(-1) - 0.5 * z * z - log_sigma - 0.5 * math.log(2 * math.pi)
        return -terms.logsumexp(-1).mean()
