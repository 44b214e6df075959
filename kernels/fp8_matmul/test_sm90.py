"""Tests of the version for Hopper (sm90/): supported problems, compilation, and on a GPU the results."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.compiling import nvrtc, sass

from . import configs, plans
from .bench import CUDA_CASES, _cuda_candidates
from .op import fp8_matmul
from .scaling import LINE, ROW, SQUARE, TENSOR
from .sm90 import cuda_driver, few_rows, products
from .test_fp8_matmul import E4M3, E5M2, SCALINGS, agrees, operands

HOPPER = (9, 0)
SOURCE = Path(products.__file__).with_name("products.cu")


@pytest.fixture
def compiler() -> None:
    if reason := cuda_driver.no_compiler():
        pytest.skip(reason)


def test_what_it_takes() -> None:
    """Needs no GPU: the result depends only on capability and dtypes, and then on the presence of a compiler."""
    one, small = torch.tensor(1.0), torch.tensor(127, dtype=torch.uint8)
    assert products.unsupported_reason(one, one, HOPPER) == cuda_driver.no_compiler()
    assert "compute capability 9.0" in str(products.unsupported_reason(one, one, (8, 9)))
    assert "scales in float32" in str(products.unsupported_reason(one, small, HOPPER))


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU it cannot run")
def test_where_it_cannot_run_is_an_error() -> None:
    with pytest.raises(RuntimeError, match='backend="cuda" cannot run here: it needs a GPU of compute capability 9.0'):
        fp8_matmul(*operands(8, 64, 32, "row"), backend="cuda")


def test_what_a_launch_is_told_of_the_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch gets SCALING of products.cu or few_rows.cu, and the strides of both scales, which are read in place.
    Promotion is off only with fast accumulation and many rows."""
    told = []

    def noting(module: object) -> Any:
        return lambda a, b, bias, dtype, *rest: told.append((module, *rest[:2]))

    for module in (products, few_rows):
        monkeypatch.setattr(module, "launch", noting(module))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    few, many = 5, configs.FEW_ROWS + 1
    for rows, scaling, fast in itertools.product((few, many), (TENSOR, ROW, SQUARE, LINE), (False, True)):
        a, b, scale_a, scale_b = operands(rows, 256, 144, scaling)
        plans._cuda_write(a, b, scale_a, scale_b, None, torch.bfloat16, fast)
        own = {TENSOR: (0, 0, 0, 0), ROW: (1, 0, 1, 0)}.get(scaling, (*scale_a.stride(), *scale_b.stride()))
        number = {SQUARE: 2, LINE: 3}.get(scaling, 0 if fast and rows == many else 1)
        assert told.pop() == (few_rows if rows == few else products, number, own)


# (SCALING, BLOCK_N, TURNS) of products.cu.
VARIANTS = [
    (0, 256, 0),
    (1, 128, 0),
    *((scaling, n, turns) for scaling in (2, 3) for n in (128, 192) for turns in (0, 1)),
]
# The same with the Python names of the scaling modes.
TILES = pytest.mark.parametrize(
    ("scaling", "block_n", "turns"),
    [
        (name, n, bool(turns))
        for number, n, turns in VARIANTS
        for name in {1: (TENSOR, ROW), 2: (SQUARE,), 3: (LINE,)}.get(number, ())
    ],
)


def skip_a_single_block(scaling: str, block_n: int, k: int) -> None:
    if block_n > 128 and scaling == "1x128" and k <= 128:
        pytest.skip("a single block is a scale of a row, for which tiles have 128 columns")


def defines(scaling: int, block_n: int, turns: int, cluster: int, **changes: int) -> tuple[str, ...]:
    stages = {128: 6, 192: 5, 256: 4}[block_n]
    chosen = {
        **dict(SCALING=scaling, A_E4M3=1, B_E4M3=1, OUT32=0, FP16=0, BIAS=0),
        **dict(BLOCK_N=block_n, TURNS=turns, STAGES=stages, RASTER=8, CLUSTER=cluster),
    }
    return tuple(f"{name}={value}" for name, value in (chosen | changes).items())


@pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)
@pytest.mark.parametrize("cluster", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(("scaling", "block_n", "turns"), VARIANTS)
def test_it_compiles_and_does_not_spill(scaling: int, block_n: int, turns: int, cluster: int) -> None:
    other = dict(A_E4M3=0, OUT32=1, BIAS=3) if cluster == 1 else dict(B_E4M3=0, BIAS=1)
    if block_n == 192 and not turns:
        other["BIAS"] = 0  # 16-bit results with a bias spill 12 bytes; this configuration is never picked
    code = nvrtc.compiled(SOURCE, "sm_90a", defines(scaling, block_n, turns, cluster, **other))
    usage = sass.inspect(code, "fp8_matmul_products")
    assert usage.spills == 0 and usage.stack == 0
    assert usage.early_arrivals == 0 and usage.early_own_reads == {}
    # Four per K-block. With 256 columns, in two main loops: for all columns, and for half of them. Else for the first
    # K-block, and for each set of accumulators in the main loop.
    sets = 2 if block_n == 128 else 1
    assert usage.mma == {"QGMMA": 4 + 4 * sets}
    # One wait per K-block (two with TURNS) and a last one; with 256 columns in both loops. ptxas has not serialised the
    # wgmmas of a K-block.
    assert usage.wgmma_waits == (sets * (1 + turns) + 1 if scaling else 4)


def test_few_rows_are_not_its_own() -> None:
    """Up to FEW_ROWS rows CUDA C++ uses few_rows.cu, so that the tests of products.cu have more."""
    sizes = next(mark.args[1] for mark in test_it_is_right.pytestmark if mark.args[:1] == (("m", "k", "n"),))
    assert all(m > configs.FEW_ROWS for m, _, _ in sizes)


def test_host_and_device_agree_on_the_tile() -> None:
    text = SOURCE.read_text(encoding="utf-8")
    found = re.search(r"BLOCK_M = (\d+), BLOCK_K = (\d+), CONSUMERS = (\d+);", text)
    assert found is not None
    block_m, block_k, consumers = map(int, found.groups())
    assert (block_m, block_k) == (products.BLOCK_M, products.BLOCK_K)
    assert 128 * (consumers + 1) == products.THREADS


@pytest.mark.parametrize("scaling", [0, 1, 2, 3])
@pytest.mark.parametrize("cols", [16, 128, 2112, 4096, 8192, 11008])
def test_the_configuration(scaling: int, cols: int) -> None:
    for rows in (129, 4096, 8192):
        config = configs.pick_cuda_config(rows, cols, 8192, scaling)
        assert products.shared_bytes(scaling, config) <= 227 << 10
        assert (scaling, config.block_n, config.turns) in VARIANTS


def test_every_candidate_fits_into_shared_memory() -> None:
    for case in CUDA_CASES:
        blocked = {SQUARE: 2, LINE: 3}.get(case.params["scaling"], 1)
        for config in _cuda_candidates(case):
            assert products.shared_bytes(blocked, config) <= 227 << 10


def test_which_tiles_it_has() -> None:
    """With block scales the tile whose waves take less time is picked: on 132 SMs 8192 x 8192 is 21 waves of 192
    columns or 32 of 128; 256 columns with few rows are two tiles in one wave in either case."""
    picked = [configs.pick_cuda_config(rows, cols, 8192, 2).block_n for rows, cols in ((8192, 8192), (200, 256))]
    assert picked == [192, 128]


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [
        (256, 128, 128),
        (256, 512, 256),
        (131, 16, 16),
        (165, 272, 144),
        (129, 1040, 400),
        (300, 2064, 528),  # three row tiles: the last cluster has only one
        (133, 8192, 48),
        (257, 384, 208),  # a last tile with 16 of 192 columns, whose second 128x128 block is out of bounds
        (130, 640, 448),  # a tile of 192 that begins within a 128x128 block, with columns in two blocks
        (193, 384, 688),  # in the last row tile only one consumer has a row
    ],
)
@TILES
def test_it_is_right(
    compiler, monkeypatch, scaling: str, block_n: int, turns: bool, m: int, k: int, n: int, cluster: int
) -> None:
    skip_a_single_block(scaling, block_n, k)
    config = configs.CudaConfig(4, 4, cluster, block_n, turns)
    monkeypatch.setattr(configs, "pick_cuda_config", lambda *_: config)
    a, b, *scales = operands(m, k, n, scaling)
    bias = torch.randn(n, device="cuda")
    for first, second in itertools.product((E4M3, E5M2), repeat=2):
        x, w = a.float().to(first), b.float().to(second)
        y = fp8_matmul(x, w, *scales, bias, torch.float32, backend="cuda")
        agrees(y, x, w, *scales, bias)


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@SCALINGS
def test_every_dtype(compiler, scaling: str, out_dtype: torch.dtype, bias: torch.dtype | None) -> None:
    a, b, *scales = operands(200, 400, 272, scaling)
    scales = [scale / 64 for scale in scales]
    of_bias = None if bias is None else torch.randn(544, device="cuda").to(bias)[::2]
    y = fp8_matmul(a, b, *scales, of_bias, out_dtype, backend="cuda")
    agrees(y, a, b, *scales, of_bias, rtol=1e-2)


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("k", [16, 256, 1168])
@TILES
def test_more_tiles_than_sms(compiler, monkeypatch, scaling: str, block_n: int, turns: bool, k: int) -> None:
    """Every CTA computes several tiles, of one, two and ten K-blocks. Repeated runs agree bit for bit."""
    skip_a_single_block(scaling, block_n, k)
    config = configs.CudaConfig(4, 8, 2, block_n, turns)
    monkeypatch.setattr(configs, "pick_cuda_config", lambda *_: config)
    a, b, *scales = operands(3001, k, 2064, scaling)
    ours = fp8_matmul(a, b, *scales, out_dtype=torch.float32, backend="cuda")
    agrees(ours, a, b, *scales)
    for _ in range(5):
        assert torch.equal(ours, fp8_matmul(a, b, *scales, out_dtype=torch.float32, backend="cuda"))


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "n"), [(1100, 1424), (3001, 2064)])
@TILES
def test_tiles_change_no_bit(
    compiler, monkeypatch, scaling: str, block_n: int, turns: bool, m: int, n: int, out_dtype: torch.dtype
) -> None:
    """Results are bit-identical to those of the picked configuration, with about one tile a CTA, and with more tiles
    than SMs."""
    a, b, *scales = operands(m, 528, n, scaling)
    scales = [scale / 64 for scale in scales]
    bias = torch.randn(n, device="cuda")
    want = fp8_matmul(a, b, *scales, bias, out_dtype, backend="cuda")
    for cluster in (1, 2):
        config = configs.CudaConfig(4, 8, cluster, block_n, turns)
        monkeypatch.setattr(configs, "pick_cuda_config", lambda *_, config=config: config)
        assert torch.equal(fp8_matmul(a, b, *scales, bias, out_dtype, backend="cuda"), want)


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_fast_accum(compiler, scaling: str) -> None:
    for m, k, n in ((300, 2064, 528), (129, 4096, 400), (192, 128, 128), (131, 16, 16), (133, 8192, 48)):
        a, b, *scales = operands(m, k, n, scaling)
        y = fp8_matmul(a, b, *scales, out_dtype=torch.float32, fast_accum=True, backend="cuda")
        agrees(y, a, b, *scales, rtol=2e-2)


@pytest.mark.gpu(min_capability=(9, 0))
def test_what_is_not_finite_stays_in_its_row_and_column(compiler) -> None:
    a, b, *scales = operands(300, 400, 272, "128x128")
    want = fp8_matmul(a, b, *scales, backend="cuda")
    a.view(torch.uint8)[17, 33], b.view(torch.uint8)[130, 5] = 0x7F, 0xFF
    y = fp8_matmul(a, b, *scales, backend="cuda")
    assert y[17].isnan().all() and y[:, 130].isnan().all()
    rows, columns = torch.arange(300) != 17, torch.arange(272) != 130
    assert torch.equal(y[rows][:, columns], want[rows][:, columns])
