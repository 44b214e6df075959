"""Tests that are specific to grouped_gemm_fp8: splits, offsets, scales, and isolation between groups. test_refusals.py
has the errors; tests/test_specs.py derives the rest from SPEC. In the interpreter kernels decode the bytes
themselves."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from harness.spec import Case

from . import bench, configs, launch, op, operands, plans, schedule
from .bench import SPEC
from .kernel import _grouped_gemm_fp8_table_kernel
from .op import grouped_gemm_fp8
from .op_wgrad import grouped_gemm_fp8_wgrad
from .operands import blocks
from .reference import grouped_gemm_fp8_reference, grouped_gemm_fp8_wgrad_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
REFERENCES = {
    grouped_gemm_fp8: grouped_gemm_fp8_reference,
    grouped_gemm_fp8_wgrad: grouped_gemm_fp8_wgrad_reference,
}


def codes(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).mul(64).to(dtype)


def scales(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, device=DEVICE) + 0.5


def offsets_of(ends: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(ends, device=DEVICE, dtype=dtype)


def forward(ends: list[int], rows: int, n: int, k: int, formats: tuple = (E4M3, E4M3)) -> tuple[torch.Tensor, ...]:
    """Random x, weights and their scales, and offsets."""
    groups = len(ends)
    a, b = codes(rows, k, dtype=formats[0]), codes(groups, n, k, dtype=formats[1])
    return a, b, scales(rows, blocks(k)), scales(groups, blocks(n), blocks(k)), offsets_of(ends)


def gradient(ends: list[int], rows: int, n: int, k: int, formats: tuple = (E4M3, E4M3)) -> tuple[torch.Tensor, ...]:
    """Random dy_t, x_t and their scales, and offsets."""
    a, b = codes(n, rows, dtype=formats[0]), codes(k, rows, dtype=formats[1])
    return a, b, scales(n, blocks(rows)), scales(k, blocks(rows)), offsets_of(ends)


def agrees(function, arguments: tuple[torch.Tensor, ...], rtol: float = 2e-3, **options) -> torch.Tensor:
    """Checks the result against the reference in fp64, with NaN in the same places. Hopper's tensor cores accumulate a
    K-block of 128 with 14 bits, so that the error is relative to the largest result."""
    ours = function(*arguments, **{"out_dtype": torch.float32, **options})
    *tensors, offsets = arguments
    want = REFERENCES[function](*(t.double() for t in tensors), offsets)
    assert torch.equal(ours.isnan(), want.isnan())
    close, exact = (torch.where(want.isfinite(), t.double(), 0.0) for t in (ours, want))
    limit = rtol * exact.abs().max().item() if exact.numel() else 0.0
    torch.testing.assert_close(close, exact, rtol=0, atol=limit + 1e-6)
    return ours


SPLITS = pytest.mark.parametrize(
    "ends",
    [
        [0, 0, 0, 0],  # all of them are empty
        [304, 304, 304, 304],  # all rows in the first group
        [0, 0, 0, 304],  # … in the last
        [0, 7, 7, 20],  # some are empty, and rows are left
        [13, 130, 253, 300],  # sizes are no multiples of anything
        [128, 128, 256, 304],  # groups begin with blocks
        [100, 120, 128, 129],  # several groups of one block
    ],
)


@SPLITS
def test_splits(ends: list[int]) -> None:
    agrees(grouped_gemm_fp8, forward(ends, 304, 48, 176))
    agrees(grouped_gemm_fp8_wgrad, gradient(ends, 304, 48, 32))


@pytest.mark.parametrize("formats", list(itertools.product((E4M3, E5M2), repeat=2)))
def test_every_pair_of_formats(formats: tuple[torch.dtype, torch.dtype]) -> None:
    agrees(grouped_gemm_fp8, forward([7, 20, 33], 40, 144, 272, formats))
    agrees(grouped_gemm_fp8_wgrad, gradient([7, 20, 200], 208, 144, 48, formats))


@pytest.mark.parametrize(("rows", "n", "k"), [(0, 16, 32), (5, 0, 32), (5, 16, 0), (0, 0, 0)])
def test_nothing_to_multiply(rows: int, n: int, k: int) -> None:
    agrees(grouped_gemm_fp8, forward([rows // 2, rows], rows, n, k))
    agrees(grouped_gemm_fp8_wgrad, gradient([3, 16 * rows], 16 * rows, n, k))


@pytest.mark.parametrize("function", [grouped_gemm_fp8, grouped_gemm_fp8_wgrad])
@pytest.mark.parametrize(
    ("ends", "rows", "n", "k"), [([], 16, 16, 32), ([0, 0], 0, 16, 32), ([3, 9], 16, 0, 32), ([3, 9], 16, 32, 0)]
)
def test_nothing_is_launched_for_an_empty_result(function, ends: list[int], rows: int, n: int, k: int) -> None:
    arguments = (forward if function is grouped_gemm_fp8 else gradient)(ends, rows, n, k)
    with mock.patch.object(launch.Launch, "__call__", autospec=True) as launched:
        result = function(*arguments)
    assert launched.called == bool(result.numel())


def test_no_groups() -> None:
    assert torch.equal(grouped_gemm_fp8(*forward([], 5, 16, 32)).float(), torch.zeros(5, 16, device=DEVICE))
    assert grouped_gemm_fp8_wgrad(*gradient([], 16, 16, 32)).shape == (0, 16, 32)


@pytest.mark.parametrize("ends", [[-5, 10, 100], [20, 10, 30], [2**31 - 1, 3, -(2**31)], [7, -1, 7]])
def test_offsets_are_read_as_monotonic_and_within_the_rows(ends: list[int]) -> None:
    agrees(grouped_gemm_fp8, forward(ends, 35, 16, 32))
    agrees(grouped_gemm_fp8_wgrad, gradient(ends, 48, 16, 32))


def test_offsets_of_64_bits_and_at_a_stride() -> None:
    *tensors, _ = forward([], 35, 16, 32)
    tensors[1], tensors[3] = codes(3, 16, 32), scales(3, 1, 1)
    wide = offsets_of([5, 0, 20, 0, 2**40, 0], torch.int64)[::2]
    agrees(grouped_gemm_fp8, (*tensors, wide))


def test_more_groups_than_are_scanned_at_a_time() -> None:
    ends = sorted(torch.randint(0, 60, (2 * 16 + 3,)).tolist())
    with mock.patch.object(schedule, "CHUNK", 16):
        agrees(grouped_gemm_fp8, forward(ends, 60, 16, 16))
        agrees(grouped_gemm_fp8_wgrad, gradient(ends, 64, 16, 16))


def test_the_table_has_the_tiles_of_each_group() -> None:
    ends, rows, block_m = [7, 7, 150, 300], 304, 128
    table = torch.full((schedule.table_size(rows, 4),), -9, dtype=torch.int32, device=DEVICE)
    schedule.table_launch(_grouped_gemm_fp8_table_kernel, offsets_of(ends), rows, block_m)(offsets_of(ends), table)
    (count, *_), *entries = table.view(-1, 4).tolist()
    assert entries[:4] == [[3, 150, 300, 0], [2, 7, 150, 0], [0, 0, 7, 0], [1, 7, 7, 0]]
    assert entries[4 : 4 + count] == [
        [0, 0, 7, 0],
        [2, 7, 150, 0],
        [2, 135, 150, 0],
        [3, 150, 300, 0],
        [3, 278, 300, 0],
        [-1, 300, 304, 0],
    ]


def test_a_neighbour_that_is_nan_stays_outside() -> None:
    """Tiles and blocks of a group also hold rows of the next group."""
    x, weights, *rest = forward([9, 30], 40, 48, 176)
    want = grouped_gemm_fp8(x, weights, *rest)
    x.view(torch.uint8)[9:], weights.view(torch.uint8)[1] = 0x7F, 0xFF
    y = grouped_gemm_fp8(x, weights, *rest)
    assert torch.equal(y[:9], want[:9]) and not y[30:].any() and y[9:30].isnan().all()

    dy_t, x_t, *rest = gradient([100, 150, 300], 400, 48, 32)
    want = grouped_gemm_fp8_wgrad(dy_t, x_t, *rest)
    for bad in (slice(100, 150), slice(300, 400)):
        dy_t.view(torch.uint8)[:, bad], x_t.view(torch.uint8)[:, bad] = 0x7F, 0xFF
    dweights = grouped_gemm_fp8_wgrad(dy_t, x_t, *rest)
    assert torch.equal(dweights[::2], want[::2]) and dweights[1].isnan().all()


def test_scales_of_blocks_that_a_group_has_no_rows_of_are_not_read() -> None:
    *tensors, offsets = gradient([128, 128, 260], 512, 32, 16)
    tensors[2][:, 3:] = torch.nan
    dweights = grouped_gemm_fp8_wgrad(*tensors, offsets)
    assert dweights.isfinite().all() and not dweights[1].any()


def test_a_group_without_rows_within_a_block_is_zero() -> None:
    """Whatever the scales of the block are, which the groups before and after share."""
    *tensors, offsets = gradient([130, 130, 260], 512, 32, 16)
    for of_rows in tensors[2:]:
        of_rows[:, 1] = torch.nan
    dweights = grouped_gemm_fp8_wgrad(*tensors, offsets)
    assert not dweights[1].any() and dweights[::2].isnan().all()


@pytest.mark.parametrize("function", [grouped_gemm_fp8, grouped_gemm_fp8_wgrad])
def test_strides(function) -> None:
    """Operands whose rows are not contiguous and aligned are copied; scales may have any strides."""
    make = forward if function is grouped_gemm_fp8 else gradient
    a, b, *of_both, offsets = make([7, 20, 130], 144, 48, 176)
    want = function(a, b, *of_both, offsets)

    def odd(t: torch.Tensor) -> torch.Tensor:
        wide = torch.zeros(*t.shape[:-1], t.shape[-1] + 3, device=DEVICE).to(t.dtype)
        wide[..., 3:] = t
        return wide[..., 3:]

    assert not operands.in_place(odd(a)) and not operands.in_place(a.mT.contiguous().mT) and operands.in_place(b)
    columns = [s.mT.contiguous().mT for s in of_both]
    for first, second in ((odd(a), b), (a, odd(b)), (a.mT.contiguous().mT, b.mT.contiguous().mT)):
        assert torch.equal(function(first, second, *columns, offsets), want)


@hypothesis.given(
    sizes=st.lists(st.integers(0, 150), min_size=1, max_size=5),
    left=st.integers(0, 40),
    n=st.integers(1, 9),
    k=st.integers(1, 17),
)
@hypothesis.settings(max_examples=12 if DEVICE == "cpu" else 100, deadline=None, derandomize=True, database=None)
def test_any_sizes(sizes: list[int], left: int, n: int, k: int) -> None:
    ends = list(itertools.accumulate(sizes))
    agrees(grouped_gemm_fp8, forward(ends, ends[-1] + left, 16 * n, 16 * k))
    agrees(grouped_gemm_fp8_wgrad, gradient(ends, (ends[-1] + left + 15) // 16 * 16, 16 * n, 16 * k))


def quantised(x: torch.Tensor, height: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of `height` x 128, as `ridgeline.fp8` has them."""
    rows, dim = x.shape
    padded = torch.nn.functional.pad(x, (0, -dim % 128, 0, -rows % height))
    tiles = padded.view(-1, height, blocks(dim), 128)
    scale = (tiles.abs().amax((1, 3)) / 448).clamp(min=1e-30)
    data = (tiles / scale[:, None, :, None]).view(padded.shape)[:rows, :dim].to(E4M3)
    return data.contiguous(), scale


