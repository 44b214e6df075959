// A copy of parts/sm90/heads.cuh, made by `nox -s vendor`: change it there.
// K feed-forward layers of one input for Hopper (sm_90a): y[r, g] = w2[g] · act(w1[g] · x[r]), with an epilogue.
//
// Napkin maths for 128 rows and 128 columns of the hidden, D = 512, in cycles of an SM:
//   tensor cores   2 · 128 · 128 · 512 FLOP at 4096 a cycle                               4096
//   activation     2 special functions (ex2, rcp) for each of 16384, 16 a cycle           2048, and 700 to issue
//   shared memory  128 KiB of w1 written once and read by two warpgroups, 128 bytes/cycle 3072
//   L2             128 KiB of w1, by two CTAs                                             16 bytes a cycle
// So the tensor cores bind if activations are overlapped with products, and if x is not read from shared memory.
//
// A CTA is a producer warpgroup and two consumer warpgroups, with 64 rows of x each, in registers: 128 for D = 512.
// Each takes every block of 128 columns of the hidden: 64 registers of fp32 sums by wgmma, the activation, and the
// product with w2 by mma.sync, whose first operand has the layout of the sums and whose O columns are padded to 8:
// 4 registers, which are summed over a head. With addresses and counters these are some 210 of 232 registers. No sum is shared between warpgroups, so that its order is fixed.
//
// The warpgroups take turns (named barriers): one issues the wgmmas of a block, 2048 cycles, while the other
// applies the activation, some 1300 cycles. The second is one block behind the first, and both read the same w1 in
// shared memory: the ring of STAGES steps of 64 of D holds a block for the second and what is loaded in advance for
// the first.
//
// Warp 0 of the producer warpgroup fills the ring by TMA: at the start of a unit of work 128 rows of x, then w1.
// CTAs of a cluster have tiles below each other and each loads its share of w1 for all of them. What lies beyond a
// tensor is read as zeros. Warp 1 copies w2, whose rows lie on any boundary, into slots of 128 columns, in the
// order in which a thread of mma.sync reads them.
//
// A unit of work is a tile of rows, CLUSTER below each other, and a group of heads; CTAs are persistent and take
// every gridDim-th unit. Those of the same rows follow each other, so that x comes from L2.
//
// Barriers, with their arrivals per phase: full[s] 1 and the bytes of a step; empty[s] 8 from each CTA of the
// cluster, one lane of each consumer warp; w2_full[s] 32, w2_empty[s] 8. All go through the same steps in the same
// order, and STAGES is more than the steps of a block: free of deadlock.
//
// Defined by the launcher: ACTIVATION, FP16, STEPS (64 columns of x each), TAIL (columns of a head's last block:
// 32, 64, 96 or 128), STAGES, CLUSTER.
#pragma once

#include "activation.cuh"
#include "cluster.cuh"
#include "heads_ptx.cuh"
#include "mbarrier.cuh"
#include "numbers.cuh"
#include "tma.cuh"
#include "wgmma.cuh"
#include "wgmma16.cuh"

constexpr int BLOCK_M = 128, BLOCK_H = 128, BLOCK_K = 64, BLOCK_O = 8;
constexpr int CONSUMERS = 2, ROWS = BLOCK_M / CONSUMERS, THREADS = 128 * (CONSUMERS + 1);
constexpr int STEP_BYTES = BLOCK_H * BLOCK_K * 2;  // of w1, and of x
constexpr int W2_SLOTS = 4, W2_BYTES = BLOCK_H * BLOCK_O * 2, W2 = STAGES * STEP_BYTES;
constexpr int FULL = W2 + W2_SLOTS * W2_BYTES, EMPTY = FULL + 8 * STAGES;  // where barriers lie
constexpr int W2_FULL = EMPTY + 8 * STAGES, W2_EMPTY = W2_FULL + 8 * W2_SLOTS;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
static_assert(BLOCK_M == BLOCK_H && STAGES > STEPS);

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

template <int SLOTS> struct Ring {
    int slot = 0;
    u32 phase = 0;
    DEVICE void next() {
        if (++slot == SLOTS) slot = 0, phase ^= 1;
    }
};

// ---- Producers ----------------------------------------------------------------------------------------------------

// One thread: x and w1.
DEVICE void produce(const Heads& p, const TensorMap* x_map, const TensorMap* w1_map, u32 smem) {
    constexpr int SHARE = BLOCK_H / CLUSTER;
    const int units = units_of(p), blocks = blocks_of(p), share = cluster_rank() * SHARE;
    Ring<STAGES> ring;
    for (int place = blockIdx.x / CLUSTER; place < units; place += gridDim.x / CLUSTER) {
        const Unit unit = find_unit(p, place);
#pragma unroll 1
        for (int step = 0; step < STEPS; step++, ring.next()) {
            const u32 bar = smem + FULL + 8 * ring.slot;
            bar_wait(smem + EMPTY + 8 * ring.slot, ring.phase ^ 1);
            bar_expect(bar, STEP_BYTES);
            tma_load(smem + ring.slot * STEP_BYTES, x_map, step * BLOCK_K, unit.row, 0, 0, bar);
        }
        for (int head = unit.first; head < unit.last; head++) {
            for (int block = 0; block < blocks; block++) {
#pragma unroll 1
                for (int step = 0; step < STEPS; step++, ring.next()) {
                    const u32 bar = smem + FULL + 8 * ring.slot;
                    bar_wait(smem + EMPTY + 8 * ring.slot, ring.phase ^ 1);
                    bar_expect(bar, STEP_BYTES);
                    tma_multicast(smem + ring.slot * STEP_BYTES + share * BLOCK_K * 2, w1_map, step * BLOCK_K,
                                  block * BLOCK_H + share, bar, head);
                }
            }
        }
    }
}

