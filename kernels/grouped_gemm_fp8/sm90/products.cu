// Grouped products of fp8 for Hopper (sm_90a): TMA, wgmma, warp specialisation, persistent. products.py compiles and
// launches.
//
//   WEIGHTS 0   out[r, n] = sum over k of a[r, k] b[g, n, k]                the rows r of each group g
//               scales of 1x128 of a and 128x128 of b
//   WEIGHTS 1   out[g, m, n] = sum over the rows r of group g of a[m, r] b[n, r]
//               scales of 1x128 of both, blocks of r counted from row 0 of the whole tensor
//
// Napkin maths for a step of 128 terms of a tile of 128 x 128, in cycles of an SM: the tensor cores take 512 (8192 FLOP
// a cycle, dense), and 32 KiB come from L2, 64 bytes a cycle. The 64 fp32 additions a thread are 128 issue slots of each
// scheduler, which the other consumer's wgmmas overlap with.
//
// A CTA is a producer warpgroup and two consumer warpgroups with 64 rows of the tile each. Thread 0 of the producer
// fills a ring of STAGES steps by TMA; all of its threads copy the scales of that step, one row and one column each, by
// cp.async. A consumer keeps two sets of 64 x 128 sums: the tensor cores', of one step, and fp32 ones, to which these
// are added with their scales.
//
// Ragged edges:
//  - a tile with at most 64 rows leaves the second consumer idle;
//  - what lies beyond a tensor is read as zeros by TMA, and scales of what is not there as zeros by cp.async;
//  - rows of the next group that a tile reads only reach sums that are not stored. As a *sum* runs over rows with
//    WEIGHTS, there a step begins at a multiple of 128, where its scales do, and what it has of other groups is
//    overwritten by zeros in shared memory, in both operands, for 0 times NaN is NaN. Only the first and the last step
//    of a group have such rows, and where groups begin at multiples of 128 none has.
//
// Barriers, with their arrivals per phase: full[s] 1 and the bytes of a step, and 128 that cp.async makes when its
// copies are there; empty[s] 8, one lane of each consumer warp. The n-th use of a full one waits for parity n & 1, that
// of an empty one for the opposite, so that the first pass finds every slot empty. No consumer waits for another, and
// the producer only for both: free of deadlock.
//
// Defined by the launcher: WEIGHTS, A_E4M3, B_E4M3, OUT32 (out is fp32; else FP16 or bf16), STAGES, RASTER.

#include "mbarrier.cuh"
#include "numbers.cuh"
#include "tiles.cuh"
#include "tma.cuh"
#include "wgmma.cuh"
#include "wgmma8.cuh"

constexpr int CONSUMERS = 2, ROWS = BLOCK_M / CONSUMERS, THREADS = 128 * (CONSUMERS + 1);
constexpr int SUMS = BLOCK_N / 2;  // of a thread
constexpr int A_BYTES = BLOCK_M * BLOCK_K, B_BYTES = BLOCK_N * BLOCK_K, OPERAND_BYTES = A_BYTES + B_BYTES;
constexpr int SCALE_A = OPERAND_BYTES, SCALE_B = SCALE_A + 4 * BLOCK_M;  // where scales lie in a step
constexpr int STEP_BYTES = SCALE_B + 4 * BLOCK_N;
constexpr int FULL = STAGES * STEP_BYTES, EMPTY = FULL + 8 * STAGES;  // where barriers lie
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
static_assert(STEP_BYTES % 1024 == 0, "operands with 128-byte swizzle begin at multiples of 1024");

struct Ring {
    int slot = 0;
    u32 phase = 0;
    DEVICE void next() {
        if (++slot == STAGES) slot = 0, phase ^= 1;
    }
};

// ---- Producer -----------------------------------------------------------------------------------------------------

// Copies one fp32 number, or writes zero.
DEVICE void copy_scale(u32 to, const float* from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(there ? 4 : 0) : "memory");
}

