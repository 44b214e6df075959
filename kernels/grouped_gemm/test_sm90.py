"""Tests of the version for Hopper (sm90/): supported problems, compilation, and on a GPU the results."""

from __future__ import annotations

import dataclasses
import itertools
import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from harness.commands import stress
from harness.compiling import nvrtc, sass
from harness.options import Selection

from . import bench, configs, plans
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
    "a tile each": [128, 256, 384, 1000],
    "an odd number of tiles": [1, 130],
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
    """y and the gradients of x, weights and bias. With backend=None those of the reference."""
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
    """Needs no GPU: the result depends only on capability and layout, and then on the presence of a compiler."""
    x, weights = torch.randn(512, 64).half(), torch.randn(3, 72, 64).half()
    missing = cuda_driver.no_compiler()

    def rows(a: torch.Tensor, b: torch.Tensor, block_m: int = 128, capability: tuple[int, int] = HOPPER) -> str | None:
        return products.rows_unsupported_reason(a, b, block_m, capability)

    assert rows(x, weights) == missing
    assert rows(x, weights.mT.contiguous().mT) == missing
    assert "compute capability 9.0" in str(rows(x, weights, capability=(8, 0)))
    assert "more than 64 rows per group" in str(rows(x, weights, block_m=64))
    assert "float16 and bfloat16" in str(rows(x.float(), weights.float()))
    assert "empty tensors" in str(rows(x[:0], weights))
    assert "contiguous rows" in str(rows(x.mT.contiguous().mT, weights))
    assert "on 16-byte boundaries" in str(rows(torch.randn(512, 72).half()[:, 1:65], weights))
    overlapping = torch.randn(575).half().unfold(0, 64, 1), torch.randn(3, 136).half().unfold(1, 64, 1)[:, :72]
    for a, b in (
        (x[:, :60], weights[:, :, :60]),
        (x[:1].expand(512, 64), weights),
        (x, weights[:, :70]),
        (overlapping[0], weights),
        (x, overlapping[1]),
    ):
        assert "multiples of 16 bytes" in str(rows(a, b))


def test_what_the_gradient_of_weights_takes() -> None:
    x, dy, weights = torch.randn(512, 64).half(), torch.randn(512, 72).half(), torch.randn(3, 72, 64).half()
    missing = cuda_driver.no_compiler()
    assert products.weights_unsupported_reason(dy, x, weights, HOPPER) == missing
    assert products.weights_unsupported_reason(dy, x, weights.mT.contiguous().mT, HOPPER) == missing
    expanded = torch.ones(1).half().expand(512, 72)
    assert "contiguous" in str(products.weights_unsupported_reason(expanded, x, weights, HOPPER))
    overlapping = torch.randn(575).half().unfold(0, 64, 1)
    assert "contiguous" in str(products.weights_unsupported_reason(dy, overlapping, weights, HOPPER))


def test_backend_is_checked() -> None:
    x, weights, offsets = torch.randn(4, 8), torch.randn(1, 8, 8), torch.tensor([4])
    with pytest.raises(ValueError, match="backend must be one of auto, triton, cuda, got 'ptx'"):
        grouped_gemm(x, weights, offsets, backend="ptx")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match='backend="cuda" cannot run here'):
            grouped_gemm(x, weights, offsets, backend="cuda")


SHARED = [*(configs.CudaConfig(4, 8, cluster) for cluster in (1, 2)), configs.CudaConfig(3, raster=3, cluster=2)]
TURNS = [
    configs.CudaConfig(configs.cuda_stages(width), 4, cluster, width)
    for width in (192, 176, 160, 128)
    for cluster in (1, 2)
]
CONFIGS = [*SHARED, *TURNS]


def name_of(config: configs.CudaConfig) -> str:
    return f"{config.stages}steps-raster{config.raster}-cluster{config.cluster}-{config.block_n}"


@pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)
@pytest.mark.parametrize("fp16", [0, 1])
@pytest.mark.parametrize(("weights", "transposed"), [(0, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_it_compiles_and_does_not_spill(config: configs.CudaConfig, weights: int, transposed: int, fp16: int) -> None:
    defines = products.defines(config, weights=bool(weights), transposed=bool(transposed), fp16=bool(fp16))
    usage = sass.inspect(nvrtc.compiled(SOURCE, "sm_90a", defines), "grouped_gemm_products")
    assert usage.spills == 0 and usage.stack == 0
    assert usage.early_arrivals == 0 and usage.early_own_reads == {}
    # Main loops: for tiles of all columns and of 128 and, with ping-pong, of 64 rows. Each has the wgmmas of a K-block.
    # There is one wait per K-block, and a last one: ptxas has not serialised the wgmmas.
    widths = 1 if config.block_n == 128 else 2
    assert usage.mma == {"HGMMA": widths * (12 if config.turns else 4)}
    assert usage.wgmma_waits == widths * (4 if config.turns else 2)
    assert usage.stores == {"STG.128": -(-config.block_n // 32) * (4 if config.turns else 2)}


def test_host_and_device_agree_on_the_tile() -> None:
    text = SOURCE.read_text(encoding="utf-8")
    blocks = re.search(r"BLOCK_M = (\d+), BLOCK_K = (\d+);\nconstexpr int CONSUMERS = (\d+)", text)
    assert blocks is not None
    *tile, consumers = map(int, blocks.groups())
    assert tile == [products.BLOCK_M, products.BLOCK_K]
    assert 128 * (consumers + 1) == products.THREADS


def test_the_ring_fits_into_shared_memory() -> None:
    for config in CONFIGS:
        assert config.stages >= 3 and products.shared_bytes(config) <= 227 << 10


@pytest.mark.parametrize(("height", "cluster"), [(4096, 2), (2048, 2), (1408, 1), (128, 1), (8, 1), (25 * 128, 2)])
def test_which_tiles_of_a_gradient_share_what_they_read(height: int, cluster: int) -> None:
    """Clusters of two, unless padding an odd number of vertically adjacent tiles costs more than they save."""
    config = configs.pick_cuda_weights_config(8, 800, height, 256)
    assert config.cluster == cluster and config in SHARED


def test_which_gradients_are_computed_in_turns() -> None:
    """Ping-pong is used for a large K and columns that tiles of 192 pad little."""
    pick = configs.pick_cuda_weights_config
    assert pick(8, 8192, 4096, 4096) == configs.CudaConfig(5, 4, 2, 192) in TURNS
    assert pick(8, 8192, 4096, 384).turns and pick(1, 1024, 2048, 2304).turns
    for other in (pick(8, 8191, 4096, 4096), pick(8, 8192, 4096, 1408), pick(8, 8192, 1408, 4096)):
        assert not other.turns and other in SHARED


@pytest.mark.parametrize(
    ("cols", "depth", "width"),
    [(4096, 4096, 256), (1408, 3080, 256), (1408, 2048, 176), (2048, 1408, 160), (128, 512, 128), (8, 8, 128)],
)
def test_which_tiles_rows_have(cols: int, depth: int, width: int) -> None:
    """Ping-pong for a small K, with a width that pads few columns; always clusters of two."""
    config = configs.pick_cuda_rows_config(cols, depth)
    assert config == configs.CudaConfig(configs.cuda_stages(width), 8 if width == 256 else 2, 2, width)
    assert dataclasses.replace(config, raster=4) in TURNS if config.turns else config in SHARED


def test_the_gradient_of_transposed_weights_is_that_of_their_transposes(monkeypatch) -> None:
    """The configuration depends on the number of rows that the matrices have in memory."""
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(products, "weights_unsupported_reason", lambda *_: None)
    monkeypatch.setattr(products, "weights_launch", lambda *_: None)
    monkeypatch.setattr(configs, "pick_cuda_weights_config", lambda *sizes: asked.append(sizes))
    dy, x, weights = torch.empty(512, 72).half(), torch.empty(512, 64).half(), torch.empty(3, 72, 64).half()
    for stored in (weights, weights.mT.contiguous().mT):
        plans.bwd_plan(dy, x, stored, False, (False, True, False), "cuda")
    assert asked == [(3, 512, 72, 64), (3, 512, 64, 72)]


@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_stress_repeats_pairs_of_one_group_and_of_two(monkeypatch, mode: str) -> None:
    """The stress test starts twelve processes, which share the memory of one H200."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Namespace(total_memory=141 * 10**9))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: HOPPER)
    selection = Selection(bench.SPEC, bench.CASES, (mode,), ("auto",))
    chosen = stress.groups([selection], Namespace(processes=12, case=None), torch.device("cpu"))
    kinds = set()
    for case in (case for _, case, _, _ in chosen if "split" in case.params and bench._in_cuda(case)):
        tiles = [-(-size // products.BLOCK_M) for size in bench.group_sizes(case)]
        groups = [group for group, count in enumerate(tiles) for _ in range(count)]
        kinds |= {len(set(groups[i : i + 2])) for i in range(0, len(groups), 2)}
    assert kinds == {1, 2}


def put_in_place(monkeypatch, pick: str, config: configs.CudaConfig) -> list[configs.CudaConfig]:
    """Replaces the picked configuration. The returned list gets an entry for each plan that used the replacement."""
    taken: list[configs.CudaConfig] = []

    def picked(*_) -> configs.CudaConfig:
        taken.append(config)
        return config

    monkeypatch.setattr(configs, pick, picked)
    return taken


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
def test_rows_that_overlap(compiler) -> None:
    """Rows one element apart. TMA cannot read them, so that "auto" takes Triton."""
    _, weights, offsets = operands(SPLITS["ragged"], 264, 200)
    x, dy = torch.randn(1199, device="cuda").bfloat16().unfold(0, 200, 1), torch.randn(1000, 264, device="cuda")
    given = x, weights, offsets, dy.bfloat16()
    agrees(gradients(*given, backend="auto"), gradients(*given, None, None))


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
    """The weights' gradient alone by "auto", and in fp64, for groups of these sizes."""
    ends = list(itertools.accumulate(sizes))
    x, dy = (torch.randn(ends[-1] + behind, size, device="cuda").bfloat16() for size in (k, n))
    weights = torch.zeros(len(sizes), n, k, device="cuda", dtype=torch.bfloat16).requires_grad_()
    y = grouped_gemm(x, weights, torch.tensor(ends, device="cuda"))  # "auto", since CUDA C++ has no forward of few rows
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
@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_every_gradient_of_weights(
    compiler, monkeypatch, config: configs.CudaConfig, sizes: str, n: int, k: int
) -> None:
    """Also if a cluster's second tile is out of bounds. Repeated runs agree bit for bit."""
    taken = put_in_place(monkeypatch, "pick_cuda_weights_config", config)
    ours, want = gradient_of_weights(SIZES[sizes], 77, n, k)
    assert taken == [config]
    torch.testing.assert_close(ours, want, rtol=0, atol=5e-3 * want.abs().max().item())


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_many_rounds_of_the_gradient_of_weights(compiler, monkeypatch, config: configs.CudaConfig) -> None:
    """There are many more tiles than CTAs, most of them with fewer K-blocks than pipeline stages."""
    taken = put_in_place(monkeypatch, "pick_cuda_weights_config", config)
    ours, want = gradient_of_weights([group * 37 % 150 for group in range(40)], 5, 1160, 2056)
    assert taken == [config]
    torch.testing.assert_close(ours, want, rtol=0, atol=5e-3 * want.abs().max().item())


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
@pytest.mark.parametrize("sizes", SIZES)
def test_every_gradient_of_transposed_weights(compiler, monkeypatch, config: configs.CudaConfig, sizes: str) -> None:
    taken = put_in_place(monkeypatch, "pick_cuda_weights_config", config)
    ends = list(itertools.accumulate(SIZES[sizes]))
    x, dy = (torch.randn(ends[-1] + 9, size, device="cuda").half() for size in (392, 264))
    stored = torch.randn(len(ends), 392, 264, device="cuda").half().mT
    offsets = torch.tensor(ends, device="cuda")
    ours = gradients(x, stored, offsets, dy, backend="auto")[2]  # since CUDA C++ has no forward of few rows
    assert taken == [config] and ours.stride() == stored.stride()
    agrees((ours,), gradients(x, stored, offsets, dy, None, None)[2:])


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_what_is_not_finite_stays_out_of_other_gradients(compiler, monkeypatch, config: configs.CudaConfig) -> None:
    taken = put_in_place(monkeypatch, "pick_cuda_weights_config", config)
    x, weights, offsets = operands([200, 460, 700], 264, 200)
    dy = torch.randn(1000, 264, device="cuda").bfloat16()
    want = gradients(x, weights, offsets, dy)[2]
    x[200:460], dy[700:] = torch.nan, torch.inf
    ours = gradients(x, weights, offsets, dy)[2]
    assert taken == [config]
    assert torch.equal(ours[::2], want[::2]) and ours[1].isnan().all()


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize(("n", "k"), [(512, 256), (264, 136), (1160, 520)])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_rows(compiler, monkeypatch, config: configs.CudaConfig, split: str, n: int, k: int) -> None:
    """Also if a cluster's second tile is out of bounds."""
    taken = put_in_place(monkeypatch, "pick_cuda_rows_config", config)
    x, weights, offsets = operands(SPLITS[split], n, k)
    bias, dy = torch.randn(weights.shape[:2], device="cuda").bfloat16(), torch.randn(1000, n, device="cuda").bfloat16()
    agrees(gradients(x, weights, offsets, dy, bias), gradients(x, weights, offsets, dy, bias, None))
    assert taken == [config, config]  # the forward, and the gradient of x


# Rows of groups; 77 more rows are past the last offset.
ROWS = {
    "small and empty": [0, 1, 63, 65, 129, 0, 0, 64, 128, 2000, 0],
    "zipf": [3000 // (1 + group * 5 % 16) for group in range(16)],
    "onehot": [0, 0, 5000, 0],
    "one tile": [70],
    "equal": [512] * 12,
}


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("n", "k"), [(8, 8), (136, 72), (344, 264), (1160, 1408)])
@pytest.mark.parametrize("sizes", ROWS)
def test_rows_of_each_width(
    compiler, monkeypatch, sizes: str, n: int, k: int, transposed: bool, dtype: torch.dtype
) -> None:
    """One tile a CTA, and even and odd numbers of tiles. Repeated runs agree bit for bit, and so do all widths: each
    sum has one order. Rows past the last offset are zeros, whatever x contains there."""
    ends = list(itertools.accumulate(ROWS[sizes]))
    rows = ends[-1] + 77
    x, dy = (torch.randn(rows, size, device="cuda", dtype=dtype) for size in (k, n))
    x[ends[-1] :] = torch.nan
    weights = torch.randn(len(ends), n, k, device="cuda", dtype=dtype) * k**-0.5
    bias = torch.randn(n, len(ends), device="cuda", dtype=dtype).mT  # its columns are not contiguous
    weights = weights.mT.contiguous().mT if transposed else weights
    offsets, first = torch.tensor(ends, device="cuda"), None
    want = gradients(x, weights, offsets, dy, bias, None)[:2]
    for config in CONFIGS:
        taken = put_in_place(monkeypatch, "pick_cuda_rows_config", config)
        ours = gradients(x, weights, offsets, dy, bias)[:2]
        again = gradients(x, weights, offsets, dy, bias)[:2]
        first = first or ours
        assert taken == [config, config] and not ours[0][ends[-1] :].any() and not ours[1][ends[-1] :].any()
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(ours, again, first, strict=True))
        agrees(ours, want)


@pytest.mark.gpu(min_capability=(9, 0))
def test_more_tiles_than_sms(compiler) -> None:
    """Every CTA computes several tiles, with different K in the weights' gradient."""
    sizes = [1500, 3, 0, 700, 64, 65, 1, 2000, 129, 300]
    ends = list(itertools.accumulate(sizes))
    x = torch.randn(ends[-1] + 77, 512, device="cuda").bfloat16()
    weights = (torch.randn(len(sizes), 1160, 512, device="cuda") * 512**-0.5).bfloat16()
    offsets, dy = torch.tensor(ends, device="cuda"), torch.randn(x.shape[0], 1160, device="cuda").bfloat16()
    ours = gradients(x, weights, offsets, dy)
    agrees(ours, gradients(x, weights, offsets, dy, None, None))
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(ours, gradients(x, weights, offsets, dy), strict=True))
