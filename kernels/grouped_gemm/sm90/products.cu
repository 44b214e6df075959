// Grouped GEMMs for Hopper (sm_90a): TMA, wgmma, warp-specialised, persistent. products.py compiles and launches them.
//
//   WEIGHTS 0   out[r, n] = sum over k of a[r, k] b[g, n, k], + bias[g, n]    the rows r of each group g
//   WEIGHTS 1   out[g, m, n] = sum over the rows r of group g of a[r, m] b[r, n]
//
// The first is the forward and, with weights read transposed, x's gradient; the second is the weights' gradient.
//
// Back-of-the-envelope estimate for one K-block of 64 of a 128 x BLOCK_N tile, in cycles of an SM, and for its stores:
//                                                                         256   192   176   160   128
//   tensor cores   4096 FLOP a cycle, dense                              1024   768   704   640   512
//   shared memory  a and b written once, b read by two wgmmas, at 128    1024   832   784   736   640
//   L2             bytes in each of these cycles, if two CTAs share b      32    34    35    36    38
//   stores         of a tile of 16-bit elements, at 64 bytes a cycle     1024   768   704   640   512
//
// A CTA is one producer warp and two consumer warpgroups. The producer fills a circular buffer of STAGES pipeline
// stages, one K-block of both operands each. Without TURNS (cooperative) each consumer computes 64 rows of a 128 x 256
// tile, and both run its epilogue together: this overlaps the loads of the next tile, but not its wgmmas.
//
// With TURNS (ping-pong) a consumer computes a whole tile, of at most 192 columns, as two wgmmas of 64 rows that read
// the same b. One consumer runs its main loop while the other stores its tile. A consumer skips the stages of the
// other's tile. It may wait on its own only when the other has finished its main loop: an mbarrier exposes only the
// parity of its current phase, and a consumer that skipped uses of a stage would mistake an earlier use for its own.
// Both consumers go through all rounds of their CTA, whose number only the device knows, and each round passes the turn
// once: for any number of tiles, at most the last arrival has no wait.
//
// The two CTAs of a cluster have vertically adjacent tiles, and process the same K-blocks. Each loads half of the
// columns of b for both or, with TURNS and B_TRANSPOSED, half of the K-block: 160 to 192 columns are three panels,
// which do not halve. Row tiles of all groups are paired one after the other, so that no group is padded: where the two
// tiles are of different groups, each CTA loads all of its own b.
//
// Partial tiles cost less than full ones:
//  - a tile with at most 64 rows leaves the second consumer idle or, with TURNS, takes one wgmma in place of two, and
//    one with at most 128 columns uses wgmmas of 128;
//  - TMA reads zeros out of bounds, without traffic;
//  - rows of the next group that a tile reads only affect accumulators that are not stored. But in the weights'
//    gradient rows are K. There such rows are overwritten by zeros in shared memory, in both operands, for 0 times inf
//    is NaN.
//
// Barriers, with their arrivals per phase: full[s] 1 and the bytes of a stage, empty[s] 8 from each CTA of the cluster,
// one lane of each consumer warp; with TURNS 4, as only the tile's consumer releases a stage. The n-th use of a full
// barrier waits for parity n & 1, that of an empty one for the opposite, so that all stages are empty at first. Free of
// deadlock: a consumer waits for the other only for its turn, which follows the tile order, and producers wait only for
// consumers. At the end CTAs of a cluster wait for each other, so that none writes to the shared memory of one that has
// exited.
//
// Defined by the launcher: WEIGHTS, FP16, STAGES, RASTER (height of a group in the grouped tile order, in clusters),
// CLUSTER (1 or 2), TURNS, BLOCK_N (256, with TURNS 128, 160, 176 or 192), B_TRANSPOSED (with WEIGHTS 0: b is N-major).
// Here `terms` is a tile's K, `step` a K-block, `slot` a pipeline stage, and `Sums` are accumulators.

constexpr int BLOCK_M = 128, BLOCK_K = 64;
constexpr int CONSUMERS = 2, THREADS = 128 * (CONSUMERS + 1);
constexpr int ROWS = TURNS ? BLOCK_M : BLOCK_M / CONSUMERS;  // rows of a tile that a consumer computes
static_assert(TURNS ? BLOCK_N <= 192 : BLOCK_N == 256);      // accumulators must fit into a consumer's registers
typedef float Sums[ROWS / 64][BLOCK_N / 2];

#include "cluster.cuh"
#include "epilogue.cuh"
#include "mbarrier.cuh"
#include "numbers.cuh"
#include "tiles.cuh"
#include "tma.cuh"
#include "wgmma.cuh"
#include "wgmma16.cuh"
#include "wgmma_widths.cuh"

