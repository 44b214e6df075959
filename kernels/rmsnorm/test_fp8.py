"""rmsnorm_fp8 compared with rmsnorm's result quantised in PyTorch, bit for bit where the sums of squares are exact."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from harness.correctness import addresses

from . import plans_fp8
from .op import rmsnorm
from .op_fp8 import rmsnorm_fp8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if DEVICE == "cuda" else (torch.float32, torch.float16)


def quantised(y: torch.Tensor, dtype: torch.dtype, group: int, pow2: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """y quantised by rows in groups of columns, as kernels/fp8 defines it, in fp32."""
    largest, (rows, dim) = torch.finfo(dtype).max, y.shape
    wide = F.pad(torch.where(y.isfinite(), y.float(), torch.nan), (0, -dim % group)).view(rows, -1, group)
    amax = torch.where(wide.isnan(), 0, wide.abs()).amax(2)
    if pow2:
        bits = (amax.view(torch.int32) + 0x1FFFFF) & 0x7F800000
        scale = (bits - ((8 if dtype == E4M3 else 15) << 23)).clamp(min=1 << 23).view(torch.float32)
    else:
        scale = (amax * (1 / largest)).clamp(min=2.0**-126)
    scale = torch.where(amax > 0, scale, 1.0)
    data = (wide * (1 / scale)[..., None]).clamp(-largest, largest).to(dtype)
    return data.view(rows, -1)[:, :dim].contiguous(), scale


def same(ours: torch.Tensor, want: torch.Tensor) -> None:
    """Asserts equal bits, where any NaN equals any other."""
    assert ours.shape == want.shape and ours.dtype == want.dtype and ours.is_contiguous()
    torch.testing.assert_close(ours.float(), want.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "dim", "options"),
    [
        (500, 256, {}),
        (3, 1000, dict(dtype=E5M2)),
        (7, 33, dict(scale_format="pow2")),
        (300, 3, {}),
        (3, 5120, dict(granularity="1x128")),
        (5, 200, dict(granularity="1x128", scale_format="e8m0", dtype=E5M2)),
        (130, 72, dict(granularity="1x128", transpose=True)),
        (128, 64, dict(granularity="1x128", transpose=True, scale_format="pow2")),
        (1, 1, dict(granularity="1x128", transpose=True)),
    ],
)
@pytest.mark.parametrize("added", [False, True])
def test_it_is_what_quantising_gives(rows: int, dim: int, options: dict, added: bool, dtype: torch.dtype) -> None:
    # Of integers the sum of squares is exact, and so the same in the different orders of the two kernels.
    x, weight = torch.randint(-8, 9, (rows, dim), device=DEVICE).to(dtype), torch.randn(dim, device=DEVICE)
    residual = torch.randint(-8, 9, (rows, dim), device=DEVICE).to(dtype) if added else None
    results = rmsnorm_fp8(x, weight, residual=residual, weight_offset=0.5, **options)
    y = rmsnorm(x, weight, residual=residual, weight_offset=0.5, backend="triton")
    if residual is not None:
        y, h = y
        assert torch.equal(results[-1], h)
        results = results[:-1]
    group = 128 if options.get("granularity") == "1x128" else dim
    pow2 = options.get("scale_format", "fp32") != "fp32"
    want = list(quantised(y, options.get("dtype", E4M3), group, pow2))
    if options.get("transpose"):
        want += quantised(y.t().contiguous(), options.get("dtype", E4M3), 128, pow2)
    if options.get("scale_format") == "e8m0":
        want = [t.to(torch.float8_e8m0fnu) if t.dtype == torch.float32 else t for t in want]
    assert len(results) == len(want)
    for ours, expected in zip(results, want, strict=True):
        same(ours, expected)


def test_squares_may_be_subnormal_without_eps() -> None:
    x = 1e-20 * torch.randn(3, 256, device=DEVICE).sign()
    data, scale = rmsnorm_fp8(x, eps=0.0)
    torch.testing.assert_close(data.float() * scale, 1e20 * x, rtol=1e-4, atol=0)


def test_what_is_not_finite_does_not_count_in_a_scale() -> None:
    x, weight = torch.randint(1, 9, (4, 256), device=DEVICE).float(), torch.ones(256, device=DEVICE)
    weight[3], weight[200], x[1, 7], x[2, 9] = torch.nan, torch.inf, torch.nan, torch.inf
    options = dict(granularity="1x128", transpose=True)
    data, scale, data_t, scale_t = rmsnorm_fp8(x, weight, **options)
    y = rmsnorm(x, weight)
    for ours, want in zip(
        (data, scale, data_t, scale_t), (*quantised(y, E4M3, 128), *quantised(y.t(), E4M3, 128)), strict=True
    ):
        same(ours, want)
    assert data.float()[:, [3, 200]].isnan().all() and scale.isfinite().all() and scale_t.isfinite().all()


def test_strides_leading_dimensions_and_nothing() -> None:
    wide, weight = torch.randint(-8, 9, (2, 3, 99), device=DEVICE).float(), torch.randn(128, device=DEVICE)[::2]
    x = wide[..., 5:69]
    for given in (x, x.transpose(0, 1)):
        data, scale, data_t, scale_t = rmsnorm_fp8(given, weight, granularity="1x128", transpose=True)
        flat = rmsnorm_fp8(given.reshape(6, 64).contiguous(), weight.clone(), granularity="1x128", transpose=True)
        for ours, want in zip((data.view(6, 64), scale.view(6, 1), data_t, scale_t), flat, strict=True):
            same(ours, want)
        assert data.shape == given.shape and scale.shape == (*given.shape[:-1], 1)
    empty = rmsnorm_fp8(x[:0], granularity="1x128", transpose=True)
    assert [t.shape for t in empty] == [(0, 3, 64), (0, 3, 1), (64, 0), (64, 0)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="compute-sanitizer does this on a GPU")
@pytest.mark.parametrize("shape", [(5, 37), (129, 130)])
def test_every_address_is_in_a_tensor(shape: tuple[int, int]) -> None:
    x, weight = torch.randn(shape), torch.randn(shape[1])
    with addresses.checked(x, weight):
        rmsnorm_fp8(x, weight, granularity="1x128", transpose=True)


@pytest.mark.slow
def test_compiled_gives_the_same_bits() -> None:
    x, weight = torch.randn(6, 200, device=DEVICE), torch.randn(200, device=DEVICE)
    options = dict(granularity="1x128", scale_format="e8m0", transpose=True)
    eager = rmsnorm_fp8(x, weight, residual=x, **options)
    compiled = torch.compile(rmsnorm_fp8, fullgraph=True, backend="aot_eager")(x, weight, residual=x, **options)
    assert len(eager) == 5
    for ours, want in zip(compiled, eager, strict=True):
        same(ours, want)


def test_the_op_keeps_the_rules_of_torch_library() -> None:
    x, weight = torch.randn(6, 200, device=DEVICE), torch.randn(200, device=DEVICE)
    op = getattr(torch.ops, f"{__package__.replace('.', '_')}").rmsnorm_fp8
    torch.library.opcheck(op, (x, weight, x, 1e-6, 0.0, True, "1x128", "fp32", True))
    torch.library.opcheck(op, (x, None, None, 1e-6, 0.0, False, "row", "e8m0", False))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(x=torch.arange(8)), TypeError, "x must be a tensor of float32"),
        (dict(x=torch.randn(2, 16385)), ValueError, "D <= 16384"),
        (dict(weight=torch.randn(7)), ValueError, "weight must be"),
        (dict(dtype=torch.float16), TypeError, "dtype must be float8_e4m3fn"),
        (dict(granularity="column"), ValueError, "granularity must be one of 'row', '1x128'"),
        (dict(scale_format="fp16"), ValueError, "scale_format must be"),
        (dict(transpose=True), ValueError, "transpose requires granularity '1x128'"),
        (dict(transpose=1), TypeError, "transpose must be a bool"),
        (dict(x=torch.randn(2, 8, requires_grad=True)), RuntimeError, "x must not require grad"),
    ],
)
def test_bad_input_raises_an_error_that_names_it(change, error, words) -> None:
    arguments = {"x": torch.randn(2, 8), **change}
    moved = {
        n: v.detach().to(DEVICE).requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v
        for n, v in arguments.items()
    }
    with pytest.raises(error, match=words):
        rmsnorm_fp8(**moved)


@pytest.mark.parametrize("dim", [1, 3, 64, 128, 5120])
def test_a_tile_fits_in_registers(dim: int, monkeypatch) -> None:
    """Rows are padded to 128 columns. With 2048 such rows a tile of one column did not compile within minutes."""
    options: dict = {}
    monkeypatch.setattr(plans_fp8, "Launch", lambda *_, **given: options.update(given))
    plans_fp8.quantise_plan(torch.ones(2, dim, device=DEVICE), None, None, 1e-6, 0.0, True, "row", "fp32", False)
    assert options["BLOCK_M"] * options["BLOCK_N"] <= 64 * 32 * options["num_warps"]
