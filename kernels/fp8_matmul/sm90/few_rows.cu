// FP8 GEMM for Hopper (sm_90a) with few rows of a, bound by the reads of b. few_rows.py compiles and launches it.
//
//   y[m, n] = sum over k of a[m, k] b[n, k], scaled, + bias[n]
//
// Operands are swapped, so that M = 64 of a wgmma is full: its A operand is 64 rows of b, its B operand the COLS rows
// of a. Both are loaded into shared memory by TMA. SCALING is that of products.cu: 1 scales per tensor or row, applied
// in the epilogue; 2 per 1x128 of a and 128x128 of b; 3 per 1x128 of both. The wgmma accumulators of each K-block of
// 128 are promoted: added to fp32 registers.
//
// Back-of-the-envelope estimate, N = K = 8192, one NVIDIA H200 (132 SMs, 4254 GB/s): 67 MB of b take 15.8 us. With a
// latency of 1 us Little's law requires 4.3 MB in flight, 32 KB per SM; the stages of two CTAs with 128 rows of b hold
// 128 KB of b (64 rows of a) to 192 KB (8). An SM processes 62 pieces of b of 64 rows by 128 of K. With 64 rows of a, a
// piece takes 128 tensor-core cycles and some 110 issue slots of each scheduler: 4.3 us and 3.7 us at 1.85 GHz, which
// four warpgroups overlap. L2 then delivers 100 MB, since a is read for each 128 rows of b: 10.6 us at 39 bytes a cycle
// and SM.
//
// A CTA has GROUPS consumer warpgroups, with 64 rows of b each, and a producer warp. The first thread of the producer
// fills a circular buffer of STAGES pipeline stages (Ring; a slot is a stage) by TMA; all of its threads copy block
// scales by cp.async. The CTAs of a cluster are the split-K partitions of one tile. Each writes its accumulators to its
// shared memory and then reduces a share of the tile's columns over all partitions, in a fixed order. So repeats agree
// bit for bit, and there is no workspace.
//
// Tails of every dimension are zero-filled, by TMA and by cp.async with a source size of 0.
//
// Barriers and their arrivals per phase:
//   full[s]   1 and the bytes of a stage; with block scales 32 more, which cp.async makes when its copies are complete
//   empty[s]  one lane of each consumer warp
// The n-th wait on a full barrier is for parity n & 1. On an empty barrier it is for the opposite parity, so that in
// the first pass every stage counts as empty.
//
// Defined by the launcher: SCALING, A_E4M3 and B_E4M3 (of wgmma's first and second operand: of b and of a), OUT32 (y is
// fp32; else FP16 or bf16), BIAS (0 none, 1 bf16, 2 fp16, 3 fp32), COLS, GROUPS, STAGES, CLUSTER (split-K partitions),
// RESIDENT (CTAs per SM).

#include "bias.cuh"
#include "cluster.cuh"
#include "mbarrier.cuh"
#include "numbers.cuh"
#include "scales.cuh"
#include "tma.cuh"
#include "wgmma.cuh"
#include "wgmma8.cuh"

constexpr bool BLOCKED = SCALING >= 2;
constexpr int BLOCK_K = 128, ROWS = 64 * GROUPS, THREADS = 128 * GROUPS + 32;
constexpr int A_BYTES = COLS * BLOCK_K, B_BYTES = ROWS * BLOCK_K;  // of a pipeline stage
constexpr int SCALE_B = 4 * COLS;                                  // those of a come first
constexpr int SCALE_BYTES = BLOCKED ? SCALE_B + 4 * (SCALING == 3 ? ROWS : 4) : 0;
constexpr int B_RING = STAGES * A_BYTES, S_RING = B_RING + STAGES * B_BYTES;
constexpr int FULL = S_RING + STAGES * SCALE_BYTES, EMPTY = FULL + 8 * STAGES;  // offsets of the barriers
constexpr int PITCH = ROWS + 4;  // of accumulators in shared memory, without bank conflicts
static_assert(SCALING >= 1 && SCALING <= 3 && GROUPS <= 4, "SCALING is 1 to 3, and a CTA has two 128 x 128 blocks of b at most");
static_assert(4 * COLS * PITCH <= S_RING, "sums take the place of operands");

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
    int row, column;  // of y
    int first, last;  // K-blocks
};

DEVICE Tile find_tile(const Problem& p) {
    const int part = blockIdx.x % CLUSTER, place = blockIdx.x / CLUSTER, tiles_m = (p.rows + COLS - 1) / COLS;
    const int blocks = (p.depth + BLOCK_K - 1) / BLOCK_K;
    return {place % tiles_m * COLS, place / tiles_m * ROWS, blocks * part / CLUSTER, blocks * (part + 1) / CLUSTER};
}

