"""swiglu_fp8 is bit-identical to quantising swiglu's result in PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from harness.correctness import addresses

from . import configs, plans_fp8
from .op import swiglu
from .op_fp8 import swiglu_fp8

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
    """Separate tensors, and a packed tensor, whose halves may be unaligned."""
    gate, up = (torch.randn(rows, dim, device=DEVICE).to(dtype) for _ in range(2))
    return [dict(gate=gate, up=up, activation="gelu"), dict(gate=torch.cat([gate, up], 1))]


def expected(
    y: torch.Tensor,
    dtype: torch.dtype = E4M3,
    scale_format: str = "fp32",
    transpose: bool = False,
    granularity: str = "1x128",
) -> list:
    want = []
    for values in (y, y.t().contiguous())[: 1 + transpose]:
        want += quantised(values, dtype, 128 if granularity == "1x128" else y.shape[1], scale_format != "fp32")
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
        (3, 2049, dict(granularity="row")),
        (5, 200, dict(granularity="row", scale_format="e8m0", dtype=E5M2)),
        (2, 4100, dict(granularity="row", scale_format="pow2")),
        (1, 1, dict(granularity="row")),
    ],
)
def test_it_is_what_quantising_gives(rows: int, dim: int, options: dict, dtype: torch.dtype) -> None:
    for arguments in inputs(rows, dim, dtype):
        y = swiglu(**arguments, backend="triton")
        results = swiglu_fp8(**arguments, **options)
        want = expected(y, **options)
        assert len(results) == len(want)
        for ours, other in zip(results, want, strict=True):
            same(ours, other)


@pytest.mark.skipif(torch.cuda.is_available(), reason="compute-sanitizer does this on a GPU")
@pytest.mark.parametrize("options", [{}, dict(transpose=True), dict(granularity="row")])
def test_it_reads_within_its_tensors(options: dict) -> None:
    """The tile has more rows and more columns than the tensor."""
    gate, up = torch.randn(3, 200), torch.randn(3, 200)
    with addresses.checked(gate, up):
        swiglu_fp8(gate, up, **options)


@pytest.mark.parametrize("dim", [256, 300, 5120])  # the last in two parts with one scale per row
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_does_not_count_in_a_scale(dtype: torch.dtype, dim: int) -> None:
    x = torch.randn(5, dim, device=DEVICE).to(dtype)
    x[0, 3], x[1, 200], x[2], x[3, :200], x[4, 200:] = torch.nan, torch.inf, torch.nan, torch.nan, torch.nan
    arguments = dict(gate=x, up=torch.ones_like(x))
    results = swiglu_fp8(**arguments, transpose=True)
    for ours, want in zip(results, expected(swiglu(**arguments, backend="triton"), transpose=True), strict=True):
        same(ours, want)
    assert results[0].float()[0, 3].isnan() and all(t.isfinite().all() for t in results[1::2])
    for ours, want in zip(
        swiglu_fp8(**arguments, granularity="row"),
        expected(swiglu(**arguments, backend="triton"), granularity="row"),
        strict=True,
    ):
        same(ours, want)


def test_leading_dimensions_strides_and_nothing() -> None:
    x = torch.randn(2, 3, 99, device=DEVICE)[..., 5:69]
    for given in (x, x.transpose(0, 1)):
        results = swiglu_fp8(given, given, transpose=True)
        flat = swiglu_fp8(given.reshape(6, 64), given.reshape(6, 64), transpose=True)
        same(results[0].view(6, 64), flat[0])
        for ours, want in zip(results[2:], flat[2:], strict=True):
            same(ours, want)
        assert results[0].shape == given.shape and results[1].shape == (*given.shape[:-1], 1)
    by_rows = swiglu_fp8(x.transpose(0, 1), granularity="row", up=x.transpose(0, 1))
    assert [t.shape for t in by_rows] == [(3, 2, 64), (3, 2, 1)]
    x = x[:0]
    assert [t.shape for t in swiglu_fp8(x, x, granularity="row")] == [(0, 3, 64), (0, 3, 1)]
    assert [t.shape for t in swiglu_fp8(x, x, transpose=True)] == [(0, 3, 64), (0, 3, 1), (64, 0), (64, 0)]


def test_every_row_fits_into_its_pieces() -> None:
    for cols in (1, 2, 127, 2048, 2049, 4096, 5120, 5121, 8192, 11008, 13824, 16385, 28672, 32768):
        config = configs.pick_rows_config(cols)
        assert config.block_n + config.tail >= cols
        assert config.tail == 0 or config.tail >= 4  # one instruction converts four elements
        assert config.block_m * (config.block_n + config.tail) <= 32 * 32 * config.num_warps
    assert configs.pick_rows_config(11008) == configs.RowsConfig(1, 8192, 4096, 16)


@pytest.mark.slow
def test_compiled_gives_the_same_bits() -> None:
    x = torch.randn(6, 200, device=DEVICE)
    options = dict(scale_format="e8m0", transpose=True)
    eager = swiglu_fp8(x, x, **options)
    compiled = torch.compile(swiglu_fp8, fullgraph=True, backend="aot_eager")(x, x, **options)
    for ours, want in zip(compiled, eager, strict=True):
        same(ours, want)


def test_the_op_keeps_the_rules_of_torch_library() -> None:
    x = torch.randn(6, 200, device=DEVICE)
    op = getattr(torch.ops, f"{__package__.replace('.', '_')}").swiglu_fp8
    torch.library.opcheck(op, (x, x, "silu", True, "1x128", "fp32", True))
    torch.library.opcheck(op, (x, None, "gelu", False, "row", "e8m0", False))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(gate=torch.arange(8)), TypeError, "gate must be a tensor of float32"),
        (dict(gate=torch.tensor(1.0), up=torch.tensor(1.0)), ValueError, "gate must be"),
        (dict(activation="tanh"), ValueError, "activation must be"),
        (dict(dtype=torch.float16), TypeError, "dtype must be float8_e4m3fn"),
        (dict(scale_format="fp16"), ValueError, "scale_format must be"),
        (dict(transpose=1), TypeError, "transpose must be a bool"),
        (dict(granularity="column"), ValueError, "granularity must be one of 'row', '1x128'"),
        (dict(granularity="row", transpose=True), ValueError, "transpose requires granularity '1x128'"),
        (dict(granularity="row", gate=torch.empty(1, 65538)), ValueError, "rows of at most 32768"),
        (dict(gate=torch.randn(2, 8, requires_grad=True)), RuntimeError, "gate must not require grad"),
    ],
)
def test_bad_input_raises_an_error_that_names_it(change, error, words) -> None:
    arguments = {"gate": torch.randn(2, 8), **change}
    moved = {
        n: v.detach().to(DEVICE).requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v
        for n, v in arguments.items()
    }
    with pytest.raises(error, match=words):
        swiglu_fp8(**moved)


@pytest.mark.parametrize(("scale_format", "dtype"), [("fp32", torch.float32), ("e8m0", torch.float8_e8m0fnu)])
def test_rows_without_columns_have_scales_of_one(scale_format, dtype):
    data, scale = swiglu_fp8(torch.ones(3, 0, device=DEVICE), torch.ones(3, 0, device=DEVICE), granularity="row",
                             scale_format=scale_format)  # fmt: skip
    assert data.shape == (3, 0) and scale.shape == (3, 1) and scale.dtype == dtype
    assert scale.float().tolist() == [[1.0]] * 3


def test_the_most_columns_are_those_of_one_half():
    """The limit holds for D; the packed tensor has twice as many columns."""
    packed = torch.randn(1, 2 * 8200, device=DEVICE)
    found = swiglu_fp8(packed, granularity="row")
    for ours, want in zip(found, expected(swiglu(packed), granularity="row"), strict=True):
        same(ours, want)


def test_a_row_of_both_halves_may_be_twice_as_long():
    whole = torch.zeros(1, 2 * configs.MAX_ROW, device=DEVICE)
    assert swiglu_fp8(whole, granularity="row")[0].shape == (1, configs.MAX_ROW)
    with pytest.raises(ValueError, match="rows of at most 32768 with granularity 'row', got 32769"):
        swiglu_fp8(torch.zeros(1, 2 * configs.MAX_ROW + 2, device=DEVICE), granularity="row")


@pytest.mark.parametrize("transposed", [False, True])
def test_sizes_that_tiles_cannot_count_are_errors(transposed) -> None:
    """Just below 2^31 the number of tiles, rounded up in 32 bits, would be negative."""
    x = torch.ones(1, 1, device=DEVICE).expand(plans_fp8.MAX_SIZE + 1, 1)
    x = x.t() if transposed else x
    with pytest.raises(ValueError, match=f"at most {plans_fp8.MAX_SIZE} rows and columns"):
        swiglu_fp8(x, x)
    several = torch.ones(1, 1, 1, device=DEVICE).expand(2**16, 2**15, 1)
    with pytest.raises(ValueError, match=f"at most {plans_fp8.MAX_SIZE} rows and columns"):
        swiglu_fp8(several, several)
