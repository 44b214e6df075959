"""The version for Hopper (sm90/): which problems it supports, that it compiles to sparse wgmma, the layout of its
tiles, and on a GPU that it is right."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from harness.compiling import nvrtc, sass
from harness.correctness import unmapped

from . import compress, configs, prune, sparse_matmul
from .activation import ACTIVATIONS
from .reference import sparse_matmul_reference
from .sm90 import cuda_driver, products

HOPPER = (9, 0)
SOURCE = Path(products.__file__).with_name("products.cu")


@pytest.fixture
def compiler() -> None:
    if reason := cuda_driver.no_compiler():
        pytest.skip(reason)


def problem(rows: int, cols: int, depth: int, dtype: torch.dtype = torch.float16, device: str = "cpu"):
    weight, _ = prune(torch.randn(cols, depth, device=device, dtype=dtype) * depth**-0.5)
    return torch.randn(rows, depth, device=device, dtype=dtype), compress(weight)


def test_what_it_takes() -> None:
    """Independent of the GPU present: depends on capability, dtypes and layouts, and last on the compiler."""

    def reason(rows=4, cols=16, depth=32, dtype=torch.float16, capability=HOPPER, first=0):
        x = torch.empty(rows, depth + 8, dtype=dtype)[:, first : first + depth]
        metadata = torch.empty(-(-depth // 64), -(-cols // 16), 64, dtype=torch.int16)
        values = torch.empty(cols, depth // 2, dtype=dtype)
        return str(products.unsupported_reason(x, values, metadata, capability))

    assert reason() == str(cuda_driver.no_compiler())
    assert "compute capability 9.0" in reason(capability=(8, 0))
    assert "float16 and bfloat16" in reason(dtype=torch.float32)
    assert "K a multiple of 16" in reason(depth=40) and "K a multiple of 16" in reason(cols=12)
    assert "16-byte boundaries" in reason(first=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU it cannot run")
def test_where_it_cannot_run_is_an_error() -> None:
    x, compressed = problem(4, 16, 16)
    with pytest.raises(RuntimeError, match='backend="cuda" cannot run here: it needs a GPU of compute capability 9.0'):
        sparse_matmul(x, compressed, backend="cuda")


@pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)
@pytest.mark.parametrize(
    ("fp16", "activation", "cluster"),
    [(0, 0, 2), *(pytest.param(*p, marks=pytest.mark.slow) for p in ((1, 1, 1), (0, 2, 2), (1, 3, 4), (0, 4, 1)))],
)
def test_it_compiles_to_sparse_wgmma_and_does_not_spill(fp16, activation, cluster, tmp_path) -> None:
    defines = "FP8=0", f"FP16={fp16}", f"ACTIVATION={activation}", "STAGES=5", "RASTER=8", f"CLUSTER={cluster}"
    cubin = nvrtc.compiled(SOURCE, "sm_90a", defines)
    usage = sass.inspect(cubin, "sparse_matmul_products")
    assert usage.spills == usage.early_arrivals == 0 and usage.early_own_reads == {} and usage.mma == {"HGMMA": 2}
    path, tool = tmp_path / "products.cubin", sass.tool("cuobjdump")
    path.write_bytes(cubin)
    environment = {**os.environ, "PATH": f"{tool.parent}:{os.environ['PATH']}"}
    text = subprocess.run([tool, "--dump-sass", path], capture_output=True, text=True, env=environment).stdout
    # Both wgmmas of 32 of K are sparse, with sparsity selectors 0 and 1.
    found = re.findall(r"HGMMA\.SP\.64x256x32\.F32\S* [^;]*R\d+, (0x\d)", text)
    assert found == ["0x0", "0x1"]


def test_host_and_device_agree_on_the_tile() -> None:
    text = SOURCE.read_text(encoding="utf-8")
    tile = r"BLOCK_N = (\d+), BLOCK_M = (\d+), BLOCK_K = FP8 \? (\d+) : (\d+);\nconstexpr int CONSUMERS = (\d+)"
    found = re.search(tile, text)
    assert found is not None
    block_n, block_m, of_8_bits, of_16_bits, consumers = map(int, found.groups())
    assert (block_n, block_m) == (products.BLOCK_N, products.BLOCK_M)
    assert of_8_bits == 2 * of_16_bits == products.ROW_BYTES == int(re.search(r"ROW_BYTES = (\d+);", text)[1])
    assert 128 * (consumers + 1) == products.THREADS
    chunk = int(re.search(r"CHUNK = (\d+);", text)[1])
    assert consumers * chunk * (block_n // consumers * 2 + 16) == products.STAGING


def test_the_ring_fits_into_shared_memory() -> None:
    for cols, size in itertools.product((8, 128, 129, 8192), (1, 2)):
        config = configs.pick_cuda_config(4096, cols, 8192)
        assert products.shared_bytes(config, size) <= 227 << 10 and config.cluster in (1, 2, 4)


def test_the_metadata_of_a_step_by_warps_and_lanes() -> None:
    """The arithmetic of products.cu in Python: the producer's source addresses, and the word that a lane reads. With
    the fragments of the PTX ISA they reproduce the weight, also in the last tile, whose blocks are clamped."""
    rows, depth = 136, 192
    weight, _ = prune(torch.randn(rows, depth, device="cuda" if torch.cuda.is_available() else "cpu"))
    values, metadata = (t.cpu() for t in compress(weight))
    weight = weight.cpu()
    memory, blocks = metadata.view(torch.int32).flatten(), -(-rows // 16)
    dense = torch.zeros(256, depth)
    padded = torch.zeros(256, depth // 2)
    padded[:rows] = values
    for row, k in itertools.product((0, 128), range(0, depth, 64)):
        step = torch.cat([memory[k // 64 * blocks * 32 + min(row // 16 + i, blocks - 1) * 32 :][:32] for i in range(8)])
        lane = torch.arange(32)
        for consumer, warp in itertools.product(range(2), range(4)):
            word = step[(consumer * 4 + warp) * 32 + lane].long()
            first = row + consumer * 64 + warp * 16
            for selector, half, position in itertools.product(range(2), range(2), range(8)):
                mine = lane[lane % 4 // 2 == selector]
                index = word[mine] >> (16 * half + 2 * position) & 3
                n = first + mine // 4 + 8 * half
                chunk = k + 32 * selector + 16 * (mine % 2) + position // 2 * 4
                dense[n, chunk + index] = padded[n, chunk // 2 + position % 2]
    assert torch.equal(dense[:rows], weight) and not dense[rows:].any()


def test_the_epilogues_transposition() -> None:
    """The arithmetic of store_tile in Python: accumulator fragments of 64 x 32 through stmatrix.trans to rows of y."""
    sums = torch.arange(64 * 32).view(64, 32)  # N by M
    pitch = 64 * 2 + 16
    staging = torch.full((32 * pitch // 2,), -1)
    for warp, pair in itertools.product(range(4), range(2)):
        starts = [
            (lane // 16 * 8 + lane % 8) * pitch + (warp * 16 + lane // 8 % 2 * 8) * 2 + pair * 16 * pitch
            for lane in range(32)
        ]
        for i, lane in itertools.product(range(4), range(32)):
            n, m = warp * 16 + lane // 4 + i % 2 * 8, 8 * (2 * pair + i // 2) + 2 * (lane % 4)
            # Register i of a lane has row lane / 4 and two columns of block i; .trans exchanges rows and columns.
            for column in range(2):
                to = starts[8 * i + 2 * (lane % 4) + column] // 2 + lane // 4
                assert staging[to] == -1
                staging[to] = sums[n, m + column]
    assert torch.equal(staging.view(32, pitch // 2)[:, :64], sums.T)


def agrees(x, compressed, bias=None, activation=None) -> None:
    y = sparse_matmul(x, compressed, bias, activation, backend="cuda")
    wide = type(compressed)(compressed.values.double(), compressed.metadata)
    want = sparse_matmul_reference(x.double(), wide, None if bias is None else bias.double(), activation)
    error = 1e-3 if x.dtype == torch.float16 else 8e-3
    torch.testing.assert_close(y.double(), want, rtol=error, atol=error)


@pytest.mark.gpu(min_capability=HOPPER)
@pytest.mark.parametrize("cluster", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [(256, 64, 128), (256, 512, 512), (1, 16, 8), (37, 272, 136), (300, 1040, 264), (513, 2064, 1032), (5, 8192, 48)],
)
def test_it_is_right(compiler, monkeypatch, m: int, k: int, n: int, dtype: torch.dtype, cluster: int) -> None:
    config = configs.CudaConfig(configs.pick_cuda_config(m, n, k).stages, 4, cluster)
    monkeypatch.setattr(configs, "pick_cuda_config", lambda *_: config)
    agrees(*problem(m, n, k, dtype, "cuda"))


@pytest.mark.gpu(min_capability=HOPPER)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_bias_activation_and_gradients(compiler, activation) -> None:
    x, compressed = problem(300, 264, 400, torch.float16, "cuda")
    bias = torch.randn(528, device="cuda").half()[::2]
    agrees(x, compressed, bias, activation)
    wanted = [t.requires_grad_() for t in (x, compressed.values, bias.clone())]
    ours, portable = (
        sparse_matmul(x, compressed, wanted[2], activation, backend=backend) for backend in ("cuda", "triton")
    )
    dy = torch.randn_like(ours)
    for a, b in zip(*(torch.autograd.grad(y, wanted, dy) for y in (ours, portable)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2 * float(b.abs().max()))


@pytest.mark.gpu(min_capability=HOPPER)
@pytest.mark.parametrize("n", [264, 272])
def test_no_bias_is_read_past_the_last(compiler, n: int) -> None:
    """The bias ends where mapped memory does, so that a read behind it is a fault of the GPU. Of a thread's two rows of
    w, the second is the first that does not exist with 264, the first one with 272."""
    x, compressed = problem(300, n, 400, torch.bfloat16, "cuda")
    bias = unmapped.place("bias", torch.randn(n, device="cuda", dtype=torch.bfloat16), "end")
    agrees(x, compressed, bias)
    torch.cuda.synchronize()


@pytest.mark.gpu(min_capability=HOPPER)
def test_more_tiles_than_sms(compiler) -> None:
    """Every CTA computes several tiles; repeats agree bit for bit."""
    x, compressed = problem(4001, 4104, 1168, torch.bfloat16, "cuda")
    agrees(x, compressed)
    first = sparse_matmul(x, compressed, backend="cuda")
    for _ in range(5):
        assert torch.equal(first, sparse_matmul(x, compressed, backend="cuda"))


@pytest.mark.gpu(min_capability=HOPPER)
def test_rows_apart(compiler) -> None:
    """Rows of x and of values with a larger stride than their length."""
    x, compressed = problem(300, 264, 400, torch.bfloat16, "cuda")
    wide = torch.full((300, 512), float("nan"), device="cuda", dtype=x.dtype)
    wide[:, :400] = x
    values = torch.full((264, 256), float("nan"), device="cuda", dtype=x.dtype)
    values[:, :200] = compressed.values
    agrees(wide[:, :400], compressed._replace(values=values[:, :200]))
