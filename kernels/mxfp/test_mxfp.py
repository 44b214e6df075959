"""Properties specific to mxfp: every bit of the result is defined, so results are compared bit for bit.

The reference looks values up in tables in fp64; here these tables are held against PyTorch's own types.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from harness.correctness import addresses

from . import configs, launch, mxfp, mxfp_dequantize
from .formats import FORMATS
from .reference import FORMATS as WRITTEN
from .reference import mxfp_dequantize_reference, mxfp_reference, values

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = float("inf"), float("nan")
EVERY = pytest.mark.parametrize("format", FORMATS)
MX = pytest.mark.parametrize("format", [name for name in FORMATS if name != "nvfp4"])
SIXTEEN = pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu), "bf16 as fp32"]
)


def wild(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of many magnitudes, with a few that are zero, subnormal or not finite."""
    x = torch.randn(shape, device=DEVICE) * torch.exp(3 * torch.randn(shape, device=DEVICE))
    flat = x.view(-1)
    for index, value in enumerate((NAN, 0.0, INF, -0.0, -INF, 1e-40, -1e-7)):
        if 37 * index < flat.numel():
            flat[37 * index] = value
    return x.to(dtype)


def assert_same(mine: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> None:
    """Asserts equal bits."""
    assert len(mine) == len(other)
    for a, b in zip(mine, other, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(a, b), f"{int((a != b).sum())} of {a.numel()} differ"


def every_number(dtype: torch.dtype | str) -> torch.Tensor:
    """All values of a 16-bit dtype."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=DEVICE)
    if dtype == "bf16 as fp32":
        return (bits << 16).view(torch.float32)
    return bits.to(torch.int16).view(dtype)


def scales_of(format: str) -> dict[str, torch.Tensor]:
    return {"tensor_scale": torch.tensor(0.37, device=DEVICE)} if format == "nvfp4" else {}


@SIXTEEN
@EVERY
def test_every_number_of_16_bits_alone_in_its_block(format, dtype):
    """Tests its scale and its rounding with that scale."""
    x = every_number(dtype)[-(2**15) :, None]  # the others differ only in sign
    for options in ({}, *([scales_of(format)] if format == "nvfp4" else [])):
        assert_same(mxfp(x, format, **options), mxfp_reference(x, format, **options))


@pytest.mark.slow
@SIXTEEN
@EVERY
def test_every_number_of_16_bits_under_a_larger_one(format, dtype):
    """Rounding to normal and subnormal elements, ties, and to zero: the first element of a block fixes the scale."""
    x = every_number(dtype)
    x, together = x[x.isfinite()], FORMATS[format].block - 1  # adjacent values, of about the same magnitude
    x = torch.cat([x, x.new_zeros(-len(x) % together)]).view(-1, together)
    for factor in (1.0, 1.9, 2.0**3, 2.0**7, 2.0**17):
        largest = (x.float().abs().amax(1, keepdim=True) * factor).clamp(max=6e4).to(x.dtype)
        block = torch.cat([largest, x], 1)
        assert_same(mxfp(block, format), mxfp_reference(block, format))


@pytest.mark.gpu
@SIXTEEN
@MX
def test_every_number_of_16_bits_under_every_scale(format, dtype):
    """Every pair of a scale and a value that does not change it."""
    x = every_number(dtype)
    x = x[x.isfinite()]
    largest = x[(x > 0) & (torch.frexp(x.float()).mantissa == 0.5)]
    for top in largest.tolist():
        under = x[x.abs() < 2 * top]
        under = torch.cat([under, under.new_zeros(-len(under) % 31)]).view(-1, 31)
        block = torch.cat([torch.full_like(under[:, :1], top), under], 1)
        assert_same(mxfp(block, format), mxfp_reference(block, format))


@EVERY
def test_every_tie_in_fp32_and_the_numbers_beside_it(format):
    exponent_bits, mantissa_bits, bias, _ = WRITTEN[format]
    table = [v for v in values(exponent_bits, mantissa_bits, bias) if math.isfinite(v)]
    numbers = torch.tensor(table, dtype=torch.float32, device=DEVICE)
    ties = (numbers[1:] + numbers[:-1]) / 2
    beside = [torch.nextafter(ties, torch.full_like(ties, toward)) for toward in (0.0, INF)]
    x = torch.cat([numbers, ties, *beside])
    x = torch.cat([x, -x])[:, None]
    top = torch.full_like(x, FORMATS[format].largest)
    for power in (-120, -60, 0, 60, 100):
        block = torch.cat([top, x], 1) * 2.0**power
        assert_same(mxfp(block, format), mxfp_reference(block, format))


@EVERY
def test_every_shape_and_dimension(format):
    shapes = [((5, 70), -1), ((70, 5), 0), ((2, 3, 40), 1), ((7,), 0), ((131, 1), -1), ((3, 1030), -1), ((64, 64), 0)]
    dtypes = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
    for (shape, dim), dtype, stochastic in zip(shapes, itertools.cycle(dtypes), itertools.cycle((False, True))):
        x = wild(*shape, dtype=dtype)
        options = dict(dim=dim, stochastic=stochastic, seed=2**40 + 5)
        assert_same(mxfp(x, format, **options), mxfp_reference(x, format, **options))


@EVERY
def test_another_dimension_is_the_transpose_quantised(format):
    x = wild(96, 130)
    assert_same(mxfp(x, format, dim=0), mxfp(x.t().contiguous(), format))
    assert mxfp(x, format, dim=0)[0].is_contiguous()
    x = wild(64, 3, 5)
    assert_same(mxfp(x, format, dim=0), mxfp(x.movedim(0, -1).contiguous(), format))


@pytest.mark.parametrize(("format", "dtype"), [("mxfp8_e4m3", torch.float8_e4m3fn), ("mxfp8_e5m2", torch.float8_e5m2)])
def test_data_and_scales_are_pytorchs_own_types(format, dtype):
    """Tests the tables of the reference too: they hold the values of these types."""
    codes = torch.arange(256, dtype=torch.uint8)
    exponent_bits, mantissa_bits, bias, _ = WRITTEN[format]
    table = torch.tensor(values(exponent_bits, mantissa_bits, bias))
    torch.testing.assert_close(table, codes[:128].view(dtype).float(), rtol=0, atol=0, equal_nan=True)
    x = torch.randn(7, 96, device=DEVICE)
    data, scales = mxfp(x, format)
    scale = scales.view(torch.float8_e8m0fnu).float().repeat_interleave(32, -1)
    assert torch.equal(data.view(dtype).float() * scale, mxfp_dequantize(data, scales, format))


@EVERY
def test_dequantise_knows_every_code_and_every_scale(format):
    layout = FORMATS[format]
    data = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat(layout.block_bytes * 8)
    scales = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat_interleave(8)
    data, scales = data.view(256, -1), scales.view(256, -1)
    for dtype in (torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])):
        mine = mxfp_dequantize(data, scales, format, dtype, **scales_of(format))
        theirs = mxfp_dequantize_reference(data, scales, format, dtype, **scales_of(format))
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(mine.nan_to_num().signbit(), theirs.nan_to_num().signbit())


@EVERY
def test_what_dequantise_returns_is_quantised_to_itself(format):
    """Except blocks whose largest element does not have the largest exponent: their scale differs."""
    data, scales, *rest = mxfp(torch.randn(33, 256, device=DEVICE), format)
    given = dict(zip(("tensor_scale",), rest, strict=False))
    y = mxfp_dequantize(data, scales, format, **given)
    again = mxfp_dequantize(*mxfp(y, format, **given)[:2], format, **given)
    torch.testing.assert_close(again, y, rtol=0 if format != "nvfp4" else 0.2, atol=0 if format != "nvfp4" else 0.1)


@EVERY
def test_dequantised_it_is_within_half_a_step(format):
    x = torch.randn(40, 320, device=DEVICE)
    layout = FORMATS[format]
    data, scales, *rest = mxfp(x, format)
    y = mxfp_dequantize(data, scales, format, **dict(zip(("tensor_scale",), rest, strict=False)))
    blocks, wrong = (t.view(40, -1, layout.block) for t in (x, y - x))
    amax = blocks.abs().amax(-1, keepdim=True)
    # Saturation loses up to a quarter of the largest value, rounding half the spacing, whose minimum scales with amax.
    bound = torch.maximum(blocks.abs() * 2.0 ** -(layout.mantissa + 1), amax / layout.largest)
    bound = torch.where(blocks.abs() > amax * 0.7, amax * 0.26, bound)
    assert (wrong.abs() <= bound).all()


@EVERY
def test_zeros_keep_their_sign_and_have_the_smallest_scale(format):
    x = torch.zeros(2, 64, device=DEVICE)
    x[1] = -0.0
    data, scales, *rest = mxfp(x, format)
    assert (scales == (1 if format == "nvfp4" else 0)).all() and all(t == 1 for t in rest)
    y = mxfp_dequantize(data, scales, format, **dict(zip(("tensor_scale",), rest, strict=False)))
    assert (y == 0).all() and not y[0].signbit().any() and y[1].signbit().all()


@EVERY
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_is_not_finite_makes_its_block_nan_and_harms_no_other(format, value):
    x = torch.randn(4, 128, device=DEVICE)
    x[:, 1:] = x[:, 1:].clamp(-2, 2)
    x[0, 0] = 2.5  # the largest magnitude of the tensor, which the special value must not change
    clean = mxfp(x, format)
    broken = x.clone()
    broken[2, 70] = value
    data, scales, *rest = mxfp(broken, format)
    block = 70 // FORMATS[format].block
    assert scales[2, block] == (0x7F if format == "nvfp4" else 0xFF)
    assert all(torch.equal(a, b) for a, b in zip(rest, clean[2:], strict=True))
    y = mxfp_dequantize(data, scales, format, **dict(zip(("tensor_scale",), rest, strict=False)))
    nan = torch.zeros_like(x, dtype=torch.bool)
    nan[2, block * FORMATS[format].block : (block + 1) * FORMATS[format].block] = True
    assert torch.equal(y.isnan(), nan)
    same = scales != clean[1]
    assert int(same.sum()) == 1
    width = FORMATS[format].block_bytes
    assert (data[2, block * width : (block + 1) * width] == 0).all()
    changed = (data != clean[0]).view(4, -1, width).any(-1)
    assert not changed[~same].any()


@MX
def test_the_largest_and_smallest_numbers_of_fp32(format):
    tiny = torch.tensor([1e-45, 2.0**-149, 2.0**-127, 2.0**-126, 1.17e-38, 3.4e38, 2.0**127], device=DEVICE)
    x = torch.cat([tiny, -tiny])[:, None].expand(-1, 32) * torch.rand(32, device=DEVICE)
    assert_same(mxfp(x, format), mxfp_reference(x, format))


def test_a_scale_of_the_tensor_that_is_given_is_used_as_it_is():
    x = torch.randn(9, 70, device=DEVICE)
    for value in (1e-3, 1.0, 1e4, 2.0**-117):
        given = torch.tensor(value, device=DEVICE)
        mine = mxfp(x, "nvfp4", tensor_scale=given)
        assert mine[2] is given
        assert_same(mine, mxfp_reference(x, "nvfp4", tensor_scale=given))
    found = mxfp(x, "nvfp4")
    assert_same(mxfp(x, "nvfp4", tensor_scale=found[2]), found)
    for value in (0.0, -1.0, INF, NAN, 2.0**-118):
        data, scales, _ = mxfp(x, "nvfp4", tensor_scale=torch.tensor(value, device=DEVICE))
        assert (data == 0).all() and (scales == 0x7F).all()


@EVERY
def test_stochastic_rounding_is_unbiased_seeded_and_reproducible(format):
    """The mean of many rounded values is x, within five standard deviations."""
    layout, rounds = FORMATS[format], 64
    numbers = torch.rand(16, 2 * layout.block, device=DEVICE) * layout.largest
    numbers[:, :: layout.block] = layout.largest  # fixes the scale at 1, without saturation
    numbers[:, 1:5] *= 2.0 ** (1 - layout.bias) / layout.largest  # subnormal
    one = {"tensor_scale": torch.tensor(1 / 448, device=DEVICE)} if format == "nvfp4" else {}
    data, scales, *_ = mxfp(numbers.repeat(rounds, 1), format, stochastic=True, seed=5, **one)
    mean = mxfp_dequantize(data, scales, format, **one).view(rounds, *numbers.shape).mean(0)
    # The variance of one rounding is at most a quarter of the squared spacing.
    step = torch.maximum(2.0 ** torch.floor(torch.log2(numbers)), numbers.new_tensor(2.0 ** (1 - layout.bias)))
    bias = (mean - numbers) / (step * 2.0**-layout.mantissa / 2 / rounds**0.5)
    assert bias.abs().max() < 5.5 and bias.mean().abs() < 5 / numbers.numel() ** 0.5
    again, other = (mxfp(numbers.repeat(rounds, 1), format, stochastic=True, seed=s, **one)[0] for s in (5, 6))
    assert torch.equal(again, data) and not torch.equal(other, data)


def test_a_random_number_belongs_to_an_element_and_not_to_a_tile():
    x = torch.randn(16, 2048, device=DEVICE)
    whole = mxfp(x, "mxfp4", stochastic=True, seed=3)
    strided = torch.cat([x, x], 1)[:, :2048]
    assert_same(mxfp(strided, "mxfp4", stochastic=True, seed=3), whole)
    assert_same(mxfp(x.t(), "mxfp4", stochastic=True, seed=3, dim=0), whole)


def test_a_seed_is_no_part_of_a_plan():
    x = torch.randn(4, 64, device=DEVICE)
    mxfp(x, "mxfp4", stochastic=True)
    kept = sum(len(p) for p in launch._EVERY)
    for seed in (1, 2, 2**33, 2**63 - 1):
        mxfp(x, "mxfp4", stochastic=True, seed=seed)
    assert sum(len(p) for p in launch._EVERY) == kept


@EVERY
def test_dequantise_reads_strides_and_bytes_off_a_boundary(format):
    x = torch.randn(6, 70, device=DEVICE)
    data, scales, *rest = mxfp(x, format)
    given = dict(zip(("tensor_scale",), rest, strict=False))
    y = mxfp_dequantize(data, scales, format, size=70, **given)
    assert y.shape == x.shape and y.is_contiguous()
    for offset in (0, 1, 4):
        room = torch.empty(data.numel() + 16, dtype=torch.uint8, device=DEVICE)
        moved = room[offset : offset + data.numel()].view(data.shape).copy_(data)
        assert torch.equal(mxfp_dequantize(moved, scales.t().contiguous().t(), format, size=70, **given), y)


def test_nothing_is_differentiable_and_autocast_changes_nothing():
    x = torch.randn(4, 64, device=DEVICE, requires_grad=True)
    plain = mxfp(x)
    assert not any(t.requires_grad for t in plain)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert_same(mxfp(x), plain)
        assert mxfp_dequantize(*plain).dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (dict(x=torch.arange(4)), TypeError, "x must be a tensor of float32"),
        (dict(x=torch.tensor(1.0)), ValueError, "x must be"),
        (dict(format="mxfp5"), ValueError, "format must be one of 'mxfp8_e4m3'"),
        (dict(stochastic=1.5), TypeError, "stochastic must be"),
        (dict(seed=-1), ValueError, "seed must be at least 0"),
        (dict(seed=0.5), TypeError, "seed must be an integer"),
        (dict(dim=2), ValueError, "dim must be one of the 2"),
        (dict(dim=None), TypeError, "dim must be an integer"),
        (dict(seed=None), TypeError, "seed must be an integer"),
        (dict(tensor_scale=torch.tensor(1.0)), ValueError, "tensor_scale requires format 'nvfp4'"),
        (dict(format="nvfp4", tensor_scale=1.0), TypeError, "tensor_scale must be a tensor of float32"),
        (dict(format="nvfp4", tensor_scale=torch.ones(1)), ValueError, "tensor_scale must have no dimensions"),
    ],
)
def test_bad_input_raises_an_error_that_names_it(arguments, error, words):
    arguments = {n: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
    for _ in range(2):  # also when a plan for correct arguments is cached
        with pytest.raises(error, match=words):
            mxfp(**{"x": torch.randn(3, 8, device=DEVICE), **arguments})
        mxfp(torch.randn(3, 8, device=DEVICE))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(data=torch.ones(3, 64)), TypeError, "data must be a tensor of uint8"),
        (dict(scales=torch.ones(3, 2)), TypeError, "scales must be a tensor of uint8"),
        (dict(data=torch.ones(3, 63, dtype=torch.uint8)), ValueError, r"data must be \[3, 64\]"),
        (dict(format="nvfp4"), ValueError, "data must be"),
        (dict(dtype=torch.float64), TypeError, "dtype must be"),
        (dict(size=32), ValueError, "size must end in the last of the 2 blocks"),
        (dict(tensor_scale=torch.tensor(1.0)), ValueError, "tensor_scale requires"),
    ],
)
def test_bad_input_of_dequantize_raises_an_error_that_names_it(change, error, words):
    one = torch.ones(3, 64, dtype=torch.uint8)
    arguments = {"data": one, "scales": one[:, :2], **change}
    arguments = {n: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
    with pytest.raises(error, match=words):
        mxfp_dequantize(**arguments)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_size_has_a_configuration_of_whole_blocks(dtype, capability):
    for rows, dim, width in itertools.product((1, 127, 65536), (1, 7, 1365, 4096, 28672), (4, 6, 8)):
        found = [configs.pick_config(rows, dim, width, t, dtype, capability) for t in (False, True)]
        for config in (*found, configs.pick_dequantize_config(rows, dim, width, dtype, capability)):
            assert config.block_n % 32 == 0 and config.block_m * config.block_n <= 64 * 32 * config.num_warps


@EVERY
def test_dequantises_rows_of_several_tiles(format):
    """The rows end within a block, so they cannot be viewed as rows of another size."""
    data, scales, *rest = mxfp(torch.randn(9, 1050, device=DEVICE), format)
    given = dict(zip(("tensor_scale",), rest, strict=False), size=1050)
    want = mxfp_dequantize_reference(data, scales, format, **given)
    assert torch.equal(mxfp_dequantize(data, scales, format, **given), want)


@EVERY
def test_dequantizes_a_row_of_a_wider_tensor(format):
    """A single row is contiguous for any stride, also one that is not a multiple of a word of 6-bit data."""
    data, scales, *rest = mxfp(wild(3, 70), format)
    given = dict(zip(("tensor_scale",), rest, strict=False))
    wide = torch.nn.functional.pad(data, (0, 1))[:1, :-1]
    assert wide.is_contiguous() and wide.stride(0) % 4
    mine, other = (
        mxfp_dequantize(wide, scales[:1], format, **given),
        mxfp_dequantize(data[:1], scales[:1], format, **given),
    )
    torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp4"])
def test_a_row_that_ends_just_below_two_to_the_31(format):
    """Rounding up the number of tiles in 32 bits would give a negative number."""
    x = torch.randn(2**31 - 32, device="cuda", dtype=torch.bfloat16)
    data, scales = mxfp(x, format)
    y = mxfp_dequantize(data, scales, format, torch.bfloat16)
    blocks = data.view(-1, FORMATS[format].block_bytes)
    for first in (0, len(scales) - 128):  # the first blocks, and the last
        few, few_scales = mxfp_reference(x.view(-1, 32)[first : first + 128], format)
        assert_same((blocks[first : first + 128], scales[first : first + 128, None]), (few, few_scales))
        expected = mxfp_dequantize_reference(few, few_scales, format, torch.bfloat16)
        assert torch.equal(y.view(-1, 32)[first : first + 128], expected)


@pytest.mark.gpu
@EVERY
def test_more_than_two_to_the_31_elements(format):
    """Offsets have 64 bits: those of the last rows exceed 32."""
    x = torch.randn(2**31 // 8192 + 130, 8190, device="cuda", dtype=torch.bfloat16)
    data, scales, *rest = mxfp(x, format)
    given = dict(zip(("tensor_scale",), rest, strict=False))
    y = mxfp_dequantize(data, scales, format, torch.bfloat16, size=8190, **given)
    for part in (slice(0, 64), slice(-64, None)):
        few, few_scales, *_ = mxfp_reference(x[part], format, **given)
        assert_same((data[part], scales[part]), (few, few_scales))
        expected = mxfp_dequantize_reference(few, few_scales, format, torch.bfloat16, size=8190, **given)
        assert torch.equal(y[part], expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="compute-sanitizer does this on a GPU")
@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp6_e3m2", "mxfp4"])
def test_dequantisation_reads_within_its_tensors(format: str) -> None:
    """The tile has more rows and more columns than the tensor."""
    x = torch.randn(5, 96)
    tile = configs.pick_dequantize_config(5, 96, 6, torch.float32, (8, 0))
    assert tile.block_m > 5 and tile.block_n > 96
    data, scales, *_ = mxfp(x, format)
    with addresses.checked(data, scales):
        y = mxfp_dequantize(data, scales, format, dtype=torch.float32)
    assert torch.equal(y, mxfp_dequantize_reference(data, scales, format, dtype=torch.float32))
