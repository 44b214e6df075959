// Grouped products for Hopper (sm_90a): TMA, wgmma, warp specialisation, persistent. products.py compiles and launches.
//
//   WEIGHTS 0   out[r, n] = sum over k of a[r, k] b[g, n, k], + bias[g, n]    the rows r of each group g
//   WEIGHTS 1   out[g, m, n] = sum over the rows r of group g of a[r, m] b[r, n]
//
// The first is the forward, and with weights read transposed x's gradient; the second the weights' gradient.
//
// Napkin maths for one step of 64 of a tile of 128 x 256, in cycles of an SM: the tensor cores take 1024 (4096 FLOP a
// cycle, dense), and 48 KiB come from L2, 48 bytes a cycle. The epilogue writes 64 KiB by 16 stores of 16 bytes a
// thread, some 1000 cycles, or 1.5 % of a tile with K = 4096.
//
// A CTA is one producer warp and two consumer warpgroups with 64 rows of the tile each. The producer fills a ring of
// STAGES steps of both operands. Consumers keep 64 x 256 sums in registers.
//
// Ragged edges cost what they are, not what a tile is:
//  - a tile with at most 64 rows leaves the second consumer idle, and one with at most 128 columns takes wgmmas of 128;
//  - what lies beyond a tensor is read as zeros by TMA, without traffic;
//  - rows of the next group that a tile reads only reach sums that are not stored. As a *sum* runs over rows in the
//    weights' gradient, there they are overwritten by zeros in shared memory, in both operands, for 0 times inf is NaN.
//
// Barriers, with their arrivals per phase: full[s] 1 and the bytes of a step, empty[s] 8, one lane of each consumer
// warp. The n-th use of a full one waits for parity n & 1, that of an empty one for the opposite, so that the first pass
// finds every slot empty. No consumer waits for another, and the producer only for both: free of deadlock.
//
// Defined by the launcher: WEIGHTS, FP16, STAGES, RASTER, B_TRANSPOSED (with WEIGHTS 0: b is contiguous along n).

#include "mbarrier.cuh"
#include "numbers.cuh"
#include "wgmma16.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

constexpr int BLOCK_M = 128, BLOCK_N = 256, BLOCK_K = 64;
constexpr int CONSUMERS = 2, ROWS = BLOCK_M / CONSUMERS, THREADS = 128 * (CONSUMERS + 1);
constexpr int A_TRANS = WEIGHTS, B_TRANS = WEIGHTS || B_TRANSPOSED;
constexpr int PANEL = BLOCK_K * 128;  // bytes of BLOCK_K rows of 64 columns
constexpr int A_BYTES = BLOCK_M * BLOCK_K * 2, B_BYTES = BLOCK_N * BLOCK_K * 2, STEP_BYTES = A_BYTES + B_BYTES;
constexpr int FULL = STAGES * STEP_BYTES, EMPTY = FULL + 8 * STAGES;  // where barriers lie
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;

struct Problem {
    const int* table;         // schedule.py
    u16* out;
    const u16* bias;          // or null
    u64 out_row, out_group;   // strides in elements; the columns of out are contiguous
    u64 bias_group, bias_column;
    int groups, rows, cols;   // of out, or with WEIGHTS of each of its matrices
    int depth;                // without WEIGHTS: terms of a sum
};

struct Tile {
    int group, row, column;   // of out
    int rows;                 // how many of BLOCK_M are there
    int first, terms;         // of the sum
};

// ---- Tiles --------------------------------------------------------------------------------------------------------

DEVICE int tiles_of(const Problem& a) {
    const int columns = (a.cols + BLOCK_N - 1) / BLOCK_N;
    return WEIGHTS ? a.groups * ((a.rows + BLOCK_M - 1) / BLOCK_M) * columns : a.table[0] * columns;
}

// RASTER tiles of a column, then the next column, so that what they read of b is in L2.
DEVICE void raster(int place, int tiles_m, int tiles_n, int& tile_m, int& tile_n) {
    const int band = RASTER * tiles_n, first = place / band * RASTER, height = min(tiles_m - first, RASTER);
    tile_n = place % band / height;
    tile_m = first + place % band % height;
}

DEVICE Tile find_tile(const Problem& a, int place) {
    const int tiles_n = (a.cols + BLOCK_N - 1) / BLOCK_N;
    const int4* entries = reinterpret_cast<const int4*>(a.table) + 1;
    int tile_m, tile_n;
    Tile tile;
    if (WEIGHTS) {
        const int tiles_m = (a.rows + BLOCK_M - 1) / BLOCK_M, each = tiles_m * tiles_n;
        const int4 entry = entries[place / each];
        raster(place % each, tiles_m, tiles_n, tile_m, tile_n);
        tile.group = entry.x, tile.first = entry.y, tile.terms = entry.z - entry.y;
        tile.row = tile_m * BLOCK_M, tile.rows = min(a.rows - tile.row, BLOCK_M);
    } else {
        raster(place, a.table[0], tiles_n, tile_m, tile_n);
        const int4 entry = entries[a.groups + tile_m];
        tile.group = entry.x, tile.row = entry.y, tile.rows = min(entry.z - entry.y, BLOCK_M);
        tile.first = 0, tile.terms = entry.x < 0 ? 0 : a.depth;
    }
    tile.column = tile_n * BLOCK_N;
    return tile;
}

