// The products of fused_mlp for Hopper (sm_90a): TMA, wgmma, warp specialisation, persistent. products.py compiles and
// launches.
//
//   EPILOGUE 0  PLAIN    out = a b + bias                                            y, x's gradient, a weight's gradient
//            1  ACT      pre = a b + bias; out = act(pre)                            the hidden
//            2  GATE     pre = a b + bias, gate = a b_more; out = act(gate) pre      the gated hidden
//            3  DACT     out = act'(pre) of a b, dpre                                from pre
//            4  DGATE    the same for the gated hidden, from pre and gate
//            5  PARTS    out[s] = a b over part s of the sum, fp32                   a weight's gradient
//
// Napkin maths for one step of 64 of a tile of 128 x 256, in cycles of an SM: the tensor cores take 1024 (4096 FLOP a
// cycle, dense), and 48 KiB come from L2, 48 bytes a cycle. An epilogue writes 64 KiB by 16 stores of 16 bytes a thread,
// and ACT and DACT compute two exponentials or reciprocals for each of 128 sums of a thread, 4096 cycles of the special
// function units an SM: half of a tile with D = 512, a twentieth with D = 4096. It is overlapped with the loads of the
// next tile, but not with its products.
//
// A CTA is one producer warp and two consumer warpgroups with 64 rows of the tile each. The producer fills a ring of
// STAGES steps of both operands. Consumers keep 64 x 256 sums in registers; of GATE those are 128 columns of pre and the
// same 128 of gate, so that a thread has both of a column. Where at most 128 columns are left they take wgmmas of 128.
//
// What lies beyond a tensor is read as zeros by TMA, without traffic: any width does. What is beyond the last column of
// the hidden is written as zero, because the next product sums over it.
//
// CTAs of a cluster have tiles below each other. Each loads its share of their columns of b, for all of them: 48 bytes a
// cycle are more than L2 delivers to all SMs at once, 32 with two CTAs are not. They go through the same steps.
//
// Barriers, with their arrivals per phase: full[s] 1 and the bytes of a step, empty[s] 8 from each CTA of the cluster,
// one lane of each consumer warp. The n-th use of a full one waits for parity n & 1, that of an empty one for the
// opposite, so that the first pass finds every slot empty. No consumer waits for another, and a producer only for
// consumers, all of which go through the same steps: free of deadlock. In the end CTAs of a cluster wait for each other,
// so that none writes into one that is gone.
//
// Defined by the launcher: EPILOGUE, ACTIVATION, FP16, STAGES, RASTER, CLUSTER, A_TRANS and B_TRANS (contiguous along
// the rows, or columns, of the result), TWO (a further sum over a_more and b_more, as long as the first).

#include "cluster.cuh"
#include "mbarrier.cuh"
#include "numbers.cuh"
#include "tma.cuh"
#include "wgmma.cuh"
#include "wgmma16.cuh"
#include "epilogue.cuh"

enum Epilogue { PLAIN, ACT, GATE, DACT, DGATE, PARTS };

constexpr int BLOCK_M = 128, BLOCK_N = 256, BLOCK_K = 64;
constexpr int CONSUMERS = 2, ROWS = BLOCK_M / CONSUMERS, THREADS = 128 * (CONSUMERS + 1);
constexpr int COLUMNS = EPILOGUE == GATE ? BLOCK_N / 2 : BLOCK_N;  // of the result that a tile has
constexpr int PANEL = BLOCK_K * 128;                               // bytes of BLOCK_K rows of 64 columns
constexpr int A_BYTES = BLOCK_M * BLOCK_K * 2, B_BYTES = BLOCK_N * BLOCK_K * 2, STEP_BYTES = A_BYTES + B_BYTES;
constexpr int FULL = STAGES * STEP_BYTES, EMPTY = FULL + 8 * STAGES;  // where barriers lie
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;

struct Problem {
    void* out;               // 16 bits, or of PARTS fp32
    u16 *pre, *gate;         // written by ACT and GATE unless null; read by DACT and DGATE
    u16 *dpre, *dgate;       // written by DACT and DGATE unless null, as `out` is
    const u16* bias;         // or null
    u64 bias_stride;
    int rows, cols, pitch;   // of the result; all of its tensors have rows of `pitch` elements
    int steps, parts, part;  // of the sum, the number of its parts, and the steps of one
};

struct Tile {
    int row, column, part;   // of the result; part of the sum
    int first, last;         // steps of it
};

// ---- Tiles --------------------------------------------------------------------------------------------------------

// Rows of tiles are those of a cluster: CLUSTER tiles below each other, of which the last may have no rows.
DEVICE int bands_of(const Problem& p) { return (p.rows + CLUSTER * BLOCK_M - 1) / (CLUSTER * BLOCK_M); }
DEVICE int tiles_of(const Problem& p) { return p.parts * bands_of(p) * ((p.pitch + COLUMNS - 1) / COLUMNS); }

