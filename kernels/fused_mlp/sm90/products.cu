// The GEMMs of fused_mlp for Hopper (sm_90a): TMA, wgmma, warp-specialised, persistent. products.py compiles and
// launches them.
//
//   EPILOGUE 0  PLAIN    out = a b + bias                                            y, x's gradient, a weight's gradient
//            1  ACT      pre = a b + bias; out = act(pre)                            the hidden
//            2  GATE     pre = a b + bias, gate = a b_more; out = act(gate) pre      the gated hidden
//            3  DACT     out = act'(pre) of a b, dpre                                from pre
//            4  DGATE    the same for the gated hidden, from pre and gate
//            5  PARTS    out[s] = a b over split-K partition s, fp32                 a weight's gradient
//
// Two schedules. Without TURNS (cooperative) both consumer warpgroups compute 64 rows each of one tile of 128 x
// BLOCK_N, and run its epilogue together. With TURNS (ping-pong) each computes its own tiles, and one runs its main
// loop while the other runs its epilogue. The 128 rows of a tile are then two wgmmas of 64 x BLOCK_N that read the same
// b. A thread has BLOCK_N fp32 accumulators, of 240 registers.
//
// Back-of-the-envelope estimate for one K-block of 64 of a 128 x BLOCK_N tile, in cycles of an SM, and for an epilogue:
//                                                                         256      192      176      128
//   tensor cores   4096 FLOP a cycle, dense                              1024      768      704      512
//   shared memory  a and b written once, b read by two wgmmas, at 128    1024      832      784      640
//   L2             bytes in each of these cycles, if two CTAs share b       32       34       35       38
//   epilogue       exponential and reciprocal of each element, at 16     4096     3072     2816     2048
// The epilogue of 256 columns takes half as long as a main loop with K = 512 and a sixteenth of one with K = 4096.
// Without TURNS it overlaps the loads of the next tile, but not its wgmmas. With TURNS only the epilogue of a CTA's
// last tile is exposed. A result of 512 x 11008 has 172 tiles of 256 columns for 132 SMs, 1.3 waves, or 252 of 176
// columns, 1.9 waves: configs.pick_cuda_config estimates which takes less time.
//
// A CTA is one producer warp and two consumer warpgroups. The producer fills a circular buffer of STAGES pipeline
// stages, one K-block of both operands each, in tile order. A tile of GATE has BLOCK_N / 2 columns of pre and as many
// of gate, so that a thread has both of a column. Without TURNS, a tile with at most half of its columns in bounds uses
// wgmmas of half the width.
//
// TMA reads zeros out of bounds, without traffic: the result may have any width. Columns past the last of the hidden
// are written as zeros, because they are part of the next GEMM's K.
//
// CTAs of a cluster have vertically adjacent tiles. Each loads its share of the tiles' b and multicasts it: 48 bytes a
// cycle are more than L2 delivers to all SMs at once, 32 with two CTAs are not. They process the same K-blocks.
//
// Barriers, with their arrivals per phase: full[s] 1 and the bytes of a stage, empty[s] 4 for each consumer of the tile
// from each CTA of the cluster, one lane of each warp. The n-th use of a full barrier waits for parity n & 1, that of
// an empty one for the opposite, so that all stages are empty at first. Free of deadlock: no consumer waits for
// another, and a producer only for consumers, all of which process the same K-blocks. At the end CTAs of a cluster wait
// for each other, so that none writes to the shared memory of one that has exited.
//
// With TURNS consumer 0 computes a CTA's tiles 0, 2, 4 ... and consumer 1 tiles 1, 3, 5 ...; each skips the other's
// stages. Parity does not distinguish use n of a stage from use n - 2. So a consumer waits on full barriers only in its
// turn, when the other has seen all earlier uses full. A consumer that has issued the last wgmma of tile i passes the
// turn to that of tile i + 1, if there is one, through named barrier 1 + consumer: 128 threads arrive, 128 wait. Tile 0
// does not wait. So every arrival has its wait; the next arrival at the same barrier is two tiles later, after that
// wait; and nothing is pending at the end, for any number of tiles and K-blocks. This too is free of deadlock: the
// consumer whose turn it is waits only on full barriers, and releasing stages of earlier tiles does not need the turn.
//
// Defined by the launcher: EPILOGUE, ACTIVATION, FP16, BLOCK_N (256, with TURNS also 128, 160, 176 or 192), TURNS,
// STAGES, RASTER (height of a group in the grouped tile order, in clusters), CLUSTER (1 or 2), A_TRANS (a is M-major),
// B_TRANS (b is N-major), TWO (adds a_more b_more, of the same K, to a b). Here `step` is a K-block, `slot` a pipeline
// stage, `part` a split-K partition, `sums` are accumulators.

