// The GEMMs of a tile, and the softmax between them, by one warp group. Included by backward.cu.
#pragma once

// Hides from the compiler that an operand address is loop-invariant, as most are. It would hoist them all out of the
// loop, and spill.
DEVICE void no_hoist(u32& at) { asm volatile("" : "+r"(at)); }

// S^T or dP^T of 64 keys x BM queries. `rows`, `columns`: operands A and B in shared memory.
DEVICE void scores(float (&c)[BM / 2], u32 rows, u32 columns) {
    no_hoist(rows);
#pragma unroll
    for (int k = 0; k < D / 16; k++)
        mma<0>(c, along(rows + k / 4 * (K_SLAB / 16) + k % 4 * 2), along(columns + k / 4 * (Q_SLAB / 16) + k % 4 * 2),
               k != 0);
    wgmma_commit();
}
#if V_IN_REGISTERS
// The same with V from registers.
DEVICE void scores(float (&c)[BM / 2], const u32 (&rows)[D / 4], u32 columns) {
#pragma unroll
    for (int k = 0; k < D / 16; k++)
        mma<0>(c, rows + 4 * k, along(columns + k / 4 * (Q_SLAB / 16) + k % 4 * 2), k != 0);
    wgmma_commit();
}
#endif
// dV += P^T dO or dK += dS^T Q
DEVICE void gradient(float (&c)[D / 2], const u32 (&a)[BM / 4], u32 columns) {
#pragma unroll
    for (int k = 0; k < BM / 16; k++) mma<1>(c, a + 4 * k, across<Q_SLAB>(columns + k * 128), 1);
    wgmma_commit();
}
// dQ = dS K of 64 queries x 64 columns, over all 128 keys.
DEVICE void query_gradient(float (&c)[32], u32 ds, u32 keys) {
    no_hoist(keys);
#pragma unroll
    for (int k = 0; k < BN / 16; k++)
        mma<1>(c, along(ds + k / 4 * (BM * 8) + k % 4 * 2), across<K_SLAB>(keys + k * 128), k != 0);
    wgmma_commit();
}

// A thread has scores of two keys (rows). Query (column) c of the tile sees the first if c >= limit0, the second if c
// >= limit1. Both limits are relative to this thread's first column.
DEVICE void mask(float (&s)[BM / 2], int limit0, int limit1) {
#pragma unroll
    for (int j = 0; j < BM / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (8 * j + (e & 1) < (e < 2 ? limit0 : limit1)) s[4 * j + e] = -INFINITE;
}
// Queries (columns) from `end` on, relative to this thread's first column, do not exist. Their scores are 0, but NaN for
// a key with inf, whose probability would then be NaN, although lse2 is +inf.
DEVICE void mask_end(float (&s)[BM / 2], int end) {
#pragma unroll
    for (int i = 0; i < BM / 2; i++)
        if (i / 4 * 8 + i % 2 >= end) s[i] = 0;
}
DEVICE void probabilities(float (&s)[BM / 2], u32 lse, float scale_log2) {
#pragma unroll
    for (int j = 0; j < BM / 8; j++) {
        Float2 l = shared_pair(lse + j * 32);
#pragma unroll
        for (int e = 0; e < 4; e++) s[4 * j + e] = exp2_(s[4 * j + e] * scale_log2 - (e & 1 ? l.y : l.x));
    }
}
DEVICE void score_gradients(const float (&s)[BM / 2], const float (&dp)[BM / 2], u32 (&p)[BM / 4], u32 (&ds)[BM / 4],
                            u32 delta) {
#pragma unroll
    for (int j = 0; j < BM / 8; j++) {
        Float2 d = shared_pair(delta + j * 32);
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int i = 4 * j + 2 * e;
            p[i / 2] = pack(s[i], s[i + 1]);
            ds[i / 2] = pack(s[i] * (dp[i] - d.x), s[i + 1] * (dp[i + 1] - d.y));
        }
    }
}
