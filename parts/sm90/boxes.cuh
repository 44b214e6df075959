// 16-bit results of a consumer on their way through shared memory, by TMA: they leave beside the next tile's steps,
// where stores from registers hold the consumer up until L2 has taken them. A consumer's 64 rows of a tile are
// OUT_BOXES boxes of OUT_COLUMNS columns. Rows of 128 and 64 bytes are swizzled; other ones (176 columns) lie side by
// side, so that of eight rows two at a time begin in the same bank.
//
// Defined before: BLOCK_N, SUMS and ROWS of promotion.cuh, and what numbers.cuh wants.
#pragma once

#include "numbers.cuh"
#include "tma.cuh"

constexpr int OUT_COLUMNS = BLOCK_N % 64 == 0 ? 64 : BLOCK_N % 32 == 0 ? 32 : BLOCK_N;
constexpr int OUT_BOXES = BLOCK_N / OUT_COLUMNS, OUT_PITCH = 2 * OUT_COLUMNS, OUT_BOX_BYTES = ROWS * OUT_PITCH;
static_assert(OUT_BOX_BYTES % 512 == 0, "boxes begin where their swizzle does");

// A barrier of a consumer's 128 threads.
DEVICE void sync_consumer(int consumer) { asm volatile("bar.sync %0, 128;" ::"r"(1 + consumer) : "memory"); }

// Until TMA has read what this thread had it store.
DEVICE void wait_for_boxes() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// By one thread, when all that wrote the box have passed fence_async() and a barrier. What is beyond the tensor is left
// out. The caller commits.
DEVICE void store_box(const TensorMap* map, int column, int row, int head, u32 box) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];"
                 ::"l"(map), "r"(column), "r"(row), "r"(head), "r"(0), "r"(box) : "memory");
}
DEVICE void commit_boxes() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Writes a consumer's sums into its boxes, 16 columns of a warp's 16 rows at a time: a lane has the address of row
// lane % 16 in the first or the last 8 of the columns.
DEVICE void stage_halves(u32 boxes, const float (&sums)[SUMS]) {
    constexpr int VECTORS = OUT_COLUMNS / 8;  // of 16 bytes, in a row of a box
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
    const int swizzle = OUT_PITCH == 128 ? row % 8 : OUT_PITCH == 64 ? row / 2 % 4 : 0;
    const u32 line = boxes + row * OUT_PITCH, vector = 16 * (lane / 16 ^ swizzle);
#pragma unroll
    for (int j = 0; j < BLOCK_N / 8; j += 2) {
        const float* const x = sums + 4 * j;
        const u32 to = line + j / VECTORS * OUT_BOX_BYTES + (16 * (j % VECTORS) ^ vector);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                     ::"r"(to), "r"(pack(x[0], x[1])), "r"(pack(x[2], x[3])), "r"(pack(x[4], x[5])),
                       "r"(pack(x[6], x[7])) : "memory");
    }
}
