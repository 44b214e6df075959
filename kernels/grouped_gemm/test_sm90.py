"""The version for Hopper (sm90/): which problems it takes, that it compiles, and on a GPU that it is right."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path

import pytest
import torch

from harness.compiling import nvrtc, sass

from . import configs
from .launch import forget
from .op import grouped_gemm
from .reference import grouped_gemm_reference
from .sm90 import cuda_driver, products

HOPPER = (9, 0)
SOURCE = Path(products.__file__).with_name("products.cu")
SPLITS = {
    "ragged": [0, 200, 201, 264, 700, 828, 1000],
    "with rows behind": [128, 256, 300, 300, 900],
    "at most half a tile": [64, 100, 600, 664, 1000],
    "all in one": [0, 0, 1000, 1000],
    "none": [0, 0, 0],
    "whole tiles": [128, 512, 640],
}


@pytest.fixture
def compiler() -> None:
    if reason := cuda_driver.no_compiler():
        pytest.skip(reason)


def operands(ends: list[int], n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype)

    return normal(1000, k), normal(len(ends), n, k) * k**-0.5, torch.tensor(ends, device="cuda", dtype=torch.int32)


def gradients(x, weights, offsets, dy, bias=None, backend="cuda") -> tuple[torch.Tensor, ...]:
    """y and the gradients of x, weights and bias; of the reference without a backend."""
    leaves = [t.detach().requires_grad_() for t in (x, weights, bias) if t is not None]
    options = {} if backend is None else {"backend": backend}
    op = grouped_gemm_reference if backend is None else grouped_gemm
    y = op(*leaves[:2], offsets, bias=None if bias is None else leaves[2], **options)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def agrees(ours: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    for a, b in zip(ours, want, strict=True):
        scale = b.abs().max().item() + 1e-6
        torch.testing.assert_close(a / scale, b / scale, rtol=0, atol=1e-2)


def test_what_it_takes() -> None:
    """No GPU is asked: capability and layout alone decide, and last whether there is a compiler."""
    x, weights = torch.randn(512, 64).half(), torch.randn(3, 72, 64).half()
    missing = cuda_driver.no_compiler()

    def rows(a: torch.Tensor, b: torch.Tensor, block_m: int = 128, capability: tuple[int, int] = HOPPER) -> str | None:
        return products.rows_unsupported_reason(a, b, block_m, capability)

    assert rows(x, weights) == missing
    assert rows(x, weights.mT.contiguous().mT) == missing
    assert "compute capability 9.0" in str(rows(x, weights, capability=(8, 0)))
    assert "groups of more than 64 rows" in str(rows(x, weights, block_m=64))
    assert "float16 and bfloat16" in str(rows(x.float(), weights.float()))
    assert "no empty tensors" in str(rows(x[:0], weights))
    assert "rows that are contiguous" in str(rows(x.mT.contiguous().mT, weights))
    assert "on 16-byte boundaries" in str(rows(torch.randn(512, 72).half()[:, 1:65], weights))
    for a, b in ((x[:, :60], weights[:, :, :60]), (x[:1].expand(512, 64), weights), (x, weights[:, :70])):
        assert "of whole 16 bytes" in str(rows(a, b))


def test_what_the_gradient_of_weights_takes() -> None:
    x, dy, weights = torch.randn(512, 64).half(), torch.randn(512, 72).half(), torch.randn(3, 72, 64).half()
    missing = cuda_driver.no_compiler()
    assert products.weights_unsupported_reason(dy, x, weights, HOPPER) == missing
    assert products.weights_unsupported_reason(dy, x, weights.mT.contiguous().mT, HOPPER) == missing
    expanded = torch.ones(1).half().expand(512, 72)
    assert "contiguous" in str(products.weights_unsupported_reason(expanded, x, weights, HOPPER))


def test_backend_is_checked() -> None:
    x, weights, offsets = torch.randn(4, 8), torch.randn(1, 8, 8), torch.tensor([4])
    with pytest.raises(ValueError, match="backend must be one of auto, triton, cuda, got 'ptx'"):
        grouped_gemm(x, weights, offsets, backend="ptx")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match='backend="cuda" cannot run here'):
            grouped_gemm(x, weights, offsets, backend="cuda")


# Of the weights' gradient: the ring in steps of 64 or 32 terms, with and without clusters, a lag, and TMA stores.
WEIGHTS = [
    configs.CudaConfig(4, raster=8),
    configs.CudaConfig(4, raster=2, lag=1),
    configs.CudaConfig(4, raster=8, lag=2, staged=True),
    configs.CudaConfig(3, raster=3, cluster=(2, 1), staged=True),
    configs.CudaConfig(4, raster=8, cluster=(1, 2)),
    configs.CudaConfig(8, raster=8, block_k=32, lag=3, staged=True),
    configs.CudaConfig(8, raster=8, block_k=32, cluster=(2, 1), lag=3, staged=True),
    configs.CudaConfig(8, raster=8, block_k=32, cluster=(1, 2), lag=3, staged=True),
    configs.CudaConfig(9, raster=8, block_k=32, cluster=(2, 1), lag=8),
]
ROWS = [configs.CudaConfig(4, raster=8), configs.CudaConfig(4, raster=8, cluster=(1, 2))]


def name_of(config: configs.CudaConfig) -> str:
    below, beside = config.cluster
    return f"{below}x{beside}-{config.stages}of{config.block_k}-lag{config.lag}-{'tma' if config.staged else 'direct'}"


def compiled(weights: int, config: configs.CudaConfig, transposed: int = 1, fp16: int = 0) -> sass.Usage:
    defines = products.defines(config, weights=bool(weights), transposed=bool(transposed), fp16=bool(fp16))
    return sass.inspect(nvrtc.compiled(SOURCE, "sm_90a", defines), "grouped_gemm_products")


def is_as_written(usage: sass.Usage, config: configs.CudaConfig) -> None:
    assert usage.spills == 0 and usage.stack == 0 and usage.early_arrivals == 0
    # For a tile of 256 columns and for one of 128: the wgmmas of a step, and ptxas has let these run on, for there is
    # one wait a step, and the last.
    assert usage.mma == {"HGMMA": 2 * config.block_k // 16}
    assert usage.wgmma_waits == 4


@pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)
@pytest.mark.parametrize("fp16", [0, 1])
@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("config", ROWS, ids=name_of)
def test_rows_compile_and_do_not_spill(config: configs.CudaConfig, transposed: int, fp16: int) -> None:
    is_as_written(compiled(0, config, transposed, fp16), config)


@pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)
@pytest.mark.parametrize("fp16", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("config", WEIGHTS, ids=name_of)
def test_weights_compile_and_do_not_spill(config: configs.CudaConfig, fp16: int) -> None:
    usage = compiled(1, config, fp16=fp16)
    is_as_written(usage, config)
    assert usage.stores == ({"TMA": products.BLOCK_N // products.BOX_COLUMNS} if config.staged else {"STG.128": 16})


def test_host_and_device_agree() -> None:
    text = SOURCE.read_text(encoding="utf-8")
    blocks = re.search(r"BLOCK_M = (\d+), BLOCK_N = (\d+);\nconstexpr int CONSUMERS = (\d+)", text)
    boxes = re.search(
        r"BOX_BYTES = (\d+) \* (\d+), BOXES = (\d+);", SOURCE.with_name("epilogue.cuh").read_text("utf-8")
    )
    assert blocks is not None and boxes is not None
    *tile, consumers = map(int, blocks.groups())
    assert tile == [products.BLOCK_M, products.BLOCK_N]
    assert 128 * (consumers + 1) == products.THREADS and 4 * consumers == products.WARPS
    assert list(map(int, boxes.groups())) == [products.BOX_ROWS, 2 * products.BOX_COLUMNS, products.BOXES]


def test_the_ring_fits_into_shared_memory() -> None:
    picked = [configs.pick_cuda_rows_config(64, 32768, 2048, 1408), configs.pick_cuda_weights_config(8, 8192, 512, 512)]
    for config in (*picked, *ROWS, *WEIGHTS):
        assert products.shared_bytes(config) <= 227 << 10
        assert config.lag < config.stages


def test_which_tiles_share_what_they_read() -> None:
    """Those of which fewest lie beyond the end: 11 tiles below each other are no pairs, nor are 5 beside each other."""

    def cluster(height: int, width: int) -> tuple[int, int]:
        config = configs.pick_cuda_weights_config(64, 32768, height, width)
        assert dataclasses.replace(config, cluster=(2, 1)) in WEIGHTS  # what is picked is compiled and tested
        return config.cluster

    assert cluster(4096, 4096) == cluster(2048, 1408) == (2, 1)
    assert cluster(1408, 2048) == cluster(128, 512) == (1, 2)
    assert cluster(1408, 1280) == cluster(128, 256) == cluster(8, 8) == (1, 1)


def put_in_place(
    monkeypatch, weights: configs.CudaConfig | None = None, rows: configs.CudaConfig | None = None
) -> None:
    """These configurations instead of the picked ones."""
    for pick, config in (("pick_cuda_weights_config", weights), ("pick_cuda_rows_config", rows)):
        if config is not None:
            monkeypatch.setattr(configs, pick, lambda *_, config=config: config)


@pytest.fixture(autouse=True)
def _forget_plans():
    """Plans are kept by shapes and options, not by the configuration that a test puts in place."""
    forget()
    yield
    forget()


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(256, 64), (512, 128), (264, 136), (104, 72), (8, 8), (392, 1000), (1408, 200)])
@pytest.mark.parametrize("split", SPLITS)
def test_it_is_right(compiler, split: str, n: int, k: int, dtype: torch.dtype) -> None:
    x, weights, offsets = operands(SPLITS[split], n, k, dtype)
    bias, dy = torch.randn(weights.shape[:2], device="cuda", dtype=dtype), torch.randn(1000, n, device="cuda").to(dtype)
    agrees(gradients(x, weights, offsets, dy, bias), gradients(x, weights, offsets, dy, bias, None))


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("split", SPLITS)
def test_transposed_weights(compiler, split: str) -> None:
    x, weights, offsets = operands(SPLITS[split], 264, 200)
    stored, dy = weights.mT.contiguous().mT, torch.randn(1000, 264, device="cuda").bfloat16()
    ours = gradients(x, stored, offsets, dy)
    agrees(ours, gradients(x, weights, offsets, dy, None, None))
    assert ours[2].stride() == stored.stride()


@pytest.mark.gpu(min_capability=(9, 0))
def test_rows_at_a_stride(compiler) -> None:
    x, weights, offsets = operands(SPLITS["ragged"], 264, 200)
    wide = torch.randn(1000, 256, device="cuda").bfloat16()
    wide[:, 24:224] = x
    dy = torch.randn(1000, 264, device="cuda").bfloat16()
    agrees(gradients(wide[:, 24:224], weights, offsets, dy), gradients(x, weights, offsets, dy, None, None))


@pytest.mark.gpu(min_capability=(9, 0))
def test_what_is_not_finite_stays_in_its_group(compiler) -> None:
    x, weights, offsets = operands([200, 460, 700], 264, 200)
    dy = torch.randn(1000, 264, device="cuda").bfloat16()
    want = gradients(x, weights, offsets, dy)
    x[200:460], dy[700:] = torch.nan, torch.inf
    y, dx, dweights = gradients(x, weights, offsets, dy)
    for rows in (slice(0, 200), slice(460, 1000)):
        assert torch.equal(y[rows], want[0][rows]) and torch.equal(dx[rows], want[1][rows])
    assert torch.equal(dweights[::2], want[2][::2]) and dweights[1].isnan().all()
    assert not y[700:].any() and not dx[700:].any()


def gradient_of_weights(sizes: list[int], behind: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
    """What auto computes of the weights' gradient alone, and what it is in fp64, of groups of these sizes."""
    ends = list(itertools.accumulate(sizes))
    x, dy = (torch.randn(ends[-1] + behind, size, device="cuda").bfloat16() for size in (k, n))
    weights = torch.zeros(len(sizes), n, k, device="cuda", dtype=torch.bfloat16).requires_grad_()
    y = grouped_gemm(x, weights, torch.tensor(ends, device="cuda"))  # auto, for a forward of few rows is not in CUDA
    starts = [0, *ends[:-1]]
    want = [dy[a:b].double().mT @ x[a:b].double() for a, b in zip(starts, ends, strict=True)]
    several = [torch.autograd.grad(y, weights, dy, retain_graph=True)[0] for _ in range(4)]
    assert all(torch.equal(several[0], again) for again in several[1:])
    return several[0].double(), torch.stack(want)


