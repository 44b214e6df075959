// A copy of parts/sm90/heads_products.cu, made by `nox -s vendor`: change it there.
// The GEMMs that use the gradient of the hidden of K feed-forward layers of one input, for Hopper (sm_90a):
//
//   dx[r, d] = Σ_g Σ_h dpre[r, g, h] · w1[g, h, d]        16 bits, or fp32 split-K partitions, [parts, rows, dim]
//   dw1[g, h, d] = Σ_r dpre[r, g, h] · x[r, d]            16 bits, or fp32 sums that pass from chunk to chunk
//
// Both in one launch. dx of few rows has few tiles with a large K, which is therefore split by heads; dw1 has 220 tiles
// for ten heads of 1365, with a small K. Together they fill the SMs; one after the other each leaves some idle.
//
// Back-of-the-envelope estimate for one K-block of 64 of a 128 x 256 tile, in cycles of an SM: the tensor cores take
// 1024 (4096 FLOP a cycle, dense), read 80 bytes a cycle from shared memory (of 128), and 48 KiB come from L2, 48 bytes
// a cycle. Two CTAs that share the second operand read 32, two that share the first one 40. A tile is stored as 64 KiB
// of 16 bits or 128 KiB of fp32. 564 rows of ten heads of 512 to 1365: 4180 such K-blocks, 32 for each of 132 SMs, 19
// us.
//
// A CTA is one producer warp and two consumer warpgroups with 64 rows of the tile each. The producer fills a circular
// buffer of STAGES pipeline stages, one K-block of both operands each. A consumer has 64 x 256 accumulators in
// registers. dpre is the first operand of both GEMMs, K-major for dx and M-major for dw1. The second, w1 or x, is
// N-major. So all boxes are 64 rows of 64 elements. TMA reads zeros out of bounds, without traffic; dpre has zeros
// after the columns of each head.
//
// The two CTAs of a cluster have vertically adjacent tiles and multicast half of the second operand each. With
// `beside`, those of dx are horizontally adjacent, and share the first. They process the same K-blocks; one that has no
// tile stores nothing.
//
// Tile scheduler: clusters are persistent. Units of dx, which take longer, are assigned first, then those of dw1.
// Clusters with one unit of dx fewer get `ahead` units of dw1 before the others get any. So the longest come first, in
// an order that producer and consumers compute.
//
// Barriers, with their arrivals per phase: full[s] 1 and the bytes of a stage, empty[s] 8 from each CTA of the cluster,
// one lane of each consumer warp. Free of deadlock: no consumer waits for another, and producers only for consumers.
//
// Defined by the launcher: FP16, STAGES, CLUSTER (1 or 2).
#include "cluster.cuh"
#include "mbarrier.cuh"
#include "numbers.cuh"
#include "tma.cuh"
#include "wgmma.cuh"
#include "wgmma16.cuh"

constexpr int BLOCK_M = 128, BLOCK_N = 256, BLOCK_K = 64;
constexpr int CONSUMERS = 2, ROWS = BLOCK_M / CONSUMERS, THREADS = 128 * (CONSUMERS + 1);
constexpr int PANEL = BLOCK_K * 128;  // bytes of a box: 64 rows of 64 elements
constexpr int A_PANELS = BLOCK_M / 64, B_PANELS = BLOCK_N / 64, STEP_BYTES = (A_PANELS + B_PANELS) * PANEL;
constexpr int FULL = STAGES * STEP_BYTES, EMPTY = FULL + 8 * STAGES;  // offsets of the barriers
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;

struct Products {
    float* parts;  // of dx [parts, rows, dim], or null: dx is written
    u16* dx;       // [rows, dim]
    float* sums;   // of dw1 over chunks [heads, hidden, dim]
    u16* dw1;      // likewise, or null: sums are written
    int rows, heads, hidden, dim;
    int dx_heads;  // heads of a part of dx; 0: no dx
    int dw1_rows;  // K of dw1, which are rows; 0: no dw1
    int beside, ahead;
    int add;       // whether sums are those of the chunks before, to add to
};

// ---- Units of work ------------------------------------------------------------------------------------------------

struct Unit {
    int head, heads;       // dx: the first head and how many; dw1: the head, and 0
    int part;              // of dx
    int row, left;         // of the result: this CTA's first row, and how many there are from it on
    int column;
};

DEVICE int divide_up(int a, int b) { return (a + b - 1) / b; }

DEVICE Unit find_dx(const Products& p, int index) {
    const int tiles = divide_up(p.dim, BLOCK_N) / (p.beside ? CLUSTER : 1);
    const int bands = divide_up(divide_up(p.rows, BLOCK_M), p.beside ? 1 : CLUSTER);
    int tile = index % tiles, band = index / tiles % bands;
    const int part = index / tiles / bands, head = part * p.dx_heads;
    if (p.beside) tile = tile * CLUSTER + cluster_rank();
    else band = band * CLUSTER + cluster_rank();
    return {head, min(p.dx_heads, p.heads - head), part, band * BLOCK_M, p.rows - band * BLOCK_M, tile * BLOCK_N};
}

