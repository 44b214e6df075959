"""Properties specific to gelu; `tests/test_specs.py` checks the rest from SPEC."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from . import configs, gelu
from .layout import coalesce, in_order_of
from .reference import gelu_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = ("none", "tanh")


def normal(*shape: int, **options) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, **options)


def value_and_slope(op, x: torch.Tensor, approximate: str) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().requires_grad_()
    y = op(x, approximate)
    return y.detach(), torch.autograd.grad(y, x, torch.ones_like(y))[0]


@pytest.mark.parametrize("approximate", FORMS)
def test_equals_pytorch(approximate):
    x = 3 * normal(3, 5, 96)
    for mine, other in zip(
        value_and_slope(gelu, x, approximate),
        value_and_slope(lambda x, a: F.gelu(x, approximate=a), x, approximate),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize(
    "x",
    [
        normal(6, 10, 14)[::2, ::2, ::2],  # does not coalesce to two strides: copied first
        normal(13, 1061)[:, :1045],  # four rows of tiles by three columns, with partial tiles at the edges
        normal(2, 3000)[:, 1:],  # two rows, each of more tiles than there are rows
        normal(5000),
    ],
    ids=["copied", "many tiles", "two rows", "one row"],
)
def test_layouts_and_tiles_equal_pytorch(x, approximate):
    mine = value_and_slope(gelu, x, approximate)
    other = value_and_slope(lambda x, a: F.gelu(x, approximate=a), x, approximate)
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("approximate", FORMS)
def test_the_oracle_equals_pytorch_where_that_does_not_cancel(approximate):
    x = torch.linspace(-4, 6, 1001, dtype=torch.float64)
    for mine, other in zip(
        value_and_slope(gelu_reference, x, approximate),
        value_and_slope(lambda x, a: F.gelu(x, approximate=a), x, approximate),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


def steps_from_zero(t: torch.Tensor) -> torch.Tensor:
    """The distance from 0 in 16-bit floating-point values (ulps), negative for a negative element."""
    bits = t.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_every_16_bit_number_is_right_to_the_last_bit_or_the_one_before(dtype, approximate):
    numbers = torch.arange(-(2**15), 2**15, device=DEVICE).to(torch.int16).view(dtype)
    x = numbers[numbers.isfinite()]
    results, oracles = value_and_slope(gelu, x, approximate), value_and_slope(gelu_reference, x.double(), approximate)
    for mine, oracle, absolute in zip(results, oracles, (1e-36, 1e-7), strict=True):
        rounded = oracle.to(dtype)
        near = (steps_from_zero(mine) - steps_from_zero(rounded)).abs() <= 1
        # At its zero at -0.75 the derivative has the rounding errors of fp32 alone; below 1e-36 fp32 loses precision.
        close = (mine.double() - oracle).abs() < absolute
        assert bool((near | close).all())
        assert float((mine != rounded).double().mean()) < 0.01


@pytest.mark.parametrize("approximate", FORMS)
def test_the_tail_keeps_its_relative_accuracy(approximate):
    """PyTorch's 1 + erf and 1 + tanh are 0 in fp32 below about x = -5.5."""
    x = torch.linspace(-9, -2, 4001, device=DEVICE)
    for mine, oracle in zip(
        value_and_slope(gelu, x, approximate), value_and_slope(gelu_reference, x.double(), approximate), strict=True
    ):
        torch.testing.assert_close(mine.double(), oracle, rtol=2e-5, atol=0)


@pytest.mark.parametrize("approximate", FORMS)
def test_zero_infinity_and_nan(approximate):
    x = torch.tensor([-0.0, 0.0, math.inf, -math.inf, math.nan, -3e38, 3e38, -100.0, 100.0], device=DEVICE)
    y, slope = value_and_slope(gelu, x, approximate)
    assert y.tolist()[:3] == [0.0, 0.0, math.inf]
    assert math.copysign(1.0, y[0]) == -1
    assert all(math.isnan(v) for v in (*y[3:5].tolist(), *slope[3:5].tolist()))
    assert [abs(v) for v in y[5:].tolist()] == [0.0, pytest.approx(3e38), 0.0, 100.0]
    assert [abs(v) for v in slope[5:].tolist()] == [0.0, 1.0, 0.0, 1.0]  # PyTorch's tanh form gives NaN at 3e38


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.t(),
        lambda t: t.view(4, 6, 2, 4).permute(2, 0, 3, 1),
        lambda t: t.view(2, 3, 4, 8).to(memory_format=torch.channels_last),
    ],
)
def test_a_dense_tensor_keeps_its_strides_and_is_one_row(change):
    x = change(normal(24, 8))
    y = gelu(x)
    assert y.stride() == x.stride()
    torch.testing.assert_close(y, F.gelu(x), rtol=1e-5, atol=1e-6)
    layout = coalesce((y,), (x,))
    assert (layout.rows, layout.cols, layout.strides) == (1, x.numel(), ((0, 1), (0, 1)))


