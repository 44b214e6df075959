"""Tests that are specific to fp8_matmul: every fp8 value, the four scaling modes, a layer's three GEMMs, and errors.
tests/test_specs.py derives the rest from SPEC. In the interpreter kernels decode the bytes themselves."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from . import configs, op, plans
from .bench import SPEC
from .kernel import _tile_of
from .op import fp8_matmul
from .reference import fp8_matmul_reference
from .scaling import LINE, ROW, SQUARE, TENSOR, blocks, scaling_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALINGS = pytest.mark.parametrize("scaling", [TENSOR, ROW, SQUARE, LINE])
FORMATS = pytest.mark.parametrize("dtype", [E4M3, E5M2])


def operands(m: int, k: int, n: int, scaling: str, dtype: torch.dtype = E4M3) -> tuple[torch.Tensor, ...]:
    """Random a, b and their scales."""
    shapes = {
        TENSOR: ((), ()),
        ROW: ((m,), (n, 1)),
        SQUARE: ((m, blocks(k)), (blocks(n), blocks(k))),
        LINE: ((m, blocks(k)), (n, blocks(k))),
    }[scaling]
    codes = (torch.randn(rows, k, device=DEVICE).mul(64).to(dtype) for rows in (m, n))
    return *codes, *(torch.rand(shape, device=DEVICE) + 0.5 for shape in shapes)


def agrees(ours: torch.Tensor, *arguments, rtol: float = 2e-3) -> None:
    """Checks the result against the reference in fp64, with NaN and infinities in the same places. Hopper's tensor
    cores accumulate a K-block of 128 with 14 bits, so that the error is relative to the largest result."""
    want = fp8_matmul_reference(*(t.double() if isinstance(t, torch.Tensor) else t for t in arguments))
    for test in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(test(ours), test(want))
    ours, want = (torch.where(want.isfinite(), t.double(), 0.0) for t in (ours, want))
    limit = rtol * want.abs().max().item() if want.numel() else 0.0
    torch.testing.assert_close(ours, want, rtol=0, atol=limit + 1e-6)


@FORMATS
def test_every_code_counts_as_what_it_is(dtype: torch.dtype) -> None:
    """Multiplication by the identity returns a exactly."""
    codes = torch.arange(256, device=DEVICE).to(torch.uint8).view(dtype)
    finite = codes.double().isfinite()
    usable = torch.where(finite, codes.view(torch.uint8), 0).view(16, 16).view(dtype)
    one = torch.tensor(1.0, device=DEVICE)
    y = fp8_matmul(usable, torch.eye(16, device=DEVICE).to(dtype), one, one, out_dtype=torch.float32)
    assert torch.equal(y, usable.float())
    # A value that is not finite makes its row NaN, since 0 times it is NaN; other rows are unaffected.
    spoilt = usable.clone().view(torch.uint8)
    spoilt[3, 5] = 0x7F if dtype == E4M3 else 0x7C
    y = fp8_matmul(spoilt.view(dtype), torch.eye(16, device=DEVICE).to(dtype), one, one, out_dtype=torch.float32)
    agrees(y, spoilt.view(dtype), torch.eye(16, device=DEVICE), one, one)
    assert y[3].isnan().sum() >= 15 and y[[0, 1, 2, 4, 5, 15]].isfinite().all()


@SCALINGS
def test_every_pair_of_formats(scaling: str) -> None:
    for first, second in itertools.product((E4M3, E5M2), repeat=2):
        a, _, scale_a, scale_b = operands(35, 176, 48, scaling)
        b = torch.randn(48, 176, device=DEVICE).to(second)
        a = a.float().to(first)
        agrees(fp8_matmul(a, b, scale_a, scale_b, out_dtype=torch.float32), a, b, scale_a, scale_b)


@SCALINGS
def test_scales_of_eight_bits(scaling: str) -> None:
    """UE8M0 scales give the same bits as fp32 scales of the same values in Triton, the only version that supports them.
    By default fp32 scales may use CUDA C++, which adds in another order."""
    a, b, *scales = operands(21, 272, 144, scaling)
    bytes_ = [torch.randint(118, 130, s.shape, device=DEVICE).to(torch.uint8) for s in scales]
    small = [s.view(torch.float8_e8m0fnu) for s in bytes_]
    wide = [(s.int() << 23).view(torch.float32) for s in bytes_]
    assert torch.equal(fp8_matmul(a, b, *small, backend="triton"), fp8_matmul(a, b, *wide, backend="triton"))
    for given in (small, wide):
        agrees(fp8_matmul(a, b, *given, out_dtype=torch.float32), a, b, *wide)


@pytest.mark.parametrize(("code", "value"), [(0, 2.0**-127), (1, 2.0**-126), (254, 2.0**127), (255, float("nan"))])
def test_the_ends_of_e8m0(code: int, value: float) -> None:
    scale = torch.tensor(code, dtype=torch.uint8, device=DEVICE).view(torch.float8_e8m0fnu)
    a = torch.ones(1, 16, device=DEVICE).to(E4M3)
    other = torch.tensor(1.0 if value != value else min(1.0, 2.0**100 / value), device=DEVICE)
    y = fp8_matmul(a, a.expand(16, 16).contiguous(), scale, other, out_dtype=torch.float32)
    assert torch.equal(y.isnan(), torch.full_like(y, value != value).bool())
    if value == value and DEVICE == "cpu":  # a GPU may flush the subnormal scale to zero
        assert (y == 16 * value * other.item()).all()


def test_scales_column_by_column_and_a_bias_at_a_stride() -> None:
    a, b, scale_a, scale_b = operands(21, 272, 144, LINE)
    columns = torch.empty(3, 24, device=DEVICE).t()[:21].copy_(scale_a)
    bias = torch.randn(288, device=DEVICE)[::2]
    want = fp8_matmul(a, b, scale_a, scale_b, bias.contiguous())
    assert torch.equal(fp8_matmul(a, b, columns, scale_b.t().contiguous().t(), bias), want)


def test_one_block_of_k_may_be_called_either() -> None:
    """With a single K-block, [M, 1] and [N, 1] are scales both of rows and of 1x128 elements: the two are
    equivalent."""
    a, b, scale_a, scale_b = operands(5, 96, 32, LINE)
    assert torch.equal(fp8_matmul(a, b, scale_a, scale_b), fp8_matmul(a, b, scale_a[:, 0], scale_b[:, 0]))
    assert scaling_of(5, 32, 96, (5, 1), (32, 1)) == ROW
    assert scaling_of(5, 32, 96, (5, 1), (1, 1)) == SQUARE
    assert scaling_of(5, 32, 256, (5, 2), (32, 2)) == LINE
    assert scaling_of(5, 32, 256, (5, 1), (32, 2)) is None
    assert scaling_of(5, 32, 256, (), (32,)) is None


def quantised(x: torch.Tensor, height: int, dtype: torch.dtype = E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of `height` x 128, as `ridgeline.fp8` has them."""
    rows, dim = x.shape
    padded = torch.nn.functional.pad(x, (0, -dim % 128, 0, -rows % height))
    tiles = padded.view(-1, height, blocks(dim), 128)
    scale = tiles.abs().amax((1, 3)) / torch.finfo(dtype).max
    data = (tiles / scale[:, None, :, None]).view(padded.shape)[:rows, :dim].to(dtype)
    return data.contiguous(), scale