def test_the_three_products_of_a_layer() -> None:
    """Forward and both gradients of a grouped linear layer, as the README shows them, against fp32."""
    x, w = torch.randn(384, 144, device=DEVICE), torch.randn(2, 272, 144, device=DEVICE) / 12
    dy, offsets = torch.randn(384, 272, device=DEVICE), offsets_of([128, 384])
    groups = slice(0, 128), slice(128, 384)

    def stacked(weights) -> tuple[torch.Tensor, ...]:
        data, of_data = zip(*(quantised(one, 128) for one in weights), strict=True)
        return torch.stack(data), torch.stack(of_data)

    (w_q, w_s), (w_t, w_ts) = stacked(w), stacked(w.mT)
    (x_q, x_s), (d_q, d_s) = quantised(x, 1), quantised(dy, 1)
    (x_t, x_ts), (d_t, d_ts) = quantised(x.t(), 1), quantised(dy.t(), 1)
    out = {"out_dtype": torch.float32}
    y = grouped_gemm_fp8(x_q, w_q, x_s, w_s, offsets, **out)
    dx = grouped_gemm_fp8(d_q, w_t, d_s, w_ts, offsets, **out)
    dw = grouped_gemm_fp8_wgrad(d_t, x_t, d_ts, x_ts, offsets)
    pairs = enumerate(groups)
    want = [(x[r] @ w[g].t(), dy[r] @ w[g], dy[r].t() @ x[r]) for g, r in pairs]
    for ours, exact in zip((y, dx, dw), zip(*want, strict=True), strict=True):
        exact = torch.stack(exact) if ours.dim() == 3 else torch.cat(exact)
        distance = 1 - 2 * (ours * exact).sum() / (ours.square().sum() + exact.square().sum())
        assert ours.shape == exact.shape and distance < 2e-3


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16])
def test_results_are_rounded_once(out_dtype: torch.dtype) -> None:
    for function, make in ((grouped_gemm_fp8, forward), (grouped_gemm_fp8_wgrad, gradient)):
        a, b, of_a, of_b, offsets = make([7, 20, 130], 144, 48, 176)
        arguments = a, b, of_a / 64, of_b / 64, offsets
        exact = function(*arguments, out_dtype=torch.float32)
        assert torch.equal(function(*arguments, out_dtype=out_dtype), exact.to(out_dtype))


