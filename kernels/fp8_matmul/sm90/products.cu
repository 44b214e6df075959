// Products of fp8 for Hopper (sm_90a): TMA, wgmma, warp specialisation, persistent. products.py compiles and launches.
//
//   y[m, n] = sum over k of a[m, k] b[n, k], scaled, + bias[n]
//
//   SCALING 0   scales of tensors or rows, at the end; the tensor cores keep the whole sum: tiles of 128 x 256
//   SCALING 1   the same, but their sums of 128 terms are added in fp32: tiles of 128 x 128
//   SCALING 2   scales of 1x128 of a and 128x128 of b: those sums are scaled before they are added
//   SCALING 3   scales of 1x128 of both
//
// Napkin maths for a step of 128 of k, in cycles of an SM (8192 FLOP a cycle of fp8, dense): a tile of 128 x 256 takes
// 1024, and 48 KiB come from L2, 48 bytes a cycle; one of 128 x 128 takes 512, and 32 KiB come, 64 bytes a cycle. Its
// 64 fp32 additions a thread are 128 issue slots of each scheduler, which the other consumer's wgmmas overlap with.
//
// A CTA is a producer warpgroup and two consumer warpgroups with 64 rows of the tile each. Thread 0 of the producer
// fills a ring of STAGES steps by TMA; with SCALING 2 and 3 all of its threads copy the scales of that step, one row
// and one column each, by cp.async. Tails of every dimension are zeros: TMA's, and cp.async's of no bytes.
//
// With CLUSTER 2 two CTAs of a cluster have tiles below each other and the same columns. Each loads its rows of a and
// half of b's, which TMA multicasts to both: 24 KiB in place of 32, or 32 in place of 48, come from L2.
//
// Barriers, with their arrivals per phase: full[s] 1 and the bytes of a step, and with scales 128 that cp.async makes
// when its copies are there; empty[s] 8, one lane of each consumer warp, from each CTA of the cluster, since its
// producer writes into all of them. The n-th use of a full one waits for parity n & 1, that of an empty one for the
// opposite, so that the first pass finds every slot empty. The other CTA's bytes may come before this one's expects
// them: they count all the same, and its own arrival is still due. No consumer waits for another, and a producer only
// for consumers, all of which go through the same steps: deadlock freedom. In the end CTAs of a cluster wait for each
// other, so that none writes into one that is gone.
//
// Defined by the launcher: SCALING, A_E4M3, B_E4M3, OUT32 (y is fp32; else FP16 or bf16), BIAS (0 none, 1 bf16, 2 fp16,
// 3 fp32), STAGES, RASTER, CLUSTER (1 or 2).

#include "cluster.cuh"
#include "mbarrier.cuh"
#include "numbers.cuh"
#include "tma.cuh"
#include "wgmma.cuh"
#include "wgmma8.cuh"

constexpr int BLOCK_M = 128, BLOCK_N = SCALING ? 128 : 256, BLOCK_K = 128;
constexpr int CONSUMERS = 2, ROWS = BLOCK_M / CONSUMERS, THREADS = 128 * (CONSUMERS + 1);
constexpr int SUMS = BLOCK_N / 2;  // of a thread
constexpr bool BLOCKED = SCALING >= 2;
constexpr int A_BYTES = BLOCK_M * BLOCK_K, B_BYTES = BLOCK_N * BLOCK_K, OPERAND_BYTES = A_BYTES + B_BYTES;
constexpr int SCALE_A = OPERAND_BYTES, SCALE_B = SCALE_A + 4 * BLOCK_M;  // where scales lie in a step
constexpr int STEP_BYTES = BLOCKED ? SCALE_B + 4 * BLOCK_N : OPERAND_BYTES;
constexpr int FULL = STAGES * STEP_BYTES, EMPTY = FULL + 8 * STAGES;  // where barriers lie
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
static_assert(STEP_BYTES % 1024 == 0, "operands with 128-byte swizzle begin at multiples of 1024");

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

struct Ring {
    int slot = 0;
    u32 phase = 0;
    DEVICE void next() {
        if (++slot == STAGES) slot = 0, phase ^= 1;
    }
};

// Rows of tiles are those of a cluster: CLUSTER tiles below each other, of which the last may have no rows.
DEVICE int bands_of(const Problem& a) { return (a.rows + CLUSTER * BLOCK_M - 1) / (CLUSTER * BLOCK_M); }
DEVICE int columns_of(const Problem& a) { return (a.cols + BLOCK_N - 1) / BLOCK_N; }
DEVICE int tiles_of(const Problem& a) { return bands_of(a) * columns_of(a); }

// RASTER tiles of a column, then the next column, so that what they read of b is in L2.
DEVICE Tile find_tile(const Problem& a, int place) {
    const int bands = bands_of(a), group = RASTER * columns_of(a);
    const int first = place / group * RASTER, height = min(bands - first, RASTER);
    const int band = first + place % group % height;
    return {(band * CLUSTER + cluster_rank()) * BLOCK_M, place % group / height * BLOCK_N};
}

// ---- Producer -----------------------------------------------------------------------------------------------------

