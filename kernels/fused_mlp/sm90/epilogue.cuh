// What becomes of the sums of a tile: the activations and their gradients, and stores of whole vectors.
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
    if constexpr (ACTIVATION == GELU_TANH) return x * logistic(x * (SLOPE + SLOPE * CUBIC * fminf(x * x, MAX_SQUARE)));
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

DEVICE float widen(u16 x) {
#if FP16
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
#else
    return __uint_as_float((u32)x << 16);
#endif
}
DEVICE float low(u32 word) { return widen(word & 0xffff); }
DEVICE float high(u32 word) { return widen(word >> 16); }

DEVICE void exchange(u32& kept_low, u32& kept_high, int bit) {
    const bool upper = threadIdx.x & bit;
    const u32 got = __shfl_xor_sync(~0u, upper ? kept_low : kept_high, bit);
    if (upper) kept_low = got;
    else kept_high = got;
}

// Word i of lane q of each four lanes becomes word q of lane i. A thread has two columns of each of four blocks of 8
// columns; it stores, or loads, all of one block: 16 bytes.
DEVICE void transpose(u32 (&w)[4]) {
    exchange(w[0], w[1], 1);
    exchange(w[2], w[3], 1);
    exchange(w[0], w[2], 2);
    exchange(w[1], w[3], 2);
}
DEVICE void store_words(u16* to, bool inside, u32 (&w)[4]) {
    transpose(w);
    if (inside)
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                     ::"l"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
}
DEVICE void load_words(const u16* from, bool inside, u32 (&w)[4]) {
    w[0] = w[1] = w[2] = w[3] = 0;
    if (inside)
        asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(from));
    transpose(w);
}
