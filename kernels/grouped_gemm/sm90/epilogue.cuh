// The epilogue: adds the bias to the accumulators and stores them in vectors of 16 bytes.
#pragma once

#include "numbers.cuh"
#include "tiles.cuh"

DEVICE void exchange(u32& kept_low, u32& kept_high, int bit) {
    const bool high = threadIdx.x & bit;
    const u32 got = __shfl_xor_sync(~0u, high ? kept_low : kept_high, bit);
    if (high) kept_low = got;
    else kept_high = got;
}

// wgmma's accumulator layout: a thread has columns 8 j + 2 (lane % 4) and the next, of rows lane / 4 and lane / 4 + 8
// of its warp's 16.

// Each lane loads the bias of one of 32 columns, and lanes exchange them: if it loaded all that it adds, these would
// spill.
DEVICE void add_bias(const Problem& a, const Tile& tile, Sums& d) {
    if (WEIGHTS || !a.bias || tile.group < 0) return;
    const int lane = threadIdx.x % 32;
    const u16* const bias = a.bias + tile.group * a.bias_group + (tile.column + lane) * a.bias_column;
#pragma unroll
    for (int c = 0; c < BLOCK_N; c += 32) {
        const float loaded = tile.column + c + lane < a.cols ? widen(bias[c * a.bias_column]) : 0.0f;
#pragma unroll
        for (int i = 0; i < 8 && c + i / 2 * 8 < BLOCK_N; i++) {
            const float own = __shfl_sync(~0u, loaded, i / 2 * 8 + lane % 4 * 2 + i % 2);
#pragma unroll
            for (int m = 0; m < ROWS / 64; m++) {
                float* sums = d[m] + c / 2 + i / 2 * 4 + i % 2;
                sums[0] += own, sums[2] += own;
            }
        }
    }
}

// Stores a warpgroup's 64 rows of a tile, from the tile's row `first` on. Four lanes exchange their elements of four
// blocks of 8 columns, so that each stores one block of a row: 16 bytes.
DEVICE void store_rows(const Problem& a, const Tile& tile, const float (&d)[BLOCK_N / 2], int first) {
    const int lane = threadIdx.x % 32, quad = lane % 4;
    const int row = first + threadIdx.x % 128 / 32 * 16 + lane / 4;
    u16* out = a.out + (WEIGHTS ? tile.group * a.out_group : 0);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const bool inside = row + 8 * half < tile.rows;
        u16* const to = out + (u64)(tile.row + row + 8 * half) * a.out_row + tile.column + 8 * quad;
#pragma unroll
        for (int c = 0; c < (BLOCK_N + 31) / 32; c++) {
            u32 w[4] = {};
#pragma unroll
            for (int block = 0; block < 4 && 4 * c + block < BLOCK_N / 8; block++) {
                const int at = 4 * (4 * c + block) + 2 * half;
                w[block] = pack(d[at], d[at + 1]);
            }
            exchange(w[0], w[1], 1);
            exchange(w[2], w[3], 1);
            exchange(w[0], w[2], 2);
            exchange(w[1], w[3], 2);
            if (inside && (32 * c + 32 <= BLOCK_N || 32 * c + 8 * quad < BLOCK_N) &&
                tile.column + 32 * c + 8 * quad < a.cols)
                asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                             ::"l"(to + 32 * c), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
        }
    }
}
