// A copy of parts/sm90/heads.cuh, made by `nox -s vendor`: change it there.
// K feed-forward layers of one input for Hopper (sm_90a): y[r, g] = w2[g] · act(w1[g] · x[r]), with an epilogue.
//
// Back-of-the-envelope estimate for 128 rows and 128 columns of the hidden, D = 512, in cycles of an SM:
//   tensor cores   2 · 128 · 128 · 512 FLOP at 4096 a cycle                               4096
//   activation     2 special functions (ex2, rcp) for each of 16384, 16 a cycle           2048, and 700 to issue
//   shared memory  128 KiB of w1 written once and read by two warpgroups, 128 bytes/cycle 3072
//   L2             128 KiB of w1, by two CTAs                                             16 bytes a cycle
// So the tensor cores are the bound if activations overlap wgmmas, and if x is not read from shared memory.
//
// A CTA is a producer warpgroup and two consumer warpgroups, with 64 rows of x each, in registers: 128 for D = 512.
// Each processes every block of 128 columns of the hidden: wgmmas with 64 accumulator registers in fp32, the
// activation, and the GEMM with w2 by mma.sync. The latter's first operand has the layout of the accumulators, and its
// O columns are padded to 8: 4 registers, accumulated over a head. With addresses and counters these are some 210 of
// 232 registers. No accumulator is shared between warpgroups, so that the order of each sum is fixed.
//
// Ping-pong, ordered by named barriers: one warpgroup issues the wgmmas of a block, 2048 cycles, while the other
// applies the activation, some 1300 cycles. The second is one block behind the first, and both read the same w1 in
// shared memory: the circular buffer of STAGES pipeline stages, K-blocks of 64 of D, holds a block for the second and
// what is loaded in advance for the first.
//
// Warp 0 of the producer warpgroup fills the circular buffer by TMA: at the start of a unit of work 128 rows of x, then
// w1. CTAs of a cluster have vertically adjacent tiles, and each multicasts its share of w1. TMA reads zeros out of
// bounds. Warp 1 copies w2, whose rows may start on any boundary, into a second circular buffer, of 128 columns a
// stage, in the order in which a thread of mma.sync reads them.
//
// A unit of work is CLUSTER vertically adjacent tiles of rows and a group of heads. CTAs are persistent and process
// every gridDim-th unit. Units of the same rows follow each other, so that x comes from L2.
//
// Barriers, with their arrivals per phase: full[s] 1 and the bytes of a stage; empty[s] 8 from each CTA of the cluster,
// one lane of each consumer warp; w2_full[s] 32, w2_empty[s] 8. Free of deadlock: all process the same K-blocks in the
// same order, and STAGES is more than the K-blocks of a block.
//
// Defined by the launcher: ACTIVATION, FP16, STEPS (K-blocks: 64 columns of x each), TAIL (columns of a head's last
// block: 32, 64, 96 or 128), STAGES, CLUSTER.
#pragma once

#include "heads_loop.cuh"

constexpr int W2_SLOTS = 4, W2_BYTES = BLOCK_H * BLOCK_O * 2, W2 = BEHIND_RING;
constexpr int W2_FULL = W2 + W2_SLOTS * W2_BYTES, W2_EMPTY = W2_FULL + 8 * W2_SLOTS;

struct Heads {
    const u16* w2;
    u64 stride_g, stride_o, stride_h;  // of w2, in elements
    int rows, heads, hidden, dim_out;
    int unit_heads;                    // heads of a unit of work
};

// ---- Units of work ------------------------------------------------------------------------------------------------

struct Unit {
    int row, group, first, last;  // this CTA's first row; group of heads, and its heads
};

DEVICE int groups_of(const Heads& p) { return (p.heads + p.unit_heads - 1) / p.unit_heads; }
DEVICE int units_of(const Heads& p) {
    return groups_of(p) * (int)(((u32)p.rows + CLUSTER * BLOCK_M - 1) / (CLUSTER * BLOCK_M));
}
DEVICE int blocks_of(const Heads& p) { return (p.hidden + BLOCK_H - 1) / BLOCK_H; }

DEVICE Unit find_unit(const Heads& p, int place) {
    const int groups = groups_of(p), group = place % groups, first = group * p.unit_heads;
    return {(place / groups * CLUSTER + cluster_rank()) * BLOCK_M, group, first, min(first + p.unit_heads, p.heads)};
}

// ---- Producers ----------------------------------------------------------------------------------------------------

// One thread: x and w1.
DEVICE void produce(const Heads& p, const TensorMap* x_map, const TensorMap* w1_map, u32 smem) {
    const int units = units_of(p), blocks = blocks_of(p);
    Ring<STAGES> ring;
    for (int place = blockIdx.x / CLUSTER; place < units; place += gridDim.x / CLUSTER) {
        const Unit unit = find_unit(p, place);
        load_rows<false>(ring, x_map, unit.row, 0, smem);
        for (int head = unit.first; head < unit.last; head++)
            for (int block = 0; block < blocks; block++) load_rows<true>(ring, w1_map, block * BLOCK_H, head, smem);
    }
}

// Copies 32 columns of w2 into shared memory, with zeros past O and H. Lane 4 n + q copies elements 8 i + 2 q and the
// next of row n of w2 (column n of the result), which are its operands of two mmas. `from` points to its first element;
// `left` elements of the row remain from there on.
DEVICE void copy_w2(const u16* from, u64 stride, int left, u32 to) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 low = 8 * i < left ? from[8 * i * stride] : 0;
        const u32 high = 8 * i + 1 < left ? from[(8 * i + 1) * stride] : 0;
        words[i] = low | high << 16;
    }
    store_vector(to, words);
}

