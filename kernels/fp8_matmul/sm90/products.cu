// FP8 GEMM for Hopper (sm_90a): TMA, wgmma, warp specialisation, persistent. products.py compiles and launches it.
//
//   y[m, n] = sum over k of a[m, k] b[n, k], scaled, + bias[n]
//
//   SCALING 0   scales per tensor or row, applied in the epilogue; the tensor cores accumulate over all of K. Tiles of
//               128 x 256
//   SCALING 1   the same, but the accumulators are promoted: added to fp32 registers after each K-block of 128. Tiles
//               of 128 x 128
//   SCALING 2   scales per 1x128 of a and 128x128 of b, applied in the promotion. Tiles of 128 x 128 or 128 x 192
//   SCALING 3   scales per 1x128 of both, in the same tiles
//
// Back-of-the-envelope estimate for a K-block of 128 with CLUSTER 2, in cycles per SM: the tensor cores at 8192 FLOP a
// cycle, L2 at some 39 bytes per SM, shared memory at 128 bytes (wgmma's reads of both operands, TMA's writes), and the
// issue slots of each scheduler for promotion, with SCALING 2 and 3.
//
//   tile        wgmma      from L2          shared memory         promotion
//   128 x 128   512        24 KiB:  630     48 + 32 KiB: 640      128, 288
//   128 x 192   768        28 KiB:  735     64 + 40 KiB: 832      192, 432
//   128 x 256   1024       32 KiB:  840     80 + 48 KiB: 1024
//
// A CTA has a producer warpgroup and two consumer warpgroups. Each consumer computes 64 rows of the tile. Thread 0 of
// the producer fills a circular buffer of STAGES pipeline stages (Ring; a slot is a stage) by TMA. With SCALING 2 and 3
// all producer threads copy the row and column scales of the K-block by cp.async. Tails of every dimension are
// zero-filled, by TMA and by cp.async with a source size of 0.
//
// With promotion the consumers' main loop runs across tiles: a consumer issues the next wgmmas as soon as a set of
// wgmma accumulators is free, and only then runs the epilogue of a completed tile (promotion.cuh: SETS, TURNS).
//
// With CLUSTER 2 the two CTAs of a cluster compute vertically adjacent tiles. Each loads its rows of a and half of the
// rows of b, which TMA multicasts to both.
//
// Barriers and their arrivals per phase:
//   full[s]   1 and the bytes of a stage; with block scales 128 more, which cp.async makes when its copies are complete
//   empty[s]  8: one lane of each consumer warp in each CTA of the cluster, since this CTA's producer writes to both
//   turn[c]   with TURNS 4: one lane of each warp of a consumer
// The n-th wait on a full barrier is for parity n & 1. On an empty barrier it is for the opposite parity, so that in
// the first pass every stage counts as empty. The other CTA's bytes may arrive before this CTA's expect_tx. They are
// counted all the same, and the phase cannot complete before this CTA's own arrival.
//
// There is no deadlock. A producer waits only for consumers, which all process the same sequence of K-blocks. A
// consumer waits only for full stages and for the other consumer to issue its wgmmas of the same or the previous
// K-block, which the other does without waiting for a promotion. At the end the CTAs of a cluster wait for each other,
// so that none writes into the shared memory of one that has exited.
//
// Defined by the launcher: SCALING, A_E4M3, B_E4M3, OUT32 (y is fp32; else FP16 or bf16), BIAS (0 none, 1 bf16, 2 fp16,
// 3 fp32), BLOCK_N, TURNS (ping-pong consumers), STAGES, RASTER (height of a group in the grouped tile order, in rows
// of clusters), CLUSTER (1 or 2).

constexpr int BLOCK_M = 128, BLOCK_K = 128, CONSUMERS = 2;

#include "bias.cuh"
#include "cluster.cuh"
#include "numbers.cuh"
#include "promotion.cuh"
#include "tma.cuh"

constexpr bool BLOCKED = SCALING >= 2;
static_assert(BLOCKED || BLOCK_N == (SCALING ? 128 : 256), "with 192 columns an epilogue with scales spills");
constexpr int SCALES = STAGES * OPERAND_BYTES;  // offset of the scales' circular buffer
constexpr int FULL = SCALES + STAGES * (BLOCKED ? SCALE_BYTES : 0);  // offset of the barriers
constexpr int EMPTY = FULL + 8 * STAGES, TURN = EMPTY + 8 * STAGES;

