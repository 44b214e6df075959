// What the layers' forward and backward share: tiles of rows, panels in shared memory, the weights' ring, products.
//
// A thread has of 64 x 64 sums columns 8 j + 2 (lane % 4) and the next, of the rows lane / 4 and lane / 4 + 8 of its
// warp's 16: d[4 j] and d[4 j + 1] of the first, d[4 j + 2] and d[4 j + 3] of the second. Packed to 16 bits these are
// x[2 j] and x[2 j + 1], and four of them wgmma's operand for 16 terms.
//
// Defined by the launcher: SHARED (bytes of shared memory), HIDDEN_PANELS (of 64 columns of the hidden), GAMMA32 (the
// norms' weights are fp32, not 16 bits), FP16.
#pragma once

constexpr int CLUSTER = 8;

#include "layers_ptx.cuh"

constexpr int ROWS = 64, WIDTH = CLUSTER * 64, WIDTH_PANELS = CLUSTER, HIDDEN_PITCH = 64 * HIDDEN_PANELS;
constexpr int PANEL = ROWS * 64 * 2, PANELS = 22, SLOTS = 6, GROUPS = (HIDDEN_PANELS + 7) / 8;
constexpr int RING = PANELS * PANEL, SUMS = RING + SLOTS * PANEL, BARRIERS = SUMS + CLUSTER * ROWS * 4;
constexpr int FULL = BARRIERS, EMPTY = FULL + 8 * SLOTS, ROWS_FULL = EMPTY + 8 * SLOTS, HEADS_FULL = ROWS_FULL + 8,
              HIDDEN_FULL = HEADS_FULL + 8, SUMS_FULL = HIDDEN_FULL + 8 * 3, KEYS_FULL = SUMS_FULL + 8,
              KEYS_FREE = KEYS_FULL + 8, DK_FULL = KEYS_FREE + 8, DV_FULL = DK_FULL + 8, ROWS_WRITTEN = DV_FULL + 8,
              KEYS_WRITTEN = ROWS_WRITTEN + 8, HEADS_WRITTEN = KEYS_WRITTEN + 8, HIDDEN_WRITTEN = HEADS_WRITTEN + 8,
              DONE = HIDDEN_WRITTEN + 8 * 3, END = DONE + 8 * 5;
constexpr int CONSUMERS = 128, THREADS = CONSUMERS + 96;  // a warpgroup; warps for weights, for keys, for messages
constexpr float LOG2_E = 1.4426950408889634f;
static_assert(HIDDEN_PANELS >= CLUSTER && HIDDEN_PANELS <= PANELS && END == SHARED);

#if GAMMA32
typedef float Gamma;
#else
typedef u16 Gamma;
#endif

// Rows of `sequences` sequences, of which the first `context` of each are keys.
struct Shape {
    int sequences, context, rows, layers;
    float eps, scale;  // of the scores
};

// The rows of a cluster: of one sequence, from `first` on, at most 64.
struct Tile {
    int sequence, first, count;
    bool context;
};

// How many clusters the targets of one sequence take. In the forward's grid the context's clusters, one a sequence, come
// before all of these; in the backward's after them.
DEVICE int targets_tiles(const Shape& a) { return (a.rows - a.context + ROWS - 1) / ROWS; }

DEVICE Tile find_tile(const Shape& a) {
    const int cluster = blockIdx.x / CLUSTER, t = cluster - a.sequences, of_targets = targets_tiles(a);
    if (t < 0) return {cluster, 0, a.context, true};
    const int first = a.context + t % of_targets * ROWS, left = a.rows - first;
    return {t / of_targets, first, left < ROWS ? left : ROWS, false};
}

struct Ring {
    int slot = 0;
    u32 phase = 0;
    DEVICE void next() {
        if (++slot == SLOTS) slot = 0, phase ^= 1;
    }
};

// 64 x 64 panels of a layer's weight, one after the other along its rows (row_step 0) or along its columns (64).
struct Panels {
    const TensorMap* map;
    int row, column, row_step, count;
    DEVICE int row_of(int p) const { return row + row_step * p; }
    DEVICE int column_of(int p) const { return column + (64 - row_step) * p; }
};

// The warp that fills the ring.
struct Weights {
    u32 smem;
    Ring ring;
    DEVICE void load(const Panels& a, int layer) {
        for (int p = 0; p < a.count; p++, ring.next()) {
            bar_wait(smem + EMPTY + 8 * ring.slot, ring.phase ^ 1);
            bar_expect(smem + FULL + 8 * ring.slot, PANEL);
            tma_load(smem + RING + ring.slot * PANEL, a.map, a.column_of(p), a.row_of(p), layer, 0,
                     smem + FULL + 8 * ring.slot);
        }
    }
};