// One warp: w2.
DEVICE void produce_w2(const Heads& p, u32 smem) {
    const int units = units_of(p), lane = threadIdx.x % 32, out = lane / 4, column = lane % 4 * 2;
    Ring<W2_SLOTS> ring;
    for (int place = blockIdx.x / CLUSTER; place < units; place += gridDim.x / CLUSTER) {
        const Unit unit = find_unit(p, place);
        for (int head = unit.first; head < unit.last; head++) {
            const u16* from = p.w2 + head * p.stride_g + out * p.stride_o + column * p.stride_h;
            int left = out < p.dim_out ? p.hidden - column : 0;
            for (int block = 0; block < blocks_of(p); block++, ring.next()) {
                bar_wait(smem + W2_EMPTY + 8 * ring.slot, ring.phase ^ 1);
                u32 to = smem + W2 + ring.slot * W2_BYTES + lane * 16;
#pragma unroll 1
                for (int part = 0; part < BLOCK_H / 32; part++, left -= 32, from += 32 * p.stride_h, to += W2_BYTES / 4)
                    copy_w2(from, p.stride_h, left, to);
                bar_arrive(smem + W2_FULL + 8 * ring.slot);
            }
        }
    }
}

// ---- Consumers ----------------------------------------------------------------------------------------------------

// out += act(d) w2ᵀ, for a block from column `first` of the hidden on. LAST: some columns may be past `hidden`. Their
// accumulators are zero, but NaN where x is not finite.
template <int SUMS, bool LAST>
DEVICE void activate_and_multiply(float (&out)[4], float (&d)[SUMS], Consumer& c, Ring<W2_SLOTS>& ring, int first,
                                  int hidden) {
    const int lane = threadIdx.x % 32;
    bar_wait(c.smem + W2_FULL + 8 * ring.slot, ring.phase);
#pragma unroll
    for (int part = 0; part < SUMS / 16; part++) {
        u32 b[4];
        load_vector(b, c.smem + W2 + ring.slot * W2_BYTES + (32 * part + lane) * 16);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 a[4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int block = 4 * part + 2 * half + i;  // of 8 columns
                float* z = d + 4 * block;
                if (LAST) {
                    const int column = first + 8 * block + lane % 4 * 2;
                    if (column >= hidden) z[0] = z[2] = 0;
                    if (column + 1 >= hidden) z[1] = z[3] = 0;
                }
                a[2 * i] = pack(activate(z[0]), activate(z[1]));
                a[2 * i + 1] = pack(activate(z[2]), activate(z[3]));
            }
            mma(out, a, b[2 * half], b[2 * half + 1]);
        }
    }
    // The last reads may be in flight: stores of threads, unlike writes of TMA, are ordered after them. No fence_reads.
    __syncwarp();
    if (lane == 0) bar_arrive(c.smem + W2_EMPTY + 8 * ring.slot);
    ring.next();
}

template <int SUMS, bool LAST>
DEVICE void add_block(float (&out)[4], const u32 (&x)[16 * STEPS], Consumer& c, Ring<W2_SLOTS>& w2, int first,
                      int hidden) {
    float d[SUMS];
    multiply(d, x, c, [] {});
    activate_and_multiply<SUMS, LAST>(out, d, c, w2, first, hidden);
}

// `finish(unit, head, row, out)` is called by whole warps: a thread has the results of columns 2 (lane % 4) and the
// next of two rows, {row, row, row + 8, row + 8}. Heads of a unit come in order.
template <class Epilogue> DEVICE void consume(const Heads& p, const Epilogue& finish, u32 smem, int group) {
    const int units = units_of(p), tail = (blocks_of(p) - 1) * BLOCK_H;
    Consumer c{smem, group};
    Ring<W2_SLOTS> w2;
    for (int place = blockIdx.x / CLUSTER; place < units; place += gridDim.x / CLUSTER) {
        const Unit unit = find_unit(p, place);
        const int row = unit.row + group * ROWS + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
        u32 x[16 * STEPS];
        keep_rows(x, c);
        for (int head = unit.first; head < unit.last; head++) {
            float out[4] = {0, 0, 0, 0};
#pragma unroll 1
            for (int first = 0; first < tail; first += BLOCK_H)
                add_block<BLOCK_H / 2, false>(out, x, c, w2, first, p.hidden);
            add_block<TAIL / 2, true>(out, x, c, w2, tail, p.hidden);
            finish(unit, head, row, out);
            __syncwarp();
        }
    }
}

template <class Epilogue>
DEVICE void heads_forward(const Heads& p, const TensorMap* x_map, const TensorMap* w1_map, const Epilogue& finish) {
    extern __shared__ __align__(1024) char shared[];
    const u32 smem = (u32)__cvta_generic_to_shared(shared);
    if (threadIdx.x == 0) {
        init_ring(smem);
        for (int s = 0; s < W2_SLOTS; s++) {
            bar_init(smem + W2_FULL + 8 * s, 32);
            bar_init(smem + W2_EMPTY + 8 * s, 4 * CONSUMERS);
        }
    }
    run_roles<40, 232>(
        [&](int warp) {
            if (threadIdx.x == 0) produce(p, x_map, w1_map, smem);
            else if (warp == 1) produce_w2(p, smem);
        },
        [&](int group) { consume(p, finish, smem, group); });
}
