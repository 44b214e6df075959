"""The sum over a batch in one launch: orders of arrival, sizes, and the words of launches, graphs and streams."""

from __future__ import annotations

import math
import random
import threading

import pytest
import torch
import triton
import triton.language as tl

from . import arrival, gmm_logprob, plans
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


@triton.jit
def _gmm_logprob_add_up_kernel(partials_ptr, order_ptr, words_ptr, out_ptr, scale, unit):
    partial = tl.load(partials_ptr + tl.load(order_ptr + tl.program_id(0)))
    last, total = arrival.arrive(words_ptr, partial, scale, unit)
    if last:
        tl.store(out_ptr, total)


def _add_up(partials: list[float], order: list[int], rows_per_program: int = 256) -> float:
    """The sum that `arrive` computes if programs arrive in this order, as the interpreter runs them sequentially."""
    words = torch.zeros(arrival.WORDS, dtype=torch.int64, device=DEVICE)
    out = torch.full((), -12345.0, device=DEVICE)
    values, places = torch.tensor(partials, device=DEVICE), torch.tensor(order, device=DEVICE)
    _gmm_logprob_add_up_kernel[(len(order),)](values, places, words, out, *arrival.fixed_point(rows_per_program))
    assert not words.any()
    return out.item()


def _shuffled(count: int, times: int = 4) -> list[list[int]]:
    generator = random.Random(count)
    return [generator.sample(range(count), count) for _ in range(times)]


LIMIT = 512 * 256  # the largest partial sum that fits, with 256 rows per program


@pytest.mark.parametrize(
    "partials",
    [
        [1.5, -2.25],
        [-0.5] * 20,
        [-LIMIT + 1.0] * 9 + [3.0],
        [LIMIT - 1.0, -LIMIT + 1.0, -7.0],
        [-LIMIT * 1.0, LIMIT * 1.0, 17.0],
        [LIMIT + 1.0, -300.0, 5.0, 1e7, -123456.0, 100.0],
        [3e38, -3e38, 1e30, -(2.0**97), 65.0, 2.0**45, 1e-3 * LIMIT],
        [2.0**127, -(2.0**127), 2.0**32, -(2.0**32 - 2**8), 2.0**80, -(2.0**80 - 2**56)],
        [-1e6 - i / 8 for i in range(40)],
    ],
    ids=["few", "negative", "at the limit", "cancelling", "over it", "some large", "any size", "pieces", "all large"],
)
def test_partial_sums_add_up_in_any_order(partials):
    """The sums are equal bit for bit, and exact to fp32: truncation loses less than a unit per program."""
    partials = torch.tensor(partials).tolist()
    results = {_add_up(partials, order) for order in _shuffled(len(partials))}
    assert len(results) == 1
    truth, (_, unit) = math.fsum(partials), arrival.fixed_point(256)
    error, ulp = abs(results.pop() - truth), abs(truth) * torch.finfo(torch.float32).eps
    inexact = sum(x % unit != 0 for x in partials)
    assert error <= ulp / 2 + unit * inexact + 1e-15 * max(map(abs, partials))


@pytest.mark.parametrize(
    ("partials", "expected"),
    [
        ([math.inf, 1.0, -3.0], math.inf),
        ([-math.inf, 1.0, -math.inf], -math.inf),
        ([-math.inf, 1e30, 5.0], -math.inf),
        ([math.inf, 1.0, -math.inf], math.nan),
        ([math.nan, 1.0, 2.0], math.nan),
        ([-math.inf, math.nan, 1e25], math.nan),
        ([3.4e38, 3.4e38, 3.4e38], math.inf),
    ],
)
def test_partial_sums_that_are_not_finite(partials, expected):
    for order in _shuffled(len(partials)):
        result = _add_up(partials, order)
        assert result == expected or (math.isnan(result) and math.isnan(expected))


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_grid_at_the_limit_overflows_nothing(sign):
    """The arithmetic of `arrive` in Python. Every program adds the largest value allowed, or that and a flag."""
    bits = arrival.SUM_BITS.value
    share, mask = int(arrival.MAX_PARTIAL.value), (1 << bits) - 1
    flags = [getattr(arrival, name).value % 2**64 for name in ("LARGE", "PLUS_INF", "MINUS_INF")]
    assert sum(flags) == 7 << arrival.FLAGS_AT.value
    assert arrival.ARRIVED.value == 1 << bits
    word, held = 0, 0
    for program in range(arrival.MAX_PROGRAMS):
        if program in (7, 100, 1000):
            word |= flags.pop()
        held += sign * (share - 1)
        word = (word + (1 << bits) + sign * (share - 1)) % 2**64
        low = word & mask
        fixed_sum = low - (1 << bits) * (low >> (bits - 1))
        assert fixed_sum == held
        assert (word - fixed_sum) >> bits & arrival.ARRIVED_MASK.value == program + 1
        assert word >> arrival.FLAGS_AT.value == (0, 4, 6, 7)[sum(program >= at for at in (7, 100, 1000))]


