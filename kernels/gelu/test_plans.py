"""The fast eager path and the custom op give the same bits; a plan is used only for the tensors of its key."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

from . import gelu, op, plans
from .launch import Launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = ("none", "tanh")


def normal(*shape: int, **options) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, **options)


LAYOUTS = {
    "dense": lambda: normal(5, 24),
    "one element": lambda: normal(1),
    "no element": lambda: normal(0, 7),
    "no dimension": lambda: normal(),
    "off a boundary": lambda: normal(5 * 24 + 1)[1:].view(5, 24),
    "transposed": lambda: normal(24, 5).t(),
    "sliced": lambda: normal(5, 40)[:, 3:27],
    "expanded": lambda: normal(5, 1).expand(5, 24),
    "copied": lambda: normal(4, 6, 8)[::2, ::2, ::2],
    "half precision": lambda: normal(5, 24).half(),
}


@pytest.fixture
def by_library(monkeypatch):
    """Runs a call through the custom op, as under tracing."""

    def run(call):
        with monkeypatch.context() as patch:
            patch.setattr(op, "lean", lambda *tensors: False)
            return call()

    return run


def value_and_slope(x: torch.Tensor, dy: torch.Tensor, approximate: str) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = x.detach().requires_grad_()
    y = gelu(leaf, approximate)
    return y.detach(), torch.autograd.grad(y, leaf, dy)[0]


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_paths_give_equal_bits_and_strides(layout, approximate, by_library):
    x = LAYOUTS[layout]()
    for dy in (torch.randn_like(x), torch.ones((), device=DEVICE, dtype=x.dtype).expand(x.shape)):
        mine = value_and_slope(x, dy, approximate)
        other = by_library(lambda dy=dy: value_and_slope(x, dy, approximate))
        for a, b in zip(mine, other, strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype
    with torch.no_grad():
        assert torch.equal(gelu(x, approximate), mine[0])


def test_a_plan_is_kept_for_its_key_and_made_once(monkeypatch):
    made = []
    for name in ("fwd_plan", "bwd_plan"):
        original = getattr(plans, name)
        monkeypatch.setattr(op, name, lambda *a, original=original, name=name: made.append(name) or original(*a))
    for _ in range(3):
        value_and_slope(normal(5, 24), normal(5, 24), "none")
    assert made == ["fwd_plan", "bwd_plan"]


def test_every_call_is_right_whatever_came_before():
    """One shape with aligned and unaligned addresses, several strides, dtypes and forms, called alternately."""
    for _ in range(2):
        for layout in ("dense", "off a boundary", "sliced", "expanded", "half precision", "dense"):
            for approximate in FORMS:
                x = LAYOUTS[layout]()
                dys = (normal(5, 24), normal(5 * 24 + 1)[1:].view(5, 24), normal(24, 5).t(), normal(5, 1).expand(5, 24))
                for dy in (dy.to(x.dtype) for dy in dys):
                    y, dx = value_and_slope(x, dy, approximate)
                    leaf = x.detach().requires_grad_()
                    expected = F.gelu(leaf, approximate=approximate)
                    tolerance = dict(rtol=2e-3, atol=2e-3) if x.dtype == torch.float16 else dict(rtol=1e-5, atol=1e-5)
                    torch.testing.assert_close(y, expected.detach(), **tolerance)
                    torch.testing.assert_close(dx, torch.autograd.grad(expected, leaf, dy)[0], **tolerance)
    keys = [key for key in op._FORWARD if key[0][0] == (5, 24)]
    assert len(keys) == 2 * 5


def test_the_number_of_plans_is_bounded(monkeypatch):
    for kept in (op._FORWARD, op._BACKWARD):
        monkeypatch.setattr(kept, "size", 4)
    for width in range(1, 12):
        x = normal(2, width)
        y, _ = value_and_slope(x, x, "none")
        torch.testing.assert_close(y, F.gelu(x), rtol=1e-5, atol=1e-6)
    assert len(op._FORWARD) == len(op._BACKWARD) == 4


def test_two_threads_at_once(monkeypatch):
    """Each thread uses its own shapes and shapes of both. The interpreter itself runs one kernel at a time."""
    if DEVICE == "cpu":
        lock, original = threading.Lock(), Launch.__call__

        def alone(self, *arguments):
            with lock:
                return original(self, *arguments)

        monkeypatch.setattr(Launch, "__call__", alone)
    for kept in (op._FORWARD, op._BACKWARD):
        monkeypatch.setattr(kept, "size", 3)  # so that each thread evicts the plans of the other
    wrong: list[object] = []

    def work(first: int) -> None:
        try:
            for width in [*range(first, first + 6), 3, 4] * 3:
                x = torch.linspace(-3, 3, 2 * width, device=DEVICE).view(2, width)
                y, dx = value_and_slope(x, x, "none")
                leaf = x.clone().requires_grad_()
                expected = F.gelu(leaf)
                torch.testing.assert_close(y, expected.detach(), rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(dx, torch.autograd.grad(expected, leaf, x)[0], rtol=1e-5, atol=1e-5)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in (1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class _Drop(torch.autograd.Function):
    """Returns no gradient for its input."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return None


