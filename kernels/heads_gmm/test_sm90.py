"""Tests of the version for Hopper (sm90/): compilation, and on a GPU the results. The tests of heads_mlp, which has the
same parts, cover the supported operands."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.compiling import nvrtc, sass

from .activation import ACTIVATIONS as KNOWN
from .configs import heads_backward, heads_forward, pick_backend
from .op import ACTIVATIONS, heads_gmm
from .reference import heads_gmm_reference
from .sm90 import cuda_driver, heads

SOURCE = Path(heads.__file__).with_name("forward.cu")
HALVES = torch.bfloat16, torch.float16
Operands = dict[str, torch.Tensor]


@pytest.fixture
def compiler() -> None:
    if reason := cuda_driver.no_compiler():
        pytest.skip(reason)


def test_where_it_cannot_run() -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    tensors = torch.zeros(2, 8), torch.zeros(3, 8, 8), torch.zeros(3, 3, 8), torch.zeros(2)
    with pytest.raises(RuntimeError, match='backend="cuda" cannot run here: it needs a GPU of compute capability 9.0'):
        heads_gmm(*tensors, backend="cuda")
    with pytest.raises(ValueError, match="backend must be one of auto, triton, cuda, got 'fast'"):
        heads_gmm(*tensors, backend="fast")


def test_which_version_runs() -> None:
    assert [pick_backend(name, 5000, possible=True) for name in ("auto", "triton", "cuda")] == [
        "cuda",
        "triton",
        "cuda",
    ]
    assert pick_backend("auto", 5000, possible=False) == pick_backend("auto", 256, possible=True) == "triton"


# Activation, columns of x, columns of the hidden, CTAs of a cluster, FP16.
VARIANTS = (
    ("silu", 512, 1365, 2, 0),
    ("gelu", 512, 1408, 2, 1),
    ("gelu_tanh", 512, 1365, 1, 0),
    ("relu", 8, 7, 1, 1),
)


@pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(map(str, variant)))
def test_it_compiles_and_does_not_spill(variant: tuple) -> None:
    """A K-block of 64 columns of x is four wgmmas, in each of two main loops; 32 columns of the hidden are two mmas.

    NVRTC 13.0 spills two registers of the exact GELU in fp16, which 13.5 does not.
    """
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
    usage = sass.inspect(nvrtc.compiled(SOURCE, "sm_90a", defines), "heads_gmm_forward")
    spills = 16 if (activation, fp16, nvrtc.version()) == ("gelu", 1, (13, 0)) else 0
    assert usage.spills <= spills and usage.stack <= spills / 2 and usage.early_arrivals == 0
    assert set(usage.early_own_reads) <= {"LDS.128"}  # reads of w2, which threads write
    assert usage.mma == {"HGMMA": 8 * steps, "HMMA": 8 + tail // 16}


def _operands(rows: int, dim: int, hidden: int, count: int = 3, dtype: torch.dtype = torch.bfloat16) -> Operands:
    shapes = {"x": (rows, dim), "w1": (count, hidden, dim), "w2": (count, 3, hidden), "y": (rows,), "bias": (count, 3)}
    scales = {"x": 1.0, "w1": dim**-0.5, "w2": hidden**-0.5, "y": 1.0, "bias": 0.1}
    generator = torch.Generator().manual_seed(0)  # on the CPU: the same values for every GPU
    return {n: torch.randn(s, generator=generator).mul(scales[n]).to("cuda", dtype) for n, s in shapes.items()}


def _agrees(tensors: Operands, activation: str = "silu", reduction: str = "none", **options: str) -> None:
    """Checks the loss against the reference in fp64: the error is at most twice PyTorch's in the same dtype."""
    exact = heads_gmm_reference(*(t.double() for t in tensors.values()), activation, reduction)
    eager = heads_gmm_reference(*tensors.values(), activation, reduction).double()
    loss = heads_gmm(*tensors.values(), activation, reduction, **{"backend": "cuda", **options})
    assert loss.dtype == torch.float32
    eps = torch.finfo(tensors["x"].dtype).eps
    bound = max(2 * (eager - exact).abs().max().item(), eps * exact.abs().max().item())
    torch.testing.assert_close(loss.double(), exact, rtol=0, atol=bound)


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 127, 128, 129, 5000])
@pytest.mark.parametrize(("dim", "hidden"), [(512, 1365), (8, 7), (64, 1408), (72, 1365)])
def test_it_is_right(compiler: None, rows: int, dim: int, hidden: int, dtype: torch.dtype) -> None:
    _agrees(_operands(rows, dim, hidden, dtype=dtype))


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_options(compiler: None, activation: str, reduction: str) -> None:
    _agrees(_operands(300, 200, 420), activation, reduction)


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("config", [(1, 1, 13), (2, 2, 13), (5, 2, 11), (3, 1, 9)])
def test_groups_of_heads_are_joined(
    compiler: None, config: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One head per group, groups with a smaller last one, and all heads in one group; more units of work than SMs."""
    monkeypatch.setattr(heads_forward, "pick_cuda_config", lambda *problem: heads_forward.CudaConfig(*config))
    _agrees(_operands(20_010, 512, 400, count=5))


@pytest.mark.gpu(min_capability=(9, 0))
def test_parameters_and_gradients(compiler: None) -> None:
    """The saved parameters give the same gradients as Triton's; without a bias, and with y or the bias in fp32."""
    tensors = _operands(3000, 128, 203)
    for changed in ({}, {"bias": None}, {"y": tensors["y"].float()}, {"bias": tensors["bias"].float()}):
        given = {n: t if t is None else t.detach().requires_grad_() for n, t in {**tensors, **changed}.items()}
        leaves = [t for t in given.values() if t is not None]
        for save in ("parameters", "input"):
            found = []
            for backend in ("cuda", "triton"):
                loss = heads_gmm(**given, save=save, backend=backend)
                found.append((loss, *torch.autograd.grad(loss, leaves)))
            for ours, theirs in zip(*found, strict=True):
                atol = 1e-2 * theirs.abs().max().item()
                torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


@pytest.fixture
def always(compiler: None, monkeypatch: pytest.MonkeyPatch):
    """CUDA C++ computes the hidden's gradient, and recomputes the parameters, for any number of rows."""
    monkeypatch.setattr(heads_backward, "pick_cuda", lambda rows, possible: possible)


def _moved_by_rounding(leaves: list[torch.Tensor], activation: str, dloss: torch.Tensor, eps: float) -> list[float]:
    """The sensitivity of each gradient, in fp64: the largest change of any element, over 16 random perturbations of the
    operands by at most half an epsilon."""
    generator = torch.Generator().manual_seed(1)

    def gradients(change: float) -> tuple[torch.Tensor, ...]:
        moved = [
            (t * (1 + change * (torch.rand(t.shape, generator=generator).to(t) - 0.5))).requires_grad_() for t in leaves
        ]
        return torch.autograd.grad(heads_gmm_reference(*moved, activation, "none"), moved, dloss)

    most, exact = [0.0] * len(leaves), gradients(0.0)
    for _ in range(16):
        changes = [(a - b).abs().max().item() for a, b in zip(gradients(eps), exact, strict=True)]
        most = [max(pair) for pair in zip(most, changes, strict=True)]
    return most


def _gradients_agree(tensors: Operands, activation: str = "silu", **options: str) -> list[tuple[torch.Tensor, ...]]:
    """Checks gradients against the reference in fp64. The error is at most twice PyTorch's in the same dtype, or twice
    the effect of rounding the operands on the reference. Returns the gradients: ours, PyTorch's and in fp64.

    PyTorch's largest error alone is not a sound bound. The gradient of a row is proportional to z² / sigma. So one row
    of thousands, with a small sigma and a distant y, often has the largest error of both sides. In that row all
    elements have the same relative error, from the rounding of its z and sigma. Twice PyTorch's error is then a single
    random number, as likely near 0 as near any other value. Of 40 random operands of test_gradients_of_chunks, with the
    kernels' rounding written out in PyTorch, two had errors at or above that bound, by up to 1.7 times. The largest of
    16 more draws is not near 0: no error was more than 0.6 of the bound, with six.
    """
    rows = tensors["x"].shape[0]
    dloss = torch.randn(rows, generator=torch.Generator().manual_seed(2)).cuda()
    found = []
    for op, dtype, more in (
        (heads_gmm, None, options),
        (heads_gmm_reference, None, {}),
        (heads_gmm_reference, torch.float64, {}),
    ):
        leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors.values()]
        loss = op(*leaves, activation, "none", **more)
        found.append(torch.autograd.grad(loss, leaves, dloss.to(loss.dtype)))
    eps = torch.finfo(tensors["x"].dtype).eps
    moved = _moved_by_rounding([t.double() for t in tensors.values()], activation, dloss.double(), eps)
    for ours, eager, exact, change in zip(*found, moved, strict=True):
        assert ours.dtype == eager.dtype and ours.shape == eager.shape
        floor = torch.finfo(ours.dtype).eps * exact.abs().max().item()
        bound = max(2 * (eager.double() - exact).abs().max().item(), 2 * change, floor)
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=bound)
    return found


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("save", ["input", "parameters"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 127, 513, 5000, heads_backward.CHUNK_ROWS + 1])
def test_gradients(always: None, rows: int, dtype: torch.dtype, save: str) -> None:
    _gradients_agree(_operands(rows, 512, 1365, dtype=dtype), save=save)


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("save", ["input", "parameters"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_chunks(always: None, activation: str, save: str) -> None:
    """Three chunks, the last smaller; y is a column of another tensor. In each chunk the median error of dx and dy is
    at most twice PyTorch's: a median over thousands of rows, unlike the largest error, hardly varies between random
    inputs."""
    y = torch.randn(20_000, 3, generator=torch.Generator().manual_seed(3)).cuda().bfloat16()[:, 1]
    found = _gradients_agree({**_operands(20_000, 64, 203), "y": y}, activation, save=save)
    for index in (0, 3):
        ours, eager, exact = (gradients[index] for gradients in found)
        for chunk in torch.arange(20_000, device="cuda").split(heads_backward.CHUNK_ROWS):
            error, allowed = ((t[chunk].double() - exact[chunk]).abs().median() for t in (ours, eager))
            assert error <= 2 * allowed


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("save", ["input", "parameters"])
def test_gradients_repeat_bit_for_bit(always: None, save: str) -> None:
    tensors = {n: t.requires_grad_() for n, t in _operands(20_000, 512, 1365, count=10).items()}
    leaves = list(tensors.values())
    first = torch.autograd.grad(heads_gmm(**tensors, save=save), leaves)
    for _ in range(5):
        again = torch.autograd.grad(heads_gmm(**tensors, save=save), leaves)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.gpu(min_capability=(9, 0))
def test_repeats_agree_bit_for_bit(compiler: None) -> None:
    tensors = _operands(50_000, 512, 1365, count=10)
    first = heads_gmm(**tensors, reduction="none", backend="cuda")
    assert all(torch.equal(heads_gmm(**tensors, reduction="none", backend="cuda"), first) for _ in range(5))
    assert torch.equal(heads_gmm(**tensors, reduction="none"), first)


@pytest.mark.gpu(min_capability=(9, 0))
def test_layouts(compiler: None) -> None:
    """y and bias with any strides. Operands that TMA cannot read use Triton, or raise."""
    tensors = _operands(2200, 128, 200)
    _agrees({**tensors, "y": torch.randn(2200, 3, device="cuda").bfloat16()[:, 1]})
    _agrees({**tensors, "y": tensors["y"][:1].expand(2200), "bias": tensors["bias"].mT.contiguous().mT})
    turned = {**tensors, "w1": tensors["w1"].mT.contiguous().mT}
    _agrees(turned, backend="auto")
    with pytest.raises(RuntimeError, match='backend="cuda" cannot run here: it requires non-empty x and w1'):
        heads_gmm(**turned, backend="cuda")


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_what_is_not_finite_stays_in_its_row(compiler: None, value: float) -> None:
    tensors = _operands(300, 128, 203)
    want = heads_gmm(**tensors, reduction="none", backend="cuda")
    tensors["x"][77] = value
    others = torch.arange(300, device="cuda") != 77
    loss = heads_gmm(**tensors, reduction="none", backend="cuda")
    assert torch.equal(loss[others], want[others]) and loss[77].isnan()


@pytest.mark.gpu(min_capability=(9, 0))
def test_a_component_that_is_off(compiler: None) -> None:
    """A logit of −inf in the first head, before any other component, in the last, and in all."""
    tensors = _operands(300, 128, 203)
    for off in ([0], [2], [0, 2]):
        bias, kept = tensors["bias"].clone(), [head for head in range(3) if head not in off]
        bias[off, 0] = -torch.inf
        loss = heads_gmm(**{**tensors, "bias": bias}, reduction="none", backend="cuda")
        few = {name: tensors[name][kept] for name in ("w1", "w2", "bias")}
        torch.testing.assert_close(loss, heads_gmm(**{**tensors, **few}, reduction="none", backend="cuda"))
    tensors["bias"][:, 0] = -torch.inf
    assert heads_gmm(**tensors, reduction="none", backend="cuda").isnan().all()
