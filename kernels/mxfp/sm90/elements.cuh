// Elements and scales of two columns, one in each half of a register. The arithmetic is that of pairs.py, where the two
// halves are adjacent elements of a block. Every result is defined to the bit (reference.py).
//
// Defined by the launcher: WIDTH, MANTISSA, BIAS and LARGEST_CODE of an element, EMAX, NVFP4.
#pragma once

#include "instructions.cuh"

constexpr int STEP = 32, BLOCK = NVFP4 ? 16 : 32;  // rows of an iteration, and of a block
constexpr u32 NOT_FINITE = 0x7F80;                 // the smallest bf16 bits of a magnitude that is not finite

#if WIDTH != 8
// The codes, without sign, of y >= 0 in bf16. Let e be the exponent of y minus that of the smallest normal element. The
// sum of y and 2^(e + 7 - MANTISSA) is rounded to a multiple of the element's unit in the last place; the last bits of
// the sum are that multiple. The code is the multiple + (e << MANTISSA).
DEVICE u32 encode(u32 y) {
    constexpr int SHIFT = 7 - MANTISSA;
    constexpr u32 LEAST = (128 - BIAS) << 7;
    const u32 exponent = larger(y & both(0x7F80), both(LEAST));
    const u32 sum = added(y, exponent + both(SHIFT << 7));
    return smaller(sum - exponent - both((SHIFT << 7) + (LEAST >> SHIFT)) + (exponent >> SHIFT), both(LARGEST_CODE));
}
#endif

#if NVFP4
struct Factor {
    float low, high;
};

// The product rounded to fp32 and then to odd in bf16, so that the next rounding gives the same result as from fp32; at
// most 8.
DEVICE u32 scaled(u32 magnitude, Factor factor) {
    const u32 a = __float_as_uint(__uint_as_float(magnitude << 16) * factor.low);
    const u32 b = __float_as_uint(__uint_as_float(magnitude & 0x7FFF0000) * factor.high);
    return smaller(upper(a, b) | smaller(lower(a, b), both(1)), both(0x4100));
}

// e4m3 codes of the scales of blocks with these finite largest magnitudes, and 1 / (scale * tensor_scale).
DEVICE u32 find_scale(u32 most, float tensor_scale, Factor& factor) {
    const float six = tensor_scale * 6;
    const float low = __uint_as_float(most << 16) / six, high = __uint_as_float(most & 0xFFFF0000) / six;
    const u32 codes = to_e4m3(fminf(low, 448), fminf(high, 448));
    const u32 a = codes & 0xFF ? codes & 0xFF : 1, b = codes >> 8 ? codes >> 8 : 1;  // a scale of 0 has no inverse
    constexpr float UNIT = 0x1p120f;  // e4m3's exponent in the position of fp32's is too small by this factor
    factor.low = 1 / (__uint_as_float(a << 20) * UNIT * tensor_scale);
    factor.high = 1 / (__uint_as_float(b << 20) * UNIT * tensor_scale);
    return a | b << 16;
}
#else
using Factor = u32;

DEVICE u32 scaled(u32 magnitude, Factor factor) { return product(magnitude, factor); }

// E8M0 codes of the scales of blocks with these finite largest magnitudes, and their inverses in bf16.
DEVICE u32 find_scale(u32 most, float, Factor& factor) {
    const u32 codes = larger(most >> 7 & both(0xFF), both(EMAX)) - both(EMAX);
    factor = (both(254) - codes) << 7;
    return codes;
}
#endif