def test_no_gradient_comes_in_none_goes_out(by_library):
    x = normal(3, 8, requires_grad=True)

    def run():
        return torch.autograd.grad(_Drop.apply(gelu(x)).sum(), x, allow_unused=True)[0]

    assert run() is None
    assert by_library(run) is None


def test_a_gradient_has_no_gradient():
    x = normal(3, 8, requires_grad=True)
    (dx,) = torch.autograd.grad(gelu(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        dx.sum().backward()


def test_many_gradients_at_once():
    x, dys = normal(3, 8, requires_grad=True), normal(4, 3, 8)
    y = gelu(x)
    (together,) = torch.autograd.grad(y, x, dys, is_grads_batched=True, retain_graph=True)
    alone = [torch.autograd.grad(y, x, dy, retain_graph=True)[0] for dy in dys]
    assert torch.equal(together, torch.stack(alone))


def test_vmap_sees_an_operator_and_forward_mode_is_refused():
    x = normal(3, 8)
    assert torch.equal(torch.vmap(gelu)(x), gelu(x))
    with torch.autograd.forward_ad.dual_level():
        torch.testing.assert_close(gelu(x), F.gelu(x), rtol=1e-5, atol=1e-6)
        with pytest.raises(NotImplementedError, match="gelu: forward-mode automatic differentiation is not supported"):
            gelu(torch.autograd.forward_ad.make_dual(x, x))
    with pytest.raises(NotImplementedError, match="gelu: forward-mode automatic differentiation is not supported"):
        torch.func.jvp(gelu, (x,), (x,))


def test_what_was_saved_may_come_back_elsewhere():
    """A saved-tensors hook returns x with other strides: the backward's plan must depend on those."""
    x = normal(6, 4).t().requires_grad_()
    (expected,) = torch.autograd.grad(gelu(x), x, torch.ones_like(x))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.contiguous(), lambda t: t):
        y = gelu(x)
    torch.testing.assert_close(torch.autograd.grad(y, x, torch.ones_like(x))[0], expected, rtol=0, atol=0)


def test_subclasses_and_modes_see_an_operator():
    class Named(torch.Tensor):
        pass

    x = normal(3, 8)
    y = gelu(x.as_subclass(Named))
    assert type(y) is Named and torch.equal(y.as_subclass(torch.Tensor), gelu(x))
    parameter = torch.nn.Parameter(x)
    gelu(parameter).sum().backward()
    assert parameter.grad is not None
    with torch._subclasses.FakeTensorMode() as mode:
        assert gelu(mode.from_tensor(x)).shape == x.shape


@pytest.mark.gpu
def test_streams_and_a_graph():
    x, dy = normal(40, 512), normal(40, 512)
    expected = value_and_slope(x, dy, "tanh")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results = [value_and_slope(x, dy, "tanh") for _ in range(2)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results.append(value_and_slope(x, dy, "tanh"))
    for tensor in results[-1]:
        tensor.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, expected, strict=True))
