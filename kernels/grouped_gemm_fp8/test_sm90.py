"""Tests of the version for Hopper (sm90/): supported problems, compilation, and on a GPU the results."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

from harness.compiling import nvrtc, sass

from . import configs, operands, plans
from .bench import FORWARDS, GRADIENTS, _cuda_candidates
from .op import grouped_gemm_fp8
from .op_wgrad import grouped_gemm_fp8_wgrad
from .sm90 import cuda_driver, products
from .test_grouped_gemm_fp8 import E4M3, E5M2, agrees, codes, forward, gradient

HOPPER = (9, 0)
SOURCE = Path(products.__file__).with_name("products.cu")
ROWS = 1008  # a multiple of 16, as the weights' gradient requires
SPLITS = {
    "ragged": [0, 200, 201, 264, 700, 828, 1008],
    "with rows behind": [128, 256, 300, 300, 900],
    "at most half a tile": [64, 100, 600, 664, 1000],
    "several in a block": [1, 3, 17, 40, 63, 100, 127, 129, 130],
    "all in one": [0, 0, 1008, 1008],
    "all in one but a byte": [1, 1007, 1008],
    "none": [0, 0, 0],
    "whole tiles": [128, 512, 640],
}
BOTH = [(grouped_gemm_fp8, forward), (grouped_gemm_fp8_wgrad, gradient)]
PRODUCTS = pytest.mark.parametrize(("function", "make"), BOTH, ids=["forward", "gradient"])


@pytest.fixture
def compiler() -> None:
    if reason := cuda_driver.no_compiler():
        pytest.skip(reason)


def test_what_it_takes() -> None:
    """Needs no GPU: the result depends only on capability, and then on the presence of a compiler."""
    a, b = codes(4, 16), codes(1, 16, 16)
    assert products.unsupported_reason(a, b, HOPPER) == cuda_driver.no_compiler()
    assert "compute capability 9.0" in str(products.unsupported_reason(a, b, (8, 9)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU it cannot run")
@PRODUCTS
def test_where_it_cannot_run_is_an_error(function, make) -> None:
    with pytest.raises(RuntimeError, match=f'{function.__name__}: backend="cuda" cannot run here: it needs a GPU of'):
        function(*make([3, 9], 16, 16, 32), backend="cuda")


@pytest.mark.parametrize("of_weights", [False, True])
def test_which_backend_auto_is(of_weights: bool) -> None:
    def auto(rows: int, groups: int, possible: bool) -> str:
        return configs.pick_backend("auto", rows, groups, of_weights, possible)

    assert auto(8192, 8, True) == "cuda" and auto(8192, 8, False) == "triton"
    assert auto(64, 8, True) == ("cuda" if of_weights else "triton")
    assert configs.pick_backend("triton", 8192, 8, of_weights, True) == "triton"


def test_what_runs_where_cuda_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """backend="cuda" runs products.cu. Operands without elements use Triton, since TMA does not support them."""
    monkeypatch.setattr(products, "unsupported_reason", lambda *_: None)
    started = []
    for name in ("rows_launch", "weights_launch"):
        monkeypatch.setattr(products, name, lambda *_, name=name: started.append(name))
    for depth in (0, 32):
        plans.rows_plan(*forward([3, 9], 16, 48, depth), torch.float32, "cuda")
    plans.rows_plan(*forward([], 16, 48, 32), torch.float32, "cuda")  # no groups
    for rows in (0, 32):
        plans.weights_plan(*gradient([3, 9], rows, 48, 16), torch.float32, "cuda")
    assert started == ["rows_launch", "weights_launch"]


@PRODUCTS
def test_triton_does_not_ask_for_a_compiler(function, make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing CuPy takes about a second."""
    monkeypatch.setattr(products, "unsupported_reason", lambda *_: pytest.fail("asked"))
    function(*make([3, 9], 80, 16, 16), backend="triton")


# (BLOCK_N, TURNS, STAGES) of products.cu: a gradient's tile of 192 columns leaves room for three stages.
VARIANTS = [(128, 0, 4), (128, 1, 4), (192, 0, 3), (192, 1, 3)]
TILES = pytest.mark.parametrize(("block_n", "turns", "stages"), VARIANTS)


