// A copy of parts/sm90/promotion.cuh, made by `nox -s vendor`: change it there.
// Products of fp8 whose sums of 128 terms are added in fp32: the scales of a step on their way to shared memory, a
// consumer's wgmmas of a step, and their promotion. Tiles are BLOCK_M x BLOCK_N: PARTS times 64 rows a consumer
// warpgroup, one after the other.
//
// The tensor cores must have work while a consumer promotes. Either a consumer has SETS 2 of their sums, so that the
// next step's wgmmas run meanwhile (tiles of 128 columns: 64 + 2 x 64 registers); or it has one, and the other
// consumer's run (192 columns: 96 + 96; twice 64 rows of 128 columns: 2 x 64 + 64). With TURNS consumers then take
// turns: one starts a step when the tensor cores have done PASSES of the four wgmmas of the other's last one. Without,
// nothing keeps two that started at the same time from promoting at the same time. Of several PARTS each is a step
// here.
//
// SCALING 1: no scales here. 2: scales of 1x128 of a and 128x128 of b. 3: scales of 1x128 of both.
// Defined by the launcher or before: SCALING, BLOCK_M, BLOCK_N, BLOCK_K, CONSUMERS, TURNS, PASSES, and what
// wgmma8.cuh wants.
#pragma once

#include "mbarrier.cuh"
#include "scales.cuh"
#include "wgmma.cuh"
#include "wgmma8.cuh"

constexpr int ROWS = BLOCK_M / CONSUMERS, PARTS = ROWS / 64, THREADS = 128 * (CONSUMERS + 1);
constexpr int SETS = BLOCK_N == 128 && PARTS == 1 ? 2 : 1, SUMS = BLOCK_N / 2;  // of a thread, for 64 rows
constexpr int SQUARE = BLOCK_N % 128 ? 64 : 128, SQUARES = BLOCK_N / SQUARE;  // columns with one scale of SCALING 2
constexpr int SCALE_B = 4 * BLOCK_M, SCALE_BYTES = SCALE_B + 4 * BLOCK_N;     // of a step; rows come first
constexpr int A_BYTES = BLOCK_M * BLOCK_K, B_BYTES = BLOCK_N * BLOCK_K, OPERAND_BYTES = A_BYTES + B_BYTES;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
static_assert(CONSUMERS == 2, "they take turns, and halve the rows");
static_assert(BLOCK_M == 128 || BLOCK_M == 256, "a producer thread has the scales of one row or two");
static_assert(0 < PASSES && PASSES < BLOCK_K / 32, "a turn passes within a step");
static_assert(OPERAND_BYTES % 1024 == 0, "operands with 128-byte swizzle begin at multiples of 1024");

struct Ring {
    int slot = 0;
    u32 phase = 0;
    DEVICE void next() {
        if (++slot == STAGES) slot = 0, phase ^= 1;
    }
};

// ---- Producer -----------------------------------------------------------------------------------------------------

// Of each 16 columns a thread has four that are no neighbours. Their scales are, so that one load gets them.
DEVICE int column_place(int column) {
    return (column & ~15) | (column & 6) << 1 | (column & 8) >> 2 | (column & 1);
}

// A step's scales by 128 producer threads, of which each copies those of every 128th row and, of SCALING 3, of every
// 128th column; of SCALING 2 some copy a square's. `of_a` and `of_b` are those of the tile's first row, and of the
// column (SCALING 3) or the square with which it begins; it has `rows` rows and begins at `column` with `columns`
// columns.
struct ScaleLoads {
    const float *a, *b;
    u64 next_row;       // from a
    int rows, columns;  // from this thread's on

    DEVICE ScaleLoads(const float* of_a, u64 a_row, int rows, const float* of_b, u64 b_row, int column, int columns) {
        const int thread = threadIdx.x, own = SCALING == 3 ? thread : (column % 128 + SQUARE * thread) / 128;
        a = of_a + thread * a_row, b = of_b + own * b_row, next_row = 128 * a_row;
        this->rows = rows - thread, this->columns = columns - (SCALING == 3 ? thread : SQUARE * thread);
    }
    // Starts the copies of the next block of k. Each thread arrives at `bar` when its own have come.
    DEVICE void copy(u32 to, u32 bar, u64 a_block, u64 b_block, u64 b_row) {
        const int thread = threadIdx.x;
        copy_scale(to + 4 * thread, a, rows > 0);
        if (BLOCK_M > 128) copy_scale(to + 4 * (128 + thread), a + next_row, rows > 128);
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

// Consumers start steps alternately: 0, 1, 0, 1, and so on. Each passes its turn once for each step that it has started.
// Consumer 1 starts its step n after consumer 0 has passed its turn n times, counted from 1, and consumer 0 after
// consumer 1 has passed it n - 1 times. So consumer 0's first wait must not block: it is for the parity that a new
// barrier has completed.
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

// The wgmmas of one step for 64 of a consumer's rows and the first N columns. With TURNS they are two groups.
template <int N> DEVICE void multiply(float (&d)[N / 2], u32 step, int consumer, bool add, int part = 0) {
    const u64 a = describe(step + (consumer * ROWS + part * 64) * BLOCK_K), b = describe(step + A_BYTES);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < BLOCK_K / 32; i++) {
        wgmma(d, a + i * (32 / 16), b + i * (32 / 16), add || i);
        if (TURNS && i == PASSES - 1) wgmma_commit();
    }
    wgmma_commit();
}

// A thread has columns 8 j + 2 (lane % 4) and the next of rows lane / 4 and lane / 4 + 8 of its warp's 16.
DEVICE int row_of(int consumer, int part = 0) {
    return consumer * ROWS + part * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
}

// Of a thread's two rows; of SCALING 2 times b's, by squares.
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

// sums += d, scaled.
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
