// The logits of linear_cross_entropy for Hopper (sm_90a): z = hidden weightᵀ + bias, a persistent, warp-specialised
// GEMM by TMA and wgmma. logits.py compiles and launches it.
//
//   EPILOGUE 0  STATS     of each row, over a tile's columns: maximum, Σ exp(l - maximum), Σ l, l of the target; no z
//            1  LOGITS    the same, and zᵀ
//            2  GRADIENT  (∂loss/∂z)ᵀ, from the lse of each row
//
// M is the rows of hidden, N the vocabulary, K is H; a is hidden, b is weight. A thread has 48 columns of each of four
// rows, so that it reduces over columns by itself; only the four threads of a row exchange results. zᵀ and its gradient
// are stored transposed, which is the layout in the rest of this operator: movmatrix transposes 8 x 8 blocks, then each
// lane stores four rows of a column.
//
// Back-of-the-envelope estimate for one K-block of 64 of a 128 x 192 tile, in cycles of an SM: 768 for the tensor
// cores, 832 for shared memory (a and b written once, b read by two wgmmas), 32 bytes a cycle from L2 if two CTAs share
// b. An epilogue has 24576 elements with some ten instructions each (round, subtract, scale, exponential, add): 1900
// cycles at 128 instructions a cycle, 1540 at 16 exponentials a cycle. This is as long as two K-blocks. K = 2048 has 32
// of them, K = 4096 has 64.
//
// Ping-pong: each of the two consumer warpgroups computes its own tiles, and one runs its main loop while the other
// runs its epilogue. The 128 rows of a tile are two wgmmas of 64 x BLOCK_N that read the same b. The producer, one
// thread, fills a circular buffer of STAGES pipeline stages, one K-block each, in tile order. TMA reads zeros out of
// bounds. CTAs of a cluster have vertically adjacent tiles; each loads its share of the tiles' b and multicasts it.
//
// Barriers, with their arrivals per phase: full[s] 1 and the bytes of a stage, empty[s] 4 from each CTA of the cluster,
// one lane of each warp of the tile's consumer. The n-th use of a full barrier waits for parity n & 1, that of an empty
// one for the opposite, so that all stages are empty at first. Consumer 0 computes a CTA's tiles 0, 2, 4 ..., consumer
// 1 tiles 1, 3, 5 ...; each skips the other's stages. Parity does not distinguish use n of a stage from use n - 2. So a
// consumer waits on full barriers only in its turn, when the other has seen all earlier uses full. A consumer that has
// issued the last wgmma of a tile passes the turn to the consumer of the next tile, if there is one, through named
// barrier 1 + consumer: 128 threads arrive, 128 wait. Tile 0 does not wait. So every arrival has its wait, and nothing
// is pending at the end. Free of deadlock: the consumer whose turn it is waits only on full barriers, the producer only
// on empty ones, and releasing a stage does not need the turn. At the end CTAs of a cluster wait for each other, so
// that none writes to the shared memory of one that has exited.
//
// An element depends only on its operands: it is accumulated over K in the same order wherever its tile lies. So
// recomputed logits (GRADIENT) are bitwise equal to those from which the lse was computed.
//
// Defined by the launcher: EPILOGUE, FP16, WIDE (targets have 64 bits), SOFTCAP and SMOOTHING (0 or 1; SMOOTHING of
// GRADIENT also covers a z-loss), BLOCK_N (160, 176 or 192), STAGES, RASTER (height of a group in the grouped tile
// order, in clusters), CLUSTER (1 or 2). Here `step` is a K-block, `slot` a pipeline stage, `sums` are accumulators.

#include "cluster.cuh"
#include "column_bias.cuh"
#include "heads_ptx.cuh"
#include "mbarrier.cuh"
#include "numbers.cuh"
#include "ring.cuh"
#include "tma.cuh"
#include "wgmma.cuh"
#include "wgmma_widths.cuh"

enum Epilogue { STATS, LOGITS, GRADIENT };

typedef long long i64;

constexpr int BLOCK_M = 128, BLOCK_K = 64, HALF = BLOCK_M / 2, SUMS = BLOCK_N / 2;  // rows of a wgmma; accumulators
constexpr int CONSUMERS = 2, THREADS = 128 * (CONSUMERS + 1);
constexpr int PANEL = BLOCK_K * 128;
constexpr int A_BYTES = BLOCK_M * BLOCK_K * 2, STEP_BYTES = A_BYTES + BLOCK_N * BLOCK_K * 2;
constexpr int FULL = STAGES * STEP_BYTES, EMPTY = FULL + 8 * STAGES;                // offsets of the mbarriers
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
// Not above any logit except -inf. A maximum that starts here is finite even in rows of -inf, and exp2(-inf - LOWEST) is
// 0.
constexpr float LOWEST = -3.4028234663852886e38f;
static_assert(STEP_BYTES % 1024 == 0 && BLOCK_N / CLUSTER % 8 == 0);

