"""harness/interpreter.py: NaN in maxima and minima, subnormal numbers, and masked loads are as on a GPU."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from harness import interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
interpreter.as_on_a_gpu()


@triton.jit
def _extremes(x_ptr, y_ptr, out_ptr, PROPAGATE: tl.constexpr):
    at = tl.arange(0, 4)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    nan: tl.constexpr = tl.PropagateNan.ALL if PROPAGATE else tl.PropagateNan.NONE
    tl.store(out_ptr + at, tl.maximum(x, y, propagate_nan=nan))
    tl.store(out_ptr + 4 + at, tl.minimum(x, y, propagate_nan=nan))
    tl.store(out_ptr + 8 + at, tl.zeros([4], tl.float32) + tl.max(x, 0))


@pytest.mark.parametrize("propagate", [False, True])
def test_nan_is_ignored_unless_it_is_to_be_propagated(propagate: bool) -> None:
    nan = torch.nan
    x, y = (torch.tensor(values, device=DEVICE) for values in ([nan, 2.0, nan, -1.0], [1.0, nan, nan, 3.0]))
    out = torch.empty(3, 4, device=DEVICE)
    _extremes[(1,)](x, y, out, propagate)
    alone = [nan, nan, nan] if propagate else [1.0, 2.0, nan]
    expected = torch.tensor([[*alone, 3.0], [*alone, -1.0], [2.0] * 4], device=DEVICE)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@triton.jit
def _of_subnormal(x_ptr, out_ptr):
    at = tl.arange(0, 4)
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, tl.rsqrt(x))
    tl.store(out_ptr + 4 + at, tl.sqrt(x))
    tl.store(out_ptr + 8 + at, tl.exp2(-1 / x))


def test_subnormal_numbers_are_0_in_roots_and_powers() -> None:
    x = torch.tensor([1e-40, 2.0**-7, 2.0**-6, 4.0], device=DEVICE)
    out = torch.empty(3, 4, device=DEVICE)
    _of_subnormal[(1,)](x, out)
    expected = [[torch.inf, 2**3.5, 8.0, 0.5], [0.0, 2**-3.5, 0.125, 2.0], [0.0, 0.0, 2.0**-64, 2.0**-0.25]]
    torch.testing.assert_close(out, torch.tensor(expected, device=DEVICE), rtol=1e-6, atol=0)


@triton.jit
def _masked(x_ptr, out_ptr, given_ptr):
    at = tl.arange(0, 4)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < 2))
    tl.store(given_ptr + at, tl.load(x_ptr + at, mask=at < 2, other=3.0))


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU they are undefined")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int64])
def test_masked_elements_without_a_value_are_spoilt(dtype: torch.dtype) -> None:
    x = torch.arange(1, 5).to(dtype)
    out, given = torch.empty_like(x), torch.empty_like(x)
    _masked[(1,)](x, out, given)
    assert out[:2].tolist() == [1, 2]
    assert out[2:].isnan().all() if dtype.is_floating_point else out[2:].eq(-2).all()
    if dtype != torch.bfloat16:  # whose conversions are wrong in the interpreter
        assert given.tolist() == [1, 2, 3, 3]
