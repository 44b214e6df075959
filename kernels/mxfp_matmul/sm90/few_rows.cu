// y [M, N] = x [M, K] times w [N, K] of 4 bits, transposed, for Hopper (sm_90a) and few rows of x, bound by the reads
// of w. few_rows.py compiles and launches it.
//
// w is wgmma's A operand, in registers: 64 rows of w by COLS rows of x. It is stored in the order of the register
// fragments (formats.py): 16 contiguous bytes are a thread's operand registers of four wgmmas. x is the B operand, in
// shared memory as TMA writes it.
//
// Back-of-the-envelope estimate, N = K = 8192, one NVIDIA H200 (132 SMs, 4254 GB/s): 35.7 MB of MXFP4 take 8.4 us. An
// SM processes 248 pieces of 16 rows by 128 of K (a warp's part of a chunk), 62 per scheduler. A piece takes 190
// instructions with MXFP4 and 203 with NVFP4 (bf16): 11800 and 12600 issue slots, 6.4 and 6.8 us at 1.85 GHz. A wgmma
// of 64 x 64 x 16 takes 32 cycles, and an SM executes 496: 8.6 us with 64 rows of x. Little's law requires 3 MB in
// flight, 23 KB per SM; the pipeline stages hold 170 KB.
//
// A CTA has GROUPS consumer warpgroups, with 64 rows of w each, and a producer warp. One thread of the producer fills
// STAGES pipeline stages with chunks of 128 of K: x by TMA, w and scales by bulk copies, since the rows of a chunk are
// contiguous. The wgmmas of half a chunk overlap the unpacking of the next half. The CTAs of a cluster are the split-K
// partitions of one tile. Each writes its accumulators to its shared memory and then reduces a share of the tile's
// columns over all partitions, in a fixed order. So repeats agree bit for bit.
//
// TMA zero-fills the rows past the end of x. Stale shared memory past the last row of w is multiplied, but not stored.
//
// Barriers and their arrivals per phase: full[s] 1 and the bytes of a chunk, empty[s] one lane of each consumer warp.
// The n-th wait on a full barrier is for parity n & 1. On an empty barrier it is for the opposite parity, so that in
// the first pass every stage counts as empty.
//
// Defined by the launcher: NVFP4 (or MXFP4), FP16 (or bf16), COLS, GROUPS, STAGES, CLUSTER (split-K partitions).

#include "chunks.cuh"
#include "cluster.cuh"
#include "tma.cuh"

constexpr int PITCH = ROWS + 4;  // of accumulators in shared memory, without bank conflicts of a warp's stores

struct Tile {
    int row, column;  // of y
    int width;        // columns of the tile within y
    int first, last;  // chunks of this split-K partition
};

DEVICE Tile find_tile(const Problem& p) {
    const int part = blockIdx.x % CLUSTER, place = blockIdx.x / CLUSTER, tiles_m = (p.rows + COLS - 1) / COLS;
    Tile tile;
    tile.row = place % tiles_m * COLS, tile.column = place / tiles_m * ROWS;
    tile.width = min(ROWS, p.columns - tile.column);
    tile.first = p.chunks * part / CLUSTER, tile.last = p.chunks * (part + 1) / CLUSTER;
    return tile;
}

DEVICE void produce(const Problem& p, const TensorMap* x, const Tile& tile, u32 smem) {
    Ring ring;
#pragma unroll 1
    for (int chunk = tile.first; chunk < tile.last; chunk++, ring.next()) {
        const u32 bar = smem + FULL + 8 * ring.slot, to = smem + ring.slot * X_BYTES;
        bar_wait(smem + EMPTY + 8 * ring.slot, ring.phase ^ 1);
        bar_expect(bar, X_BYTES + tile.width * (CHUNK / 2 + SCALE_BYTES));
        load_weights(p, chunk, tile.column, tile.width, smem, ring.slot, bar);
        tma_load(to, x, chunk * CHUNK, tile.row, 0, 0, bar);
        tma_load(to + PANEL, x, chunk * CHUNK + 64, tile.row, 0, 0, bar);
    }
}

// Writes the accumulators to shared memory. A thread has columns 8 j + 2 (lane % 4) and the next of d, of rows lane / 4
// and lane / 4 + 8 of its warp's 16.
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

// The epilogue of this CTA's share of the columns of y: the sum over the partitions, in order.
DEVICE void add(const Problem& p, const Tile& tile, u32 smem) {
    constexpr int PAIRS = ROWS / CLUSTER / 2;
    const float scale = NVFP4 ? *p.tensor_scale : 1.0f;
    const int height = min(COLS, p.rows - tile.row);
#pragma unroll 1
    for (int i = threadIdx.x; i < height * PAIRS; i += THREADS) {
        const int row = i / PAIRS, column = 2 * (cluster_rank() * PAIRS + i % PAIRS);
        if (column >= tile.width) continue;
        float2 sum = make_float2(0, 0);
#pragma unroll
        for (int rank = 0; rank < CLUSTER; rank++) {
            const float2 x = load_sums(smem + 4 * (row * PITCH + column), rank);
            sum.x += x.x, sum.y += x.y;
        }
        if (NVFP4) sum.x *= 128, sum.y *= 128, sum.x *= scale, sum.y *= scale;
        *(u32*)((u16*)p.y + (u64)(tile.row + row) * p.columns + tile.column + column) = pack(sum.x, sum.y);
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 4 / GROUPS)
mxfp_matmul_few_rows(const __grid_constant__ TensorMap x_map, const __grid_constant__ Problem problem) {
    extern __shared__ __align__(1024) char shared[];
    const u32 smem = (u32)__cvta_generic_to_shared(shared);
    const Tile tile = find_tile(problem);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            bar_init(smem + FULL + 8 * s, 1);
            bar_init(smem + EMPTY + 8 * s, 4 * GROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const bool consumer = __shfl_sync(~0u, threadIdx.x / 128, 0) < GROUPS;
    float d[COLS / 2] = {};
    if (consumer) {
        Ring ring;
        multiply(d, shared, smem, ring, tile.last - tile.first, [&](int slot) {
            if (threadIdx.x % 32 == 0) bar_arrive(smem + EMPTY + 8 * slot);
        });
    } else if (threadIdx.x == 128 * GROUPS) produce(problem, &x_map, tile, smem);
    __syncwarp();
    __syncthreads();  // all pipeline stages have been read
    if (consumer) leave(d, (float*)shared);
    __syncthreads();
    cluster_sync();
    add(problem, tile, smem);
    __syncwarp();
    cluster_leave();  // the other CTAs have read this CTA's accumulators
}
