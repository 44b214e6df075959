// The epilogue of narrow.cu: from the accumulators, and tiles of pre and gate in shared memory, to the stored tiles.
#pragma once

#include "activation.cuh"
#include "heads_ptx.cuh"
#include "narrow_layout.cuh"
#include "numbers.cuh"

DEVICE float low(u32 word) { return widen(word & 0xffff); }
DEVICE float high(u32 word) { return widen(word >> 16); }

// Two adjacent columns of a row: words of the epilogue's tensors, from accumulators x and y of the first weight and, of
// GATE, gate_x and gate_y of the second. `left` columns remain before the end of the row.
DEVICE void finish_pair(u32 (&w)[3], float x, float y, float gate_x, float gate_y, int left) {
    const bool first = left > 0, second = left > 1;
    if constexpr (EPILOGUE == ACT) {
        w[0] = pack(first ? activate(x) : 0, second ? activate(y) : 0);
        w[1] = pack(first ? x : 0, second ? y : 0);
    } else if constexpr (EPILOGUE == GATE) {
        w[0] = pack(first ? activate(gate_x) * x : 0, second ? activate(gate_y) * y : 0);
        w[1] = pack(first ? x : 0, second ? y : 0);
        w[2] = pack(first ? gate_x : 0, second ? gate_y : 0);
    } else if constexpr (EPILOGUE == DACT) {
        const Both a = activate_and_derive(low(w[0]), x), b = activate_and_derive(high(w[0]), y);
        w[0] = pack(first ? a.dx : 0, second ? b.dx : 0);
        w[1] = pack(first ? a.y : 0, second ? b.y : 0);
    } else {
        const float pre_x = low(w[0]), pre_y = high(w[0]);
        const Both a = activate_and_derive(low(w[1]), x * pre_x), b = activate_and_derive(high(w[1]), y * pre_y);
        w[0] = pack(first ? x * a.y : 0, second ? y * b.y : 0);
        w[1] = pack(first ? a.dx : 0, second ? b.dx : 0);
        w[2] = pack(first ? a.y * pre_x : 0, second ? b.y * pre_y : 0);
    }
}

// From the accumulators of COLS columns to the tiles. Blocks of 8 columns have the register layout of ldmatrix and
// stmatrix: lane i addresses row i % 16 of block i / 16 of two. LAST: some columns may be out of bounds; `left` are
// not.
template <int COLS, bool LAST, int SUMS>
DEVICE void finish(const float (&d)[SUMS], u32 tiles, const float* bias, int left) {
    const int lane = threadIdx.x % 32, own = lane % 4 * 2, gate = EPILOGUE == GATE ? SUMS / 2 : 0;
    const u32 row = tiles + (threadIdx.x % 128 / 32 * 16 + lane % 16) * 128, swizzle = (lane / 16 ^ lane % 8) << 4;
#pragma unroll
    for (int c = 0; c < COLS / 16; c++) {
        const u32 at = row + c / 4 * PANEL + (swizzle ^ c % 4 << 5);
        u32 words[3][4];
#pragma unroll
        for (int i = 0; i < LOADED; i++) load_blocks(words[i], at + i * TILE_BYTES);
#pragma unroll
        for (int block = 0; block < 2; block++) {
            const int column = 16 * c + 8 * block + own;
            const float2 add = BIAS ? *(const float2*)(bias + column) : float2{0, 0};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int m = 2 * block + half, i = 4 * (2 * c + block) + 2 * half;
                u32 w[3] = {words[0][m], words[1][m], words[2][m]};
                finish_pair(w, d[i] + add.x, d[i + 1] + add.y, d[gate + i], d[gate + i + 1], LAST ? left - column : 2);
                words[0][m] = w[0], words[1][m] = w[1], words[2][m] = w[2];
            }
        }
#pragma unroll
        for (int i = 0; i < TENSORS; i++)
            if (stored(i)) store_blocks(at + place_of(i) * TILE_BYTES, words[i]);
    }
}
