"""Tests of the version for Hopper (sm90/): supported operands, compilation, and on a GPU the results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from harness.compiling import nvrtc, sass

from .activation import ACTIVATIONS as KNOWN
from .configs import heads_backward, heads_forward, pick_backend
from .op import ACTIVATIONS, heads_mlp
from .reference import heads_mlp_reference
from .sm90 import cuda_driver, heads, heads_dhidden, heads_products

SOURCE = Path(heads.__file__).with_name("forward.cu")
HALVES = torch.bfloat16, torch.float16
Operands = dict[str, torch.Tensor]


@pytest.fixture
def compiler() -> None:
    if reason := cuda_driver.no_compiler():
        pytest.skip(reason)


def test_which_operands_it_takes() -> None:
    x = torch.zeros(3, 64, 40, dtype=torch.float16)
    assert heads.takes(x, x[0]) and heads.takes(x[1:2, :, 8:13]) and heads.takes(x[:, ::2]) and heads.takes(x.mT.mT)
    for t in (x[..., 1:33], x[..., ::2], x[:, :1].expand(3, 64, 40), x[:0], x.mT, torch.zeros(64, 37).half()):
        assert not heads.takes(x, t)


def test_where_it_cannot_run() -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    x, w1, w2 = torch.zeros(2, 8), torch.zeros(3, 8, 8), torch.zeros(3, 3, 8)
    assert "compute capability 9.0" in str(heads.unsupported_reason(x, w1, w2))
    with pytest.raises(RuntimeError, match='backend="cuda" cannot run here: it needs a GPU'):
        heads_mlp(x, w1, w2, backend="cuda")
    with pytest.raises(ValueError, match="backend must be one of auto, triton, cuda, got 'fast'"):
        heads_mlp(x, w1, w2, backend="fast")


def test_what_it_says_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "device_of", lambda tensor: ((9, 0), 132))
    monkeypatch.setattr(cuda_driver, "no_compiler", lambda: None)

    def reason(dim: int = 64, dim_out: int = 3, dtype: torch.dtype = torch.float16) -> str | None:
        shapes = (5, dim), (2, 7, dim), (2, dim_out, 7)
        return heads.unsupported_reason(*(torch.zeros(shape, dtype=dtype) for shape in shapes))

    assert reason() is None and reason(dim=512, dim_out=8) is None
    assert "float16 and bfloat16" in str(reason(dtype=torch.float32))
    assert "512 columns of x and 8 of y per head" in str(reason(dim=520)) and "got 64 and 9" in str(reason(dim_out=9))
    assert "16-byte boundaries" in str(reason(dim=63))


def test_which_version_runs() -> None:
    assert [pick_backend(name, 5000, possible=True) for name in ("auto", "triton", "cuda")] == [
        "cuda",
        "triton",
        "cuda",
    ]
    assert pick_backend("auto", 5000, possible=False) == pick_backend("auto", 256, possible=True) == "triton"


@pytest.mark.parametrize(("rows", "count"), [(205_000, 2), (5000, 4), (128, 1)])
def test_units_of_work(rows: int, count: int) -> None:
    config = heads_forward.pick_cuda_config(rows, 10, 1365, 132)
    assert (config.heads, config.cluster) == (count, 1 if rows <= 128 else 2)
    assert heads.shared_bytes(config) <= 227 << 10


# Activation, columns of x, columns of the hidden, CTAs of a cluster, FP16.
VARIANTS = (
    ("silu", 512, 1365, 2, 0),
    ("gelu", 512, 1408, 2, 1),
    ("gelu_tanh", 512, 1365, 1, 0),
    ("relu", 8, 7, 1, 1),
    ("gelu", 392, 192, 2, 0),
)


@pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(map(str, variant)))
def test_it_compiles_and_does_not_spill(variant: tuple) -> None:
    """A K-block of 64 columns of x is four wgmmas, in each of two main loops; 32 columns of the hidden are two mmas."""
    activation, dim, hidden, cluster, fp16 = variant
    steps, tail = -(-dim // 64), heads.tail_of(hidden)
    defines = (
        f"ACTIVATION={KNOWN.index(activation)}",
        f"FP16={fp16}",
        f"STEPS={steps}",
        f"TAIL={tail}",
        "STAGES=13",
        f"CLUSTER={cluster}",
    )
    usage = sass.inspect(nvrtc.compiled(SOURCE, "sm_90a", defines), "heads_mlp_forward")
    assert usage.spills == 0 and usage.stack == 0 and usage.early_arrivals == 0
    assert set(usage.early_own_reads) <= {"LDS.128"}  # reads of w2, which threads write
    assert usage.mma == {"HGMMA": 8 * steps, "HMMA": 8 + tail // 16}


@pytest.mark.parametrize(("hidden", "tail"), [(1, 32), (32, 32), (33, 64), (128, 128), (129, 32), (1365, 96)])
def test_columns_of_the_last_block(hidden: int, tail: int) -> None:
    assert heads.tail_of(hidden) == tail


@pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)
@pytest.mark.parametrize(
    "variant",
    [("silu", 512, 2, 0), ("silu", 512, 2, 1), ("gelu", 512, 2, 0), ("gelu_tanh", 512, 1, 0), ("relu", 8, 1, 1)],
    ids=lambda variant: "-".join(map(str, variant)),
)
def test_the_hiddens_gradient_compiles_and_does_not_spill(variant: tuple) -> None:
    """In addition to the wgmmas, a tile of 128 rows is 16 mmas for dh and 8 for dw2."""
    activation, dim, cluster, fp16 = variant
    steps = -(-dim // 64)
    defines = (
        f"ACTIVATION={KNOWN.index(activation)}",
        f"FP16={fp16}",
        f"STEPS={steps}",
        "STAGES=11",
        f"CLUSTER={cluster}",
    )
    usage = sass.inspect(nvrtc.compiled(SOURCE.with_name("heads_dhidden.cu"), "sm_90a", defines), "heads_dhidden")
    assert usage.spills == 0 and usage.stack == 0
    assert usage.early_arrivals == 0 and usage.early_own_reads == {}
    assert usage.mma == {"HGMMA": 4 * steps, "HMMA": 24}


@pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("cluster", [1, 2])
def test_the_products_compile_and_do_not_spill(cluster: int, dtype: torch.dtype) -> None:
    """A K-block of 64 is four wgmmas, in the main loops of both gradients. w1's is stored in vectors of 16 bytes."""
    config = heads_backward.ProductsConfig(1, True, cluster, beside=False, ahead=0, stages=4)
    cubin = nvrtc.compiled(SOURCE.with_name("heads_products.cu"), "sm_90a", heads_products.defines(config, dtype))
    usage = sass.inspect(cubin, "heads_products")
    assert usage.spills == 0 and usage.stack == 0
    assert usage.early_arrivals == 0 and usage.early_own_reads == {}
    assert usage.mma == {"HGMMA": 8} and usage.stores["STG.128"] == 16 and usage.wgmma_waits == 4