// All clusters read the same panels at about the same time. Without prefetching into L2 each load would wait for device
// memory, with no more in flight than the pipeline stages hold. Of n clusters each prefetches every n-th panel.
struct Ahead {
    int panel = blockIdx.x / CLUSTER;  // the next panel that this cluster prefetches, relative to `a`'s first
    DEVICE void ask(const Panels& a, int layer) {
        for (; panel < a.count; panel += gridDim.x / CLUSTER)
            tma_prefetch(a.map, a.column_of(panel), a.row_of(panel), layer);
        panel -= a.count;
    }
};

DEVICE void begin(u32 smem) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; i++) {
            bar_init(smem + FULL + 8 * i, 1);
            bar_init(smem + EMPTY + 8 * i, CONSUMERS / 32);
        }
        for (int bar = ROWS_FULL; bar < ROWS_WRITTEN; bar += 8) bar_init(smem + bar, 1);
        for (int bar = ROWS_WRITTEN; bar < DONE; bar += 8) bar_init(smem + bar, CONSUMERS / 32);
        for (int bar = DONE; bar < END; bar += 8) bar_init(smem + bar, CLUSTER);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    cluster_sync();
}

// ---- 64 x 64 numbers of a warpgroup ---------------------------------------------------------------------------------

DEVICE int first_row() { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4; }
DEVICE int first_column() { return threadIdx.x % 4 * 2; }

DEVICE void clear(float (&d)[32]) {
#pragma unroll
    for (int i = 0; i < 32; i++) d[i] = 0;
}

DEVICE void pack_all(u32 (&x)[16], const float (&d)[32]) {
#pragma unroll
    for (int i = 0; i < 16; i++) x[i] = pack(d[2 * i], d[2 * i + 1]);
}

DEVICE void unpack_all(float (&d)[32], const u32 (&x)[16]) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float2 pair = unpack(x[i]);
        d[2 * i] = pair.x, d[2 * i + 1] = pair.y;
    }
}

DEVICE void swap_between(u32& kept_low, u32& kept_high, int bit) {
    const bool high = threadIdx.x & bit;
    const u32 got = __shfl_xor_sync(~0u, high ? kept_low : kept_high, bit);
    if (high) kept_low = got;
    else kept_high = got;
}

// Writes to rows of `pitch` elements, of which there are `rows`. Four lanes exchange what they have of four blocks of 8
// columns, so that each stores 16 bytes.
DEVICE void store_panel(u16* to, int pitch, int rows, const u32 (&x)[16]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = first_row() + 8 * half;
#pragma unroll
        for (int c = 0; c < 2; c++) {
            u32 w[4];
#pragma unroll
            for (int j = 0; j < 4; j++) w[j] = x[2 * (4 * c + j) + half];
            swap_between(w[0], w[1], 1);
            swap_between(w[2], w[3], 1);
            swap_between(w[0], w[2], 2);
            swap_between(w[1], w[3], 2);
            if (row < rows) store_vector_global(to + (long long)row * pitch + 32 * c + 4 * first_column(), w);
        }
    }
}

// Reads the same; rows that are not there are 0.
DEVICE void load_panel(u32 (&x)[16], const u16* from, int pitch, int rows) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = first_row() + 8 * half;
        const u16* const at = from + (long long)row * pitch + first_column();
#pragma unroll
        for (int j = 0; j < 8; j++) x[2 * j + half] = row < rows ? load_early((const u32*)(at + 8 * j)) : 0;
    }
}

DEVICE void load_gamma(float (&gamma)[16], const Gamma* from) {
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) gamma[2 * j + i] = load_early(from + 8 * j + first_column() + i);
}