@pytest.mark.parametrize("rows", [1, 31, 255, 256, 8_000, 1 << 20])
def test_a_unit_is_a_power_of_two_and_no_larger_than_said(rows):
    scale, unit = arrival.fixed_point(rows)
    assert scale * unit == 1
    assert math.frexp(unit)[0] == 0.5
    assert arrival.MAX_MEAN_LOG_P * rows <= arrival.MAX_PARTIAL.value * unit < 2 * arrival.MAX_MEAN_LOG_P * rows
    # A partial sum too large for the low bits has no bits below the unit of the last piece.
    assert arrival.MAX_PARTIAL.value * unit * 2.0**-23 >= arrival.OVERFLOW_UNITS.value[-1]


@pytest.mark.parametrize(
    "rows", [1, 255, 256, 257, *(pytest.param(rows, marks=pytest.mark.gpu) for rows in (5_000, 205_000, 1_000_003))]
)
def test_the_sum_against_fp64(rows):
    tensors = inputs(rows, 10)
    truth = gmm_logprob_reference(*(t.double() for t in tensors), "none")
    scale = 1 + truth.abs().mean().item()
    assert abs(gmm_logprob(*tensors).item() - truth.mean().item()) <= 5e-7 * scale
    assert abs(gmm_logprob(*tensors, "sum").item() - truth.sum().item()) <= 5e-7 * scale * rows


@pytest.mark.parametrize("far", [[3], [3, 40, 41, 250], list(range(0, 300, 7)), list(range(300))], ids=len)
def test_rows_far_from_their_mixture(far):
    """y = 1e15: log p of such a row is about -1e30, and its partial sum goes to the overflow words. Twice, then
    without."""
    tensors = inputs(300, 10)
    near = gmm_logprob(*tensors)
    away = [t.clone() for t in tensors]
    away[3][far] *= 1e15
    truth = gmm_logprob_reference(*(t.double() for t in away))
    first = gmm_logprob(*away)
    assert math.isclose(first.item(), truth.item(), rel_tol=2e-6)
    assert torch.equal(gmm_logprob(*away), first)
    assert torch.equal(gmm_logprob(*tensors), near)
    assert not arrival._devices[tensors[0].device].array.any()


@pytest.mark.parametrize(("value", "expected"), [(1e30, -math.inf), (math.nan, math.nan)])
def test_a_row_without_a_finite_density_decides_the_sum(value, expected):
    tensors = inputs(300, 10)
    near = gmm_logprob(*tensors, "sum")
    away = [t.clone() for t in tensors]
    away[3][77] = value
    for reduction in ("sum", "mean"):
        for _ in range(2):
            torch.testing.assert_close(gmm_logprob(*away, reduction).item(), expected, equal_nan=True)
    away[3][150] = 1e15  # and a second such row
    torch.testing.assert_close(gmm_logprob(*away, "sum").item(), expected, equal_nan=True)
    assert torch.equal(gmm_logprob(*tensors, "sum"), near)


def test_a_grid_is_no_larger_than_the_count_can_be(monkeypatch):
    """If there are more tiles than programs that the count allows, the programs loop."""
    monkeypatch.setattr(plans, "MAX_PROGRAMS", 3)
    for rows in (97, 300):  # 4 and 10 tiles
        tensors = inputs(rows, 10)
        truth = gmm_logprob_reference(*(t.double() for t in tensors), "sum")
        torch.testing.assert_close(gmm_logprob(*tensors, "sum").double(), truth, rtol=1e-5, atol=1e-4)


def test_words_are_back_at_zero_whatever_the_sizes():
    """Launches with different numbers of programs in sequence, and one in between that does not reduce."""
    for rows in (200, 1, 64, 0, 200):
        tensors = inputs(rows, 3)
        truth = gmm_logprob_reference(*(t.double() for t in tensors), "sum")
        torch.testing.assert_close(gmm_logprob(*tensors, "sum").double(), truth, rtol=1e-5, atol=1e-4)
        gmm_logprob(*tensors, "none")
    words = arrival._devices[tensors[0].device]
    assert not words.array.any()
    assert words.taken == len(words.by_stream)  # one set of words per stream, however often it is used


def test_words_belong_to_one_stream_or_to_one_captured_launch():
    words = arrival._Words(torch.zeros(arrival.LAUNCHES * arrival.WORDS, dtype=torch.int64))
    eager = [words.of(stream).data_ptr() for stream in (11, 12, 11, 12)]
    captured = [words.of(None).data_ptr() for _ in range(3)]
    assert eager[:2] == eager[2:]
    places = sorted({*eager, *captured})
    assert [place - places[0] for place in places] == [8 * arrival.WORDS * i for i in range(5)]
    while words.of(None) is not None:
        pass
    assert words.taken == arrival.LAUNCHES
    assert words.of(13) is None
    assert words.of(11).data_ptr() == eager[0]


