"""Quantisation two numbers at a time, in the interpreter: Hopper's instructions written out as integers and fp32."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from . import configs, mxfp, pairs, plans
from .formats import FORMATS
from .reference import mxfp_reference


@triton.jit
def _halves(a):
    return a & 0xFFFF, (a >> 16) & 0xFFFF


@triton.jit
def _rounded(x):
    """fp32 to the bits of bf16."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def _wide(half):
    return (half << 16).to(tl.float32, bitcast=True)


@triton.jit
def _larger(a, b):
    (a0, a1), (b0, b1) = _halves(a), _halves(b)
    return tl.maximum(a0, b0) | (tl.maximum(a1, b1) << 16)


@triton.jit
def _larger_signed(a, b):
    return _larger(a ^ -0x7FFF8000, b ^ -0x7FFF8000) ^ -0x7FFF8000  # both halves' signs turned


@triton.jit
def _smaller(a, b):
    (a0, a1), (b0, b1) = _halves(a), _halves(b)
    return tl.minimum(a0, b0) | (tl.minimum(a1, b1) << 16)


@triton.jit
def _product(a, b):
    (a0, a1), (b0, b1) = _halves(a), _halves(b)
    return _rounded(_wide(a0) * _wide(b0)) | (_rounded(_wide(a1) * _wide(b1)) << 16)


@triton.jit
def _upper(a, b):
    return ((a >> 16) & 0xFFFF) | (b & -0x10000)


@triton.jit
def _lower(a, b):
    return (a & 0xFFFF) | (b << 16)


@triton.jit
def _added(a, b):
    (a0, a1), (b0, b1) = _halves(a), _halves(b)
    return _rounded(_wide(a0) + _wide(b0)) | (_rounded(_wide(a1) + _wide(b1)) << 16)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of an sm_90, and its instructions."""
    written = (_larger, _larger_signed, _smaller, _product, _added, _upper, _lower)
    for function in written:
        monkeypatch.setattr(pairs, function.__name__[1:], function)
    monkeypatch.setattr(plans, "_capability", lambda tensor: (9, 0))


def numbers(rows: int, dim: int) -> torch.Tensor:
    """bf16 of many magnitudes, with some that are zero, subnormal or not finite."""
    bits = torch.randint(-(2**15), 2**15, (rows, dim), dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16)
    mild = torch.randn(rows, dim).to(torch.bfloat16)
    return torch.where(torch.rand(rows, 1) < 0.5, torch.nan_to_num(x, 1.0, 2.0, -2.0) if rows > 1 else x, mild)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has the instructions: test_mxfp.py")
@pytest.mark.parametrize("shape", [(16, 512), (3, 32), (7, 544)])
@pytest.mark.parametrize("format", FORMATS)
def test_it_is_right(format: str, shape: tuple[int, int], hopper) -> None:
    x = numbers(*shape)
    x[0, :3] = torch.tensor([float("nan"), -float("inf"), 3e38])
    for a, b in zip(mxfp(x, format), mxfp_reference(x, format), strict=True):
        assert torch.equal(a, b), f"{int((a != b).sum())} of {a.numel()} differ"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has the instructions: test_mxfp.py")
@pytest.mark.parametrize("scale", [1e-3, 0.37, 1e5, 2.0**-120, float("nan")])
def test_a_scale_of_the_tensor_that_is_given(scale: float, hopper) -> None:
    """Small ones make products that no element holds."""
    x, given = numbers(16, 64), {"tensor_scale": torch.tensor(scale)}
    mine, exact = mxfp(x, "nvfp4", **given), mxfp_reference(x, "nvfp4", **given)
    assert torch.equal(mine[0], exact[0]) and torch.equal(mine[1], exact[1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has the instructions: test_mxfp.py")
def test_rows_of_a_wider_tensor(hopper) -> None:
    x = numbers(5, 128)[:, 32:96]
    for a, b in zip(mxfp(x, "mxfp4"), mxfp_reference(x, "mxfp4"), strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has the instructions: test_mxfp.py")
def test_what_is_behind_a_row_does_not_count(hopper) -> None:
    """Where the largest magnitude is sought, a tile is wider than the row."""
    x = torch.full((5, 128), 3e38, dtype=torch.bfloat16)
    x[:, :96] = torch.randn(5, 96)
    for a, b in zip(mxfp(x[:, :96], "nvfp4"), mxfp_reference(x[:, :96], "nvfp4"), strict=True):
        assert torch.equal(a, b)


def test_what_it_takes() -> None:
    def picked(dtype=torch.bfloat16, strides=(64, 1), dim=64, block=32, stochastic=False, capability=(9, 0)) -> bool:
        return configs.pick_pairs(8, dim, strides, block, stochastic, dtype, capability) is not None

    assert picked()
    for change in (
        {"dtype": torch.float16},
        {"strides": (1, 64)},
        {"strides": (36, 1)},
        {"dim": 48},
        {"dim": 40, "block": 16},
        {"stochastic": True},
        {"capability": (8, 9)},
    ):
        assert not picked(**change), change


@pytest.mark.parametrize("format", FORMATS)
def test_the_largest_code(format: str) -> None:
    layout = FORMATS[format]
    scale = {"tensor_scale": torch.tensor(1e-3)} if format == "nvfp4" else {}
    data, *_ = mxfp_reference(torch.full((1, 32), 1e9), format, **scale)
    assert int(data[0, 0]) & ((1 << layout.width) - 1) == layout.largest_code
