// The forward for Hopper (sm_90a): TMA, sparse wgmma, warp specialisation, persistent; launched by products.py.
//
//   y[m, n] = act(z[m, n]),  z[m, n] = sum over k of w[n, k] x[m, k] + bias[n]
//
// Operands have 16 bits or, with FP8, 8 bits, where the sum is multiplied by the scales of its row m and row n. This
// comment describes 16 bits. In 8 bits a K-block is 128 instead of 64, in the same bytes, with 2 KiB of metadata, and
// takes the same 512 cycles.
//
// The sparse operand of wgmma is A, so a tile is a tile of z transposed: 128 rows n of w by 256 rows m of x.
//
// Back-of-the-envelope estimate for a K-block of 64, in cycles per SM (8192 FLOP a cycle, counted for the dense GEMM):
// the tensor cores take 512. 32 KiB of x, 8 KiB of values and 1 KiB of metadata come from L2: 82 bytes a cycle, more
// than L2 delivers. Therefore the CTAs of a cluster have the same rows of x, and each loads a share of them, which TMA
// multicasts: 50 bytes a cycle with two CTAs, 34 with four. The epilogue writes 64 KiB.
//
// A CTA has one producer thread and two consumer warpgroups with 64 rows of w each. The producer fills a circular
// buffer of STAGES pipeline stages (Ring; a slot is a stage). Metadata is in the instruction's order (formats.py). A
// bulk copy loads 8 blocks of 16 rows; each consumer warp reads one of them, a word per lane. The two instructions of a
// K-block use the metadata of lanes 0 and 1, or 2 and 3, of each four; in 8 bits each instruction has its own block.
// Tails of every dimension are zero-filled by TMA. Metadata is padded to whole blocks; past the last block of rows or
// of k the last one is loaded again, so that metadata is always valid.
//
// Barriers and their arrivals per phase:
//   full[s]   1 and the bytes of a stage
//   empty[s]  8: one lane of each consumer warp in each CTA of the cluster, since this CTA's producer writes to all
// The n-th wait on a full barrier is for parity n & 1. On an empty barrier it is for the opposite parity, so that in
// the first pass every stage counts as empty. The other CTAs' bytes may arrive before this CTA's expect_tx. They are
// counted all the same, and the phase cannot complete before this CTA's own arrival.
//
// There is no deadlock. No consumer waits for another's main loop. A producer waits only for consumers, which all
// process the same sequence of K-blocks. At the end the CTAs of a cluster wait for each other, so that none writes into
// the shared memory of one that has exited.
//
// Defined by the launcher: FP8, with the formats W_E4M3 and X_E4M3 (else e5m2), SCALES (0 per tensor, 1 per row) and
// BIAS32 (whether the bias is fp32); FP16 (else bf16), the type of y and all other 16-bit tensors; ACTIVATION
// (epilogue.cuh); STAGES; RASTER (height of a group in the grouped tile order, in rows of clusters); CLUSTER (1, 2 or
// 4).

#include "cluster.cuh"
#include "epilogue.cuh"
#include "mbarrier.cuh"
#include "products.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

constexpr int BLOCK_N = 128, BLOCK_M = 256, BLOCK_K = FP8 ? 128 : 64;
constexpr int CONSUMERS = 2, ROWS = BLOCK_N / CONSUMERS, THREADS = 128 * (CONSUMERS + 1);
constexpr int ROW_BYTES = 128;  // of x in a K-block; rows of w have half
constexpr int X_BYTES = BLOCK_M * ROW_BYTES, W_BYTES = BLOCK_N * ROW_BYTES / 2, META_BLOCK = 128;
constexpr int META_STEPS = BLOCK_K / 64, META_BYTES = BLOCK_N / 16 * META_BLOCK;  // per K-block; bytes per 64 of K
constexpr int STEP_BYTES = X_BYTES + W_BYTES + META_STEPS * META_BYTES;
constexpr int CHUNK = 32;  // rows of y that a consumer transposes at once
constexpr int PITCH = ROWS * 2 + 16, STAGING = CHUNK * PITCH;
constexpr int STAGED = STAGES * STEP_BYTES, FULL = STAGED + CONSUMERS * STAGING, EMPTY = FULL + 8 * STAGES;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
static_assert(STEP_BYTES % 1024 == 0, "operands with 128-byte swizzle begin at multiples of 1024");

#if FP8 && BIAS32
typedef float Bias;
DEVICE float widen(float x) { return x; }
#else
typedef u16 Bias;
#endif

struct Problem {
    u16* y;
    u16* z;                // or null
    const Bias* bias;      // or null
    const char* metadata;  // [ceil(K / 64), blocks, 128 bytes]
    u64 bias_step;
    int rows, cols, depth, blocks;
#if FP8
    const float* scale_x;
    const float* scale_w;
    u64 scale_x_step, scale_w_step;  // 0 for a scale per tensor
#endif
};

struct Tile {
    int row, column;  // first row of w, first row of x
};

struct Ring {
    int slot = 0;
    u32 phase = 0;
    DEVICE void next() {
        if (++slot == STAGES) slot = 0, phase ^= 1;
    }
};

