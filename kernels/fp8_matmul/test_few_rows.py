"""Tests of the version for few rows on Hopper (sm90/few_rows.cu): its configuration, compilation, and on a GPU the
results."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from harness.compiling import nvrtc, sass

from . import configs
from .op import fp8_matmul
from .sm90 import cuda_driver, few_rows
from .test_fp8_matmul import E4M3, E5M2, SCALINGS, agrees, operands

SOURCE = Path(few_rows.__file__).with_name("few_rows.cu")
ON_HOPPER = pytest.mark.gpu(min_capability=(9, 0))
NUMBERS = (1, 2, 3)  # SCALING of few_rows.cu
FEW = (1, 2, 7, 8, 16, 17, 33, 64)


@pytest.fixture
def compiler() -> None:
    if reason := cuda_driver.no_compiler():
        pytest.skip(reason)


def test_what_auto_takes() -> None:
    assert configs.pick_backend("auto", possible=True) == "cuda"
    assert configs.pick_backend("auto", possible=False) == "triton"
    assert configs.pick_backend("triton", possible=True) == "triton"


@pytest.mark.parametrize("scaling", NUMBERS)
def test_every_size_has_a_configuration(scaling: int) -> None:
    for rows, cols, depth in itertools.product((*FEW, 65, 128), (16, 1024, 2112, 8192, 28672), (16, 272, 8192, 28672)):
        config = configs.pick_few_config(rows, cols, depth, scaling)
        assert rows <= config.rows <= 128 and config.stages >= 4
        assert config.splits in (1, 2, 4, 8) and config.splits <= max(1, -(-depth // 128))
        # An SM has 228 KiB, of which the hardware reserves 1 KiB for each CTA.
        assert config.resident * (few_rows.shared_bytes(scaling, config) + 1024) <= 228 << 10


def test_its_clusters_run_at_once() -> None:
    """8192 x 8192 uses 64 clusters of 2 CTAs, two CTAs per SM. At most 62 clusters of 4 are resident by the driver's
    count, so that the last two would be a second wave."""
    assert configs.pick_few_config(16, 8192, 8192, 2) == configs.FewConfig(16, 2, 2, 6, 2)
    assert configs.pick_few_config(64, 8192, 8192, 2) == configs.FewConfig(64, 2, 2, 4, 2)
    assert configs.pick_few_config(128, 8192, 8192, 2) == configs.FewConfig(128, 2, 2, 6, 1)
    assert configs.pick_few_config(16, 2112, 7168, 2).splits == 4
    assert configs.pick_few_config(16, 28672, 8192, 2).splits == 1
    assert [configs._clusters(132, 2, size) for size in (1, 2, 4, 8)] == [264, 132, 60, 30]
    assert [configs._clusters(132, 1, size) for size in (1, 2, 4, 8)] == [132, 66, 30, 15]


@pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)
@pytest.mark.parametrize("scaling", NUMBERS)
@pytest.mark.parametrize(
    "rows", [1, pytest.param(16, marks=pytest.mark.slow), pytest.param(32, marks=pytest.mark.slow), 64, 128]
)
def test_it_compiles_and_does_not_spill(rows: int, scaling: int) -> None:
    config = configs.pick_few_config(rows, 8192, 8192, scaling)
    chosen = {
        **dict(SCALING=scaling, A_E4M3=rows % 2, B_E4M3=1, OUT32=int(rows == 1), FP16=int(scaling == 2)),
        **dict(BIAS=scaling, COLS=config.rows, GROUPS=config.groups, STAGES=config.stages, CLUSTER=config.splits),
        "RESIDENT": config.resident,
    }
    defines = tuple(f"{name}={value}" for name, value in chosen.items())
    usage = sass.inspect(nvrtc.compiled(SOURCE, "sm_90a", defines), "fp8_matmul_few_rows")
    assert usage.spills == 0 and usage.stack == 0 and usage.early_arrivals == 0
    assert set(usage.early_own_reads) <= {"LDS.32", "LDS.64"}  # reads of scales, which threads copy
    assert usage.mma == {"QGMMA": 4} and usage.wgmma_waits == 1
    assert usage.registers * few_rows.threads(config) * config.resident <= 65536


def test_host_and_device_agree() -> None:
    text = SOURCE.read_text(encoding="utf-8")
    assert f"ROWS = {few_rows.GROUP} * GROUPS, THREADS = 128 * GROUPS + 32;" in text
    assert few_rows.threads(configs.FewConfig(8, 2, 1, 3, 2)) == 128 * 2 + 32
    assert "SCALE_BYTES = BLOCKED ? SCALE_B + 4 * (SCALING == 3 ? ROWS : 4) : 0;" in text
    config = configs.FewConfig(16, 2, 1, 3, 2)
    assert [few_rows.shared_bytes(scaling, config) for scaling in NUMBERS] == [
        3 * ((16 + 128) * 128 + scales + 16) for scales in (0, 4 * (16 + 4), 4 * (16 + 128))
    ]


@ON_HOPPER
@SCALINGS
@pytest.mark.parametrize("rows", [*FEW, 65, 128])
def test_it_is_right(compiler, rows: int, scaling: str) -> None:
    """Remainders in every dimension, one K-block and many. Repeated runs agree bit for bit."""
    for k, n in ((16, 16), (272, 144), (1040, 400), (2064, 528), (8192, 48), (384, 1232)):
        a, b, *scales = operands(rows, k, n, scaling)
        bias = torch.randn(n, device="cuda")
        y = fp8_matmul(a, b, *scales, bias, torch.float32, backend="cuda")
        agrees(y, a, b, *scales, bias)
        for _ in range(5):
            assert torch.equal(y, fp8_matmul(a, b, *scales, bias, torch.float32, backend="cuda"))


@ON_HOPPER
@SCALINGS
@pytest.mark.parametrize(("splits", "groups", "stages"), list(itertools.product((1, 2, 4, 8), (1, 2, 4), (3, 4))))
def test_every_configuration(compiler, monkeypatch, splits: int, groups: int, stages: int, scaling: str) -> None:
    """Also more split-K partitions than K-blocks, several tiles along M, and tiles with one and two 128x128 blocks of
    b."""
    for tile_m, (m, k, n) in itertools.product((8, 16, 32, 64, 128), ((67, 1552, 656), (3, 144, 176))):
        if tile_m * groups > 64 * 4:
            continue  # more than an SM's registers
        config = configs.FewConfig(tile_m, groups, splits, stages, configs.few_resident(tile_m, groups))
        monkeypatch.setattr(configs, "pick_few_config", lambda *_, config=config: config)
        a, b, *scales = operands(m, k, n, scaling)
        ys = [fp8_matmul(a, b, *scales, out_dtype=torch.float32, backend="cuda") for _ in range(3)]
        agrees(ys[0], a, b, *scales)
        assert all(torch.equal(ys[0], y) for y in ys)


@ON_HOPPER
@SCALINGS
def test_every_pair_of_formats(compiler, scaling: str) -> None:
    for first, second in itertools.product((E4M3, E5M2), repeat=2):
        a, b, *scales = operands(19, 656, 272, scaling)
        a, b = a.float().to(first), b.float().to(second)
        agrees(fp8_matmul(a, b, *scales, out_dtype=torch.float32, backend="cuda"), a, b, *scales)


@ON_HOPPER
@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@SCALINGS
def test_every_dtype(compiler, scaling: str, out_dtype: torch.dtype, bias: torch.dtype | None) -> None:
    for rows in (5, 40):
        a, b, *scales = operands(rows, 400, 272, scaling)
        scales = [scale / 64 for scale in scales]
        of_bias = None if bias is None else torch.randn(544, device="cuda").to(bias)[::2]
        y = fp8_matmul(a, b, *scales, of_bias, out_dtype, backend="cuda")
        agrees(y, a, b, *scales, of_bias, rtol=1e-2)


@ON_HOPPER
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_fast_accum_is_a_permission(compiler, scaling: str) -> None:
    """With fast_accum, accumulators are still promoted after each K-block of 128."""
    a, b, *scales = operands(33, 2064, 528, scaling)
    want = fp8_matmul(a, b, *scales, out_dtype=torch.float32, backend="cuda")
    assert torch.equal(fp8_matmul(a, b, *scales, out_dtype=torch.float32, fast_accum=True, backend="cuda"), want)


@ON_HOPPER
@pytest.mark.parametrize("rows", [21, 200])
def test_layouts(compiler, rows: int) -> None:
    """Operands that are slices of wider rows, whose other elements are NaN, unaligned operands, and column-major
    scales. With 200 rows in products.cu."""
    a, b, scale_a, scale_b = operands(rows, 656, 272, "1x128")
    want = fp8_matmul(a, b, scale_a, scale_b, backend="cuda")
    wide_a, wide_b = (torch.full((len(t), 704), 0xFF, dtype=torch.uint8, device="cuda") for t in (a, b))
    for offset in (16, 3):
        x, w = (t[:, offset : offset + 656] for t in (wide_a, wide_b))
        x.copy_(a.view(torch.uint8)), w.copy_(b.view(torch.uint8))
        columns = scale_a.t().contiguous().t(), scale_b.t().contiguous().t()
        assert torch.equal(fp8_matmul(x.view(E4M3), w.view(E4M3), *columns, backend="cuda"), want)


@ON_HOPPER
@SCALINGS
def test_what_is_not_finite_stays_in_its_row_and_column(compiler, scaling: str) -> None:
    a, b, *scales = operands(30, 1040, 272, scaling)
    want = fp8_matmul(a, b, *scales, backend="cuda")
    a.view(torch.uint8)[17, 33], b.view(torch.uint8)[130, 5] = 0x7F, 0xFF
    y = fp8_matmul(a, b, *scales, backend="cuda")
    assert y[17].isnan().all() and y[:, 130].isnan().all()
    rows, columns = torch.arange(30) != 17, torch.arange(272) != 130
    assert torch.equal(y[rows][:, columns], want[rows][:, columns])


@ON_HOPPER
def test_in_a_graph_and_on_streams(compiler) -> None:
    """Calls share no workspace: several can run at once."""
    inputs = [operands(16, 2048, 2048, "128x128") for _ in range(4)]
    want = [fp8_matmul(*each, backend="cuda") for each in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for each, stream in zip(inputs, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(fp8_matmul(*each, backend="cuda"))
        torch.cuda.synchronize()
        assert all(torch.equal(y, w) for y, w in zip(found, want, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [fp8_matmul(*each, backend="cuda") for each in inputs]
    for _ in range(3):
        for y in captured:
            y.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(y, w) for y, w in zip(captured, want, strict=True))