def test_host_and_device_agree() -> None:
    text = SOURCE.with_name("heads_loop.cuh").read_text(encoding="utf-8")
    text += SOURCE.with_name("heads.cuh").read_text(encoding="utf-8")
    found = re.search(
        r"BLOCK_M = (\d+), BLOCK_H = (\d+), BLOCK_K = (\d+), BLOCK_O = (\d+);\nconstexpr int CONSUMERS = (\d+)", text
    )
    slots = re.search(r"W2_SLOTS = (\d+)", text)
    assert found is not None and slots is not None
    *blocks, consumers = map(int, found.groups())
    assert blocks == [heads_forward.BLOCK, heads_forward.BLOCK, heads.BLOCK_K, heads_forward.MAX_OUT]
    assert 128 * (consumers + 1) == heads.THREADS
    assert int(slots[1]) * heads_forward.BLOCK * heads_forward.MAX_OUT * 2 == heads.W2_BYTES
    dy_slots = re.search(r"DY_SLOTS = (\d+)", SOURCE.with_name("heads_dhidden.cu").read_text(encoding="utf-8"))
    assert dy_slots is not None and int(dy_slots[1]) == heads_dhidden.DY_SLOTS
    assert heads_backward.BLOCK == heads_forward.BLOCK
    products = SOURCE.with_name("heads_products.cu").read_text(encoding="utf-8")
    found = re.search(r"BLOCK_M = (\d+), BLOCK_N = (\d+), BLOCK_K = (\d+);\nconstexpr int CONSUMERS = (\d+)", products)
    assert found is not None
    sizes = heads_backward.BLOCK, heads_backward.BLOCK_N, heads_products.BLOCK_K, heads.THREADS // 128 - 1
    assert tuple(map(int, found.groups())) == sizes and heads_backward.STEP == heads_products.BLOCK_K
    assert heads_products.shared_bytes(heads_backward.ProductsConfig(1, True, 2, False, 0, stages=4)) <= 227 << 10
    assert heads_dhidden.shared_bytes(heads_backward.CudaConfig(1, 2, stages=11)) <= 227 << 10
    activations = re.search(
        r"enum Activation { (.*) };", SOURCE.with_name("activation.cuh").read_text(encoding="utf-8")
    )
    assert activations is not None and tuple(activations[1].lower().split(", ")) == KNOWN