def test_tensors_that_are_not_plain_have_a_plan_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands(21, 272, 144, ROW)
    want = fp8_matmul(*given, out_dtype=torch.float32)
    monkeypatch.setattr(op, "lean", lambda *_: False)
    assert torch.equal(fp8_matmul(*given, out_dtype=torch.float32), want)


def test_the_three_products_of_a_layer() -> None:
    """Forward, the gradient of x and that of the weight of a linear layer, as the README shows them, against fp32."""
    x, w = torch.randn(64, 272, device=DEVICE), torch.randn(144, 272, device=DEVICE) / 16
    dy = torch.randn(64, 144, device=DEVICE)
    out = {"out_dtype": torch.float32}
    x_q, w_q, dy_q = quantised(x, 1), quantised(w, 128), quantised(dy, 1)
    w_t = w_q[0].t().contiguous(), w_q[1].t()  # the same blocks
    x_t, dy_t = quantised(x.t(), 1), quantised(dy.t(), 1)
    y = fp8_matmul(x_q[0], w_q[0], x_q[1], w_q[1], **out)
    dx = fp8_matmul(dy_q[0], w_t[0], dy_q[1], w_t[1], **out)
    dw = fp8_matmul(dy_t[0], x_t[0], dy_t[1], x_t[1], **out)
    for ours, want in ((y, x @ w.t()), (dx, dy @ w), (dw, dy.t() @ x)):
        distance = 1 - 2 * (ours * want).sum() / (ours.square().sum() + want.square().sum())
        assert ours.shape == want.shape and distance < 2e-3


