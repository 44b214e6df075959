"""Tests of the version for Hopper (sm90/): supported operands, compilation, and on a GPU the results."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harness.compiling import nvrtc, sass

from . import configs, launch
from .activation import ACTIVATIONS
from .op import fused_mlp
from .sm90 import cuda_driver, products
from .test_fused_mlp import agrees, gradients, operands, same_places

SOURCE = Path(products.__file__).with_name("products.cu")


@pytest.fixture
def compiler() -> None:
    if reason := cuda_driver.no_compiler():
        pytest.skip(reason)


def test_which_operands_it_takes() -> None:
    matrix = torch.zeros(64, 40, dtype=torch.float16)
    assert products.takes(matrix, None) and products.takes(matrix.mT) and products.takes(matrix[:, 8:13])
    for t in (matrix[:, 1:33], matrix[:, ::2], matrix[:1].expand(64, 40), matrix[:0], torch.zeros(64, 37).half()):
        assert not products.takes(matrix, t)


def test_where_it_cannot_run() -> None:
    x = torch.zeros(2, 8)
    assert "compute capability 9.0" in str(products.missing(x)) or torch.cuda.is_available()
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match='backend="cuda" cannot run here: it needs a GPU'):
            fused_mlp(x, torch.zeros(8, 8), torch.zeros(8, 8), backend="cuda")


# Epilogue, activation, A_TRANS, B_TRANS, TWO, FP16.
VARIANTS = (
    ("PLAIN", "silu", 0, 0, 0, 0),
    ("PLAIN", "silu", 0, 1, 1, 1),
    ("ACT", "gelu", 0, 0, 0, 0),
    ("ACT", "gelu_tanh", 0, 0, 0, 1),
    ("GATE", "silu", 0, 0, 0, 1),
    ("GATE", "gelu", 0, 0, 0, 0),
    ("DACT", "gelu_tanh", 0, 1, 0, 0),
    ("DGATE", "gelu", 0, 1, 0, 0),
    ("DGATE", "silu", 0, 1, 0, 0),
    ("DGATE", "relu_sq", 0, 1, 0, 1),
    ("PARTS", "silu", 1, 1, 0, 0),
)
WIDTHS = (256, 192, 176, 160, 128)  # columns of a tile


@pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)
@pytest.mark.parametrize(
    ("variant", "width"),
    [
        pytest.param(v, width, id="-".join(map(str, (*v, width))).lower())
        for v, width in itertools.product(VARIANTS, WIDTHS)
        if (*v[:2], width) != ("DGATE", "gelu", 192)  # never picked, because it spills
    ],
)
def test_it_compiles_and_does_not_spill(variant: tuple, width: int) -> None:
    """ptxas adds no waits for wgmmas to those of the source: one in each main loop, and one after it."""
    (epilogue, activation, a_trans, b_trans, two, fp16), turns = variant, width < 256
    defines = (
        f"EPILOGUE={getattr(products, epilogue)}",
        f"ACTIVATION={ACTIVATIONS.index(activation)}",
        f"FP16={fp16}",
        f"BLOCK_N={width}",
        f"TURNS={int(turns)}",
        f"STAGES={configs.cuda_stages(width)}",
        "RASTER=8",
        "CLUSTER=2",
        f"A_TRANS={a_trans}",
        f"B_TRANS={b_trans}",
        f"TWO={two}",
    )
    usage = sass.inspect(nvrtc.compiled(SOURCE, "sm_90a", defines), "fused_mlp_products")
    assert usage.spills == 0 and usage.stack == 0
    assert usage.early_arrivals == 0 and usage.early_own_reads == {}
    loops = 1 if turns or epilogue == "GATE" else 2  # one for a tile of 256 columns, one for 128
    assert usage.mma == {"HGMMA": 4 * max(loops, 1 + turns)} and usage.wgmma_waits == 2 * loops


def test_host_and_device_agree() -> None:
    text = SOURCE.read_text(encoding="utf-8")
    blocks = re.search(r"BLOCK_M = (\d+), BLOCK_K = (\d+), HALF.*\nconstexpr int CONSUMERS = (\d+)", text)
    assert blocks is not None
    *tile, consumers = map(int, blocks.groups())
    assert tile == [products.BLOCK_M, products.BLOCK_K]
    assert 128 * (consumers + 1) == products.THREADS
    epilogues = re.search(r"enum Epilogue { (.*) };", text)
    assert epilogues is not None
    assert tuple(epilogues[1].lower().split(", ")) == products.EPILOGUES
    assert [getattr(products, name) for name in epilogues[1].split(", ")] == list(range(6))
    header = SOURCE.with_name("activation.cuh").read_text(encoding="utf-8")
    activations = re.search(r"enum Activation { (.*) };", header)
    assert activations is not None
    assert tuple(activations[1].lower().split(", ")) == ACTIVATIONS


def test_the_ring_fits_into_shared_memory() -> None:
    for block_n in WIDTHS:
        config = configs.CudaConfig(block_n, configs.cuda_stages(block_n), raster=8, cluster=2)
        assert config.stages >= 4 and products.shared_bytes(config) <= 227 << 10


def test_few_tiles_are_narrow() -> None:
    """The width whose tiles fill 132 SMs best is picked. Both 252 tiles of 176 columns and 172 of 256 take two waves;
    both 128 tiles of 128 columns and 64 of 256 take one. With many tiles it is 256."""
    for (rows, cols, steps, epilogue), block_n in {
        (512, 11008, 64, "act"): 176,
        (512, 11008, 64, "gate"): 176,
        (512, 4096, 172, "plain"): 128,
        (8192, 28672, 128, "act"): 192,
        (8192, 4096, 172, "plain"): 256,
    }.items():
        config = configs.pick_cuda_config(rows, cols, steps, 1, epilogue, 132)
        assert (config.block_n, config.turns, config.cluster) == (block_n, block_n < 256, 2)
    assert configs.pick_cuda_config(128, 4096, 64, 1, "act", 132).cluster == 1
    assert configs.pick_cuda_config(2048, 13824, 80, 1, "dact", 132).block_n == 192
    assert configs.pick_cuda_config(2048, 13824, 80, 1, "dgate", 132).block_n == 192
    assert configs.pick_cuda_config(2048, 13824, 80, 1, "dgate", 132, erf=True).block_n != 192


def test_turns_hide_all_epilogues_but_the_last() -> None:
    class Shared(configs.CudaConfig):
        turns = False

    def cycles(turns: bool, steps: int, rows: int) -> float:
        config = (configs.CudaConfig if turns else Shared)(192, stages=5, raster=8, cluster=1)
        return configs.cuda_cycles(config, rows, 192, steps, 1, "act", sms=1)

    epilogue = 192 * configs.CUDA_EPILOGUES["act"]
    assert cycles(False, 64, 8 * 128) - cycles(True, 64, 8 * 128) == pytest.approx((8 * 1.2 - 1) * epilogue)
    assert cycles(False, 64, 128) - cycles(True, 64, 128) == pytest.approx(0.2 * epilogue)
    assert 0 < cycles(False, 1, 8 * 128) - cycles(True, 1, 8 * 128) < 7 * epilogue  # longer than the main loops


@pytest.mark.parametrize(("steps", "tiles"), [(3204, 22), (1, 22), (9, 1000), (0, 1), (128, 200)])
def test_parts_cover_the_sum(steps: int, tiles: int) -> None:
    parts = configs.pick_cuda_parts(steps, tiles, 132)
    assert parts >= 1 and (parts == 1 or (parts * tiles <= 132 and steps // parts >= 8))


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("names", ["x w1 w2", "x w1 w2 b1 b2", "x w1 w2 b1 b2 w_gate"])
@pytest.mark.parametrize(
    ("rows", "dim", "hidden", "dim_out"),
    [(1, 8, 8, 8), (64, 64, 128, 64), (129, 72, 136, 40), (1000, 512, 1365, 512), (3000, 264, 683, 392)],
)
def test_it_is_right(
    compiler: None, rows: int, dim: int, hidden: int, dim_out: int, names: str, dtype: torch.dtype
) -> None:
    tensors = operands(rows, dim, hidden, dim_out, names, dtype)
    for save in ("activations", "input"):
        agrees(tensors, backend="cuda", save=save)


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(compiler: None, activation: str) -> None:
    for names in ("x w1 w2 b1", "x w1 w2 w_gate"):
        agrees(operands(300, 128, 200, 136, names, torch.bfloat16), backend="cuda", activation=activation)


@pytest.mark.gpu(min_capability=(9, 0))
def test_more_tiles_than_sms(compiler: None) -> None:
    """Every CTA computes several tiles, and weights' gradients use split-K. Repeated runs agree bit for bit."""
    tensors = operands(20000, 512, 1365, 512, "x w1 w2 b1 b2 w_gate", torch.bfloat16)
    agrees(tensors, backend="cuda")
    first = gradients(fused_mlp, tensors, backend="cuda")
    for _ in range(3):
        again = gradients(fused_mlp, tensors, backend="cuda")
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu(min_capability=(9, 0))
def test_layouts(compiler: None) -> None:
    """Each GEMM with an operand that TMA cannot read uses Triton. It reads all four transposed, with and without a
    gate."""
    tensors = operands(304, 128, 200, 136, "x w1 w2 w_gate", torch.bfloat16)
    for name, t in tensors.items():
        wide = torch.randn(t.shape[0], 256, device="cuda", dtype=torch.bfloat16) * t.shape[1] ** -0.5
        for strided in (t.mT.contiguous().mT, wide[:, 16 : 16 + t.shape[1]], wide[:, 3 : 3 + t.shape[1]]):
            agrees({**tensors, name: strided}, backend="cuda")
    turned = {name: t.mT.contiguous().mT for name, t in tensors.items()}
    assert products.takes(*turned.values())
    agrees(turned, backend="cuda")
    agrees({name: t for name, t in turned.items() if name != "w_gate"}, backend="cuda")


