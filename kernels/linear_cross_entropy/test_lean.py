"""The eager path compared with that through torch.library, and the keys of cached plans."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import calls, launch, library, linear_cross_entropy
from .test_linear_cross_entropy import DEVICE, problem

OPTIONS = (
    dict(),
    dict(scratch_bytes=0),
    dict(reduction="sum", label_smoothing=0.1, z_loss=1e-2, softcap=5.0, scratch_bytes=0),
    dict(reduction="none", scratch_bytes=3000),
)


class Passing(TorchDispatchMode):
    """A dispatch mode that changes nothing, but sends a call through torch.library."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def results(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None, **options
) -> list[torch.Tensor]:
    """The loss and the gradients for an incoming gradient that is not 1."""
    leaves = [t.detach().requires_grad_() for t in (hidden, weight, bias) if t is not None]
    loss = linear_cross_entropy(*leaves[:2], target, bias=leaves[2] if bias is not None else None, **options)
    return [loss.detach().clone(), *torch.autograd.grad(loss, leaves, torch.full_like(loss, 0.5))]


def same(mine: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for a, b in zip(mine, other, strict=True):
        assert a.dtype == b.dtype and a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def biases(vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, None]:
    return torch.linspace(-1, 1, vocab, device=DEVICE).to(dtype), None


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_both_paths_give_the_same_bits(options, dtype):
    hidden, weight, target = problem(dtype=dtype, grad=False)
    for bias in biases(50, dtype):
        mine = results(hidden, weight, target, bias, **options)
        same(results(hidden, weight, target, bias, **options), mine)  # from the cached plan
        with Passing():
            other = results(hidden, weight, target, bias, **options)
            alone = linear_cross_entropy(hidden, weight, target, bias=bias, **options)
        same(other, mine)
        same([linear_cross_entropy(hidden, weight, target, bias=bias, **options)], [alone])


def test_no_op_is_called_by_an_eager_call(monkeypatch):
    for name in ("fwd_op", "ready_op", "bwd_op", "scale_op"):
        monkeypatch.setattr(library, name, None)
    for options in OPTIONS:
        results(*problem(grad=False), **options)
    linear_cross_entropy(*problem(grad=False))


def layouts(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor):
    """The same values with other strides and offsets."""
    (rows, dim), vocab = hidden.shape, weight.shape[0]
    for offset, extra in itertools.product((0, 1, 4), (0, 1, 4)):
        room = torch.full((offset + rows * (dim + extra),), torch.nan, device=DEVICE)
        yield room.as_strided((rows, dim), (dim + extra, 1), offset).copy_(hidden), weight, target
        room = torch.full((offset + vocab * (dim + extra),), torch.nan, device=DEVICE)
        yield hidden, room.as_strided((vocab, dim), (dim + extra, 1), offset).copy_(weight), target
    yield hidden.t().contiguous().t(), weight.t().contiguous().t(), target
    yield torch.stack((hidden, hidden), 2)[..., 1], weight, target  # copied
    yield hidden, weight, target.int()
    yield hidden, weight, torch.stack((target, target), 1)[:, 1]
    yield hidden.view(rows, 1, dim), weight, target.view(rows, 1)


@pytest.mark.parametrize(("scratch", "reduction"), [(0, "mean"), (None, "none")])
def test_plans_are_not_mixed_up(scratch, reduction):
    """Tensors of different alignments, strides, dtypes and shapes, all called in sequence, twice."""
    given = problem(grad=False)
    options = dict(scratch_bytes=scratch, reduction=reduction)
    expected = results(*given, **options)
    for _ in range(2):
        for other in layouts(*given):
            for mine, theirs in zip(results(*other, **options), expected, strict=True):
                torch.testing.assert_close(mine.view(theirs.shape), theirs, rtol=1e-5, atol=1e-6)
        half = results(given[0].half(), given[1].half(), given[2], **options)
        assert [t.dtype for t in half] == [torch.float32, torch.float16, torch.float16]


def test_options_and_wanted_gradients_are_not_mixed_up():
    hidden, weight, target = problem(grad=False)
    asked = [dict(), dict(reduction="sum"), dict(label_smoothing=0.2), dict(z_loss=0.5), dict(softcap=1.0)]
    asked.append(dict(ignore_index=int(target[1])))
    target[target == -100] = int(target[1])
    first = [results(hidden, weight, target, **options) for options in asked]
    assert len({float(found[0]) for found in first}) == len(asked)
    for options, found in zip(asked, first, strict=True):
        same(results(hidden, weight, target, **options), found)
    for wanted in itertools.product((False, True), repeat=2):
        leaves = [t.detach().requires_grad_(need) for t, need in zip((hidden, weight), wanted, strict=True)]
        loss = linear_cross_entropy(*leaves, target)
        assert loss.requires_grad == any(wanted)
        if any(wanted):
            (loss * 0.5).backward()
        for leaf, need, gradient in zip(leaves, wanted, first[0][1:], strict=True):
            assert (leaf.grad is not None) == need
            if need:
                torch.testing.assert_close(leaf.grad, gradient, rtol=1e-5, atol=1e-7)


def test_a_number_that_is_a_tensor_is_read_at_each_call():
    given, z_loss = problem(grad=False), torch.tensor(0.5)
    before = linear_cross_entropy(*given, z_loss=z_loss)
    z_loss.fill_(0.0)
    same([linear_cross_entropy(*given, z_loss=z_loss)], [linear_cross_entropy(*given)])
    assert before != linear_cross_entropy(*given)


def test_a_plan_holds_no_tensor_of_its_call():
    """A cached plan that held a tensor would keep a batch's memory allocated."""
    import gc
    import weakref

    hidden, weight, target = problem()
    loss = linear_cross_entropy(hidden, weight, target, bias=weight[:, 0].detach().clone(), scratch_bytes=0)
    torch.autograd.grad(loss, (hidden, weight))
    found = [weakref.ref(t) for t in (hidden, weight, target, loss)]
    assert calls._EAGER
    del hidden, weight, target, loss
    gc.collect()
    assert not any(reference() is not None for reference in found)


def test_the_number_of_plans_is_bounded(monkeypatch):
    monkeypatch.setattr(calls._EAGER, "size", 5)
    for rows in range(1, 12):
        linear_cross_entropy(*problem(rows=rows, grad=False))
    assert len(calls._EAGER) == 5
    launch.forget()
    assert not calls._EAGER


@pytest.fixture
def one_at_a_time(monkeypatch):
    """Serialises the launches in Triton's interpreter, which is not thread-safe."""
    if DEVICE == "cpu":
        lock, original = threading.Lock(), launch.Launch.__call__

        def call(self, *arguments):
            with lock:
                return original(self, *arguments)

        monkeypatch.setattr(launch.Launch, "__call__", call)


def test_two_threads_at_once(one_at_a_time):
    given = [problem(rows=rows, grad=False) for rows in range(5, 11)]
    expected, found = [results(*each) for each in given], []
    launch.forget()

    def work() -> None:
        found.extend([results(*each) for each in given])

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12
    for index, each in enumerate(found):
        same(each, expected[index % 6])


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_loss_that_is_not_used_has_no_gradient(reduction):
    hidden, weight, target = problem()
    used = linear_cross_entropy(hidden, weight, target, reduction=reduction)

    class Nothing(torch.autograd.Function):
        """Returns an undefined gradient (None)."""

        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, g):
            return None

    Nothing.apply(used).backward()
    assert hidden.grad is None and weight.grad is None


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("squared", [False, True])
def test_a_second_derivative_is_an_error(reduction, squared):
    hidden, weight, target = problem()
    loss = linear_cross_entropy(hidden, weight, target, reduction=reduction).sum()
    (gradient,) = torch.autograd.grad(loss * loss if squared else loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        gradient.sum().backward()


def test_gradients_for_several_incoming_ones():
    hidden, weight, target = problem(rows=4)
    loss = linear_cross_entropy(hidden, weight, target, reduction="none")
    incoming = torch.eye(4, device=DEVICE)
    (rows,) = torch.autograd.grad(loss, hidden, incoming, is_grads_batched=True, retain_graph=True)
    for one, row in zip(incoming, rows, strict=True):
        torch.testing.assert_close(row, torch.autograd.grad(loss, hidden, one, retain_graph=True)[0], rtol=0, atol=0)


def test_several_incoming_gradients_of_a_mean():
    """Gradients that the forward computed are scaled in place, so they serve one incoming gradient only. The second one
    is off the alignment of the first."""
    hidden, weight, target = problem()
    incoming = torch.randn(3, device=DEVICE)
    both = hidden, weight
    rows = torch.autograd.grad(linear_cross_entropy(hidden, weight, target), both, incoming, is_grads_batched=True)
    for index, one in enumerate(incoming):
        alone = torch.autograd.grad(linear_cross_entropy(hidden, weight, target), both, one)
        for several, mine in zip(rows, alone, strict=True):
            torch.testing.assert_close(several[index], mine, rtol=1e-5, atol=1e-6)
