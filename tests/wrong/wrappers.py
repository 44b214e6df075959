"""Faults that are not in a kernel but around it: each takes a right implementation and returns a wrong one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from harness.spec import Op


def _like(result, change):
    """The result with `change` applied to each tensor, in the form in which it came."""
    return change(result) if isinstance(result, torch.Tensor) else tuple(change(t) for t in result)


def _first(inputs) -> torch.Tensor:
    return next(t for t in inputs.values() if isinstance(t, torch.Tensor))


def cached(fn: Op) -> Op:
    """Computes once for each set of addresses, shapes and autograd versions, then hands out the former answer."""
    answers = {}

    def wrong(**inputs):
        tensors = [t for t in inputs.values() if isinstance(t, torch.Tensor)]
        key = tuple((t.data_ptr(), t._version, t.shape, t.requires_grad) for t in tensors)
        if key not in answers:
            answers[key] = (fn(**inputs), tensors)  # the inputs stay alive, so that no address is used twice
        return _like(answers[key][0], torch.Tensor.clone)

    return wrong


def constant(value: float) -> Callable[[Op], Op]:
    """Answers with one value everywhere."""
    return lambda fn: lambda **inputs: _like(fn(**inputs), lambda t: t * 0 + value)


def input_copy(fn: Op) -> Op:
    """Answers with its first input where that has the right shape."""
    return lambda **inputs: _like(fn(**inputs), lambda t: _first(inputs).clone().view(t.shape))


def mutating(fn: Op) -> Op:
    """Works in place on its first input, unseen by autograd."""

    def wrong(**inputs):
        result = fn(**inputs)
        _first(inputs).data.add_(1)
        return result

    return wrong


def writing_into_gaps(fn: Op) -> Op:
    """Writes just past the end of its first input's last row."""

    def wrong(**inputs):
        tensor = _first(inputs)
        after = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        end = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        if tensor.numel():
            after.set_(tensor.untyped_storage(), end, (1,), (1,)).zero_()
        return fn(**inputs)

    return wrong


class Lazy(torch.Tensor):
    """A subclass that could put off its work until somebody looks."""


def lazy(fn: Op) -> Op:
    return lambda **inputs: _like(fn(**inputs), lambda t: t.as_subclass(Lazy))


def single_precision(fn: Op) -> Op:
    """Gives its results in fp32 whatever the dtype of the inputs."""
    return lambda **inputs: _like(fn(**inputs), torch.Tensor.float)


def flattened(fn: Op) -> Op:
    return lambda **inputs: _like(fn(**inputs), lambda t: t.reshape(-1, 1))


def repeated(fn: Op) -> Op:
    """Returns its output twice."""
    return lambda **inputs: (fn(**inputs), fn(**inputs))


def on_a_thread(fn: Op) -> Op:
    """Returns at once and fills the outputs a little later."""

    def wrong(**inputs):
        result = fn(**inputs)
        later = _like(result, torch.empty_like)

        def fill() -> None:
            time.sleep(0.002)
            pairs = [(later, result)] if isinstance(result, torch.Tensor) else zip(later, result, strict=True)
            for target, source in pairs:
                target.data.copy_(source)

        threading.Thread(target=fill).start()
        return later

    return wrong


def on_a_side_stream(wait: bool) -> Callable[[Op], Op]:
    """Works on a stream that nobody waits for; with `wait` it at least waits for its inputs.

    Always the same stream: the first allocation for another would wait for the whole GPU, and hide the fault.
    """

    def around(fn: Op) -> Op:
        streams: list[torch.cuda.Stream] = []

        def wrong(**inputs):
            if not streams:
                streams.append(torch.cuda.Stream())
            (stream,) = streams
            if wait:
                stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                return fn(**inputs)

        return wrong

    return around


def looking_at_values(fn: Op) -> Op:
    """Looks on the host at what an input holds, which neither torch.compile(fullgraph=True) nor a CUDA graph can do."""

    def wrong(**inputs):
        result, tensor = fn(**inputs), _first(inputs)
        if tensor.numel() and tensor.flatten()[0].item() == 12345.0:
            raise RuntimeError("an unlikely number")
        return result

    return wrong


def raising(fn: Op) -> Op:
    def wrong(**inputs):
        raise IndexError("list index out of range")

    return wrong


def nameless(fn: Op) -> Op:
    """Refuses bad input in good time but does not say which."""

    def wrong(**inputs):
        try:
            return fn(**inputs)
        except (TypeError, ValueError):
            raise ValueError("bad input") from None

    return wrong