def test_rows_that_are_not_on_boundaries_are_copied_and_the_others_are_not() -> None:
    codes = torch.zeros(20, 96, device=DEVICE).to(E4M3)
    assert plans._in_place(codes) and plans._in_place(codes[:, 16:64]) and plans._in_place(codes[::2])
    for odd in (codes[:, 1:65], codes[:, :95], codes[:, ::2], codes.t(), codes[:1].expand(20, 96)):
        assert not plans._in_place(odd) or odd.shape[1] % 16
    a, b, scale_a, scale_b = operands(20, 64, 32, ROW)
    want = fp8_matmul(a, b, scale_a, scale_b)
    wide = torch.zeros(20, 99, device=DEVICE).to(E4M3)
    wide[:, 3:67] = a
    assert torch.equal(fp8_matmul(wide[:, 3:67], b.t().contiguous().t(), scale_a, scale_b), want)


@pytest.mark.parametrize("grad", ["a", "b", "scale_a", "scale_b", "bias"])
def test_a_gradient_is_refused_and_never_zero(grad: str) -> None:
    inputs = dict(zip(("a", "b", "scale_a", "scale_b"), operands(3, 32, 16, ROW), strict=True))
    inputs["bias"] = torch.randn(16, device=DEVICE)
    inputs[grad] = inputs[grad].requires_grad_()
    with pytest.raises(RuntimeError, match=f"{grad} must not require grad"):
        fp8_matmul(**inputs)
    with torch.no_grad():
        assert not fp8_matmul(**inputs).requires_grad


BAD = [
    (dict(a=torch.ones(3, 32)), TypeError, "a must be a tensor of float8_e4m3fn or float8_e5m2, got torch.float32"),
    (dict(b=torch.ones(16, 32).half()), TypeError, "b must be a tensor of float8"),
    (dict(a=torch.ones(2, 3, 32).to(E4M3)), ValueError, r"a must be \[M, K\] with K a multiple of 16"),
    (dict(a=torch.ones(3, 24).to(E4M3)), ValueError, "a must be .* multiple of 16"),
    (dict(b=torch.ones(16, 48).to(E4M3)), ValueError, r"b must be \[N, 32\] like a"),
    (dict(b=torch.ones(15, 32).to(E4M3)), ValueError, "b must be .* N a multiple of 16"),
    (dict(scale_a=torch.ones(3).half()), TypeError, "scale_a must be a tensor of float32 or float8_e8m0fnu"),
    (dict(scale_b=1.0), TypeError, "scale_b must be a tensor of float32 or float8_e8m0fnu, got float"),
    (
        dict(scale_a=torch.ones(())),
        ValueError,
        r"scale_a and scale_b must have one of these pairs.*got \[\] and \[16\]",
    ),
    (dict(bias=[1.0] * 16), TypeError, "bias must be a tensor of float32.*, got list"),
    (dict(bias=torch.ones(16).to(E4M3)), TypeError, "bias must be a tensor of float32"),
    (dict(bias=torch.ones(17)), ValueError, r"bias must be \[16\], got \[17\]"),
    (dict(out_dtype=torch.float64), TypeError, "out_dtype must be"),
    (dict(fast_accum=1), TypeError, "fast_accum must be a bool"),
    (dict(backend="ptx"), ValueError, "backend must be one of auto, triton, cuda"),
]


def test_sizes_that_tiles_cannot_count_are_errors() -> None:
    """Also K just below 2^31: the number of K-blocks, rounded up in 32 bits, would be negative."""
    code, scale = torch.ones(1, 1, device=DEVICE).to(E4M3), torch.ones((), device=DEVICE)
    few = code.expand(16, 16)
    for name, a, b in (
        ("a", code.expand(2**31 - 511, 16), few),
        ("a", code.expand(16, 2**31 - 16), code.expand(16, 2**31 - 16)),
        ("b", few, code.expand(2**31 - 496, 16)),
    ):
        with pytest.raises(ValueError, match=f"{name} must be .* at most {2**31 - 512}"):
            fp8_matmul(a, b, scale, scale)


@pytest.mark.parametrize(("change", "error", "words"), BAD)
def test_bad_input_raises_an_error_that_names_it(change, error, words) -> None:
    good = dict(zip(("a", "b", "scale_a", "scale_b"), operands(3, 32, 16, ROW), strict=True))
    good["scale_b"] = good["scale_b"][:, 0]
    changed = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in change.items()}
    with pytest.raises(error, match=words):
        fp8_matmul(**{**good, **changed})


def test_fast_accum_is_for_scales_outside_the_sum() -> None:
    a, b, *scales = operands(9, 160, 32, ROW)
    agrees(fp8_matmul(a, b, *scales, out_dtype=torch.float32, fast_accum=True), a, b, *scales, rtol=1e-2)
    a, b, *scales = operands(9, 160, 32, SQUARE)
    with pytest.raises(ValueError, match="fast_accum must be False with block scales"):
        fp8_matmul(a, b, *scales, fast_accum=True)


