// How a tile's sums leave: from registers, in vectors of 16 bytes.
#pragma once

#include "numbers.cuh"
#include "tiles.cuh"

DEVICE void exchange(u32& kept_low, u32& kept_high, int bit) {
    const bool high = threadIdx.x & bit;
    const u32 got = __shfl_xor_sync(~0u, high ? kept_low : kept_high, bit);
    if (high) kept_low = got;
    else kept_high = got;
}

// Two fp32 sums with their bias, rounded.
DEVICE u32 rounded(const Problem& a, const Tile& tile, int column, float x, float y) {
    if (!WEIGHTS && a.bias && tile.group >= 0 && column < a.cols) {
        const u16* bias = a.bias + tile.group * a.bias_group + column * a.bias_column;
        const u32 first = bias[0], second = bias[a.bias_column];
#if FP16
        float low, high;
        asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(low) : "r"(first));
        asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(high) : "r"(second));
#else
        const float low = __uint_as_float(first << 16), high = __uint_as_float(second << 16);
#endif
        x += low, y += high;
    }
    return pack(x, y);
}

// A thread has columns 8 j + 2 (lane % 4) and the next of rows lane / 4 and lane / 4 + 8 of its warp's 16. Four lanes
// exchange what they have of four blocks of 8 columns, so that each stores one block of a row: 16 bytes.
DEVICE void store_tile(const Problem& a, const Tile& tile, const float (&d)[BLOCK_N / 2], int consumer) {
    const int lane = threadIdx.x % 32, quad = lane % 4;
    const int row = consumer * ROWS + threadIdx.x % 128 / 32 * 16 + lane / 4;
    u16* out = a.out + (WEIGHTS ? tile.group * a.out_group : 0);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const bool inside = row + 8 * half < tile.rows;
        u16* const to = out + (u64)(tile.row + row + 8 * half) * a.out_row + tile.column + 8 * quad;
#pragma unroll
        for (int c = 0; c < BLOCK_N / 32; c++) {
            u32 w[4];
#pragma unroll
            for (int block = 0; block < 4; block++) {
                const int at = 4 * (4 * c + block) + 2 * half;
                w[block] = rounded(a, tile, tile.column + 32 * c + 8 * block + 2 * quad, d[at], d[at + 1]);
            }
            exchange(w[0], w[1], 1);
            exchange(w[2], w[3], 1);
            exchange(w[0], w[2], 2);
            exchange(w[1], w[3], 2);
            if (inside && tile.column + 32 * c + 8 * quad < a.cols)
                asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                             ::"l"(to + 32 * c), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
        }
    }
}