// Of a tile that all threads of a warp know, so that the compiler knows it too: descriptors then live in uniform
// registers.
DEVICE Tile uniform(Tile tile) {
    tile.group = __shfl_sync(~0u, tile.group, 0), tile.row = __shfl_sync(~0u, tile.row, 0);
    tile.column = __shfl_sync(~0u, tile.column, 0), tile.rows = __shfl_sync(~0u, tile.rows, 0);
    tile.first = 0, tile.terms = __shfl_sync(~0u, tile.terms, 0);
    return tile;
}

// The tile that a CTA takes in a round. Sums of the weights' gradient are as long as their groups are large, and sorted
// by that: there every other round goes through the CTAs backwards, which evens them out.
DEVICE int place_of(int round) {
    const int cta = WEIGHTS && round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    return round * gridDim.x + cta;
}

struct Ring {
    int slot = 0;
    u32 phase = 0;
    DEVICE void next() {
        if (++slot == STAGES) slot = 0, phase ^= 1;
    }
};

// ---- Producer -----------------------------------------------------------------------------------------------------

// Starts the loads of one step of a sum, of terms k to k + 63.
DEVICE void load_step(const TensorMap* a_map, const TensorMap* b_map, const Tile& tile, int k, u32 to, u32 bar) {
    bar_expect(bar, STEP_BYTES);
    if (A_TRANS) {
        for (int p = 0; p < BLOCK_M / 64; p++) tma_load(to + p * PANEL, a_map, tile.row + 64 * p, k, 0, 0, bar);
    } else {
        tma_load(to, a_map, k, tile.row, 0, 0, bar);
    }
    to += A_BYTES;
    const int group = WEIGHTS ? 0 : tile.group;
    if (B_TRANS) {
        for (int p = 0; p < BLOCK_N / 64; p++) tma_load(to + p * PANEL, b_map, tile.column + 64 * p, k, group, 0, bar);
    } else {
        tma_load(to, b_map, k, tile.column, group, 0, bar);
    }
}

DEVICE void produce(const Problem& a, const TensorMap* a_map, const TensorMap* b_map, u32 smem) {
    const int tiles = tiles_of(a);
    Ring ring;
    for (int round = 0; round * gridDim.x < tiles; round++) {
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

DEVICE void release(u32 smem, int slot) {
    if (threadIdx.x % 32 == 0) bar_arrive(smem + EMPTY + 8 * slot);
}

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

DEVICE void exchange(u32& kept_low, u32& kept_high, int bit) {
    const bool high = threadIdx.x & bit;
    const u32 got = __shfl_xor_sync(~0u, high ? kept_low : kept_high, bit);
    if (high) kept_low = got;
    else kept_high = got;
}

// Two fp32 sums with their bias, rounded.
DEVICE u32 rounded(const Problem& a, const Tile& tile, int column, float x, float y) {
    if (!WEIGHTS && a.bias && tile.group >= 0 && column < a.cols) {
        const u16* bias = a.bias + tile.group * a.bias_group + column * a.bias_column;
        const u32 first = bias[0], second = bias[a.bias_column];
#if FP16
        float low, high;
        asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(low) : "r"(first));
        asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(high) : "r"(second));
#else
        const float low = __uint_as_float(first << 16), high = __uint_as_float(second << 16);
#endif
        x += low, y += high;
    }
    return pack(x, y);
}

// A thread has columns 8 j + 2 (lane % 4) and the next of rows lane / 4 and lane / 4 + 8 of its warp's 16. Four lanes
// exchange what they have of four blocks of 8 columns, so that each stores one block of a row: 16 bytes.
DEVICE void store_tile(const Problem& a, const Tile& tile, const float (&d)[BLOCK_N / 2], int consumer) {
    const int lane = threadIdx.x % 32, quad = lane % 4;
    const int row = consumer * ROWS + threadIdx.x % 128 / 32 * 16 + lane / 4;
    u16* out = a.out + (WEIGHTS ? tile.group * a.out_group : 0);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const bool inside = row + 8 * half < tile.rows;
        u16* const to = out + (u64)(tile.row + row + 8 * half) * a.out_row + tile.column + 8 * quad;
#pragma unroll
        for (int c = 0; c < BLOCK_N / 32; c++) {
            u32 w[4];
#pragma unroll
            for (int block = 0; block < 4; block++) {
                const int at = 4 * (4 * c + block) + 2 * half;
                w[block] = rounded(a, tile, tile.column + 32 * c + 8 * block + 2 * quad, d[at], d[at + 1]);
            }
            exchange(w[0], w[1], 1);
            exchange(w[2], w[3], 1);
            exchange(w[0], w[2], 2);
            exchange(w[1], w[3], 2);
            if (inside && tile.column + 32 * c + 8 * quad < a.cols)
                asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                             ::"l"(to + 32 * c), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
        }
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
    for (int round = 0; round * gridDim.x < tiles; round++) {
        const Tile next = next_tile(a, round + 1, tiles);  // its entry of the table is on its way during the main loop
        if (tile.rows <= consumer * ROWS) {
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

extern "C" __global__ void __launch_bounds__(THREADS, 1)
grouped_gemm_products(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                      const __grid_constant__ Problem problem) {
    extern __shared__ __align__(1024) char shared[];
    const u32 smem = (u32)__cvta_generic_to_shared(shared);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            bar_init(smem + FULL + 8 * s, 1);
            bar_init(smem + EMPTY + 8 * s, 4 * CONSUMERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (threadIdx.x == 0) produce(problem, &a_map, &b_map, smem);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        consume(problem, smem, group - 1);
    }
}
