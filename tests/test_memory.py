"""Memory of a call: what is saved for the backward, peak and growth, each against a figure known beforehand."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from harness import execute, registry
from harness.measure import memory

CPU = torch.device("cpu")
SIZE = 256
BYTES = 4 * SIZE


def leaf(size: int = SIZE) -> torch.Tensor:
    return torch.randn(size, requires_grad=True)


class Keeps(torch.autograd.Function):
    """Saves its input, its output and 2x, and keeps two more tensors as attributes."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(x, y, 2 * x)
        ctx.kept = [3 * x, {"again": x}]
        ctx.number = 4
        ctx.other = 5 * x
        return y

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.saved_tensors[1]


def saved(fn, *inputs, given=()) -> int:
    return memory.saved_bytes(lambda: fn(*inputs), (*inputs, *given))


@pytest.mark.parametrize(
    ("fn", "tensors"),
    [
        (lambda x: x + 1, 0),  # saves nothing
        (lambda x: x.exp(), 0),  # its output
        (lambda x: x * x, 0),  # its input, twice
        (lambda x: x.exp() * 2, 1),  # of two steps the result between them
        (lambda x: x.exp().view(2, -1).sin().flatten() * 1, 1),  # the same storage for exp and for sin
        (lambda x: x.exp()[: SIZE // 2].sin() + 1, 1),  # a view keeps all of its storage
        (lambda x: (x.sin().sin(), x.detach().exp())[1], 0),  # what is dropped again
        (Keeps.apply, 3),
        (lambda x: [{"y": Keeps.apply(x)}], 3),
        (lambda x: checkpoint(lambda y: y.exp().sin().exp() + 1, x, use_reentrant=False), 0),
    ],
)
def test_what_is_saved_counts_each_storage_once_and_no_input_or_output(fn, tensors) -> None:
    assert saved(fn, leaf()) == tensors * BYTES


def test_parameters_are_not_what_a_step_saves() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.Tanh(), torch.nn.Linear(SIZE, 1))
    x = torch.randn(SIZE)
    assert saved(model, x, given=(model,)) == BYTES  # tanh's result
    assert saved(model, x) == BYTES + 4 * SIZE  # the last layer's weight too: it is no input


def test_a_step_that_runs_its_own_backward_gives_the_most_at_once() -> None:
    x = leaf()

    def step() -> None:
        for _ in range(3):
            with torch.enable_grad():
                x.exp().sin().exp().sum().backward()

    assert memory.most_saved_bytes(step, [x]) == 2 * BYTES  # of each exp its result, in one step at a time


@pytest.mark.parametrize("name", ["rmsnorm", "gelu", "swiglu"])
def test_our_kernels_save_what_their_docstrings_say(name: str) -> None:
    spec = registry.load(name)
    case = next(
        c
        for c in spec.cases
        if not c.bench and c.dtype == torch.float32 and 1 < min(c.dims.values()) <= max(c.dims.values()) < 200
    )
    inputs = spec.make_inputs(case, "cpu", torch.Generator().manual_seed(0))
    inputs |= {n: t.requires_grad_() for n, t in execute.leaves(spec, inputs).items()}
    forward = next(iter(spec.implementations.values()))
    kept = memory.saved_bytes(lambda: forward(**inputs), inputs.values())
    assert kept <= 4 * case.dims["rows"]  # one fp32 number a row, in rmsnorm


def test_the_peak_of_a_call_on_a_cpu_is_the_processs() -> None:
    size = 1 << 24
    found = memory.peak_bytes(lambda: torch.ones(size).sum(), CPU)
    assert found is not None and 0.9 * 4 * size <= found < 1.2 * 4 * size


def test_a_leak_grows_with_the_calls() -> None:
    kept: list[torch.Tensor] = []
    size = 1 << 18
    leaking = memory.growth_bytes(lambda: kept.append(torch.ones(size)), CPU)
    honest = memory.growth_bytes(lambda: torch.ones(size), CPU)
    assert leaking is not None and leaking >= 0.95 * memory.GROWTH_CALLS * 4 * size
    assert honest is not None and honest < 2 * size


def test_of_long_calls_there_is_no_growth() -> None:
    calls: list[int] = []
    found = memory.measure(lambda: calls.append(1), CPU, saved=7, growth=False)
    assert (found.saved, found.growth) == (7, None) and len(calls) == 2


@pytest.mark.parametrize(("kept", "given_back"), [(5, True), (3, False)])
def test_room_is_made_where_less_is_free_than_what_is_kept(monkeypatch, kept: int, given_back: bool) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 + kept)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4, 80))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    memory.make_room(torch.device("cuda", 0))
    assert bool(calls) == given_back


def test_a_collection_is_of_new_garbage_alone_unless_somebody_else_has_frozen_the_rest(monkeypatch):
    gc.collect()
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        assert frozen > memory.FROZEN_AT_START
        with memory.only_new_garbage():
            assert gc.get_freeze_count() <= frozen
        monkeypatch.setattr(memory, "FROZEN_AT_START", frozen)  # by the interpreter, as of Python 3.12
        kept = [[number] for number in range(1000)]
        with memory.only_new_garbage():
            assert gc.get_freeze_count() >= frozen + len(kept)
        assert gc.get_freeze_count() == 0
    finally:
        gc.unfreeze()
