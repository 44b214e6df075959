// Grouped FP8 GEMM for Hopper (sm_90a): TMA, wgmma, warp specialisation, persistent. products.py compiles and launches
// it.
//
//   WEIGHTS 0   out[r, n] = sum over k of a[r, k] b[g, n, k]                the rows r of each group g
//               scales per 1x128 of a and 128x128 of b
//   WEIGHTS 1   out[g, m, n] = sum over the rows r of group g of a[m, r] b[n, r]
//               scales per 1x128 of both, blocks of r counted from row 0 of the whole tensor
//
// Back-of-the-envelope estimate of a K-block of 128: see fp8_matmul's products.cu, which has the same main loop. In
// cycles per SM a tile of 128 x 128 takes 512 of the tensor cores and 640 of shared memory, one of 128 x 192 768 and
// 832; with CLUSTER 2 L2 delivers 24 or 32 KiB. The gradient in fp32 of a group of 1024 rows has 8 K-blocks and 64 KiB
// per tile. All CTAs together write a tile in about as many cycles as its wgmmas take, so the stores must overlap them.
//
// A CTA has a producer warpgroup and two consumer warpgroups. Each consumer computes 64 rows of the tile. Thread 0 of
// the producer fills a circular buffer of STAGES pipeline stages (Ring; a slot is a stage) by TMA; all producer threads
// copy the scales of the K-block by cp.async. The producer also writes what consumers need to know about the tile into
// the stage (Step), so that consumers do not read the table. The consumers' main loop runs across tiles: a consumer
// issues the next wgmmas as soon as a set of wgmma accumulators is free, and only then runs the epilogue of a completed
// tile (promotion.cuh: SETS, TURNS). Gradients are stored through shared memory by TMA, overlapped with the next tile.
//
// With CLUSTER 2 the two CTAs of a cluster compute horizontally adjacent tiles. Each loads its columns of b and half of
// the rows of a, which TMA multicasts to both. So the padding of a group is 128 rows, as without a cluster.
//
// Ragged edges:
//  - In a tile with at most 64 rows the second consumer computes rows that it does not store.
//  - TMA zero-fills what is out of bounds of a tensor; cp.async zero-fills the scales of rows and columns that do not
//    exist.
//  - Without WEIGHTS, rows of the next group that a tile loads affect only accumulators that are not stored.
//  - With WEIGHTS the rows are the K dimension. K-blocks begin at multiples of 128, as scale blocks do. The elements of
//    other groups are overwritten by zeros in shared memory, in both operands, because 0 times NaN is NaN. Only the
//    first and last K-block of a group can have such rows; none has if groups begin at multiples of 128.
//
// Barriers and their arrivals per phase:
//   full[s]   1 and the bytes of a stage, and 128 that cp.async makes when its copies are complete
//   empty[s]  8: one lane of each consumer warp in each CTA of the cluster
//   turn[c]   with TURNS 4: one lane of each warp of a consumer
// The n-th wait on a full barrier is for parity n & 1. On an empty barrier it is for the opposite parity, so that in
// the first pass every stage counts as empty. A tile with an empty sum has one K-block without loads. After the last
// tile the producer fills one more stage, without loads, whose flag is STOP.
//
// There is no deadlock. A producer waits only for consumers, which all process the same sequence of K-blocks. A
// consumer waits only for full stages and for the other consumer to issue its wgmmas of the same or the previous
// K-block. At the end the CTAs of a cluster wait for each other, so that none writes into the shared memory of one that
// has exited.
//
// Defined by the launcher: WEIGHTS, A_E4M3, B_E4M3, OUT32 (out is fp32; else FP16 or bf16), BLOCK_N, TURNS (ping-pong
// consumers), STAGES, RASTER (height of a group in the grouped tile order), CLUSTER (1 or 2).

#define SCALING (WEIGHTS ? 3 : 2)
constexpr int BLOCK_M = 128, BLOCK_K = 128, CONSUMERS = 2;

#include "cluster.cuh"
#include "numbers.cuh"
#include "promotion.cuh"
#include "tiles.cuh"
#include "tma.cuh"
#include "tma_store.cuh"

// The boxes of TMA stores of a gradient: a consumer's 64 rows by 128 bytes.
constexpr int BOX_COLUMNS = OUT32 ? 32 : 64, BOX_BYTES = ROWS * 128, BOXES = WEIGHTS ? BLOCK_N / BOX_COLUMNS : 0;

// What a stage contains besides operands and scales: which K elements of the K-block belong to the tile's group, and,
// for the last K-block of a tile, where the tile is stored.
struct alignas(16) Step {
    int first, end;  // range of k in the tile's group, relative to this K-block
    int flags, rows;
    int group, row, column, unused;
};
enum StepFlags { LAST = 1, NO_TERMS = 2, STOP = 4 };