constexpr int A_TRANS = WEIGHTS, B_TRANS = WEIGHTS || B_TRANSPOSED;
constexpr bool B_HALVES = TURNS && !WEIGHTS;  // the CTAs of a cluster split an N-major b along K
constexpr int PANEL = BLOCK_K * 128;          // bytes of BLOCK_K rows of 64 columns
constexpr int PANELS = (BLOCK_N + 63) / 64;   // panels of b, if it is N-major
constexpr int A_BYTES = BLOCK_M * BLOCK_K * 2, B_BYTES = B_TRANS ? PANELS * PANEL : BLOCK_N * BLOCK_K * 2;
constexpr int STEP_BYTES = A_BYTES + B_BYTES;
constexpr int FULL = STAGES * STEP_BYTES, EMPTY = FULL + 8 * STAGES;  // offsets of the barriers
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;

struct Ring {
    int slot = 0;
    u32 phase = 0;
    DEVICE void next() {
        if (++slot == STAGES) slot = 0, phase ^= 1;
    }
    DEVICE void pass(int steps) {
        const int end = slot + steps;
        slot = end % STAGES, phase ^= end / STAGES & 1;
    }
};

// ---- Producer -----------------------------------------------------------------------------------------------------

// Issues the loads of b for one K-block: this CTA's share, multicast to both of the cluster, or all of it for itself.
template <bool SHARED> DEVICE void load_b(const TensorMap* map, const Tile& tile, int k, u32 to, u32 bar) {
    constexpr int BOX = B_TRANS ? 64 : BLOCK_N / CLUSTER;                      // columns of a box, and its extent in K
    constexpr int TERMS = B_TRANS && B_HALVES ? BLOCK_K / CLUSTER : BLOCK_K;
    constexpr int BOXES = (BLOCK_N + BOX - 1) / BOX * (BLOCK_K / TERMS);
    const int group = WEIGHTS ? 0 : tile.group;
    for (int i = SHARED ? cluster_rank() : 0; i < BOXES; i += SHARED ? CLUSTER : 1) {
        const int n = i / (BLOCK_K / TERMS) * BOX, term = i % (BLOCK_K / TERMS) * TERMS;
        const int x = B_TRANS ? tile.column + n : k, y = B_TRANS ? k + term : tile.column + n;
        const u32 at = to + (n + term) * 128;
        if (SHARED) tma_multicast(at, map, x, y, bar, group);
        else tma_load(at, map, x, y, group, 0, bar);
    }
}

// Issues the loads of one K-block, from k on.
DEVICE void load_step(const TensorMap* a_map, const TensorMap* b_map, const Tile& tile, int k, u32 to, u32 bar) {
    constexpr int A_BOX = A_TRANS ? 64 : BLOCK_M;
    bar_expect(bar, STEP_BYTES);
    for (int i = 0; i < BLOCK_M; i += A_BOX)
        tma_load(to + i * BLOCK_K * 2, a_map, A_TRANS ? tile.row + i : k, A_TRANS ? k : tile.row + i, 0, 0, bar);
    if (tile.shares) load_b<true>(b_map, tile, k, to + A_BYTES, bar);
    else load_b<false>(b_map, tile, k, to + A_BYTES, bar);
}

DEVICE void produce(const Problem& a, const TensorMap* a_map, const TensorMap* b_map, u32 smem) {
    const int places = places_of(a);
    Ring ring;
    for (int round = 0; round * clusters() < places; round++) {
        const int place = place_of(round);
        if (place >= places) continue;
        const Tile tile = find_tile(a, place);
#pragma unroll 1
        for (int k = 0; k < tile.terms; k += BLOCK_K, ring.next()) {
            bar_wait(smem + EMPTY + 8 * ring.slot, ring.phase ^ 1);
            load_step(a_map, b_map, tile, tile.first + k, smem + ring.slot * STEP_BYTES, smem + FULL + 8 * ring.slot);
        }
    }
}

// ---- Consumers ----------------------------------------------------------------------------------------------------

