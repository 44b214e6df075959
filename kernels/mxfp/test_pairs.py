"""The versions with two elements per register, which use Hopper's instructions.

Without a GPU the interpreter runs them, with these instructions emulated in integers, fp16, fp32 and fp64.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from harness.correctness import addresses

from . import configs, dequantize_pairs, halves, mxfp, mxfp_dequantize, pairs, plans
from .codec import encode
from .formats import FORMATS
from .reference import mxfp_dequantize_reference, mxfp_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _halves(a):
    return a & 0xFFFF, (a >> 16) & 0xFFFF


@triton.jit
def _rounded(x):
    """Rounds fp32 to bf16 and returns the bits."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF, 0x7FC0)


@triton.jit
def _wide(half):
    return (half << 16).to(tl.float32, bitcast=True)


@triton.jit
def _fp16(half):
    return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _fp16_bits(x):
    return x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _larger(a, b):
    (a0, a1), (b0, b1) = _halves(a), _halves(b)
    return tl.maximum(a0, b0) | (tl.maximum(a1, b1) << 16)


@triton.jit
def _larger_signed(a, b):
    return _larger(a ^ -0x7FFF8000, b ^ -0x7FFF8000) ^ -0x7FFF8000  # flips the sign bits of both halves


@triton.jit
def _smaller(a, b):
    (a0, a1), (b0, b1) = _halves(a), _halves(b)
    return tl.minimum(a0, b0) | (tl.minimum(a1, b1) << 16)


@triton.jit
def _product(a, b):
    (a0, a1), (b0, b1) = _halves(a), _halves(b)
    return _rounded(_wide(a0) * _wide(b0)) | (_rounded(_wide(a1) * _wide(b1)) << 16)


@triton.jit
def _product_and_sum(a, b, c):
    """Products are exact in fp32, and so are sums close to a tie of bf16."""
    b, c = a * 0 + b, a * 0 + c  # Python numbers become tensors
    (a0, a1), (b0, b1), (c0, c1) = _halves(a), _halves(b), _halves(c)
    return _rounded(_wide(a0) * _wide(b0) + _wide(c0)) | (_rounded(_wide(a1) * _wide(b1) + _wide(c1)) << 16)


@triton.jit
def _product_fp16(a, b):
    (a0, a1), (b0, b1) = _halves(a), _halves(a * 0 + b)
    return _fp16_bits(_fp16(a0) * _fp16(b0)) | (_fp16_bits(_fp16(a1) * _fp16(b1)) << 16)


@triton.jit
def _byte(a, b, place: tl.constexpr):
    return (a >> 8 * place) & 0xFF if place < 4 else (b >> 8 * (place - 4)) & 0xFF


@triton.jit
def _bytes_of(a, b, selector: tl.constexpr):
    low = _byte(a, b, selector & 7) | (_byte(a, b, selector >> 4 & 7) << 8)
    return low | (_byte(a, b, selector >> 8 & 7) << 16) | (_byte(a, b, selector >> 12 & 7) << 24)


@triton.jit
def _one_from_e4m3(code):
    magnitude = code & 0x7F
    y = _fp16(magnitude << 7) * 256.0
    return _fp16_bits(tl.where(magnitude == 0x7F, float("nan"), y)) | ((code & 0x80) << 8)


@triton.jit
def _from_e4m3(a):
    return _one_from_e4m3(a & 0xFF) | (_one_from_e4m3((a >> 8) & 0xFF) << 16)


@triton.jit
def _scaled(a, factor, BF16: tl.constexpr):
    a0, a1 = _halves(a)
    a0, a1 = _fp16(a0) * factor, _fp16(a1) * factor
    return _rounded(a0) | (_rounded(a1) << 16) if BF16 else _fp16_bits(a0) | (_fp16_bits(a1) << 16)


@triton.jit
def _to_eight(half, factor, MANTISSA: tl.constexpr):
    y = _wide(half & 0x7FFF) * factor
    code = encode(y, 3, 7, 448.0) if MANTISSA == 3 else encode(y, 2, 15, 57344.0)
    return code | ((half >> 8) & 0x80)


