// The logits of linear_cross_entropy for Hopper (sm_90a): z = hidden weightᵀ + bias by TMA and wgmma, warp specialised
// and persistent. logits.py compiles and launches.
//
//   EPILOGUE 0  STATS     of a row and a tile's columns: maximum, Σ exp(l - maximum), Σ l, l of the target; no z
//            1  LOGITS    the same, and zᵀ
//            2  GRADIENT  (∂loss/∂z)ᵀ, from the lse of each row
//
// A row of the result is a row of hidden, a column an entry of the vocabulary. A thread has 48 columns of each of four
// rows, so that what is summed over columns stays in a thread until the four of a row meet. zᵀ and its gradient are
// stored transposed, as the rest of this kernel has them: 8 x 8 blocks by movmatrix, then four rows of a column a lane.
//
// Napkin maths for a step of 64 of a tile of 128 x 192, in cycles of an SM: 768 for the tensor cores, 832 for shared
// memory (a and b written once, b read by two wgmmas), 32 bytes a cycle from L2 where two CTAs share b. An epilogue has
// 24576 numbers, of each some ten instructions (round, subtract, scale, exponential, add), at 128 a cycle 1900 cycles and
// at 16 exponentials a cycle 1540: as many as two steps. 2048 terms have 32, 4096 have 64.
//
// Two consumer warpgroups have tiles of their own (ping-pong): one multiplies while the other is in its epilogue. A tile
// is two wgmmas of 64 x BLOCK_N a step that read the same b. The producer, one thread, fills a ring of STAGES steps in
// the order of the tiles. What lies beyond a tensor is read as zeros by TMA. CTAs of a cluster have tiles below each
// other; each loads its share of their columns of b, for all of them.
//
// Barriers, with their arrivals per phase: full[s] 1 and the bytes of a step, empty[s] 4 from each CTA of the cluster,
// one lane of each warp of the tile's consumer. The n-th use of a full one waits for parity n & 1, that of an empty one
// for the opposite, so that the first pass finds every slot empty. Consumer 0 takes a CTA's tiles 0, 2, 4 ..., consumer 1
// takes 1, 3, 5 ...; each skips the steps of the other in the ring. Parity does not tell use n of a slot from use n - 2,
// so a consumer looks at full barriers only in its turn, when the other has seen all earlier uses full. When the last
// wgmma of a tile is issued, its consumer gives the turn to that of the next, if there is one, by named barrier 1 +
// consumer: 128 threads arrive, 128 wait. Tile 0 does not wait. So every arrival has its wait, and nothing is pending at
// the end. A consumer that has the turn waits for nothing but full barriers, the producer only for empty ones, and slots
// are given back without the turn: free of deadlock. In the end CTAs of a cluster wait for each other, so that none
// writes into one that is gone.
//
// The sum of an element depends on nothing but its operands: the same terms in the same order, wherever its tile lies.
// So logits that are computed again (GRADIENT) are those whose lse was computed before, bit for bit.
//
// Defined by the launcher: EPILOGUE, FP16, WIDE (targets have 64 bits), SOFTCAP and SMOOTHING (0 or 1; of GRADIENT
// SMOOTHING is any loss but the plain one), BLOCK_N (160 or 192), STAGES, RASTER, CLUSTER (1 or 2).

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

constexpr int BLOCK_M = 128, BLOCK_K = 64, HALF = BLOCK_M / 2, SUMS = BLOCK_N / 2;  // HALF: rows of a wgmma
constexpr int CONSUMERS = 2, THREADS = 128 * (CONSUMERS + 1);
constexpr int PANEL = BLOCK_K * 128;
constexpr int A_BYTES = BLOCK_M * BLOCK_K * 2, STEP_BYTES = A_BYTES + BLOCK_N * BLOCK_K * 2;
constexpr int FULL = STAGES * STEP_BYTES, EMPTY = FULL + 8 * STAGES;                // where barriers lie
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
// Below any logit except -inf. A maximum that starts here is finite even in rows of -inf, and exp2(-inf - LOWEST) is 0.
constexpr float LOWEST = -1e38f;
static_assert(STEP_BYTES % 1024 == 0 && BLOCK_N / CLUSTER % 8 == 0);

struct Problem {
    u16* z;                         // [cols, pitch] of LOGITS and GRADIENT, 8-byte aligned, pitch a multiple of 8
    const u16* bias;                // [cols], or null
    const void* target;             // [rows], in numbers of the whole vocabulary, of which column 0 is `first`
    float* stats;                   // maxima [parts, rows]; behind `sum_at` sums of exponentials, behind `total_at` of
                                    // logits; behind `hit_at` logits of targets [rows]. Written by STATS and LOGITS
    const float *highest, *scale;   // of GRADIENT: lse of each row as its maximum and 1 / Σ exp(l - maximum)
    const float *factor, *dloss;    // of GRADIENT: of all rows; of each, `dloss_stride` apart, or null
    i64 sum_at, total_at, hit_at, pitch, dloss_stride, ignore_index;
    int first, rows, cols, steps;   // of this launch; steps of the sum
    float softcap, z_loss, hit, rest;  // of GRADIENT: hit = 1 - label_smoothing, rest = label_smoothing / whole vocabulary
};