#include "cluster.cuh"
#include "column_bias.cuh"
#include "heads_ptx.cuh"
#include "mbarrier.cuh"
#include "numbers.cuh"
#include "ring.cuh"
#include "tma.cuh"
#include "wgmma.cuh"
#include "wgmma_widths.cuh"
#include "epilogue.cuh"

enum Epilogue { PLAIN, ACT, GATE, DACT, DGATE, PARTS };

constexpr int BLOCK_M = 128, BLOCK_K = 64, HALF = BLOCK_M / 2;           // HALF: rows of a wgmma
constexpr int CONSUMERS = 2, THREADS = 128 * (CONSUMERS + 1);
constexpr int HALVES = TURNS ? 2 : 1;                                    // 64-row halves that a consumer computes
constexpr int COLUMNS = EPILOGUE == GATE ? BLOCK_N / 2 : BLOCK_N;        // columns of the result in a tile
constexpr int PANEL = BLOCK_K * 128;                                     // bytes of BLOCK_K rows of 64 columns
constexpr int PANELS = (BLOCK_N + 63) / 64;                              // panels of b, if it is N-major
constexpr int A_BYTES = BLOCK_M * BLOCK_K * 2, B_BYTES = B_TRANS ? PANELS * PANEL : BLOCK_N * BLOCK_K * 2;
constexpr int STEP_BYTES = A_BYTES + B_BYTES;
constexpr int FULL = STAGES * STEP_BYTES, EMPTY = FULL + 8 * STAGES;     // offsets of the barriers
constexpr int PRODUCER_REGISTERS = TURNS ? 24 : 40, CONSUMER_REGISTERS = TURNS ? 240 : 232;
static_assert(STEP_BYTES % 1024 == 0 && !(EPILOGUE == GATE && B_TRANS));

struct Problem {
    void* out;               // 16 bits; fp32 with PARTS
    u16 *pre, *gate;         // written by ACT and GATE unless null; read by DACT and DGATE
    u16 *dpre, *dgate;       // written by DACT and DGATE unless null, as `out` is
    const u16* bias;         // or null
    u64 bias_stride;
    int rows, cols, pitch;   // of the result; all of its tensors have rows of `pitch` elements
    int steps, parts, part;  // K-blocks, split-K partitions, and K-blocks of a partition
};

struct Tile {
    int row, column, part;   // of the result; split-K partition
    int first, last;         // K-blocks of the partition
};

// ---- Tiles --------------------------------------------------------------------------------------------------------

// A band is CLUSTER vertically adjacent tiles high, of which the last may have no rows.
DEVICE int bands_of(const Problem& p) { return (p.rows + CLUSTER * BLOCK_M - 1) / (CLUSTER * BLOCK_M); }
DEVICE int tiles_of(const Problem& p) { return p.parts * bands_of(p) * ((p.pitch + COLUMNS - 1) / COLUMNS); }

// Grouped tile order: RASTER bands of a column, then of the next column, so that their loads of b hit L2.
DEVICE Tile find_tile(const Problem& p, int place) {
    const int tiles_m = bands_of(p), tiles_n = (p.pitch + COLUMNS - 1) / COLUMNS;
    const int part = EPILOGUE == PARTS ? place / (tiles_m * tiles_n) : 0, rest = place - part * (tiles_m * tiles_n);
    const int band = RASTER * tiles_n, first = rest / band * RASTER, height = min(tiles_m - first, RASTER);
    Tile tile;
    tile.part = part, tile.first = part * p.part, tile.last = min(p.steps, tile.first + p.part);
    tile.row = ((first + rest % band % height) * CLUSTER + cluster_rank()) * BLOCK_M;
    tile.column = rest % band / height * COLUMNS;
    return tile;
}

DEVICE int steps_of(const Tile& tile) { return max(0, tile.last - tile.first) * (1 + TWO); }

// ---- Producer -----------------------------------------------------------------------------------------------------

struct Maps {
    const TensorMap *a, *b, *a_more, *b_more;
};