constexpr int STAGING = STAGES * OPERAND_BYTES, SCALES = STAGING + CONSUMERS * BOXES * BOX_BYTES;
constexpr int STEPS = SCALES + STAGES * SCALE_BYTES;                                    // offsets of the buffers
constexpr int FULL = STEPS + STAGES * (int)sizeof(Step), EMPTY = FULL + 8 * STAGES, TURN = EMPTY + 8 * STAGES;

// ---- Producer -----------------------------------------------------------------------------------------------------

// For a tile with an empty sum, whose group may be -1, no scales are read.
DEVICE ScaleLoads scales_of(const Problem& a, const Tile& tile) {
    const bool terms = tile.first < tile.end;
    const u64 column = WEIGHTS ? tile.column : tile.column / 128, block = first_step(tile) / BLOCK_K;
    const u64 group = WEIGHTS || !terms ? 0 : tile.group;
    return {a.scale_a + tile.row * a.scale_a_row + block * a.scale_a_block, a.scale_a_row, terms ? tile.rows : 0,
            a.scale_b + group * a.scale_b_group + column * a.scale_b_row + block * a.scale_b_block, a.scale_b_row,
            tile.column, terms ? a.cols - tile.column : 0};
}

DEVICE void store_four(u32 to, int x, int y, int z, int w) {
    asm volatile("st.shared::cta.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// Called before thread 0 arrives on the full barrier of the stage.
DEVICE void describe_step(u32 to, const Tile& tile, int k, int flags) {
    store_four(to, tile.first - k, tile.end - k, flags, tile.rows);
    store_four(to + 16, tile.group, tile.row, tile.column, 0);
}

// The rows of a of a K-block: all of them, or this CTA's share, multicast to all CTAs of the cluster.
DEVICE void load_a(u32 to, const TensorMap* map, int k, int row, u32 bar) {
    const int share = BLOCK_M / CLUSTER * cluster_rank();
    tma_multicast(to + share * BLOCK_K, map, k, row + share, bar);
}

DEVICE void produce(const Problem& a, const TensorMap* a_map, const TensorMap* b_map, u32 smem) {
    const int tiles = tiles_of(a);
    Ring ring;
    for (int round = 0; round * clusters() < tiles; round++) {
        const int place = place_of(round);
        if (place >= tiles) continue;
        const Tile tile = find_tile(a, place);
        ScaleLoads scales = scales_of(a, tile);
        int k = first_step(tile);
#pragma unroll 1
        do {
            const u32 bar = smem + FULL + 8 * ring.slot;
            bar_wait(smem + EMPTY + 8 * ring.slot, ring.phase ^ 1);
            const bool terms = k < tile.end;
            if (threadIdx.x == 0) {
                const u32 step = smem + ring.slot * OPERAND_BYTES;
                const int last = k + BLOCK_K >= tile.end ? LAST : 0;
                describe_step(smem + STEPS + ring.slot * (int)sizeof(Step), tile, k, terms ? last : LAST | NO_TERMS);
                if (terms) {
                    bar_expect(bar, OPERAND_BYTES);
                    load_a(step, a_map, k, tile.row, bar);
                    tma_load(step + A_BYTES, b_map, k, tile.column, WEIGHTS ? 0 : tile.group, 0, bar);
                } else {
                    bar_arrive(bar);
                }
            }
            scales.copy(smem + SCALES + ring.slot * SCALE_BYTES, bar, a.scale_a_block, a.scale_b_block, a.scale_b_row);
            ring.next(), k += BLOCK_K;
        } while (k < tile.end);
    }
    bar_wait(smem + EMPTY + 8 * ring.slot, ring.phase ^ 1);
    if (threadIdx.x == 0) {
        describe_step(smem + STEPS + ring.slot * (int)sizeof(Step), Tile{}, 0, STOP);
        bar_arrive(smem + FULL + 8 * ring.slot);
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem + FULL + 8 * ring.slot) : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// ---- Consumers ----------------------------------------------------------------------------------------------------

// Releases a stage to the producers of the cluster, after the whole warp has read it.
DEVICE void release(u32 smem, int slot) {
    fence_reads();  // of the scales
    arrive_at_all(smem + EMPTY + 8 * slot);
}

// A mask of the bits of bytes [at, at + 4) that belong to bytes [first, end).
DEVICE u32 kept_bits(int at, int first, int end) {
    const int below = min(max(first - at, 0), 4), above = min(max(at + 4 - end, 0), 4);
    const u32 low = below == 4 ? 0 : ~0u << 8 * below, high = above == 4 ? 0 : ~0u >> 8 * above;
    return low & high;
}

// Zeroes all but bytes [first, end) of a row of 128, whose 16-byte vectors are swizzled by the row.
DEVICE void cut_row(u32 operand, int row, int first, int end) {
#pragma unroll 1
    for (int v = 0; v < 8; v++) {
        if (first <= 16 * v && 16 * v + 16 <= end) continue;
        const u32 at = operand + row * 128 + 16 * (v ^ row % 8);
        u32 w[4];
        asm volatile("ld.shared::cta.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(at) : "memory");
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] &= kept_bits(16 * v + 4 * i, first, end);
        asm volatile("st.shared::cta.v4.u32 [%0], {%1, %2, %3, %4};"
                     ::"r"(at), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
    }
}

// Zeroes all but K elements [first, end) of a K-block, in a consumer's rows of a and all of b. Both consumers write the
// same bytes to b, so that one may already execute wgmmas while the other still writes.
DEVICE void cut_step(u32 step, int first, int end, int consumer) {
    const int thread = threadIdx.x % 128;
    for (int row = thread; row < BLOCK_N; row += 128) cut_row(step + A_BYTES, row, first, end);
    if (thread < ROWS) cut_row(step, consumer * ROWS + thread, first, end);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    warpgroup_sync(1 + consumer);
}

// ---- Epilogue -----------------------------------------------------------------------------------------------------

DEVICE void exchange(u32& kept_low, u32& kept_high, int bit) {
    const bool high = threadIdx.x & bit;
    const u32 got = __shfl_xor_sync(~0u, high ? kept_low : kept_high, bit);
    if (high) kept_low = got;
    else kept_high = got;
}

// Four blocks of 8 columns of a row in 16 bits. Four lanes transpose their fragments by shuffles, so that each stores
// one block of 16 bytes.
DEVICE void store_halves(char* to, u32 (&w)[4], bool inside) {
    exchange(w[0], w[1], 1);
    exchange(w[2], w[3], 1);
    exchange(w[0], w[2], 2);
    exchange(w[1], w[3], 2);
    if (inside)
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                     ::"l"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
}

// Stores the rows of y that belong to the tile's group.
DEVICE void store_rows(const Problem& a, const Step& tile, const float (&sums)[SUMS], int consumer) {
    constexpr int BYTES = OUT32 ? 4 : 2;
    const int first = (OUT32 ? 2 : 8) * (threadIdx.x % 4);  // first column that this thread stores
    const int columns = a.cols - tile.column - first;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = row_of(consumer) + 8 * half;
        const bool inside = row < tile.rows;
        char* const out = a.out + ((u64)(tile.row + row) * a.cols + tile.column + first) * BYTES;
#pragma unroll
        for (int c = 0; c < BLOCK_N / 32; c++) {
            u32 w[4];
#pragma unroll
            for (int block = 0; block < 4; block++) {
                const int at = 4 * (4 * c + block) + 2 * half, column = 32 * c + 8 * block;
                if (!OUT32) w[block] = pack(sums[at], sums[at + 1]);
                else if (inside && column < columns) *(float2*)(out + column * BYTES) = {sums[at], sums[at + 1]};
            }
            if (!OUT32) store_halves(out + 32 * c * BYTES, w, inside && 32 * c < columns);
        }
    }
}

DEVICE void store_pair(u32 to, float x, float y) {
    asm volatile("st.shared::cta.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}

// Writes a consumer's accumulators into its boxes, whose 16-byte vectors are swizzled by the row. A vector of fp32 has
// the elements of two lanes. Odd rows write their vectors of 32 columns in another order. Otherwise the four rows that
// are stored at a time would have bank conflicts in pairs.
DEVICE void stage(u32 boxes, const float (&sums)[SUMS]) {
    const int quad = threadIdx.x % 4, row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const bool odd = row % 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 line = boxes + (row + 8 * half) * 128;
#pragma unroll
        for (int j = 0; j < BLOCK_N / 8; j++) {
            if (OUT32) {
                const int own = 4 * j + 2 * half, other = 4 * (j ^ 2) + 2 * half;
                const int vector = (2 * (j % 4) + quad / 2) ^ row % 8 ^ 4 * odd;
                const u32 to = line + j / 4 * BOX_BYTES + 16 * vector + 8 * (quad % 2);
                store_pair(to, odd ? sums[other] : sums[own], odd ? sums[other + 1] : sums[own + 1]);
            } else {
                const u32 to = line + j / 8 * BOX_BYTES + 16 * (j % 8 ^ row % 8) + 4 * quad;
                asm volatile("st.shared::cta.u32 [%0], %1;"
                             ::"r"(to), "r"(pack(sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1])) : "memory");
            }
        }
    }
}

// Stores a tile of a group's gradient by TMA, which clips at the bounds of the matrix. The boxes are free when TMA has
// read the previous tile.
DEVICE void store_boxes(const Problem& a, const TensorMap* map, const Step& tile, u32 boxes, const float (&sums)[SUMS],
                        int consumer) {
    const bool one = threadIdx.x % 128 == 0;
    if (one) bulk_wait_read();
    warpgroup_sync(1 + consumer);
    stage(boxes, sums);
    fence_async();
    warpgroup_sync(1 + consumer);
    if (one && consumer * ROWS < tile.rows) {
        for (int box = 0; box < BOXES && tile.column + box * BOX_COLUMNS < a.cols; box++)
            tma_store(map, boxes + box * BOX_BYTES, tile.column + box * BOX_COLUMNS, tile.row + consumer * ROWS,
                      tile.group);
        bulk_commit();
    }
}

// ---- A consumer's main loop ---------------------------------------------------------------------------------------

template <int N> DEVICE void clear(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = 0;
}

DEVICE int4 load_ints(u32 address) {
    int4 x;
    asm volatile("ld.shared::cta.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
    return x;
}

DEVICE int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// Issues the wgmmas of the next K-block and returns its flags. After the last one, and for a tile with an empty sum, it
// multiplies the stale contents of the stage, and the result is discarded: ptxas serialises wgmmas that are
// conditional.
DEVICE int start(float (&d)[SUMS], u32 smem, const Ring& ring, Turn& turn, int flags, int consumer) {
    const u32 operands = smem + ring.slot * OPERAND_BYTES;
    if (!(flags & STOP)) {
        bar_wait(smem + FULL + 8 * ring.slot, ring.phase);
        const int4 step = load_ints(smem + STEPS + ring.slot * (int)sizeof(Step));
        flags = uniform(step.z);
        if (WEIGHTS && !(flags & (NO_TERMS | STOP))) {
            const int first = uniform(step.x), end = uniform(step.y);
            if (first > 0 || end < BLOCK_K) cut_step(operands, first, end, consumer);
        }
    }
    turn.wait();
    multiply<SUMS * 2>(d, operands, consumer, false);
    return flags;
}

DEVICE void finish_tile(const Problem& a, const TensorMap* out_map, u32 smem, const Step& tile, float (&sums)[SUMS],
                        int consumer) {
    if (tile.flags & NO_TERMS) clear(sums);
    if (WEIGHTS) store_boxes(a, out_map, tile, smem + STAGING + consumer * BOXES * BOX_BYTES, sums, consumer);
    else store_rows(a, tile, sums, consumer);
    clear(sums);
}

DEVICE void consume(const Problem& a, const TensorMap* out_map, u32 smem, int consumer) {
    const int row = row_of(consumer);
    Ring ring;
    Turn turn(smem + TURN, consumer);
    float sums[SUMS], d[SETS][SUMS];
    clear(sums);
    bool passed = false;  // whether the turn of the last start() was passed on
    int flags = start(d[0], smem, ring, turn, 0, consumer);
#pragma unroll 1
    while (!(flags & STOP)) {
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            const int slot = ring.slot, own = flags;
            const bool there = set == 0 || !(own & STOP);
            const u32 scales = smem + SCALES + slot * SCALE_BYTES, about = smem + STEPS + slot * (int)sizeof(Step);
            ring.next();
            if (TURNS) wgmma_wait<1>();
            if (!passed) turn.pass();
            passed = false;
            const RowScales rows = load_row_scales(scales, row);
            wgmma_wait<0>();
            pin(d[set]);
            if (SETS == 2) flags = start(d[1 - set], smem, ring, turn, own, consumer);
            promote(sums, d[set], rows, scales);
            Step tile;
            if (there) {
                const int4 place = load_ints(about + 16);
                tile = {0, 0, own, load_ints(about).w, place.x, place.y, place.z, 0};
                release(smem, slot);
            }
            if (SETS == 1) flags = start(d[0], smem, ring, turn, own, consumer);
            if (there && own & LAST) {
                turn.pass(), passed = true;  // so that the other consumer does not wait for the epilogue
                finish_tile(a, out_map, smem, tile, sums, consumer);
            }
        }
    }
    wgmma_wait<0>();
    if (!passed) turn.pass();  // the other consumer's last start(), whose result is unused, waits for it
    if (WEIGHTS) bulk_wait_read();
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
grouped_gemm_fp8_products(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                          const __grid_constant__ TensorMap out_map, const __grid_constant__ Problem problem) {
    extern __shared__ __align__(1024) char shared[];
    const u32 smem = (u32)__cvta_generic_to_shared(shared);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            bar_init(smem + FULL + 8 * s, 1 + 128);
            bar_init(smem + EMPTY + 8 * s, 4 * CONSUMERS * CLUSTER);
        }
        for (int c = 0; c < CONSUMERS; c++) bar_init(smem + TURN + 8 * c, 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    cluster_sync();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        produce(problem, &a_map, &b_map, smem);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        consume(problem, &out_map, smem, group - 1);
    }
    __syncwarp();
    cluster_sync();
}