// Zeroes rows `kept` to 63 of a consumer's panels of a and of all panels of b. Two consumers of one tile both write the
// zeros of b.
DEVICE void zero_rows(u32 a, u32 b, int kept, int consumer) {
    const int thread = threadIdx.x % 128, vectors = (BLOCK_K - kept) * 8;  // 16 bytes each, of one panel
    for (int p = 0; p < ROWS / 64 + PANELS; p++) {
        const u32 panel = (p < ROWS / 64 ? a + p * PANEL : b + (p - ROWS / 64) * PANEL) + kept * 128;
        for (int i = thread; i < vectors; i += 128)
            asm volatile("st.shared::cta.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(panel + 16 * i), "r"(0) : "memory");
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, 128;" ::"r"(1 + consumer) : "memory");
}

// Releases a stage: arrives on its empty barrier in each CTA of the cluster. The warp's wgmmas that read it are
// complete.
DEVICE void release(u32 smem, int slot) { arrive_at_all(smem + EMPTY + 8 * slot); }

// Ping-pong (TURNS): one consumer at a time runs its main loop.
DEVICE void await_turn(int consumer) {
    if (TURNS) asm volatile("bar.sync %0, 256;" ::"r"(4 + consumer) : "memory");
}
DEVICE void pass_turn(int consumer) {
    if (TURNS) asm volatile("bar.arrive %0, 256;" ::"r"(5 - consumer) : "memory");
}

// The main loop, d += a b over K = `terms`, for a consumer's first 64 HEIGHT rows and the first N columns.
template <int HEIGHT, int N> DEVICE void multiply(Sums& d, u32 smem, Ring& ring, int terms, int consumer) {
    int before = 0;
#pragma unroll 1
    for (int k = 0; k < terms; k += BLOCK_K, ring.next()) {
        const u32 step = smem + ring.slot * STEP_BYTES;
        const u32 a = step + (TURNS ? 0 : consumer * (A_BYTES / CONSUMERS)), b = step + A_BYTES;
        bar_wait(smem + FULL + 8 * ring.slot, ring.phase);
        if (WEIGHTS && terms - k < BLOCK_K) zero_rows(a, b, terms - k, consumer);
        const u64 a_desc = describe(a, PANEL), b_desc = describe(b, PANEL);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < BLOCK_K / 16; i++) {
            const int a_step = A_TRANS ? 16 * 128 / 16 : 32 / 16, b_step = B_TRANS ? 16 * 128 / 16 : 32 / 16;
#pragma unroll
            for (int m = 0; m < HEIGHT; m++)
                wgmma<A_TRANS, B_TRANS>(reinterpret_cast<float(&)[N / 2]>(d[m]), a_desc + m * (PANEL / 16) + i * a_step,
                                        b_desc + i * b_step);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (k) release(smem, before);
        before = ring.slot;
    }
    pass_turn(consumer);
    wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < HEIGHT; m++) pin(reinterpret_cast<float(&)[N / 2]>(d[m]));
    if (terms > 0) release(smem, before);
}

// The same for as many rows as the tile has.
template <int N> DEVICE void multiply_rows(Sums& d, u32 smem, Ring& ring, const Tile& tile, int consumer) {
    if (ROWS == 64 || tile.rows <= 64) multiply<1, N>(d, smem, ring, tile.terms, consumer);
    else multiply<ROWS / 64, N>(d, smem, ring, tile.terms, consumer);
}

// A consumer with nothing to compute waits for each stage and releases it.
DEVICE void skip(u32 smem, Ring& ring, int terms) {
#pragma unroll 1
    for (int k = 0; k < terms; k += BLOCK_K, ring.next()) {
        bar_wait(smem + FULL + 8 * ring.slot, ring.phase);
        __syncwarp();  // a lane that still waits would miss this phase once the stage is released
        release(smem, ring.slot);
    }
}

DEVICE Tile next_tile(const Problem& a, int round, int places) {
    const int place = place_of(round);
    return place < places ? find_tile(a, place) : Tile{};
}

DEVICE void consume(const Problem& a, u32 smem, int consumer) {
    const int places = places_of(a), first = TURNS ? 0 : consumer * ROWS;
    Ring ring;
    Sums d;
    Tile tile = uniform(next_tile(a, 0, places));
    if (consumer) pass_turn(consumer);
    for (int round = 0; round * clusters() < places; round++) {
        const bool idle = tile.rows <= first;
        Tile next;
        if (TURNS && round % 2 != consumer) {
            ring.pass((tile.terms + BLOCK_K - 1) / BLOCK_K);
            next = next_tile(a, round + 1, places);
        } else {
            await_turn(consumer);
#pragma unroll
            for (int m = 0; m < ROWS / 64; m++)
#pragma unroll
                for (int i = 0; i < BLOCK_N / 2; i++) d[m][i] = 0;
            if (idle || tile.group < 0) {
                skip(smem, ring, tile.terms);
                pass_turn(consumer);
            } else if (BLOCK_N == 128 || a.cols - tile.column > 128) {
                multiply_rows<BLOCK_N>(d, smem, ring, tile, consumer);
            } else {
                multiply_rows<128>(d, smem, ring, tile, consumer);
            }
            next = next_tile(a, round + 1, places);  // the load of its table entry overlaps the stores
            if (!idle) {
                add_bias(a, tile, d);
#pragma unroll
                for (int m = 0; m < ROWS / 64; m++)
                    if (m == 0 || tile.rows > 64 * m) store_rows(a, tile, d[m], first + 64 * m);
            }
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
            bar_init(smem + EMPTY + 8 * s, 4 * (TURNS ? 1 : CONSUMERS) * CLUSTER);
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