def test_a_call_never_waits_for_the_device() -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("the host reads a tensor")

    calls = [(grouped_gemm_fp8, forward([3, 20], 40, 16, 32)), (grouped_gemm_fp8_wgrad, gradient([3, 20], 48, 16, 32))]
    with mock.patch.multiple(torch.Tensor, item=forbidden, tolist=forbidden, cpu=forbidden, __int__=forbidden):
        for function, arguments in calls:
            function(*arguments)


@pytest.mark.gpu(min_capability=(8, 9))
def test_one_graph_for_all_offsets() -> None:
    """No launch depends on the values of the offsets, and nothing synchronises."""
    for function, make in ((grouped_gemm_fp8, forward), (grouped_gemm_fp8_wgrad, gradient)):
        *tensors, offsets = make([30, 200, 330], 400, 144, 160)
        function(*tensors, offsets)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.graph(graph):
                result = function(*tensors, offsets)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for ends in ([0, 0, 400], [400, 400, 400], [1, 2, 3], [128, 256, 384]):
            offsets.copy_(torch.tensor(ends))
            graph.replay()
            assert torch.equal(result, function(*tensors, offsets))
            agrees(function, (*tensors, offsets))


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)])
def test_every_size_has_a_configuration(capability: tuple[int, int]) -> None:
    room = 99 << 10 if capability == (8, 9) else 227 << 10
    for groups, cols, depth in itertools.product((1, 64, 8192), (16, 112, 8192), (16, 144, 8192)):
        block_m = configs.pick_block_m(8192, groups)
        assert configs.MIN_BLOCK_M <= block_m <= 128
        rows = configs.pick_rows_config(cols, depth, block_m, capability)
        assert 128 % rows.block_n == 0  # a tile has one weight scale per K-block
        assert rows.block_k == 128 or rows.block_k >= depth
        assert (block_m + rows.block_n) * rows.block_k * rows.stages * rows.ctas <= room
        weights = configs.pick_weights_config(cols, depth, capability)
        assert (weights.block_n + weights.block_k) * 128 * weights.stages <= room


