// The preprocess and postprocess kernels where gradients are accumulated over several calls (ACCUMULATE). Included by
// backward.cu. They differ from those of backward_ends.cuh: delta is given, and dq, dk and dv are fp32, which the first
// call writes and later calls add to.
#pragma once

#include "backward_shares.cuh"

constexpr int HELPER_ROWS = DQ_TRANSPOSED ? BM : 64;  // of a CTA of 256 threads

struct alignas(8) Pair { u32 x, y; };

DEVICE Float4* four(const Rows& x, int batch, int head, int row, int column) {
    return (Float4*)((float*)x.at + batch * x.batch + head * x.head + row * x.row + column);
}

// The destination of dq: `to` is fp32, or 16-bit if `rounded`. Unless `before` is null, its values are added.
struct Target {
    Rows before, to;
    bool rounded;

    DEVICE void put(int batch, int head, int row, int column, Float4 x) const {
        if (before.at != nullptr) {
            const Float4 y = *four(before, batch, head, row, column);
            x = {x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w};
        }
        if (rounded) {
            u16* at = (u16*)to.at + batch * to.batch + head * to.head + row * to.row + column;
            *(Pair*)at = {pack(x.x, x.y), pack(x.z, x.w)};
        } else {
            *four(to, batch, head, row, column) = x;
        }
    }
};

// lse, delta: [B * heads, queries], heads `line` elements apart. Writes lse2 and delta2, and zeros the same rows of the
// fp32 dq.
extern "C" __global__ void __launch_bounds__(256)
attention_cuda_bwd_preprocess(const float* lse, const float* delta, long long line, float* lse2, float* delta2,
                              float* dq_sum, int queries, int padded) {
    int tiles = padded / HELPER_ROWS, all = blockIdx.x / tiles, start = blockIdx.x % tiles * HELPER_ROWS;
    Float4* zeros = (Float4*)(dq_sum + ((long long)all * padded + start) * D);
    for (int i = 0; i < HELPER_ROWS * D / 1024; i++) zeros[i * 256 + threadIdx.x] = {0, 0, 0, 0};
    if (threadIdx.x >= HELPER_ROWS) return;
    int row = start + threadIdx.x;
    long long from = all * line + row, to = (long long)all * padded + row;
    float x = row < queries ? lse[from] : -INFINITE;
    bool empty = x == -INFINITE;
    // An empty row has delta 0 even where its incoming gradients are not finite: 0 * inf would be NaN.
    lse2[to] = empty ? INFINITE : x * LOG2_E;
    delta2[to] = empty ? 0 : delta[from];
}

// Calls put(0 or 8 rows below, 0 or 4 columns to the right, four elements) for 8 columns of two rows, 8 rows apart, of
// an fp32 accumulator. It is stored in the order of wgmma fragments, for each 16 rows [column / 8][row % 8][column % 8
// / 2][4], where the last 4 are two columns of a row and the same columns of the row 8 below it.
template <class Put>
DEVICE void put_pair(const float* from, float scale, const Put& put) {
#pragma unroll
    for (int t = 0; t < 4; t += 2) {
        const Float4 a = ((const Float4*)from)[t], b = ((const Float4*)from)[t + 1];
        put(0, 2 * t, Float4{a.x * scale, a.y * scale, b.x * scale, b.y * scale});
        put(8, 2 * t, Float4{a.z * scale, a.w * scale, b.z * scale, b.w * scale});
    }
}

// dq = scale * its fp32 accumulator, plus what was there before.
extern "C" __global__ void __launch_bounds__(256)
attention_cuda_bwd_postprocess(const Rows before, const Rows dq, const float* dq_sum, int queries, int padded, int heads,
                               float scale, int rounded) {
    const Target target = {before, dq, rounded != 0};
    int tiles = padded / HELPER_ROWS, all = blockIdx.x / tiles, start = blockIdx.x % tiles * HELPER_ROWS;
    int batch = all / heads, head = all % heads;
    const float* tile = dq_sum + ((long long)all * padded + start / BM * BM) * D;
    if constexpr (DQ_TRANSPOSED) {
        // Each warp has one fragment: 16 columns of the tile, [query / 8][column % 8][query % 8 / 2][4], where the last
        // 4 are two queries of a column and the same queries of the column 8 further on. They are transposed through
        // shared memory.
        constexpr int PITCH = D + 4;
        __shared__ __align__(16) float transposed[BM * PITCH];
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const Float4* fragment = (const Float4*)(tile + warp * FRAGMENT) + lane;
        float* to = transposed + lane % 4 * 2 * PITCH + warp * 16 + lane / 4;
#pragma unroll
        for (int j = 0; j < BM / 8; j++) {
            Float4 x = fragment[j * 32];
            float* first = to + j * 8 * PITCH;
            first[0] = x.x, first[PITCH] = x.y, first[8] = x.z, first[PITCH + 8] = x.w;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < BM * D / 4 / 256; i++) {
            int unit = i * 256 + threadIdx.x, row = unit / (D / 4), column = unit % (D / 4) * 4;
            const Float4 x = *(const Float4*)(transposed + row * PITCH + column);
            if (start + row < queries)
                target.put(batch, head, start + row, column, {x.x * scale, x.y * scale, x.z * scale, x.w * scale});
        }
        return;
    }
    constexpr int ACROSS = D / 8;
#pragma unroll
    for (int i = 0; i < HELPER_ROWS / 2 * ACROSS / 256; i++) {
        int unit = i * 256 + threadIdx.x, j = unit % ACROSS, pair = unit / ACROSS;
        int row = start + pair / 8 * 16 + pair % 8;
        put_pair(tile + (j / 8 * 4 + row % BM / 16) * FRAGMENT + j % 8 * 128 + row % 8 * 16, scale,
                 [&](int below, int right, const Float4& x) {
                     if (row + below < queries) target.put(batch, head, row + below, j * 8 + right, x);
                 });
    }
}

struct alignas(8) FloatPair { float x, y; };

DEVICE void put_share(FloatPair* at, const float (&x)[2], bool add) {
    FloatPair before = {0, 0};
    if (add) before = *at;
    *at = {x[0] + before.x, x[1] + before.y};
}

// Adds up the partial dV and dK of the key blocks that are split over CTAs, and writes the sums to dv and dk or adds
// them.
extern "C" __global__ void __launch_bounds__(256)
attention_cuda_bwd_sum_shares(const Rows dv, const Rows dk, const Problem p) {
    ShareSum x;
    if (!sum_share(dv, dk, p, x)) return;
    FloatPair* at = (FloatPair*)((float*)x.to.at + x.batch * x.to.batch + x.head * x.to.head + x.key * x.to.row +
                                 x.column);
    put_share(at, x.upper, p.add_keys);
    if (x.key + 8 < p.keys) put_share((FloatPair*)((float*)at + 8 * x.to.row), x.lower, p.add_keys);
}
