// Compile-time parameters of backward.cu, its tiles, and the layout of shared memory.
#pragma once

#include "backward_schedule.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#ifndef IS_CAUSAL
#define IS_CAUSAL 0
#endif
#ifndef ACCUMULATE  // dq, dk and dv are fp32 and added to (backward_accumulate.cuh)
#define ACCUMULATE 0
#endif
#ifndef QUERIES
#define QUERIES (HEAD_DIM == 64 ? 128 : 64)
#endif
// Where registers allow: V is then read from shared memory once.
#define V_IN_REGISTERS (HEAD_DIM == 64 && SCHEDULE != SINGLE_BLOCK && !IS_CAUSAL)

static_assert(!ACCUMULATE || SCHEDULE == CTA_PER_BLOCK, "the one schedule that has it");

constexpr int D = HEAD_DIM;
constexpr bool CAUSAL = IS_CAUSAL;
constexpr int BM = QUERIES;             // queries of a tile: S and dP take BM registers, and dk and dv take D
constexpr bool TIGHT = BM == 80;        // S, dP, dk and dv leave no registers for dQ
constexpr bool DQ_TRANSPOSED = BM % 64 != 0;  // dQ^T = K^T dS: the rows of a wgmma are 64
constexpr int DQ_REGISTERS = DQ_TRANSPOSED ? BM / 2 : 32;
constexpr int BN = 128;                 // keys of a block
constexpr int SLABS = D / 64;           // 64 columns are a row of the 128-byte swizzle
constexpr int Q_STAGES = TIGHT || SCHEDULE == SINGLE_BLOCK || (SCHEDULE == PERSISTENT && D == 128) ? 2 : 3;
constexpr int DO_STAGES = 2;
constexpr int CONSUMER_WARPS = 8;
constexpr int KEYS_DONE = 1, ROWS_WRITTEN = 2, PING_PONG = 4;  // named barriers; the last two have one for each group
constexpr int FRAGMENT = BM * D / CONSUMER_WARPS;  // elements of a tile of dq that one warp computes
constexpr u32 FRAGMENT_BYTES = FRAGMENT * (SCHEDULE == SINGLE_BLOCK ? 2 : 4);

// Offsets in shared memory, in bytes. Matrices first, each a multiple of 1024 bytes.
constexpr u32 Q_SLAB = BM * 128, K_SLAB = BN * 128;
constexpr u32 Q_BYTES = SLABS * Q_SLAB, K_BYTES = SLABS * K_SLAB, DS_BYTES = 2 * BM * 128;
constexpr u32 K_AT = 0, V_AT = K_AT + (SCHEDULE == PERSISTENT ? 2 : 1) * K_BYTES, Q_AT = V_AT + K_BYTES;
constexpr u32 DO_AT = Q_AT + Q_STAGES * Q_BYTES, DS_AT = DO_AT + DO_STAGES * Q_BYTES, DQ_AT = DS_AT + 2 * DS_BYTES;
constexpr u32 OUT_AT = DQ_AT + CONSUMER_WARPS * FRAGMENT_BYTES;  // tiles of out, with SINGLE_BLOCK
constexpr u32 ROWS_BYTES = 16 * 128, CAST_AT = OUT_AT;  // 16 rows of a slab; a buffer per warp, with CTA_PER_KV_HEAD
constexpr u32 LSE_AT = OUT_AT + (SCHEDULE == SINGLE_BLOCK      ? DO_STAGES * Q_BYTES
                                 : SCHEDULE == CTA_PER_KV_HEAD ? CONSUMER_WARPS * ROWS_BYTES
                                                               : 0);
constexpr u32 DELTA_AT = LSE_AT + Q_STAGES * BM * 4;
constexpr u32 BAR_AT = DELTA_AT + DO_STAGES * BM * 4;
constexpr u32 K_FULL = BAR_AT, V_FULL = K_FULL + 8, Q_FULL = V_FULL + 8, Q_EMPTY = Q_FULL + 8 * Q_STAGES;
constexpr u32 DO_FULL = Q_EMPTY + 8 * Q_STAGES, DO_EMPTY = DO_FULL + 8 * DO_STAGES;
constexpr u32 DS_FULL = DO_EMPTY + 8 * DO_STAGES, DS_EMPTY = DS_FULL + 16;
constexpr u32 ROWS_FULL = DS_EMPTY + 16, K_EMPTY = ROWS_FULL + (SCHEDULE == SINGLE_BLOCK ? 8 * DO_STAGES : 0);
constexpr u32 V_EMPTY = K_EMPTY + 8, SUM_FULL = V_EMPTY + 8;
constexpr u32 TILE_AT = SCHEDULE == CTA_PER_KV_HEAD ? SUM_FULL + 8 * CONSUMER_WARPS : K_EMPTY;
constexpr u32 SHARED_END = TILE_AT + 8 * Q_STAGES;
static_assert(BM == 128 ? D == 64 : D == 128 && (BM == 64 || BM == 80), "64 by 128, 128 by 64 or 80");
static_assert(SCHEDULE != SINGLE_BLOCK || FRAGMENT == 16 * 64, "a warp's part of dq is a box of swizzled rows");
static_assert(SCHEDULE != CTA_PER_KV_HEAD || BM == 64, "a warp's part of dq is a box of rows, and an fp32 sum");
static_assert(SCHEDULE != ROLES || D == 128, "tiles of 64 or 80 queries, summed by all");
static_assert(SHARED_END <= 232448, "a CTA has 227 KB of shared memory");
