"""The eager path compared with that through torch.library, and the keys of cached plans."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import calls, cross_entropy, cross_entropy_and_grad, launch, library
from .test_cross_entropy import DEVICE, batch, through

ALL = dict(label_smoothing=0.1, z_loss=1e-2, softcap=5.0, return_z_loss=True, return_lse=True)
OPTIONS = (
    dict(),
    dict(reduction="sum", z_loss=1e-2, return_lse=True),
    dict(reduction="none", **ALL),
    dict(grad_in_forward=True),
    dict(grad_in_forward=True, inplace=True, reduction="none", **ALL),
    dict(inplace=True, **ALL),
)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Passing(TorchDispatchMode):
    """A dispatch mode that changes nothing, but sends a call through torch.library."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def results(logits: torch.Tensor, target: torch.Tensor, **options) -> list[torch.Tensor]:
    """The results of a call, and the gradients of its first and last results."""
    made = through(logits)
    found = cross_entropy(made, target, **options)
    found = found if isinstance(found, tuple) else (found,)
    differentiated = [t for t in found if t.requires_grad]
    incoming = [torch.full_like(t, 0.5) for t in differentiated]
    return [*(t.detach().clone() for t in found), *torch.autograd.grad(differentiated, made, incoming)]


def same(mine: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for a, b in zip(mine, other, strict=True):
        assert a.dtype == b.dtype and a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("vocab", [40, 4101])
@pytest.mark.parametrize("weighted", [False, True])
def test_both_paths_give_the_same_bits(options, vocab, weighted):
    logits, target = batch(5, vocab)
    options = {**options, "weight": torch.rand(vocab, device=DEVICE) if weighted else None}
    mine = results(logits, target, **options)
    same(results(logits, target, **options), mine)  # from the cached plan
    with Passing():
        other = results(logits, target, **options)
    same(other, mine)


@pytest.mark.parametrize("inplace", [False, True])
def test_both_paths_of_the_loss_and_its_gradient_give_the_same_bits(inplace):
    logits, target = batch(5, 40)
    mine = cross_entropy_and_grad(logits.clone(), target, inplace=inplace, **ALL)
    with Passing():
        other = cross_entropy_and_grad(logits.clone(), target, inplace=inplace, **ALL)
    same(list(mine), list(other))


def test_no_op_is_called_by_an_eager_call(monkeypatch):
    for name in ("fwd_op", "bwd_op", "bwd_in_place_op", "fwd_grad_op", "fwd_grad_in_place_op", "scale_op"):
        monkeypatch.setattr(library, name, None)
    monkeypatch.setattr(library, "scale_in_place_op", None)
    for options in OPTIONS:
        results(*batch(5, 40), **options)
    cross_entropy_and_grad(*batch(5, 40))


def layouts(logits: torch.Tensor, target: torch.Tensor):
    """The same values with other strides and offsets."""
    rows, vocab = logits.shape
    for offset, stride in itertools.product((0, 1, 3, 4), (vocab, vocab + 1, vocab + 4)):
        room = torch.full((offset + rows * stride,), torch.nan, device=DEVICE, dtype=logits.dtype)
        yield room.as_strided((rows, vocab), (stride, 1), offset).copy_(logits), target
    yield logits.t().contiguous().t(), target
    yield logits, target.int()
    yield logits, torch.stack((target, target), 1)[:, 1]
    yield logits.view(rows, 1, vocab), target.view(rows, 1)


@pytest.mark.parametrize("vocab", [40, 4101])
@pytest.mark.parametrize("grad_in_forward", [False, True])
def test_plans_are_not_mixed_up(vocab, grad_in_forward):
    """Tensors of different alignments, strides, dtypes and shapes, all called in sequence, twice."""
    logits, target = batch(4, vocab)
    options = dict(grad_in_forward=grad_in_forward, label_smoothing=0.1)
    expected = results(logits, target, **options)
    for _ in range(2):
        for given, targets in layouts(logits, target):
            for mine, other in zip(results(given, targets, **options), expected, strict=True):
                torch.testing.assert_close(mine.view(other.shape), other, rtol=1e-6, atol=1e-7)
        half = results(logits.half(), target, **options)
        assert half[0].dtype == half[1].dtype == torch.float16


def test_options_are_not_mixed_up():
    logits, target = batch(4, 40)
    target[target == -100] = 7
    asked = [
        dict(),
        dict(ignore_index=7),
        dict(label_smoothing=0.25),
        dict(reduction="sum"),
        dict(z_loss=0.5),
        dict(softcap=2.0),
    ]
    first = [results(logits, target, **options) for options in asked]
    assert len({float(found[0]) for found in first}) == len(asked)
    for options, found in zip(asked, first, strict=True):
        same(results(logits, target, **options), found)
    assert len(cross_entropy(logits, target, return_lse=True)) == 2
    with torch.autocast(DEVICE, dtype=torch.float16 if DEVICE == "cuda" else torch.bfloat16):
        assert cross_entropy(logits.half(), target).dtype == torch.float32
    assert cross_entropy(logits.half(), target).dtype == torch.float16


def test_a_number_that_is_a_tensor_is_read_at_each_call():
    logits, target = batch(4, 40)
    z_loss = torch.tensor(0.5)
    before = cross_entropy(logits, target, z_loss=z_loss)
    z_loss.fill_(0.0)
    torch.testing.assert_close(cross_entropy(logits, target, z_loss=z_loss), cross_entropy(logits, target))
    assert before != cross_entropy(logits, target)


def test_errors_come_with_a_kept_plan_too():
    logits, target = batch(4, 40)
    weight = torch.rand(40, device=DEVICE)
    cross_entropy(logits, target, weight=weight)
    with pytest.raises(TypeError, match="ignore_index must be an int"):
        cross_entropy(logits, target, weight=weight, ignore_index=-100.0)
    with pytest.raises(ValueError, match="weight must not require"):
        cross_entropy(logits, target, weight=weight.requires_grad_())
    for _ in range(2):
        with pytest.raises(ValueError, match="not be a leaf"):
            cross_entropy(logits.detach().requires_grad_(), target, inplace=True)
        results(logits, target, inplace=True)


def test_the_number_of_plans_is_bounded(monkeypatch):
    monkeypatch.setattr(calls._EAGER, "size", 5)
    target = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for vocab in range(1, 12):
        cross_entropy(torch.zeros(1, vocab, device=DEVICE), target)
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
    given = [batch(4, vocab) for vocab in range(20, 30)]
    expected, found = [results(*pair) for pair in given], []
    launch.forget()

    def work() -> None:
        found.extend([results(*pair) for pair in given])

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20
    for index, pair in enumerate(found):
        same(pair, expected[index % 10])


def test_an_output_that_is_not_used_has_no_gradient():
    logits, target = batch(4, 40)
    options = dict(return_z_loss=True, return_lse=True, z_loss=0.1)
    for used in range(3):
        leaf = logits.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(cross_entropy(leaf, target, **options)[used].sum(), leaf)
        with Passing():
            leaf = logits.detach().requires_grad_()
            (other,) = torch.autograd.grad(cross_entropy(leaf, target, **options)[used].sum(), leaf)
        same([gradient], [other])
    leaf = logits.detach().requires_grad_()
    found = cross_entropy(leaf, target, grad_in_forward=True, **options)
    assert [t.requires_grad for t in found] == [True, False, False]


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("grad_in_forward", [False, True])
def test_a_second_derivative_is_an_error(grad_in_forward, given):
    """Whether or not the incoming gradient itself requires a gradient."""
    logits, target = batch(4, 40)
    leaf = logits.requires_grad_()
    loss = cross_entropy(leaf, target, grad_in_forward=grad_in_forward)
    scale = torch.ones((), device=DEVICE, requires_grad=True) if given else None
    (gradient,) = torch.autograd.grad(loss, leaf, scale, create_graph=True)
    with pytest.raises(RuntimeError):
        gradient.sum().backward()


def test_gradients_for_several_incoming_ones():
    """is_grads_batched runs the backward under vmap. An op without a batching rule then runs once per gradient."""
    logits, target = batch(4, 40)
    leaf = logits.requires_grad_()
    loss = cross_entropy(leaf, target, reduction="none")
    incoming = torch.eye(4, device=DEVICE)
    (rows,) = torch.autograd.grad(loss, leaf, incoming, is_grads_batched=True, retain_graph=True)
    for one, row in zip(incoming, rows, strict=True):
        torch.testing.assert_close(row, torch.autograd.grad(loss, leaf, one, retain_graph=True)[0], rtol=0, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("options", [dict(grad_in_forward=True), dict(inplace=True)])
def test_what_is_overwritten_serves_one_incoming_gradient_only(options, reduction):
    """With several, the gradient or the logits are read once for each, so neither is overwritten."""
    logits, target = batch(4, 40)
    leaf = logits.requires_grad_()

    def loss():
        return cross_entropy(leaf * 1, target, reduction=reduction, **options)

    incoming = torch.randn(3, *loss().shape, device=DEVICE)
    (rows,) = torch.autograd.grad(loss(), leaf, incoming, is_grads_batched=True)
    for one, row in zip(incoming, rows, strict=True):
        torch.testing.assert_close(row, torch.autograd.grad(loss(), leaf, one)[0], rtol=1e-6, atol=1e-7)


def test_saved_tensors_may_come_back_elsewhere():
    """Saved-tensor hooks may unpack a tensor with another layout: the backward's plan is that of the unpacked one."""
    logits, target = batch(4, 40)

    def unpack(packed: torch.Tensor) -> torch.Tensor:
        if packed.dim() != 2:
            return packed
        return torch.cat((packed.new_zeros(4, 1), packed), 1)[:, 1:]

    expected = results(logits, target)
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            found = results(logits, target)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