def defines(weights: int, block_n: int, turns: int, stages: int, **changes: int) -> tuple[str, ...]:
    chosen = dict(WEIGHTS=weights, A_E4M3=1, B_E4M3=1, OUT32=weights, FP16=0, RASTER=8, CLUSTER=2)
    chosen |= dict(BLOCK_N=block_n, TURNS=turns, STAGES=stages)
    return tuple(f"{name}={value}" for name, value in (chosen | changes).items())


@pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)
@pytest.mark.parametrize(
    ("weights", "changes"),
    [
        (0, {}),
        (1, {}),
        pytest.param(0, dict(OUT32=1, B_E4M3=0, CLUSTER=1), marks=pytest.mark.slow),
        pytest.param(0, dict(FP16=1), marks=pytest.mark.slow),
        pytest.param(1, dict(OUT32=0, A_E4M3=0), marks=pytest.mark.slow),
        pytest.param(1, dict(CLUSTER=1), marks=pytest.mark.slow),
    ],
)
@TILES
def test_it_compiles_and_does_not_spill(
    weights: int, changes: dict[str, int], block_n: int, turns: int, stages: int
) -> None:
    code = nvrtc.compiled(SOURCE, "sm_90a", defines(weights, block_n, turns, stages, **changes))
    usage = sass.inspect(code, "grouped_gemm_fp8_products")
    assert usage.spills == 0 and usage.stack == 0
    assert usage.early_arrivals == 0 and usage.early_own_reads == {}
    sets = 2 if block_n == 128 else 1
    assert usage.mma == {"QGMMA": 4 + 4 * sets}  # four per K-block: the first K-block, and each set in the loop
    # One wait per K-block (two with TURNS) and a last one: ptxas has not serialised the wgmmas of a K-block.
    assert usage.wgmma_waits == sets * (1 + turns) + 1


def test_host_and_device_agree() -> None:
    text = SOURCE.read_text(encoding="utf-8")
    blocks = re.search(r"BLOCK_M = (\d+), BLOCK_K = (\d+), CONSUMERS = (\d+);", text)
    step = re.search(r"struct alignas\(16\) Step \{(.*?)\};", text, re.DOTALL)
    assert blocks is not None and step is not None
    block_m, block_k, consumers = map(int, blocks.groups())
    assert (block_m, block_k) == (products.BLOCK_M, products.BLOCK_K)
    assert 128 * (consumers + 1) == products.THREADS and block_m // consumers == products.BOX_ROWS
    members = re.findall(r"(?:int|,) (\w+)(?=[,;])", re.sub(r"//.*", "", step[1]))
    assert 4 * len(members) == products.STEP_BYTES


@pytest.mark.parametrize("cols", [16, 128, 144, 1408, 2048, 4096])
def test_the_configuration(cols: int) -> None:
    """The picked configuration fits into shared memory, and is one that is compiled and tested."""
    for groups, rows in ((1, 16), (8, 8192), (64, 32768)):
        forward = configs.pick_cuda_rows_config(groups, rows, cols)
        weights = configs.pick_cuda_weights_config(groups, rows, cols, cols)
        for dtype in (torch.bfloat16, torch.float32):
            assert products.shared_bytes(forward, False, dtype) <= 227 << 10
            assert products.shared_bytes(weights, True, dtype) <= 227 << 10
        for config in (forward, weights):
            assert (config.block_n, int(config.turns)) in [variant[:2] for variant in VARIANTS]
            assert config.cluster == 1 or cols > config.block_n
        assert weights.cluster == 1 + (cols > weights.block_n)
    widest = configs.CudaConfig(stages=3, raster=8, cluster=2, block_n=192, turns=True)
    assert products.shared_bytes(widest, True, torch.float32) <= 227 << 10


def test_which_tiles_the_forward_has() -> None:
    """The tiles whose waves take less time are picked, and pairs if they need no more waves. Eleven column tiles would
    become twelve; the 22 of 4096 columns become eleven pairs; a single column tile has no pair. Each group has its own
    row tiles: 64 groups of 65 rows have 64 of them, two waves with 128 columns, one with 192."""
    problems = ((8, 8192, 4096), (64, 32768, 2048), (1, 200, 256), (1, 200, 128), (64, 64 * 65, 384))
    picked = [configs.pick_cuda_rows_config(*problem) for problem in problems]
    assert [(c.block_n, c.cluster) for c in picked] == [(192, 2), (192, 1), (128, 2), (128, 1), (192, 2)]