// RASTER tiles of a column, then the next column, so that what they read of b is in L2.
DEVICE Tile find_tile(const Problem& p, int place) {
    const int tiles_m = bands_of(p), tiles_n = (p.pitch + COLUMNS - 1) / COLUMNS;
    const int part = place / (tiles_m * tiles_n), rest = place % (tiles_m * tiles_n);
    const int band = RASTER * tiles_n, first = rest / band * RASTER, height = min(tiles_m - first, RASTER);
    Tile tile;
    tile.part = part, tile.first = part * p.part, tile.last = min(p.steps, tile.first + p.part);
    tile.row = ((first + rest % band % height) * CLUSTER + cluster_rank()) * BLOCK_M;
    tile.column = rest % band / height * COLUMNS;
    return tile;
}

struct Ring {
    int slot = 0;
    u32 phase = 0;
    DEVICE void next() {
        if (++slot == STAGES) slot = 0, phase ^= 1;
    }
};

// ---- Producer -----------------------------------------------------------------------------------------------------

struct Maps {
    const TensorMap *a, *b, *a_more, *b_more;
};

// Starts the loads of one step of a sum, of terms k to k + 63.
DEVICE void load_step(const TensorMap* a, const TensorMap* b, const TensorMap* b_more, const Tile& tile, int k, u32 to,
                      u32 bar) {
    bar_expect(bar, STEP_BYTES);
    if (A_TRANS) {
        for (int i = 0; i < BLOCK_M / 64; i++) tma_load(to + i * PANEL, a, tile.row + 64 * i, k, 0, 0, bar);
    } else {
        tma_load(to, a, k, tile.row, 0, 0, bar);
    }
    to += A_BYTES;
    if (B_TRANS) {
        constexpr int PANELS = BLOCK_N / 64 / CLUSTER;
        for (int i = cluster_rank() * PANELS; i < (cluster_rank() + 1) * PANELS; i++)
            tma_multicast(to + i * PANEL, b, tile.column + 64 * i, k, bar);
    } else {
        const int share = COLUMNS / CLUSTER * cluster_rank();
        tma_multicast(to + share * BLOCK_K * 2, b, k, tile.column + share, bar);
        if (EPILOGUE == GATE) tma_multicast(to + B_BYTES / 2 + share * BLOCK_K * 2, b_more, k, tile.column + share, bar);
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

// Gives a slot back to the producers of the cluster. The whole warp has waited for the wgmmas that read it, and nothing
// else reads a slot: no fence_reads.
DEVICE void release(u32 smem, int slot) { arrive_at_all(smem + EMPTY + 8 * slot); }

// d += a b over `steps` steps, of one consumer's 64 rows and the first N columns.
template <int N> DEVICE void multiply(float (&d)[N / 2], u32 smem, Ring& ring, int steps, int consumer) {
    int before = 0;
#pragma unroll 1
    for (int step = 0; step < steps; step++, ring.next()) {
        const u32 at = smem + ring.slot * STEP_BYTES;
        bar_wait(smem + FULL + 8 * ring.slot, ring.phase);
        const u64 a = describe(at + consumer * (A_BYTES / CONSUMERS), PANEL), b = describe(at + A_BYTES, PANEL);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < BLOCK_K / 16; i++) {
            const int a_step = A_TRANS ? 16 * 128 / 16 : 32 / 16, b_step = B_TRANS ? 16 * 128 / 16 : 32 / 16;
            wgmma<A_TRANS, B_TRANS>(d, a + i * a_step, b + i * b_step);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (step) release(smem, before);
        before = ring.slot;
    }
    wgmma_wait<0>();
    pin(d);
    if (steps > 0) release(smem, before);
}

DEVICE float bias_of(const Problem& p, int column) {
    return p.bias && column < p.cols ? widen(p.bias[column * p.bias_stride]) : 0.0f;
}

// Two neighbouring columns of a row, on which an epilogue works.
struct Pair {
    u32 out, pre, gate, dgate;  // pre and gate are read, or written; of DACT and DGATE pre then is dpre
};

DEVICE void finish_pair(const Problem& p, int column, float x, float y, float gate_x, float gate_y, Pair& pair) {
    const bool first = column < p.cols, second = column + 1 < p.cols;
    if constexpr (EPILOGUE == PLAIN) {
        pair.out = pack(x + bias_of(p, column), y + bias_of(p, column + 1));
    } else if constexpr (EPILOGUE == ACT || EPILOGUE == GATE) {
        x += bias_of(p, column), y += bias_of(p, column + 1);
        pair.pre = pack(x, y);
        if (EPILOGUE == GATE) {
            pair.gate = pack(gate_x, gate_y);
            x *= activate(gate_x), y *= activate(gate_y);
        } else {
            x = activate(x), y = activate(y);
        }
        pair.out = pack(first ? x : 0, second ? y : 0);
    } else if constexpr (EPILOGUE == DACT) {
        const Both a = activate_and_derive(low(pair.pre), x), b = activate_and_derive(high(pair.pre), y);
        pair.out = pack(first ? a.y : 0, second ? b.y : 0);
        pair.pre = pack(first ? a.dx : 0, second ? b.dx : 0);
    } else {
        const float pre_x = low(pair.pre), pre_y = high(pair.pre);
        const Both a = activate_and_derive(low(pair.gate), x * pre_x), b = activate_and_derive(high(pair.gate), y * pre_y);
        pair.out = pack(first ? a.y * pre_x : 0, second ? b.y * pre_y : 0);
        pair.pre = pack(first ? x * a.y : 0, second ? y * b.y : 0);
        pair.dgate = pack(first ? a.dx : 0, second ? b.dx : 0);
    }
}

// A thread has columns 8 j + 2 (lane % 4) and the next of rows lane / 4 and lane / 4 + 8 of its warp's 16.
template <int N> DEVICE void finish(const Problem& p, const Tile& tile, const float (&d)[N / 2], int consumer) {
    const int lane = threadIdx.x % 32, quad = lane % 4, gate = EPILOGUE == GATE ? N / 4 : 0;
    const int row = tile.row + consumer * ROWS + threadIdx.x % 128 / 32 * 16 + lane / 4;
    constexpr bool READS = EPILOGUE == DACT || EPILOGUE == DGATE, WRITES = EPILOGUE == ACT || EPILOGUE == GATE;
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int c = 0; c < (EPILOGUE == GATE ? N / 2 : N) / 32; c++) {
            const int column = tile.column + 32 * c + 8 * quad;
            const bool inside = row + 8 * half < p.rows && column < p.pitch;
            const u64 at = (u64)(row + 8 * half) * p.pitch + column;
            u32 out[4], pre[4], gates[4], dgates[4];
            if (READS) load_words(p.pre + at, inside, pre);
            if (EPILOGUE == DGATE) load_words(p.gate + at, inside, gates);
#pragma unroll
            for (int block = 0; block < 4; block++) {
                const int i = 4 * (4 * c + block) + 2 * half;
                Pair pair = {0, READS ? pre[block] : 0, EPILOGUE == DGATE ? gates[block] : 0, 0};
                finish_pair(p, tile.column + 32 * c + 8 * block + 2 * quad, d[i], d[i + 1], d[gate + i], d[gate + i + 1],
                            pair);
                out[block] = pair.out, pre[block] = pair.pre, gates[block] = pair.gate, dgates[block] = pair.dgate;
            }
            if (p.out) store_words((u16*)p.out + at, inside, out);
            if (WRITES && p.pre) store_words(p.pre + at, inside, pre);
            if (EPILOGUE == GATE && p.gate) store_words(p.gate + at, inside, gates);
            if (READS && p.dpre) store_words(p.dpre + at, inside, pre);
            if (EPILOGUE == DGATE && p.dgate) store_words(p.dgate + at, inside, dgates);
        }
    }
}

