// Part of narrow.cu, which explains it: the blocks, the shared memory layout, and the blocks of each cluster.
#pragma once

#include "cluster.cuh"
#include "tma.cuh"
#include "types.cuh"

enum Epilogue { ACT, GATE, DACT, DGATE };

constexpr int BLOCK_M = 128, BLOCK_K = 64, CONSUMERS = 2, ROWS = BLOCK_M / CONSUMERS, THREADS = 128 * (CONSUMERS + 1);
constexpr int WEIGHTS = EPILOGUE == GATE ? 2 : 1;  // weights in b, COLUMNS of each
constexpr int PANEL = ROWS * 128;                  // bytes of 64 rows of 64 columns
constexpr int IN_FLIGHT = 128 / (WEIGHTS * COLUMNS);  // K-blocks whose wgmmas stay in flight
static_assert(IN_FLIGHT == 1 || IN_FLIGHT == 2);
constexpr int WEIGHT_BYTES = COLUMNS * BLOCK_K * 2, STEP_BYTES = WEIGHTS * WEIGHT_BYTES;

// Epilogue tiles: of the tensors that are loaded or stored. Of DACT and DGATE the first are loaded.
constexpr int TENSORS = EPILOGUE == ACT || EPILOGUE == DACT ? 2 : 3;
constexpr int LOADED = EPILOGUE == DACT ? 1 : EPILOGUE == DGATE ? 2 : 0;
constexpr int TILE_BYTES = ROWS * COLUMNS * 2;
constexpr int USED = (STORES | (1 << LOADED) - 1) & (1 << TENSORS) - 1;  // bits of the tensors that have tiles
__device__ constexpr bool stored(int tensor) { return STORES >> tensor & 1; }
__device__ constexpr int place_of(int tensor) {
    const int before = USED & (1 << tensor) - 1;
    return (before & 1) + (before >> 1 & 1) + (before >> 2 & 1);
}
constexpr int TILES = place_of(TENSORS);  // epilogue tiles of a consumer

// Shared memory layout.
constexpr int A_RING = STAGES * STEP_BYTES, TILE = A_RING + A_STAGES * PANEL;
constexpr int BIASES = TILE + CONSUMERS * TILES * TILE_BYTES;  // fp32, COLUMNS for each consumer
constexpr int FULL = BIASES + CONSUMERS * COLUMNS * 4, EMPTY = FULL + 8 * STAGES;
constexpr int A_FULL = EMPTY + 8 * STAGES, A_EMPTY = A_FULL + 8 * CONSUMERS * A_STAGES;
constexpr int READY = A_EMPTY + 8 * A_STAGES, STAGED = READY + 8 * CONSUMERS;
constexpr int AHEAD = 3;  // how many blocks before its use a is prefetched into L2
static_assert(STAGES >= STEPS && (A_STAGES & A_STAGES - 1) == 0 && THREADS == 384);

struct Problem {
    const u16* bias;
    u64 bias_stride;
    const u16* copied;  // [copied_rows, cols]; `copy` has rows of `pitch` elements
    u16* copy;
    u64 copied_strides[2];
    int rows, cols, pitch;  // of the result; its tensors have rows of `pitch` elements
    int copied_rows;
};

struct Maps {
    const TensorMap *a, *b, *b_more, *read[2], *written[3];  // read are pre and gate
};

// ---- Blocks -------------------------------------------------------------------------------------------------------

struct Range {
    int first, last, columns;  // this cluster's blocks; number of blocks of a row tile
};

DEVICE Range range_of(const Problem& p) {
    const int columns = (p.pitch + COLUMNS - 1) / COLUMNS;
    const u64 blocks = (u64)((p.rows - 1) / (CLUSTER * BLOCK_M) + 1) * columns;
    const u32 cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
    return {(int)(blocks * cluster / clusters), (int)(blocks * (cluster + 1) / clusters), columns};
}

// The first row of this CTA in a band of CLUSTER vertically adjacent row tiles.
DEVICE int row_of(int band) { return (band * CLUSTER + cluster_rank()) * BLOCK_M; }

struct Ring {
    int slot = 0;
    u32 phase = 0;
    DEVICE void next() {
        if (++slot == STAGES) slot = 0, phase ^= 1;
    }
    // The stage of `steps` K-blocks before.
    DEVICE int before(int steps) const { return slot < steps ? slot - steps + STAGES : slot - steps; }
};