def test_every_candidate_fits_into_shared_memory() -> None:
    for case in (*FORWARDS, *GRADIENTS):
        for config in _cuda_candidates(case):
            assert products.shared_bytes(config, case.params["wgrad"], torch.bfloat16) <= 227 << 10


def put_in_place(monkeypatch, block_n: int, turns: int, stages: int, cluster: int) -> None:
    """Replaces the picked configurations of both GEMMs by this one."""
    config = configs.CudaConfig(stages, 4, cluster, block_n, bool(turns))
    for pick in ("pick_cuda_rows_config", "pick_cuda_weights_config"):
        monkeypatch.setattr(configs, pick, lambda *_: config)


def kept_bits(at: int, first: int, end: int) -> int:
    """The Python equivalent of kept_bits() in products.cu."""
    below, above = min(max(first - at, 0), 4), min(max(at + 4 - end, 0), 4)
    low = 0 if below == 4 else 0xFFFFFFFF << 8 * below & 0xFFFFFFFF
    return low & (0 if above == 4 else 0xFFFFFFFF >> 8 * above)


def test_the_bytes_of_a_cut_row() -> None:
    """Checks the formula, and that products.cu contains it."""
    text = SOURCE.read_text(encoding="utf-8")
    assert "const int below = min(max(first - at, 0), 4), above = min(max(at + 4 - end, 0), 4);" in text
    assert "low = below == 4 ? 0 : ~0u << 8 * below, high = above == 4 ? 0 : ~0u >> 8 * above;" in text
    for first, end in itertools.product((-300, 0, 1, 2, 3, 5, 16, 127), (1, 2, 4, 6, 17, 127, 128, 900)):
        kept = [byte for at in range(0, 128, 4) for byte in kept_bits(at, first, end).to_bytes(4, "little")]
        assert kept == [0xFF if first <= byte < end else 0 for byte in range(128)]