// fp32, in rows of any number of elements: 8 columns of a row are a 32-byte sector.
template <int N> DEVICE void store_part(const Problem& p, const Tile& tile, const float (&d)[N / 2], int consumer) {
    const int lane = threadIdx.x % 32;
    const int row = tile.row + consumer * ROWS + threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        const int r = row + i % 4 / 2 * 8, column = tile.column + i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (r < p.rows && column < p.cols) ((float*)p.out)[((u64)tile.part * p.rows + r) * p.cols + column] = d[i];
    }
}

template <int N> DEVICE void work(const Problem& p, const Tile& tile, u32 smem, Ring& ring, int steps, int consumer) {
    float d[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) d[i] = 0;
    multiply<N>(d, smem, ring, steps, consumer);
    if constexpr (EPILOGUE == PARTS) store_part<N>(p, tile, d, consumer);
    else finish<N>(p, tile, d, consumer);
}

DEVICE void consume(const Problem& p, u32 smem, int consumer) {
    const int tiles = tiles_of(p);
    Ring ring;
    for (int place = blockIdx.x / CLUSTER; place < tiles; place += gridDim.x / CLUSTER) {
        const Tile tile = find_tile(p, place);
        const int steps = max(0, tile.last - tile.first) * (1 + TWO);
        if (EPILOGUE == GATE || p.pitch - tile.column > BLOCK_N / 2) work<BLOCK_N>(p, tile, smem, ring, steps, consumer);
        else work<EPILOGUE == GATE ? BLOCK_N : BLOCK_N / 2>(p, tile, smem, ring, steps, consumer);
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
            bar_init(smem + EMPTY + 8 * s, 4 * CONSUMERS * CLUSTER);
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
        consume(problem, smem, group - 1);
    }
    __syncwarp();
    cluster_sync();
}
