"""Properties specific to fp8: every bit of the result is defined, so results are compared bit for bit.

On the CPU the interpreter uses the path without conversion instructions; it executes that integer arithmetic correctly.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
import triton.language as tl

from . import configs, fp8, fp8_dequantize, fp8_scale, plans
from .reference import fp8_reference
from .results import GRANULARITIES, scale_shape
from .tiles import tile_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
TRANSPOSABLE = ("tensor", "128x128")  # with a scale that is given
XDTYPES = (torch.float32, torch.float16, torch.bfloat16) if DEVICE == "cuda" else (torch.float32, torch.float16)
INF, NAN = float("inf"), float("nan")


def wild(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of many magnitudes, with a few that are zero, subnormal or not finite."""
    x = torch.randn(shape, device=DEVICE) * torch.exp(3 * torch.randn(shape, device=DEVICE))
    flat = x.view(-1)
    for index, value in enumerate((NAN, 0.0, INF, -0.0, -INF, 1e-40, -1e-7)):
        if 7 * index < flat.numel():
            flat[7 * index] = value
    return x.to(dtype)


def assert_same(mine: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> None:
    """Asserts equal bits; all NaNs count as equal."""
    assert len(mine) == len(other)
    for a, b in zip(mine, other, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        wide_a, wide_b = a.float(), b.float()
        assert torch.equal(wide_a.isnan(), wide_b.isnan())
        assert torch.equal(wide_a.nan_to_num(), wide_b.nan_to_num())
        assert torch.equal(wide_a.nan_to_num().signbit(), wide_b.nan_to_num().signbit())


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", [E4M3, pytest.param(E5M2, marks=pytest.mark.slow)])
def test_every_bit_is_that_of_pytorchs_own_cast(dtype, granularity, transpose):
    for shape, scale_format, x_dtype in zip(
        [(5, 130), (2, 3, 256), (7,), (131, 1), (130, 257), (128, 256), (132, 130), (9, 1365), (3, 523)],
        ["fp32", "pow2", "e8m0", "fp32", "pow2", "fp32", "fp32", "pow2", "e8m0"],
        itertools.cycle(XDTYPES),
        strict=False,
    ):
        x = wild(*shape, dtype=x_dtype)
        options = dict(scale_format=scale_format, transpose=transpose)
        assert_same(fp8(x, dtype, granularity, **options), fp8_reference(x, dtype, granularity, **options))


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_rows_on_boundaries_and_data_off_them(granularity, transpose):
    """Rows of x with stride 272 can be read as vectors, while rows of 257 or 264 data cannot be written as vectors."""
    for x_dtype, dim in itertools.product(XDTYPES, (256, 257, 264)):
        padded = wild(31, 272, dtype=x_dtype)[:, :dim]
        for x in (padded, padded[:1].expand(31, dim)):
            mine = fp8(x, granularity=granularity, transpose=transpose)
            assert_same(mine, fp8_reference(x, E4M3, granularity, transpose=transpose))


@pytest.mark.parametrize("x_dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_number_of_16_bits_is_rounded_as_pytorch_rounds_it(dtype, x_dtype):
    """Ties, subnormals of all formats, saturation, NaN. With a scale of 1 only the conversion is tested."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=DEVICE).to(torch.int16).view(x_dtype)
    one = torch.ones((), device=DEVICE)
    data, _ = fp8(x, dtype, "tensor", scale=one)
    assert_same((data,), fp8_reference(x, dtype, "tensor", scale=one)[:1])
    assert torch.equal(data.float().isnan(), ~x.float().isfinite())
    assert data.float().nan_to_num().abs().max() == LARGEST[dtype]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_tie_in_fp32_and_the_numbers_beside_it(dtype):
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(dtype).float()
    codes = codes[codes.isfinite()].unique()
    ties = (codes[1:] + codes[:-1]) / 2
    x = torch.cat([codes, ties, torch.nextafter(ties, ties + 1), torch.nextafter(ties, ties - 1)])
    one = torch.ones((), device=DEVICE)
    assert_same(fp8(x, dtype, "tensor", scale=one), fp8_reference(x, dtype, "tensor", scale=one))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_transposed_copy_is_fp8_of_the_transpose(granularity):
    x = wild(131, 259)
    data, scale, data_t, scale_t = fp8(x, E4M3, granularity, transpose=True)
    assert_same((data, scale), fp8(x, E4M3, granularity))
    assert_same((data_t, scale_t), fp8(x.t(), E4M3, granularity))
    assert data_t.is_contiguous()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("dim", [configs.MAX_ROW + 37, 2 * configs.MAX_ROW])
def test_rows_too_wide_for_registers_give_the_same_bits(dim, dtype):
    for x_dtype, scale_format in itertools.product(XDTYPES, ("fp32", "pow2")):
        x = wild(2, dim, dtype=x_dtype)
        assert_same(fp8(x, dtype, scale_format=scale_format), fp8_reference(x, dtype, scale_format=scale_format))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_dequantised_it_is_within_half_a_step(dtype, granularity):
    x = torch.randn(140, 300, device=DEVICE)
    data, scale = fp8(x, dtype, granularity)
    y = fp8_dequantize(data, scale, granularity=granularity)
    half = 2.0**-4 if dtype == E4M3 else 2.0**-3
    subnormal = (2.0**-10 if dtype == E4M3 else 2.0**-17) * scale.max()
    assert ((x - y).abs() <= torch.maximum(x.abs() * half, subnormal) * (1 + 1e-5)).all()


def test_zeros_and_subnormal_numbers_have_a_scale_to_divide_by():
    x = torch.stack([torch.zeros(64), torch.full((64,), 1e-42), torch.full((64,), 2.0**-126), torch.ones(64)])
    for scale_format, granularity in itertools.product(("fp32", "pow2"), ("row", "1x128")):
        data, scale = fp8(x.to(DEVICE), E4M3, granularity, scale_format=scale_format)
        assert scale[:3, 0].tolist() == [1.0, 2.0**-126, 2.0**-126]
        assert (data[0].float() == 0).all() and (data[1].float() == 0).all() and (data[2].float() == 1).all()
        assert (data[3].float() == (448 if scale_format == "fp32" else 256)).all()


def test_the_largest_numbers_of_fp32_have_a_scale_too():
    x = torch.full((1, 8), torch.finfo(torch.float32).max, device=DEVICE)
    for dtype, scale_format in itertools.product((E4M3, E5M2), ("fp32", "pow2")):
        data, scale = fp8(x, dtype, scale_format=scale_format)
        assert scale.isfinite().all() and data.float().isfinite().all()
        assert fp8_dequantize(data, scale).nan_to_num(posinf=3.4e38).min() > 3e38


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_what_is_not_finite_becomes_nan_and_harms_nothing_else(dtype, granularity):
    x = torch.randn(130, 130, device=DEVICE)
    x[3, 5], x[3, 6], x[129, 129] = INF, NAN, -INF
    clean = torch.where(x.isfinite(), x, 0)
    data, scale = fp8(x, dtype, granularity)
    data_clean, scale_clean = fp8(clean, dtype, granularity)
    assert torch.equal(scale, scale_clean)
    assert torch.equal(data.float().isnan(), ~x.isfinite())
    assert torch.equal(data.float()[x.isfinite()], data_clean.float()[x.isfinite()])
    nothing, scale = fp8(torch.full((2, 4), INF, device=DEVICE), dtype, granularity)
    assert nothing.float().isnan().all() and (scale == 1).all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_power_of_two_is_the_smallest_that_lets_nothing_overflow(dtype):
    edges = LARGEST[dtype] * torch.exp2(torch.arange(-20.0, 20.0, device=DEVICE))
    amax = torch.cat([edges, torch.nextafter(edges, edges * 2), torch.nextafter(edges, edges / 2), edges * 1.3])
    scale = fp8(amax[:, None], dtype, "row", scale_format="pow2")[1][:, 0]
    assert (torch.frexp(scale).mantissa == 0.5).all()
    assert (amax <= LARGEST[dtype] * scale).all() and (amax > LARGEST[dtype] * scale / 2).all()
    _, bytes_ = fp8(amax[:, None], dtype, "row", scale_format="e8m0")
    assert bytes_.dtype == torch.float8_e8m0fnu and torch.equal(bytes_[:, 0].float(), scale)


@pytest.mark.parametrize("scale_format", ["fp32", "pow2", "e8m0"])
def test_fp8_scale_is_the_scale_of_that_maximum(scale_format):
    """Delayed scaling: the scale comes from earlier maxima, and x is read once for data and its own maximum."""
    x = wild(6, 40)
    _, scale, amax = fp8(x, E5M2, "tensor", scale_format=scale_format, return_amax=True)
    assert amax == x[x.isfinite()].abs().max()
    assert_same((fp8_scale(amax, E5M2, scale_format),), (scale,))
    data, given, again = fp8(2 * x, E5M2, "tensor", scale=scale, return_amax=True)
    assert given is scale and again == 2 * amax
    assert_same((data,), fp8_reference(2 * x, E5M2, "tensor", scale=scale)[:1])
    zero_and_more = torch.tensor([0.0, 1e-42, 3e38], device=DEVICE)
    rows = fp8(zero_and_more[:, None], E5M2, scale_format=scale_format)[1][:, 0]
    assert_same((fp8_scale(zero_and_more, E5M2, scale_format),), (rows,))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_scale_that_is_given_is_used_as_it_is_and_data_saturate(granularity):
    x = 1000 * wild(130, 259)
    scale = torch.rand(scale_shape(x.shape, granularity), device=DEVICE) + 0.5
    data, same = fp8(x, E4M3, granularity, scale=scale)
    assert same is scale
    assert_same((data,), fp8_reference(x, E4M3, granularity, scale=scale)[:1])
    assert torch.equal(data.float().isnan(), ~x.isfinite())


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("to", XDTYPES)
def test_dequantise_knows_every_code(to, dtype):
    data = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(dtype).view(2, 128)
    for granularity in GRANULARITIES:
        scale = torch.exp2(torch.randn(scale_shape(data.shape, granularity), device=DEVICE))
        expected = (data.float() * scale).to(to)
        torch.testing.assert_close(
            fp8_dequantize(data, scale, to, granularity), expected, rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_dequantise_reads_ragged_blocks_strides_and_bytes(granularity):
    x = torch.randn(2, 70, 400, device=DEVICE)
    for part in (x, x[..., 3:301]):
        for scale_format in ("fp32", "e8m0"):
            data, scale = fp8(part, E4M3, granularity, scale_format=scale_format)
            blocks = scale.float()
            if "128" in granularity:
                blocks = blocks.repeat_interleave(128, -1)[..., : part.shape[-1]]
            if granularity == "128x128":
                blocks = blocks.repeat_interleave(128, 0)[:140].view(part.shape)
            wide = torch.empty(2, 70, 500, dtype=torch.uint8, device=DEVICE).view(E4M3)[..., 7 : 7 + part.shape[-1]]
            wide.copy_(data)
            y = fp8_dequantize(wide, scale, granularity=granularity)
            assert torch.equal(y, data.float() * blocks)


def test_dequantise_knows_the_ends_of_ue8m0():
    data = torch.ones(3, 1, device=DEVICE).to(E4M3)
    scale = torch.tensor([[0], [127], [255]], dtype=torch.uint8, device=DEVICE).view(torch.float8_e8m0fnu)
    y = fp8_dequantize(data, scale)[:, 0]
    assert y[:2].tolist() == [2.0**-127, 1.0] and y[2].isnan()


def test_scales_for_tma_differ_in_strides_alone():
    x = torch.randn(2, 3, 300, device=DEVICE)
    plain, tma = (fp8(x, E4M3, "1x128", transpose=True, mn_major_scales=mn) for mn in (False, True))
    assert_same(plain, tma)
    assert tma[1].stride() == (3, 1, 8) and tma[3].stride() == (1, 300)
    assert_same(
        (fp8_dequantize(tma[0], tma[1], granularity="1x128"),), (fp8_dequantize(*plain[:2], granularity="1x128"),)
    )


@pytest.mark.parametrize(
    ("granularity", "shape"),
    [("tensor", ()), ("row", (2, 3, 1)), ("column", (1, 1, 300)), ("1x128", (2, 3, 3)), ("128x128", (1, 3))],
)
def test_shapes_of_scales(granularity, shape):
    x = torch.randn(2, 3, 300, device=DEVICE)
    data, scale = fp8(x, E4M3, granularity)
    assert (data.shape, scale.shape) == (x.shape, shape)
    if granularity in ("tensor", "row", "column"):
        assert torch.equal(fp8_dequantize(data, scale, granularity=granularity), data.float() * scale)


def test_nothing_is_differentiable_and_autocast_changes_nothing():
    x = torch.randn(4, 64, device=DEVICE, requires_grad=True)
    plain = fp8(x)
    assert not any(t.requires_grad for t in plain)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert_same(fp8(x), plain)
        assert fp8_dequantize(*plain).dtype == torch.float32


class _Spy:
    """Replaces a JIT kernel and records each launch with the address of its first tensor."""

    def __init__(self, jit, launched):
        self.jit, self.launched = jit, launched

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.launched.append((self.jit.__name__, args[0].data_ptr()))
            return self.jit[grid](*args, **options)

        return launch

    def __getattr__(self, name):
        return getattr(self.jit, name)


@pytest.mark.parametrize(
    ("granularity", "options", "launches"),
    [
        ("row", {}, ["row"]),
        ("1x128", {}, ["tile"]),
        ("1x128", {"transpose": True}, ["transposed"]),
        ("128x128", {"transpose": True}, ["transposed"]),
        ("tensor", {}, ["amax", "tile"]),
        ("column", {"transpose": True}, ["amax", "transposed"]),
        ("row", {"transpose": True}, ["amax", "transposed"]),
        ("tensor", {"given": True, "return_amax": True, "transpose": True}, ["transposed"]),
        ("column", {"given": True}, ["tile"]),
    ],
)
def test_how_often_x_is_read_and_that_rows_are_read_in_place(granularity, options, launches, monkeypatch):
    launched: list[tuple[str, int]] = []
    for name in ("_fp8_row_kernel", "_fp8_tile_kernel", "_fp8_transposed_kernel", "_fp8_amax_kernel"):
        monkeypatch.setattr(plans, name, _Spy(getattr(plans, name), launched))
    x = torch.randn(20, 96, device=DEVICE)[:, 32:64]
    if options.pop("given", False):
        options = {**options, "scale": torch.ones(scale_shape(x.shape, granularity), device=DEVICE)}
    fp8(x, E4M3, granularity, **options)
    assert launched == [(f"_fp8_{name}_kernel", x.data_ptr()) for name in launches]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (dict(x=torch.arange(4)), TypeError, "x must be a tensor of float32"),
        (dict(x=torch.tensor(1.0)), ValueError, "x must be"),
        (dict(dtype=torch.float16), TypeError, "dtype must be"),
        (dict(granularity="block"), ValueError, "granularity must be one of 'tensor'"),
        (dict(scale_format="bf16"), ValueError, "scale_format must be one of"),
        (dict(mn_major_scales=True), ValueError, "mn_major_scales requires"),
        (dict(granularity="1x128", mn_major_scales=True, scale_format="e8m0"), ValueError, "mn_major_scales requires"),
        (dict(return_amax=True), ValueError, "return_amax requires"),
        (dict(scale=torch.ones(3, 1).half()), TypeError, "scale must be a tensor of float32"),
        (dict(scale=torch.ones(3)), ValueError, r"scale must be \[3, 1\] for granularity 'row', got \[3\]"),
        (dict(scale=torch.ones(3, 1, device="meta")), ValueError, "scale must be on"),
        (dict(scale=torch.ones(3, 1), transpose=True), ValueError, "scale must be None with transpose=True"),
    ],
)
def test_bad_input_raises_an_error_that_names_it(arguments, error, words):
    def here(value):
        return value.to(DEVICE) if isinstance(value, torch.Tensor) and not value.is_meta else value

    with pytest.raises(error, match=words):
        fp8(**{"x": torch.randn(3, 8, device=DEVICE), **{name: here(value) for name, value in arguments.items()}})


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(data=torch.ones(3, 8)), TypeError, "data must be a tensor of float8"),
        (dict(data=torch.ones(()).to(E4M3), scale=torch.ones(())), ValueError, r"data must be \[\.\.\., D\]"),
        (dict(scale=torch.ones(3, 2)), ValueError, "scale must be"),
        (dict(scale=torch.ones(3, 1).int()), TypeError, "scale must be"),
        (dict(dtype=torch.float64), TypeError, "dtype must be"),
        (dict(granularity="rows"), ValueError, "granularity must be"),
    ],
)
def test_bad_input_of_dequantize_raises_an_error_that_names_it(change, error, words):
    arguments = {"data": torch.ones(3, 8).to(E4M3), "scale": torch.ones(3, 1), **change}
    arguments = {n: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
    with pytest.raises(error, match=words):
        fp8_dequantize(**arguments)
    with pytest.raises(TypeError, match="amax must be"):
        fp8_scale(torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_fake_tensors_give_the_shapes_strides_and_dtypes_of_real_ones(granularity, transpose):
    """The fake implementation, also where the scale is given or the maximum is returned."""
    x = torch.randn(2, 70, 300, device=DEVICE)
    for given, return_amax in itertools.product((False, True), (False, True)):
        if (return_amax and granularity != "tensor") or (given and transpose and granularity not in TRANSPOSABLE):
            continue
        scale = torch.ones(scale_shape(x.shape, granularity), device=DEVICE) if given else None
        options = dict(transpose=transpose, return_amax=return_amax)
        real = fp8(x, E4M3, granularity, scale=scale, **options)
        with torch._subclasses.FakeTensorMode() as mode:
            fake_scale = None if scale is None else mode.from_tensor(scale)
            fake = fp8(mode.from_tensor(x), E4M3, granularity, scale=fake_scale, **options)
        assert [(t.shape, t.stride(), t.dtype) for t in fake] == [(t.shape, t.stride(), t.dtype) for t in real]


def test_dequantise_obeys_torch_library_and_compiles():
    data, scale = fp8(torch.randn(5, 130, device=DEVICE), E4M3, "1x128")
    op = getattr(torch.ops, __package__.replace(".", "_")).fp8_dequantize
    torch.library.opcheck(op, (data.view(torch.uint8), scale, True, "1x128", torch.float16))
    compiled = torch.compile(fp8_dequantize, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    assert torch.equal(compiled(data, scale, granularity="1x128"), fp8_dequantize(data, scale, granularity="1x128"))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_size_has_a_configuration(dtype, capability):
    for granularity, transpose, source, rows, dim in itertools.product(
        GRANULARITIES, (False, True), ("tile", "amax", "given"), (1, 127, 65536), (1, 7, 1365, 4096, 28672, 65536)
    ):
        config = configs.pick_config(granularity, transpose, source, rows, dim, dtype, capability)
        assert config.block_m * config.block_n <= 64 * 32 * config.num_warps
        if "128" in granularity and source == "tile":
            assert config.block_n == 128 and (config.block_m == 128 or (not transpose and granularity == "1x128"))
        if granularity == "row" and source == "tile" and not transpose:
            assert config.block_n >= min(dim, configs.MAX_ROW) or config.block_m == 1


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_a_gemm_takes_data_and_scale_as_they_are(granularity):
    """The convention of torch._scaled_mm: x · wT ≈ (data_x · data_wT) · scale_x · scale_wT."""
    x, w = (torch.randn(n, 512, device="cuda", dtype=torch.bfloat16) for n in (256, 384))
    (data_x, scale_x), (data_w, scale_w) = (fp8(t, E4M3, granularity) for t in (x, w))
    y = torch._scaled_mm(data_x, data_w.t(), scale_x, scale_w.t(), out_dtype=torch.bfloat16)
    exact = fp8_dequantize(data_x, scale_x, granularity=granularity) @ fp8_dequantize(
        data_w, scale_w, granularity=granularity
    ).t()  # fmt: skip
    torch.testing.assert_close(y.float(), exact, rtol=2e-2, atol=2e-1)
    torch.testing.assert_close(y.float(), x.float() @ w.float().t(), rtol=0.1, atol=5.0)


@triton.jit
def _fp8_tile_of_kernel(out_ptr, dim, BLOCK_N: tl.constexpr, SOURCE: tl.constexpr):
    tile, tile_m, tile_n = tile_of(dim, BLOCK_N, SOURCE)
    tl.store(out_ptr + 2 * tile, tile_m)
    tl.store(out_ptr + 2 * tile + 1, tile_n)


@pytest.mark.parametrize("source", ["tile", "amax"])
def test_tiles_of_a_row_that_ends_just_below_two_to_the_31(source):
    """Rounding up the number of tiles in 32 bits gave a negative number, and the last tile the row -1."""
    block = 1 << 25
    out = torch.full((64, 2), -7, dtype=torch.int64, device=DEVICE)
    _fp8_tile_of_kernel[(64,)](out, 2**31 - 5, block, source)
    assert out.tolist() == [[0, tile] for tile in range(64)]


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_row_that_ends_just_below_two_to_the_31(granularity):
    x = torch.randn(2**31 - 5, device="cuda", dtype=torch.bfloat16)
    data, scale, *transposed = fp8(x, E4M3, granularity, transpose=granularity == "128x128")
    y = fp8_dequantize(data, scale, torch.bfloat16, granularity)
    per_row, width = granularity in ("tensor", "row"), 1 if granularity == "column" else 128
    if per_row:
        assert torch.equal(scale.view(()), fp8_scale(x.abs().max().float()))
    for first in (0, (len(x) // 128 - 1) * 128):  # the first blocks, and the last, which is partial
        part, blocks = slice(first, first + 256), slice(first // width, (first + 256) // width)
        found = scale if per_row else scale[..., blocks]
        expected = fp8_reference(x[part], E4M3, granularity, scale=scale if per_row else None)
        assert_same((data[part], found), expected)
        torch.testing.assert_close(y[part], x[part], rtol=0.07, atol=0.02)
    if transposed:
        assert torch.equal(transposed[0].view(torch.uint8).view(-1), data.view(torch.uint8))
        assert torch.equal(transposed[1], scale.t())


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", ["row", "tensor", "1x128"])
def test_more_than_two_to_the_31_elements(granularity):
    """Offsets have 64 bits: those of the last rows exceed 32."""
    x = torch.randn(2**31 // 8192 + 130, 8192, device="cuda", dtype=torch.bfloat16)
    transpose = granularity == "1x128"
    data, scale, *transposed = fp8(x, E4M3, granularity, transpose=transpose)
    y = fp8_dequantize(data, scale, torch.bfloat16, granularity)
    for part in (slice(0, 128), slice(-2 - 128, None)):
        given = {"scale": scale if granularity == "tensor" else scale[part]}
        assert_same((data[part],), fp8_reference(x[part], E4M3, granularity, **given)[:1])
        torch.testing.assert_close(y[part], x[part], rtol=0.07, atol=0.02)
    if transpose:
        tail = slice(-130, None)  # the last whole block and the partial one after it
        assert_same((transposed[0][:, tail], transposed[1][:, -2:]), fp8_reference(x[tail].t(), E4M3, "1x128"))
