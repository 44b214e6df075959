"""The model with which TransformerNP is compared: the same task without attention."""

from __future__ import annotations

import math

import torch
from torch import nn


class MeanPoolingNP(nn.Module):
    """A conditional neural process (Garnelo et al. 2018, arXiv:1807.01613), in plain PyTorch.

        r = mean over the context of MLP(x, y)        (logit, μ, log σ)_k of a target = MLP(r, x)

    Both MLPs have `layers` hidden layers of `width` and SiLU. The context is represented by a single vector. The
    parameters' values come from `generator`.
    """

    def __init__(
        self,
        width: int = 128,
        layers: int = 3,
        components: int = 10,
        *,
        x_dim: int = 1,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.components = components
        self.encoder = _mlp(x_dim + 1, width, layers, width)
        self.decoder = _mlp(width + x_dim, width, layers, 3 * components)
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialises weights with variance 1 / columns, and the components' means spread over [−1, 1], as in
        TransformerNP."""
        for parameter in self.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
            else:
                parameter.zero_()
        means = self.decoder[-1].bias[self.components : 2 * self.components]
        means.copy_(torch.linspace(-1, 1, self.components))

    def forward(
        self, x_context: torch.Tensor, y_context: torch.Tensor, x_target: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(logits, means, log standard deviations), [B, N, components] each, as in TransformerNP."""
        pooled = self.encoder(torch.cat((x_context, y_context[..., None]), -1)).mean(1, keepdim=True)
        seen = pooled.expand(-1, x_target.shape[1], -1)
        logits, mu, log_sigma = self.decoder(torch.cat((seen, x_target), -1)).chunk(3, -1)
        return logits, mu, log_sigma

    def loss(
        self, x_context: torch.Tensor, y_context: torch.Tensor, x_target: torch.Tensor, y_target: torch.Tensor
    ) -> torch.Tensor:
        """The mean negative log-density of y_target [B, N]."""
        logits, mu, log_sigma = self(x_context, y_context, x_target)
        z = (y_target[..., None] - mu) * torch.exp(-log_sigma)
        terms = logits.log_softmax(-1) - 0.5 * z * z - log_sigma - 0.5 * math.log(2 * math.pi)
        return -terms.logsumexp(-1).mean()


def _mlp(inputs: int, width: int, layers: int, outputs: int) -> nn.Sequential:
    hidden = [part for i in range(layers) for part in (nn.Linear(width if i else inputs, width), nn.SiLU())]
    return nn.Sequential(*hidden, nn.Linear(width, outputs))