// Issues the loads of one K-block, k to k + 63.
DEVICE void load_step(const TensorMap* a, const TensorMap* b, const TensorMap* b_more, const Tile& tile, int k, u32 to,
                      u32 bar) {
    bar_expect(bar, STEP_BYTES);
    if (A_TRANS) {
        for (int i = 0; i < BLOCK_M / 64; i++) tma_load(to + i * PANEL, a, tile.row + 64 * i, k, 0, 0, bar);
    } else {
        tma_load(to, a, k, tile.row, 0, 0, bar);
    }
    to += A_BYTES;
    if (EPILOGUE == GATE) {  // each of two CTAs loads one of the weights
        if (cluster_rank() == 0) tma_multicast(to, b, k, tile.column, bar);
        if (cluster_rank() == CLUSTER - 1) tma_multicast(to + B_BYTES / 2, b_more, k, tile.column, bar);
    } else if (B_TRANS) {
        const int share = BLOCK_K / CLUSTER * cluster_rank();
        for (int i = 0; i < PANELS; i++)
            tma_multicast(to + i * PANEL + share * 128, b, tile.column + 64 * i, k + share, bar);
    } else {
        const int share = BLOCK_N / CLUSTER * cluster_rank();
        tma_multicast(to + share * BLOCK_K * 2, b, k, tile.column + share, bar);
    }
}

DEVICE void produce(const Problem& p, const Maps& maps, u32 smem) {
    const int tiles = tiles_of(p);
    Ring ring;
    for (int place = blockIdx.x / CLUSTER; place < tiles; place += gridDim.x / CLUSTER) {
        const Tile tile = find_tile(p, place);
        for (int sum = 0; sum <= TWO; sum++) {
            const TensorMap *a = sum ? maps.a_more : maps.a, *b = sum ? maps.b_more : maps.b;
#pragma unroll 1
            for (int step = tile.first; step < tile.last; step++, ring.next()) {
                bar_wait(smem + EMPTY + 8 * ring.slot, ring.phase ^ 1);
                load_step(a, b, maps.b_more, tile, step * BLOCK_K, smem + ring.slot * STEP_BYTES,
                          smem + FULL + 8 * ring.slot);
            }
        }
    }
}

// ---- Consumers ----------------------------------------------------------------------------------------------------

// Releases a stage: arrives on its empty barrier in each CTA of the cluster. The whole warp has waited for the wgmmas
// that read it, and nothing else reads a stage: no fence_reads.
DEVICE void release(u32 smem, int slot) { arrive_at_all(smem + EMPTY + 8 * slot); }

// The main loop, d += a b over `steps` K-blocks, for a consumer's rows from `first` on and the first N columns. Calls
// issued() after the last wgmma is issued.
template <int N, class Issued>
DEVICE void multiply(float (&d)[HALVES][N / 2], u32 smem, Ring& ring, int steps, int first, const Issued& issued) {
    int before = 0;
#pragma unroll 1
    for (int step = 0; step < steps; step++, ring.next()) {
        const u32 at = smem + ring.slot * STEP_BYTES;
        bar_wait(smem + FULL + 8 * ring.slot, ring.phase);
        const u64 a = describe(at + first * BLOCK_K * 2, PANEL), b = describe(at + A_BYTES, PANEL);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < BLOCK_K / 16; i++) {
            const int a_step = A_TRANS ? 16 * 128 / 16 : 32 / 16, b_step = B_TRANS ? 16 * 128 / 16 : 32 / 16;
#pragma unroll
            for (int half = 0; half < HALVES; half++)
                wgmma<A_TRANS, B_TRANS>(d[half], a + half * (HALF * BLOCK_K * 2 / 16) + i * a_step, b + i * b_step);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (step) release(smem, before);
        before = ring.slot;
    }
    issued();
    wgmma_wait<0>();
#pragma unroll
    for (int half = 0; half < HALVES; half++) pin(d[half]);
    if (steps > 0) release(smem, before);
}

// Adds the bias to the accumulators, of GATE to those of pre, before the epilogue needs its registers.
template <int N> DEVICE void add_bias(const Problem& p, const Tile& tile, float (&d)[HALVES][N / 2]) {
    constexpr int WIDTH = EPILOGUE == GATE ? N / 2 : N;
    add_to_columns<WIDTH>(d, [&](int c) {
        const int column = tile.column + c + threadIdx.x % 32;
        return column < p.cols ? widen(p.bias[column * p.bias_stride]) : 0.0f;
    });
}