struct Problem {
    char* out;
    const float* scale_a;
    const float* scale_b;
    const void* bias;
    u64 scale_a_row, scale_a_block, scale_b_row, scale_b_block;  // strides in elements
    u64 bias_step;
    int rows, cols, depth;
};

struct Tile {
    int row, column;
};

// A band is a row of clusters: CLUSTER vertically adjacent tiles, of which the last may lie past the last row.
DEVICE int bands_of(const Problem& a) { return (a.rows + CLUSTER * BLOCK_M - 1) / (CLUSTER * BLOCK_M); }
DEVICE int columns_of(const Problem& a) { return (a.cols + BLOCK_N - 1) / BLOCK_N; }
DEVICE int tiles_of(const Problem& a) { return bands_of(a) * columns_of(a); }

// Grouped tile order: RASTER bands of one column of tiles, then of the next column, so that their rows of b are in L2.
DEVICE Tile find_tile(const Problem& a, int place) {
    const int bands = bands_of(a), group = RASTER * columns_of(a);
    const int first = place / group * RASTER, height = min(bands - first, RASTER);
    const int band = first + place % group % height;
    return {(band * CLUSTER + cluster_rank()) * BLOCK_M, place % group / height * BLOCK_N};
}

// ---- Producer -----------------------------------------------------------------------------------------------------

DEVICE ScaleLoads scales_of(const Problem& a, const Tile& tile) {
    const u64 first = SCALING == 3 ? tile.column : tile.column / 128;
    return {a.scale_a + tile.row * a.scale_a_row, a.scale_a_row, a.rows - tile.row,
            a.scale_b + first * a.scale_b_row, a.scale_b_row, tile.column, a.cols - tile.column};
}

// The rows of b of a K-block: all of them, or this CTA's share, multicast to all CTAs of the cluster.
DEVICE void load_b(u32 to, const TensorMap* map, int k, int column, u32 bar) {
    const int share = BLOCK_N / CLUSTER * cluster_rank();
    tma_multicast(to + share * BLOCK_K, map, k, column + share, bar);
}

DEVICE void produce(const Problem& a, const TensorMap* a_map, const TensorMap* b_map, u32 smem) {
    const int tiles = tiles_of(a);
    Ring ring;
    for (int place = blockIdx.x / CLUSTER; place < tiles; place += gridDim.x / CLUSTER) {
        const Tile tile = find_tile(a, place);
        ScaleLoads scales = scales_of(a, tile);
#pragma unroll 1
        for (int k = 0; k < a.depth; k += BLOCK_K, ring.next()) {
            const u32 step = smem + ring.slot * OPERAND_BYTES, bar = smem + FULL + 8 * ring.slot;
            bar_wait(smem + EMPTY + 8 * ring.slot, ring.phase ^ 1);
            if (threadIdx.x == 0) {
                bar_expect(bar, OPERAND_BYTES);
                tma_load(step, a_map, k, tile.row, 0, 0, bar);
                load_b(step + A_BYTES, b_map, k, tile.column, bar);
            }
            if (BLOCKED)
                scales.copy(smem + SCALES + ring.slot * SCALE_BYTES, bar, a.scale_a_block, a.scale_b_block,
                            a.scale_b_row);
        }
    }
    if (BLOCKED) asm volatile("cp.async.wait_all;" ::: "memory");
}

// ---- Consumers ----------------------------------------------------------------------------------------------------

// Releases a stage to the producers of the cluster, after the whole warp has read it.
DEVICE void release(u32 smem, int slot) {
    if (BLOCKED) fence_reads();  // of the scales
    else __syncwarp();
    arrive_at_all(smem + EMPTY + 8 * slot);
}

