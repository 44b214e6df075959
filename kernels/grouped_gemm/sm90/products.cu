// Grouped products for Hopper (sm_90a): TMA, wgmma, warp specialisation, persistent. products.py compiles and launches.
//
//   WEIGHTS 0   out[r, n] = sum over k of a[r, k] b[g, n, k], + bias[g, n]    the rows r of each group g
//   WEIGHTS 1   out[g, m, n] = sum over the rows r of group g of a[r, m] b[r, n]
//
// The first is the forward, and with weights read transposed x's gradient; the second the weights' gradient.
//
// Napkin maths for 64 terms of a tile of 128 x BLOCK_N, in cycles of an SM, and for its stores:
//                                                                         256   192   176   160   128
//   tensor cores   4096 FLOP a cycle, dense                              1024   768   704   640   512
//   shared memory  a and b written once, b read by two wgmmas, at 128    1024   832   784   736   640
//   L2             bytes in each of these cycles, if two CTAs share b      32    34    35    36    38
//   stores         of a tile's 16 bits, at 64 bytes a cycle              1024   768   704   640   512
//
// A CTA is one producer warp and two consumer warpgroups. The producer fills a ring of STAGES steps of both operands.
// Without TURNS consumers have 64 rows each of a tile of 128 x 256, whose sums they keep in registers, and finish it
// together: loads of the next tile go on meanwhile, but no products.
//
// With TURNS a consumer has a whole tile, of at most 192 columns, as two wgmmas of 64 rows that read the same b, and
// the two take turns: one has the tensor cores for a sum, and stores its tile while the other has them. A consumer
// passes over the steps of the other's tile. It may wait for its own only when the other has done with its sum: a
// barrier in shared memory tells no more than whether its current use is odd or even, and of a slot that was passed
// over it would take an earlier use for its own. Both consumers go through all rounds of their CTA, whose number the
// device alone knows, and each round passes one turn: of any number of tiles, no more than the last arrival is without
// a wait.
//
// The two CTAs of a cluster have tiles below each other, and go through the same steps. Each loads half of the columns
// of b for both, or in turns, of a b that is contiguous along n, half of the terms: 160 to 192 columns are three
// panels, which do not halve. Row tiles of all groups follow each other in pairs, so that no group is padded: where the
// two are of different groups each CTA loads all of its own b.
//
// Ragged edges cost what they are, not what a tile is:
//  - a tile with at most 64 rows leaves the second consumer idle, or with TURNS takes one wgmma in place of two, and
//    one with at most 128 columns takes wgmmas of 128;
//  - what lies beyond a tensor is read as zeros by TMA, without traffic;
//  - rows of the next group that a tile reads only reach sums that are not stored. As a *sum* runs over rows in the
//    weights' gradient, there they are overwritten by zeros in shared memory, in both operands, for 0 times inf is NaN.
//
// Barriers, with their arrivals per phase: full[s] 1 and the bytes of a step, empty[s] 8 from each CTA of the cluster,
// one lane of each consumer warp. The n-th use of a full one waits for parity n & 1, that of an empty one for the
// opposite, so that the first pass finds every slot empty. With TURNS one consumer alone gives a slot back. No consumer
// waits for another but for its turn, which follows the order of the tiles, and producers only for consumers: free of
// deadlock. In the end CTAs of a cluster wait for each other, so that none writes into one that is gone.
//
// Defined by the launcher: WEIGHTS, FP16, STAGES, RASTER, CLUSTER (1 or 2), TURNS, BLOCK_N (256, with TURNS 128, 160,
// 176 or 192), B_TRANSPOSED (with WEIGHTS 0: b is contiguous along n).

constexpr int BLOCK_M = 128, BLOCK_K = 64;
constexpr int CONSUMERS = 2, THREADS = 128 * (CONSUMERS + 1);
constexpr int ROWS = TURNS ? BLOCK_M : BLOCK_M / CONSUMERS;  // of a tile, that a consumer has
static_assert(TURNS ? BLOCK_N <= 192 : BLOCK_N == 256);      // sums that fit into a consumer's registers
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
constexpr bool B_HALVES = TURNS && !WEIGHTS;  // of the terms of b, if transposed, each CTA of a cluster loads its share
constexpr int PANEL = BLOCK_K * 128;          // bytes of BLOCK_K rows of 64 columns
constexpr int PANELS = (BLOCK_N + 63) / 64;   // of b, if transposed
constexpr int A_BYTES = BLOCK_M * BLOCK_K * 2, B_BYTES = B_TRANS ? PANELS * PANEL : BLOCK_N * BLOCK_K * 2;
constexpr int STEP_BYTES = A_BYTES + B_BYTES;
constexpr int FULL = STAGES * STEP_BYTES, EMPTY = FULL + 8 * STAGES;  // where barriers lie
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

// Starts the loads of b for one step: this CTA's share for both of the cluster, or all for itself.
template <bool SHARED> DEVICE void load_b(const TensorMap* map, const Tile& tile, int k, u32 to, u32 bar) {
    constexpr int BOX = B_TRANS ? 64 : BLOCK_N / CLUSTER;                      // columns of a box, and its terms
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

// Starts the loads of one step of a sum, from term k on.
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

// Overwrites rows `kept` to 63 of a consumer's panels of a and of all panels of b. Two consumers of one tile both write
// the zeros of b.
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

// Gives a slot back to the producers of the cluster: the warp's wgmmas that read it are complete.
DEVICE void release(u32 smem, int slot) { arrive_at_all(smem + EMPTY + 8 * slot); }

// The consumers' sums follow each other, with TURNS.
DEVICE void await_turn(int consumer) {
    if (TURNS) asm volatile("bar.sync %0, 256;" ::"r"(4 + consumer) : "memory");
}
DEVICE void pass_turn(int consumer) {
    if (TURNS) asm volatile("bar.arrive %0, 256;" ::"r"(5 - consumer) : "memory");
}

// d += a b over all terms of a sum, of a consumer's first 64 HEIGHT rows and the first N columns.
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

// The same of as many columns and rows as a tile has.
template <int N> DEVICE void multiply_rows(Sums& d, u32 smem, Ring& ring, const Tile& tile, int consumer) {
    if (ROWS == 64 || tile.rows <= 64) multiply<1, N>(d, smem, ring, tile.terms, consumer);
    else multiply<ROWS / 64, N>(d, smem, ring, tile.terms, consumer);
}

// A consumer without rows, or without a sum, lets the steps pass.
DEVICE void skip(u32 smem, Ring& ring, int terms) {
#pragma unroll 1
    for (int k = 0; k < terms; k += BLOCK_K, ring.next()) {
        bar_wait(smem + FULL + 8 * ring.slot, ring.phase);
        __syncwarp();  // a lane that still waits would miss this phase once the slot is given back
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
            next = next_tile(a, round + 1, places);  // its entry of the table comes while the sums leave
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