@triton.jit
def _to_eight_bits(a, b, factor, MANTISSA: tl.constexpr):
    (a0, a1), (b0, b1) = _halves(a), _halves(b)
    low = _to_eight(a0, factor, MANTISSA) | (_to_eight(a1, factor, MANTISSA) << 8)
    return low | (_to_eight(b0, factor, MANTISSA) << 16) | (_to_eight(b1, factor, MANTISSA) << 24)


@triton.jit
def _truncated_product(a, b):
    exact = a.to(tl.float64) * b
    y = exact.to(tl.float32)
    y = (y.to(tl.int32, bitcast=True) - (y.to(tl.float64) > exact).to(tl.int32)).to(tl.float32, bitcast=True)
    return tl.minimum(y, 1.0)


@triton.jit
def _products_of_magnitudes(a, factor):
    return _wide(a & 0x7FFF) * factor, _wide((a >> 16) & 0x7FFF) * factor


@triton.jit
def _to_e4m3(a):
    return encode(a, 3, 7, 448.0)


@triton.jit
def _reciprocal(a):
    return tl.div_rn(1.0, a)


WRITTEN = (
    _larger,
    _larger_signed,
    _smaller,
    _product,
    _product_and_sum,
    _product_fp16,
    _bytes_of,
    _from_e4m3,
    _scaled,
    _to_eight_bits,
    _truncated_product,
    _products_of_magnitudes,
    _to_e4m3,
    _reciprocal,
)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selects the plan of sm_90; without a GPU its instructions are emulated."""
    if DEVICE == "cuda":
        if torch.cuda.get_device_capability() < (9, 0):
            pytest.skip("needs compute capability 9.0")
        return
    for function in WRITTEN:
        name = function.__name__[1:]
        for module in (pairs, dequantize_pairs):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, function)
    monkeypatch.setattr(plans, "_capability", lambda tensor: (9, 0))


def test_every_instruction_is_written_out() -> None:
    found = {name for name, value in vars(halves).items() if getattr(value, "__module__", "") == halves.__name__}
    assert found - {"both"} <= {function.__name__[1:] for function in WRITTEN}


def numbers(rows: int, dim: int) -> torch.Tensor:
    """bf16 of many magnitudes, with some that are zero, subnormal or not finite."""
    bits = torch.randint(-(2**15), 2**15, (rows, dim), dtype=torch.int32, device=DEVICE).to(torch.int16)
    x = bits.view(torch.bfloat16)
    mild = torch.randn(rows, dim, device=DEVICE).to(torch.bfloat16)
    return torch.where(
        torch.rand(rows, 1, device=DEVICE) < 0.5, torch.nan_to_num(x, 1.0, 2.0, -2.0) if rows > 1 else x, mild
    )


@pytest.mark.parametrize("shape", [(16, 512), (3, 32), (7, 544)])
@pytest.mark.parametrize("format", FORMATS)
def test_it_is_right(format: str, shape: tuple[int, int], hopper) -> None:
    x = numbers(*shape)
    x[0, :3] = torch.tensor([float("nan"), -float("inf"), 3e38], device=DEVICE)
    for a, b in zip(mxfp(x, format), mxfp_reference(x, format), strict=True):
        assert torch.equal(a, b), f"{int((a != b).sum())} of {a.numel()} differ"


@pytest.mark.parametrize("scale", [1e-3, 0.37, 1e5, 2.0**-120, float("nan")])
def test_a_scale_of_the_tensor_that_is_given(scale: float, hopper) -> None:
    """With small scales the products exceed the range of the elements."""
    x, given = numbers(16, 64), {"tensor_scale": torch.tensor(scale, device=DEVICE)}
    mine, exact = mxfp(x, "nvfp4", **given), mxfp_reference(x, "nvfp4", **given)
    assert torch.equal(mine[0], exact[0]) and torch.equal(mine[1], exact[1])


def test_the_largest_magnitude_may_be_in_any_tile(hopper) -> None:
    """Rows with gaps, which cannot be viewed as rows of 512."""
    x = torch.ones(40, 1088, dtype=torch.bfloat16, device=DEVICE)[:, :1024]
    tile = configs.pick_amax(40, 1024)
    assert tile.block_m < 40 and tile.block_n < 1024
    for place in ((39, 10), (10, 1000), (39, 1000)):
        x[place] = 300.0
        for mine, exact in zip(mxfp(x, "nvfp4"), mxfp_reference(x, "nvfp4"), strict=True):
            assert torch.equal(mine, exact)
        x[place] = 1.0


def test_rows_of_a_wider_tensor(hopper) -> None:
    x = numbers(5, 128)[:, 32:96]
    for a, b in zip(mxfp(x, "mxfp4"), mxfp_reference(x, "mxfp4"), strict=True):
        assert torch.equal(a, b)


def test_what_is_behind_a_row_does_not_count(hopper) -> None:
    """In the reduction for the largest magnitude, a tile is wider than the row."""
    x = torch.full((5, 128), 3e38, dtype=torch.bfloat16, device=DEVICE)
    x[:, :96] = torch.randn(5, 96, device=DEVICE)
    for a, b in zip(mxfp(x[:, :96], "nvfp4"), mxfp_reference(x[:, :96], "nvfp4"), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("format", FORMATS)
def test_stochastic_rounding(format: str, hopper) -> None:
    """The bits equal those of the portable version."""
    for shape in ((3, 32), (7, 544)):
        x, options = numbers(*shape), {"stochastic": True, "seed": 2**40 + 5}
        for a, b in zip(mxfp(x, format, **options), mxfp_reference(x, format, **options), strict=True):
            assert torch.equal(a, b), f"{int((a != b).sum())} of {a.numel()} differ"


@pytest.mark.parametrize("format", FORMATS)
def test_every_number_below_a_larger_one(format: str, hopper) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=DEVICE).to(torch.int16)
    x = bits.view(torch.bfloat16)
    x = x[x.isfinite()]
    x = torch.cat([x, x.new_zeros(-len(x) % 31)]).view(-1, 31)
    largest = x.float().abs().amax(1, keepdim=True)
    given = {"tensor_scale": torch.tensor(0.37, device=DEVICE)} if format == "nvfp4" else {}
    for factor in (1.0, 1.9, 2.0**3, 2.0**17):
        top = (largest * factor).clamp(max=3e38).to(torch.bfloat16)
        block = torch.cat([top, x], 1)
        for a, b in zip(mxfp(block, format, **given), mxfp_reference(block, format, **given), strict=True):
            assert torch.equal(a, b), f"{int((a != b).sum())} of {a.numel()} differ"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", FORMATS)
def test_dequantise_knows_every_code_and_every_scale(format: str, dtype: torch.dtype, hopper, monkeypatch) -> None:
    layout = FORMATS[format]
    data = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat(layout.block_bytes * 8).view(256, -1)
    scales = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat_interleave(8).view(256, -1)
    monkeypatch.setattr(plans, "_mxfp_dequantize_kernel", None)
    for scale in (0.37, 1e-38, 3e38) if format == "nvfp4" else (None,):
        given = {} if scale is None else {"tensor_scale": torch.tensor(scale, device=DEVICE)}
        mine = mxfp_dequantize(data, scales, format, dtype, **given)
        theirs = mxfp_dequantize_reference(data, scales, format, dtype, **given)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(mine.nan_to_num().signbit(), theirs.nan_to_num().signbit())


@pytest.mark.parametrize("format", FORMATS)
def test_dequantise_every_size(format: str, hopper) -> None:
    """Less than a tile, several with a partial tile, partial blocks, unaligned data, a transposed tensor."""
    layout = FORMATS[format]
    given = {"tensor_scale": torch.tensor(0.37, device=DEVICE)} if format == "nvfp4" else {}
    for rows, blocks, size in ((1, 1, None), (3, 5, None), (33, 9, None), (2, 3, 2 * layout.block + 5)):
        for offset in (0, 1):
            room = torch.randint(256, (rows * blocks * layout.block_bytes + 1,), dtype=torch.uint8, device=DEVICE)
            data = room[offset : len(room) - 1 + offset].view(rows, -1)
            scales = torch.randint(119, 126, (rows, blocks), dtype=torch.uint8, device=DEVICE)
            for d in (data, data.t().contiguous().t()):
                with addresses.checked():
                    mine = mxfp_dequantize(d, scales, format, torch.float16, size=size, **given)
                theirs = mxfp_dequantize_reference(d, scales, format, torch.float16, size=size, **given)
                torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("format", FORMATS)
def test_many_random_bits(format: str) -> None:
    """More tiles than run at once; few wide rows; rows that end within a tile."""
    for rows, dim in ((4096, 1024), (1000, 1056), (3, 8192)):
        wide = numbers(rows, dim + 32)
        for x in (wide[:, :dim], wide[:, :dim].contiguous()):
            for options in ({}, {"stochastic": True, "seed": 3}):
                made, exact = mxfp(x, format, **options), mxfp_reference(x, format, **options)
                for a, b in zip(made, exact, strict=True):
                    assert torch.equal(a, b), f"{int((a != b).sum())} of {a.numel()} differ"


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("format", FORMATS)
def test_rows_further_apart_than_32_bits_reach(format: str) -> None:
    """The rows of one tile are that far apart."""
    x = torch.zeros(5 * 2**30 + 64, dtype=torch.bfloat16, device="cuda").as_strided((6, 64), (2**30, 1))
    x.copy_(numbers(6, 64))
    for a, b in zip(mxfp(x, format), mxfp_reference(x, format), strict=True):
        assert torch.equal(a, b)


def test_it_compiles_for_hopper_and_does_not_spill() -> None:
    """Threads store what they have loaded: only the words of 6-bit data go through shared memory."""
    script = """