DEVICE Unit find_dw1(const Products& p, int index) {
    const int tiles = divide_up(p.dim, BLOCK_N), blocks = divide_up(p.hidden, BLOCK_M);
    const int block = index / tiles * CLUSTER + cluster_rank(), head = block / blocks, row = block % blocks * BLOCK_M;
    return {head, 0, 0, row, head < p.heads ? p.hidden - row : 0, index % tiles * BLOCK_N};
}

DEVICE int dx_units(const Products& p) {
    if (!p.dx_heads) return 0;
    const int tiles = divide_up(p.dim, BLOCK_N), bands = divide_up(p.rows, BLOCK_M);
    const int of_part = p.beside ? tiles / CLUSTER * bands : tiles * divide_up(bands, CLUSTER);
    return of_part * divide_up(p.heads, p.dx_heads);
}

DEVICE int dw1_units(const Products& p) {
    if (!p.dw1_rows) return 0;
    return divide_up(p.heads * divide_up(p.hidden, BLOCK_M), CLUSTER) * divide_up(p.dim, BLOCK_N);
}

// This cluster's unit `index`, if there is one.
DEVICE bool find_unit(const Products& p, int index, Unit& unit) {
    const int clusters = gridDim.x / CLUSTER, own = blockIdx.x / CLUSTER;
    const int sums = dx_units(p), more = sums % clusters, count = sums / clusters + (own < more);
    if (index < count) {
        unit = find_dx(p, own + index * clusters);
        return true;
    }
    const int fewer = clusters - more;  // clusters with one unit of dx fewer
    const bool first = own >= more;
    const int place = first ? own - more : fewer + own, round = index - count;
    const int at = first && round < p.ahead ? round * fewer + place
                                            : p.ahead * fewer + (round - (first ? p.ahead : 0)) * clusters + place;
    if (at >= dw1_units(p)) return false;
    unit = find_dw1(p, at);
    return true;
}

DEVICE int steps_of(const Products& p, const Unit& unit) {
    return unit.heads ? unit.heads * divide_up(p.hidden, BLOCK_K) : divide_up(p.dw1_rows, BLOCK_K);
}

// ---- Producer -----------------------------------------------------------------------------------------------------

struct Maps {
    const TensorMap *dpre, *w1, *x;
};

DEVICE void load(bool shared, u32 to, const TensorMap* map, int column, int row, int head, u32 bar) {
    if (shared) tma_multicast(to, map, column, row, bar, head);
    else tma_load(to, map, column, row, head, 0, bar);
}

// Issues the loads of one K-block: of each operand all, or this CTA's share, multicast to the cluster.
DEVICE void load_step(const Products& p, const Maps& maps, const Unit& unit, int step, u32 to, u32 bar) {
    const bool of_x = unit.heads, share_a = CLUSTER > 1 && of_x && p.beside, share_b = CLUSTER > 1 && !share_a;
    const int steps = divide_up(p.hidden, BLOCK_K), rank = cluster_rank();
    const int head = unit.head + (of_x ? step / steps : 0), k = (of_x ? step % steps : step) * BLOCK_K;
    bar_expect(bar, STEP_BYTES);
    const int a_count = share_a ? A_PANELS / CLUSTER : A_PANELS, b_count = share_b ? B_PANELS / CLUSTER : B_PANELS;
    for (int n = 0; n < a_count; n++) {
        const int i = n + (share_a ? rank * a_count : 0), along = unit.row + 64 * i;
        load(share_a, to + i * PANEL, maps.dpre, of_x ? k : along, of_x ? along : k, head, bar);
    }
    for (int n = 0; n < b_count; n++) {
        const int i = n + (share_b ? rank * b_count : 0);
        load(share_b, to + (A_PANELS + i) * PANEL, of_x ? maps.w1 : maps.x, unit.column + 64 * i, k, of_x ? head : 0,
             bar);
    }
}

template <int SLOTS> struct Ring {
    int slot = 0;
    u32 phase = 0;
    DEVICE void next() {
        if (++slot == SLOTS) slot = 0, phase ^= 1;
    }
};

DEVICE void produce(const Products& p, const Maps& maps, u32 smem) {
    Ring<STAGES> ring;
    Unit unit;
    for (int index = 0; find_unit(p, index, unit); index++) {
        const int steps = steps_of(p, unit);
#pragma unroll 1
        for (int step = 0; step < steps; step++, ring.next()) {
            bar_wait(smem + EMPTY + 8 * ring.slot, ring.phase ^ 1);
            load_step(p, maps, unit, step, smem + ring.slot * STEP_BYTES, smem + FULL + 8 * ring.slot);
        }
    }
}

// ---- Consumers ----------------------------------------------------------------------------------------------------

// Releases a stage: arrives on its empty barrier in each CTA of the cluster. The warp's wgmmas that read it are
// complete.
DEVICE void release(u32 smem, int slot) { arrive_at_all(smem + EMPTY + 8 * slot); }

