"""The version for Hopper (sm90/): which problems it takes, that it compiles, and on a GPU that it is right."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

from harness.compiling import nvrtc, sass

from . import configs
from .op import fp8_matmul
from .sm90 import cuda_driver, products
from .test_fp8_matmul import E4M3, E5M2, SCALINGS, agrees, operands

HOPPER = (9, 0)
SOURCE = Path(products.__file__).with_name("products.cu")


@pytest.fixture
def compiler() -> None:
    if reason := cuda_driver.no_compiler():
        pytest.skip(reason)


def test_what_it_takes() -> None:
    """No GPU is asked: capability and dtypes alone decide, and last whether there is a compiler."""
    one, small = torch.tensor(1.0), torch.tensor(127, dtype=torch.uint8)
    assert products.unsupported_reason(one, one, HOPPER) == cuda_driver.no_compiler()
    assert "compute capability 9.0" in str(products.unsupported_reason(one, one, (8, 9)))
    assert "scales in float32" in str(products.unsupported_reason(one, small, HOPPER))


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU it cannot run")
def test_where_it_cannot_run_is_an_error() -> None:
    with pytest.raises(RuntimeError, match='backend="cuda" cannot run here: it needs a GPU of compute capability 9.0'):
        fp8_matmul(*operands(8, 64, 32, "row"), backend="cuda")


def defines(scaling: int, cluster: int, **changes: int) -> tuple[str, ...]:
    config = configs.pick_cuda_config(4096, 4096, 4096, scaling)
    chosen = {
        **dict(SCALING=scaling, A_E4M3=1, B_E4M3=1, OUT32=0, FP16=0, BIAS=0),
        **dict(STAGES=config.stages, RASTER=config.raster, CLUSTER=cluster),
    }
    return tuple(f"{name}={value}" for name, value in (chosen | changes).items())


@pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)
@pytest.mark.parametrize(
    ("scaling", "cluster"),
    [
        (0, 2),
        (2, 1),
        (3, 2),
        *(pytest.param(*both, marks=pytest.mark.slow) for both in ((0, 1), (1, 1), (2, 2), (3, 1))),
    ],
)
def test_it_compiles_and_does_not_spill(scaling: int, cluster: int) -> None:
    other = dict(A_E4M3=0, OUT32=1, BIAS=3) if cluster == 1 else dict(B_E4M3=0, BIAS=1)
    usage = sass.inspect(nvrtc.compiled(SOURCE, "sm_90a", defines(scaling, cluster, **other)), "fp8_matmul_products")
    assert usage.spills == 0 and usage.stack == 0
    assert usage.mma == {"QGMMA": 4 if scaling else 8}  # of tiles of 256 columns four, and four of those of 128


def test_host_and_device_agree_on_the_tile() -> None:
    text = SOURCE.read_text(encoding="utf-8")
    found = re.search(
        r"BLOCK_M = (\d+), BLOCK_N = SCALING \? (\d+) : (\d+), BLOCK_K = (\d+);\nconstexpr int CONSUMERS = (\d+)", text
    )
    assert found is not None
    block_m, narrow, wide, block_k, consumers = map(int, found.groups())
    assert (block_m, block_k) == (products.BLOCK_M, products.BLOCK_K)
    assert [products.block_n(scaling) for scaling in range(4)] == [wide, narrow, narrow, narrow]
    assert 128 * (consumers + 1) == products.THREADS


@pytest.mark.parametrize("scaling", [0, 1, 2, 3])
def test_the_ring_fits_into_shared_memory(scaling: int) -> None:
    for rows in (1, 128, 129, 8192):
        config = configs.pick_cuda_config(rows, 8192, 8192, scaling)
        assert products.shared_bytes(scaling, config) <= 227 << 10
        assert config.cluster in (1, 2)


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [(128, 128, 128), (256, 512, 256), (1, 16, 16), (37, 272, 144), (129, 1040, 400), (300, 2064, 528), (5, 8192, 48)],
)
@SCALINGS
def test_it_is_right(compiler, monkeypatch, scaling: str, m: int, k: int, n: int, cluster: int) -> None:
    pick = configs.pick_cuda_config
    monkeypatch.setattr(configs, "pick_cuda_config", lambda *sizes: configs.CudaConfig(pick(*sizes).stages, 4, cluster))
    a, b, *scales = operands(m, k, n, scaling)
    bias = torch.randn(n, device="cuda")
    for first, second in itertools.product((E4M3, E5M2), repeat=2):
        x, w = a.float().to(first), b.float().to(second)
        y = fp8_matmul(x, w, *scales, bias, torch.float32, backend="cuda")
        agrees(y, x, w, *scales, bias)


@pytest.fixture(autouse=True)
def _forget_plans():
    """Plans are kept by shapes and options, not by the configuration that a test puts in place."""
    from .launch import forget

    forget()
    yield
    forget()


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
@SCALINGS
def test_more_tiles_than_sms(compiler, scaling: str) -> None:
    """Every CTA goes through several rounds; repeats agree bit for bit."""
    a, b, *scales = operands(3001, 1168, 2064, scaling)
    ours = fp8_matmul(a, b, *scales, out_dtype=torch.float32, backend="cuda")
    agrees(ours, a, b, *scales)
    for _ in range(5):
        assert torch.equal(ours, fp8_matmul(a, b, *scales, out_dtype=torch.float32, backend="cuda"))


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_fast_accum(compiler, scaling: str) -> None:
    for m, k, n in ((300, 2064, 528), (129, 4096, 400), (64, 128, 128)):
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
