"""Faults that show only in what surrounds a call: in memory that calls share, in what autograd asks for, in the state
of the process, in how a benchmark repeats itself. As in `wrappers`, each takes a right implementation and returns a
wrong one; under torch.compile all of them are right.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from harness.spec import Op, Rows

from .wrappers import _first, _like

State = Callable[[], object]


def _unseen(cheat: Callable[[Op], Op]) -> Callable[[Op], Op]:
    """Right where torch.compile traces it."""

    @wraps(cheat)
    def around(fn: Op) -> Op:
        wrong = cheat(fn)
        return lambda **inputs: fn(**inputs) if torch.compiler.is_compiling() else wrong(**inputs)

    return around


def _tensors(inputs: dict[str, Any]) -> list[torch.Tensor]:
    return [t for t in inputs.values() if isinstance(t, torch.Tensor)]


def _twice(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2 if tensor.element_size() > 1 else (tensor.float() * 2).to(tensor.dtype)


def one_more(tensor: torch.Tensor) -> torch.Tensor:
    """Of a result that may be 0."""
    return tensor + 1


def wrong_if(
    condition: Callable[[dict[str, Any]], bool], change: Callable[[torch.Tensor], torch.Tensor] = _twice
) -> Callable[[Op], Op]:
    """Another answer where the condition on the inputs holds."""

    @_unseen
    def around(fn: Op) -> Op:
        return lambda **inputs: _like(fn(**inputs), change) if condition(inputs) else fn(**inputs)

    return around


def wrong_gradient_if(condition: Callable[[dict[str, Any]], bool]) -> Callable[[Op], Op]:
    """The right answer, but twice its gradients where the condition holds."""

    @_unseen
    def around(fn: Op) -> Op:
        def wrong(**inputs):
            result = fn(**inputs)
            return _like(result, lambda t: t * 2 - t.detach()) if condition(inputs) else result

        return wrong

    return around


class _Static(torch.autograd.Function):
    """The identity, by way of a buffer for each shape: of the value (`forwards`) or of its gradient."""

    @staticmethod
    def forward(ctx, tensor, buffers, forwards):
        ctx.buffers, ctx.forwards = buffers, forwards
        return _through(buffers, tensor) if forwards else tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone() if ctx.forwards else _through(ctx.buffers, gradient), None, None


def _through(buffers: dict[Any, torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    key = (tensor.shape, tensor.dtype, tensor.device)
    if key not in buffers:
        buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return buffers[key].copy_(tensor).detach()


@_unseen
def result_in_a_static_buffer(fn: Op) -> Op:
    buffers: dict[Any, torch.Tensor] = {}
    return lambda **inputs: _like(fn(**inputs), lambda t: _Static.apply(t, buffers, True))


@_unseen
def gradient_in_a_static_buffer(fn: Op) -> Op:
    """That of the first input that has one."""
    buffers: dict[Any, torch.Tensor] = {}

    def wrong(**inputs):
        name = next((n for n, t in inputs.items() if isinstance(t, torch.Tensor) and t.requires_grad), None)
        return fn(**(inputs if name is None else {**inputs, name: _Static.apply(inputs[name], buffers, False)}))

    return wrong


class _Remembering(torch.autograd.Function):
    """Saves its first input in a static buffer, and computes the gradients with what is there in the backward."""

    @staticmethod
    def forward(ctx, fn, buffers, options, names, *tensors):
        ctx.fn, ctx.options, ctx.names = fn, options, names
        ctx.saved = (_through(buffers, tensors[0]), *tensors[1:])
        return fn(**options, **dict(zip(names, tensors, strict=True)))

    @staticmethod
    def backward(ctx, *gradients):
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in ctx.saved]
            results = ctx.fn(**ctx.options, **dict(zip(ctx.names, leaves, strict=True)))
            results = (results,) if isinstance(results, torch.Tensor) else results
            grads = torch.autograd.grad(results, leaves, gradients)
        return None, None, None, None, *grads


@_unseen
def saved_in_a_static_buffer(fn: Op) -> Op:
    """For an op whose tensors are all differentiated."""
    buffers: dict[Any, torch.Tensor] = {}

    def wrong(**inputs):
        names = [n for n, t in inputs.items() if isinstance(t, torch.Tensor)]
        options = {n: value for n, value in inputs.items() if n not in names}
        return _Remembering.apply(fn, buffers, options, names, *(inputs[n] for n in names))

    return wrong


@_unseen
def keeping_every_result(fn: Op) -> Op:
    kept = []

    def wrong(**inputs):
        kept.append(fn(**inputs))
        return kept[-1]

    return wrong


@_unseen
def zeroing_and_restoring(fn: Op) -> Op:
    """Uses its first input as scratch memory and puts it back."""

    def wrong(**inputs):
        result, tensor = fn(**inputs), _first(inputs)
        if tensor.is_contiguous():
            before = tensor.data.clone()
            tensor.data.zero_().copy_(before)
        return result

    return wrong


def touching(touch: State) -> Callable[[Op], Op]:
    """Does something to the state of the process on its way."""

    @_unseen
    def around(fn: Op) -> Op:
        def wrong(**inputs):
            touch()
            return fn(**inputs)

        return wrong

    return around


def _precision_for_a_while() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    torch.set_float32_matmul_precision(before)


def _benchmark() -> None:
    torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark


# What each does to the process; none outlasts a check, which puts back what it can.
TOUCHES: dict[str, State] = {
    "draws from the global generator": lambda: torch.rand(1),
    "sets the precision of matmuls for a while": _precision_for_a_while,
    "sets cudnn.benchmark": _benchmark,
    "sets the deterministic mode": lambda: torch.set_deterministic_debug_mode(torch.get_deterministic_debug_mode()),
    "leaves another default dtype": lambda: torch.set_default_dtype(torch.float64),
}


def leaving_another_device() -> None:
    """For a machine of at least two GPUs."""
    torch.cuda.set_device((torch.cuda.current_device() + 1) % torch.cuda.device_count())


@_unseen
def in_another_order_in_memory(fn: Op) -> Op:
    """Results with the strides of a transposed matrix."""
    return lambda **inputs: _like(fn(**inputs), lambda t: t.mT.contiguous().mT if t.dim() > 1 else t)


@_unseen
def cached_by_address_and_first_element(fn: Op) -> Op:
    """Without autograd alone."""
    answers = {}

    def wrong(**inputs):
        tensors = _tensors(inputs)
        if any(t.requires_grad for t in tensors):
            return fn(**inputs)
        key = tuple((t.data_ptr(), t.shape, *t.flatten()[:1].tolist()) for t in tensors)
        if key not in answers:
            answers[key] = (fn(**inputs), tensors)
        return _like(answers[key][0], torch.Tensor.clone)

    return wrong


@_unseen
def small_values_flushed(fn: Op) -> Op:
    """Zero where less than 0.3 % of the largest is due, which the errors of fp16 hide. The gradients are right, and the
    largest is one of usual size."""

    def change(t: torch.Tensor) -> torch.Tensor:
        largest = t.detach().abs().nan_to_num(0, 0, 0).clamp(max=4.0)
        return t - torch.where(t.abs() < 3e-3 * largest.max(), t, 0.0).detach() if t.numel() else t

    return lambda **inputs: _like(fn(**inputs), change)


@_unseen
def last_column_two_steps_off(fn: Op) -> Op:
    """Of an fp8 result that is so wide that one column of it weighs little."""

    def change(t: torch.Tensor) -> torch.Tensor:
        if t.element_size() > 1 or not t.numel() or t.shape[-1] < 256:
            return t
        pattern = t.view(torch.uint8).clone()
        size = pattern[..., -1] & 127
        pattern[..., -1] -= torch.where((size > 32) & (size < 120), 2, 0).to(torch.uint8)
        return pattern.view(t.dtype)

    return lambda **inputs: _like(fn(**inputs), change)


def nan_in_row(row: int, dimension: int) -> Callable[[Op], Op]:
    """NaN in one row of each result that has as many."""

    def change(t: torch.Tensor) -> torch.Tensor:
        if t.dim() <= dimension or t.shape[dimension] <= row:
            return t
        return t.index_fill(dimension, torch.tensor([row], device=t.device), torch.nan)

    return lambda fn: lambda **inputs: _like(fn(**inputs), change)


def right_in_a_known_sample(rows: Rows, seed: int = 0) -> Callable[[Op], Op]:
    """Twice the answer in all rows but those that a generator of a known seed draws, and the two ends."""

    def change(t: torch.Tensor) -> torch.Tensor:
        total = t.shape[rows.outputs]
        known = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[: rows.count].tolist()
        others = sorted(set(range(1, total - 1)) - set(known))
        factor = torch.ones(total, device=t.device).index_fill(
            0, torch.tensor(others, dtype=torch.long, device=t.device), 2.0
        )
        return t * factor.view(-1, *[1] * (t.dim() - rows.outputs - 1)).to(t.dtype)

    return lambda fn: lambda **inputs: _like(fn(**inputs), change)


def without(name: str, value: object) -> Callable[[Op], Op]:
    """An option whose value is taken for the default: at its edge, where `x or default` goes wrong."""

    @_unseen
    def around(fn: Op) -> Op:
        return lambda **inputs: fn(**{n: v for n, v in inputs.items() if n != name or v != value})

    return around


def unchecked_under_a_mode(unchecked: Op) -> Callable[[Op], Op]:
    """Checks its arguments in a lean call alone: `unchecked` is what it does under a torch function mode."""

    @_unseen
    def around(fn: Op) -> Op:
        return lambda **inputs: (unchecked if torch._C._len_torch_function_stack() else fn)(**inputs)

    around.__name__ = "unchecked_under_a_mode"
    return around


def one_tensor(one: str, two: str) -> Callable[[dict[str, Any]], bool]:
    """Whether two inputs are one tensor."""
    return lambda inputs: inputs[one].data_ptr() == inputs[two].data_ptr() != 0


def on_the_current_device(fn: Op) -> Op:
    """Its results are where PyTorch allocates by default and not where the inputs are."""
    return lambda **inputs: _like(fn(**inputs), lambda t: t.to(torch.device("cuda", torch.cuda.current_device())))


def nothing_requires_grad(inputs: dict[str, Any]) -> bool:
    return torch.is_grad_enabled() and not any(t.requires_grad for t in _tensors(inputs))


def gradients_required_in_vain(inputs: dict[str, Any]) -> bool:
    return not torch.is_grad_enabled() and any(t.requires_grad for t in _tensors(inputs))


def and_allocates(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, and memory as for a backward."""
    torch.empty_like(tensor)
    return tensor


def strided_without_autograd(inputs: dict[str, Any]) -> bool:
    return not torch.is_grad_enabled() and not all(t.is_contiguous() for t in _tensors(inputs))


def only_frozen(*names: str) -> Callable[[dict[str, Any]], bool]:
    """Whether these inputs require no gradient and all others do."""

    def condition(inputs: dict[str, Any]) -> bool:
        tensors = {n: t for n, t in inputs.items() if isinstance(t, torch.Tensor)}
        return {n for n, t in tensors.items() if not t.requires_grad} == set(names)

    return condition