// ---- Tiles --------------------------------------------------------------------------------------------------------

// A band is a row of clusters: CLUSTER vertically adjacent tiles, of which the last ones may lie past the last row.
DEVICE int bands_of(const Problem& a) { return (a.cols + CLUSTER * BLOCK_N - 1) / (CLUSTER * BLOCK_N); }
DEVICE int columns_of(const Problem& a) { return (a.rows + BLOCK_M - 1) / BLOCK_M; }
DEVICE int tiles_of(const Problem& a) { return bands_of(a) * columns_of(a); }

// Grouped tile order: RASTER bands of a column of tiles, then of the next column, so that their operands are in L2.
DEVICE Tile find_tile(const Problem& a, int place) {
    const int bands = bands_of(a), group = RASTER * columns_of(a);
    const int first = place / group * RASTER, height = min(bands - first, RASTER);
    const int band = first + place % group % height;
    return {(band * CLUSTER + cluster_rank()) * BLOCK_N, place % group / height * BLOCK_M};
}

// ---- Producer -----------------------------------------------------------------------------------------------------

DEVICE void bulk_load(u32 to, const char* from, int bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}

// The rows of x of a K-block: all of them, or this CTA's share, multicast to all CTAs of the cluster.
DEVICE void load_x(u32 to, const TensorMap* map, int k, int row, u32 bar) {
    const int share = BLOCK_M / CLUSTER * cluster_rank();
    tma_multicast(to + share * ROW_BYTES, map, k, row + share, bar);
}

// Loads the metadata of 64 of k.
DEVICE void load_blocks(const Problem& a, u32 to, int block, int row, u32 bar) {
    const char* from = a.metadata + (u64)block * a.blocks * META_BLOCK;
    const int first = row / 16;
    if (first + BLOCK_N / 16 <= a.blocks) return bulk_load(to, from + (u64)first * META_BLOCK, META_BYTES, bar);
#pragma unroll(FP8 ? 1 : BLOCK_N / 16)  // the producer has few registers
    for (int i = 0; i < BLOCK_N / 16; i++)
        bulk_load(to + i * META_BLOCK, from + (u64)min(first + i, a.blocks - 1) * META_BLOCK, META_BLOCK, bar);
}

DEVICE void load_metadata(const Problem& a, u32 to, int k, int row, u32 bar) {
#pragma unroll 1
    for (int i = 0; i < META_STEPS; i++)
        load_blocks(a, to + i * META_BYTES, i ? min(k / 64 + 1, (a.depth - 1) / 64) : k / 64, row, bar);
}

DEVICE void produce(const Problem& a, const TensorMap* x_map, const TensorMap* w_map, u32 smem) {
    const int tiles = tiles_of(a);
    Ring ring;
    for (int place = blockIdx.x / CLUSTER; place < tiles; place += gridDim.x / CLUSTER) {
        const Tile tile = find_tile(a, place);
#pragma unroll 1
        for (int k = 0; k < a.depth; k += BLOCK_K, ring.next()) {
            const u32 step = smem + ring.slot * STEP_BYTES, bar = smem + FULL + 8 * ring.slot;
            bar_wait(smem + EMPTY + 8 * ring.slot, ring.phase ^ 1);
            bar_expect(bar, STEP_BYTES);
            load_x(step, x_map, k, tile.column, bar);
            tma_load(step + X_BYTES, w_map, k / 2, tile.row, 0, 0, bar);
            load_metadata(a, step + X_BYTES + W_BYTES, k, tile.row, bar);
        }
    }
}

// ---- Consumers ----------------------------------------------------------------------------------------------------

// Releases a stage to the producers of the cluster, after the whole warp has read it.
DEVICE void release(u32 smem, int slot) {
    __syncwarp();
    arrive_at_all(smem + EMPTY + 8 * slot);
}

