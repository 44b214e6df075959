"""The version for Hopper (sm90/) in 8 bits: which problems it supports, that it compiles to sparse wgmma, the metadata
of a K-block, and on a GPU that it is right."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from harness.compiling import nvrtc, sass

from . import compress, configs, prune, sparse_matmul
from .activation import ACTIVATIONS
from .sm90 import cuda_driver, products
from .test_fp8 import E4M3, E5M2, agrees, codes, problem

HOPPER = (9, 0)
SOURCE = Path(products.__file__).with_name("products.cu")


@pytest.fixture
def compiler() -> None:
    if reason := cuda_driver.no_compiler():
        pytest.skip(reason)


def test_what_it_takes() -> None:
    """Independent of the GPU present: depends on capability, dtypes and sizes, and last on the compiler."""

    def reason(cols=16, out_dtype=torch.bfloat16, capability=HOPPER, offset=0):
        words = torch.zeros(-(-cols // 16) * 64 + 8, dtype=torch.int16)
        metadata = words[offset : len(words) - 8 + offset].view(1, -1, 64)
        values = torch.zeros(cols, 32, dtype=torch.uint8).view(E4M3)
        return str(products.unsupported_reason_fp8(values, metadata, out_dtype, capability))

    assert reason() == reason(out_dtype=torch.float16) == str(cuda_driver.no_compiler())
    assert "compute capability 9.0" in reason(capability=(8, 9))
    assert "float16 and bfloat16" in reason(out_dtype=torch.float32)
    assert "N a multiple of 8" in reason(cols=12)
    assert "metadata on a 16-byte boundary" in reason(offset=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU it cannot run")
def test_where_it_cannot_run_is_an_error() -> None:
    x, compressed, scales = problem(4, 64, 16)
    with pytest.raises(RuntimeError, match='backend="cuda" cannot run here: it needs a GPU of compute capability 9.0'):
        sparse_matmul(x, compressed, **scales, backend="cuda")


def defines(x: str, w: str, scales: int, bias32: int, fp16: int, activation: int, cluster: int) -> tuple[str, ...]:
    formats = f"X_E4M3={int(x == 'e4m3')}", f"W_E4M3={int(w == 'e4m3')}"
    own = "FP8=1", *formats, f"SCALES={scales}", f"BIAS32={bias32}"
    return *own, f"FP16={fp16}", f"ACTIVATION={activation}", "STAGES=4", "RASTER=8", f"CLUSTER={cluster}"


@pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)
@pytest.mark.parametrize(
    ("x", "w", "rest"),
    [
        ("e4m3", "e4m3", (0, 0, 0, 0, 2)),
        ("e4m3", "e5m2", (1, 1, 1, 2, 1)),
        *(
            pytest.param("e5m2", w, rest, marks=pytest.mark.slow)
            for w, rest in (("e4m3", (1, 0, 0, 1, 4)), ("e5m2", (0, 1, 1, 3, 2)), ("e5m2", (1, 1, 0, 5, 2)))
        ),
    ],
)
def test_it_compiles_to_sparse_wgmma_and_does_not_spill(x: str, w: str, rest: tuple[int, ...], tmp_path) -> None:
    cubin = nvrtc.compiled(SOURCE, "sm_90a", defines(x, w, *rest))
    usage = sass.inspect(cubin, "sparse_matmul_products")
    assert usage.spills == usage.stack == usage.early_arrivals == 0
    assert usage.early_own_reads == {} and usage.mma == {"QGMMA": 2}
    path, tool = tmp_path / "products.cubin", sass.tool("cuobjdump")
    path.write_bytes(cubin)
    environment = {**os.environ, "PATH": f"{tool.parent}:{os.environ['PATH']}"}
    text = subprocess.run([tool, "--dump-sass", path], capture_output=True, text=True, env=environment).stdout
    found = re.findall(r"(QGMMA\.SP\S*) R\d+, gdesc\[UR\d+\], R\d+, (R\d+)", text)
    kind, words = {name for name, _ in found}, [register for _, register in found]
    assert kind == {f"QGMMA.SP.64x256x64.F32.{w.upper()}.{x.upper()}"}
    assert len(set(words)) == 2  # each wgmma has its own metadata register
    # The metadata register of a wgmma is not written before the first wait.
    flight = text[text.index("QGMMA.SP") :]
    flight = flight[: flight.index("WARPGROUP.DEPBAR")]
    assert not re.search(rf"[A-Z.0-9]+ {words[0]},", flight.split("\n", 1)[1].replace("gdesc", ""))


def test_the_metadata_of_a_step_by_warps_and_lanes() -> None:
    """The arithmetic of products.cu in Python: the producer's source addresses, and the two words that a lane reads.
    With the fragments of the PTX ISA they reproduce the weight, also in the last tile and the last K-block, whose
    blocks are clamped."""
    rows, depth = 136, 192
    weight = prune(codes(rows, depth))[0]
    values, metadata = (t.cpu() for t in compress(weight))
    memory, blocks = metadata.view(torch.int32).flatten(), -(-rows // 16)
    dense, padded = (torch.zeros(256, columns, dtype=torch.uint8) for columns in (256, 128))
    padded[:rows, : depth // 2] = values.view(torch.uint8)
    lane = torch.arange(32)
    for row, k in itertools.product((0, 128), range(0, depth, 128)):
        of_k = [min(k // 64 + i, (depth - 1) // 64) * blocks for i in range(2)]
        step = torch.cat([memory[(b + min(row // 16 + i, blocks - 1)) * 32 :][:32] for b in of_k for i in range(8)])
        for consumer, warp, instruction in itertools.product(range(2), range(4), range(2)):
            word = step[instruction * 256 + (consumer * 4 + warp) * 32 + lane].long()
            n = row + consumer * 64 + warp * 16 + lane // 4 + 8 * (lane % 2)
            for position in range(16):
                chunk = k + 64 * instruction + 32 * (lane % 4 // 2) + position // 2 * 4
                dense[n, chunk + (word >> 2 * position & 3)] = padded[n, chunk // 2 + position % 2]
    assert torch.equal(dense[:rows, :depth], weight.cpu().view(torch.uint8))
    assert not dense[rows:].any() and not dense[:, depth:].any()


@pytest.mark.gpu(min_capability=HOPPER)
@pytest.mark.parametrize("cluster", [1, 2, 4])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [(256, 128, 128), (256, 512, 512), (1, 64, 16), (37, 320, 144), (301, 1088, 272), (513, 2112, 1040), (5, 8192, 48)],
)
def test_it_is_right(compiler, monkeypatch, m: int, k: int, n: int, rows: bool, cluster: int) -> None:
    config = configs.CudaConfig(configs.pick_cuda_config(m, n, k).stages, 4, cluster)
    monkeypatch.setattr(configs, "pick_cuda_config", lambda *_: config)
    for formats in itertools.product((E4M3, E5M2), repeat=2):
        x, compressed, scales = problem(m, k, n, formats, rows)
        y = sparse_matmul(x, compressed, **scales, out_dtype=torch.float16, backend="cuda")
        agrees(y, x, compressed, **scales, rtol=2e-2)


@pytest.mark.gpu(min_capability=HOPPER)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_bias_and_activation(compiler, activation: str | None, out_dtype: torch.dtype) -> None:
    x, compressed, scales = problem(300, 448, 264)
    for dtype in (out_dtype, torch.float32):
        bias = torch.randn(528, device="cuda").to(dtype)[::2]
        options = {**scales, "out_dtype": out_dtype}
        y = sparse_matmul(x, compressed, bias, activation, **options, backend="cuda")
        agrees(y, x, compressed, bias, activation, **scales, rtol=1e-2)
        portable = sparse_matmul(x, compressed, bias, activation, **options, backend="triton")
        agrees(portable, x, compressed, bias, activation, **scales, rtol=1e-2)


@pytest.mark.gpu(min_capability=HOPPER)
def test_products_of_small_integers_are_exact(compiler) -> None:
    """Each metadata code changes the result, so that no error is hidden by the tolerance."""
    for m, k, n in ((300, 1088, 272), (64, 192, 1040)):
        w = prune(torch.randint(-2, 3, (n, k), device="cuda").float().to(E4M3))[0]
        x = torch.randint(-2, 3, (m, k), device="cuda").float().to(E5M2)
        one = torch.ones((), device="cuda")
        y = sparse_matmul(x, compress(w), scale_x=one, scale_w=one, out_dtype=torch.float16, backend="cuda")
        assert torch.equal(y.double(), x.double() @ w.double().t())


@pytest.mark.gpu(min_capability=HOPPER)
def test_more_tiles_than_sms(compiler) -> None:
    """Every CTA computes several tiles; repeats agree bit for bit."""
    x, compressed, scales = problem(4001, 1152, 4112)
    first = sparse_matmul(x, compressed, **scales, backend="cuda")
    agrees(first, x, compressed, **scales, rtol=1e-2)
    for _ in range(5):
        assert torch.equal(first, sparse_matmul(x, compressed, **scales, backend="cuda"))


@pytest.mark.gpu(min_capability=HOPPER)
def test_rows_apart_and_a_nan(compiler) -> None:
    """Rows of x and of values with a larger stride; non-finite elements affect only their row and column."""
    x, compressed, scales = problem(300, 320, 272)
    want = sparse_matmul(x, compressed, **scales, backend="cuda")
    wide, values = codes(300, 512), codes(272, 256)
    wide[:, :320], values[:, :160] = x, compressed.values
    apart = compressed._replace(values=values[:, :160])
    assert torch.equal(sparse_matmul(wide[:, :320], apart, **scales, backend="cuda"), want)
    values.view(torch.uint8)[130, 5] = 0x7F
    y = sparse_matmul(wide[:, :320], apart, **scales, backend="cuda")
    rest = torch.arange(272) != 130
    assert y[:, 130].isnan().all() and torch.equal(y[:, rest], want[:, rest])