struct Problem {
    u16* z;                         // [cols, pitch] of LOGITS and GRADIENT, 8-byte aligned, pitch a multiple of 8
    const u16* bias;                // [cols], or null
    const void* target;             // [rows], indices into the whole vocabulary, where column 0 has index `first`
    float* stats;                   // maxima [parts, rows]; from `sum_at` sums of exponentials, from `total_at` sums of
                                    // logits, from `hit_at` logits of targets [rows]. Written by STATS and LOGITS
    const float *highest, *scale;   // of GRADIENT: lse of each row as its maximum and 1 / Σ exp(l - maximum)
    const float *factor, *dloss;    // of GRADIENT: one for all rows; one per row, `dloss_stride` apart, or null
    i64 sum_at, total_at, hit_at, pitch, dloss_stride, ignore_index;
    int first, rows, cols, steps;   // of this launch; steps: K-blocks
    float softcap, z_loss, hit, rest;  // of GRADIENT: hit = 1 - label_smoothing, rest = label_smoothing / vocabulary
};

struct Tile {
    int row, column;
};

// ---- Tiles --------------------------------------------------------------------------------------------------------

// A band is CLUSTER vertically adjacent tiles high, of which the last may have no rows.
DEVICE int bands_of(const Problem& p) { return (p.rows + CLUSTER * BLOCK_M - 1) / (CLUSTER * BLOCK_M); }
DEVICE int tiles_of(const Problem& p) { return bands_of(p) * ((p.cols + BLOCK_N - 1) / BLOCK_N); }

// Grouped tile order: RASTER bands of a column, then of the next column, so that their loads of b hit L2.
DEVICE Tile find_tile(const Problem& p, int place) {
    const int tiles_m = bands_of(p), tiles_n = (p.cols + BLOCK_N - 1) / BLOCK_N;
    const int band = RASTER * tiles_n, first = place / band * RASTER, height = min(tiles_m - first, RASTER);
    Tile tile;
    tile.row = ((first + place % band % height) * CLUSTER + cluster_rank()) * BLOCK_M;
    tile.column = place % band / height * BLOCK_N;
    return tile;
}

// ---- Producer -----------------------------------------------------------------------------------------------------

DEVICE void produce(const Problem& p, const TensorMap* a, const TensorMap* b, u32 smem) {
    const int tiles = tiles_of(p), share = BLOCK_N / CLUSTER * cluster_rank();
    Ring ring;
    for (int place = blockIdx.x / CLUSTER; place < tiles; place += gridDim.x / CLUSTER) {
        const Tile tile = find_tile(p, place);
#pragma unroll 1
        for (int step = 0; step < p.steps; step++, ring.next()) {
            const u32 to = smem + ring.slot * STEP_BYTES, bar = smem + FULL + 8 * ring.slot;
            bar_wait(smem + EMPTY + 8 * ring.slot, ring.phase ^ 1);
            bar_expect(bar, STEP_BYTES);
            tma_load(to, a, step * BLOCK_K, tile.row, 0, 0, bar);
            tma_multicast(to + A_BYTES + share * BLOCK_K * 2, b, step * BLOCK_K, tile.column + share, bar);
        }
    }
}

// ---- Consumers ----------------------------------------------------------------------------------------------------

// Releases a stage: arrives on its empty barrier in each CTA of the cluster. The whole warp has waited for the wgmmas
// that read it, and nothing else reads a stage: no fence_reads.
DEVICE void release(u32 smem, int slot) { arrive_at_all(smem + EMPTY + 8 * slot); }

// The main loop of a tile, d += a b. Calls issued() after the last wgmma is issued.
template <class Issued>
DEVICE void multiply(float (&d)[2][SUMS], u32 smem, Ring& ring, int steps, const Issued& issued) {
    int before = 0;
#pragma unroll 1
    for (int step = 0; step < steps; step++, ring.next()) {
        const u32 at = smem + ring.slot * STEP_BYTES;
        bar_wait(smem + FULL + 8 * ring.slot, ring.phase);
        const u64 a = describe(at, PANEL), b = describe(at + A_BYTES, PANEL);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < BLOCK_K / 16; i++) {
#pragma unroll
            for (int half = 0; half < 2; half++)
                wgmma<0, 0>(d[half], a + half * (HALF * BLOCK_K * 2 / 16) + i * 2, b + i * 2);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (step) release(smem, before);
        before = ring.slot;
    }
    issued();
    wgmma_wait<0>();
    pin(d[0]);
    pin(d[1]);
    release(smem, before);
}

