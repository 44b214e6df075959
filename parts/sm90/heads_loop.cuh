// The main loop of the heads kernels for Hopper (sm_90a): a GEMM of 128 rows that stay in registers (operand a) with
// tiles of 128 rows that stream through shared memory (operand b), by two consumer warpgroups in ping-pong. heads.cuh
// says why.
//
// A CTA is a producer warpgroup and two consumer warpgroups. Each consumer keeps 64 rows of a, and multiplies them with
// every tile of b. The circular buffer has STAGES pipeline stages, K-blocks of 128 rows by 64 columns: at the start of
// a unit of work a passes through it, then the tiles of b, of which each CTA of a cluster multicasts its share. TMA
// reads zeros out of bounds.
//
// Its barriers, with their arrivals per phase: full[s] 1 and the bytes of a stage; empty[s] 8 from each CTA of the
// cluster, one lane of each consumer warp.
//
// Defined by the launcher: ACTIVATION, FP16, STEPS (K-blocks: 64 columns each), STAGES, CLUSTER.
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
constexpr int STEP_BYTES = BLOCK_M * BLOCK_K * 2;
constexpr int FULL = STAGES * STEP_BYTES, EMPTY = FULL + 8 * STAGES;  // offsets of the barriers
constexpr int BEHIND_RING = EMPTY + 8 * STAGES;
static_assert(BLOCK_M == BLOCK_H && STAGES > STEPS);

template <int SLOTS> struct Ring {
    int slot = 0;
    u32 phase = 0;
    DEVICE void next() {
        if (++slot == SLOTS) slot = 0, phase ^= 1;
    }
};

// ---- Producer -----------------------------------------------------------------------------------------------------

// By one thread: loads 128 rows into the circular buffer. SHARED: each CTA of the cluster multicasts its share of them.
template <bool SHARED> DEVICE void load_rows(Ring<STAGES>& ring, const TensorMap* map, int row, int head, u32 smem) {
    constexpr int SHARE = BLOCK_H / CLUSTER;
    const int share = SHARED ? cluster_rank() * SHARE : 0;
#pragma unroll 1
    for (int step = 0; step < STEPS; step++, ring.next()) {
        const u32 bar = smem + FULL + 8 * ring.slot, to = smem + ring.slot * STEP_BYTES + share * BLOCK_K * 2;
        bar_wait(smem + EMPTY + 8 * ring.slot, ring.phase ^ 1);
        bar_expect(bar, STEP_BYTES);
        if constexpr (SHARED) tma_multicast(to, map, step * BLOCK_K, row + share, bar, head);
        else tma_load(to, map, step * BLOCK_K, row, head, 0, bar);
    }
}

// ---- Consumers ----------------------------------------------------------------------------------------------------

struct Consumer {
    u32 smem;
    int group;
    Ring<STAGES> ring;
};

// Releases a stage: arrives on its empty barrier in each CTA of the cluster. The whole warp has read it.
DEVICE void release(u32 smem, int slot) { arrive_at_all(smem + EMPTY + 8 * slot); }

// Loads a warp's 16 rows of a in wgmma's layout of register operands: 4 registers for each 16 columns.
DEVICE void keep_rows(u32 (&x)[16 * STEPS], Consumer& c) {
    const int lane = threadIdx.x % 32, row = c.group * ROWS + threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < STEPS; step++, c.ring.next()) {
        const u32 at = c.smem + c.ring.slot * STEP_BYTES + row * 128;
        bar_wait(c.smem + FULL + 8 * c.ring.slot, c.ring.phase);
#pragma unroll
        for (int i = 0; i < BLOCK_K / 16; i++)
            load_blocks(x + 16 * step + 4 * i, at + ((2 * i + lane / 16 ^ row % 8) << 4));
        fence_reads();
        release(c.smem, c.ring.slot);
    }
}

// d = x bᵀ, b the first 2 SUMS rows of a tile, in ping-pong order. Calls meanwhile() while the last wgmmas run.
template <int SUMS, class Meanwhile>
DEVICE void multiply(float (&d)[SUMS], const u32 (&x)[16 * STEPS], Consumer& c, const Meanwhile& meanwhile) {
    int before = 0;
    named_wait(1 + c.group);
#pragma unroll
    for (int step = 0; step < STEPS; step++, c.ring.next()) {
        bar_wait(c.smem + FULL + 8 * c.ring.slot, c.ring.phase);
        const u64 b = describe(c.smem + c.ring.slot * STEP_BYTES, 0);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < BLOCK_K / 16; i++)
            wgmma_from_registers(d, x + 16 * step + 4 * i, b + i * (32 / 16), step + i > 0);
        wgmma_commit();
        if (step) {
            wgmma_wait<1>();
            release(c.smem, before);
        }
        before = c.ring.slot;
    }
    named_arrive(2 - c.group);
    meanwhile();
    wgmma_wait<0>();
    pin(d);
    release(c.smem, before);
}

// ---- Both ---------------------------------------------------------------------------------------------------------

// By one thread: initialises the barriers of the circular buffer.
DEVICE void init_ring(u32 smem) {
    for (int s = 0; s < STAGES; s++) {
        bar_init(smem + FULL + 8 * s, 1);
        bar_init(smem + EMPTY + 8 * s, 4 * CONSUMERS * CLUSTER);
    }
}

// After one thread has initialised all barriers: `produce(warp)` by the producer warpgroup, `consume(group)` by the
// others, with these numbers of registers a thread.
template <int PRODUCER, int CONSUMER, class Produce, class Consume>
DEVICE void run_roles(const Produce& produce, const Consume& consume) {
    static_assert(PRODUCER + CONSUMERS * CONSUMER <= 504);
    if (threadIdx.x == 0) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();
    cluster_sync();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER));
        produce(warp);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER));
        if (group == 2) named_arrive(1);  // the first consumer begins the ping-pong
        consume(group - 1);
        if (group == 1) named_wait(1);  // for the last arrival of the other consumer
    }
    __syncwarp();
    cluster_sync();
}