// Two adjacent columns of a row, which an epilogue processes at a time.
struct Pair {
    u32 out, pre, gate, dgate;  // pre and gate are read, or written; with DACT and DGATE pre becomes dpre
};

DEVICE void finish_pair(float x, float y, float gate_x, float gate_y, Pair& pair) {
    if constexpr (EPILOGUE == PLAIN) {
        pair.out = pack(x, y);
    } else if constexpr (EPILOGUE == ACT) {
        pair.pre = pack(x, y);
        pair.out = pack(activate(x), activate(y));
    } else if constexpr (EPILOGUE == GATE) {
        pair.pre = pack(x, y);
        pair.gate = pack(gate_x, gate_y);
        pair.out = pack(x * activate(gate_x), y * activate(gate_y));
    } else if constexpr (EPILOGUE == DACT) {
        const Both a = activate_and_derive(low(pair.pre), x), b = activate_and_derive(high(pair.pre), y);
        pair.out = pack(a.y, b.y);
        pair.pre = pack(a.dx, b.dx);
    } else {
        const float pre_x = low(pair.pre), pre_y = high(pair.pre);
        const Both a = activate_and_derive(low(pair.gate), x * pre_x);
        const Both b = activate_and_derive(high(pair.gate), y * pre_y);
        pair.out = pack(a.y * pre_x, b.y * pre_y);
        pair.pre = pack(x * a.y, y * b.y);
        pair.dgate = pack(a.dx, b.dx);
    }
}

// wgmma's accumulator layout: a thread has columns 8 j + 2 (lane % 4) and the next, of rows lane / 4 and lane / 4 + 8
// of its warp's 16.
DEVICE int first_row(const Tile& tile, int first) {
    return tile.row + first + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
}

// Overwrites what this warp has stored from column `cols` on with zeros, so that the epilogue's loop needs no mask.
template <int WIDTH> DEVICE void clear(const Problem& p, const Tile& tile, int first) {
    u16* written[] = {(u16*)p.out, p.dpre, p.dgate, EPILOGUE == GATE || EPILOGUE == ACT ? p.pre : nullptr,
                      EPILOGUE == GATE ? p.gate : nullptr};
    const int row = first_row(tile, first), end = min(p.pitch, tile.column + WIDTH);
    __syncwarp();
#pragma unroll
    for (u16* to : written) {
        if (!to) continue;
#pragma unroll 1
        for (int r = 0; r < 2 * HALVES; r++) {
            const int this_row = row + r / 2 * HALF + r % 2 * 8;
            if (this_row >= p.rows) break;
            for (int column = max(p.cols, tile.column) + threadIdx.x % 4; column < end; column += 4)
                to[(u64)this_row * p.pitch + column] = 0;
        }
    }
}

template <int N> DEVICE void finish(const Problem& p, const Tile& tile, float (&d)[HALVES][N / 2], int first) {
    constexpr bool READS = EPILOGUE == DACT || EPILOGUE == DGATE, WRITES = EPILOGUE == ACT || EPILOGUE == GATE;
    constexpr int WIDTH = EPILOGUE == GATE ? N / 2 : N, GATES = EPILOGUE == GATE ? N / 4 : 0;
    const int quad = threadIdx.x % 4, row = first_row(tile, first);
#pragma unroll
    for (int r = 0; r < 2 * HALVES; r++) {
        const float* sums = d[r / 2] + r % 2 * 2;
        const int this_row = row + r / 2 * HALF + r % 2 * 8;
        // ptxas must see that the branch is warp-uniform. Otherwise it assumes that the stage index, kept across tiles,
        // may differ between lanes, and moves descriptors to uniform registers before each wgmma. The branch also keeps
        // ptxas from computing activations so far ahead that they spill.
        if (__shfl_sync(~0u, this_row, 0) >= p.rows) break;
#pragma unroll
        for (int c = 0; c < WIDTH; c += 32) {
            const int column = tile.column + c + 8 * quad;
            const bool inside = this_row < p.rows && column < p.pitch && (c + 32 <= WIDTH || c + 8 * quad < WIDTH);
            const u64 at = (u64)this_row * p.pitch + column;
            u32 out[4] = {}, pre[4] = {}, gates[4] = {}, dgates[4] = {};
            if (READS) load_words(p.pre + at, inside, pre);
            if (EPILOGUE == DGATE) load_words(p.gate + at, inside, gates);
#pragma unroll
            for (int block = 0; block < 4 && c + 8 * block < WIDTH; block++) {
                const float *x = sums + c / 2 + 4 * block, *gate = x + GATES;
                Pair pair = {0, pre[block], gates[block], 0};
                finish_pair(x[0], x[1], gate[0], gate[1], pair);
                out[block] = pair.out, pre[block] = pair.pre, gates[block] = pair.gate, dgates[block] = pair.dgate;
            }
            if (p.out) store_words((u16*)p.out + at, inside, out);
            if (WRITES && p.pre) store_words(p.pre + at, inside, pre);
            if (EPILOGUE == GATE && p.gate) store_words(p.gate + at, inside, gates);
            if (READS && p.dpre) store_words(p.dpre + at, inside, pre);
            if (EPILOGUE == DGATE && p.dgate) store_words(p.dgate + at, inside, dgates);
        }
    }
    if (EPILOGUE != PLAIN && tile.column + WIDTH > p.cols) clear<WIDTH>(p, tile, first);
}