struct Ring {
    int slot = 0;
    u32 phase = 0;
    DEVICE void next() {
        if (++slot == STAGES) slot = 0, phase ^= 1;
    }
};

// ---- Producer -----------------------------------------------------------------------------------------------------

// The producer warp copies the scales of a K-block. Each lane arrives on `bar` when its own copies are complete.
DEVICE void copy_scales(const Problem& p, const Tile& tile, int block, u32 to, u32 bar) {
    const int lane = threadIdx.x % 32;
    const float* const of_a = p.scale_a + block * p.scale_a_block;
    const float* const of_b = p.scale_b + block * p.scale_b_block;
#pragma unroll
    for (int i = 0; i < COLS; i += 32) {
        const int row = tile.row + i + lane;
        const bool there = row < p.rows;
        if (COLS >= 32 || lane < COLS) copy_scale(to + 4 * (i + lane), of_a + (there ? row : 0) * p.scale_a_row, there);
    }
    if (SCALING == 3) {
#pragma unroll
        for (int i = 0; i < ROWS; i += 32) {
            const int column = tile.column + i + lane;
            const bool there = column < p.cols;
            copy_scale(to + SCALE_B + 4 * (i + lane), of_b + (there ? column : 0) * p.scale_b_row, there);
        }
    } else if (lane < (ROWS + 127) / 128) {
        const int square = tile.column / 128 + lane;
        const bool there = 128 * square < p.cols;
        copy_scale(to + SCALE_B + 4 * lane, of_b + (there ? square : 0) * p.scale_b_row, there);
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

DEVICE void produce(const Problem& p, const TensorMap* a, const TensorMap* b, const Tile& tile, u32 smem) {
    Ring ring;
#pragma unroll 1
    for (int block = tile.first; block < tile.last; block++, ring.next()) {
        const u32 bar = smem + FULL + 8 * ring.slot;
        bar_wait(smem + EMPTY + 8 * ring.slot, ring.phase ^ 1);
        if (threadIdx.x % 32 == 0) {
            bar_expect(bar, A_BYTES + B_BYTES);
            tma_load(smem + B_RING + ring.slot * B_BYTES, b, block * BLOCK_K, tile.column, 0, 0, bar);
            tma_load(smem + ring.slot * A_BYTES, a, block * BLOCK_K, tile.row, 0, 0, bar);
        }
        if (BLOCKED) copy_scales(p, tile, block, smem + S_RING + ring.slot * SCALE_BYTES, bar);
        else __syncwarp();  // a lane that arrives at no barrier could fall behind, and miss a phase of the empty one
    }
}

// ---- Consumers ----------------------------------------------------------------------------------------------------

// Scales of a thread's fragment: of its two rows of b, and of rows 8 j + 2 (lane % 4) and the next of a.
struct Scales {
    float low, high;
    float2 a[COLS / 8];
};

DEVICE void load_scales(Scales& x, u32 scales) {
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    const u32 of_b = scales + SCALE_B + 4 * (SCALING == 3 ? row : threadIdx.x / 256);
    x.low = load_float(of_b), x.high = SCALING == 3 ? load_float(of_b + 32) : x.low;
#pragma unroll
    for (int j = 0; j < COLS / 8; j++) x.a[j] = load_two(scales + 32 * j + 8 * (threadIdx.x % 4));
}

// sums += d, times the block scales if any.
DEVICE void promote(float (&sums)[COLS / 2], const float (&d)[COLS / 2], const Scales& x) {
#pragma unroll
    for (int j = 0; j < COLS / 8; j++) {
        sums[4 * j] += BLOCKED ? d[4 * j] * (x.a[j].x * x.low) : d[4 * j];
        sums[4 * j + 1] += BLOCKED ? d[4 * j + 1] * (x.a[j].y * x.low) : d[4 * j + 1];
        sums[4 * j + 2] += BLOCKED ? d[4 * j + 2] * (x.a[j].x * x.high) : d[4 * j + 2];
        sums[4 * j + 3] += BLOCKED ? d[4 * j + 3] * (x.a[j].y * x.high) : d[4 * j + 3];
    }
}

// The main loop: sums = b times a transposed over the K-blocks of this split-K partition, with block scales if any.
DEVICE void multiply(float (&sums)[COLS / 2], u32 smem, int steps, int group) {
    float d[COLS / 2];
    Scales scales;
    Ring ring;
#pragma unroll 1
    for (int step = 0; step < steps; step++, ring.next()) {
        const u64 a = describe(smem + ring.slot * A_BYTES);
        const u64 b = describe(smem + B_RING + ring.slot * B_BYTES + group * 64 * BLOCK_K);
        bar_wait(smem + FULL + 8 * ring.slot, ring.phase);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < BLOCK_K / 32; i++) wgmma(d, b + i * (32 / 16), a + i * (32 / 16), i);
        wgmma_commit();
        if (BLOCKED) load_scales(scales, smem + S_RING + ring.slot * SCALE_BYTES);
        wgmma_wait<0>();
        pin(d);
        // No fence_reads: reads of scales may be pending, but the copies that overwrite them (cp.async, no bulk copies)
        // are ordered after them, as the threads' stores are.
        __syncwarp();
        if (threadIdx.x % 32 == 0) bar_arrive(smem + EMPTY + 8 * ring.slot);
        promote(sums, d, scales);
    }
}

// ---- Epilogue -----------------------------------------------------------------------------------------------------

constexpr int SHARE = ROWS / CLUSTER;  // columns of y that a CTA reduces

// Prefetches what the epilogue reads into L2, overlapped with the main loop.
DEVICE void prefetch(const Problem& p, const Tile& tile) {
    const int column = tile.column + cluster_rank() * SHARE + threadIdx.x, row = tile.row + threadIdx.x;
    const bool has_column = threadIdx.x < SHARE && column < p.cols, has_row = threadIdx.x < COLS && row < p.rows;
    const char* const bias = (const char*)p.bias + column * p.bias_step * (BIAS == 3 ? 4 : 2);
    if (BIAS && has_column) asm volatile("prefetch.global.L2 [%0];" ::"l"(bias));
    if (BLOCKED) return;
    if (has_column) asm volatile("prefetch.global.L2 [%0];" ::"l"(p.scale_b + column * p.scale_b_row));
    if (has_row) asm volatile("prefetch.global.L2 [%0];" ::"l"(p.scale_a + row * p.scale_a_row));
}

DEVICE void leave(const float (&d)[COLS / 2], float* sums) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < COLS / 2; i++) sums[(i / 4 * 8 + lane % 4 * 2 + i % 2) * PITCH + row + i % 4 / 2 * 8] = d[i];
}

