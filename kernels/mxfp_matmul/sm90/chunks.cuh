// The pipeline and the main loop of few_rows.cu and many_rows.cu. A pipeline stage (a slot of the circular buffer Ring)
// contains a chunk: a K-block of 128. A consumer warpgroup has 64 rows of w in registers as wgmma's A operand; x is the
// B operand, in shared memory as TMA writes it.
#pragma once

#include "mbarrier.cuh"
#include "unpack.cuh"
#include "wgmma_rows.cuh"

constexpr int ROWS = 64 * GROUPS, THREADS = 128 * GROUPS + 32;
constexpr int CHUNK = 128, PANEL = COLS * 128;  // elements of K; bytes of 64 columns of x
constexpr int SCALE_BYTES = NVFP4 ? 8 : 4;      // per row of a chunk
constexpr int X_BYTES = 2 * PANEL, W_BYTES = ROWS * CHUNK / 2, S_BYTES = ROWS * SCALE_BYTES;  // per chunk
constexpr int W_RING = STAGES * X_BYTES, S_RING = W_RING + STAGES * W_BYTES;
constexpr int FULL = S_RING + STAGES * S_BYTES, EMPTY = FULL + 8 * STAGES;  // offsets of the barriers

struct Problem {
    void* y;
    const char *w, *scales;
    const float* tensor_scale;  // only NVFP4
    int rows, columns, chunks;  // of y; of K
};

struct Ring {
    int slot = 0;
    u32 phase = 0;
    DEVICE void next() {
        if (++slot == STAGES) slot = 0, phase ^= 1;
    }
};

// `bytes` and both addresses are multiples of 16.
DEVICE void bulk_load(u32 to, const char* from, int bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}

// Loads w and scales of `width` rows of a chunk, each contiguous in memory.
DEVICE void load_weights(const Problem& p, int chunk, int column, int width, u32 smem, int slot, u32 bar) {
    const u64 row = (u64)chunk * p.columns + column;
    bulk_load(smem + W_RING + slot * W_BYTES, p.w + row * (CHUNK / 2), width * (CHUNK / 2), bar);
    bulk_load(smem + S_RING + slot * S_BYTES, p.scales + row * SCALE_BYTES, width * SCALE_BYTES, bar);
}

// The scales of a row in a chunk, from shared memory.
DEVICE uint2 load_scales(const char* from) {
    return NVFP4 ? *(const uint2*)from : make_uint2(*(const u32*)from, 0);
}

// The main loop: d += w x over `steps` chunks; a warp has 16 of its warpgroup's 64 rows of w. Calls `release` for each
// stage except the last, and returns that one.
template <class Release>
DEVICE int multiply(float (&d)[COLS / 2], const char* shared, u32 smem, Ring& ring, int steps, const Release& release) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const char* const w = shared + W_RING + (warp * 64 + lane) * 16;
    const char* const scales = shared + S_RING + (warp * 16 + lane / 4) * SCALE_BYTES;
    u32 a[2][16] = {};
    int before = 0;
#pragma unroll 1
    for (int step = 0; step < steps; step++, ring.next()) {
        bar_wait(smem + FULL + 8 * ring.slot, ring.phase);
        const u64 x = describe(smem + ring.slot * X_BYTES);
        const uint2 low = load_scales(scales + ring.slot * S_BYTES);
        const uint2 high = load_scales(scales + ring.slot * S_BYTES + 8 * SCALE_BYTES);
        const int4* const from = (const int4*)(w + ring.slot * W_BYTES);
        const int4 words[2] = {from[0], from[32]};
        const bool is_plain = plain(low.x, high.x);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            unpack(a[half], words[half], low, high, half, is_plain);
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < 4; j++) wgmma(d, a[half] + 4 * j, x + (half * PANEL + j * 32) / 16);
            wgmma_commit();
            wgmma_wait<1>();
            pin(a[1 - half]);  // the previous wgmmas have read them
            // No fence_reads: reads of this stage may be pending, but the previous one's words were wgmma operands.
            if (half == 0 && step) release(before);
        }
        before = ring.slot;
    }
    wgmma_wait<0>();
    pin(a[1]);
    pin(d);
    return before;
}