// Copies one fp32 number, or writes zero.
DEVICE void copy_scale(u32 to, const float* from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(there ? 4 : 0) : "memory");
}

// This thread's row and, of SCALING 3, column of the scales of a block of k; of SCALING 2 thread 0 has the tile's.
DEVICE void copy_scales(const Problem& a, const Tile& tile, int block, u32 step, u32 bar) {
    const int thread = threadIdx.x, row = tile.row + thread, column = tile.column + thread;
    const bool row_there = row < a.rows, column_there = column < a.cols;
    const float* from_a = a.scale_a + block * a.scale_a_block;
    const float* from_b = a.scale_b + block * a.scale_b_block;
    copy_scale(step + SCALE_A + 4 * thread, row_there ? from_a + row * a.scale_a_row : from_a, row_there);
    if (SCALING == 3)
        copy_scale(step + SCALE_B + 4 * thread, column_there ? from_b + column * a.scale_b_row : from_b, column_there);
    else if (thread == 0)
        copy_scale(step + SCALE_B, from_b + tile.column / 128 * a.scale_b_row, true);
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

// b's rows of a step: all of them, or this CTA's share for all CTAs of the cluster.
DEVICE void load_b(u32 to, const TensorMap* map, int k, int column, u32 bar) {
    const int share = BLOCK_N / CLUSTER * cluster_rank();
    tma_multicast(to + share * BLOCK_K, map, k, column + share, bar);
}

DEVICE void produce(const Problem& a, const TensorMap* a_map, const TensorMap* b_map, u32 smem) {
    const int tiles = tiles_of(a);
    Ring ring;
    for (int place = blockIdx.x / CLUSTER; place < tiles; place += gridDim.x / CLUSTER) {
        const Tile tile = find_tile(a, place);
#pragma unroll 1
        for (int k = 0; k < a.depth; k += BLOCK_K, ring.next()) {
            const u32 step = smem + ring.slot * STEP_BYTES, bar = smem + FULL + 8 * ring.slot;
            bar_wait(smem + EMPTY + 8 * ring.slot, ring.phase ^ 1);
            if (threadIdx.x == 0) {
                bar_expect(bar, OPERAND_BYTES);
                tma_load(step, a_map, k, tile.row, 0, 0, bar);
                load_b(step + A_BYTES, b_map, k, tile.column, bar);
            }
            if (BLOCKED) copy_scales(a, tile, k / BLOCK_K, step, bar);
        }
    }
    if (BLOCKED) asm volatile("cp.async.wait_all;" ::: "memory");
}

// ---- Consumers ----------------------------------------------------------------------------------------------------

// Gives a slot back to the producers of the cluster: the whole warp has read it.
DEVICE void release(u32 smem, int slot) {
    __syncwarp();
    arrive_at_all(smem + EMPTY + 8 * slot);
}

// The wgmmas of one step for one consumer's 64 rows and the first N columns.
template <int N> DEVICE void multiply(float (&d)[N / 2], u32 step, int consumer, bool add) {
    const u64 a = describe(step + consumer * (A_BYTES / CONSUMERS)), b = describe(step + A_BYTES);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < BLOCK_K / 32; i++) wgmma(d, a + i * (32 / 16), b + i * (32 / 16), add || i);
    wgmma_commit();
}

// SCALING 0: all terms into one set of sums. One step is in flight while the next is waited for.
template <int N> DEVICE void sum_up(float (&d)[N / 2], u32 smem, Ring& ring, int depth, int consumer) {
    int before = 0;
#pragma unroll 1
    for (int k = 0; k < depth; k += BLOCK_K, ring.next()) {
        bar_wait(smem + FULL + 8 * ring.slot, ring.phase);
        multiply<N>(d, smem + ring.slot * STEP_BYTES, consumer, true);
        wgmma_wait<1>();
        if (k) release(smem, before);
        before = ring.slot;
    }
    wgmma_wait<0>();
    pin(d);
    if (depth > 0) release(smem, before);
}

