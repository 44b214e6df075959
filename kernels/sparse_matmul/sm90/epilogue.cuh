// The epilogue on fp32 accumulators: activation, and the transposition to rows of y.
#pragma once

#include "numbers.cuh"
#include "types.cuh"

constexpr float LOG2_E = 1.4426950408889634f;

DEVICE float logistic(float x) { return __fdividef(1.0f, 1.0f + exp2_(-LOG2_E * x)); }

// 1 + erf(x / sqrt(2)) to 2e-7, with fewer registers than erff, which would spill: the complementary error function of
// |x| / sqrt(2) by Abramowitz and Stegun 7.1.26.
DEVICE float twice_normal(float x) {
    const float t = __fdividef(1.0f, 1.0f + 0.3275911f * 0.7071067811865476f * fabsf(x));
    const float p = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
    const float q = p * exp2_(-0.5f * LOG2_E * x * x);
    return x < 0 ? q : 2.0f - q;
}

// ACTIVATION: 0 none, 1 silu, 2 gelu, 3 gelu_tanh, 4 relu, 5 relu_sq. The same as activation.py; NaN is propagated.
DEVICE float activate(float x) {
#if ACTIVATION == 1
    return x * logistic(x);
#elif ACTIVATION == 2
    return 0.5f * x * twice_normal(x);
#elif ACTIVATION == 3
    const float square = fminf(x * x, 1024.0f);
    return x * logistic(x * (1.5957691216057308f + 1.5957691216057308f * 0.044715f * square));
#elif ACTIVATION == 4
    return x <= 0 ? 0.0f : x;
#elif ACTIVATION == 5
    return x <= 0 ? 0.0f : x * x;
#else
    return x;
#endif
}

// Stores four 8 x 8 blocks of 16-bit elements, each transposed; lane i has the address of row i % 8 of block i / 8.
DEVICE void store_blocks(u32 address, const u32 (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}

// 16 bytes from shared to global memory.
DEVICE void copy_vector(void* to, u32 from) {
    u32 x[4];
    asm volatile("ld.shared::cta.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from) : "memory");
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"l"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
