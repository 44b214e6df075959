# A copy of parts/activation.py, made by `nox -s vendor`: change it there.
"""The activations and their gradients, elementwise in fp32 on a tile. NaN and inf propagate as in PyTorch's
formulas."""

from __future__ import annotations

import triton
import triton.language as tl

# GELU: Hendrycks and Gimpel 2016 (arXiv:1606.08415), exact and in tanh form; SiLU: Elfwing et al. 2017
# (arXiv:1702.03118); squared ReLU: So et al. 2021 (arXiv:2109.08668).
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu_sq")

LOG2_E = tl.constexpr(1.4426950408889634)
# tanh form of GELU: (1 + tanh(u)) / 2 = σ(2u), 2u = SLOPE · (x + CUBIC · x³).
SLOPE = tl.constexpr(1.5957691216057308)  # 2 · sqrt(2 / π)
CUBIC = tl.constexpr(0.044715)
# For a larger x², σ(2u) is 0 or 1 in fp32. Without this limit the gradient at a large finite x would be 0 · inf.
MAX_SQUARE = tl.constexpr(1024.0)
SQRT_HALF = tl.constexpr(0.7071067811865476)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)


@triton.jit
def _logistic(x):
    """σ(x)."""
    return 1.0 / (1.0 + tl.exp2(x * -LOG2_E))


@triton.jit
def _activation(x, ACTIVATION: tl.constexpr):
    """act(x)."""
    if ACTIVATION == "silu":
        y = x * _logistic(x)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * SQRT_HALF))
    elif ACTIVATION == "gelu_tanh":
        y = x * _logistic(x * (SLOPE + SLOPE * CUBIC * tl.minimum(x * x, MAX_SQUARE)))
    elif ACTIVATION == "relu":
        y = tl.where(x <= 0, 0.0, x)  # NaN stays
    else:
        tl.static_assert(ACTIVATION == "relu_sq")
        y = tl.where(x <= 0, 0.0, x)
        y = y * y
    return y


@triton.jit
def _activation_and_gradient(x, dy, ACTIVATION: tl.constexpr):
    """(act(x), dy · act'(x)). The two share the exponential."""
    if ACTIVATION == "silu":
        s = _logistic(x)
        y = x * s
        dx = dy * (s * (1.0 + x * (1.0 - s)))
    elif ACTIVATION == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(x * SQRT_HALF))
        y = x * cdf
        dx = dy * (cdf + x * (tl.exp2(x * x * (-0.5 * LOG2_E)) * INV_SQRT_2PI))
    elif ACTIVATION == "gelu_tanh":
        square = tl.minimum(x * x, MAX_SQUARE)
        s = _logistic(x * (SLOPE + SLOPE * CUBIC * square))
        y = x * s
        dx = dy * (s + y * ((1.0 - s) * (SLOPE + 3.0 * SLOPE * CUBIC * square)))
    elif ACTIVATION == "relu":
        y = tl.where(x <= 0, 0.0, x)
        dx = tl.where(x <= 0, 0.0, dy)
    else:
        tl.static_assert(ACTIVATION == "relu_sq")
        y = tl.where(x <= 0, 0.0, x)
        dx = tl.where(x <= 0, 0.0, 2.0 * y * dy)
        y = y * y
    return y, dx
