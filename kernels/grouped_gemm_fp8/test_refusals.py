"""The errors that grouped_gemm_fp8 and grouped_gemm_fp8_wgrad raise, and their messages."""

from __future__ import annotations

import pytest
import torch

from . import op, op_wgrad, operands
from .op import grouped_gemm_fp8
from .op_wgrad import grouped_gemm_fp8_wgrad
from .test_grouped_gemm_fp8 import DEVICE, E4M3, forward, gradient


@pytest.mark.parametrize("name", ["x", "weights", "scale_x", "scale_w"])
def test_a_gradient_is_refused_and_never_zero(name: str) -> None:
    names = ("x", "weights", "scale_x", "scale_w", "offsets")
    inputs = dict(zip(names, forward([1, 3], 3, 16, 32), strict=True))
    inputs[name] = inputs[name].requires_grad_()
    with pytest.raises(RuntimeError, match=f"grouped_gemm_fp8: {name} must not require grad"):
        grouped_gemm_fp8(**inputs)
    with torch.no_grad():
        assert not grouped_gemm_fp8(**inputs).requires_grad


def test_the_gradients_gradient_is_refused() -> None:
    dy_t, x_t, scale_dy, scale_x, offsets = gradient([1, 3], 16, 16, 32)
    with pytest.raises(RuntimeError, match="grouped_gemm_fp8_wgrad: scale_dy must not require grad"):
        grouped_gemm_fp8_wgrad(dy_t, x_t, scale_dy.requires_grad_(), scale_x, offsets)


BAD = [
    (dict(x=torch.ones(5, 32)), TypeError, "x must be a tensor of float8_e4m3fn or float8_e5m2, got torch.float32"),
    (dict(weights=torch.ones(2, 16, 32).half()), TypeError, "weights must be a tensor of float8"),
    (dict(x=torch.ones(1, 5, 32).to(E4M3)), ValueError, r"x must be \[T, K\] with K a multiple of 16"),
    (dict(x=torch.ones(5, 24).to(E4M3)), ValueError, "x must be .* multiple of 16"),
    (dict(weights=torch.ones(2, 16, 48).to(E4M3)), ValueError, r"weights must be \[G, N, 32\] like x"),
    (dict(weights=torch.ones(2, 15, 32).to(E4M3)), ValueError, "weights must be .* N a multiple of 16"),
    (dict(scale_x=torch.ones(5, 1).half()), TypeError, "scale_x must be a tensor of float32, got torch.float16"),
    (dict(scale_x=torch.ones(5)), ValueError, r"scale_x must be \[5, 1\]"),
    (dict(scale_w=torch.ones(2, 1)), ValueError, r"scale_w must be \[2, 1, 1\]"),
    (dict(scale_w=1.0), TypeError, "scale_w must be a tensor of float32, got float"),
    (dict(offsets=torch.ones(2)), TypeError, "offsets must be a tensor of int32 or int64, got torch.float32"),
    (
        dict(offsets=torch.ones(3, dtype=torch.int32)),
        ValueError,
        r"offsets must be \[2\] like weights' groups, got \[3\]",
    ),
    (dict(out_dtype=torch.float64), TypeError, "out_dtype must be"),
    (dict(backend="ptx"), ValueError, "backend must be one of auto, triton, cuda"),
]


@pytest.mark.parametrize(("change", "error", "words"), BAD)
def test_bad_input_raises_an_error_that_names_it(change, error, words) -> None:
    good = dict(zip(("x", "weights", "scale_x", "scale_w", "offsets"), forward([1, 3], 5, 16, 32), strict=True))
    changed = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in change.items()}
    with pytest.raises(error, match=words):
        grouped_gemm_fp8(**{**good, **changed})


BAD_GRADIENT = [
    (dict(dy_t=torch.ones(16, 40).to(E4M3)), ValueError, r"dy_t must be \[N, T\] with multiples of 16"),
    (dict(dy_t=torch.ones(15, 48).to(E4M3)), ValueError, r"dy_t must be \[N, T\]"),
    (dict(x_t=torch.ones(32, 32).to(E4M3)), ValueError, r"x_t must be \[K, 48\] like dy_t"),
    (dict(x_t=torch.ones(32, 48)), TypeError, "x_t must be a tensor of float8"),
    (dict(scale_dy=torch.ones(16, 2)), ValueError, r"scale_dy must be \[16, 1\]"),
    (dict(scale_x=torch.ones(16, 1)), ValueError, r"scale_x must be \[32, 1\]"),
    (dict(offsets=torch.ones(1, 3, dtype=torch.int32)), ValueError, r"offsets must be \[G\], got \[1, 3\]"),
    (dict(offsets=[1, 2]), TypeError, "offsets must be a tensor of int32 or int64, got list"),
]


@pytest.mark.parametrize(("change", "error", "words"), BAD_GRADIENT)
def test_bad_input_of_the_gradient_raises_an_error_that_names_it(change, error, words) -> None:
    good = dict(zip(("dy_t", "x_t", "scale_dy", "scale_x", "offsets"), gradient([1, 3], 48, 16, 32), strict=True))
    changed = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in change.items()}
    with pytest.raises(error, match=words):
        grouped_gemm_fp8_wgrad(**{**good, **changed})


def test_an_older_gpu_is_an_error_that_names_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnAGpu(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(operands, "device_of", lambda tensor: ((8, 0), 108))
    for module, make, name in ((op, forward, "x"), (op_wgrad, gradient, "dy_t")):
        a, *rest = make([1, 3], 16, 16, 32)
        with pytest.raises(
            RuntimeError, match=rf"{name} must be on a GPU of compute capability 8\.9 or later, got 8\.0"
        ):
            module._check(a.as_subclass(OnAGpu), *rest, torch.bfloat16, "auto")