DEVICE u32 load_word(u32 address) {
    u32 x;
    asm volatile("ld.shared::cta.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}

// The main loop of one consumer's 64 rows of w. The wgmmas of a K-block are awaited before the metadata of the next one
// is loaded: ptxas does not know that a wgmma in flight still reads that register. Meanwhile the tensor cores execute
// the other consumer's wgmmas.
DEVICE void multiply(float (&d)[BLOCK_M / 2], u32 smem, Ring& ring, int depth, int consumer) {
    const u32 word = X_BYTES + W_BYTES + (consumer * 4 + threadIdx.x % 128 / 32) * META_BLOCK + threadIdx.x % 32 * 4;
#pragma unroll 1
    for (int k = 0; k < depth; k += BLOCK_K, ring.next()) {
        const u32 step = smem + ring.slot * STEP_BYTES;
        bar_wait(smem + FULL + 8 * ring.slot, ring.phase);
        u32 metadata[META_STEPS];
#pragma unroll
        for (int i = 0; i < META_STEPS; i++) metadata[i] = load_word(step + word + i * META_BYTES);
        const u64 w = describe64(step + X_BYTES + consumer * (W_BYTES / CONSUMERS)), x = describe128(step);
        wgmma_fence();
        wgmma_sparse<0>(d, w, x, metadata[0]);
        wgmma_sparse<FP8 ? 0 : 1>(d, w + 32 / 16, x + 64 / 16, metadata[META_STEPS - 1]);
        wgmma_commit();
        wgmma_wait<0>();
        if (FP8) pin(metadata);
        release(smem, ring.slot);
    }
    pin(d);
}

DEVICE void sync_consumer(int consumer) { asm volatile("bar.sync %0, 128;" ::"r"(1 + consumer) : "memory"); }

#if FP8
// Multiplies by the scales. A thread's rows n and columns m are those of add_bias.
DEVICE void scale(const Problem& a, const Tile& tile, float (&d)[BLOCK_M / 2], int consumer) {
    const int n = tile.row + consumer * ROWS + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const int m = tile.column + threadIdx.x % 4 * 2;
    const float low = n < a.cols ? a.scale_w[n * a.scale_w_step] : 0;
    const float high = n + 8 < a.cols ? a.scale_w[(n + 8) * a.scale_w_step] : 0, all = SCALES ? 0 : a.scale_x[0];
#pragma unroll
    for (int i = 0; i < BLOCK_M / 2; i += 4) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int at = m + 2 * i + j;
            const float of_x = !SCALES ? all : at < a.rows ? a.scale_x[at * a.scale_x_step] : 0;
            d[i + j] *= of_x * low, d[i + 2 + j] *= of_x * high;
        }
    }
}
#endif

// Adds the bias. A thread has columns m = 8 j + 2 (lane % 4) and the next of rows n = lane / 4 and lane / 4 + 8 of its
// warp's 16.
DEVICE void add_bias(const Problem& a, const Tile& tile, float (&d)[BLOCK_M / 2], int consumer) {
    if (!a.bias) return;
    const int n = tile.row + consumer * ROWS + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const float low = n < a.cols ? widen(a.bias[n * a.bias_step]) : 0;
    const float high = n + 8 < a.cols ? widen(a.bias[(n + 8) * a.bias_step]) : 0;
#pragma unroll
    for (int i = 0; i < BLOCK_M / 2; i++) d[i] += i % 4 < 2 ? low : high;
}

// Each warp transposes its 16 columns n of CHUNK rows of y into shared memory. From there rows of 128 bytes are stored.
DEVICE void store_tile(const Problem& a, u16* out, const Tile& tile, const float (&d)[BLOCK_M / 2], u32 smem,
                       int consumer) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, first = tile.row + consumer * ROWS;
    const u32 staging = smem + STAGED + consumer * STAGING;
    const u32 to = staging + (lane / 16 * 8 + lane % 8) * PITCH + (warp * 16 + lane / 8 % 2 * 8) * 2;
#pragma unroll
    for (int c = 0; c < BLOCK_M / CHUNK; c++) {
        sync_consumer(consumer);  // the previous chunk has been read
#pragma unroll
        for (int pair = 0; pair < CHUNK / 16; pair++) {
            u32 blocks[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int at = 4 * (CHUNK / 8 * c + 2 * pair + i / 2) + i % 2 * 2;
                blocks[i] = pack(d[at], d[at + 1]);
            }
            store_blocks(to + pair * 16 * PITCH, blocks);
        }
        sync_consumer(consumer);
#pragma unroll
        for (int i = 0; i < CHUNK * ROWS / 8 / 128; i++) {
            const int vector = i * 128 + threadIdx.x % 128, row = vector / (ROWS / 8), n = vector % (ROWS / 8) * 8;
            const int m = tile.column + c * CHUNK + row;
            if (m < a.rows && first + n < a.cols)
                copy_vector(out + (u64)m * a.cols + first + n, staging + row * PITCH + n * 2);
        }
    }
}

DEVICE void consume(const Problem& a, u32 smem, int consumer) {
    const int tiles = tiles_of(a);
    Ring ring;
    float d[BLOCK_M / 2];
    for (int place = blockIdx.x / CLUSTER; place < tiles; place += gridDim.x / CLUSTER) {
        const Tile tile = find_tile(a, place);
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; i++) d[i] = 0;
        multiply(d, smem, ring, a.depth, consumer);
#if FP8
        scale(a, tile, d, consumer);
#endif
        add_bias(a, tile, d, consumer);
        if (ACTIVATION && !FP8 && a.z) store_tile(a, a.z, tile, d, smem, consumer);
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; i++) d[i] = activate(d[i]);
        store_tile(a, a.y, tile, d, smem, consumer);
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
sparse_matmul_products(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
                       const __grid_constant__ Problem problem) {
    extern __shared__ __align__(1024) char shared[];
    const u32 smem = (u32)__cvta_generic_to_shared(shared);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            bar_init(smem + FULL + 8 * s, 1);
            bar_init(smem + EMPTY + 8 * s, 4 * CONSUMERS * CLUSTER);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    cluster_sync();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (threadIdx.x == 0) produce(problem, &x_map, &w_map, smem);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        consume(problem, smem, group - 1);
    }
    __syncwarp();
    cluster_sync();
}
