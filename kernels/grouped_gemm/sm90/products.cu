// Grouped products for Hopper (sm_90a): TMA, wgmma, warp specialisation, persistent. products.py compiles and launches.
//
//   WEIGHTS 0   out[r, n] = sum over k of a[r, k] b[g, n, k], + bias[g, n]    the rows r of each group g
//   WEIGHTS 1   out[g, m, n] = sum over the rows r of group g of a[r, m] b[r, n]
//
// The first is the forward, and with weights read transposed x's gradient; the second the weights' gradient.
//
// Napkin maths for 64 terms of a tile of 128 x 256, in cycles of an SM: the tensor cores take 1024 (4096 FLOP a cycle,
// dense), shared memory gives them 80 bytes a cycle of the 128 that it can, and 48 KiB come from L2, 48 bytes a cycle.
// Two CTAs that share b read 32, two that share a 40. The 64 KiB of a tile are 1000 cycles of stores.
//
// A CTA is one producer warp and two consumer warpgroups with 64 rows of the tile each. The producer fills a ring of
// STAGES steps of both operands. Consumers keep 64 x 256 sums in registers.
//
// The two CTAs of a cluster have neighbouring tiles of one group, and go through the same steps. In the weights' gradient
// the tiles are below each other, and each CTA loads half of the columns of b for both. Else they are beside each other,
// since every group with an odd number of row tiles would leave one alone, and each loads half of the rows of a.
//
// Ragged edges cost what they are, not what a tile is:
//  - a tile with at most 64 rows leaves the second consumer idle, and one with at most 128 columns takes wgmmas of 128;
//  - what lies beyond a tensor is read as zeros by TMA, without traffic;
//  - rows of the next group that a tile reads only reach sums that are not stored. As a *sum* runs over rows in the
//    weights' gradient, there they are overwritten by zeros in shared memory, in both operands, for 0 times inf is NaN.
//
// Barriers, with their arrivals per phase: full[s] 1 and the bytes of a step, empty[s] 8 from each CTA of the cluster,
// one lane of each consumer warp. The n-th use of a full one waits for parity n & 1, that of an empty one for the
// opposite, so that the first pass finds every slot empty. No consumer waits for another, and producers only for
// consumers: free of deadlock. In the end CTAs of a cluster wait for each other, so that none writes into one that is
// gone.
//
// Defined by the launcher: WEIGHTS, FP16, STAGES, RASTER, CLUSTER (1 or 2), B_TRANSPOSED (with WEIGHTS 0: b is contiguous
// along n).

constexpr int BLOCK_M = 128, BLOCK_N = 256, BLOCK_K = 64;
constexpr int CONSUMERS = 2, ROWS = BLOCK_M / CONSUMERS, THREADS = 128 * (CONSUMERS + 1);

#include "cluster.cuh"
#include "epilogue.cuh"
#include "mbarrier.cuh"
#include "numbers.cuh"
#include "tiles.cuh"
#include "tma.cuh"
#include "wgmma.cuh"
#include "wgmma16.cuh"

constexpr int A_TRANS = WEIGHTS, B_TRANS = WEIGHTS || B_TRANSPOSED;
constexpr int PANEL = BLOCK_K * 128;  // bytes of BLOCK_K rows of 64 columns
constexpr int A_BYTES = BLOCK_M * BLOCK_K * 2, B_BYTES = BLOCK_N * BLOCK_K * 2, STEP_BYTES = A_BYTES + B_BYTES;
constexpr int FULL = STAGES * STEP_BYTES, EMPTY = FULL + 8 * STAGES;  // where barriers lie
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;

struct Ring {
    int slot = 0;
    u32 phase = 0;
    DEVICE void next() {
        if (++slot == STAGES) slot = 0, phase ^= 1;
    }
};

// ---- Producer -----------------------------------------------------------------------------------------------------

// For this CTA, or for both of the cluster.
template <bool SHARED>
DEVICE void load(u32 to, const TensorMap* map, int column, int row, int group, u32 bar) {
    if (SHARED) tma_multicast(to, map, column, row, bar, group);
    else tma_load(to, map, column, row, group, 0, bar);
}

// Starts the loads of one step of a sum, from term k on: of each operand all, or this CTA's share for all of the cluster.
DEVICE void load_step(const TensorMap* a_map, const TensorMap* b_map, const Tile& tile, int k, u32 to, u32 bar) {
    constexpr int A_SHARE = BLOCK_M / CLUSTER_N, B_SHARE = BLOCK_N / CLUSTER_M;
    const int of_a = rank_n() * A_SHARE, of_b = rank_m() * B_SHARE, group = WEIGHTS ? 0 : tile.group;
    bar_expect(bar, STEP_BYTES);
    for (int i = of_a; i < of_a + A_SHARE; i += A_TRANS ? 64 : A_SHARE) {
        const int row = tile.row + i;
        load<CLUSTER_N == 2>(to + i * BLOCK_K * 2, a_map, A_TRANS ? row : k, A_TRANS ? k : row, 0, bar);
    }
    for (int i = of_b; i < of_b + B_SHARE; i += B_TRANS ? 64 : B_SHARE) {
        const int column = tile.column + i;
        load<CLUSTER_M == 2>(to + A_BYTES + i * BLOCK_K * 2, b_map, B_TRANS ? column : k, B_TRANS ? k : column, group,
                             bar);
    }
}

