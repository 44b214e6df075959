"""The inputs of a benchmark, as cases of a `KernelSpec`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..roofline import Cost
from ..spec import Inputs
from .calls import INCOMING, PRECISION, TRAINING, Call, differentiable

#: keyword arguments by name, positional ones in a sequence, or a single tensor
Arguments = Mapping[str, Any] | Sequence[Any] | torch.Tensor
Source = Arguments | Callable[[torch.device, "torch.Generator | None"], Arguments]


@dataclass(frozen=True)
class Outputs:
    """The shapes and dtypes of the reference's outputs for a problem, and which of them have a gradient."""

    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    differentiable: tuple[bool, ...]

    @property
    def bytes(self) -> int:
        return sum(s.numel() * d.itemsize for s, d in zip(self.shapes, self.dtypes, strict=True))


def made(source: Source, device: torch.device, generator: torch.Generator | None) -> Inputs:
    """Makes fresh arguments by name, positional ones as "0", "1", …

    From a function: what it returns. From tensors: copies on the device, with the elements of floating-point ones
    permuted differently each time, so that the checks see different contents of the same distribution.
    Raises TypeError for anything else, and ValueError if there is no tensor.
    """
    arguments = source(device, generator) if callable(source) else source
    if isinstance(arguments, torch.Tensor):
        arguments = (arguments,)
    if isinstance(arguments, Mapping):
        named = dict(arguments)
    elif isinstance(arguments, Sequence) and not isinstance(arguments, str):
        named = {str(place): value for place, value in enumerate(arguments)}
    else:
        raise TypeError(
            "inputs must be keyword arguments in a mapping, positional ones in a sequence, a tensor, or a function "
            f"(device, generator) that makes them; got {type(arguments).__name__}"
        )
    if not any(isinstance(value, torch.Tensor) for value in named.values()):
        raise ValueError(f"inputs must have at least one tensor, got {sorted(named)}")
    if callable(source):
        return named
    return {n: _copy(v, device, generator) if isinstance(v, torch.Tensor) else v for n, v in named.items()}


def _copy(tensor: torch.Tensor, device: torch.device, generator: torch.Generator | None) -> torch.Tensor:
    fresh = tensor.detach().to(device, copy=True)
    if generator is None or not tensor.is_floating_point():
        return fresh
    order = torch.randperm(fresh.numel(), generator=generator, device=generator.device).to(device)
    return fresh.copy_(fresh.flatten()[order].view(fresh.shape))


@dataclass(frozen=True)
class Problem:
    """One set of arguments: `sample` has them without data, on the device "meta"."""

    source: Source
    sample: Inputs
    outputs: Outputs

    @property
    def sizes(self) -> dict[str, int]:
        """Every dimension of every tensor, named by its argument: "x.0"."""
        found = ((name, value.shape) for name, value in self.sample.items() if isinstance(value, torch.Tensor))
        return {f"{name}.{place}": size for name, shape in found for place, size in enumerate(shape)}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first floating-point tensor."""
        return next((tensor.dtype for _, tensor in differentiable(self.sample)), torch.float32)

    def inputs(self, device: torch.device, generator: torch.Generator | None, training: bool) -> Inputs:
        """Fresh arguments of a `Call`."""
        fresh = made(self.source, device, generator)
        if not any(True for _ in differentiable(fresh)):  # the oracle's inputs would not differ from the candidates'
            fresh[PRECISION] = torch.ones(1, device=device)
        return {**fresh, TRAINING: True, **incoming(self.outputs, device, generator)} if training else fresh


def described(source: Source, reference: Call, device: torch.device) -> Problem:
    """Runs the reference once on such arguments, with gradients, for the shapes of its outputs."""
    inputs = made(source, device, None)
    with torch.enable_grad():
        wrt = {name: value.detach().requires_grad_() for name, value in differentiable(inputs)}
        results = reference(**{**inputs, **wrt})
    outputs = Outputs(
        tuple(t.shape for t in results), tuple(t.dtype for t in results), tuple(t.requires_grad for t in results)
    )
    sample = {name: v.to("meta") if isinstance(v, torch.Tensor) else v for name, v in inputs.items()}
    return Problem(source, sample, outputs)


def incoming(outputs: Outputs, device: torch.device, generator: torch.Generator | None) -> Inputs:
    """A gradient for each output that has one: standard normal; 1 for a scalar, as in `loss.backward()`."""
    found: Inputs = {}
    for place, (shape, dtype, wanted) in enumerate(
        zip(outputs.shapes, outputs.dtypes, outputs.differentiable, strict=True)
    ):
        if wanted and len(shape) == 0:
            found[INCOMING.format(place)] = torch.ones((), dtype=dtype, device=device)
        elif wanted:
            found[INCOMING.format(place)] = torch.randn(shape, dtype=dtype, device=device, generator=generator)
    return found


def least_cost(problem: Problem, training: bool) -> Cost:
    """The default cost: every input read once, every output written once; in training as much again, for their
    gradients. No FLOPs."""
    moved = problem.outputs.bytes + sum(t.nbytes for t in problem.sample.values() if isinstance(t, torch.Tensor))
    return Cost(0, 2 * moved if training else moved)
