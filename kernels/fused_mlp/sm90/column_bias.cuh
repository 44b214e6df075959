// A copy of parts/sm90/column_bias.cuh, made by `nox -s vendor`: change it there.
// Adds one value per column to wgmma accumulators.
#pragma once

#include "types.cuh"

// Of HALVES times 64 rows a thread has columns 8 j + 2 (lane % 4) and the next, of rows lane / 4 and lane / 4 + 8 of
// its warp's 16. Adds to the first WIDTH columns. Each lane loads one of 32 values, load(c) that of column c + lane,
// and lanes exchange them: if each loaded all that it adds, these would spill. The values do not initialise the
// accumulators: ptxas cannot follow accumulators that come from loads, and would wait for each wgmma.
template <int WIDTH, int HALVES, int SUMS, class Load>
DEVICE void add_to_columns(float (&d)[HALVES][SUMS], const Load& load) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < WIDTH; c += 32) {
        const float loaded = load(c);
#pragma unroll
        for (int i = 0; i < 8 && c + i / 2 * 8 < WIDTH; i++) {
            const float own = __shfl_sync(~0u, loaded, i / 2 * 8 + lane % 4 * 2 + i % 2);
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                float* sums = d[half] + c / 2 + i / 2 * 4 + i % 2;
                sums[0] += own, sums[2] += own;
            }
        }
    }
}
