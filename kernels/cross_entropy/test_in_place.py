"""The gradient written by the forward, and the gradient written over the logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from . import cross_entropy, cross_entropy_and_grad
from .test_cross_entropy import DEVICE, assert_close, batch, through, with_grad


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("vocab", [40, 4100, 4101])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_the_gradient_of_the_forward_is_that_of_the_backward(vocab, reduction):
    logits, target = batch(6, vocab)
    options = dict(reduction=reduction, label_smoothing=0.1, z_loss=1e-3)
    leaf = logits.detach().requires_grad_()
    value = cross_entropy(leaf, target, **options)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    for inplace in (False, True):
        given = logits.clone()
        found = cross_entropy_and_grad(given, target, inplace=inplace, **options)
        assert_close(found, (value.detach(), gradient), rtol=1e-5, atol=1e-7)
        assert (found[1] is given) == inplace
        assert torch.equal(given, logits) != inplace
    scaled = (with_grad(cross_entropy, logits, target, grad_in_forward=fused, **options) for fused in (True, False))
    assert_close(*scaled, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("grad_in_forward", [False, True])
@pytest.mark.parametrize("columns", [slice(0, 40), slice(3, 36), slice(0, 80, 2)])
def test_in_place_the_gradient_takes_the_memory_of_the_logits(grad_in_forward, columns):
    """Also for a slice of rows, and for logits without a unit stride, which are copied and copied back."""
    stored, target = batch(6, 80)
    target %= 33
    given = stored.detach().requires_grad_()
    logits = (given * 1)[:, columns]
    before = logits.detach().clone()
    loss = cross_entropy(logits, target, grad_in_forward=grad_in_forward, inplace=True)
    assert torch.equal(logits, before) != grad_in_forward
    loss.backward()
    expected = torch.zeros_like(stored)
    expected[:, columns] = with_grad_of_one(before, target)
    torch.testing.assert_close(given.grad, expected)
    torch.testing.assert_close(logits, expected[:, columns])


def with_grad_of_one(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    leaf = logits.detach().requires_grad_()
    return torch.autograd.grad(F.cross_entropy(leaf, target), leaf)[0]


def test_an_incoming_gradient_of_one_costs_nothing(monkeypatch):
    """The kernel compares the factor with 1: the host does not synchronise to read it."""
    logits, target = batch(5, 30)
    made = through(logits)
    loss = cross_entropy(made, target, grad_in_forward=True, inplace=True)
    written = made.detach().clone()
    made_by_hand = torch.autograd.grad(loss, made, torch.ones_like(loss))[0]
    assert made_by_hand.data_ptr() == made.data_ptr()
    assert torch.equal(made_by_hand, written)


@pytest.mark.parametrize("grad_in_forward", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_retained_graph_may_be_run_again(grad_in_forward, inplace):
    logits, target = batch(5, 30)
    made = through(logits)
    loss = cross_entropy(made, target, grad_in_forward=grad_in_forward, inplace=inplace)
    expected = with_grad_of_one(logits, target)
    for factor in (3.0, 1.0, 0.5):
        incoming = torch.full_like(loss, factor)
        (gradient,) = torch.autograd.grad(loss, made, incoming, retain_graph=factor != 0.5)
        torch.testing.assert_close(gradient, factor * expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("grad_in_forward", [False, True])
def test_autograd_notices_that_logits_were_overwritten_which_it_needs(grad_in_forward):
    """Autograd reports an error, because exp saves its output, which is then overwritten."""
    logits, target = batch(5, 30)
    loss = cross_entropy(logits.requires_grad_().exp(), target, grad_in_forward=grad_in_forward, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inplace_leaves_logits_alone_where_no_gradient_is_wanted():
    logits, target = batch(5, 30)
    before = logits.clone()
    cross_entropy(logits, target, grad_in_forward=True, inplace=True)
    with torch.no_grad():
        cross_entropy(through(logits), target, grad_in_forward=True, inplace=True)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_the_gradient_in_the_forward_compiles(inplace, reduction):
    """Under torch.compile, which manages memory itself, inplace has no effect."""
    logits, target = batch(5, 30)

    def step(x):
        made = x * 2
        loss = cross_entropy(made, target, grad_in_forward=True, inplace=inplace, reduction=reduction)
        return (loss.sum() * 3, made.sum())

    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    results = []
    for fn in (step, torch.compile(step, fullgraph=True, backend=backend)):
        leaf = logits.detach().requires_grad_()
        loss, _ = fn(leaf)
        loss.backward()
        results.append((loss.detach(), leaf.grad))
    assert_close(*results, rtol=1e-5, atol=1e-7)


def test_what_cannot_be_overwritten_is_refused():
    logits, target = batch(3, 8)
    with pytest.raises(ValueError, match="logits must not be a leaf that requires grad"):
        cross_entropy(logits.requires_grad_(), target, inplace=True)
    with pytest.raises(ValueError, match="logits must not overlap in memory"):
        cross_entropy_and_grad(logits.detach()[:1].expand(3, 8), target, inplace=True)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_a_training_step_in_a_cuda_graph(fused):
    """Forward and backward are captured in one graph. Each replay computes the logits again and overwrites them."""
    hidden, target = batch(64, 32, dtype=torch.bfloat16)
    head = torch.randn(5000, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, 5000, (64,), device="cuda")

    def step() -> torch.Tensor:
        head.grad = None
        loss = cross_entropy(hidden @ head.T, target, grad_in_forward=fused, inplace=True)
        loss.backward()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    captured = head.grad
    hidden.copy_(torch.randn_like(hidden))
    graph.replay()
    torch.cuda.synchronize()
    value, wanted = loss.clone(), captured.clone()
    torch.testing.assert_close(step(), value)
    torch.testing.assert_close(head.grad, wanted)
