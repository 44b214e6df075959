"""Operations on the tensors of a timed call between calls, outside the timed interval."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .correctness.guard import refill_a_few
from .measure import timing
from .spec import Case, Inputs


def timed_data(
    case: Case,
    mode: str,
    sets: Sequence[Inputs],
    grads: Sequence[Sequence[torch.Tensor] | None],
    generator: torch.Generator,
) -> timing.Data:
    """Restores inputs that are updated in place; in other inputs it permutes a few elements, the first included. For a
    backward alone it permutes the incoming gradients', since the inputs belong to a forward that has run."""
    former = [{n: inputs[n].clone() for n in case.mutates} for inputs in sets]

    def restore(index: int) -> None:
        for name, value in former[index].items():
            sets[index][name].data.copy_(value)

    def stir(index: int) -> None:
        moved = [*(grads[index] or ()), *(sets[index].values() if mode != "bwd" else ())]
        for tensor in moved:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.is_contiguous():
                refill_a_few(tensor, generator)

    return timing.Data(restore, stir)