// tanh in fp32: a polynomial near 0 (Cephes, tanhf.c), where 1 - 2 / (1 + e^2x) would cancel.
DEVICE float tanh_(float x) {
    const float square = x * x;
    float near = square * -5.70498872745e-3f + 2.06390887954e-2f;
    near = near * square - 5.37397155531e-2f;
    near = near * square + 1.33314422036e-1f;
    near = near * square - 3.33332819422e-1f;
    near = near * square * x + x;
    const float far = 1.0f - __fdividef(2.0f, 1.0f + exp2_(2.0f * LOG2E * x));
    return fabsf(x) < 0.625f ? near : far;
}

DEVICE float log2_(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float round_to_16(float x) { return widen(pack(x, 0.0f) & 0xffff); }

// wgmma's accumulator layout: a thread has columns 8 j + 2 (lane % 4) and the next, of rows lane / 4 and lane / 4 + 8
// of its warp's 16, in each half.
DEVICE int row_of(const Tile& tile, int r) {
    return tile.row + r / 2 * HALF + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + r % 2 * 8;
}

// Accumulator i of a thread in a row is sums[at(i)], in_tile(i) columns after the thread's first.
DEVICE constexpr int at(int i) { return i / 2 * 4 + i % 2; }
DEVICE constexpr int in_tile(int i) { return i / 2 * 8 + i % 2; }

// The target of a row: whether it counts (is not ignored), and its column relative to this thread's first, or a column
// that no thread has.
struct Target {
    bool counts;
    int column;
};

DEVICE Target target_of(const Problem& p, const Tile& tile, int row) {
    if (row >= p.rows) return {false, -2 * BLOCK_N};
    const i64 target = WIDE ? ((const i64*)p.target)[row] : ((const int*)p.target)[row];
    const i64 column = target - p.first - tile.column;
    const bool here = target != p.ignore_index && column >= 0 && column < min(BLOCK_N, p.cols - tile.column);
    return {target != p.ignore_index, here ? (int)column - (int)threadIdx.x % 4 * 2 : -2 * BLOCK_N};
}

// Reductions over the four threads of a row.
DEVICE float highest_of(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
DEVICE float sum_of(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Computes the statistics. Rounds the accumulators, as z is rounded, and replaces them by the logits.
DEVICE void write_stats(const Problem& p, const Tile& tile, float (&d)[2][SUMS]) {
    const int left = p.cols - tile.column - threadIdx.x % 4 * 2;  // columns from this thread's first on
#pragma unroll
    for (int r = 0; r < 4; r++) {
        float* sums = d[r / 2] + r % 2 * 2;
        const int row = row_of(tile, r);
        if (__shfl_sync(~0u, row, 0) >= p.rows) break;  // the shuffle shows ptxas that this is warp-uniform
        float highest = LOWEST, sum = 0, total = 0;
#pragma unroll
        for (int i = 0; i < SUMS / 2; i++) {
            float& x = sums[at(i)];
            x = round_to_16(x);
            if (SOFTCAP) x = p.softcap * tanh_(__fdividef(x, p.softcap));
            if (in_tile(i) >= left) x = __int_as_float(0xff800000);  // -inf
            else if (SMOOTHING) total += x;
            highest = fmaxf(highest, x);
        }
        highest = highest_of(highest);
#pragma unroll
        for (int i = 0; i < SUMS / 2; i++) sum += exp2_((sums[at(i)] - highest) * LOG2E);
        sum = sum_of(sum);
        if (SMOOTHING) total = sum_of(total);
        const i64 place = (i64)(tile.column / BLOCK_N) * p.rows + row;
        if (row < p.rows && threadIdx.x % 4 == 0) {
            p.stats[place] = highest;
            p.stats[p.sum_at + place] = sum;
            if (SMOOTHING) p.stats[p.total_at + place] = total;
        }
        const Target target = target_of(p, tile, row);
        if (__any_sync(~0u, target.column > -BLOCK_N)) {
#pragma unroll
            for (int i = 0; i < SUMS / 2; i++)
                if (in_tile(i) == target.column) p.stats[p.hit_at + row] = sums[at(i)];
        }
    }
}

// Replaces the accumulators by their gradients.
DEVICE void differentiate(const Problem& p, const Tile& tile, float (&d)[2][SUMS]) {
    const float factor = *p.factor;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        float* sums = d[r / 2] + r % 2 * 2;
        const int row = row_of(tile, r);
        if (__shfl_sync(~0u, row, 0) >= p.rows) break;
        const Target target = target_of(p, tile, row);
        // A row that does not count has a gradient of 0, even if its logits or the incoming gradient are NaN or inf.
        const float highest = target.counts ? p.highest[row] : 0.0f, scale = target.counts ? p.scale[row] : 1.0f;
        float weight = target.counts ? factor : 0.0f;
        if (p.dloss && target.counts) weight *= p.dloss[row * p.dloss_stride];
        // Plain: softmax weight - [target] weight. Else softmax (1 + 2 z_loss lse) weight - rest weight - [target] hit
        // weight.
        const float lse = highest - log2_(scale) * LN2;
        const float slope = SMOOTHING ? weight * scale * (1.0f + 2.0f * p.z_loss * lse) : weight * scale;
        const float rest = SMOOTHING ? weight * p.rest : 0.0f, hit = SMOOTHING ? weight * p.hit : weight;
#pragma unroll
        for (int i = 0; i < SUMS / 2; i++) {
            float& x = sums[at(i)];
            float logit = target.counts ? round_to_16(x) : 0.0f, derivative = 1.0f;
            if (SOFTCAP) {
                const float capped = tanh_(__fdividef(logit, p.softcap));
                logit = p.softcap * capped, derivative = 1.0f - capped * capped;
            }
            x = exp2_((logit - highest) * LOG2E) * slope - rest;
            if (in_tile(i) == target.column) x -= hit;
            if (SOFTCAP) x *= derivative;
        }
    }
}

// Transposes an 8 x 8 block of 16-bit elements, of which a thread has two adjacent ones in row lane / 4.
DEVICE u32 transposed(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// Rounds the accumulators and stores them transposed. The four lanes of a column have rows 0 to 3, 8 to 11, 4 to 7 and
// 12 to 15 of a warp's 16: a sector. Stores past the last row, up to a multiple of four, hit padding or elements that
// are written later.
DEVICE void store_transposed(const Problem& p, const Tile& tile, const float (&d)[2][SUMS]) {
    const int lane = threadIdx.x % 32, quad = lane % 4;
    const bool odd = quad % 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int base = __shfl_sync(~0u, row_of(tile, 2 * half), 0), row = base + (odd ? 6 : 0) + 2 * quad;
        if (base >= p.rows) break;
        u16* to = p.z + (tile.column + lane / 4) * p.pitch + row;
#pragma unroll
        for (int j = 0; j < BLOCK_N / 8; j++) {
            const float* x = d[half] + 4 * j;
            u32 low = transposed(pack(x[0], x[1])), high = transposed(pack(x[2], x[3]));
            const u32 got = __shfl_xor_sync(~0u, odd ? low : high, 1);
            if (odd) low = got;
            else high = got;
            if (tile.column + 8 * j + lane / 4 < p.cols && row < p.rows)
                asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to + 8 * j * p.pitch), "r"(low), "r"(high) : "memory");
        }
    }
}