// The main loop, d += a b over all K-blocks, for one consumer's 64 rows. ACROSS: the first operand is M-major.
template <int ACROSS>
DEVICE void multiply(float (&d)[BLOCK_N / 2], u32 smem, Ring<STAGES>& ring, int steps, int consumer) {
    int before = 0;
#pragma unroll 1
    for (int step = 0; step < steps; step++, ring.next()) {
        const u32 at = smem + ring.slot * STEP_BYTES;
        const u64 a = describe(at + consumer * PANEL, PANEL), b = describe(at + A_PANELS * PANEL, PANEL);
        bar_wait(smem + FULL + 8 * ring.slot, ring.phase);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < BLOCK_K / 16; i++)
            wgmma<ACROSS, 1>(d, a + i * (ACROSS ? 16 * 128 / 16 : 32 / 16), b + i * (16 * 128 / 16));
        wgmma_commit();
        wgmma_wait<1>();
        if (step) release(smem, before);
        before = ring.slot;
    }
    wgmma_wait<0>();
    pin(d);
    release(smem, before);
}

// A consumer without rows waits for each stage and releases it.
DEVICE void skip(u32 smem, Ring<STAGES>& ring, int steps) {
#pragma unroll 1
    for (int step = 0; step < steps; step++, ring.next()) {
        bar_wait(smem + FULL + 8 * ring.slot, ring.phase);
        __syncwarp();  // a lane that still waits would miss this phase once the stage is released
        release(smem, ring.slot);
    }
}

DEVICE void exchange(u32& kept_low, u32& kept_high, int bit) {
    const bool high = threadIdx.x & bit;
    const u32 got = __shfl_xor_sync(~0u, high ? kept_low : kept_high, bit);
    if (high) kept_low = got;
    else kept_high = got;
}

// A thread has columns 8 j + 2 (lane % 4) and the next, of rows lane / 4 and lane / 4 + 8 of its warp's 16. fp32 is
// stored as it is, 32 bytes of a row from four lanes. For 16 bits these lanes exchange their elements of four blocks of
// 8 columns, so that each stores one block of a row: 16 bytes.
DEVICE void store_unit(const Products& p, const Unit& unit, const float (&d)[BLOCK_N / 2], int consumer) {
    const int lane = threadIdx.x % 32, quad = lane % 4;
    const int row = consumer * ROWS + threadIdx.x % 128 / 32 * 16 + lane / 4;
    const bool of_x = unit.heads;
    float* const wide = of_x ? p.parts : p.dw1 ? nullptr : p.sums;
    u16* const out = of_x ? p.dx : p.dw1;
    const float* const sums = !of_x && p.add ? p.sums : nullptr;
    const u64 first = (of_x ? (wide ? (u64)unit.part * p.rows : 0) : (u64)unit.head * p.hidden) + unit.row;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const bool inside = row + 8 * half < unit.left;
        const u64 at = (first + row + 8 * half) * p.dim + unit.column;
#pragma unroll
        for (int c = 0; c < BLOCK_N / 32; c++) {
            u32 w[4];
#pragma unroll
            for (int block = 0; block < 4; block++) {
                const int column = 32 * c + 8 * block + 2 * quad, i = 4 * (4 * c + block) + 2 * half;
                const bool there = inside && unit.column + column < p.dim;
                float2 sum = make_float2(d[i], d[i + 1]);
                if (sums && there) {
                    const float2 before = *(const float2*)(sums + at + column);
                    sum.x += before.x, sum.y += before.y;
                }
                if (wide && there)
                    asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(wide + at + column), "f"(sum.x), "f"(sum.y)
                                 : "memory");
                w[block] = pack(sum.x, sum.y);
            }
            if (wide) continue;
            exchange(w[0], w[1], 1);
            exchange(w[2], w[3], 1);
            exchange(w[0], w[2], 2);
            exchange(w[1], w[3], 2);
            if (inside && unit.column + 32 * c + 8 * quad < p.dim)
                asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                             ::"l"(out + at + 32 * c + 8 * quad), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
                             : "memory");
        }
    }
}

DEVICE void consume(const Products& p, u32 smem, int consumer) {
    Ring<STAGES> ring;
    Unit unit;
    float d[BLOCK_N / 2];
    for (int index = 0; find_unit(p, index, unit); index++) {
        const int steps = steps_of(p, unit);
        if (unit.left <= consumer * ROWS || unit.column >= p.dim) {
            skip(smem, ring, steps);
            continue;
        }
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; i++) d[i] = 0;
        if (unit.heads) multiply<0>(d, smem, ring, steps, consumer);
        else multiply<1>(d, smem, ring, steps, consumer);
        store_unit(p, unit, d, consumer);
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
heads_products(const __grid_constant__ TensorMap dpre_map, const __grid_constant__ TensorMap w1_map,
               const __grid_constant__ TensorMap x_map, const __grid_constant__ Products p) {
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
        if (threadIdx.x == 0) produce(p, {&dpre_map, &w1_map, &x_map}, smem);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        consume(p, smem, group - 1);
    }
    __syncwarp();
    cluster_sync();
}
