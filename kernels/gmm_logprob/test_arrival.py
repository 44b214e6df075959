"""The sum in the launch itself: who is last, which launches share a counter, graphs and streams."""

from __future__ import annotations

import math
import threading

import pytest
import torch

from . import arrival, gmm_logprob
from .reference import gmm_logprob_reference
from .test_gmm_logprob import DEVICE, assert_right, inputs, needs_memory, with_grads


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_the_sum_is_bitwise_repeatable():
    tensors = inputs(150, 10)
    first = with_grads(gmm_logprob, tensors, "mean")
    for _ in range(2):
        assert all(map(torch.equal, first, with_grads(gmm_logprob, tensors, "mean")))


def test_counters_are_back_at_zero_whatever_the_sizes():
    """Different numbers of programs one after the other, and a launch in between that does not reduce."""
    for rows in (200, 1, 64, 0, 200):
        tensors = inputs(rows, 3)
        truth = gmm_logprob_reference(*(t.double() for t in tensors), "sum")
        torch.testing.assert_close(gmm_logprob(*tensors, "sum").double(), truth, rtol=1e-5, atol=1e-4)
        gmm_logprob(*tensors, "none")
    counters = arrival._devices[tensors[0].device]
    assert not counters.array.any()
    assert counters.taken == len(counters.by_stream)  # one for the stream, however often it is used


def test_a_counter_belongs_to_one_stream_or_to_one_captured_launch():
    counters = arrival._Counters(torch.zeros(arrival.COUNTERS * arrival.SPACING, dtype=torch.int32))
    eager = [counters.index(stream) for stream in (11, 12, 11, 12)]
    captured = [counters.index(None) for _ in range(3)]
    assert eager[:2] == eager[2:]
    assert len({*eager, *captured}) == 5
    while counters.index(None) is not None:
        pass
    assert counters.taken == arrival.COUNTERS
    assert counters.index(13) is None
    assert counters.index(11) == eager[0]


def test_exhausted_counters_are_replaced_by_fresh_zeros(monkeypatch):
    partials = torch.empty(4, device=DEVICE)
    full = arrival._Counters(torch.ones(1, dtype=torch.int32, device=DEVICE), taken=arrival.COUNTERS)
    monkeypatch.setitem(arrival._devices, partials.device, full)
    assert arrival.counter(partials).tolist() == [0]
    tensors = inputs(300, 10)
    torch.testing.assert_close(gmm_logprob(*tensors), gmm_logprob_reference(*tensors), rtol=1e-5, atol=1e-5)


def test_fake_tensors_leave_no_trace(monkeypatch):
    monkeypatch.setattr(arrival, "_devices", {})
    with torch._subclasses.FakeTensorMode():
        fake = arrival.counter(torch.empty(4, device=DEVICE))
    assert type(fake) is not torch.Tensor
    assert arrival._devices == {}
    assert type(arrival.counter(torch.empty(4, device=DEVICE))) is torch.Tensor


def test_threads_share_a_stream():
    """On one stream launches are in order, so one counter serves them; taking it must not race."""
    got = []
    partials = torch.empty(1, device=DEVICE)
    threads = [threading.Thread(target=lambda: got.append(arrival.counter(partials).data_ptr())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 8
    assert len(set(got)) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_sum_over_8_4_million_rows(reduction):
    """Across a full grid, against fp64; repeats agree bit for bit though the programs arrive in another order."""
    needs_memory(8)
    tensors = inputs(8_400_000, 10)
    truth = sum(
        gmm_logprob_reference(*(t.double() for t in part), "sum")
        for part in zip(*(t.split(500_000) for t in tensors), strict=True)
    )
    truth = truth / (8_400_000 if reduction == "mean" else 1)
    first = gmm_logprob(*tensors, reduction)
    assert math.isclose(first.item(), truth.item(), rel_tol=2e-6)
    for _ in range(100):
        assert torch.equal(gmm_logprob(*tensors, reduction), first)


@pytest.mark.gpu
def test_graphs_replayed_on_other_streams_beside_eager_launches():
    """Two captured launches and eager ones, all in flight at once: a counter shared between any two would be seen as a
    sum that is missing, early or late."""
    small, large = inputs(5_000, 10), inputs(205_000, 10)
    expected_small, expected_large = gmm_logprob(*small, "sum"), gmm_logprob(*large, "sum")
    torch.cuda.synchronize()
    graph, graphed = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        graphed += [gmm_logprob(*large, "sum"), gmm_logprob(*small, "sum")]
    other = torch.cuda.CUDAGraph()
    with torch.cuda.graph(other):
        graphed += [gmm_logprob(*large, "sum")]
    streams = [torch.cuda.Stream() for _ in range(3)]
    eager = []
    for _ in range(50):
        for out in graphed:
            out.zero_()
        torch.cuda.synchronize()
        for stream, replay in zip(streams, (graph.replay, other.replay, None), strict=True):
            with torch.cuda.stream(stream):
                if replay is not None:
                    replay()
                else:
                    eager.append(gmm_logprob(*large, "sum"))
        eager.append(gmm_logprob(*small, "sum"))
        torch.cuda.synchronize()
        assert torch.equal(graphed[0], expected_large)
        assert torch.equal(graphed[1], expected_small)
        assert torch.equal(graphed[2], expected_large)
    assert all(torch.equal(out, expected_large) for out in eager[::2])
    assert all(torch.equal(out, expected_small) for out in eager[1::2])
    torch.cuda.synchronize()
    assert not arrival._devices[small[0].device].array.any()


@pytest.mark.gpu
def test_a_captured_launch_is_one_node_and_a_training_step_is_captured():
    """No memset beside the kernel: the counter is zero already. Then forward and backward together on fresh data."""
    tensors = inputs(20_000, 10, grad=True)
    gmm_logprob(*tensors).backward()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for tensor in tensors:
            tensor.grad = None
        gmm_logprob(*tensors).backward()
    torch.cuda.synchronize()
    for tensor in tensors:
        tensor.grad = None
    before = arrival._devices[tensors[0].device].taken
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gmm_logprob(*tensors)
        out.backward()
    assert arrival._devices[tensors[0].device].taken == before + 1
    with torch.no_grad():
        for tensor, fresh in zip(tensors, inputs(20_000, 10), strict=True):
            tensor.copy_(fresh)
    graph.replay()
    torch.cuda.synchronize()
    truth = with_grads(gmm_logprob_reference, tensors, "mean", dtype=torch.float64)
    assert_right([out.detach(), *(t.grad for t in tensors)], truth, ulps=64)