DEVICE void consume(const Problem& p, u32 smem) {
    const int consumer = __shfl_sync(~0u, threadIdx.x / 128 - 1, 0);  // recomputed, to hold no register meanwhile
    const int tiles = tiles_of(p), clusters = gridDim.x / CLUSTER;
    Ring ring;
    for (int place = blockIdx.x / CLUSTER + consumer * clusters; place < tiles; place += 2 * clusters) {
        const Tile tile = find_tile(p, place);
        float d[2][SUMS];
#pragma unroll
        for (int i = 0; i < 2 * SUMS; i++) d[i / SUMS][i % SUMS] = 0;
        if (place >= clusters) {
            ring.skip(p.steps);
            named_wait(1 + consumer);
        }
        multiply(d, smem, ring, p.steps, [&] {
            if (place + clusters < tiles) named_arrive(2 - consumer);
        });
        if (p.bias)
            add_to_columns<BLOCK_N>(d, [&](int c) {
                const int column = tile.column + c + threadIdx.x % 32;
                return column < p.cols ? widen(p.bias[column]) : 0.0f;
            });
        if (EPILOGUE == GRADIENT) differentiate(p, tile, d);
        if (EPILOGUE != STATS) store_transposed(p, tile, d);
        if (EPILOGUE != GRADIENT) write_stats(p, tile, d);
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
linear_cross_entropy_logits(const __grid_constant__ TensorMap hidden, const __grid_constant__ TensorMap weight,
                            const __grid_constant__ Problem problem) {
    extern __shared__ __align__(1024) char shared[];
    const u32 smem = (u32)__cvta_generic_to_shared(shared);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            bar_init(smem + FULL + 8 * s, 1);
            bar_init(smem + EMPTY + 8 * s, 4 * CLUSTER);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    cluster_sync();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) produce(problem, &hidden, &weight, smem);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        consume(problem, smem);
    }
    __syncwarp();
    cluster_sync();
}