# (N, K). Columns of tiles are N in the forward and K in the gradient: one tile, or several with a partial last one. The
# second tile of a cluster may be out of bounds.
SIZES = [(128, 128), (512, 256), (16, 16), (144, 272), (400, 1040), (208, 208), (48, 1408)]


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("split", SPLITS)
@TILES
@PRODUCTS
def test_it_is_right(
    compiler,
    monkeypatch,
    function,
    make,
    block_n: int,
    turns: int,
    stages: int,
    split: str,
    n: int,
    k: int,
    cluster: int,
) -> None:
    put_in_place(monkeypatch, block_n, turns, stages, cluster)
    agrees(function, make(SPLITS[split], ROWS, n, k), backend="cuda")


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("n", [16, 336, 400, 448, 576])
@TILES
def test_tiles_that_begin_within_a_square(compiler, monkeypatch, block_n: int, turns: int, stages: int, n: int) -> None:
    """In the forward 192 columns are one and a half 128x128 scale blocks. Also a last pair with one tile."""
    put_in_place(monkeypatch, block_n, turns, stages, cluster=2)
    agrees(grouped_gemm_fp8, forward(SPLITS["ragged"], ROWS, n, 272), backend="cuda")


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("split", [*SPLITS, "more tiles than SMs"])
@TILES
def test_tiles_change_no_bit(
    compiler, monkeypatch, block_n: int, turns: int, stages: int, split: str, out_dtype: torch.dtype
) -> None:
    """The forward is bit-identical to that with the picked configuration."""
    ends = SPLITS.get(split) or list(itertools.accumulate([1500, 3, 0, 700, 64, 65, 1, 2000, 129, 300]))
    a, b, of_a, of_b, offsets = forward(ends, max(ROWS, ends[-1] + 77), 1424, 528)
    arguments = a, b, of_a / 64, of_b / 64, offsets
    want = grouped_gemm_fp8(*arguments, out_dtype=out_dtype, backend="cuda")
    for cluster in (1, 2):
        put_in_place(monkeypatch, block_n, turns, stages, cluster)
        assert torch.equal(grouped_gemm_fp8(*arguments, out_dtype=out_dtype, backend="cuda"), want)


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("formats", list(itertools.product((E4M3, E5M2), repeat=2)))
@PRODUCTS
def test_every_dtype(compiler, function, make, formats: tuple, out_dtype: torch.dtype) -> None:
    a, b, of_a, of_b, offsets = make(SPLITS["ragged"], ROWS, 272, 400, formats)
    agrees(function, (a, b, of_a / 64, of_b / 64, offsets), rtol=1e-2, backend="cuda", out_dtype=out_dtype)


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@TILES
@PRODUCTS
def test_more_tiles_than_sms(
    compiler, monkeypatch, function, make, block_n: int, turns: int, stages: int, out_dtype: torch.dtype
) -> None:
    """Every CTA computes several tiles, in the weights' gradient also with different and empty K. Repeated runs agree
    bit for bit."""
    put_in_place(monkeypatch, block_n, turns, stages, cluster=2)
    sizes = [1500, 3, 0, 700, 64, 65, 1, 2000, 129, 300]
    ends = list(itertools.accumulate(sizes))
    arguments = make(ends, (ends[-1] + 77 + 15) // 16 * 16, 1168, 528)
    rtol = 1e-2 if out_dtype == torch.bfloat16 else 2e-3
    ours = agrees(function, arguments, rtol=rtol, backend="cuda", out_dtype=out_dtype)
    for _ in range(5):
        assert torch.equal(ours, function(*arguments, out_dtype=out_dtype, backend="cuda"))


@pytest.mark.gpu(min_capability=(9, 0))
@TILES
def test_what_is_nan_stays_in_its_group(compiler, monkeypatch, block_n: int, turns: int, stages: int) -> None:
    put_in_place(monkeypatch, block_n, turns, stages, cluster=2)
    x, weights, *rest = forward([200, 460, 700], ROWS, 272, 400)
    want = grouped_gemm_fp8(x, weights, *rest, backend="cuda")
    x.view(torch.uint8)[200:460], x.view(torch.uint8)[700:] = 0x7F, 0xFF
    y = grouped_gemm_fp8(x, weights, *rest, backend="cuda")
    assert torch.equal(y[:200], want[:200]) and torch.equal(y[460:700], want[460:700])
    assert y[200:460].isnan().all() and not y[700:].any()

    # The third group, of ten rows, has such neighbours on both sides in its only block.
    dy_t, x_t, *rest = gradient([200, 460, 470, 500, 701], ROWS, 272, 400)
    want = grouped_gemm_fp8_wgrad(dy_t, x_t, *rest, backend="cuda")
    for codes_t in (dy_t, x_t):
        for bad, code in ((slice(200, 460), 0x7F), (slice(470, 500), 0xFF), (slice(701, ROWS), 0xFF)):
            codes_t.view(torch.uint8)[:, bad] = code
    dweights = grouped_gemm_fp8_wgrad(dy_t, x_t, *rest, backend="cuda")
    assert torch.equal(dweights[::2], want[::2]) and dweights[1::2].isnan().all()


@pytest.mark.gpu(min_capability=(9, 0))
@PRODUCTS
def test_rows_between_others_are_read_in_place(compiler, function, make) -> None:
    """Slices of wider rows, whose other elements are NaN, behind the last K-block too."""
    a, b, *rest = make(SPLITS["ragged"], ROWS, 272, 400)
    want = function(a, b, *rest, backend="cuda")

    def between(t: torch.Tensor) -> torch.Tensor:
        wide = torch.full((*t.shape[:-1], t.shape[-1] + 32), 0xFF, dtype=torch.uint8, device=t.device)
        wide[..., 16:-16] = t.view(torch.uint8)
        return wide[..., 16:-16].view(t.dtype)

    assert operands.in_place(between(a)) and operands.in_place(between(b))
    assert torch.equal(function(between(a), between(b), *rest, backend="cuda"), want)


@pytest.mark.gpu(min_capability=(9, 0))
@PRODUCTS
def test_it_agrees_with_triton(compiler, function, make) -> None:
    """Both versions accumulate and scale the same K-blocks of 128."""
    arguments = make(SPLITS["ragged"], ROWS, 528, 400)
    ours, other = (function(*arguments, out_dtype=torch.float32, backend=b) for b in ("cuda", "triton"))
    torch.testing.assert_close(ours, other, rtol=0, atol=1e-3 * other.abs().max().item())