// SCALING 0: one set of accumulators for all of K. The wgmmas of one K-block are in flight while the next is awaited.
template <int N> DEVICE void sum_up(float (&d)[N / 2], u32 smem, Ring& ring, int depth, int consumer) {
    int before = 0;
#pragma unroll 1
    for (int k = 0; k < depth; k += BLOCK_K, ring.next()) {
        bar_wait(smem + FULL + 8 * ring.slot, ring.phase);
        multiply<N>(d, smem + ring.slot * OPERAND_BYTES, consumer, true);
        wgmma_wait<1>();
        if (k) release(smem, before);
        before = ring.slot;
    }
    wgmma_wait<0>();
    pin(d);
    if (depth > 0) release(smem, before);
}

// ---- Epilogue -----------------------------------------------------------------------------------------------------

// Scales or biases of the tile's columns. Each lane loads every 32nd: if each loaded those of its own columns, ptxas
// would issue all loads at once and spill. Lanes then exchange them by shuffles: get(j, i) is that of sums[4 j + i].
struct OfColumns {
    float own[BLOCK_N / 32];
    DEVICE float get(int j, int i) const {
        return __shfl_sync(~0u, own[j / 4], j % 4 * 8 + threadIdx.x % 4 * 2 + i);
    }
};

// Applies the scales that the promotion did not apply, and the bias.
DEVICE void finish(const Problem& a, const Tile& tile, float (&sums)[SUMS], int consumer) {
    const int column = tile.column + threadIdx.x % 32, row = tile.row + row_of(consumer);
    OfColumns x;
    if (!BLOCKED) {
        const float high = row < a.rows ? a.scale_a[row * a.scale_a_row] : 0;
        const float low = row + 8 < a.rows ? a.scale_a[(row + 8) * a.scale_a_row] : 0;
#pragma unroll
        for (int c = 0; c < BLOCK_N / 32; c++)
            x.own[c] = column + 32 * c < a.cols ? a.scale_b[(column + 32 * c) * a.scale_b_row] : 0;
#pragma unroll
        for (int i = 0; i < SUMS; i += i % 2 ? 3 : 1) {
            const float scale = x.get(i / 4, i % 2);
            sums[i] *= high * scale, sums[i + 2] *= low * scale;
        }
    }
    if (BIAS) {
        __syncwarp();
#pragma unroll
        for (int c = 0; c < BLOCK_N / 32; c++)
            x.own[c] = column + 32 * c < a.cols ? load_bias(a.bias, (column + 32 * c) * a.bias_step) : 0;
#pragma unroll
        for (int i = 0; i < SUMS; i += i % 2 ? 3 : 1) {
            const float bias = x.get(i / 4, i % 2);
            sums[i] += bias, sums[i + 2] += bias;
        }
    }
}

DEVICE void exchange(u32& kept_low, u32& kept_high, int bit) {
    const bool high = threadIdx.x & bit;
    const u32 got = __shfl_xor_sync(~0u, high ? kept_low : kept_high, bit);
    if (high) kept_low = got;
    else kept_high = got;
}

// Four blocks of 8 columns of a row in 16 bits. Four lanes transpose their fragments by shuffles, so that each stores
// one block of 16 bytes.
DEVICE void store_halves(char* to, u32 (&w)[4], bool inside) {
    exchange(w[0], w[1], 1);
    exchange(w[2], w[3], 1);
    exchange(w[0], w[2], 2);
    exchange(w[1], w[3], 2);
    if (inside)
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                     ::"l"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
}

DEVICE void store_tile(const Problem& a, const Tile& tile, float (&sums)[SUMS], int consumer) {
    constexpr int BYTES = OUT32 ? 4 : 2;
    const int first = (OUT32 ? 2 : 8) * (threadIdx.x % 4);  // first column that this thread stores
    const int columns = a.cols - tile.column - first;
    finish(a, tile, sums, consumer);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = tile.row + row_of(consumer) + 8 * half;
        const bool inside = row < a.rows;
        char* const out = a.out + ((u64)row * a.cols + tile.column + first) * BYTES;
#pragma unroll
        for (int c = 0; c < BLOCK_N / 32; c++) {
            u32 w[4];
#pragma unroll
            for (int block = 0; block < 4; block++) {
                const int at = 4 * (4 * c + block) + 2 * half, column = 32 * c + 8 * block;
                if (!OUT32) w[block] = pack(sums[at], sums[at + 1]);
                else if (inside && column < columns) *(float2*)(out + column * BYTES) = {sums[at], sums[at + 1]};
            }
            if (!OUT32) store_halves(out + 32 * c * BYTES, w, inside && 32 * c < columns);
        }
    }
}