struct Tile {
    int row, column;
};

// ---- Tiles --------------------------------------------------------------------------------------------------------

// Rows of tiles are those of a cluster: CLUSTER tiles below each other, of which the last may have no rows.
DEVICE int bands_of(const Problem& p) { return (p.rows + CLUSTER * BLOCK_M - 1) / (CLUSTER * BLOCK_M); }
DEVICE int tiles_of(const Problem& p) { return bands_of(p) * ((p.cols + BLOCK_N - 1) / BLOCK_N); }

// RASTER tiles of a column, then the next column, so that what they read of b is in L2.
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

// Gives a slot back to the producers of the cluster. The whole warp has waited for the wgmmas that read it, and nothing
// else reads a slot: no fence_reads.
DEVICE void release(u32 smem, int slot) { arrive_at_all(smem + EMPTY + 8 * slot); }

// d += a b of a tile; `issued` once all of it is under way.
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

// tanh in fp32: a polynomial near 0 (Cephes, tanhf.c), where 1 - 2 / (1 + e^2x) would lose all digits.
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

// A thread has columns 8 j + 2 (lane % 4) and the next of rows lane / 4 and lane / 4 + 8 of its warp's 16, in each half.
DEVICE int row_of(const Tile& tile, int r) {
    return tile.row + r / 2 * HALF + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + r % 2 * 8;
}

// Of a thread's sums of a row, number i lies at at(i) and has column in_tile(i) behind its first.
DEVICE constexpr int at(int i) { return i / 2 * 4 + i % 2; }
DEVICE constexpr int in_tile(int i) { return i / 2 * 8 + i % 2; }

// The target of a row: whether it has one, and its column behind this thread's first, or one that no thread has.
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

// Over the four threads that have a row.
DEVICE float highest_of(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
DEVICE float sum_of(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// The sums are rounded, as z is, and become logits.
DEVICE void write_stats(const Problem& p, const Tile& tile, float (&d)[2][SUMS]) {
    const int left = p.cols - tile.column - threadIdx.x % 4 * 2;  // columns from this thread's first on
#pragma unroll
    for (int r = 0; r < 4; r++) {
        float* sums = d[r / 2] + r % 2 * 2;
        const int row = row_of(tile, r);
        if (__shfl_sync(~0u, row, 0) >= p.rows) break;  // of the whole warp, which ptxas must see
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

// The sums become their gradients.
DEVICE void differentiate(const Problem& p, const Tile& tile, float (&d)[2][SUMS]) {
    const float factor = *p.factor;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        float* sums = d[r / 2] + r % 2 * 2;
        const int row = row_of(tile, r);
        if (__shfl_sync(~0u, row, 0) >= p.rows) break;
        const Target target = target_of(p, tile, row);
        const bool inside = row < p.rows;
        const float highest = inside ? p.highest[row] : 0.0f, scale = inside ? p.scale[row] : 1.0f;
        float weight = target.counts ? factor : 0.0f;
        if (p.dloss && inside) weight *= p.dloss[row * p.dloss_stride];
        // Plain: softmax weight - [target] weight. Else softmax (1 + 2 z_loss lse) weight - rest weight - [target] hit weight.
        const float lse = highest - log2_(scale) * LN2;
        const float slope = SMOOTHING ? weight * scale * (1.0f + 2.0f * p.z_loss * lse) : weight * scale;
        const float rest = SMOOTHING ? weight * p.rest : 0.0f, hit = SMOOTHING ? weight * p.hit : weight;
#pragma unroll
        for (int i = 0; i < SUMS / 2; i++) {
            float& x = sums[at(i)];
            float logit = round_to_16(x), derivative = 1.0f;
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

// An 8 x 8 block of 16-bit numbers, of which a thread has two neighbours in row lane / 4, transposed.
DEVICE u32 transposed(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// Rounds the sums and stores them transposed. Lanes of a column have rows 0 to 3, 8 to 11, 4 to 7 and 12 to 15 of a warp's
// 16: a sector. What is stored behind the last row, up to a multiple of four, is padding or not written yet.
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
    const int consumer = __shfl_sync(~0u, threadIdx.x / 128 - 1, 0);  // anew, so that it takes no register meanwhile
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