@pytest.mark.parametrize("case", [c for c in SPEC.cases if c.params["split"] != "random"], ids=lambda case: case.name)
def test_splits_of_the_cases(case: Case) -> None:
    rows = bench.group_sizes(case)
    assert len(rows) == case.dims["groups"] and sum(rows) == bench.rows_of(case) and min(rows) >= 0
    assert case.params["split"] != "padded" or all(size % 128 == 0 for size in rows)


def test_cases_name_the_sizes_that_they_have() -> None:
    for case in SPEC.cases:
        groups, rows, n, k = bench.sizes(case)
        inputs = SPEC.make_inputs(case, "meta", None)
        names = ("dy_t", "x_t") if case.params["wgrad"] else ("x", "weights")
        shapes = ((n, rows), (k, rows)) if case.params["wgrad"] else ((rows, k), (groups, n, k))
        assert tuple(inputs[name].shape for name in names) == shapes
        assert case.name.startswith(f"g{groups}-{rows}x{n}x{k}-")


def test_plans_are_kept() -> None:
    arguments = forward([1, 3], 5, 16, 32)
    grouped_gemm_fp8(*arguments)
    with mock.patch.object(plans, "_rows_launch", side_effect=AssertionError("planned again")):
        grouped_gemm_fp8(*arguments)


