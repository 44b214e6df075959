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

// A thread has columns 8 j + 2 (lane % 4) and the next, of rows lane / 4 and lane / 4 + 8 of its warp's 16.

DEVICE void add_bias(const Problem& a, const Tile& tile, float (&d)[BLOCK_N / 2]) {
    if (WEIGHTS || !a.bias || tile.group < 0) return;
    const u16* const bias = a.bias + tile.group * a.bias_group + (tile.column + threadIdx.x % 4 * 2) * a.bias_column;
#pragma unroll
    for (int j = 0; j < BLOCK_N / 8; j++) {
        if (tile.column + 8 * j < a.cols) {
            const float first = widen(bias[8 * j * a.bias_column]), second = widen(bias[(8 * j + 1) * a.bias_column]);
            d[4 * j] += first, d[4 * j + 2] += first;
            d[4 * j + 1] += second, d[4 * j + 3] += second;
        }
    }
}

// Stores a warpgroup's 64 rows of a tile, from its row `first` on. Four lanes exchange what they have of four blocks of 8
// columns, so that each stores one block of a row: 16 bytes.
DEVICE void store_rows(const Problem& a, const Tile& tile, const float (&d)[BLOCK_N / 2], int first) {
    const int lane = threadIdx.x % 32, quad = lane % 4;
    const int row = first + threadIdx.x % 128 / 32 * 16 + lane / 4;
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
                w[block] = pack(d[at], d[at + 1]);
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
