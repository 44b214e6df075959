"""Comparison on a sample of rows, for problems that are too large for the reference.

If an op computes rows independently (such as the queries of an attention without a mask), its outputs on some rows are
those of the problem that has only these rows. The same holds for all gradients, sums over rows included, if the
incoming gradients of the other rows are 0.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .spec import Case, Inputs, KernelSpec, Rows

# An implementation cannot know in advance which rows are drawn: another process draws others.
RUN = secrets.randbits(62)


@dataclass(frozen=True)
class Sample:
    """The drawn rows of one problem: `index`, out of `total`."""

    rows: Rows
    index: torch.Tensor
    total: int

    def inputs(self, inputs: Inputs) -> Inputs:
        """The problem restricted to these rows."""
        return {
            name: value.index_select(self.rows.inputs[name], self.index) if name in self.rows.inputs else value
            for name, value in inputs.items()
        }

    def outputs(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """These rows of outputs or of their gradients."""
        return [None if t is None else t.index_select(self.rows.outputs, self.index) for t in tensors]

    def silence_others(self, out_grads: Sequence[torch.Tensor | None]) -> None:
        """Sets the incoming gradients of all other rows to 0, in place."""
        for gradient, kept in zip(out_grads, self.outputs(out_grads), strict=True):
            if gradient is not None and kept is not None:
                gradient.zero_().index_copy_(self.rows.outputs, self.index, kept)

    def results(self, results: Sequence[torch.Tensor], names: Sequence[str]) -> list[torch.Tensor]:
        """The outputs and gradients that depend only on these rows; `names` are those of `oracle.Expected`."""
        dimensions = {f"gradient of {name}": dimension for name, dimension in self.rows.inputs.items()}
        chosen = []
        for name, tensor in zip(names, results, strict=True):
            dimension = self.rows.outputs if name.startswith("output") else dimensions.get(name)
            chosen.append(tensor if dimension is None else tensor.index_select(dimension, self.index))
        return chosen

    def whole(self, output: torch.Tensor) -> torch.Tensor:
        """An output of these rows expanded to the whole problem's shape, without memory."""
        shape = list(output.shape)
        shape[self.rows.outputs] = self.total
        return output.new_empty(1).expand(shape)


def draw(spec: KernelSpec, case: Case, inputs: Inputs, seed: int = 0) -> Sample | None:
    """Draws random rows, including the first and the last; None if the whole case is compared with the reference. One
    seed gives the same rows throughout a process, and others in the next."""
    rows = spec.sampled(case)
    if rows is None:
        return None
    name, dimension = next(iter(rows.inputs.items()))
    total, device = inputs[name].shape[dimension], inputs[name].device
    middle = torch.randperm(total, generator=torch.Generator().manual_seed(seed ^ RUN))[: rows.count]
    ends = torch.tensor([0, total - 1])
    return Sample(rows, torch.cat([middle, ends]).unique().to(device), total)