// 32 columns of w2 into shared memory, zeros beyond O and H: lane 4 n + q has of column n of the product (a row of
// w2) the elements 8 i + 2 q and the next, which are its operands of two mmas. `from` is its first, of which `left`
// are there.
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

struct Consumer {
    u32 smem;
    int group;
    Ring<STAGES> ring;
    Ring<W2_SLOTS> w2;
};

// Gives a slot back to the producers of the cluster: the whole warp has read it.
DEVICE void release(u32 smem, int slot) { arrive_at_all(smem + EMPTY + 8 * slot); }

// A warp's 16 rows of x as wgmma takes them from registers: 4 for each 16 columns.
DEVICE void load_x(u32 (&x)[16 * STEPS], Consumer& c) {
    const int lane = threadIdx.x % 32, row = c.group * ROWS + threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < STEPS; step++, c.ring.next()) {
        const u32 at = c.smem + c.ring.slot * STEP_BYTES + row * 128;
        bar_wait(c.smem + FULL + 8 * c.ring.slot, c.ring.phase);
#pragma unroll
        for (int i = 0; i < BLOCK_K / 16; i++)
            load_blocks(x + 16 * step + 4 * i, at + ((2 * i + lane / 16 ^ row % 8) << 4));
        __syncwarp();
        release(c.smem, c.ring.slot);
    }
}

// d = x w1ᵀ of a block's first 2 SUMS columns, in this warpgroup's turn.
template <int SUMS> DEVICE void multiply(float (&d)[SUMS], const u32 (&x)[16 * STEPS], Consumer& c) {
    int before = 0;
    named_wait(1 + c.group);
#pragma unroll
    for (int step = 0; step < STEPS; step++, c.ring.next()) {
        bar_wait(c.smem + FULL + 8 * c.ring.slot, c.ring.phase);
        const u64 w1 = describe(c.smem + c.ring.slot * STEP_BYTES, 0);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < BLOCK_K / 16; i++)
            wgmma_from_registers(d, x + 16 * step + 4 * i, w1 + i * (32 / 16), step + i > 0);
        wgmma_commit();
        if (step) {
            wgmma_wait<1>();
            release(c.smem, before);
        }
        before = c.ring.slot;
    }
    named_arrive(2 - c.group);
    wgmma_wait<0>();
    pin(d);
    release(c.smem, before);
}

// out += act(d) w2ᵀ, of a block from column `first` of the hidden on. LAST: columns beyond `hidden` may be among
// them. Their sums are zero, but NaN where x is not finite.
template <int SUMS, bool LAST>
DEVICE void activate_and_multiply(float (&out)[4], float (&d)[SUMS], Consumer& c, int first, int hidden) {
    const int lane = threadIdx.x % 32;
    bar_wait(c.smem + W2_FULL + 8 * c.w2.slot, c.w2.phase);
#pragma unroll
    for (int part = 0; part < SUMS / 16; part++) {
        u32 b[4];
        load_vector(b, c.smem + W2 + c.w2.slot * W2_BYTES + (32 * part + lane) * 16);
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
    __syncwarp();
    if (lane == 0) bar_arrive(c.smem + W2_EMPTY + 8 * c.w2.slot);
    c.w2.next();
}

template <int SUMS, bool LAST>
DEVICE void add_block(float (&out)[4], const u32 (&x)[16 * STEPS], Consumer& c, int first, int hidden) {
    float d[SUMS];
    multiply(d, x, c);
    activate_and_multiply<SUMS, LAST>(out, d, c, first, hidden);
}

// `finish(unit, head, row, out)` is called by whole warps: a thread has the sums of columns 2 (lane % 4) and the
// next of two rows, {row, row, row + 8, row + 8}. Heads of a unit come in order.
template <class Epilogue> DEVICE void consume(const Heads& p, const Epilogue& finish, u32 smem, int group) {
    const int units = units_of(p), tail = (blocks_of(p) - 1) * BLOCK_H;
    Consumer c{smem, group};
    if (group == 1) named_arrive(1);  // the first turn is the first's
    for (int place = blockIdx.x / CLUSTER; place < units; place += gridDim.x / CLUSTER) {
        const Unit unit = find_unit(p, place);
        const int row = unit.row + group * ROWS + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
        u32 x[16 * STEPS];
        load_x(x, c);
        for (int head = unit.first; head < unit.last; head++) {
            float out[4] = {0, 0, 0, 0};
#pragma unroll 1
            for (int first = 0; first < tail; first += BLOCK_H)
                add_block<BLOCK_H / 2, false>(out, x, c, first, p.hidden);
            add_block<TAIL / 2, true>(out, x, c, tail, p.hidden);
            finish(unit, head, row, out);
            __syncwarp();
        }
    }
    if (group == 0) named_wait(1);  // for the last turn that the other has given
}

template <class Epilogue>
DEVICE void heads_forward(const Heads& p, const TensorMap* x_map, const TensorMap* w1_map, const Epilogue& finish) {
    extern __shared__ __align__(1024) char shared[];
    const u32 smem = (u32)__cvta_generic_to_shared(shared);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            bar_init(smem + FULL + 8 * s, 1);
            bar_init(smem + EMPTY + 8 * s, 4 * CONSUMERS * CLUSTER);
        }
        for (int s = 0; s < W2_SLOTS; s++) {
            bar_init(smem + W2_FULL + 8 * s, 32);
            bar_init(smem + W2_EMPTY + 8 * s, 4 * CONSUMERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    cluster_sync();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (threadIdx.x == 0) produce(p, x_map, w1_map, smem);
        else if (warp == 1) produce_w2(p, smem);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        consume(p, finish, smem, group - 1);
    }
    __syncwarp();
    cluster_sync();
}