def test_a_copy_works_under_another_name(tmp_path: Path) -> None:
    """Calls the public functions directly, because SPEC's callables take bytes."""
    ignored = shutil.ignore_patterns("bench.py", "test_*.py", "__pycache__")
    shutil.copytree(Path(op.__file__).parent, tmp_path / "elsewhere" / "copied", ignore=ignored)
    script = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from elsewhere.copied import grouped_gemm_fp8, grouped_gemm_fp8_wgrad
from elsewhere.copied.reference import grouped_gemm_fp8_reference, grouped_gemm_fp8_wgrad_reference
device = "cuda" if torch.cuda.is_available() else "cpu"
def codes(*shape):
    return torch.randn(*shape, device=device).to(torch.float8_e4m3fn)
def scales(*shape):
    return torch.rand(*shape, device=device)
offsets = torch.tensor([3, 9], device=device)
x = codes(9, 160), codes(2, 32, 160), scales(9, 2), scales(2, 1, 2), offsets
t = codes(32, 16), codes(16, 16), scales(32, 1), scales(16, 1), offsets
for ours, want, given in (
    (grouped_gemm_fp8, grouped_gemm_fp8_reference, x),
    (grouped_gemm_fp8_wgrad, grouped_gemm_fp8_wgrad_reference, t),
):
    results = (f(*given, out_dtype=torch.float32) for f in (ours, want))
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-2)
"""
    environment = os.environ | ({} if DEVICE == "cuda" else {"TRITON_INTERPRET": "1"})
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("capability", "every"), [((9, 0), False), pytest.param((8, 9), True, marks=pytest.mark.slow)])
def test_tensor_cores_multiply_numbers_of_8_bits(capability: tuple[int, int], every: bool) -> None:
    """The interpreter decodes operands, a GPU does not. sm_89 is supported but in no table: SPEC.compile_targets are
    the columns of docs/SUPPORT.md for every kernel."""
    script = f"""
from harness.compiling import ahead
from kernels.grouped_gemm_fp8.bench import FORWARDS, GRADIENTS, SPEC
cases = [case for case in SPEC.cases if case.bench] if {every} else (FORWARDS[0], GRADIENTS[0])
outcome = ahead.compile_spec(SPEC, {capability}, cases, ("fwd",), ("triton" if {capability} >= (9, 0) else "auto",))
assert not outcome.failures, outcome.failures
products = [row["mma"] for row in outcome.rows if row["jit"] != "_grouped_gemm_fp8_table_kernel"]
assert len(products) >= 2 and all(mma.keys() <= {{"QMMA", "QGMMA"}} and mma for mma in products), products
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(op.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
