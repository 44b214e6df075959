// A copy of parts/sm90/boxes.cuh, made by `nox -s vendor`: change it there.
// 16-bit results of a consumer on their way through shared memory, by TMA: they leave beside the next tile's steps,
// where stores from registers hold the consumer up until L2 has taken them. A consumer's 64 rows of a tile are
// OUT_BOXES boxes of OUT_COLUMNS columns. Rows of 128 and 64 bytes are swizzled; other ones (176 columns) lie side by
// side, so that of eight rows two at a time begin in the same bank.
//
// Defined before: BLOCK_N, SUMS and ROWS of promotion.cuh, and what numbers.cuh wants.
#pragma once

#include "numbers.cuh"
#include "tma_store.cuh"

constexpr int OUT_COLUMNS = BLOCK_N % 64 == 0 ? 64 : BLOCK_N % 32 == 0 ? 32 : BLOCK_N;
constexpr int OUT_BOXES = BLOCK_N / OUT_COLUMNS, OUT_PITCH = 2 * OUT_COLUMNS, OUT_BOX_BYTES = ROWS * OUT_PITCH;
static_assert(OUT_BOX_BYTES % 512 == 0, "boxes begin where their swizzle does");

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
        store_blocks(to, {pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7])});
    }
}
