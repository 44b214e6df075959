"""The version for Hopper (sm90/): which problems it supports, that it compiles, and on a GPU its results."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

from harness.compiling import nvrtc, sass

from . import configs, mxfp_matmul, mxfp_pack, plans
from .formats import BLOCK, CHUNK
from .launch import forget
from .reference import dequantized, mxfp_matmul_reference
from .sm90 import cuda_driver, few_rows, many_rows
from .test_mxfp_matmul import one, weights

HOPPER = (9, 0)
SOURCE = Path(few_rows.__file__).with_name("few_rows.cu")
MANY = configs.ManyConfig()
ON_HOPPER = pytest.mark.gpu(min_capability=HOPPER)
EVERY = pytest.mark.parametrize("format", BLOCK)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


@pytest.fixture
def compiler() -> None:
    if reason := cuda_driver.no_compiler():
        pytest.skip(reason)


def picked(rows: int, columns: int, count: int, format: str) -> configs.CudaConfig:
    return configs.pick_cuda_config(rows, columns, count, CHUNK // 2 + CHUNK // BLOCK[format])


def test_what_it_takes() -> None:
    """Independent of the GPU present: depends on capability, dtype and N, and last on the compiler."""
    assert few_rows.unsupported_reason(torch.bfloat16, 48, HOPPER) == cuda_driver.no_compiler()
    assert "compute capability 9.0" in str(few_rows.unsupported_reason(torch.bfloat16, 48, (8, 0)))
    assert "float16 and bfloat16" in str(few_rows.unsupported_reason(torch.float32, 48, HOPPER))
    assert "a multiple of 16" in str(few_rows.unsupported_reason(torch.float16, 40, HOPPER))


def test_what_is_read_in_place() -> None:
    x = torch.zeros(8, 64, dtype=torch.float16)
    assert few_rows.in_place(x) and few_rows.in_place(x[:, 8:27])
    for t in (x[:, 1:], x[:, ::2], x[:1].expand(8, 64), torch.zeros(8, 60).half()):
        assert not few_rows.in_place(t)
        copy = few_rows.dense(t)
        assert few_rows.in_place(copy) and copy.shape == t.shape


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU it cannot run")
def test_where_it_cannot_run_is_an_error() -> None:
    w, scales = mxfp_pack(*weights(32, 128, "mxfp4"))
    with pytest.raises(RuntimeError, match='backend="cuda" cannot run here: it needs a GPU of compute capability 9.0'):
        mxfp_matmul(torch.zeros(3, 128).half(), w, scales, backend="cuda")


@pytest.mark.parametrize("backend", ["auto", "cuda"])
def test_where_it_can_run_it_is_taken(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(few_rows, "unsupported_reason", lambda *problem: None)
    monkeypatch.setattr(plans, "_cuda_plan", lambda *problem: lambda x, *rest: taken.append(x))
    x = torch.zeros(3, 128, dtype=torch.float16)
    w, scales = mxfp_pack(*weights(32, 128, "mxfp4"))
    plans.product_plan(x, w, scales, None, "mxfp4", backend)(x, w, scales, None)
    assert taken == [x]


def test_what_auto_takes() -> None:
    assert configs.pick_backend("auto", 1, possible=True) == "cuda"
    assert configs.pick_backend("auto", 1, possible=False) == "triton"
    assert configs.pick_backend("auto", configs.CUDA_ROWS + 1, possible=True) == "triton"
    assert configs.pick_backend("triton", 1, possible=True) == "triton"


@EVERY
def test_every_size_has_a_configuration(format: str) -> None:
    for rows, columns, count in itertools.product((1, 8, 9, 33, 64, 200), (16, 1024, 8192, 28672), (1, 3, 64, 224)):
        config = picked(rows, columns, count, format)
        assert config.stages >= 3 and config.splits in (1, 2, 4, 8) and config.splits <= max(1, count)
        assert 4 // config.groups * (few_rows.shared_bytes(config, format) + 1024) <= 228 << 10
        ring = config.stages * (2 * config.rows * CHUNK + 64 * config.groups * (CHUNK // 2 + CHUNK // BLOCK[format]))
        assert 4 * config.rows * (64 * config.groups + 4) <= ring  # the accumulators do not overwrite the barriers
    # 64 clusters of 2 CTAs run at once, but at most 62 of 4 CTAs.
    assert picked(1, 8192, 64, format) == configs.CudaConfig(8, 2, 2, 8)
    assert picked(64, 8192, 64, format) == configs.CudaConfig(64, 2, 2, 4)
    assert picked(1024, 8192, 64, format) == configs.CudaConfig(64, 4, 1, 6)


def test_which_products_are_of_many_rows() -> None:
    """Those with enough tiles of 256 rows of x to keep the GPU busy."""
    many = [rows for rows in (64, 128, 256, 320, 512, 1024, 4096) if configs.pick_many(rows, 8192)]
    assert many == [320, 512, 1024, 4096]
    assert not configs.pick_many(1024, 2048) and configs.pick_many(2048, 2048)
    assert MANY.tiles(1024, 8192) == 128 and MANY.tiles(257, 272) == 4
    for format in BLOCK:
        assert many_rows.shared_bytes(MANY, format) <= 227 << 10


@pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)
@pytest.mark.parametrize(
    ("format", "fp16"),
    [("mxfp4", 0), *(pytest.param(*both, marks=pytest.mark.slow) for both in (("mxfp4", 1), ("nvfp4", 0)))],
)
def test_many_rows_compile_and_do_not_spill(format: str, fp16: int) -> None:
    dtype = torch.float16 if fp16 else torch.bfloat16
    defines = few_rows.defines(MANY, MANY.cluster, format, dtype)
    source = SOURCE.with_name("many_rows.cu")
    usage = sass.inspect(nvrtc.compiled(source, "sm_90a", defines), "mxfp_matmul_many_rows")
    assert usage.spills == 0 and usage.stack == 0
    assert usage.early_arrivals <= 1  # during reads of the next stage, not of the released one
    assert usage.mma == {"HGMMA": 8} and usage.wgmma_waits == 3
    assert usage.registers * many_rows.THREADS <= 65536
    text = source.read_text(encoding="utf-8")
    assert "ALL_THREADS = 128 * (GROUPS + 1);" in text and 128 * (MANY.groups + 1) == many_rows.THREADS


@pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)
@pytest.mark.parametrize(
    ("rows", "format", "fp16"),
    [
        (1, "mxfp4", 0),
        (64, "nvfp4", 0),
        (200, "nvfp4", 0),  # 256 rows of w per CTA
        *(
            pytest.param(*both, marks=pytest.mark.slow)
            for both in ((16, "nvfp4", 1), (32, "mxfp4", 1), (64, "mxfp4", 1))
        ),
    ],
)
def test_it_compiles_and_does_not_spill(rows: int, format: str, fp16: int) -> None:
    config = picked(rows, 8192, 64, format)
    dtype = torch.float16 if fp16 else torch.bfloat16
    defines = few_rows.defines(config, config.splits, format, dtype)
    usage = sass.inspect(nvrtc.compiled(SOURCE, "sm_90a", defines), "mxfp_matmul_few_rows")
    assert usage.spills == 0 and usage.stack == 0 and usage.early_arrivals == 0
    assert set(usage.early_own_reads) <= {"LDS.128"}  # of the next stage, not of the released one
    assert usage.mma == {"HGMMA": 8} and usage.wgmma_waits == 3  # one per half of a chunk, and the last one
    assert usage.registers * few_rows.threads(config) * (4 // config.groups) <= 65536


def test_host_and_device_agree() -> None:
    text = SOURCE.with_name("chunks.cuh").read_text(encoding="utf-8")
    assert "ROWS = 64 * GROUPS, THREADS = 128 * GROUPS + 32;" in text
    assert few_rows.threads(configs.CudaConfig(8, 2, 1, 3)) == 128 * 2 + 32
    assert re.search(r"CHUNK = (\d+)", text)[1] == str(CHUNK)


def packed(columns: int, depth: int, format: str, first_above: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of MXFP4 are at most 1 (the fast path) before row `first_above`, and larger from there on."""
    data, scales = weights(columns, depth, format)
    if format == "mxfp4":
        scales[:first_above] -= 8
    return mxfp_pack(data, scales, format)