def test_an_older_gpu_is_an_error_that_names_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnAGpu(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(op, "capability", lambda tensor: (8, 0))
    a, b, *scales = operands(3, 32, 16, ROW)
    with pytest.raises(RuntimeError, match=r"a must be on a GPU of compute capability 8\.9 or later, got 8\.0"):
        op._check(a.as_subclass(OnAGpu), b, *scales, None, torch.bfloat16, False, "auto")


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
def test_every_size_has_a_configuration(capability: tuple[int, int]) -> None:
    sizes = itertools.product((1, 16, 17, 64, 300, 70000), (16, 112, 8192), (0, 16, 144, 8192), (False, True))
    for (rows, cols, depth, blocked), fast in itertools.product(sizes, (False, True)):
        config = configs.pick_config(rows, cols, depth, blocked, fast and not blocked, capability)
        assert config.block_m * config.block_n <= 64 * 32 * config.num_warps * (1 + fast)
        assert config.block_k >= 32
        stage = (config.block_m + config.block_n) * config.block_k
        if capability in ((8, 9), (12, 0)):  # without wgmma Triton keeps one stage less in shared memory
            assert stage * (config.num_stages - 1) <= 99 << 10
        else:
            assert stage * config.num_stages <= 227 << 10
        if blocked:  # a K-block has one scale, and so has a tile's 128x128 block
            assert config.block_k == 128 or config.block_k >= depth
            assert 128 % config.block_n == 0


def test_a_copy_works_under_another_name(tmp_path: Path) -> None:
    """Calls the public function directly, because SPEC's callables take bytes."""
    folder = Path(op.__file__).parent
    ignored = shutil.ignore_patterns("bench.py", "test_*.py", "__pycache__")
    shutil.copytree(folder, tmp_path / "elsewhere" / "copied", ignore=ignored)
    script = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from elsewhere.copied import fp8_matmul
from elsewhere.copied.reference import fp8_matmul_reference
device = "cuda" if torch.cuda.is_available() else "cpu"
a, b = (torch.randn(n, 160, device=device).to(torch.float8_e4m3fn) for n in (9, 32))
scales = torch.rand(9, 2, device=device), torch.rand(1, 2, device=device)
ours, want = (f(a, b, *scales, out_dtype=torch.float32) for f in (fp8_matmul, fp8_matmul_reference))
torch.testing.assert_close(ours, want, rtol=1e-2, atol=1e-2)
"""
    environment = os.environ | ({} if DEVICE == "cuda" else {"TRITON_INTERPRET": "1"})
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_it_compiles_for_ada() -> None:
    """sm_89 is supported but in no table: SPEC.compile_targets are the columns of docs/SUPPORT.md for every kernel."""
    script = """
from harness.compiling import ahead
from kernels.fp8_matmul.bench import SPEC
cases = [case for case in SPEC.cases if case.bench]
outcome = ahead.compile_spec(SPEC, (8, 9), cases, ("fwd",), ("auto",))
assert not outcome.failures, outcome.failures
products = [row for row in outcome.rows if row["jit"].startswith("_fp8_matmul")]  # others quantise operands
assert products and all("QMMA" in row["mma"] for row in products)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(op.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_cases_name_the_sizes_that_they_have() -> None:
    for case in SPEC.cases:
        inputs = SPEC.make_inputs(case, "meta", None)
        m, k, n = inputs["a"].shape[0], inputs["a"].shape[1], inputs["b"].shape[0]
        assert case.name.startswith(f"{m}x{k}x{n}-")


def test_a_block_is_of_128():
    assert [blocks(size) for size in (0, 1, 128, 129, 256, 257)] == [0, 1, 1, 2, 2, 3]


@triton.jit
def _count_tiles(counts_ptr, rows, cols, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    tile_m, tile_n = _tile_of(rows, cols, GROUP_M, BLOCK_M, BLOCK_N)
    tl.atomic_add(counts_ptr + tile_m * tl.cdiv(cols, BLOCK_N) + tile_n, 1)


@pytest.mark.parametrize(("down", "across"), [(1, 1), (3, 5), (8, 3), (19, 4)])
def test_every_tile_has_one_cta(down, across):
    """Also if the number of row tiles is not a multiple of GROUP_M."""
    counts = torch.zeros(down, across, dtype=torch.int32, device=DEVICE)
    _count_tiles[(down * across,)](counts, 16 * down - 3, 32 * across - 5, GROUP_M=8, BLOCK_M=16, BLOCK_N=32)
    assert counts.eq(1).all()
