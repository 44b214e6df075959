// A copy of parts/sm90/promotion.cuh, made by `nox -s vendor`: change it there.
// fp8 GEMMs with promotion: the accumulators of each K-block of 128 are added to sums in fp32. Here are the loads of a
// K-block's scales to shared memory, a consumer's wgmmas of a K-block, and their promotion. Tiles are BLOCK_M x
// BLOCK_N, of which each consumer warpgroup computes 64 rows.
//
// The tensor cores must have work while a consumer promotes. Either a consumer has two sets of accumulators (SETS 2),
// so that the next K-block's wgmmas run meanwhile (tiles of 128 columns: 64 + 2 x 64 registers). Or it has one set, and
// the other consumer's wgmmas run (192 columns: 96 + 96). With TURNS consumers then alternate by K-blocks: one starts a
// K-block when the tensor cores have done half of the wgmmas of the other's last one. Without TURNS nothing keeps two
// that started at the same time from promoting at the same time.
//
// SCALING 1: no scales here. 2: scales of 1x128 of a and 128x128 of b. 3: scales of 1x128 of both.
// Defined by the launcher or before: SCALING, BLOCK_M, BLOCK_N, BLOCK_K, CONSUMERS, TURNS, and what wgmma8.cuh
// requires. Here `step` is a K-block or its pipeline stage, a `square` the tile's columns in one 128x128 block of b.
#pragma once

#include "mbarrier.cuh"
#include "scales.cuh"
#include "wgmma.cuh"
#include "wgmma8.cuh"

constexpr int ROWS = BLOCK_M / CONSUMERS, THREADS = 128 * (CONSUMERS + 1);
constexpr int SETS = BLOCK_N == 128 ? 2 : 1, SUMS = BLOCK_N / 2;  // of a thread
constexpr int SQUARE = BLOCK_N % 128 ? 64 : 128, SQUARES = BLOCK_N / SQUARE;  // columns with one scale of SCALING 2
constexpr int SCALE_B = 4 * BLOCK_M, SCALE_BYTES = SCALE_B + 4 * BLOCK_N;     // of a step; rows come first
constexpr int A_BYTES = BLOCK_M * BLOCK_K, B_BYTES = BLOCK_N * BLOCK_K, OPERAND_BYTES = A_BYTES + B_BYTES;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
static_assert(CONSUMERS == 2, "they take turns, and halve the rows");
static_assert(OPERAND_BYTES % 1024 == 0, "operands with 128-byte swizzle begin at multiples of 1024");

struct Ring {
    int slot = 0;
    u32 phase = 0;
    DEVICE void next() {
        if (++slot == STAGES) slot = 0, phase ^= 1;
    }
};

// ---- Producer -----------------------------------------------------------------------------------------------------

// Of each 16 columns a thread has four that are not adjacent. Their scales are stored adjacent, so that one load gets
// them.
DEVICE int column_place(int column) {
    return (column & ~15) | (column & 6) << 1 | (column & 8) >> 2 | (column & 1);
}

// Copies of a K-block's scales by 128 producer threads. Each copies those of a row and, with SCALING 3, of every 128th
// column; with SCALING 2 some copy a square's. `of_a` points to the scales of the tile's first row, `of_b` to those of
// its first column (SCALING 3) or square. The tile has `rows` rows, and `columns` columns from `column` on.
struct ScaleLoads {
    const float *a, *b;
    int rows, columns;  // from this thread's on

    DEVICE ScaleLoads(const float* of_a, u64 a_row, int rows, const float* of_b, u64 b_row, int column, int columns) {
        const int thread = threadIdx.x, own = SCALING == 3 ? thread : (column % 128 + SQUARE * thread) / 128;
        a = of_a + thread * a_row, b = of_b + own * b_row;
        this->rows = rows - thread, this->columns = columns - (SCALING == 3 ? thread : SQUARE * thread);
    }
    // Issues the copies of the next K-block. Each thread arrives on `bar` when its own copies are complete.
    DEVICE void copy(u32 to, u32 bar, u64 a_block, u64 b_block, u64 b_row) {
        const int thread = threadIdx.x;
        copy_scale(to + 4 * thread, a, rows > 0);
        if (SCALING == 3) {
            copy_scale(to + SCALE_B + 4 * column_place(thread), b, columns > 0);
            if (BLOCK_N > 128 && thread < BLOCK_N - 128)
                copy_scale(to + SCALE_B + 4 * (128 + column_place(thread)), b + 128 * b_row, columns > 128);
        } else if (thread < SQUARES) {
            copy_scale(to + SCALE_B + 4 * thread, b, columns > 0);
        }
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
        a += a_block, b += b_block;
    }
};

