// y [M, N] = x [M, K] times w [N, K] of 4 bits, transposed, for Hopper (sm_90a) and many rows of x, bound by the tensor
// cores. many_rows.py compiles and launches it.
//
// As in few_rows.cu, w is wgmma's A operand, in registers, and the main loop is the same (chunks.cuh). But each
// unpacked weight is multiplied by COLS = 256 rows of x instead of 64.
//
// Back-of-the-envelope estimate for a chunk of 128 of K, 128 rows of w and 256 of x, in cycles per SM:
//   tensor cores   2 * 128 * 256 * 128 FLOP at 4096 a cycle                                             2048
//   unpacking      2 halves of 100 instructions of 8 warps, on four schedulers                           400
//   shared memory  x read by two warpgroups and written once, 192 KiB; w 8 KiB written and read, at 128  1664
//   L2             half of x and w with its scales, 41 KiB, by two CTAs that share x: 20 bytes a cycle
// N = K = 8192 and M = 1024 are 128 tiles of two CTAs for 66 clusters, 2 waves of 64 chunks: 150 us at 1.75 GHz.
// Besides, a tile takes 3000 cycles for its first loads and its stores, which overlap only the loads of the next tile.
//
// CTAs are persistent. A CTA has GROUPS = 2 consumer warpgroups, with 64 rows of w each, and a producer warpgroup, of
// which one thread fills the pipeline stages. The CTAs of a cluster have adjacent rows of w and the same rows of x;
// each loads its share of x and multicasts it. Grouped tile order: RASTER tiles along the rows of x, then the next rows
// of w, so that concurrent tiles find their operands in L2.
//
// After the chunks of a tile the producer leaves one stage without loads. The consumers write their part of y there, 64
// columns by 256 rows each, by stmatrix, and store it by TMA with 128-byte swizzle. Meanwhile the other stages are
// filled with chunks of the next tile.
//
// TMA zero-fills the rows past the end of x and clips the stores past the end of y. Stale shared memory past the last
// row of w is multiplied, but not stored.
//
// Barriers and their arrivals per phase: full[s] 1 and the bytes of a chunk, no bytes for the stage without loads;
// empty[s] 8 from each CTA of the cluster, one lane of each consumer warp. The n-th wait on a full barrier is for
// parity n & 1, on an empty barrier for the opposite. The CTAs of a cluster use the same stages in the same order.
// Named barriers 1 and 2 belong to one consumer each.
//
// Defined by the launcher: NVFP4 (or MXFP4), FP16 (or bf16), COLS, GROUPS, STAGES, CLUSTER (1 or 2).

#include "chunks.cuh"
#include "cluster.cuh"
#include "heads_ptx.cuh"

constexpr int RASTER = 8, SHARE = COLS / CLUSTER;  // rows of x that a CTA loads
constexpr int OUT_BYTES = COLS * 128;              // of a consumer's tile of y
constexpr int ALL_THREADS = 128 * (GROUPS + 1);    // the producer is a whole warpgroup, for setmaxnreg
static_assert(COLS == 256 && GROUPS * OUT_BYTES <= X_BYTES && STAGES >= 2);

struct Tile {
    int row, column;  // of y
    int width;        // columns of the tile within y, possibly 0
};

struct Tiles {
    int down, across, first, step;  // tiles of rows and of columns; first tile of this cluster, and stride to the next
};

DEVICE Tiles tiles_of(const Problem& p) {
    const int across = (p.columns - 1) / (ROWS * CLUSTER) + 1;
    return {(p.rows - 1) / COLS + 1, across, (int)blockIdx.x / CLUSTER, (int)gridDim.x / CLUSTER};
}

DEVICE Tile find_tile(const Problem& p, const Tiles& tiles, int place) {
    const int band = RASTER * tiles.across, first = place / band * RASTER, height = min(tiles.down - first, RASTER);
    Tile tile;
    tile.row = (first + place % band % height) * COLS;
    tile.column = (place % band / height * CLUSTER + cluster_rank()) * ROWS;
    tile.width = max(0, min(ROWS, p.columns - tile.column));
    return tile;
}

