"""Tests that are specific to grouped_gemm. tests/test_specs.py derives the rest from SPEC."""

from __future__ import annotations

import itertools
from unittest import mock

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from harness.correctness import addresses
from harness.spec import Case

from . import bench, configs, plans, schedule
from .kernel import _grouped_gemm_table_kernel
from .op import grouped_gemm
from .reference import grouped_gemm_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def operands(
    ends: list[int], rows: int, n: int, k: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    x, weights = torch.randn(rows, k, device=DEVICE), torch.randn(len(ends), n, k, device=DEVICE) * max(k, 1) ** -0.5
    return x.to(dtype), weights.to(dtype), torch.tensor(ends, device=DEVICE, dtype=torch.int64)


def agrees(x: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Checks result and gradients against the reference."""
    leaves = [t.detach().requires_grad_() for t in (x, weights, bias) if t is not None]
    results = []
    for op in (grouped_gemm, grouped_gemm_reference):
        y = op(*leaves[:2], offsets, bias=leaves[2] if bias is not None else None)
        grads = torch.autograd.grad(y, leaves, torch.ones_like(y) * 0.5, materialize_grads=True) if y.grad_fn else ()
        results.append((y, *grads))
    for ours, want in itertools.zip_longest(*results):
        tolerance = dict(rtol=1e-3, atol=1e-3) if x.dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(ours, want, **tolerance)


@pytest.mark.parametrize(
    "ends",
    [
        [0, 0, 0, 0],  # all of them are empty
        [61, 61, 61, 61],  # all rows in the first group
        [0, 0, 0, 61],  # … in the last
        [0, 7, 7, 20],  # some are empty, and rows are left
        [1, 2, 3, 4],
        [13, 30, 53, 60],  # sizes are primes
        [16, 32, 48, 61],  # whole tiles
    ],
)
def test_splits(ends: list[int]) -> None:
    agrees(*operands(ends, 61, 18, 21), bias=torch.randn(4, 18, device=DEVICE))


def test_the_table_is_made_for_the_tiles_of_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a smaller block_m rows would be computed several times, with a larger one some not at all."""
    blocks, launch = [], plans.table_launch
    monkeypatch.setattr(plans, "table_launch", lambda *given: blocks.append(given[3]) or launch(*given))
    agrees(*operands([130, 260], 260, 18, 21))
    assert blocks == [configs.pick_block_m(260, 2, torch.float32, (8, 0))] and blocks[0] > configs.MIN_BLOCK_M


def test_what_counts_as_aligned() -> None:
    x, weights = torch.zeros(8, 32, device=DEVICE), torch.zeros(2, 16, 32, device=DEVICE)
    assert plans._aligned(x, weights, 16, 32) and plans._aligned(x, weights.mT, 32, 16)
    for a, b in ((x[:, ::2], weights[..., :16]), (x[:, 1:17], weights[..., :16]), (x, weights[..., ::2])):
        assert not plans._aligned(a, b, 16, 16)
    assert not plans._aligned(x, weights[:, :15], 15, 32)


def test_a_gradient_that_is_to_be_differentiated_says_that_it_cannot() -> None:
    x, weights, offsets = operands([3, 5], 5, 4, 6)
    leaves = [x.requires_grad_(), weights.requires_grad_()]
    y = grouped_gemm(*leaves, offsets)
    for gradient in torch.autograd.grad(y, leaves, torch.ones_like(y, requires_grad=True), create_graph=True):
        assert gradient.requires_grad
        with pytest.raises((RuntimeError, NotImplementedError), match="grouped_gemm"):
            gradient.sum().backward()


def test_no_gradient_for_a_result_that_has_none() -> None:
    class Nothing(torch.autograd.Function):
        """Returns an undefined gradient (None)."""

        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, _):
            return None

    x, weights, offsets = operands([3, 5], 5, 4, 6)
    leaves = [x.requires_grad_(), weights.requires_grad_()]
    Nothing.apply(grouped_gemm(*leaves, offsets)).backward()
    assert all(leaf.grad is None for leaf in leaves)


@pytest.mark.parametrize(("rows", "n", "k"), [(0, 5, 6), (5, 0, 6), (5, 6, 0), (0, 0, 0)])
def test_nothing_to_multiply(rows: int, n: int, k: int) -> None:
    agrees(*operands([rows // 2, rows], rows, n, k), bias=torch.randn(2, n, device=DEVICE))


def test_no_groups() -> None:
    x, weights, offsets = operands([], 5, 6, 7)
    assert torch.equal(grouped_gemm(x, weights, offsets), torch.zeros(5, 6, device=DEVICE))


def test_rows_behind_the_last_offset_are_zero_and_never_read() -> None:
    x, weights, offsets = operands([10, 25], 40, 18, 20)
    x[25:] = torch.nan
    x.requires_grad_()
    weights.requires_grad_()
    y = grouped_gemm(x, weights, offsets)
    dy = torch.ones_like(y)
    dy[25:] = torch.nan
    dx, dweights = torch.autograd.grad(y, (x, weights), dy)
    assert not y[25:].any() and not dx[25:].any()
    assert dweights.isfinite().all() and dx.isfinite().all()


def test_a_neighbour_that_is_not_finite_stays_outside() -> None:
    """A group ends within a block of rows, whose other rows belong to the next group."""
    x, weights, offsets = operands([9, 30], 30, 18, 20)
    x[9:] = torch.inf
    weights[1] = torch.nan
    x.requires_grad_()
    weights.requires_grad_()
    y = grouped_gemm(x, weights, offsets)
    dx, dweights = torch.autograd.grad(y, (x, weights), torch.ones_like(y))
    assert y[:9].isfinite().all() and dx[:9].isfinite().all() and dweights[0].isfinite().all()


def test_nothing_is_read_beyond_the_last_row() -> None:
    """Nor past the columns of the last row, after which no row follows."""
    with addresses.checked():
        agrees(*operands([9, 30], 30, 18, 20), bias=torch.randn(2, 18, device=DEVICE))


@pytest.mark.parametrize("ends", [[-5, 10, 100], [20, 10, 30], [2**31, 3, -(2**40)], [7, -1, 7]])
def test_offsets_are_read_as_monotonic_and_within_the_rows(ends: list[int]) -> None:
    agrees(*operands(ends, 35, 18, 20))


def test_more_offsets_than_are_scanned_at_a_time() -> None:
    ends = sorted(torch.randint(0, 60, (2 * 16 + 3,)).tolist())
    with mock.patch.object(schedule, "CHUNK", 16):
        agrees(*operands(ends, 60, 16, 16))


def test_more_tiles_of_a_group_than_are_written_at_a_time() -> None:
    rows = (schedule.MAX_TILES + 3) * 16
    with mock.patch.object(configs, "pick_block_m", lambda *_: 16):
        agrees(*operands([5, rows - 7], rows, 16, 16))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_may_be_strided(dtype: torch.dtype) -> None:
    x, weights, offsets = operands([3, 20, 33], 40, 18, 20)
    apart = torch.full((3, 5), -1, device=DEVICE, dtype=dtype)
    apart[:, 2] = offsets
    assert torch.equal(grouped_gemm(x, weights, apart[:, 2]), grouped_gemm(x, weights, offsets))


def test_operands_are_read_in_place_by_their_strides() -> None:
    x, weights, offsets = operands([3, 20, 33], 40, 18, 20)
    wide = torch.randn(40, 50, device=DEVICE)
    for strided in (wide[:, 7:27], wide[:, 10::2], wide.mT.contiguous().mT[:, :20], wide[:1, :20].expand(40, 20)):
        agrees(strided, weights, offsets)
    for strided in (weights.mT.contiguous().mT, weights.transpose(0, 1).contiguous().transpose(0, 1)):
        agrees(x, strided, offsets)


def test_the_gradient_of_transposed_weights_lies_as_they_do() -> None:
    x, weights, offsets = operands([3, 20, 33], 40, 18, 20)
    stored = weights.mT.contiguous().requires_grad_()  # [G, K, N]
    grouped_gemm(x, stored.mT, offsets).sum().backward()
    other = weights.clone().requires_grad_()
    grouped_gemm(x, other, offsets).sum().backward()
    assert stored.grad.is_contiguous()
    torch.testing.assert_close(stored.grad.mT, other.grad)


@pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter computes bfloat16 wrongly")
def test_autograd_in_bfloat16() -> None:
    agrees(*operands([100, 101, 400], 500, 136, 264, torch.bfloat16))


@hypothesis.given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    left=st.integers(0, 40),
    n=st.integers(1, 40),
    k=st.integers(1, 40),
    dtype=st.sampled_from((torch.float32, torch.float16)),
)
@hypothesis.settings(max_examples=12 if DEVICE == "cpu" else 100, deadline=None, derandomize=True, database=None)
def test_any_sizes(sizes: list[int], left: int, n: int, k: int, dtype: torch.dtype) -> None:
    ends = list(itertools.accumulate(sizes))
    agrees(*operands(ends, ends[-1] + left, n, k, dtype))


@pytest.mark.parametrize("block_m", [16, 64, 128])
@pytest.mark.parametrize("ends", [[0, 100, 100, 230, 300], [300] * 5, [7, 20, 33, 46, 299], [-3, 500, 2, 2, 2]])
def test_table(ends: list[int], block_m: int) -> None:
    """Groups are in descending order of size, row tiles in the order of rows, and each row is in one tile."""
    rows, groups = 320, len(ends)
    offsets = torch.tensor(ends, device=DEVICE)
    table = torch.full((schedule.table_size(rows, groups),), -9, dtype=torch.int32, device=DEVICE)
    schedule.table_launch(_grouped_gemm_table_kernel, offsets, rows, block_m)(offsets, table)
    (count, *rest), *entries = table.view(-1, 4).tolist()
    read = offsets.clamp(0, rows).cummax(0).values.tolist()
    parts = [(group, start, end) for group, (start, end) in enumerate(itertools.pairwise([0, *read]))]
    by_size = sorted(parts, key=lambda part: part[1] - part[2])
    tiles = [
        [group, row, end, 0]
        for group, start, end in [*parts, (-1, read[-1], rows)]
        for row in range(start, end, block_m)
    ]
    assert rest == [0, 0, 0] and entries[:groups] == [[*part, 0] for part in by_size]
    assert count == len(tiles) and entries[groups : groups + count] == tiles
    assert not any(map(any, entries[groups + count :]))


def test_a_call_never_waits_for_the_device() -> None:
    x, weights, offsets = operands([3, 20, 33], 40, 18, 20)
    x.requires_grad_()

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("the host reads a tensor")

    with mock.patch.multiple(torch.Tensor, item=forbidden, tolist=forbidden, cpu=forbidden, __int__=forbidden):
        y = grouped_gemm(x, weights, offsets)
        torch.autograd.grad(y, x, torch.ones_like(y))


@pytest.mark.gpu
def test_one_graph_for_all_offsets() -> None:
    """No launch depends on the values of the offsets, and nothing synchronises."""
    x, weights, offsets = operands([30, 200, 330], 400, 144, 160, torch.bfloat16)
    grouped_gemm(x, weights, offsets)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            y = grouped_gemm(x, weights, offsets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for ends in ([0, 0, 400], [400, 400, 400], [1, 2, 3]):
        offsets.copy_(torch.tensor(ends))
        graph.replay()
        torch.testing.assert_close(y, grouped_gemm_reference(x, weights, offsets), rtol=2e-2, atol=2e-2)


def test_sizes_that_tiles_cannot_count_are_errors() -> None:
    """Just below 2^31 the number of tiles or K-blocks, rounded up in 32 bits, would be negative."""
    one, offsets = torch.ones(1, 1, 1, device=DEVICE), torch.ones(1, device=DEVICE, dtype=torch.int32)
    for name, rows, n, k in (("x", 2**31 - 1, 1, 1), ("x", 1, 1, 2**31 - 8), ("weights", 1, 2**31 - 8, 1)):
        with pytest.raises(ValueError, match=f"{name} must be .* at most {2**31 - 512}"):
            grouped_gemm(one[0].expand(rows, k), one.expand(1, n, k), offsets)


def test_says_what_is_wrong() -> None:
    x, weights, offsets = operands([3, 20, 33], 40, 18, 20)
    wrong = (
        (TypeError, "x must be a tensor of float32", dict(x=x.to(torch.int32))),
        (ValueError, r"x must be \[T, K\]", dict(x=x[None])),
        (ValueError, r"x must be \[T, K\] with both at most", dict(x=x[:1].expand(2**31 - 511, 20))),
        (TypeError, "weights must be a tensor of x's dtype", dict(weights=weights.half())),
        (ValueError, r"weights must be \[G, N, 20\]", dict(weights=weights.mT)),
        (TypeError, "offsets must be a tensor of int32 or int64, got torch.int16", dict(offsets=offsets.short())),
        (TypeError, "offsets must be a tensor of int32 or int64, got list", dict(offsets=[3, 20, 33])),
        (ValueError, r"offsets must be \[3\]", dict(offsets=offsets[:2])),
        (ValueError, "offsets must be on x's device", dict(offsets=offsets.to("meta"))),
        (TypeError, "bias must be a tensor of x's dtype", dict(bias=weights[:, :, 0].half())),
        (ValueError, r"bias must be \[3, 18\]", dict(bias=weights[0, :, 0])),
    )
    for error, message, change in wrong:
        with pytest.raises(error, match=message):
            grouped_gemm(**{**dict(x=x, weights=weights, offsets=offsets), **change})


@pytest.mark.parametrize("case", [case for case in bench.CASES if case.params.get("split")], ids=lambda case: case.name)
def test_splits_of_the_cases(case: Case) -> None:
    sizes = bench.group_sizes(case)
    assert len(sizes) == case.dims["groups"] and sum(sizes) == case.dims["rows"] and min(sizes) >= 0


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_configs_fit_into_shared_memory(capability: tuple[int, int], dtype: torch.dtype, aligned: bool) -> None:
    room = {(8, 0): 163 << 10, (9, 0): 227 << 10}[capability]
    for cols, depth, groups in itertools.product((1, 37, 1408, 4096), (1, 200, 2048), (1, 64, 8192)):
        block_m = configs.pick_block_m(8192, groups, dtype, capability)
        assert configs.MIN_BLOCK_M <= block_m <= 128
        rows = configs.pick_rows_config(cols, depth, block_m, aligned, dtype, capability)
        tile = (block_m + rows.block_n) * rows.block_k * rows.stages * dtype.itemsize
        assert tile * rows.ctas <= room
        weights = configs.pick_weights_config(cols, depth, aligned, dtype, capability)
        assert (weights.block_n + weights.block_k) * weights.block_r * weights.stages * dtype.itemsize <= room


@pytest.mark.parametrize(("backend", "calls"), [("triton", 0), ("cuda", 1), ("auto", 1)])
def test_which_version_the_gradient_of_the_weights_takes(backend: str, calls: int) -> None:
    """CUDA C++ if it supports the operands, unless backend="triton"."""
    dy, x, weights = torch.zeros(40, 24), torch.zeros(40, 16), torch.zeros(2, 24, 16)
    cuda = mock.patch.object(plans.products, "weights_launch")
    with cuda as launched, mock.patch.object(plans.products, "weights_unsupported_reason", return_value=None):
        plans._weights_launch(dy, x, weights, backend)
    assert launched.call_count == calls
