"""The activations and their derivatives, in fp32 on the elements of a tile."""

from __future__ import annotations

import triton
import triton.language as tl

# After Shazeer, "GLU variants improve transformer", 2020 (arXiv:2002.05202): SwiGLU, GEGLU (exact and in tanh form),
# ReGLU, the GLU of Dauphin et al. (arXiv:1612.08083), and the bilinear one.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "sigmoid", "identity")

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)
LOG2_E_LOW = tl.constexpr(1.9259629911e-8)  # log2(e) minus fp32(LOG2_E)
# tanh form of GELU: (1 + tanh(u)) / 2 = σ(2u), 2u = SLOPE · (x + CUBIC · x³).
SLOPE = tl.constexpr(1.5957691216057308)  # 2 · sqrt(2 / π)
CUBIC = tl.constexpr(0.044715)
# For a larger x², σ(2u) is 0 or 1 in fp32. Without this bound the derivative at a large finite x would be 0 · inf.
MAX_SQUARE = tl.constexpr(1024.0)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)


@triton.jit
def _reciprocal(d, IS_FP32: tl.constexpr):
    """1 / d for d >= 1. A division has eight instructions, the square of 1 / sqrt(d) two, with relative error 3e-7."""
    if IS_FP32:
        return 1.0 / d
    root = tl.rsqrt(d)
    return root * root


@triton.jit
def _logistic(x, IS_FP32: tl.constexpr):
    """σ(x) = 1 / (1 + exp(−x))."""
    power = x * -LOG2_E
    exponential = tl.exp2(power)
    if IS_FP32:
        # For a very negative x the error of σ is that of `power`, which is up to 128 in magnitude with a relative error
        # of 1e-7. An fma computes the error, and the exponential is corrected to first order.
        error = tl.fma(x, -LOG2_E, -power) - x * LOG2_E_LOW
        exponential *= 1.0 + LN_2 * tl.where(tl.abs(x) < 1e4, error, 0.0)  # not inf - inf
    return _reciprocal(1.0 + exponential, IS_FP32)


@triton.jit
def _tanh_form(x, square, IS_FP32: tl.constexpr):
    """s = σ(SLOPE · (x + CUBIC · x³)) and 1 − s; `square` is x². Both keep their relative accuracy close to 0."""
    power = x * (-LOG2_E * SLOPE - LOG2_E * SLOPE * CUBIC * square)
    exponential = tl.exp2(power)
    s = _reciprocal(1.0 + exponential, IS_FP32)
    # Where s is close to 1, 1 - s consists of the rounding error of s, which is not accurate enough in fp32. For x < 0
    # the difference is exact.
    return s, tl.where(x > 0, exponential * s, 1.0 - s) if IS_FP32 else 1.0 - s


@triton.jit
def _gaussian_cdf(x, IS_FP32: tl.constexpr):
    """exp(−x²/2) and Φ(x). Keeps its relative accuracy where Φ is close to 0.

    Φ(−z) = exp(−z²/2) · P(t), t = 1 / (1 + p · z), for z >= 0. P minimises the relative error over 0 <= z <= 13.3,
    where Φ(−z) underflows in fp32: 1.5e-5 for 16-bit dtypes (degree 5), 5.7e-8 for fp32 (degree 8). For 16-bit dtypes P
    is exact at z = 0.75179, the zero of the derivative Φ(x) + x · φ(x): so that too keeps its relative accuracy there.
    """
    power = x * (x * (-0.5 * LOG2_E))
    if IS_FP32:
        # ex2 flushes subnormal results to 0, where PyTorch's derivative is not yet 0.
        low = power < -126.0
        exponential = tl.exp2(tl.where(low, power + 64.0, power)) * tl.where(low, 2.0**-64, 1.0)
    else:
        exponential = tl.exp2(power)
    z = tl.abs(x)
    if IS_FP32:
        t = _reciprocal(1.0 + 0.3 * z, IS_FP32)
        p = t * 0.0383114613 - 0.168840937
        p = p * t + 0.227987539
        p = p * t - 0.0757362122
        p = p * t + 0.142002639
        p = p * t + 0.0949109415
        p = p * t + 0.121862026
        p = p * t + 0.119495885
        p = p * t + 6.68634549e-06
    else:
        t = _reciprocal(1.0 + 0.36 * z, IS_FP32)
        p = t * -0.0992293074 + 0.255988448
        p = p * t + 0.0338312376
        p = p * t + 0.169156352
        p = p * t + 0.140050482
        p = p * t + 0.000195486907
    tail = p * exponential
    return exponential, tl.where(x > 0, 1.0 - tail, tail)


@triton.jit
def _activation(x, ACTIVATION: tl.constexpr, IS_FP32: tl.constexpr):
    if ACTIVATION == "silu":
        y = x * _logistic(x, IS_FP32)
    elif ACTIVATION == "gelu":
        _, cdf = _gaussian_cdf(x, IS_FP32)
        y = x * cdf
    elif ACTIVATION == "gelu_tanh":
        s, _ = _tanh_form(x, x * x, IS_FP32)
        y = x * s
    elif ACTIVATION == "relu":
        y = tl.where(x <= 0, 0.0, x)  # NaN remains NaN
    elif ACTIVATION == "sigmoid":
        y = _logistic(x, IS_FP32)
    else:
        tl.static_assert(ACTIVATION == "identity")
        y = x
    return y


@triton.jit
def _activation_and_derivative(x, ACTIVATION: tl.constexpr, IS_FP32: tl.constexpr):
    """Returns the activation and its derivative, which share the exponential."""
    if ACTIVATION == "silu":
        s = _logistic(x, IS_FP32)
        y = x * s
        derivative = s + y * (1.0 - s)
    elif ACTIVATION == "gelu":
        exponential, cdf = _gaussian_cdf(x, IS_FP32)
        y = x * cdf
        derivative = cdf + x * (exponential * INV_SQRT_2PI)
    elif ACTIVATION == "gelu_tanh":
        square = tl.minimum(x * x, MAX_SQUARE)
        s, one_minus_s = _tanh_form(x, square, IS_FP32)
        y = x * s
        derivative = s + y * (one_minus_s * (SLOPE + 3.0 * SLOPE * CUBIC * square))
    elif ACTIVATION == "relu":
        y = tl.where(x <= 0, 0.0, x)
        derivative = tl.where(x <= 0, 0.0, 1.0)
    elif ACTIVATION == "sigmoid":
        y = _logistic(x, IS_FP32)
        derivative = y * (1.0 - y)
    else:
        tl.static_assert(ACTIVATION == "identity")
        y = x
        derivative = tl.full(x.shape, 1.0, tl.float32)
    return y, derivative