def _operands(
    rows: int, dim: int, hidden: int, dim_out: int = 3, count: int = 3, dtype: torch.dtype = torch.bfloat16
) -> Operands:
    shapes = {"x": (rows, dim), "w1": (count, hidden, dim), "w2": (count, dim_out, hidden)}
    scales = {"x": 1.0, "w1": dim**-0.5, "w2": hidden**-0.5}
    return {n: torch.randn(s, device="cuda").mul(scales[n]).to(dtype) for n, s in shapes.items()}


def _agrees(tensors: Operands, activation: str = "silu", backend: str = "cuda") -> None:
    """Checks the result against the reference in fp64: the error is at most twice PyTorch's in the same dtype. Memory
    that y does not fill holds NaN."""
    wide = {name: t.double() for name, t in tensors.items()}
    exact = heads_mlp_reference(**wide, activation=activation)
    eager = heads_mlp_reference(**tensors, activation=activation)
    poison = torch.full_like(eager, torch.nan)
    del poison  # y is then allocated in its memory
    y = heads_mlp(**tensors, activation=activation, backend=backend)
    assert y.dtype == eager.dtype and y.is_contiguous()
    floor = torch.finfo(y.dtype).eps * exact.abs().max().item()
    bound = max(2 * (eager - exact).abs().max().item(), floor)
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=bound)


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 127, 128, 129, 5000])
@pytest.mark.parametrize(("dim", "hidden", "dim_out"), [(512, 1365, 3), (8, 7, 1), (64, 1408, 8), (72, 1365, 3)])
def test_it_is_right(compiler: None, rows: int, dim: int, hidden: int, dim_out: int, dtype: torch.dtype) -> None:
    _agrees(_operands(rows, dim, hidden, dim_out, dtype=dtype))


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(compiler: None, activation: str, dtype: torch.dtype) -> None:
    _agrees(_operands(300, 200, 420, dtype=dtype), activation)


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("hidden", [1, 32, 33, 64, 65, 96, 97, 128, 129, 255, 256, 257])
def test_each_last_block(compiler: None, hidden: int) -> None:
    _agrees(_operands(200, 136, hidden))


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("dim", range(64, 513, 64))
def test_each_number_of_steps(compiler: None, dim: int) -> None:
    _agrees(_operands(257, dim, 300))


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("config", [(1, 1, 13), (1, 2, 9), (2, 1, 11), (3, 2, 13), (7, 2, 13)])
def test_configurations(compiler: None, config: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """More units of work than SMs. The last group of heads is smaller, and the last CTA of a cluster has no rows."""
    monkeypatch.setattr(heads_forward, "pick_cuda_config", lambda *problem: heads_forward.CudaConfig(*config))
    _agrees(_operands(20_010, 512, 400, count=7))


@pytest.mark.gpu(min_capability=(9, 0))
def test_repeats_agree_bit_for_bit(compiler: None) -> None:
    tensors = _operands(50_000, 512, 1365, count=10)
    first = heads_mlp(**tensors, backend="cuda")
    assert all(torch.equal(heads_mlp(**tensors, backend="cuda"), first) for _ in range(5))
    assert torch.equal(heads_mlp(**tensors), first)


@pytest.mark.gpu(min_capability=(9, 0))
def test_layouts(compiler: None) -> None:
    """Strides that TMA supports are read in place, and any strides of w2. Others use Triton, or raise."""
    tensors = _operands(2200, 128, 200)
    wide = torch.randn(3, 2200, 256, device="cuda", dtype=torch.bfloat16) * 128**-0.5
    for name, t in (("x", wide[1, :, 16:144]), ("w1", wide[:, 100:700:3, 64:192])):
        _agrees({**tensors, name: t})
    for w2 in (tensors["w2"].mT.contiguous().mT, tensors["w2"][:, :1].expand(3, 3, 200)):
        _agrees({**tensors, "w2": w2})
    for name, t in (
        ("x", wide[1, :, 3:131]),
        ("x", tensors["x"][:1].expand(2200, 128)),
        ("w1", tensors["w1"].mT.contiguous().mT),
        ("w1", tensors["w1"][:1].expand(3, 200, 128)),
    ):
        _agrees({**tensors, name: t}, backend="auto")
        with pytest.raises(RuntimeError, match='backend="cuda" cannot run here: it requires non-empty x and w1'):
            heads_mlp(**{**tensors, name: t}, backend="cuda")
    for more in ({"dim": 520}, {"dim_out": 9}):
        other = _operands(**{"rows": 2200, "dim": 128, "hidden": 200, **more})
        _agrees(other, backend="auto")
        with pytest.raises(RuntimeError, match="it supports at most 512 columns of x and 8 of y per head"):
            heads_mlp(**other, backend="cuda")


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_what_is_not_finite_stays_in_its_row(compiler: None, value: float) -> None:
    tensors = _operands(300, 128, 203)
    want = heads_mlp(**tensors, backend="cuda")
    tensors["x"][77] = value
    others = torch.arange(300, device="cuda") != 77
    y = heads_mlp(**tensors, backend="cuda")
    assert torch.equal(y[others], want[others]) and not y[77].isfinite().any()


@pytest.mark.gpu(min_capability=(9, 0))
def test_an_infinite_row_is_no_nan(compiler: None) -> None:
    """Columns past the last one of the hidden must not give 0 · inf = NaN."""
    tensors = {name: t.abs() for name, t in _operands(3, 128, 203).items()}
    tensors["x"][1, 5] = torch.inf
    assert heads_mlp(**tensors, activation="relu", backend="cuda")[1].isposinf().all()


@pytest.mark.gpu(min_capability=(9, 0))
def test_gradients_are_those_of_the_other_version(compiler: None) -> None:
    tensors = {name: t.requires_grad_() for name, t in _operands(3000, 128, 203).items()}
    leaves, dy = list(tensors.values()), torch.randn(3000, 3, 3, device="cuda").bfloat16()
    cuda, triton = (
        torch.autograd.grad(heads_mlp(**tensors, backend=backend), leaves, dy) for backend in ("cuda", "triton")
    )
    assert all(torch.equal(a, b) for a, b in zip(cuda, triton, strict=True))


def _gradients_agree(
    tensors: Operands,
    activation: str = "silu",
    dy: torch.Tensor | None = None,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> list[torch.Tensor]:
    """Checks gradients against the reference in fp64: the error is at most twice PyTorch's in the same dtype."""
    rows, heads_dim = tensors["x"].shape[0], tensors["w2"].shape[:2]
    if dy is None:
        dy = torch.randn(rows, *heads_dim, device="cuda").to(tensors["x"].dtype)
    found, pairs = [], list(zip(tensors.items(), needs, strict=True))
    for op, dtype in ((heads_mlp, dy.dtype), (heads_mlp_reference, dy.dtype), (heads_mlp_reference, torch.float64)):
        # detach() keeps the layouts.
        leaves = {n: t.detach().to(dtype).requires_grad_(need) for (n, t), need in pairs}
        y = op(**leaves, activation=activation)
        found.append(torch.autograd.grad(y, [t for t in leaves.values() if t.requires_grad], dy.to(dtype)))
    for ours, eager, exact in zip(*found, strict=True):
        assert ours.dtype == eager.dtype and ours.shape == eager.shape
        floor = torch.finfo(ours.dtype).eps * exact.abs().max().item()
        bound = max(2 * (eager.double() - exact).abs().max().item(), floor)
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=bound)
    return list(found[0])


@pytest.fixture
def always(compiler: None, monkeypatch: pytest.MonkeyPatch):
    """CUDA C++ computes the hidden's gradient for any number of rows."""
    monkeypatch.setattr(heads_backward, "pick_cuda", lambda rows, possible: possible)


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 127, 128, 129, 513, 5000])
@pytest.mark.parametrize(("dim", "hidden", "dim_out"), [(512, 1365, 3), (8, 7, 1), (64, 1408, 8), (72, 1365, 3)])
def test_gradients(always: None, rows: int, dim: int, hidden: int, dim_out: int, dtype: torch.dtype) -> None:
    _gradients_agree(_operands(rows, dim, hidden, dim_out, dtype=dtype))


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_activations(always: None, activation: str, dtype: torch.dtype) -> None:
    _gradients_agree(_operands(300, 200, 420, dtype=dtype), activation)


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("hidden", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257])
def test_gradients_of_each_last_block(always: None, hidden: int) -> None:
    """One head, which may have a single block. Three heads, whose last block may be alone in its cluster."""
    for count in (1, 3):
        _gradients_agree(_operands(200, 136, hidden, count=count))


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("dim", range(64, 513, 64))
def test_gradients_of_each_number_of_steps(always: None, dim: int) -> None:
    _gradients_agree(_operands(257, dim, 300), "gelu")


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("config", [(1, 1, 11), (3, 2, 11), (66, 2, 9), (5, 1, 10)])
def test_gradients_with_other_configurations(
    always: None, config: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More units of work than SMs; parts with a smaller last one, and a single part; three chunks."""
    monkeypatch.setattr(heads_backward, "pick_cuda_config", lambda *problem: heads_backward.CudaConfig(*config))
    _gradients_agree(_operands(20_010, 512, 400, count=7))


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize(
    "config",
    [
        heads_backward.ProductsConfig(7, True, cluster=1, beside=False, ahead=0, stages=4),
        heads_backward.ProductsConfig(1, True, cluster=1, beside=False, ahead=3, stages=3),
        heads_backward.ProductsConfig(3, True, cluster=2, beside=False, ahead=1, stages=4),
        heads_backward.ProductsConfig(2, True, cluster=2, beside=True, ahead=40, stages=2),
    ],
)
@pytest.mark.parametrize("rows", [301, 20_010])
def test_products_with_other_configurations(
    always: None, rows: int, config: heads_backward.ProductsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of x's gradient with a smaller last one, and a single part; one chunk, and three with sums in fp32."""
    monkeypatch.setattr(heads_backward, "pick_products", lambda *problem, possible: possible)
    monkeypatch.setattr(heads_backward, "pick_products_config", lambda *problem: config)
    _gradients_agree(_operands(rows, 512, 400, count=7))


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("rows", [200, 564, 2000])
def test_products_of_the_library(always: None, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a single chunk, and the hidden's gradient in CUDA C++, w1's gradient is rounded once."""
    monkeypatch.setattr(heads_backward, "pick_products", lambda *problem, possible: False)
    for hidden in (203, 208):
        _gradients_agree(_operands(rows, 128, hidden))


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize(
    "needs", [(True, False, False), (False, True, False), (False, False, True), (True, False, True)]
)
def test_gradients_that_are_needed(always: None, needs: tuple[bool, bool, bool]) -> None:
    tensors, dy = _operands(700, 128, 203), torch.randn(700, 3, 3, device="cuda").bfloat16()
    found, every = _gradients_agree(tensors, dy=dy, needs=needs), _gradients_agree(tensors, dy=dy)
    wanted = [grad for grad, need in zip(every, needs, strict=True) if need]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.gpu(min_capability=(9, 0))
def test_gradients_of_layouts(always: None) -> None:
    """Strides of x and w1 that TMA supports, and any of w2 and dy. Operands that TMA cannot read use Triton."""
    tensors = _operands(2200, 128, 200)
    wide = torch.randn(3, 2200, 256, device="cuda", dtype=torch.bfloat16) * 128**-0.5
    for name, t in (
        ("x", wide[1, :, 16:144]),
        ("w1", wide[:, 100:700:3, 64:192]),
        ("w2", tensors["w2"].mT.contiguous().mT),
        ("x", wide[1, :, 3:131]),
        ("w1", tensors["w1"].mT.contiguous().mT),
    ):
        _gradients_agree({**tensors, name: t})
    numbers = torch.randn(3, 3, 2300, 2, device="cuda").bfloat16()
    for dy in (
        numbers[..., 1].permute(2, 1, 0)[50:2250],
        numbers[0, :, 1:4, 0].expand(2200, 3, 3),
        numbers[:, :1, :2200, 0].permute(2, 0, 1).expand(2200, 3, 3),
    ):
        _gradients_agree(tensors, dy=dy)


@pytest.mark.gpu(min_capability=(9, 0))
def test_gradients_repeat_bit_for_bit(always: None) -> None:
    for rows in (564, 5000, 20_000):
        tensors = {n: t.requires_grad_() for n, t in _operands(rows, 512, 1365, count=10).items()}
        leaves, dy = list(tensors.values()), torch.randn(rows, 10, 3, device="cuda").bfloat16()
        first = torch.autograd.grad(heads_mlp(**tensors), leaves, dy)
        for _ in range(5):
            again = torch.autograd.grad(heads_mlp(**tensors), leaves, dy)
            assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("hidden", [7, 203, 1365])
def test_an_infinite_gradient_stays_in_its_row(always: None, hidden: int) -> None:
    """Columns past the last one of the hidden must not give 0 · inf = NaN, and rows past the last must not add to
    dw2."""
    tensors = {n: t.abs().requires_grad_() for n, t in _operands(301, 128, hidden).items()}
    dy = torch.ones(301, 3, 3, device="cuda", dtype=torch.bfloat16)
    dy[1] = torch.inf
    dx, dw1, dw2 = torch.autograd.grad(heads_mlp(**tensors, activation="relu"), list(tensors.values()), dy)
    others = torch.arange(301, device="cuda") != 1
    assert dx[others].isfinite().all() and dx[1].isposinf().all() and dw2.isposinf().all()
    assert not dw1.isnan().any()


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("rows", [1, 2, 127, 129, 301])
def test_an_infinite_weight_reaches_no_row_beyond_the_last(always: None, rows: int) -> None:
    """w2's gradient is a sum of infinities of one sign. Padding rows of a tile would add 0 · inf = NaN."""
    x, w1, w2 = (t.abs() for t in _operands(rows, 128, 203).values())
    w1[1, 150, 7] = torch.inf
    w2.requires_grad_()
    (dw2,) = torch.autograd.grad(heads_mlp(x, w1, w2, "relu").sum(), w2)
    assert dw2[1, :, 150].isposinf().all() and dw2.isfinite().sum() == dw2.numel() - 3


@pytest.mark.gpu(min_capability=(9, 0))
def test_the_gradient_in_a_graph(always: None) -> None:
    tensors = {n: t.requires_grad_() for n, t in _operands(1000, 128, 203).items()}
    leaves, dy = list(tensors.values()), torch.randn(1000, 3, 3, device="cuda").bfloat16()
    want = torch.autograd.grad(heads_mlp(**tensors), leaves, dy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(heads_mlp(**tensors), leaves, dy)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
