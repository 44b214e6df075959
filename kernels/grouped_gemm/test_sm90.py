"""The version for Hopper (sm90/): which problems it takes, that it compiles, and on a GPU that it is right."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

from harness.compiling import nvrtc, sass

from . import configs
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


@pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)
@pytest.mark.parametrize("fp16", [0, 1])
@pytest.mark.parametrize(("weights", "transposed"), [(0, 0), (0, 1), (1, 1)])
def test_it_compiles_and_does_not_spill(weights: int, transposed: int, fp16: int) -> None:
    defines = (f"WEIGHTS={weights}", f"FP16={fp16}", "STAGES=4", "RASTER=8", f"B_TRANSPOSED={transposed}")
    usage = sass.inspect(nvrtc.compiled(SOURCE, "sm_90a", defines), "grouped_gemm_products")
    assert usage.spills == 0 and usage.stack == 0
    assert usage.mma == {"HGMMA": 8}  # four for a tile of 256 columns, and four for one of 128


def test_host_and_device_agree_on_the_tile() -> None:
    text = SOURCE.read_text(encoding="utf-8")
    blocks = re.search(r"BLOCK_M = (\d+), BLOCK_N = (\d+), BLOCK_K = (\d+);\nconstexpr int CONSUMERS = (\d+)", text)
    assert blocks is not None
    *tile, consumers = map(int, blocks.groups())
    assert tile == [products.BLOCK_M, products.BLOCK_N, products.BLOCK_K]
    assert 128 * (consumers + 1) == products.THREADS


def test_the_ring_fits_into_shared_memory() -> None:
    for pick in (configs.pick_cuda_rows_config, configs.pick_cuda_weights_config):
        assert products.shared_bytes(pick(64, 32768, 2048, 1408)) <= 227 << 10


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