DEVICE void produce(const Problem& a, const TensorMap* a_map, const TensorMap* b_map, u32 smem) {
    const int tiles = tiles_of(a);
    Ring ring;
    for (int round = 0; round * clusters() < tiles; round++) {
        const int place = place_of(round);
        if (place >= tiles) continue;
        const Tile tile = find_tile(a, place);
#pragma unroll 1
        for (int k = 0; k < tile.terms; k += BLOCK_K, ring.next()) {
            bar_wait(smem + EMPTY + 8 * ring.slot, ring.phase ^ 1);
            load_step(a_map, b_map, tile, tile.first + k, smem + ring.slot * STEP_BYTES, smem + FULL + 8 * ring.slot);
        }
    }
}

// ---- Consumers ----------------------------------------------------------------------------------------------------

// Overwrites rows `kept` to 63 of a consumer's panel of a and of all panels of b. Both consumers write the zeros of b.
DEVICE void zero_rows(u32 a, u32 b, int kept, int consumer) {
    const int thread = threadIdx.x % 128, vectors = (BLOCK_K - kept) * 8;  // 16 bytes each, of one panel
    for (int p = 0; p <= BLOCK_N / 64; p++) {
        const u32 panel = (p ? b + (p - 1) * PANEL : a) + kept * 128;
        for (int i = thread; i < vectors; i += 128)
            asm volatile("st.shared::cta.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(panel + 16 * i), "r"(0) : "memory");
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, 128;" ::"r"(1 + consumer) : "memory");
}

// Gives a slot back to the producers of the cluster: the warp's wgmmas that read it are complete.
DEVICE void release(u32 smem, int slot) { arrive_at_all(smem + EMPTY + 8 * slot); }

// d += a b over all terms of a sum, of one consumer's 64 rows and the first N columns.
template <int N> DEVICE void multiply(float (&d)[N / 2], u32 smem, Ring& ring, int terms, int consumer) {
    int before = 0;
#pragma unroll 1
    for (int k = 0; k < terms; k += BLOCK_K, ring.next()) {
        const u32 step = smem + ring.slot * STEP_BYTES;
        const u32 a = step + consumer * (A_BYTES / CONSUMERS), b = step + A_BYTES;
        bar_wait(smem + FULL + 8 * ring.slot, ring.phase);
        if (WEIGHTS && terms - k < BLOCK_K) zero_rows(a, b, terms - k, consumer);
        const u64 a_desc = describe(a, PANEL), b_desc = describe(b, PANEL);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < BLOCK_K / 16; i++) {
            const int a_step = A_TRANS ? 16 * 128 / 16 : 32 / 16, b_step = B_TRANS ? 16 * 128 / 16 : 32 / 16;
            wgmma<A_TRANS, B_TRANS>(d, a_desc + i * a_step, b_desc + i * b_step);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (k) release(smem, before);
        before = ring.slot;
    }
    wgmma_wait<0>();
    pin(d);
    if (terms > 0) release(smem, before);
}

// A consumer without rows lets the steps pass.
DEVICE void skip(u32 smem, Ring& ring, int terms) {
#pragma unroll 1
    for (int k = 0; k < terms; k += BLOCK_K, ring.next()) {
        bar_wait(smem + FULL + 8 * ring.slot, ring.phase);
        release(smem, ring.slot);
    }
}

DEVICE Tile next_tile(const Problem& a, int round, int tiles) {
    const int place = place_of(round);
    return place < tiles ? find_tile(a, place) : Tile{};
}

DEVICE void consume(const Problem& a, u32 smem, int consumer) {
    const int tiles = tiles_of(a);
    Ring ring;
    float d[BLOCK_N / 2];
    Tile tile = uniform(next_tile(a, 0, tiles));
    for (int round = 0; round * clusters() < tiles; round++) {
        const Tile next = next_tile(a, round + 1, tiles);  // its entry of the table is on its way during the main loop
        if (tile.rows <= consumer * ROWS || (CLUSTER_N > 1 && tile.column >= a.cols)) {
            skip(smem, ring, tile.terms);
        } else {
#pragma unroll
            for (int i = 0; i < BLOCK_N / 2; i++) d[i] = 0;
            if (a.cols - tile.column > BLOCK_N / 2)
                multiply<BLOCK_N>(d, smem, ring, tile.terms, consumer);
            else
                multiply<BLOCK_N / 2>(reinterpret_cast<float(&)[BLOCK_N / 4]>(d), smem, ring, tile.terms, consumer);
            store_tile(a, tile, d, consumer);
        }
        tile = uniform(next);
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
grouped_gemm_products(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
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
        if (threadIdx.x == 0) produce(problem, &a_map, &b_map, smem);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        consume(problem, smem, group - 1);
    }
    __syncwarp();
    cluster_sync();
}