DEVICE void produce(const Problem& p, const TensorMap* x, u32 smem) {
    const Tiles tiles = tiles_of(p);
    Ring ring;
#pragma unroll 1
    for (int place = tiles.first; place < tiles.down * tiles.across; place += tiles.step) {
        const Tile tile = find_tile(p, tiles, place);
        const int share = cluster_rank() * SHARE;
#pragma unroll 1
        for (int chunk = 0; chunk < p.chunks; chunk++, ring.next()) {
            const u32 bar = smem + FULL + 8 * ring.slot, to = smem + ring.slot * X_BYTES + share * 128;
            bar_wait(smem + EMPTY + 8 * ring.slot, ring.phase ^ 1);
            bar_expect(bar, X_BYTES + tile.width * (CHUNK / 2 + SCALE_BYTES));
            if (tile.width) load_weights(p, chunk, tile.column, tile.width, smem, ring.slot, bar);
            tma_multicast(to, x, chunk * CHUNK, tile.row + share, bar);
            tma_multicast(to + PANEL, x, chunk * CHUNK + 64, tile.row + share, bar);
        }
        bar_wait(smem + EMPTY + 8 * ring.slot, ring.phase ^ 1);
        bar_arrive(smem + FULL + 8 * ring.slot);
        ring.next();
    }
}

// Writes the accumulators to shared memory as rows of y, 64 columns in 128 bytes each. A thread has columns
// 8 j + 2 (lane % 4) and the next of d, of rows lane / 4 and lane / 4 + 8 of its warp's 16: stmatrix's layout of 8 x 8
// blocks, transposed.
DEVICE void put(const float (&d)[COLS / 2], u32 to) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int row = lane / 16 * 8 + lane % 8, vector = 2 * warp + lane / 8 % 2;
#pragma unroll
    for (int j = 0; j < COLS / 8; j += 2) {
        u32 blocks[4];
#pragma unroll
        for (int i = 0; i < 4; i++) blocks[i] = pack(d[4 * j + 2 * i], d[4 * j + 2 * i + 1]);
        store_blocks_transposed(to + (8 * j + row) * 128 + (vector ^ row % 8) * 16, blocks);
    }
}

DEVICE void consume(const Problem& p, const TensorMap* y, const char* shared, u32 smem) {
    const int group = threadIdx.x / 128;
    const float scale = NVFP4 ? *p.tensor_scale : 1.0f;
    const Tiles tiles = tiles_of(p);
    const auto release = [&](int slot) { arrive_at_all(smem + EMPTY + 8 * slot); };
    Ring ring;
#pragma unroll 1
    for (int place = tiles.first; place < tiles.down * tiles.across; place += tiles.step) {
        const Tile tile = find_tile(p, tiles, place);
        float d[COLS / 2] = {};
        release(multiply(d, shared, smem, ring, p.chunks, release));
        if (NVFP4) {
#pragma unroll
            for (int i = 0; i < COLS / 2; i++) d[i] *= 128, d[i] *= scale;
        }
        const u32 from = smem + ring.slot * X_BYTES + group * OUT_BYTES;
        bar_wait(smem + FULL + 8 * ring.slot, ring.phase);
        put(d, from);
        fence_async();
        warpgroup_sync(1 + group);
        if (threadIdx.x % 128 == 0 && group * 64 < tile.width) {
            tma_store(y, from, tile.column + group * 64, tile.row, 0);
            bulk_commit();
            bulk_wait_read();
        }
        __syncwarp();
        release(ring.slot);
        ring.next();
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(ALL_THREADS, 1)
mxfp_matmul_many_rows(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap y_map,
                      const __grid_constant__ Problem problem) {
    extern __shared__ __align__(1024) char shared[];
    const u32 smem = (u32)__cvta_generic_to_shared(shared);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            bar_init(smem + FULL + 8 * s, 1);
            bar_init(smem + EMPTY + 8 * s, 4 * GROUPS * CLUSTER);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    cluster_sync();
    if (__shfl_sync(~0u, threadIdx.x / 128, 0) < GROUPS) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(232));
        consume(problem, &y_map, shared, smem);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(40));
        if (threadIdx.x == 128 * GROUPS) produce(problem, &x_map, smem);
    }
    __syncwarp();
    cluster_sync();  // all remote arrivals and multicast loads have completed
}
