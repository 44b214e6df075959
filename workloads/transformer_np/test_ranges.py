"""Tests that every launch of a step, forward and backward, is in the range of its stage."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import STAGES, TransformerNP, transformer_np
from .bench import SPEC, make_inputs
from .layers import FeedForward
from .ranges import FUNCTIONS, WEIGHT_GRADIENTS, stage_ranges

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAIN = dict(attention="sdpa", mlp="torch", heads_impl="torch", norm="torch", loss_impl="torch", optimizer="torch")
APART = STAGES[1:]  # the stages of a step whose layers are separate launches
PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")


class Seen(TorchDispatchMode):
    """Counts ops by the innermost open range."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ops: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def range(self, stage: str) -> Iterator[None]:
        self.open.append(stage)
        try:
            yield
        finally:
            assert self.open.pop() == stage

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.ops[self.open[-1] if self.open else "", str(op.overloadpacket)] += 1
        return op(*args, **kwargs or {})

    def products(self, stage: str) -> int:
        return sum(self.ops[stage, name] for name in PRODUCTS)


def step(**options) -> tuple[Seen, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """(op counts of a step in ranges, its results, the results of the same step without ranges)."""
    case = SPEC.case("tiny-5-3-b2-fp32")
    case = dataclasses.replace(case, dims={**case.dims, "layers": 3})
    inputs, again = (make_inputs(case, DEVICE, torch.Generator(DEVICE).manual_seed(0)) for _ in range(2))
    seen = Seen()
    with stage_ranges(seen.range), torch.autograd.set_multithreading_enabled(False), seen:
        results = transformer_np(**inputs, **options)
    assert not seen.open
    return seen, results, transformer_np(**again, **options)


def test_of_pytorchs_parts() -> None:
    seen, results, plain = step(**PLAIN)
    torch.testing.assert_close(results, plain)
    assert {stage for stage, _ in seen.ops} == {"", "embedding", *APART}
    # Two GEMMs forward and four backward. The embedding does not need the gradient of the points.
    assert (seen.products("mlp"), seen.products("embedding")) == (3 * 6, 5)
    # q, kv and the output projection; attention itself is one op each way.
    assert seen.products("attention") == 3 * 9
    attention = {name: n for (stage, name), n in seen.ops.items() if "scaled_dot" in name and stage == "attention"}
    assert sum(attention.values()) == 6 and sum("scaled_dot" in name for _, name in seen.ops) == len(attention)
    assert seen.ops["mlp", "aten.silu_backward"] == 3 and seen.ops["heads", "aten.silu_backward"] == 1
    assert seen.ops["embedding", "aten.silu_backward"] == 1
    assert sum(n for (_, name), n in seen.ops.items() if name == "aten.silu_backward") == 5
    assert seen.products("") == seen.products("optimizer") == 0
    assert any("_fused_adamw_" in name for stage, name in seen.ops if stage == "optimizer")
    assert any("logsumexp" in name for stage, name in seen.ops if stage == "loss")


@pytest.mark.parametrize("checkpoint", ["block", "attention"])
def test_what_is_computed_again_is_its_stages(checkpoint: str) -> None:
    seen, results, plain = step(checkpoint=checkpoint, **PLAIN)
    torch.testing.assert_close(results, plain)
    # Recomputation: three more GEMMs of attention, and one more of the MLP, since no gradient needs the second one.
    assert (seen.products("mlp"), seen.products("attention")) == (3 * 7, 3 * 12)


def test_of_gradients_that_are_computed_together() -> None:
    """With ridgeline's attention and MLP, for all layers but the last, whose gradients are inline."""
    parts = dict(heads_impl="torch", loss_impl="torch", optimizer="torch")
    seen, results, plain = step(weight_gradients="deferred", projections="apart", **parts)
    torch.testing.assert_close(results, plain)
    assert {stage for stage, _ in seen.ops} >= {"", "embedding", *APART, WEIGHT_GRADIENTS}
    assert seen.products(WEIGHT_GRADIENTS) == 5
    assert seen.products("") == seen.products("optimizer") == 0
    assert seen.ops["mlp", "aten.silu_backward"] == 2


def test_nothing_stays_replaced() -> None:
    before = [getattr(owner, name) for owner, name in FUNCTIONS]
    with pytest.raises(ValueError, match="stop"), stage_ranges(Seen().range):
        assert FeedForward.forward is not before[list(FUNCTIONS).index((FeedForward, "forward"))]
        raise ValueError("stop")
    assert [getattr(owner, name) for owner, name in FUNCTIONS] == before
    assert TransformerNP.loss.__name__ == "loss" and not hasattr(TransformerNP.loss, "__wrapped__")
