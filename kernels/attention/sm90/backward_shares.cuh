// The reduction of partial dV and dK where key blocks are split over CTAs (`parts` of Problem). Included by
// backward_ends.cuh and backward_accumulate.cuh, whose kernels attention_cuda_bwd_sum_shares store the sums.
#pragma once

// How many splits are loaded at once, through shared memory. ptxas of CUDA 13 would issue loads into registers one
// after the other, and a sum would wait for L2 once for each split.
constexpr int SHARES_AT_ONCE = 8;

struct ShareSum {
    Rows to;
    int batch, head, key, column;  // position of `upper`; `lower` is 8 keys further
    float upper[2], lower[2];      // two columns
};

// Four elements of dV (even CTAs) or dK (odd CTAs), summed over the splits in their order. `parts` is [split
// block][split][dV, dK][row / 16][column / 8][row % 8][column % 8 / 2][4], as store_partial writes accumulator
// fragments: the last 4 are two columns of a row and the same columns of the row 8 below it. Returns false if the upper
// row is past the last key, as is the lower row then. If it returns true, the lower row may still be past it.
DEVICE bool sum_share(const Rows& dv, const Rows& dk, const Problem& p, ShareSum& result) {
    constexpr int CTAS = BN * D / 4 / 256;  // per block, for dv and for dk each
    int odd = blockIdx.x % 2, slot = blockIdx.x / (2 * CTAS), index = p.unshared + slot, all = index / p.n_blocks;
    int unit = blockIdx.x / 2 % CTAS * 256 + threadIdx.x, fragment = unit % (4 * D);
    int key = index % p.n_blocks * BN + unit / (4 * D) * 16 + fragment / 4 % 8;
    if (key >= p.keys) return false;
    const Float4* from = (const Float4*)(p.parts + ((long long)slot * p.splits * 2 + odd) * (BN * D)) + unit;
    __shared__ Float4 staged[SHARES_AT_ONCE][256];  // each thread reads what it copied itself
    Float4 sum = {0, 0, 0, 0};
    for (int first = 0; first < p.splits; first += SHARES_AT_ONCE) {
        int count = min(SHARES_AT_ONCE, p.splits - first);
        for (int i = 0; i < count; i++)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(&staged[i][threadIdx.x])),
                         "l"(from + (first + i) * (2 * BN * D / 4)) : "memory");
        asm volatile("cp.async.wait_all;" ::: "memory");
        for (int i = 0; i < count; i++) {
            const Float4 x = staged[i][threadIdx.x];
            sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
        }
    }
    float scale = odd ? p.scale : 1;
    // Member by member: selecting one of the two structs would put both into local memory.
    result.to = {odd ? dk.at : dv.at, odd ? dk.batch : dv.batch, odd ? dk.head : dv.head, odd ? dk.row : dv.row};
    result.batch = all / p.kv_heads, result.head = all % p.kv_heads;
    result.key = key, result.column = fragment / 32 * 8 + fragment % 4 * 2;
    result.upper[0] = sum.x * scale, result.upper[1] = sum.y * scale;
    result.lower[0] = sum.z * scale, result.lower[1] = sum.w * scale;
    return true;
}