// The codes of the scales of x[FIRST] to x[FIRST + BLOCK - 1], a block of each column, and the factors of the blocks.
// The scale of a block that is not finite is NaN, and its elements become zeros. If `usable` is false, so do all.
template <int FIRST>
DEVICE u32 find_scales(u32 (&x)[STEP], float tensor_scale, bool usable, Factor& factor) {
    constexpr u32 NAN_SCALE = NVFP4 ? 0x7F : 0xFF;
    u32 part[4] = {};
#pragma unroll
    for (int i = 0; i < BLOCK; i++) part[i % 4] = larger(part[i % 4], x[FIRST + i] & both(0x7FFF));
    u32 most = larger(larger(part[0], part[1]), larger(part[2], part[3]));
    if (NVFP4 && !usable) most = both(NOT_FINITE);
    const u32 flags = (most + both(0x8000 - NOT_FINITE)) & both(0x8000);
    const u32 wrong = (flags >> 15) * 0xFFFF;
    if (flags) {
        most &= ~wrong;
#pragma unroll
        for (int i = 0; i < BLOCK; i++) x[FIRST + i] &= ~wrong;
    }
    // Magnitudes are computed again below: kept since the maximum, they would need as many registers as x.
#pragma unroll
    for (int i = 0; i < BLOCK; i++) pin(x[FIRST + i]);
    const u32 codes = find_scale(most, tensor_scale, factor);
    return (codes & ~wrong) | (both(NAN_SCALE) & wrong);
}

#if WIDTH == 8
// A word of a column from four fp32 values, the first in the lowest bits.
DEVICE u32 four(float a, float b, float c, float d) {
    return BIAS == 7 ? to_e4m3(a, b) | to_e4m3(c, d) << 16 : to_e5m2(a, b) | to_e5m2(c, d) << 16;
}

// The 32 rows as words of either column, the first row in the lowest bits. Products are exact, except those too small
// for fp32, which are too small for any element as well.
DEVICE void round_and_pack(const u32 (&x)[STEP], Factor factor, u32 (&left)[WIDTH], u32 (&right)[WIDTH]) {
    const float low = __uint_as_float(factor << 16), high = __uint_as_float(factor & 0xFFFF0000);
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        float a[4], b[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            a[j] = __uint_as_float(x[4 * i + j] << 16) * low;
            b[j] = __uint_as_float(x[4 * i + j] & 0xFFFF0000) * high;
        }
        left[i] = four(a[0], a[1], a[2], a[3]), right[i] = four(b[0], b[1], b[2], b[3]);
    }
}
#else
// Replaces x[FIRST] to x[FIRST + BLOCK - 1] by their codes.
template <int FIRST>
DEVICE void round(u32 (&x)[STEP], Factor factor) {
#pragma unroll
    for (int i = FIRST; i < FIRST + BLOCK; i++) {
        const u32 sign = x[i] >> (16 - WIDTH) & both(1 << (WIDTH - 1));
        x[i] = encode(scaled(x[i] & both(0x7FFF), factor)) | sign;
    }
}

#if WIDTH == 6
// Four words of 24 bits, of 4 rows each, as three of 32.
DEVICE void pack_four(const u32 (&q)[4], u32* words) {
    words[0] = q[0] | q[1] << 24;
    words[1] = q[1] >> 8 | q[2] << 16;
    words[2] = q[2] >> 16 | q[3] << 8;
}
#endif

// Packs the codes of 32 rows into words of either column, the first row in the lowest bits.
DEVICE void pack(const u32 (&codes)[STEP], u32 (&left)[WIDTH], u32 (&right)[WIDTH]) {
#if WIDTH == 6
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 a[4], b[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32* const c = codes + 16 * i + 4 * j;
            const u32 first = c[0] | c[1] << 6, next = c[2] | c[3] << 6;  // 12 bits of each half
            const u32 low = lower(first, next), high = upper(first, next);
            a[j] = (low & 0xFFF) | (low >> 4 & 0xFFF000);
            b[j] = (high & 0xFFF) | (high >> 4 & 0xFFF000);
        }
        pack_four(a, left + 3 * i);
        pack_four(b, right + 3 * i);
    }
#else
    constexpr int HALF = 16 / WIDTH;  // rows in half a word
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        u32 a = 0, b = 0;
#pragma unroll
        for (int j = 0; j < HALF; j++) {
            a |= codes[2 * HALF * i + j] << WIDTH * j;
            b |= codes[2 * HALF * i + HALF + j] << WIDTH * j;
        }
        left[i] = lower(a, b), right[i] = upper(a, b);
    }
#endif
}
#endif