def agrees(x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, format: str, scale: float = 0.3, **options) -> None:
    """Asserts agreement up to the rounding of the result; the error of the accumulation is smaller."""
    y = mxfp_matmul(x, w, scales, format, **one(format, scale), backend="cuda", **options)
    want = mxfp_matmul_reference(x.double(), w, scales, format, **one(format, scale))
    assert y.dtype == x.dtype and y.is_contiguous()
    step = 2.0**-8 if x.dtype == torch.bfloat16 else 2.0**-11
    error = 1e-4 * float(want.abs().max()) if want.numel() else 0
    torch.testing.assert_close(y.double(), want, rtol=1.01 * step, atol=error)


@ON_HOPPER
@EVERY
@DTYPES
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16, 33, 64, 65, 200])
@pytest.mark.parametrize(("columns", "depth"), [(16, 32), (272, 1024), (1040, 1031), (2048, 4096)])
def test_it_is_right(compiler, rows: int, columns: int, depth: int, format: str, dtype: torch.dtype) -> None:
    x = torch.randn(rows, depth, device="cuda", dtype=dtype)
    for first_above in (columns, columns // 3, 0):
        agrees(x, *packed(columns, -(-depth // 32) * 32, format, first_above), format)


@ON_HOPPER
@EVERY
@pytest.mark.parametrize(("splits", "groups", "stages"), list(itertools.product((1, 2, 4, 8), (1, 2, 4), (3, 4))))
@pytest.mark.parametrize("tile_m", [8, 64])
def test_every_configuration(compiler, monkeypatch, tile_m, splits, groups, stages, format) -> None:
    """Also more split-K partitions than chunks, and partial tiles of x and w; repeats agree bit for bit."""
    config = configs.CudaConfig(tile_m, groups, splits, min(stages, 4 if tile_m == 8 or groups > 1 else 3))
    monkeypatch.setattr(configs, "pick_cuda_config", lambda *_: config)
    for rows, columns, depth in ((tile_m + 3, 400, 2304), (2, 176, 640)):
        w, scales = packed(columns, depth, format, columns // 2)
        x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
        agrees(x, w, scales, format)
        ys = [mxfp_matmul(x, w, scales, format, **one(format), backend="cuda") for _ in range(4)]
        assert all(torch.equal(ys[0], y) for y in ys)


@ON_HOPPER
@EVERY
@DTYPES
@pytest.mark.parametrize(
    ("rows", "columns", "depth"), [(1, 16, 32), (255, 272, 1024), (513, 1040, 1031), (2600, 4112, 640)]
)
@pytest.mark.parametrize("cluster", [1, 2])
def test_many_rows_are_right(compiler, monkeypatch, rows, columns, depth, format, dtype, cluster) -> None:
    """Also where most of a tile is out of bounds; several tiles per CTA; repeats agree bit for bit."""
    config = configs.ManyConfig(cluster=cluster)
    monkeypatch.setattr(configs, "pick_many", lambda *_: True)
    monkeypatch.setattr(configs, "ManyConfig", lambda: config)
    forget()
    x = torch.randn(rows, depth, device="cuda", dtype=dtype)
    for first_above in (columns, columns // 3):
        w, scales = packed(columns, -(-depth // 32) * 32, format, first_above)
        agrees(x, w, scales, format)
        ys = [mxfp_matmul(x, w, scales, format, **one(format), backend="cuda") for _ in range(4)]
        assert all(torch.equal(ys[0], y) for y in ys)
    forget()


@ON_HOPPER
@EVERY
@DTYPES
def test_every_code_times_every_scale(compiler, format: str, dtype: torch.dtype) -> None:
    """A row of the identity selects a column of weights: exact where the dtype can represent the weight."""
    codes = torch.arange(256, dtype=torch.uint8, device="cuda")
    data = codes.repeat_interleave(16).repeat(1, 16 if format == "mxfp4" else 8).view(-1, 64)
    count = data.shape[0] * (128 // BLOCK[format])
    scales = codes.repeat(-(-count // 256))[:count].view(data.shape[0], -1)
    for shift in (0, 1, 77):
        w, kept = mxfp_pack(data, scales.roll(shift, 0), format)
        x = torch.eye(128, device="cuda", dtype=dtype)
        dense = dequantized(w, kept, format).t()
        rounded = dense.to(dtype)
        whole = rounded.isfinite().all(0)  # 0 · NaN and 0 · inf make all results of this row of w NaN
        y = mxfp_matmul(x, w, kept, format, **one(format), backend="cuda")
        assert int(whole.sum()) > 16 and torch.equal(y[:, whole], rounded[:, whole])
        assert y[:, ~whole].isnan().all()


@ON_HOPPER
@EVERY
def test_layouts(compiler, format: str) -> None:
    """x that TMA can read, and x that must be copied; leading dimensions; unaligned w and scales."""
    w, scales = packed(320, 512, format, 200)
    x = torch.randn(12, 512, device="cuda", dtype=torch.bfloat16)
    wide = torch.randn(12, 1100, device="cuda", dtype=torch.bfloat16)
    for strided in (x.mT.contiguous().mT, wide[:, 8:520], wide[:, 3:515], wide[:, ::2][:, :512], x[:1].expand(12, 512)):
        agrees(strided, w, scales, format)
    agrees(x.view(2, 3, 2, 512).transpose(0, 2), w, scales, format)
    off = [torch.cat([t.new_zeros(4), t.flatten()])[4:].view(t.shape) for t in (w, scales)]
    agrees(x, *off, format)


@ON_HOPPER
@EVERY
@pytest.mark.parametrize(("rows", "many"), [(30, False), (300, True)])
def test_what_is_not_finite_stays_in_its_row(compiler, monkeypatch, rows: int, many: bool, format: str) -> None:
    """A NaN in a row of x, and one among the scales of a row of w."""
    monkeypatch.setattr(configs, "pick_many", lambda *_: many)
    forget()
    w, scales = packed(320, 512, format, 200)
    x = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16)
    want = mxfp_matmul(x, w, scales, format, **one(format), backend="cuda")
    x[17, 200] = torch.nan
    scales[2, 130, 1] = 255
    y = mxfp_matmul(x, w, scales, format, **one(format), backend="cuda")
    of_x, of_w = (torch.arange(size, device="cuda") != at for size, at in ((rows, 17), (320, 130)))
    assert torch.equal(y[of_x][:, of_w], want[of_x][:, of_w]) and y[17].isnan().all() and y[:, 130].isnan().all()
    assert mxfp_matmul(x[:0], w, scales, format, **one(format), backend="cuda").shape == (0, 320)
    forget()
