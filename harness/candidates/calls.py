"""A function or module as an op of a `KernelSpec`: keyword arguments in, plain tensors out.

In training a call is one forward and one backward: the gradients of all floating-point inputs and of a module's
parameters are computed. They are returned after the outputs, so that they are checked like these. Gradients of
parameters are returned if every candidate and the reference have parameters of the same names.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

# Names of arguments that a function of the user cannot have: they are no identifiers.
TRAINING = "in training"  # selects it
INCOMING = "incoming gradient {}"
PRECISION = "in precision"  # a tensor of no other meaning than its dtype, where no argument is floating-point


@dataclass
class Call:
    """`fn` with arguments by name: those named "0", "1", … are positional. `parameters` names the parameters whose
    gradients are returned."""

    fn: Callable[..., Any]
    parameters: tuple[str, ...] = ()
    _wide: nn.Module | None = field(default=None, init=False)

    def __call__(self, **inputs: Any) -> tuple[torch.Tensor, ...]:
        training = inputs.pop(TRAINING, False)
        fn = self._in_precision_of(inputs)
        inputs.pop(PRECISION, None)
        if not training:
            return tuple(tensors(_result(fn, inputs)))
        incoming = [inputs.pop(name) for name in list(inputs) if name.startswith(INCOMING.format(""))]
        with torch.enable_grad():
            wrt = {name: value.detach().requires_grad_() for name, value in differentiable(inputs)}
            results = list(tensors(_result(fn, {**inputs, **wrt})))
            used = [t for t in results if t.requires_grad]
            named = trainable(fn) if isinstance(fn, nn.Module) else {}
            leaves = [*wrt.values(), *named.values()]
            grads = torch.autograd.grad(used, leaves, incoming, allow_unused=True) if used else ()
        by_name = dict(zip([*wrt, *named], grads, strict=False))
        chosen = [(by_name.get(name), leaf) for name, leaf in wrt.items()]
        chosen += [(by_name.get(name), named[name]) for name in self.parameters if name in named]
        # The gradient of a tensor that the result does not depend on is 0.
        return (
            *(t.detach() for t in results),
            *(torch.zeros_like(leaf) if grad is None else grad for grad, leaf in chosen),
        )

    def _in_precision_of(self, inputs: Mapping[str, Any]) -> Callable[..., Any]:
        """`fn`; of a module a copy in fp64 if the inputs are fp64: that is the oracle."""
        if not isinstance(self.fn, nn.Module):
            return self.fn
        wide = any(t.dtype == torch.float64 for _, t in differentiable(inputs))
        own = next((p.dtype for p in self.fn.parameters() if p.is_floating_point()), torch.float64)
        if not wide or own == torch.float64:
            return self.fn
        if self._wide is None:
            self._wide = copy.deepcopy(self.fn).double()
        return self._wide


def _result(fn: Callable[..., Any], inputs: Mapping[str, Any]) -> Any:
    positional = [value for name, value in inputs.items() if name.isdecimal()]
    return fn(*positional, **{name: value for name, value in inputs.items() if not name.isdecimal()})


def differentiable(inputs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the floating-point tensors among some arguments."""
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            yield name, value


def tensors(result: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of a result: a tensor, a sequence, or a mapping such as a Hugging Face model's output, also
    nested. Everything else is ignored."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, Mapping):
        for value in result.values():
            yield from tensors(value)
    elif isinstance(result, Sequence) and not isinstance(result, str):
        for value in result:
            yield from tensors(value)


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The module's parameters that require gradients; those of a compiled module by their original names."""
    return {n.removeprefix("_orig_mod."): p for n, p in module.named_parameters() if p.requires_grad}


def with_weights_of(fn: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """A module whose state has the reference's names and shapes, with the reference's values: a copy, unless it has
    them already. Anything else is returned unchanged."""
    if not (isinstance(fn, nn.Module) and isinstance(reference, nn.Module)) or fn is reference:
        return fn
    mine, theirs = fn.state_dict(), reference.state_dict()
    if {n: t.shape for n, t in mine.items()} != {n: t.shape for n, t in theirs.items()}:
        return fn
    if all(torch.equal(t, theirs[n].to(t)) for n, t in mine.items()):
        return fn
    changed = copy.deepcopy(fn)
    changed.load_state_dict(theirs)
    return changed


def shared_parameters(callables: Sequence[Callable[..., Any]]) -> tuple[str, ...]:
    """The names of the parameters, if all are modules that have the same ones in the same shapes; else none."""
    found = []
    for fn in callables:
        named = trainable(fn) if isinstance(fn, nn.Module) else {}
        found.append({name: p.shape for name, p in named.items()})
    return tuple(found[0]) if found and all(shapes == found[0] for shapes in found) else ()