// Stores a split-K partition in fp32, in rows of any length: 8 columns of a row are a 32-byte sector.
template <int N>
DEVICE void store_part(const Problem& p, const Tile& tile, const float (&d)[HALVES][N / 2], int first) {
    const int row = first_row(tile, first);
#pragma unroll
    for (int i = 0; i < HALVES * N / 2; i++) {
        const int half = i / (N / 2), j = i % (N / 2);
        const int r = row + half * HALF + j % 4 / 2 * 8, column = tile.column + j / 4 * 8 + threadIdx.x % 4 * 2 + j % 2;
        if (r < p.rows && column < p.cols) ((float*)p.out)[((u64)tile.part * p.rows + r) * p.cols + column] = d[half][j];
    }
}

// Ping-pong: the named barriers of this consumer and of the other; whether this CTA has a tile before this one, and
// after.
struct Turn {
    int mine, other;
    bool waits, gives;
};

template <int N>
DEVICE void work(const Problem& p, const Tile& tile, u32 smem, Ring& ring, int first, const Turn& turn) {
    float d[HALVES][N / 2];
#pragma unroll
    for (int i = 0; i < HALVES * N / 2; i++) d[i / (N / 2)][i % (N / 2)] = 0;
    if (TURNS && turn.waits) named_wait(turn.mine);
    multiply<N>(d, smem, ring, steps_of(tile), first, [&] {
        if (TURNS && turn.gives) named_arrive(turn.other);
    });
    if ((EPILOGUE == PLAIN || EPILOGUE == ACT || EPILOGUE == GATE) && p.bias) add_bias<N>(p, tile, d);
    if constexpr (EPILOGUE == PARTS) store_part<N>(p, tile, d, first);
    else finish<N>(p, tile, d, first);
}

DEVICE void consume(const Problem& p, u32 smem) {
    const int consumer = __shfl_sync(~0u, threadIdx.x / 128 - 1, 0);  // recomputed: it occupies no register until here
    const int tiles = tiles_of(p), clusters = gridDim.x / CLUSTER, first = TURNS ? 0 : consumer * HALF;
    Ring ring;
    int place = blockIdx.x / CLUSTER + (TURNS ? consumer * clusters : 0);
    for (; place < tiles; place += (1 + TURNS) * clusters) {
        const Tile tile = find_tile(p, place);
        const Turn turn = {1 + consumer, 2 - consumer, place >= clusters, place + clusters < tiles};
        if (TURNS && turn.waits) ring.skip(steps_of(find_tile(p, place - clusters)));
        constexpr int NARROW = TURNS || EPILOGUE == GATE ? BLOCK_N : BLOCK_N / 2;
        if (NARROW < BLOCK_N && p.pitch - tile.column <= NARROW) work<NARROW>(p, tile, smem, ring, first, turn);
        else work<BLOCK_N>(p, tile, smem, ring, first, turn);
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
fused_mlp_products(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                   const __grid_constant__ TensorMap a_more_map, const __grid_constant__ TensorMap b_more_map,
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
        if (threadIdx.x == 0) produce(problem, Maps{&a_map, &b_map, &a_more_map, &b_more_map}, smem);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        consume(problem, smem);
    }
    __syncwarp();
    cluster_sync();
}