def test_exhausted_words_are_replaced_by_fresh_zeros(monkeypatch):
    out = torch.empty((), device=DEVICE)
    full = arrival._Words(torch.ones(4, dtype=torch.int64, device=DEVICE), taken=arrival.LAUNCHES)
    monkeypatch.setitem(arrival._devices, out.device, full)
    assert arrival.words(out).tolist() == [0] * arrival.WORDS
    tensors = inputs(300, 10)
    torch.testing.assert_close(gmm_logprob(*tensors), gmm_logprob_reference(*tensors), rtol=1e-5, atol=1e-5)


def test_a_capture_allocates_no_words_that_eager_launches_would_use(monkeypatch):
    """If no words are allocated yet, each captured launch gets its own zeroed words, in the graph's memory."""
    monkeypatch.setattr(arrival, "_devices", {})
    device = torch.empty((), device=DEVICE).device
    captured = [arrival._taken(device, None) for _ in range(2)]
    assert arrival._devices == {}
    assert [words.tolist() for words in captured] == [[0] * arrival.WORDS] * 2
    assert captured[0].data_ptr() != captured[1].data_ptr()


def test_fake_tensors_leave_no_trace(monkeypatch):
    monkeypatch.setattr(arrival, "_devices", {})
    with torch._subclasses.FakeTensorMode():
        fake = arrival.words(torch.empty((), device=DEVICE))
    assert type(fake) is not torch.Tensor
    assert arrival._devices == {}
    assert type(arrival.words(torch.empty((), device=DEVICE))) is torch.Tensor


def test_words_are_not_allocated_in_a_memory_pool_of_the_calling_thread(monkeypatch):
    """The warm-up of CUDA graphs by torch.compile allocates in the pool of the graphs whatever its thread allocates."""
    threads, allocate = [], arrival._allocate
    monkeypatch.setattr(arrival, "_devices", {})
    monkeypatch.setattr(arrival, "_allocate", lambda device: threads.append(threading.get_ident()) or allocate(device))
    assert not arrival.words(torch.empty((), device=DEVICE)).any()
    assert len(threads) == 1 and threads[0] != threading.get_ident()


@pytest.mark.gpu
def test_the_first_call_may_be_compiled_with_cuda_graphs(monkeypatch):
    """torch.compile refuses, in the pool of its graphs, allocations that outlive the call and are not its results."""
    monkeypatch.setattr(arrival, "_devices", {})
    tensors = inputs(20_000, 10, grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(gmm_logprob, fullgraph=True, mode="reduce-overhead")
    results = []
    for _ in range(4):  # a warm-up, a capture, replays
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(*tensors)
        results.append([t.clone() for t in (out.detach(), *torch.autograd.grad(out, tensors))])
    expected = with_grads(gmm_logprob, tensors, "mean")
    torch._dynamo.reset()
    for result in results:
        assert all(map(torch.equal, result, expected))


def test_threads_share_a_stream():
    """Launches of one stream are ordered, so they share the same words. Looking up the words must not race."""
    got = []
    out = torch.empty((), device=DEVICE)
    threads = [threading.Thread(target=lambda: got.append(arrival.words(out).data_ptr())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 8
    assert len(set(got)) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_sum_over_8_4_million_rows(reduction):
    """A full grid, compared with fp64. Repeated calls agree bit for bit although the order of arrival differs."""
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
@pytest.mark.parametrize("every", [1, 3, 10_007])
def test_many_programs_set_their_sums_aside(every):
    """Some or all of 801 programs, eagerly and in a graph; their order of arrival differs from launch to launch."""
    tensors = inputs(205_000, 10)
    near = gmm_logprob(*tensors)
    away = [t.clone() for t in tensors]
    away[3][::every] *= 1e8
    truth = gmm_logprob_reference(*(t.double() for t in away))
    first = gmm_logprob(*away)
    assert math.isclose(first.item(), truth.item(), rel_tol=2e-6)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed = [gmm_logprob(*away), gmm_logprob(*tensors)]
    for _ in range(50):
        assert torch.equal(gmm_logprob(*away), first)
        assert torch.equal(gmm_logprob(*tensors), near)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(graphed[0], first)
        assert torch.equal(graphed[1], near)
    assert not arrival._devices[tensors[0].device].array.any()


@pytest.mark.gpu
def test_graphs_replayed_on_other_streams_beside_eager_launches():
    """Two captured launches and eager ones, all in flight at once. If any two shared words, a sum would be missing, or
    be written too early or too late."""
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
    """The graph has no memset node besides the kernel, as the words are 0 already. Then forward and backward are
    captured together and replayed on new data."""
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