SIZES = {
    "odd": [200, 1, 63, 436, 128, 172],
    "of 32 and one more": [32, 33, 64, 65, 96, 97, 31, 1, 127],
    "empty ones": [0, 300, 0, 0, 500, 0],
    "of one row": [1] * 9,
    "none": [0, 0, 0],
    "long and short": [1500, 3, 0, 700, 64, 65, 1, 2000, 129, 300],
}


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize(("n", "k"), [(128, 256), (512, 512), (264, 136), (104, 776), (8, 8), (392, 1000), (1160, 520)])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("config", WEIGHTS, ids=name_of)
def test_every_gradient_of_weights(
    compiler, monkeypatch, config: configs.CudaConfig, sizes: str, n: int, k: int
) -> None:
    """Also where a cluster's second tile is beyond the end, and repeats agree bit for bit."""
    put_in_place(monkeypatch, weights=config)
    ours, want = gradient_of_weights(SIZES[sizes], 77, n, k)
    torch.testing.assert_close(ours, want, rtol=0, atol=5e-3 * want.abs().max().item())


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("config", WEIGHTS, ids=name_of)
def test_many_rounds_of_the_gradient_of_weights(compiler, monkeypatch, config: configs.CudaConfig) -> None:
    """More tiles than CTAs by far, most of them of less than a lag's steps."""
    put_in_place(monkeypatch, weights=config)
    ours, want = gradient_of_weights([group * 37 % 150 for group in range(40)], 5, 1160, 2056)
    torch.testing.assert_close(ours, want, rtol=0, atol=5e-3 * want.abs().max().item())


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("config", WEIGHTS, ids=name_of)
@pytest.mark.parametrize("sizes", SIZES)
def test_every_gradient_of_transposed_weights(compiler, monkeypatch, config: configs.CudaConfig, sizes: str) -> None:
    put_in_place(monkeypatch, weights=config)
    ends = list(itertools.accumulate(SIZES[sizes]))
    x, dy = (torch.randn(ends[-1] + 9, size, device="cuda").half() for size in (392, 264))
    stored = torch.randn(len(ends), 392, 264, device="cuda").half().mT
    offsets = torch.tensor(ends, device="cuda")
    ours = gradients(x, stored, offsets, dy)[2]
    assert ours.stride() == stored.stride()
    agrees((ours,), gradients(x, stored, offsets, dy, None, None)[2:])


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("config", WEIGHTS, ids=name_of)
def test_what_is_not_finite_stays_out_of_other_gradients(compiler, monkeypatch, config: configs.CudaConfig) -> None:
    put_in_place(monkeypatch, weights=config)
    x, weights, offsets = operands([200, 460, 700], 264, 200)
    dy = torch.randn(1000, 264, device="cuda").bfloat16()
    want = gradients(x, weights, offsets, dy)[2]
    x[200:460], dy[700:] = torch.nan, torch.inf
    ours = gradients(x, weights, offsets, dy)[2]
    assert torch.equal(ours[::2], want[::2]) and ours[1].isnan().all()


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize(("n", "k"), [(512, 256), (264, 136), (1160, 520)])
@pytest.mark.parametrize("split", SPLITS)
def test_rows_in_clusters(compiler, monkeypatch, split: str, n: int, k: int) -> None:
    put_in_place(monkeypatch, rows=ROWS[1])
    x, weights, offsets = operands(SPLITS[split], n, k)
    bias, dy = torch.randn(weights.shape[:2], device="cuda").bfloat16(), torch.randn(1000, n, device="cuda").bfloat16()
    agrees(gradients(x, weights, offsets, dy, bias), gradients(x, weights, offsets, dy, bias, None))


@pytest.mark.gpu(min_capability=(9, 0))
def test_more_tiles_than_sms(compiler) -> None:
    """Every CTA goes through several rounds, of sums of different lengths in the weights' gradient."""
    sizes = [1500, 3, 0, 700, 64, 65, 1, 2000, 129, 300]
    ends = list(itertools.accumulate(sizes))
    x = torch.randn(ends[-1] + 77, 512, device="cuda").bfloat16()
    weights = (torch.randn(len(sizes), 1160, 512, device="cuda") * 512**-0.5).bfloat16()
    offsets, dy = torch.tensor(ends, device="cuda"), torch.randn(x.shape[0], 1160, device="cuda").bfloat16()
    ours = gradients(x, weights, offsets, dy)
    agrees(ours, gradients(x, weights, offsets, dy, None, None))
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(ours, gradients(x, weights, offsets, dy), strict=True))
