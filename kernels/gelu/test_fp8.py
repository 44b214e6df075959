"""gelu_fp8 is bit-identical to quantising gelu's result in PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from . import op_fp8, plans_fp8
from .op import gelu
from .op_fp8 import gelu_fp8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if DEVICE == "cuda" else (torch.float32, torch.float16)


def quantised(y: torch.Tensor, dtype: torch.dtype, group: int, pow2: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises each row in groups of columns, as kernels/fp8 defines it, in fp32."""
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
    """Asserts equal bits; all NaNs count as equal."""
    assert ours.shape == want.shape and ours.dtype == want.dtype and ours.is_contiguous()
    torch.testing.assert_close(ours.float(), want.float(), rtol=0, atol=0, equal_nan=True)


def inputs(rows: int, dim: int, dtype: torch.dtype) -> list[dict]:
    x = torch.randn(rows, dim, device=DEVICE).to(dtype)
    return [dict(x=x), dict(x=2 * x, approximate="tanh")]


def expected(y: torch.Tensor, dtype: torch.dtype = E4M3, scale_format: str = "fp32", transpose: bool = False) -> list:
    want = []
    for values in (y, y.t().contiguous())[: 1 + transpose]:
        want += quantised(values, dtype, 128, scale_format != "fp32")
    return [t.to(torch.float8_e8m0fnu) if scale_format == "e8m0" and t.dtype == torch.float32 else t for t in want]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "dim", "options"),
    [
        (32, 256, {}),
        (3, 1000, dict(dtype=E5M2)),
        (37, 33, dict(scale_format="pow2")),
        (5, 200, dict(scale_format="e8m0", dtype=E5M2)),
        (64, 200, {}),  # whole tiles of rows, partial ones of columns
        (130, 200, dict(transpose=True)),
        (128, 200, dict(transpose=True)),
        (130, 256, dict(transpose=True)),
        (128, 128, dict(transpose=True, scale_format="pow2")),
        (1, 1, dict(transpose=True)),
    ],
)
def test_it_is_what_quantising_gives(rows: int, dim: int, options: dict, dtype: torch.dtype) -> None:
    for arguments in inputs(rows, dim, dtype):
        y = gelu(**arguments)
        results = gelu_fp8(**arguments, **options)
        want = expected(y, **options)
        assert len(results) == len(want)
        for ours, other in zip(results, want, strict=True):
            same(ours, other)


@pytest.mark.parametrize("dim", [256, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_does_not_count_in_a_scale(dtype: torch.dtype, dim: int) -> None:
    x = torch.randn(5, dim, device=DEVICE).to(dtype)
    x[0, 3], x[1, 200], x[2], x[3, :200], x[4, 200:] = torch.nan, torch.inf, torch.nan, torch.nan, torch.nan
    arguments = dict(x=x)
    results = gelu_fp8(**arguments, transpose=True)
    for ours, want in zip(results, expected(gelu(**arguments), transpose=True), strict=True):
        same(ours, want)
    assert results[0].float()[0, 3].isnan() and all(t.isfinite().all() for t in results[1::2])


def test_leading_dimensions_strides_and_nothing() -> None:
    x = torch.randn(2, 3, 99, device=DEVICE)[..., 5:69]
    for given in (x, x.transpose(0, 1)):
        results = gelu_fp8(given, transpose=True)
        flat = gelu_fp8(given.reshape(6, 64), transpose=True)
        same(results[0].view(6, 64), flat[0])
        for ours, want in zip(results[2:], flat[2:], strict=True):
            same(ours, want)
        assert results[0].shape == given.shape and results[1].shape == (*given.shape[:-1], 1)
    x = x[:0]
    assert [t.shape for t in gelu_fp8(x, transpose=True)] == [(0, 3, 64), (0, 3, 1), (64, 0), (64, 0)]


@pytest.mark.slow
def test_compiled_gives_the_same_bits() -> None:
    x = torch.randn(6, 200, device=DEVICE)
    options = dict(scale_format="e8m0", transpose=True)
    eager = gelu_fp8(x, **options)
    compiled = torch.compile(gelu_fp8, fullgraph=True, backend="aot_eager")(x, **options)
    for ours, want in zip(compiled, eager, strict=True):
        same(ours, want)


def test_the_op_keeps_the_rules_of_torch_library() -> None:
    x = torch.randn(6, 200, device=DEVICE)
    op = getattr(torch.ops, f"{__package__.replace('.', '_')}").gelu_fp8
    torch.library.opcheck(op, (x, "none", True, "fp32", True))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(x=torch.arange(8)), TypeError, "x must be a tensor of float32"),
        (dict(x=torch.tensor(1.0)), ValueError, "x must be"),
        (dict(approximate="erf"), ValueError, "approximate must be"),
        (dict(dtype=torch.float16), TypeError, "dtype must be float8_e4m3fn"),
        (dict(scale_format="fp16"), ValueError, "scale_format must be"),
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
        gelu_fp8(**moved)


@pytest.mark.parametrize("transposed", [False, True])
def test_sizes_that_tiles_cannot_count_are_errors(transposed) -> None:
    """Just below 2^31 the number of tiles, rounded up in 32 bits, would be negative."""
    x = torch.ones(1, 1, device=DEVICE).expand(plans_fp8.MAX_SIZE + 1, 1)
    x = x.t() if transposed else x
    with pytest.raises(ValueError, match=f"at most {2**31 - 512} rows and columns"):
        gelu_fp8(x)
    most = x[:-1] if not transposed else x[:, :-1]
    plans_fp8.quantise_plan(most, "none", True, "fp32", False)  # launches nothing


def test_a_plan_is_made_once(monkeypatch) -> None:
    made, quantise_plan = [], op_fp8.quantise_plan
    monkeypatch.setattr(op_fp8, "quantise_plan", lambda *given: made.append(given) or quantise_plan(*given))
    x = torch.randn(3, 77, device=DEVICE)
    for _ in range(3):
        gelu_fp8(x)
    assert len(made) == 1