@pytest.mark.gpu(min_capability=(9, 0))
def test_what_is_not_finite_stays_in_its_row(compiler: None) -> None:
    tensors = operands(300, 128, 203, 136, "x w1 w2 b1 w_gate", torch.bfloat16)
    want = fused_mlp(**tensors, backend="cuda")
    tensors["x"][77] = torch.inf
    others = torch.arange(300, device="cuda") != 77
    y = fused_mlp(**tensors, backend="cuda")
    assert torch.equal(y[others], want[others]) and not y[77].isfinite().any()


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_what_is_not_finite_is_where_pytorch_has_it(compiler: None, activation: str) -> None:
    for names in ("x w1 w2 b1", "x w1 w2 w_gate"):
        same_places(operands(300, 128, 203, 136, names, torch.bfloat16), activation, backend="cuda")


def each_config(monkeypatch: pytest.MonkeyPatch) -> Iterator[configs.CudaConfig]:
    """Every width and cluster of products.cu, used for all of its GEMMs."""
    for block_n, cluster in itertools.product(WIDTHS, (1, 2)):
        config = configs.CudaConfig(block_n, configs.cuda_stages(block_n), raster=2, cluster=cluster)
        monkeypatch.setattr(configs, "pick_cuda_config", lambda *problem, config=config: config)
        launch.forget()
        yield config


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("names", ["x w1 w2", "x w1 w2 b1 b2", "x w1 w2 b1 b2 w_gate"])
@pytest.mark.parametrize(
    ("rows", "dim", "hidden", "dim_out"),
    [(1, 8, 8, 8), (63, 64, 96, 200), (129, 72, 345, 40), (700, 520, 1365, 392), (2000, 64, 2100, 72)],
)
def test_each_width_is_right(
    compiler: None,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    dim: int,
    hidden: int,
    dim_out: int,
    names: str,
    dtype: torch.dtype,
) -> None:
    """Forward and backward: GEMMs with operands of both layouts, split-K and TWO; one tile a CTA, and even and odd
    numbers of tiles. Repeated runs agree bit for bit, and so do all widths: each sum has one order."""
    tensors = operands(rows, dim, hidden, dim_out, names, dtype)
    first: list[torch.Tensor] | None = None
    for _ in each_config(monkeypatch):
        for save in ("activations", "input"):
            agrees(tensors, backend="cuda", save=save)
        got = gradients(fused_mlp, tensors, backend="cuda")
        again = gradients(fused_mlp, tensors, backend="cuda")
        first = first or got
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(got, again, first, strict=True))
    launch.forget()


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_each_width(compiler: None, monkeypatch: pytest.MonkeyPatch, activation: str) -> None:
    drawn = [operands(300, 128, 203, 136, names, torch.bfloat16) for names in ("x w1 w2 b1", "x w1 w2 w_gate")]
    for _ in each_config(monkeypatch):
        for tensors in drawn:
            agrees(tensors, backend="cuda", activation=activation)
    launch.forget()


