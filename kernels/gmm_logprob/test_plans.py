"""The fast path of eager calls and torch.library agree bit for bit, and a plan is used only for matching tensors."""

from __future__ import annotations

import threading

import pytest
import torch

from . import arrival, gmm_logprob, op, plans
from .launch import Launch
from .reference import gmm_logprob_reference
from .test_gmm_logprob import DEVICE, inputs

REDUCTIONS = plans.REDUCTIONS


def packed(rows: int, k: int, start: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Three parameters in one tensor, which begins `start` elements past a 16-byte boundary."""
    room = torch.randn(rows * 3 * k + start, device=DEVICE).to(dtype)
    whole = room[start:].view(rows, 3 * k)
    return [*whole.chunk(3, dim=-1), torch.randn(rows, device=DEVICE).to(dtype)]


def transposed(rows: int, k: int) -> list[torch.Tensor]:
    """Parameters whose leading dimensions do not flatten to one stride."""
    tensors = inputs(rows, k)
    shape = (2, rows // 2)
    return [*(t.view(*shape, k).transpose(0, 1) for t in tensors[:3]), tensors[3].view(shape).t()]


LAYOUTS = {
    "several programs": lambda: inputs(40, 6),
    "dense": lambda: inputs(8, 6),
    "half precision": lambda: inputs(8, 6, torch.float16),
    "no row": lambda: inputs(0, 6),
    "one row": lambda: inputs(1, 3),
    "packed": lambda: packed(8, 6),
    "packed, 4 bytes on": lambda: packed(8, 6, 1),
    "packed, 8 bytes on": lambda: packed(8, 6, 2),
    "packed, half precision": lambda: packed(8, 5, 3, torch.float16),
    "expanded": lambda: [*(t[:1].expand(8, 6) for t in inputs(8, 6)[:3]), torch.randn(8, device=DEVICE)],
    "every other row": lambda: [t[::2] for t in inputs(16, 6)],
    "copied": lambda: transposed(8, 6),
}


@pytest.fixture
def by_library(monkeypatch):
    """Makes calls take the path of traced calls, through torch.library."""

    def run(call):
        with monkeypatch.context() as patch:
            patch.setattr(op, "lean", lambda *tensors: False)
            return call()

    return run


def everything(tensors, reduction: str, expanded: bool = False, fn=gmm_logprob) -> tuple[torch.Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = fn(*leaves, reduction)
    grad = torch.linspace(-2, 2, out.numel(), device=DEVICE).view(out.shape).to(out.dtype)
    if expanded:
        grad = torch.full((), 0.5, device=DEVICE, dtype=out.dtype).expand(out.shape)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_paths_give_equal_bits_and_strides(layout, reduction, by_library):
    tensors = LAYOUTS[layout]()
    for expanded in (False, True):
        mine = everything(tensors, reduction, expanded)
        other = by_library(lambda expanded=expanded: everything(tensors, reduction, expanded))
        for a, b in zip(mine, other, strict=True):
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
            assert a.stride() == b.stride() and a.dtype == b.dtype
    with torch.no_grad():
        assert torch.equal(gmm_logprob(*tensors, reduction).nan_to_num(7.0), mine[0].nan_to_num(7.0))


def test_a_call_on_plain_tensors_goes_past_torch_library(monkeypatch):
    """An op of torch.library would cost more host time than the launch."""
    for name in ("_fwd_op", "_bwd_op"):
        monkeypatch.setattr(op, name, None)
    for reduction in REDUCTIONS:
        tensors = inputs(8, 6)
        expected = everything([t.double() for t in tensors], reduction, fn=gmm_logprob_reference)
        for mine, other in zip(everything(tensors, reduction), expected, strict=True):
            torch.testing.assert_close(mine.double(), other, rtol=1e-4, atol=1e-4)
        assert torch.equal(gmm_logprob(*tensors, reduction), everything(tensors, reduction)[0])


def test_every_call_is_right_whatever_came_before():
    """Calls with one layout after another. Those of a packed tensor have the same shape."""
    for name in (*LAYOUTS, "dense", "packed"):
        tensors = LAYOUTS[name]()
        if not tensors[3].numel():
            continue
        tolerance = 1e-2 if "half" in name else 1e-4
        expected = everything([t.double() for t in tensors], "mean", fn=gmm_logprob_reference)
        for a, b in zip(everything(tensors, "mean"), expected, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("k", [3, 4])
def test_each_distance_from_a_boundary_has_a_plan_of_its_own(k):
    """With K = 4 all three parameters have the same distance."""
    for start in (0, 1, 2, 3, 4):
        tensors = packed(8, k, start)
        expected = gmm_logprob_reference(*tensors, "none")
        torch.testing.assert_close(gmm_logprob(*tensors, "none"), expected, rtol=1e-5, atol=1e-5)
    assert len(op._FORWARD) == 4


def test_the_boundary_before_a_tensor_may_be_outside_of_its_storage():
    """Then no element is skipped, since a pointer must not point before the storage."""
    tensor = torch.randn(16, device=DEVICE)
    assert [plans.skipped(tensor[i:]) for i in range(5)] == [0, 1, 2, 3, 0]

    class Outside:
        data_ptr, element_size, storage_offset = (lambda self: 4 + 64), (lambda self: 4), (lambda self: 0)

    assert plans.skipped(Outside()) == 0


def test_the_number_of_plans_is_bounded(monkeypatch):
    for kept in (op._FORWARD, op._BACKWARD):
        monkeypatch.setattr(kept, "size", 4)
    for k in range(1, 9):
        tensors = inputs(3, k)
        expected = gmm_logprob_reference(*tensors, "sum")
        torch.testing.assert_close(everything(tensors, "sum")[0], expected, rtol=1e-5, atol=1e-5)
    assert len(op._FORWARD) == len(op._BACKWARD) == 4


def test_two_threads_at_once(monkeypatch):
    """Each thread has shapes of its own and shapes shared by both. The interpreter runs one kernel at a time."""
    if DEVICE == "cpu":
        lock, original = threading.Lock(), Launch.__call__

        def alone(self, *arguments):
            with lock:
                return original(self, *arguments)

        monkeypatch.setattr(Launch, "__call__", alone)
    for kept in (op._FORWARD, op._BACKWARD):
        monkeypatch.setattr(kept, "size", 3)  # so that each thread evicts plans of the other
    wrong: list[object] = []

    def work(first: int) -> None:
        try:
            for k in [*range(first, first + 3), 3]:
                tensors = inputs(40, k)
                expected = everything([t.double() for t in tensors], "mean", fn=gmm_logprob_reference)
                for a, b in zip(everything(tensors, "mean"), expected, strict=True):
                    torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in (1, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class _Drop(torch.autograd.Function):
    """An autograd function that returns no gradient for its input."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return None


def test_no_gradient_comes_in_none_goes_out(by_library):
    tensors = inputs(5, 3, grad=True)

    def run():
        return torch.autograd.grad(_Drop.apply(gmm_logprob(*tensors)), tensors, allow_unused=True)

    assert run() == by_library(run) == (None,) * 4


def test_a_gradient_has_no_gradient():
    tensors = inputs(5, 3, grad=True)
    (first, *_) = torch.autograd.grad(gmm_logprob(*tensors), tensors, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        first.sum().backward()


def test_many_gradients_at_once_are_refused_and_not_wrong():
    """The backward op returns a list of tensors, for which vmap has no fallback."""
    tensors = inputs(5, 3, grad=True)
    out = gmm_logprob(*tensors, "none")
    with pytest.raises(RuntimeError, match="Batching rule not implemented"):
        torch.autograd.grad(out, tensors, torch.randn(4, 5, device=DEVICE), is_grads_batched=True)


def test_vmap_sees_an_operator_and_forward_mode_is_refused():
    tensors = inputs(6, 3)
    torch.testing.assert_close(torch.vmap(gmm_logprob)(*tensors), gmm_logprob(*tensors, "none"))
    with pytest.raises(
        NotImplementedError, match="gmm_logprob: forward-mode automatic differentiation is not supported"
    ):
        torch.func.jvp(lambda y: gmm_logprob(*tensors[:3], y), (tensors[3],), (tensors[3],))


@pytest.mark.gpu
def test_each_stream_has_words_of_its_own_in_a_lean_call():
    """Also if the first call of a plan was on another stream, and during a capture on a stream used before."""
    tensors = inputs(20_000, 10)
    expected = gmm_logprob(*tensors)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    results = []
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(gmm_logprob(*tensors))
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)
    known = arrival._devices[tensors[0].device]
    assert len({words.data_ptr() for words in known.by_stream.values()}) == len(known.by_stream) >= 4
    taken, graph = known.taken, torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=streams[0]):
        captured = gmm_logprob(*tensors)
    assert known.taken == taken + 1 and streams[0].cuda_stream in known.by_stream
    for _ in range(50):
        graph.replay()
        with torch.cuda.stream(streams[0]):
            beside = gmm_logprob(*tensors)
        torch.cuda.synchronize()
        assert torch.equal(captured, expected) and torch.equal(beside, expected)
