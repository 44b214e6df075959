"""The fast eager path and the custom op give the same bits; a plan is used only for the tensors of its key."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

from . import op, swiglu
from .launch import Launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape: int, **options) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, **options)


def shifted(elements: int, *shape: int) -> torch.Tensor:
    """A tensor that begins the given number of elements past a 16-byte boundary."""
    return normal(elements + torch.Size(shape).numel())[elements:].view(shape)


PAIRS = {
    "dense": lambda: (normal(5, 24), normal(5, 24)),
    "no element": lambda: (normal(0, 7), normal(0, 7)),
    "off a boundary": lambda: (normal(5, 24), shifted(1, 5, 24)),
    "halves": lambda: normal(5, 34).chunk(2, dim=-1),
    "transposed": lambda: (normal(24, 5).t(), normal(24, 5).t()),
    "expanded": lambda: (normal(5, 24), normal(5, 1).expand(5, 24)),
    "one copied": lambda: (normal(4, 6, 10), normal(10, 6, 4).permute(2, 1, 0)),
    "all copied": lambda: (normal(4, 6, 8)[::2, ::2, ::2], normal(4, 6, 8)[::2, ::2, 1::2]),
    "half precision": lambda: (normal(5, 24).half(), normal(5, 24).half()),
}
PACKED = {
    "packed": lambda: (normal(5, 34),),
    "packed, no element": lambda: (normal(3, 0),),
    "packed, off a boundary": lambda: (shifted(2, 5, 12),),
    "packed, permuted": lambda: (normal(4, 6, 10).permute(2, 0, 1),),
    "packed, copied": lambda: (normal(8, 6, 20)[::2, ::2, ::2],),
    "packed, half precision": lambda: (normal(5, 34).half(),),
}
LAYOUTS = PAIRS | PACKED


@pytest.fixture
def by_library(monkeypatch):
    """Runs a call through the custom op, as under tracing."""

    def run(call):
        with monkeypatch.context() as patch:
            patch.setattr(op, "lean", lambda *tensors: False)
            return call()

    return run


def everything(tensors, dy=None, wanted=(True, True), fn=swiglu) -> tuple[torch.Tensor, ...]:
    """Returns y and the gradients of the tensors that require one."""
    leaves = [t.detach().requires_grad_(want) for t, want in zip(tensors, wanted, strict=False)]
    y = fn(*leaves)
    dy = torch.linspace(-2, 2, y.numel(), device=DEVICE).view(y.shape).to(y.dtype) if dy is None else dy(y)
    return y.detach(), *torch.autograd.grad(y, [t for t in leaves if t.requires_grad], dy)


def expanded(y: torch.Tensor) -> torch.Tensor:
    return torch.ones((), device=DEVICE, dtype=y.dtype).expand(y.shape)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_paths_give_equal_bits_and_strides(layout, by_library):
    tensors = LAYOUTS[layout]()
    masks = [(True, True), (True, False), (False, True)] if len(tensors) == 2 else [(True,)]
    for wanted in masks:
        for dy in (None, expanded):
            mine = everything(tensors, dy, wanted)
            other = by_library(lambda dy=dy, wanted=wanted: everything(tensors, dy, wanted))
            for a, b in zip(mine, other, strict=True):
                assert torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype
    with torch.no_grad():
        assert torch.equal(swiglu(*tensors), mine[0])


def plain(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
    return F.silu(gate) * up


def test_every_call_is_right_whatever_came_before():
    """Layouts called alternately; several of them have the same shape."""
    for _ in range(2):
        for make in LAYOUTS.values():
            tensors = make()
            tolerance = 4e-3 if tensors[0].dtype == torch.float16 else 1e-5
            for dy in (None, expanded):
                for a, b in zip(everything(tensors, dy), everything(tensors, dy, fn=plain), strict=True):
                    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_the_second_half_of_a_packed_tensor_has_a_boundary_of_its_own():
    """With halves of 8 bytes, the second is 16-byte aligned if the tensor begins 8 bytes past a boundary, but not if it
    begins 4 bytes past one."""
    for elements in (0, 1, 2, 3, 2):
        x = shifted(elements, 3, 4)
        torch.testing.assert_close(swiglu(x), plain(x), rtol=1e-5, atol=1e-5)
    assert len(op._FORWARD) == 4


def test_the_number_of_plans_is_bounded(monkeypatch):
    for kept in (op._FORWARD, op._BACKWARD):
        monkeypatch.setattr(kept, "size", 4)
    for width in range(1, 12):
        x = normal(2, 2 * width)
        torch.testing.assert_close(everything((x,))[0], plain(x), rtol=1e-5, atol=1e-5)
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
                x = torch.linspace(-3, 3, 4 * width, device=DEVICE).view(2, 2 * width)
                for a, b in zip(everything((x,)), everything((x,), fn=plain), strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
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
    gate, up = normal(3, 8, requires_grad=True), normal(3, 8, requires_grad=True)

    def run():
        return torch.autograd.grad(_Drop.apply(swiglu(gate, up)).sum(), (gate, up), allow_unused=True)

    assert run() == by_library(run) == (None, None)


@pytest.mark.parametrize("packed", [False, True])
def test_a_gradient_has_no_gradient_but_many_at_once_there_may_be(packed):
    leaves = [normal(3, 8, requires_grad=True) for _ in range(1 if packed else 2)]
    y = swiglu(*leaves)
    dys = normal(4, *y.shape)
    together = torch.autograd.grad(y, leaves, dys, is_grads_batched=True, retain_graph=True)
    alone = [torch.autograd.grad(y, leaves, dy, retain_graph=True) for dy in dys]
    for i, batch in enumerate(together):
        assert torch.equal(batch, torch.stack([grads[i] for grads in alone]))
    (first, *_) = torch.autograd.grad(y.sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        first.sum().backward()


def test_vmap_sees_an_operator_and_forward_mode_is_refused():
    gate, up = normal(3, 8), normal(3, 8)
    assert torch.equal(torch.vmap(swiglu)(gate, up), swiglu(gate, up))
    with pytest.raises(NotImplementedError, match="swiglu: forward-mode automatic differentiation is not supported"):
        torch.func.jvp(lambda up: swiglu(gate, up), (up,), (up,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError):
        swiglu(torch.autograd.forward_ad.make_dual(gate, gate))


def test_what_was_saved_may_come_back_with_other_strides():
    packed = normal(6, 8).t().contiguous().t().requires_grad_()
    (expected,) = torch.autograd.grad(swiglu(packed).sum(), packed)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.contiguous(), lambda t: t):
        y = swiglu(packed)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), packed)[0], expected, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [512, 1365])
def test_streams_and_a_graph(width):
    packed = normal(40, 2 * width).bfloat16()
    expected = everything((packed,))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results = [everything((packed,)) for _ in range(2)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results.append(everything((packed,), dy=torch.ones_like))
    for tensor in results[-1]:
        tensor.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(results[-1], everything((packed,), dy=torch.ones_like), strict=True))
    assert all(torch.equal(a, b) for result in results[:2] for a, b in zip(result, expected, strict=True))
