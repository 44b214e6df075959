"""Profiler ranges of the stages of a step: one around each function of a stage, forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd.graph import Node

from . import step, weight_gradients, whole
from .layers import FeedForward, MixtureHeads
from .model import Block, ContextAttention, Norm, TransformerNP

Open = Callable[[str], AbstractContextManager[object]]

WEIGHT_GRADIENTS = "weight gradients"
#: (owner, function) -> its stage. A norm belongs to the stage that follows it.
FUNCTIONS: dict[tuple[Any, str], str] = {
    (TransformerNP, "embedded"): "embedding",
    (ContextAttention, "forward"): "attention",
    (Block, "deferring_attention"): "attention",
    (whole, "layers"): "layers",
    (FeedForward, "forward"): "mlp",
    (Block, "deferring_mlp"): "mlp",
    (MixtureHeads, "forward"): "heads",
    (MixtureHeads, "negative_log_density"): "heads",
    (TransformerNP, "negative_log_density"): "loss",
    (weight_gradients, "places"): WEIGHT_GRADIENTS,
    (step, "total_norm"): "optimizer",
    (step, "_update"): "optimizer",
}


@contextmanager
def stage_ranges(range_of: Open) -> Iterator[None]:
    """A context in which `transformer_np` launches its kernels inside range_of(stage). A kernel of the backward belongs
    to the function that created its autograd node. A stage is one of STAGES, "embedding" or, if the weight gradients of
    all layers are computed together, "weight gradients". A loss that is fused with the heads belongs to their stage.
    The rounding of the weights and the operations between stages are in no range. A compiled step has only the
    optimizer's range.

    The backward must run in the thread that calls it (`torch.autograd.set_multithreading_enabled(False)`).
    """
    marks = _Marks(range_of)
    with ExitStack() as stack:
        for (owner, name), stage in FUNCTIONS.items():
            marks.replace(stack, owner, name, functools.partial(marks.within, stage))
        marks.replace(stack, Norm, "forward", marks.norm)
        marks.replace(stack, TransformerNP, "loss", marks.loss)
        yield


class _Marks:
    """The ranges of a step. `spans` has, for each call of a stage's function, the half-open interval of the sequence
    numbers of the autograd nodes that it created."""

    def __init__(self, range_of: Open) -> None:
        self.range_of = range_of
        self.spans: list[tuple[int, int, str]] = []
        self.of_norms: dict[int, str] = {}

    def replace(self, stack: ExitStack, owner: Any, name: str, instead: Callable[..., Any]) -> None:
        """Replaces a function by `instead`, whose first argument is the original."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return instead(original, *args, **kwargs)

        setattr(owner, name, call)
        stack.callback(setattr, owner, name, original)

    def within(self, stage: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        first = torch.autograd._get_sequence_nr()
        with self.range_of(stage):
            result = original(*args, **kwargs)
        self.spans.append((first, torch.autograd._get_sequence_nr(), stage))
        return result

    def norm(self, original: Callable[..., Any], module: Norm, *args: Any) -> Any:
        return self.within(self.of_norms.get(id(module), "rest"), original, module, *args)

    def loss(self, original: Callable[..., Any], model: TransformerNP, *args: Any, **kwargs: Any) -> Any:
        """The entire forward, after which all nodes are known."""
        if torch.compiler.is_compiling():
            return original(model, *args, **kwargs)
        self.spans.clear()
        self.of_norms = {id(model.norm): "heads"}
        for block in model.blocks:
            assert isinstance(block, Block)
            self.of_norms |= {id(block.attention.norm): "attention", id(block.norm): "mlp"}
        result = original(model, *args, **kwargs)
        if result.grad_fn is not None:
            for node in _nodes(result.grad_fn):
                self._around(node)
        return result

    def _around(self, node: Node) -> None:
        number = node._sequence_nr()
        inside = [(last - first, stage) for first, last, stage in self.spans if first <= number < last]
        if not inside:
            return
        _, stage = min(inside)
        opened: list[AbstractContextManager[object]] = []

        def enter(*_: Any) -> None:
            opened.append(self.range_of(stage))
            opened[-1].__enter__()

        def leave(*_: Any) -> None:
            opened.pop().__exit__(None, None, None)

        node.register_prehook(enter)
        node.register_hook(leave)


def _nodes(root: Node) -> Iterator[Node]:
    seen, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
