// The preprocess and postprocess kernels of the backward, both memory-bound. Included by backward.cu.
#pragma once

struct Rows { const void* at; long long batch, head, row; };  // strides in elements

DEVICE const Uint4* chunk(const Rows& x, int batch, int head, int row, int column) {
    return (const Uint4*)((const u16*)x.at + batch * x.batch + head * x.head + row * x.row + column);
}

constexpr int HELPER_ROWS = 64;  // of a CTA of 256 threads; 16 bytes a thread
constexpr int ACROSS = D / 8;    // threads of a row
constexpr float LOG2_E = 1.4426950408889634f;

DEVICE float dot(const Uint4& a, const Uint4& b) {
    const u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        Float2 u = unpack(x[i]), v = unpack(y[i]);
        sum += u.x * v.x + u.y * v.y;
    }
    return sum;
}

// lse, dlse: [B * heads, queries]; dlse may be null. Writes lse2 and delta, and zeros the same rows of the fp32 dq.
extern "C" __global__ void __launch_bounds__(256)
block_sparse_attention_cuda_bwd_preprocess(const Rows out, const Rows dout, const float* lse, const float* dlse,
                                           float* lse2, float* delta, float* dq_sum, int queries, int padded,
                                           int heads) {
    constexpr int AT_ONCE = 256 / ACROSS, PASSES = HELPER_ROWS / AT_ONCE;
    int tiles = padded / HELPER_ROWS, all = blockIdx.x / tiles, start = blockIdx.x % tiles * HELPER_ROWS;
    int batch = all / heads, head = all % heads, column = threadIdx.x % ACROSS * 8;
    Float4* zeros = (Float4*)(dq_sum + ((long long)all * padded + start) * D);
    for (int i = 0; i < HELPER_ROWS * D / 1024; i++) zeros[i * 256 + threadIdx.x] = {0, 0, 0, 0};
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

// dq = scale * its fp32 accumulator, which is stored in the order of wgmma fragments, for each 16 rows and 64 columns
// [column / 8][row % 8][column % 8 / 2][4], where the last 4 are two columns of a row and the same columns of the row 8
// below it. A thread casts 8 columns of both rows.
extern "C" __global__ void __launch_bounds__(256)
block_sparse_attention_cuda_bwd_postprocess(const Rows dq, const float* dq_sum, int queries, int padded, int heads,
                                            float scale) {
    int tiles = padded / HELPER_ROWS, all = blockIdx.x / tiles, start = blockIdx.x % tiles * HELPER_ROWS;
    int batch = all / heads, head = all % heads;
    const float* tile = dq_sum + ((long long)all * padded + start / BM * BM) * D;
#pragma unroll
    for (int i = 0; i < HELPER_ROWS / 2 * ACROSS / 256; i++) {
        int unit = i * 256 + threadIdx.x, j = unit % ACROSS, pair = unit / ACROSS;
        int row = start + pair / 8 * 16 + pair % 8;
        const Float4* from =
            (const Float4*)(tile + (j / 8 * 4 + row % BM / 16) * FRAGMENT + j % 8 * 128 + row % 8 * 16);
        u32 upper[4], lower[4];
#pragma unroll
        for (int t = 0; t < 4; t++) {
            Float4 x = from[t];
            upper[t] = pack(x.x * scale, x.y * scale), lower[t] = pack(x.z * scale, x.w * scale);
        }
        if (row < queries) *(Uint4*)chunk(dq, batch, head, row, j * 8) = {upper[0], upper[1], upper[2], upper[3]};
        if (row + 8 < queries)
            *(Uint4*)chunk(dq, batch, head, row + 8, j * 8) = {lower[0], lower[1], lower[2], lower[3]};
    }
}
