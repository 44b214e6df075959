// A copy of parts/sm90/activation.cuh, made by `nox -s vendor`: change it there.
// The activations and their gradients, in fp32, with the formulas of activation.py. ACTIVATION is defined by the launcher.
#pragma once

#include "numbers.cuh"
#include "types.cuh"

enum Activation { SILU, GELU, GELU_TANH, RELU, RELU_SQ };  // in the order of activation.py

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float SLOPE = 1.5957691216057308f, CUBIC = 0.044715f;  // of GELU's tanh form, as in activation.py
constexpr float MAX_SQUARE = 1024;

DEVICE float logistic(float x) { return __fdividef(1.0f, 1.0f + exp2_(x * -LOG2_E)); }

DEVICE float activate(float x) {
    if constexpr (ACTIVATION == SILU) return x * logistic(x);
    if constexpr (ACTIVATION == GELU) return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    if constexpr (ACTIVATION == GELU_TANH)  // as logistic() of the argument; a square that overflows gives 0 or 1
        return x * __fdividef(1.0f, 1.0f + exp2_(x * (x * x * (-SLOPE * CUBIC * LOG2_E) - SLOPE * LOG2_E)));
    const float y = x <= 0 ? 0 : x;  // NaN stays
    return ACTIVATION == RELU ? y : y * y;
}

struct Both {
    float y, dx;
};

// act(x) and dy act'(x).
DEVICE Both activate_and_derive(float x, float dy) {
    if constexpr (ACTIVATION == SILU) {
        const float s = logistic(x);
        return {x * s, dy * (s * (1.0f + x * (1.0f - s)))};
    }
    if constexpr (ACTIVATION == GELU) {
        const float cdf = 0.5f * (1.0f + erff(x * 0.70710678f));
        return {x * cdf, dy * (cdf + x * (exp2_(x * x * (-0.5f * LOG2_E)) * 0.39894228f))};
    }
    if constexpr (ACTIVATION == GELU_TANH) {
        const float square = fminf(x * x, MAX_SQUARE), s = logistic(x * (SLOPE + SLOPE * CUBIC * square)), y = x * s;
        return {y, dy * (s + y * ((1.0f - s) * (SLOPE + 3 * SLOPE * CUBIC * square)))};
    }
    const float y = x <= 0 ? 0 : x;
    if (ACTIVATION == RELU) return {y, x <= 0 ? 0 : dy};
    return {y * y, x <= 0 ? 0 : 2 * y * dy};
}
