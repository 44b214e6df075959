"""The version for Hopper (sm90/): which operands it takes, that it compiles, and on a GPU that it is right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from harness.compiling import nvrtc, sass

from . import configs
from .activation import ACTIVATIONS
from .op import fused_mlp
from .sm90 import cuda_driver, products
from .test_fused_mlp import agrees, gradients, operands

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


# Epilogue, activation, A_TRANS, B_TRANS, TWO, FP16; and the wgmmas: four for a tile of 256 columns, four for 128.
VARIANTS = (
    ("PLAIN", "silu", 0, 0, 0, 0, 8),
    ("PLAIN", "silu", 0, 1, 1, 1, 8),
    ("ACT", "gelu", 0, 0, 0, 0, 8),
    ("GATE", "silu", 0, 0, 0, 1, 4),
    ("DACT", "gelu_tanh", 0, 1, 0, 0, 8),
    ("DGATE", "relu_sq", 0, 1, 0, 1, 8),
    ("PARTS", "silu", 1, 1, 0, 0, 8),
)


@pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(
            variant,
            id=variant[0].lower() + "-two" * variant[4],
            marks=[] if variant[0] == "PARTS" else pytest.mark.slow,
        )
        for variant in VARIANTS
    ],
)
def test_it_compiles_and_does_not_spill(variant: tuple) -> None:
    epilogue, activation, a_trans, b_trans, two, fp16, wgmmas = variant
    defines = (
        f"EPILOGUE={getattr(products, epilogue)}",
        f"ACTIVATION={ACTIVATIONS.index(activation)}",
        f"FP16={fp16}",
        "STAGES=4",
        "RASTER=8",
        "CLUSTER=2",
        f"A_TRANS={a_trans}",
        f"B_TRANS={b_trans}",
        f"TWO={two}",
    )
    usage = sass.inspect(nvrtc.compiled(SOURCE, "sm_90a", defines), "fused_mlp_products")
    assert usage.spills == 0 and usage.stack == 0
    assert usage.early_arrivals == 0 and usage.early_own_reads == {}
    assert usage.mma == {"HGMMA": wgmmas}


def test_host_and_device_agree() -> None:
    text = SOURCE.read_text(encoding="utf-8")
    blocks = re.search(r"BLOCK_M = (\d+), BLOCK_N = (\d+), BLOCK_K = (\d+);\nconstexpr int CONSUMERS = (\d+)", text)
    assert blocks is not None
    *tile, consumers = map(int, blocks.groups())
    assert tile == [products.BLOCK_M, products.BLOCK_N, products.BLOCK_K]
    assert 128 * (consumers + 1) == products.THREADS
    epilogues = re.search(r"enum Epilogue { (.*) };", text)
    assert epilogues is not None
    assert [getattr(products, name) for name in epilogues[1].split(", ")] == list(range(6))
    header = SOURCE.with_name("activation.cuh").read_text(encoding="utf-8")
    activations = re.search(r"enum Activation { (.*) };", header)
    assert activations is not None
    assert tuple(activations[1].lower().split(", ")) == ACTIVATIONS


def test_the_ring_fits_into_shared_memory() -> None:
    assert products.shared_bytes(configs.pick_cuda_config(205000, 1365, 512)) <= 227 << 10


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
    """Every CTA goes through several rounds; weights' gradients are summed in parts; repeats agree bit for bit."""
    tensors = operands(20000, 512, 1365, 512, "x w1 w2 b1 b2 w_gate", torch.bfloat16)
    agrees(tensors, backend="cuda")
    first = gradients(fused_mlp, tensors, backend="cuda")
    for _ in range(3):
        again = gradients(fused_mlp, tensors, backend="cuda")
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu(min_capability=(9, 0))
def test_layouts(compiler: None) -> None:
    """What TMA cannot read goes to Triton, product by product."""
    tensors = operands(300, 128, 200, 136, "x w1 w2 w_gate", torch.bfloat16)
    for name, t in tensors.items():
        wide = torch.randn(t.shape[0], 256, device="cuda", dtype=torch.bfloat16) * t.shape[1] ** -0.5
        for strided in (t.mT.contiguous().mT, wide[:, 16 : 16 + t.shape[1]], wide[:, 3 : 3 + t.shape[1]]):
            agrees({**tensors, name: strided}, backend="cuda")


@pytest.mark.gpu(min_capability=(9, 0))
def test_what_is_not_finite_stays_in_its_row(compiler: None) -> None:
    tensors = operands(300, 128, 203, 136, "x w1 w2 b1 w_gate", torch.bfloat16)
    want = fused_mlp(**tensors, backend="cuda")
    tensors["x"][77] = torch.inf
    others = torch.arange(300, device="cuda") != 77
    y = fused_mlp(**tensors, backend="cuda")
    assert torch.equal(y[others], want[others]) and not y[77].isfinite().any()