// This thread's row and, with WEIGHTS, column of the scales of a block of terms; else thread 0 has the tile's one of b.
DEVICE void copy_scales(const Problem& a, const Tile& tile, int block, u32 step, u32 bar) {
    const int thread = threadIdx.x;
    const u64 row = tile.row + thread, column = tile.column + thread;
    const bool row_there = thread < tile.rows, column_there = column < a.cols;
    const float* from_a = a.scale_a + block * a.scale_a_block;
    const float* from_b = a.scale_b + block * a.scale_b_block;
    copy_scale(step + SCALE_A + 4 * thread, row_there ? from_a + row * a.scale_a_row : from_a, row_there);
    if (WEIGHTS)
        copy_scale(step + SCALE_B + 4 * thread, column_there ? from_b + column * a.scale_b_row : from_b, column_there);
    else if (thread == 0)
        copy_scale(step + SCALE_B, from_b + tile.group * a.scale_b_group + tile.column / 128 * a.scale_b_row, true);
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

DEVICE void produce(const Problem& a, const TensorMap* a_map, const TensorMap* b_map, u32 smem) {
    const int tiles = tiles_of(a);
    Ring ring;
    for (int round = 0; round * gridDim.x < tiles; round++) {
        const int place = place_of(round);
        if (place >= tiles) continue;
        const Tile tile = find_tile(a, place);
#pragma unroll 1
        for (int k = first_step(tile); k < tile.end; k += BLOCK_K, ring.next()) {
            const u32 step = smem + ring.slot * STEP_BYTES, bar = smem + FULL + 8 * ring.slot;
            bar_wait(smem + EMPTY + 8 * ring.slot, ring.phase ^ 1);
            if (threadIdx.x == 0) {
                bar_expect(bar, OPERAND_BYTES);
                tma_load(step, a_map, k, tile.row, 0, 0, bar);
                tma_load(step + A_BYTES, b_map, k, tile.column, WEIGHTS ? 0 : tile.group, 0, bar);
            }
            copy_scales(a, tile, k / BLOCK_K, step, bar);
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// ---- Consumers ----------------------------------------------------------------------------------------------------

// Gives a slot back to the producer: the whole warp has read it.
DEVICE void release(u32 smem, int slot) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) bar_arrive(smem + EMPTY + 8 * slot);
}

// Which bits of the four bytes from `at` on belong to bytes [first, end).
DEVICE u32 kept_bits(int at, int first, int end) {
    const int below = min(max(first - at, 0), 4), above = min(max(at + 4 - end, 0), 4);
    const u32 low = below == 4 ? 0 : ~0u << 8 * below, high = above == 4 ? 0 : ~0u >> 8 * above;
    return low & high;
}

// Overwrites all but bytes [first, end) of a row of 128, whose 16-byte vectors are swizzled by the row.
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

// Overwrites all but terms [first, end) of a step, in a consumer's rows of a and all of b. Both consumers do the same to
// b, in any order: what one of them has cut, the other leaves as it is.
DEVICE void cut_step(u32 step, int first, int end, int consumer) {
    const int thread = threadIdx.x % 128;
    cut_row(step + A_BYTES, thread, first, end);
    if (thread < ROWS) cut_row(step, consumer * ROWS + thread, first, end);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, 128;" ::"r"(1 + consumer) : "memory");
}

// The wgmmas of one step for one consumer's 64 rows, from zero.
DEVICE void multiply(float (&d)[SUMS], u32 step, int consumer) {
    const u64 a = describe(step + consumer * (A_BYTES / CONSUMERS)), b = describe(step + A_BYTES);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < BLOCK_K / 32; i++) wgmma(d, a + i * (32 / 16), b + i * (32 / 16), i);
    wgmma_commit();
}

DEVICE float load_float(u32 address) {
    float x;
    asm volatile("ld.shared::cta.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}

DEVICE float2 load_pair(u32 address) {
    float2 x;
    asm volatile("ld.shared::cta.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
    return x;
}

// A thread has columns 8 j + 2 (lane % 4) and the next of rows lane / 4 and lane / 4 + 8 of its warp's 16.
DEVICE int row_of(int consumer) { return consumer * ROWS + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }

// sums += d, scaled by what lies in the step's shared memory and, without WEIGHTS, by the tile's one scale of b.
DEVICE void promote(float (&sums)[SUMS], const float (&d)[SUMS], u32 step, float high, float low) {
    const int quad = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < BLOCK_N / 8; j++) {
        const float2 b = WEIGHTS ? load_pair(step + SCALE_B + 4 * (8 * j + 2 * quad)) : float2{1, 1};
        sums[4 * j] += d[4 * j] * (high * b.x), sums[4 * j + 1] += d[4 * j + 1] * (high * b.y);
        sums[4 * j + 2] += d[4 * j + 2] * (low * b.x), sums[4 * j + 3] += d[4 * j + 3] * (low * b.y);
    }
}

// The tensor cores' sums of 128 terms, added in fp32.
DEVICE void sum_up(float (&sums)[SUMS], u32 smem, Ring& ring, const Tile& tile, int consumer) {
    const int row = row_of(consumer);
    float d[SUMS];
#pragma unroll 1
    for (int k = first_step(tile); k < tile.end; k += BLOCK_K, ring.next()) {
        const u32 step = smem + ring.slot * STEP_BYTES;
        bar_wait(smem + FULL + 8 * ring.slot, ring.phase);
        if (WEIGHTS && (k < tile.first || tile.end < k + BLOCK_K))
            cut_step(step, tile.first - k, tile.end - k, consumer);
        multiply(d, step, consumer);
        const float of_b = WEIGHTS ? 1 : load_float(step + SCALE_B);
        const float high = load_float(step + SCALE_A + 4 * row) * of_b;
        const float low = load_float(step + SCALE_A + 4 * row + 32) * of_b;
        wgmma_wait<0>();
        pin(d);
        promote(sums, d, step, high, low);
        release(smem, ring.slot);
    }
}

// A consumer without rows lets the steps pass.
DEVICE void skip(u32 smem, Ring& ring, const Tile& tile) {
#pragma unroll 1
    for (int k = first_step(tile); k < tile.end; k += BLOCK_K, ring.next()) {
        bar_wait(smem + FULL + 8 * ring.slot, ring.phase);
        release(smem, ring.slot);
    }
}

// ---- Epilogue -----------------------------------------------------------------------------------------------------

DEVICE void exchange(u32& kept_low, u32& kept_high, int bit) {
    const bool high = threadIdx.x & bit;
    const u32 got = __shfl_xor_sync(~0u, high ? kept_low : kept_high, bit);
    if (high) kept_low = got;
    else kept_high = got;
}

// Four blocks of 8 columns of a row in 16 bits. Four lanes exchange what they have of them, so that each stores one
// block: 16 bytes.
DEVICE void store_halves(char* to, u32 (&w)[4], bool inside) {
    exchange(w[0], w[1], 1);
    exchange(w[2], w[3], 1);
    exchange(w[0], w[2], 2);
    exchange(w[1], w[3], 2);
    if (inside)
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                     ::"l"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
}

DEVICE void store_tile(const Problem& a, const Tile& tile, const float (&sums)[SUMS], int consumer) {
    const int quad = threadIdx.x % 4, row = row_of(consumer);
    const u64 before = WEIGHTS ? (u64)tile.group * a.rows : 0;  // rows of out
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const bool inside = row + 8 * half < tile.rows;
        char* const out = a.out + (before + tile.row + row + 8 * half) * a.cols * (OUT32 ? 4 : 2);
#pragma unroll
        for (int c = 0; c < BLOCK_N / 32; c++) {
            const int first = tile.column + 32 * c;
            u32 w[4];
#pragma unroll
            for (int block = 0; block < 4; block++) {
                const int at = 4 * (4 * c + block) + 2 * half, column = first + 8 * block + 2 * quad;
                if (!OUT32) w[block] = pack(sums[at], sums[at + 1]);
                else if (inside && column < a.cols) *(float2*)(out + 4 * (u64)column) = {sums[at], sums[at + 1]};
            }
            if (!OUT32) store_halves(out + 2 * (u64)(first + 8 * quad), w, inside && first + 8 * quad < a.cols);
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
    float sums[SUMS];
    Tile tile = uniform(next_tile(a, 0, tiles));
    for (int round = 0; round * gridDim.x < tiles; round++) {
        const Tile next = next_tile(a, round + 1, tiles);  // its entry of the table is on its way during the main loop
        if (tile.rows <= consumer * ROWS) {
            skip(smem, ring, tile);
        } else {
#pragma unroll
            for (int i = 0; i < SUMS; i++) sums[i] = 0;
            sum_up(sums, smem, ring, tile, consumer);
            store_tile(a, tile, sums, consumer);
        }
        tile = uniform(next);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
grouped_gemm_fp8_products(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                          const __grid_constant__ Problem problem) {
    extern __shared__ __align__(1024) char shared[];
    const u32 smem = (u32)__cvta_generic_to_shared(shared);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            bar_init(smem + FULL + 8 * s, 1 + 128);
            bar_init(smem + EMPTY + 8 * s, 4 * CONSUMERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        produce(problem, &a_map, &b_map, smem);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        consume(problem, smem, group - 1);
    }
}
