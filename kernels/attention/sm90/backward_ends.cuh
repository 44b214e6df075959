// The preprocess and postprocess kernels of the backward, both memory-bound. Included by backward.cu.
#pragma once

#include "backward_shares.cuh"

DEVICE const Uint4* chunk(const Rows& x, int batch, int head, int row, int column) {
    return (const Uint4*)((const u16*)x.at + batch * x.batch + head * x.head + row * x.row + column);
}

constexpr int HELPER_ROWS = DQ_TRANSPOSED ? BM : 64;  // of a CTA of 256 threads; 16 bytes a thread

// lse, dlse: [B * heads, queries]; dlse may be null. Writes lse2 and delta, and zeros the same rows of the fp32 dq,
// except with CTA_PER_KV_HEAD, where the first key block stores what later ones add to. Sets the tile scheduler's
// counter to `start_index`, unless the counter is null.
extern "C" __global__ void __launch_bounds__(256)
attention_cuda_bwd_preprocess(const Rows out, const Rows dout, const float* lse, const float* dlse, float* lse2,
                              float* delta, float* dq_sum, int queries, int padded, int heads, int* counter,
                              int start_index) {
    if (counter != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *counter = start_index;
    constexpr int ACROSS = D / 8, AT_ONCE = 256 / ACROSS, PASSES = HELPER_ROWS / AT_ONCE;
    int tiles = padded / HELPER_ROWS, all = blockIdx.x / tiles, start = blockIdx.x % tiles * HELPER_ROWS;
    int batch = all / heads, head = all % heads, column = threadIdx.x % ACROSS * 8;
#if SCHEDULE != CTA_PER_KV_HEAD
    Float4* zeros = (Float4*)(dq_sum + ((long long)all * padded + start) * D);
    for (int i = 0; i < HELPER_ROWS * D / 1024; i++) zeros[i * 256 + threadIdx.x] = {0, 0, 0, 0};
#endif
    Uint4 a[PASSES], b[PASSES];
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        int row = start + i * AT_ONCE + threadIdx.x / ACROSS;
        a[i] = b[i] = {0, 0, 0, 0};
        if (row < queries) a[i] = *chunk(out, batch, head, row, column), b[i] = *chunk(dout, batch, head, row, column);
    }
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        float sum = dot(a[i], b[i]);
#pragma unroll
        for (int step = ACROSS / 2; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        int row = start + i * AT_ONCE + threadIdx.x / ACROSS;
        if (column == 0) {
            long long from = (long long)all * queries + row, to = (long long)all * padded + row;
            float line = row < queries ? lse[from] : -INFINITE;
            bool empty = line == -INFINITE;
            if (dlse != nullptr && row < queries) sum -= dlse[from];
            // An empty row has delta 0 even where its incoming gradients are not finite: 0 * inf would be NaN.
            lse2[to] = empty ? INFINITE : line * LOG2_E;
            delta[to] = empty ? 0 : sum;
        }
    }
}

// The fp32 accumulator is stored in the order of wgmma fragments, for each 16 rows [column / 8][row % 8][column % 8 /
// 2][4], where the last 4 are two columns of a row and the same columns of the row 8 below it. Casts 8 columns of both
// rows.
DEVICE void cast_pair(const float* from, float scale, Uint4& upper, Uint4& lower) {
    u32 a[4], b[4];
#pragma unroll
    for (int t = 0; t < 4; t++) {
        Float4 x = ((const Float4*)from)[t];
        a[t] = pack(x.x * scale, x.y * scale);
        b[t] = pack(x.z * scale, x.w * scale);
    }
    upper = {a[0], a[1], a[2], a[3]}, lower = {b[0], b[1], b[2], b[3]};
}

// dq = scale * its fp32 accumulator.
extern "C" __global__ void __launch_bounds__(256)
attention_cuda_bwd_postprocess(const Rows dq, const float* dq_sum, int queries, int padded, int heads, float scale) {
    constexpr int ACROSS = D / 8;
    int tiles = padded / HELPER_ROWS, all = blockIdx.x / tiles, start = blockIdx.x % tiles * HELPER_ROWS;
    int batch = all / heads, head = all % heads;
    const float* tile = dq_sum + ((long long)all * padded + start / BM * BM) * D;
    if constexpr (DQ_TRANSPOSED) {
        // Each warp has one fragment: 16 columns of the tile, [query / 8][column % 8][query % 8 / 2][4], where the last
        // 4 are two queries of a column and the same queries of the column 8 further on. They are transposed through
        // shared memory, in rows with a pitch of 16 bytes more than a multiple of 128.
        __shared__ Uint4 transposed[BM][D / 8 + 1];
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const Float4* fragment = (const Float4*)(tile + warp * FRAGMENT) + lane;
        u32 to = shared_address(&transposed[lane / 16 * 8 + lane % 8][warp * 2 + lane / 8 % 2]);
#pragma unroll
        for (int j = 0; j < BM / 8; j += 2) {
            Float4 x = fragment[j * 32], y = fragment[j * 32 + 32];
            store_transposed(to + j * 8 * sizeof(transposed[0]), pack(x.x * scale, x.y * scale),
                             pack(x.z * scale, x.w * scale), pack(y.x * scale, y.y * scale),
                             pack(y.z * scale, y.w * scale));
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < BM * ACROSS / 256; i++) {
            int unit = i * 256 + threadIdx.x, row = start + unit / ACROSS, j = unit % ACROSS;
            if (row < queries) *(Uint4*)chunk(dq, batch, head, row, j * 8) = transposed[row - start][j];
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < HELPER_ROWS / 2 * ACROSS / 256; i++) {
        int unit = i * 256 + threadIdx.x, j = unit % ACROSS, pair = unit / ACROSS;
        int row = start + pair / 8 * 16 + pair % 8;
        Uint4 upper, lower;
        cast_pair(tile + (j / 8 * 4 + row % BM / 16) * FRAGMENT + j % 8 * 128 + row % 8 * 16, scale, upper, lower);
        if (row < queries) *(Uint4*)chunk(dq, batch, head, row, j * 8) = upper;
        if (row + 8 < queries) *(Uint4*)chunk(dq, batch, head, row + 8, j * 8) = lower;
    }
}

// Adds up the partial dV and dK of the key blocks that are split over CTAs, and writes dv and dk.
extern "C" __global__ void __launch_bounds__(256)
attention_cuda_bwd_sum_shares(const Rows dv, const Rows dk, const Problem p) {
    ShareSum x;
    if (!sum_share(dv, dk, p, x)) return;
    u16* at = (u16*)x.to.at + x.batch * x.to.batch + x.head * x.to.head + x.key * x.to.row + x.column;
    *(u32*)at = pack(x.upper[0], x.upper[1]);
    if (x.key + 8 < p.keys) *(u32*)(at + 8 * x.to.row) = pack(x.lower[0], x.lower[1]);
}