DEVICE float load_float(u32 address) {
    float x;
    asm volatile("ld.shared::cta.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}

DEVICE float2 load_pair(u32 address) {
    float2 x;
    asm volatile("ld.shared::cta.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
    return x;
}

// A thread has columns 8 j + 2 (lane % 4) and the next of rows lane / 4 and lane / 4 + 8 of its warp's 16.
DEVICE int row_of(int consumer) { return consumer * ROWS + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }

// sums += d, scaled by what lies in the step's shared memory.
DEVICE void promote(float (&sums)[SUMS], const float (&d)[SUMS], u32 step, float high, float low) {
    const int quad = threadIdx.x % 4;
    const float tile = SCALING == 2 ? load_float(step + SCALE_B) : 1;
    high *= tile, low *= tile;
#pragma unroll
    for (int j = 0; j < BLOCK_N / 8; j++) {
        const float2 b = SCALING == 3 ? load_pair(step + SCALE_B + 4 * (8 * j + 2 * quad)) : float2{1, 1};
        if (SCALING == 1) {
            for (int i = 0; i < 4; i++) sums[4 * j + i] += d[4 * j + i];
        } else {
            sums[4 * j] += d[4 * j] * (high * b.x), sums[4 * j + 1] += d[4 * j + 1] * (high * b.y);
            sums[4 * j + 2] += d[4 * j + 2] * (low * b.x), sums[4 * j + 3] += d[4 * j + 3] * (low * b.y);
        }
    }
}

// SCALING 1 to 3: the tensor cores' sums of 128 terms, added in fp32.
DEVICE void sum_up_in_fp32(float (&sums)[SUMS], u32 smem, Ring& ring, int depth, int consumer) {
    const int row = row_of(consumer);
    float d[SUMS];
#pragma unroll 1
    for (int k = 0; k < depth; k += BLOCK_K, ring.next()) {
        const u32 step = smem + ring.slot * STEP_BYTES;
        bar_wait(smem + FULL + 8 * ring.slot, ring.phase);
        multiply<BLOCK_N>(d, step, consumer, false);
        const float high = BLOCKED ? load_float(step + SCALE_A + 4 * row) : 1;
        const float low = BLOCKED ? load_float(step + SCALE_A + 4 * row + 32) : 1;
        wgmma_wait<0>();
        pin(d);
        promote(sums, d, step, high, low);
        release(smem, ring.slot);
    }
}

// ---- Epilogue -----------------------------------------------------------------------------------------------------

DEVICE float bias_of(const Problem& a, int column) {
    float x = 0;
    if (BIAS == 1) x = __uint_as_float((u32)((const u16*)a.bias)[column * a.bias_step] << 16);
    if (BIAS == 2) asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(((const u16*)a.bias)[column * a.bias_step]));
    if (BIAS == 3) x = ((const float*)a.bias)[column * a.bias_step];
    return x;
}

// Two neighbouring results of a row, which has scale `of_row` unless sums are scaled already.
DEVICE float2 finished(const Problem& a, int column, float of_row, float x, float y) {
    if (column >= a.cols) return {0, 0};
    if (!BLOCKED) {
        const float* scale = a.scale_b + column * a.scale_b_row;
        x *= of_row * scale[0], y *= of_row * scale[a.scale_b_row];
    }
    return {x + bias_of(a, column), y + bias_of(a, column + 1)};
}

DEVICE void exchange(u32& kept_low, u32& kept_high, int bit) {
    const bool high = threadIdx.x & bit;
    const u32 got = __shfl_xor_sync(~0u, high ? kept_low : kept_high, bit);
    if (high) kept_low = got;
    else kept_high = got;
}

// Four blocks of 8 columns of a row in 16 bits. Four lanes exchange what they have of them, so that each stores one
// block: 16 bytes.
DEVICE void store_halves(char* to, const float2 (&pairs)[4], bool inside) {
    u32 w[4];
#pragma unroll
    for (int block = 0; block < 4; block++) w[block] = pack(pairs[block].x, pairs[block].y);
    exchange(w[0], w[1], 1);
    exchange(w[2], w[3], 1);
    exchange(w[0], w[2], 2);
    exchange(w[1], w[3], 2);
    if (inside)
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                     ::"l"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
}

DEVICE void store_tile(const Problem& a, const Tile& tile, const float (&sums)[SUMS], int consumer) {
    const int quad = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = tile.row + row_of(consumer) + 8 * half;
        const bool inside = row < a.rows;
        const float of_row = !BLOCKED && inside ? a.scale_a[row * a.scale_a_row] : 0;
        char* const out = a.out + (u64)row * a.cols * (OUT32 ? 4 : 2);
#pragma unroll
        for (int c = 0; c < BLOCK_N / 32; c++) {
            const int first = tile.column + 32 * c;
            float2 pairs[4];
#pragma unroll
            for (int block = 0; block < 4; block++) {
                const int at = 4 * (4 * c + block) + 2 * half, column = first + 8 * block + 2 * quad;
                pairs[block] = finished(a, column, of_row, sums[at], sums[at + 1]);
                if (OUT32 && inside && column < a.cols) *(float2*)(out + 4 * column) = pairs[block];
            }
            if (!OUT32) store_halves(out + 2 * (first + 8 * quad), pairs, inside && first + 8 * quad < a.cols);
        }
    }
}

DEVICE void consume(const Problem& a, u32 smem, int consumer) {
    const int tiles = tiles_of(a);
    Ring ring;
    float sums[SUMS];
    for (int place = blockIdx.x / CLUSTER; place < tiles; place += gridDim.x / CLUSTER) {
        const Tile tile = find_tile(a, place);
#pragma unroll
        for (int i = 0; i < SUMS; i++) sums[i] = 0;
#if SCALING == 0
        if (a.cols - tile.column > BLOCK_N / 2)
            sum_up<BLOCK_N>(sums, smem, ring, a.depth, consumer);
        else
            sum_up<BLOCK_N / 2>(reinterpret_cast<float(&)[SUMS / 2]>(sums), smem, ring, a.depth, consumer);
#else
        sum_up_in_fp32(sums, smem, ring, a.depth, consumer);
#endif
        store_tile(a, tile, sums, consumer);
    }
}

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