def test_slices_expansions_and_transpositions_are_read_in_place():
    wide, row = normal(6, 40), normal(1, 17)
    dense = torch.empty(6, 17, device=DEVICE)
    for x in (wide[:, 3:20], wide[:, ::2][:, :17], row.expand(6, 17), row[:, :1].expand(6, 17), normal(17, 6).t()):
        layout = coalesce((dense,), (x, wide[:, :17]))
        assert not any(layout.copied)
        assert layout.rows * layout.cols == x.numel()
        torch.testing.assert_close(gelu(x), F.gelu(x), rtol=1e-5, atol=1e-6)


def test_what_is_neither_row_nor_column_is_copied():
    x = normal(4, 6, 8)[::2, ::2, ::2]
    y = torch.empty_like(x)
    layout = coalesce((y,), (x,))
    assert (layout.rows, layout.copied) == (1, (True,))
    copy = in_order_of(y, x)
    assert torch.equal(copy, x) and copy.stride() == y.stride()


@pytest.mark.parametrize("shape", [(), (1,), (5, 0, 3), (1, 1, 1)])
def test_every_rank(shape):
    x = normal(*shape, requires_grad=True)
    y = gelu(x)
    torch.testing.assert_close(y, F.gelu(x), rtol=1e-5, atol=1e-6)
    y.sum().backward()
    assert x.grad.shape == shape


def test_x_is_all_that_is_saved():
    saved = []
    x = normal(3, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        gelu(x)
        gelu(x.detach())
    assert [t.data_ptr() for t in saved] == [x.data_ptr()]


def test_autocast():
    """It accepts the dtype that a GEMM under autocast returns, and returns the same dtype."""
    weight, x = normal(8, 16, requires_grad=True), normal(4, 16)
    with torch.autocast(DEVICE, dtype=torch.float16):
        y = gelu(F.linear(x, weight))
    assert y.dtype == torch.float16
    y.float().sum().backward()
    assert weight.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda x: gelu(x.double()),
            TypeError,
            "x must be a tensor of float32, float16 or bfloat16, got torch.float64",
        ),
        (lambda x: gelu([1.0]), TypeError, "x must be a tensor of .*, got list"),
        (lambda x: gelu(x, "erf"), ValueError, "approximate must be 'none' or 'tanh', got 'erf'"),
        (lambda x: gelu(x.to("meta")), RuntimeError, "x must be on a GPU"),
    ],
)
def test_says_what_is_wrong(call, error, words):
    with pytest.raises(error, match=words):
        call(normal(3, 8))


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (10, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 100_000])
@pytest.mark.parametrize("cols", [1, 7, 16, 100, 2048, 11008, 10**9])
def test_a_tile_narrower_than_16_columns_has_a_whole_row(rows, cols, dtype, capability):
    """The kernel splits rows at a multiple of 16 columns, so a tile must end at one."""
    for reads in (1, 2):
        for transposed in (False, True):
            config = configs.pick_config(rows, cols, dtype, reads, transposed, capability)
            assert config.block_n >= min(cols, 16)
            assert 8 <= config.block_m * config.block_n // (32 * config.num_warps) <= 32


@pytest.mark.gpu
@pytest.mark.parametrize("approximate", FORMS)
def test_more_than_two_to_the_31_elements(approximate):
    """Offsets have 64 bits: those of the last elements exceed 32."""
    x = torch.randn(2**31 + 12_345, device="cuda", dtype=torch.bfloat16)
    y, slope = value_and_slope(gelu, x, approximate)
    for part in (slice(0, 5000), slice(-20_000, None)):
        expected = value_and_slope(gelu_reference, x[part], approximate)
        torch.testing.assert_close(y[part], expected[0])
        torch.testing.assert_close(slope[part], expected[1])


@pytest.mark.gpu
def test_rows_that_end_just_below_two_to_the_31_elements():
    """The number of tiles of a row, rounded up in 32 bits, would be negative."""
    cols = 2**31 - 100
    x = torch.randn(2, cols + 12, device="cuda", dtype=torch.bfloat16)[:, :cols]
    y, slope = value_and_slope(gelu, x, "tanh")
    for part in (slice(0, 5000), slice(-5000, None)):
        expected = value_and_slope(gelu_reference, x[:, part], "tanh")
        torch.testing.assert_close(y[:, part], expected[0])
        torch.testing.assert_close(slope[:, part], expected[1])