// Adds up what the four lanes of a row have.
DEVICE float sum_of_row(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// ---- The warp for messages ------------------------------------------------------------------------------------------

struct Place {
    const Shape& shape;
    const Tile tile;
    const u32 smem;
    const int rank;

    // Of tensor `i` of [..., sequences, rows].
    DEVICE u64 row_of(int i) const { return ((u64)i * shape.sequences + tile.sequence) * shape.rows + tile.first; }

    // This CTA's head of a layer, of [layers, sequences, CLUSTER].
    DEVICE u64 head_of(int layer) const { return ((u64)layer * shape.sequences + tile.sequence) * CLUSTER + rank; }
};

// One thread that sends on what the consumers wrote to memory. The fence that waits for their stores takes some 700
// cycles; meanwhile the consumers go on.
struct Messenger : Place {
    DEVICE void wait(int bar, u32 phase) const { bar_wait(smem + bar, phase); }

    // A panel that this CTA wrote goes to all CTAs of the cluster. `i` is as in row_of.
    DEVICE void spread(const TensorMap* map, int panel, int column, int i, int bar) const {
        fence_for_tma_loads();
        tma_multicast(smem + panel * PANEL, map, column, tile.first, smem + bar, i * shape.sequences + tile.sequence);
    }
    // Panel `panel` + rank of eight, one from each CTA.
    DEVICE void spread_one_each(const TensorMap* map, int panel, int column, int i, int bar) const {
        bar_expect(smem + bar, CLUSTER * PANEL);
        spread(map, panel + rank, column + 64 * rank, i, bar);
    }

    // Panels rank, rank + 8 and rank + 16 of the hidden: the first as soon as it is written, the others when all CTAs have
    // done with what lies there.
    DEVICE void spread_hidden(const TensorMap* map, int layer, int done, u32 phase) const {
        for (int g = 0; g < GROUPS; g++) {
            const int left = HIDDEN_PANELS - 8 * g, panel = 8 * g + rank;
            bar_expect(smem + HIDDEN_FULL + 8 * g, (left < 8 ? left : 8) * PANEL);
            if (g == 1) wait(done, phase);
            if (panel >= HIDDEN_PANELS) continue;
            wait(HIDDEN_WRITTEN + 8 * g, phase);
            spread(map, panel, 64 * panel, layer, HIDDEN_FULL + 8 * g);
        }
    }
};

// ---- The consumers' warpgroup ---------------------------------------------------------------------------------------

struct Exchange : Place {
    Ring ring;
    u32 sums_phase = 0;

    // Gives a slot of the ring back: the warp's wgmmas that read it are complete.
    DEVICE void release(int slot) {
        if (threadIdx.x % 32 == 0) bar_arrive(smem + EMPTY + 8 * slot);
    }

    // d += panels, from `first` on, times the weights' next panels, which lie along their columns (B_ROWS 0) or rows.
    // The hidden is waited for in groups of 8 panels.
    template <int B_ROWS, bool OF_HIDDEN = false>
    DEVICE void multiply(float (&d)[32], int first, int panels, u32 phase = 0) {
        constexpr int W_STEP = B_ROWS ? 16 * 128 / 16 : 32 / 16;
        int before = 0;
        pin(d);  // accumulators keep their registers in the loop: otherwise ptxas waits after each wgmma
#pragma unroll 1
        for (int p = 0; p < panels; p++, ring.next()) {
            if (OF_HIDDEN && p % 8 == 0) bar_wait(smem + HIDDEN_FULL + p, phase);
            bar_wait(smem + FULL + 8 * ring.slot, ring.phase);
            const u64 x = describe(smem + (first + p) * PANEL, PANEL);
            const u64 w = describe(smem + RING + ring.slot * PANEL, PANEL);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; i++) wgmma_64<0, B_ROWS>(d, x + 2 * i, w + W_STEP * i);
            wgmma_commit();
            wgmma_wait<1>();
            if (p) release(before);
            before = ring.slot;
        }
        wgmma_wait<0>();
        pin(d);
        release(before);
    }

    // Tells the messenger that this warp has written to memory; its fence makes that visible to TMA.
    DEVICE void report(int bar) {
        __threadfence_block();
        __syncwarp();
        if (threadIdx.x % 32 == 0) bar_arrive(smem + bar);
    }

    // This CTA has read what others want to write over. By all threads.
    DEVICE void say_done(int bar) {
        warpgroup_sync(1);
        if (threadIdx.x < 32) arrive_at_all(smem + bar);
    }

    // Sums over all columns of what each CTA has of the rows. They are not overwritten too early: `own` is computed from
    // panels that the other CTAs sent after they had read the sums before.
    DEVICE void send_sums(const float (&own)[2]) {
        if (threadIdx.x == 0) bar_expect(smem + SUMS_FULL, CLUSTER * ROWS * 4);
        __syncwarp();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float sum = sum_of_row(own[half]);
            const u32 to = smem + SUMS + (rank * ROWS + first_row() + 8 * half) * 4;
            send(to, smem + SUMS_FULL, first_column(), sum);
            send(to, smem + SUMS_FULL, first_column() + 1, sum);
        }
    }
    DEVICE void wait_for_sums(float (&whole)[2]) {
        bar_wait(smem + SUMS_FULL, sums_phase);
        sums_phase ^= 1;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            whole[half] = 0;
#pragma unroll
            for (int c = 0; c < CLUSTER; c++)
                whole[half] += shared_float(smem + SUMS + (c * ROWS + first_row() + 8 * half) * 4);
        }
    }
};