// ---- Consumers ----------------------------------------------------------------------------------------------------

// Consumers start K-blocks alternately: 0, 1, 0, 1, and so on. Each passes its turn once for each K-block that it has
// started. Consumer 1 starts its K-block n after consumer 0 has passed its turn n times, counted from 1, and consumer 0
// after consumer 1 has passed it n - 1 times. So consumer 0's first wait must not block: it waits for the parity of the
// phase before the first, which counts as complete on a new mbarrier.
struct Turn {
    u32 own, other, phase;
    DEVICE Turn(u32 bars, int consumer) : own(bars + 8 * consumer), other(bars + 8 - 8 * consumer), phase(!consumer) {}
    DEVICE void wait() {
        if (TURNS) bar_wait(other, phase), phase ^= 1;
    }
    DEVICE void pass() {
        if (TURNS && threadIdx.x % 32 == 0) bar_arrive(own);
    }
};

// The wgmmas of one K-block for a consumer's rows and the first N columns. With TURNS they are two commit groups.
template <int N> DEVICE void multiply(float (&d)[N / 2], u32 step, int consumer, bool add) {
    const u64 a = describe(step + consumer * ROWS * BLOCK_K), b = describe(step + A_BYTES);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < BLOCK_K / 32; i++) {
        wgmma(d, a + i * (32 / 16), b + i * (32 / 16), add || i);
        if (TURNS && i == BLOCK_K / 64 - 1) wgmma_commit();
    }
    wgmma_commit();
}

// A thread has columns 8 j + 2 (lane % 4) and the next of rows lane / 4 and lane / 4 + 8 of its warp's 16.
DEVICE int row_of(int consumer) { return consumer * ROWS + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }

// The scales of a thread's two rows; with SCALING 2 multiplied by b's, for each square.
struct RowScales {
    float high[SCALING == 2 ? SQUARES : 1], low[SCALING == 2 ? SQUARES : 1];
};

DEVICE RowScales load_row_scales(u32 scales, int row) {
    RowScales x;
    x.high[0] = SCALING == 1 ? 1 : load_float(scales + 4 * row);
    x.low[0] = SCALING == 1 ? 1 : load_float(scales + 4 * row + 32);
    if (SCALING == 2) {
#pragma unroll
        for (int i = SQUARES - 1; i >= 0; i--) {
            const float b = load_float(scales + SCALE_B + 4 * i);
            x.high[i] = x.high[0] * b, x.low[i] = x.low[0] * b;
        }
    }
    return x;
}

// Promotion: sums += d, scaled.
DEVICE void promote(float (&sums)[SUMS], const float (&d)[SUMS], const RowScales& rows, u32 scales) {
    const int quad = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < SUMS; j += 8) {  // 16 columns
        const float4 b = SCALING == 3 ? load_four(scales + SCALE_B + 8 * j + 16 * quad) : float4{1, 1, 1, 1};
        const int square = SCALING == 2 ? 2 * j / SQUARE : 0;
        const float high = rows.high[square], low = rows.low[square];
        if (SCALING == 1) {
#pragma unroll
            for (int i = 0; i < 8; i++) sums[j + i] += d[j + i];
        } else {
            sums[j] += d[j] * (high * b.x), sums[j + 1] += d[j + 1] * (high * b.y);
            sums[j + 2] += d[j + 2] * (low * b.x), sums[j + 3] += d[j + 3] * (low * b.y);
            sums[j + 4] += d[j + 4] * (high * b.z), sums[j + 5] += d[j + 5] * (high * b.w);
            sums[j + 6] += d[j + 6] * (low * b.z), sums[j + 7] += d[j + 7] * (low * b.w);
        }
    }
}
