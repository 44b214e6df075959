// Before and after the main kernel of backward.cu, which includes this: memory-bound, a few bytes a query.
#pragma once

DEVICE const Uint4* chunk(const Rows& x, int batch, int head, int row, int column) {
    return (const Uint4*)((const u16*)x.at + batch * x.batch + head * x.head + row * x.row + column);
}

constexpr int HELPER_ROWS = DQ_TRANSPOSED ? BM : 64;  // of a CTA of 256 threads; 16 bytes a thread

// lse, dlse: [B * heads, queries]; dlse may be null. Writes lse2 and delta and zeros the same rows of dq's sum, but
// where CTA_PER_KV_HEAD, for there the first block of keys stores what others add to; and, unless it is null, where
// tickets begin.
extern "C" __global__ void __launch_bounds__(256)
attention_cuda_bwd_preprocess(const Rows out, const Rows dout, const float* lse, const float* dlse, float* lse2,
                              float* delta, float* dq_sum, int queries, int padded, int heads, int* ticket,
                              int drawn) {
    if (ticket != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *ticket = drawn;
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

// Sums lie in pieces of 16 rows, each as [column / 8][row % 8][column % 8 / 2][4]: of the last four, two columns of the
// row and two of the row 8 rows on. Adds up 8 columns of both rows over `count` sums that lie `step` apart, and casts.
DEVICE void cast_pair(const float* from, int count, long long step, float scale, Uint4& upper,
                                          Uint4& lower) {
    Float4 sum[4] = {};
    for (int i = 0; i < count; i++) {
#pragma unroll
        for (int t = 0; t < 4; t++) {
            Float4 x = ((const Float4*)(from + i * step))[t];
            sum[t].x += x.x, sum[t].y += x.y, sum[t].z += x.z, sum[t].w += x.w;
        }
    }
    u32 a[4], b[4];
#pragma unroll
    for (int t = 0; t < 4; t++) {
        a[t] = pack(sum[t].x * scale, sum[t].y * scale);
        b[t] = pack(sum[t].z * scale, sum[t].w * scale);
    }
    upper = {a[0], a[1], a[2], a[3]}, lower = {b[0], b[1], b[2], b[3]};
}

// dq = scale * its sum.
extern "C" __global__ void __launch_bounds__(256)
attention_cuda_bwd_postprocess(const Rows dq, const float* dq_sum, int queries, int padded, int heads, float scale) {
    constexpr int ACROSS = D / 8;
    int tiles = padded / HELPER_ROWS, all = blockIdx.x / tiles, start = blockIdx.x % tiles * HELPER_ROWS;
    int batch = all / heads, head = all % heads;
    const float* tile = dq_sum + ((long long)all * padded + start / BM * BM) * D;
    if constexpr (DQ_TRANSPOSED) {
        // Each warp has one piece: 16 columns of the tile, [query / 8][column % 8][query % 8 / 2][4], of the last four
        // two queries of a column and two of the column 8 on. They turn in shared memory, in rows that lie 16 bytes
        // apart from a multiple of 128.
        __shared__ Uint4 transposed[BM][D / 8 + 1];
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const Float4* piece = (const Float4*)(tile + warp * PIECE) + lane;
        u32 to = shared_address(&transposed[lane / 16 * 8 + lane % 8][warp * 2 + lane / 8 % 2]);
#pragma unroll
        for (int j = 0; j < BM / 8; j += 2) {
            Float4 x = piece[j * 32], y = piece[j * 32 + 32];
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
        cast_pair(tile + (j / 8 * 4 + row % BM / 16) * PIECE + j % 8 * 128 + row % 8 * 16, 1, 0, scale, upper, lower);
        if (row < queries) *(Uint4*)chunk(dq, batch, head, row, j * 8) = upper;
        if (row + 8 < queries) *(Uint4*)chunk(dq, batch, head, row + 8, j * 8) = lower;
    }
}

// dv (even CTAs) and dk (odd ones) of the blocks that several CTAs shared, summed in the order of the shares: two rows'
// 8 columns a thread, for as many loads in flight as there can be.
extern "C" __global__ void __launch_bounds__(256)
attention_cuda_bwd_sum_shares(const Rows dv, const Rows dk, const Problem p) {
    constexpr int CTAS = BN / 2 * D / 8 / 256;  // to a block's dv or dk
    int odd = blockIdx.x % 2, slot = blockIdx.x / (2 * CTAS), index = p.unshared + slot, all = index / p.n_blocks;
    int batch = all / p.kv_heads, head = all % p.kv_heads, first_key = index % p.n_blocks * BN;
    // Member by member: a choice between the two would put both into local memory.
    const Rows to = {odd ? dk.at : dv.at, odd ? dk.batch : dv.batch, odd ? dk.head : dv.head, odd ? dk.row : dv.row};
    const float* sums = p.parts + ((long long)slot * p.splits * 2 + odd) * (BN * D);
    int unit = blockIdx.x / 2 % CTAS * 256 + threadIdx.x, j = unit % (D / 8), pair = unit / (D / 8);
    int row = pair / 8 * 16 + pair % 8;
    Uint4 upper, lower;
    cast_pair(sums + row / 16 * (16 * D) + j * 128 + row % 8 * 16, p.splits, 2 * BN * D, odd ? p.scale : 1, upper,
              lower);
    if (first_key + row < p.keys) *(Uint4*)chunk(to, batch, head, first_key + row, j * 8) = upper;
    if (first_key + row + 8 < p.keys) *(Uint4*)chunk(to, batch, head, first_key + row + 8, j * 8) = lower;
}