@pytest.mark.gpu(min_capability=(9, 0))
def test_columns_beyond_the_last_are_zeros_in_each_width(compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a row of x is not finite, and if a tile begins past the last column."""
    for hidden in (203, 257, 345, 441):
        tensors = operands(300, 128, hidden, 136, "x w1 w2 b1 w_gate", torch.bfloat16)
        tensors["x"][77:] = torch.inf
        for _ in each_config(monkeypatch):
            launched = products.hidden_launch(
                tensors["x"], tensors["w1"], tensors["b1"], tensors["w_gate"], activation="silu"
            )
            written = [
                torch.full((300, configs.pick_pitch(hidden)), torch.nan, device="cuda").bfloat16() for _ in "123"
            ]
            launched(tensors["x"], tensors["w1"], tensors["w_gate"], tensors["b1"], *written)
            assert all(t[:, hidden:].eq(0).all() and not t[:77, :hidden].isnan().any() for t in written)
    launch.forget()


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("names", ["x w1 w2 b1 b2", "x w1 w2 w_gate"])
def test_products_without_an_activation_without_the_library(
    compiler: None, monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    use = configs.Versions(cuda=True, library=True, passes=False, narrow=False, plain=True)
    monkeypatch.setattr(configs, "pick_versions", lambda *problem, **options: use)
    for _ in each_config(monkeypatch):
        agrees(operands(520, 1024, 1360, 1000, names, torch.bfloat16))
    launch.forget()