// Two accumulators of the CTA `rank` of the cluster; `at` is their address in this CTA's shared memory.
DEVICE float2 load_sums(u32 at, int rank) {
    float2 x;
    asm volatile("{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %2, %3;\n"
                 "ld.shared::cluster.v2.f32 {%0, %1}, [remote]; }"
                 : "=f"(x.x), "=f"(x.y) : "r"(at), "r"(rank) : "memory");
    return x;
}

// The epilogue of this CTA's share of the columns of y: the sum over the partitions in order, the scales that the
// promotion did not apply, and the bias.
DEVICE void add(const Problem& p, const Tile& tile, u32 smem) {
    const int height = min(COLS, p.rows - tile.row);
#pragma unroll 1
    for (int i = threadIdx.x; i < height * (SHARE / 2); i += THREADS) {
        const int row = i / (SHARE / 2), own = cluster_rank() * SHARE + 2 * (i % (SHARE / 2));
        const int m = tile.row + row, n = tile.column + own;
        if (n >= p.cols) continue;
        float2 sum = make_float2(0, 0);
#pragma unroll
        for (int rank = 0; rank < CLUSTER; rank++) {
            const float2 x = load_sums(smem + 4 * (row * PITCH + own), rank);
            sum.x += x.x, sum.y += x.y;
        }
        if (!BLOCKED) {
            const float scale = p.scale_a[m * p.scale_a_row];
            sum.x *= scale * p.scale_b[n * p.scale_b_row], sum.y *= scale * p.scale_b[(n + 1) * p.scale_b_row];
        }
        if (BIAS) sum.x += load_bias(p.bias, n * p.bias_step), sum.y += load_bias(p.bias, (n + 1) * p.bias_step);
        char* const to = p.out + ((u64)m * p.cols + n) * (OUT32 ? 4 : 2);
        if (OUT32) *(float2*)to = sum;
        else *(u32*)to = pack(sum.x, sum.y);
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, RESIDENT)
fp8_matmul_few_rows(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                    const __grid_constant__ Problem problem) {
    extern __shared__ __align__(1024) char shared[];
    const u32 smem = (u32)__cvta_generic_to_shared(shared);
    const Tile tile = find_tile(problem);
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            bar_init(smem + FULL + 8 * s, BLOCKED ? 1 + 32 : 1);
            bar_init(smem + EMPTY + 8 * s, 4 * GROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    float sums[COLS / 2] = {};
    if (group < GROUPS) {
        prefetch(problem, tile);
        multiply(sums, smem, tile.last - tile.first, group);
    } else {
        produce(problem, &a_map, &b_map, tile, smem);
    }
    __syncwarp();
    __syncthreads();  // all pipeline stages have been read
    if (group < GROUPS) leave(sums, (float*)shared);
    __syncthreads();
    cluster_sync();
    add(problem, tile, smem);
    __syncwarp();
    cluster_leave();  // the other CTAs have read this CTA's accumulators
}