template <int N> DEVICE void clear(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = 0;
}

#if SCALING == 0
DEVICE void consume(const Problem& a, u32 smem, int consumer) {
    const int tiles = tiles_of(a);
    Ring ring;
    float sums[SUMS];
    for (int place = blockIdx.x / CLUSTER; place < tiles; place += gridDim.x / CLUSTER) {
        const Tile tile = find_tile(a, place);
        clear(sums);
        if (a.cols - tile.column > BLOCK_N / 2)
            sum_up<BLOCK_N>(sums, smem, ring, a.depth, consumer);
        else
            sum_up<BLOCK_N / 2>(reinterpret_cast<float(&)[SUMS / 2]>(sums), smem, ring, a.depth, consumer);
        store_tile(a, tile, sums, consumer);
    }
}
#else
// Issues the wgmmas of the next K-block. `left` counts the K-blocks of all of this CTA's tiles that have not been
// issued. At 0 it multiplies the stale contents of the stage, and the result is not used: ptxas serialises wgmmas that
// are conditional.
DEVICE void start(float (&d)[SUMS], u32 smem, const Ring& ring, Turn& turn, int& left, int consumer) {
    if (left-- > 0) bar_wait(smem + FULL + 8 * ring.slot, ring.phase);
    turn.wait();
    multiply<SUMS * 2>(d, smem + ring.slot * OPERAND_BYTES, consumer, false);
}

DEVICE void consume(const Problem& a, u32 smem, int consumer) {
    const int tiles = tiles_of(a), stride = gridDim.x / CLUSTER, row = row_of(consumer);
    const int steps = (a.depth + BLOCK_K - 1) / BLOCK_K;
    int place = blockIdx.x / CLUSTER;  // every CTA has a tile
    int left = ((tiles - 1 - place) / stride + 1) * steps, steps_left = steps;
    Ring ring;
    Turn turn(smem + TURN, consumer);
    float sums[SUMS], d[SETS][SUMS];
    clear(sums);
    bool passed = false;  // whether the turn of the last start() was passed on
    start(d[0], smem, ring, turn, left, consumer);
#pragma unroll 1
    while (place < tiles) {
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            const bool there = set == 0 || place < tiles;
            const int slot = ring.slot;
            const u32 scales = smem + SCALES + slot * SCALE_BYTES;
            ring.next();
            if (TURNS) wgmma_wait<1>();
            if (!passed) turn.pass();
            passed = false;
            const RowScales rows = load_row_scales(scales, row);
            wgmma_wait<0>();
            pin(d[set]);
            if (there && SCALING < 3) release(smem, slot);
            if (SETS == 2) start(d[1 - set], smem, ring, turn, left, consumer);
            promote(sums, d[set], rows, scales);
            if (there && SCALING == 3) release(smem, slot);  // b's scales were read from this stage
            if (SETS == 1) start(d[0], smem, ring, turn, left, consumer);
            if (there && --steps_left == 0) {
                turn.pass(), passed = true;  // so that the other consumer does not wait for the epilogue
                store_tile(a, find_tile(a, place), sums, consumer);
                clear(sums);
                steps_left = steps, place += stride;
            }
        }
    }
    wgmma_wait<0>();
    if (!passed) turn.pass();  // the other consumer's last start(), whose result is unused, waits for it
}
#endif

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
fp8_matmul_products(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                    const __grid_constant__ Problem problem) {
    extern __shared__ __align__(1024) char shared[];
    const u32 smem = (u32)__cvta_generic_to_shared(shared);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            bar_init(smem + FULL + 8 * s, BLOCKED ? 1 + 128 : 1);
            bar_init(smem + EMPTY + 8 * s, 4 * CONSUMERS * CLUSTER);
        }
        for (int c = 0; c < CONSUMERS; c++) bar_init(smem + TURN + 8 * c, 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    cluster_sync();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (BLOCKED || threadIdx.x == 0) produce(problem, &a_map, &b_map, smem);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        consume(problem, smem, group - 1);
    }
    __syncwarp();
    cluster_sync();
}