from harness.compiling import ahead
from kernels.mxfp.bench import SPEC
cases = [c for c in SPEC.cases if c.bench and c.dims["rows"] == 8192 and c.params.get("dim") != 0]
outcome = ahead.compile_spec(SPEC, (9, 0), cases, ("fwd",), ("auto",))
assert not outcome.failures, outcome.failures
rows = [row for row in outcome.rows if "amax" not in row["jit"]]
assert len(rows) == 14 and all("pairs" in row["jit"] for row in rows), [row["jit"] for row in rows]
for row in rows:
    shared = 2048 if "_quantize" in row["jit"] and row["constexprs"]["WIDTH"] == 6 else 0
    assert row["spill_bytes"] == 0 and row["registers"] <= 64 and row["shared_bytes"] <= shared, row
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(configs.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_it_takes() -> None:
    def picked(dtype=torch.bfloat16, strides=(64, 1), dim=64, block=32, capability=(9, 0)) -> bool:
        return configs.pick_pairs(8, dim, strides, block, dtype, capability) is not None

    assert picked()
    for change in (
        {"dtype": torch.float16},
        {"strides": (1, 64)},
        {"strides": (36, 1)},
        {"dim": 48},
        {"dim": 40, "block": 16},
        {"capability": (8, 9)},
    ):
        assert not picked(**change), change


def test_what_dequantise_takes() -> None:
    def picked(whole=True, dtype=torch.bfloat16, capability=(9, 0)) -> bool:
        return configs.pick_dequantize_pairs(4096, whole, 8, dtype, capability) is not None

    assert picked() and picked(dtype=torch.float16) and picked(capability=(10, 0))
    for change in ({"whole": False}, {"dtype": torch.float32}, {"capability": (8, 9)}):
        assert not picked(**change), change


@pytest.mark.parametrize("format", FORMATS)
def test_the_largest_code(format: str) -> None:
    layout = FORMATS[format]
    scale = {"tensor_scale": torch.tensor(1e-3)} if format == "nvfp4" else {}
    data, *_ = mxfp_reference(torch.full((1, 32), 1e9), format, **scale)
    assert int(data[0, 0]) & ((1 << layout.width) - 1) == layout.largest_code
