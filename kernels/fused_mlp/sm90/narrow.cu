// GEMMs of fused_mlp with small K (at most 512) and an activation in the epilogue, for Hopper (sm_90a): TMA, wgmma,
// warp-specialised, persistent. narrow.py compiles and launches them.
//
//   EPILOGUE 0  ACT     pre = a b + bias; hidden = act(pre)
//            1  GATE    pre = a b + bias, gate = a b_more; hidden = act(gate) pre
//            2  DACT    dh = a b; from it and pre: dpre, hidden
//            3  DGATE   the same from pre and gate: dpre, dgate, hidden
//
// Back-of-the-envelope estimate for 128 x 128 elements of the result with K = 512, in cycles of an SM:
//   tensor cores   2 * 128 * 128 * 512 FLOP at 4096 a cycle                                             4096
//   epilogue       SiLU: ex2 and rcp of 16384 elements at 16 a cycle; some 800 instructions of 8 warps  2048
//   shared memory  b written once and read by two warpgroups, 384 KiB at 128 bytes a cycle              3072
//                  64 KiB for each tensor that is stored or loaded                                      512 each
//   L2             128 KiB of b, by two CTAs: 16 bytes a cycle; 8 for each tensor
// So ACT is bound by the tensor cores, if epilogues overlap wgmmas and a is not read from shared memory. Shared memory
// is busy for 3584 cycles, 4096 where pre is stored, and 4608 in DACT. 205 000 rows of 1376 columns are 289 GFLOP, 366
// us at 790 TFLOP/s. ACT moves 0.8 GB. With pre it moves 1.3 GB, 390 us where writes reach 3308 GB/s (a fill) and reads
// 4167, and DACT moves 1.9 GB, 530 us: these are bound by memory.
//
// A CTA is a producer warpgroup and two consumer warpgroups, each with 64 rows of a in registers: 128 registers for K =
// 512. A consumer computes all columns of the result, a block of COLUMNS at a time, in 64 accumulator registers.
// Ping-pong, ordered by named barriers: one runs its main loop, 2048 cycles, while the other runs its epilogue, which
// begins with the wait for its last wgmmas and has 1792 of them. The second consumer reads the same stages of b one
// main loop later, so that the circular buffer of b holds a block and what is loaded in advance: STAGES >= STEPS.
//
// Blocks are numbered along the columns of CLUSTER vertically adjacent row tiles, then along the next ones. A cluster
// processes a contiguous range of blocks: ranges differ by one block at most, and each row tile of a is loaded once or
// twice.
//
// TMA stores the results and loads pre and gate through one tile per tensor in shared memory, with 128-byte swizzle;
// stmatrix and ldmatrix have the layout of the accumulators. dpre overwrites the tile of pre, dgate that of gate.
//
// The producer warpgroup: warp 0 fills the circular buffer of b, of which each CTA of a cluster multicasts its share,
// and prefetches the next rows of a into L2; warp 1 fills that of a with 64 rows of the first consumer, then of the
// second; warps 2 and 3 load and store the tiles of one consumer each.
//
// The consumers of a forward first copy w2 to rows with a pitch, where the next GEMM needs that.
//
// TMA reads zeros out of bounds and does not write there: rows need no masks. Columns from `cols` to the pitch are
// written as zeros, because they are part of the next GEMM's K.
//
// Barriers, with their arrivals per phase: full[s] 1 and the bytes of a stage; empty[s] 8 from each CTA of the cluster,
// one lane of each consumer warp; a_full[g][s] 1 and the bytes of a panel, for each consumer g, because neither takes
// part in the other's uses of a stage; a_empty[s] 4; ready[g] 1 and the bytes of loaded tensors: the tiles of consumer
// g are free, or loaded; staged[g] 4: they are written. Named barriers 1 and 2 order the main loops, 3 and 4
// synchronise a consumer after it has written its bias. Free of deadlock: both consumers process the same K-blocks in
// the same order, and a block has at most STAGES of them.
//
// narrow_layout.cuh has the shared memory layout and the order of blocks, narrow_epilogue.cuh the epilogues.
//
// Defined by the launcher: EPILOGUE, ACTIVATION, FP16, STEPS (K-blocks, of 64), STAGES (pipeline stages of b), A_STAGES
// (of a), CLUSTER, COLUMNS (64, or 128 of one weight), B_TRANS (b is N-major), BIAS, STORES (bit i: tensor i is stored,
// in the order above), TAIL (columns of the last block, a multiple of 32). Here `slot` is a pipeline stage.

#include "cluster.cuh"
#include "heads_ptx.cuh"
#include "mbarrier.cuh"
#include "narrow_epilogue.cuh"
#include "narrow_layout.cuh"
#include "numbers.cuh"
#include "tma.cuh"
#include "wgmma.cuh"
#include "wgmma16.cuh"

// ---- Producers, one thread each -----------------------------------------------------------------------------------

DEVICE void prefetch(const TensorMap* map, int column, int row) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1,%2,%3,%3}];"
                 ::"l"(map), "r"(column), "r"(row), "r"(0) : "memory");
}

// Multicasts this CTA's share of a K-block of one weight.
DEVICE void load_weight(const TensorMap* map, int column, int k, u32 to, u32 bar) {
    if (B_TRANS) {
        constexpr int SHARE = BLOCK_K / CLUSTER;
        const int share = SHARE * cluster_rank();
#pragma unroll
        for (int i = 0; i < COLUMNS; i += 64)
            tma_multicast(to + i * BLOCK_K * 2 + share * 128, map, column + i, k + share, bar);
    } else {
        constexpr int SHARE = COLUMNS / CLUSTER;
        const int share = SHARE * cluster_rank();
        tma_multicast(to + share * 128, map, k, column + share, bar);
    }
}

DEVICE void produce_b(const Problem& p, const Maps& maps, u32 smem) {
    const Range range = range_of(p);
    Ring ring;
    for (int block = range.first; block < range.last; block++) {
        const int column = block % range.columns * COLUMNS, next = block + AHEAD;
        if (next % range.columns == 0 && next < range.last)
            for (int i = 0; i < CONSUMERS * STEPS; i++)
                prefetch(maps.a, i / CONSUMERS * BLOCK_K, row_of(next / range.columns) + i % CONSUMERS * ROWS);
#pragma unroll 1
        for (int step = 0; step < STEPS; step++, ring.next()) {
            const u32 to = smem + ring.slot * STEP_BYTES, bar = smem + FULL + 8 * ring.slot;
            bar_wait(smem + EMPTY + 8 * ring.slot, ring.phase ^ 1);
            bar_expect(bar, STEP_BYTES);
            load_weight(maps.b, column, step * BLOCK_K, to, bar);
            if (WEIGHTS == 2) load_weight(maps.b_more, column, step * BLOCK_K, to + WEIGHT_BYTES, bar);
        }
    }
}

DEVICE void produce_a(const Problem& p, const Maps& maps, u32 smem) {
    const Range range = range_of(p);
    const int last = (range.last - 1) / range.columns;
    u32 count = 0;
    for (int band = range.first / range.columns; band <= last; band++) {
#pragma unroll 1
        for (int i = 0; i < CONSUMERS * STEPS; i++, count++) {
            const u32 slot = count % A_STAGES, bar = smem + A_FULL + 8 * (i / STEPS * A_STAGES + slot);
            bar_wait(smem + A_EMPTY + 8 * slot, count / A_STAGES % 2 ^ 1);
            bar_expect(bar, PANEL);
            tma_load(smem + A_RING + slot * PANEL, maps.a, i % STEPS * BLOCK_K, row_of(band) + i / STEPS * ROWS, 0, 0,
                     bar);
        }
    }
}

// Loads and stores a consumer's epilogue tiles.
DEVICE void carry_tiles(const Problem& p, const Maps& maps, u32 smem, int group) {
    const Range range = range_of(p);
    const u32 ready = smem + READY + 8 * group, tiles = smem + TILE + group * TILES * TILE_BYTES;
    u32 phase = 0;
    for (int block = range.first; block < range.last; block++, phase ^= 1) {
        const int row = row_of(block / range.columns) + group * ROWS, column = block % range.columns * COLUMNS;
        if (LOADED) {
            const int next_row = row_of((block + 1) / range.columns) + group * ROWS;
            const int next_column = (block + 1) % range.columns * COLUMNS;
            bar_expect(ready, LOADED * TILE_BYTES);
#pragma unroll
            for (int i = 0; i < LOADED; i++)
#pragma unroll
                for (int j = 0; j < COLUMNS; j += 64) {
                    tma_load(tiles + i * TILE_BYTES + j / 64 * PANEL, maps.read[i], column + j, row, 0, 0, ready);
                    if (block + 1 < range.last) prefetch(maps.read[i], next_column + j, next_row);
                }
        } else {
            bar_arrive(ready);
        }
        bar_wait(smem + STAGED + 8 * group, phase);
#pragma unroll
        for (int i = 0; i < TENSORS; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS; j += 64)
                if (stored(i) && column + j < p.pitch)
                    tma_store(maps.written[i], tiles + place_of(i) * TILE_BYTES + j / 64 * PANEL, column + j, row, 0);
        bulk_commit();
        bulk_wait_read();
    }
}

// ---- Consumers ----------------------------------------------------------------------------------------------------

// Releases a stage of b: arrives on its empty barrier in each CTA of the cluster. The warp has waited for the wgmmas
// that read it, and nothing else reads it: no fence_reads.
DEVICE void release(u32 smem, int slot) { arrive_at_all(smem + EMPTY + 8 * slot); }

// A consumer's position in the circular buffer of a. Bit s of `phases` is the parity of its next use of stage s.
struct RowRing {
    u32 bands = 0, phases = 0;
};

// Loads a warp's 16 rows of a in wgmma's layout of register operands: 4 registers for each 16 columns.
DEVICE void keep_rows(u32 (&a)[16 * STEPS], u32 smem, int group, RowRing& ring) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const u32 slot = ((ring.bands * CONSUMERS + group) * STEPS + step) % A_STAGES;
        const u32 at = smem + A_RING + slot * PANEL + row * 128;
        bar_wait(smem + A_FULL + 8 * (group * A_STAGES + slot), ring.phases >> slot & 1);
        ring.phases ^= 1 << slot;
#pragma unroll
        for (int i = 0; i < BLOCK_K / 16; i++)
            load_blocks(a + 16 * step + 4 * i, at + ((2 * i + lane / 16 ^ row % 8) << 4));
        fence_async();  // TMA overwrites the stage next, through the async proxy
        fence_reads();
        if (lane == 0) bar_arrive(smem + A_EMPTY + 8 * slot);
    }
    ring.bands++;
}

// The main loop of a block, d = a b, in ping-pong order. Calls meanwhile() while the last wgmmas run.
template <int SUMS, class Meanwhile>
DEVICE void multiply(float (&d)[SUMS], const u32 (&a)[16 * STEPS], u32 smem, Ring& ring, int group,
                     const Meanwhile& meanwhile) {
    constexpr int B_STEP = B_TRANS ? 16 * 128 / 16 : 32 / 16;  // advance of b's descriptor for 16 of K
    constexpr int LAST = STEPS < IN_FLIGHT ? STEPS : IN_FLIGHT;  // K-blocks in flight after the loop
    named_wait(1 + group);
#pragma unroll
    for (int step = 0; step < STEPS; step++, ring.next()) {
        bar_wait(smem + FULL + 8 * ring.slot, ring.phase);
        const u64 b = describe(smem + ring.slot * STEP_BYTES, PANEL);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < BLOCK_K / 16; i++)
            wgmma_from_registers<SUMS, B_TRANS>(d, a + 16 * step + 4 * i, b + i * B_STEP, step + i > 0);
        wgmma_commit();
        if (step >= IN_FLIGHT) {
            wgmma_wait<IN_FLIGHT>();
            release(smem, ring.before(IN_FLIGHT));
        }
    }
    named_arrive(2 - group);
    meanwhile();
    wgmma_wait<0>();
    pin(d);
#pragma unroll
    for (int i = LAST; i > 0; i--) release(smem, ring.before(i));
}

// Computes one block, whose first column is `column`.
template <int COLS, bool LAST>
DEVICE void work(const Problem& p, const u32 (&a)[16 * STEPS], char* shared, u32 smem, Ring& ring, int group,
                 int column, u32 phase) {
    float* const bias = (float*)(shared + BIASES) + group * COLUMNS;
    float d[EPILOGUE == GATE ? COLUMNS : COLS / 2];
    multiply(d, a, smem, ring, group, [&] {
        const int mine = threadIdx.x % 128;
        if (BIAS && mine < COLUMNS)
            bias[mine] = column + mine < p.cols ? widen(p.bias[(column + mine) * p.bias_stride]) : 0.0f;
        bar_wait(smem + READY + 8 * group, phase);
    });
    if (BIAS) warpgroup_sync(3 + group);
    finish<COLS, LAST>(d, smem + TILE + group * TILES * TILE_BYTES, bias, p.cols - column);
    fence_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) bar_arrive(smem + STAGED + 8 * group);
}

// Copies this CTA's share of a weight to rows with a pitch, which the next GEMM reads. The consumers do it while the
// first rows and weights are loaded. A warp copies some pairs of columns of a row, whose loads are in flight together:
// 512 rows of 1376 columns are one iteration of 1024 of 1056 warps.
DEVICE void copy_weight(const Problem& p) {
    constexpr int EACH = 12, WARPS = 4 * CONSUMERS;  // EACH: pairs of columns of a lane
    const int pairs = p.pitch / 2, of_row = (pairs - 1) / (32 * EACH) + 1, warp = threadIdx.x / 32 - 4;
    const u64 units = (u64)p.copied_rows * of_row;
#pragma unroll 1
    for (u64 unit = blockIdx.x * WARPS + warp; unit < units; unit += gridDim.x * WARPS) {
        const u64 row = unit / of_row;
        const int first = (int)(unit % of_row) * 32 * EACH + threadIdx.x % 32;
        const u16* const from = p.copied + row * p.copied_strides[0];
        u32 values[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int column = 2 * (first + 32 * i);
            const u32 low = column < p.cols ? from[column * p.copied_strides[1]] : 0;
            const u32 high = column + 1 < p.cols ? from[(column + 1) * p.copied_strides[1]] : 0;
            values[i] = low | high << 16;
        }
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (first + 32 * i < pairs) ((u32*)(p.copy + row * p.pitch))[first + 32 * i] = values[i];
    }
}

DEVICE void consume(const Problem& p, char* shared, u32 smem, int group) {
    const Range range = range_of(p);
    Ring ring;
    RowRing rows;
    u32 a[16 * STEPS], phase = 0;
#pragma unroll 1
    for (int block = range.first; block < range.last; block++, phase ^= 1) {
        const int column = block % range.columns * COLUMNS;
        if (block == range.first || column == 0) keep_rows(a, smem, group, rows);
        if (column + COLUMNS < p.pitch) work<COLUMNS, false>(p, a, shared, smem, ring, group, column, phase);
        else work<TAIL, true>(p, a, shared, smem, ring, group, column, phase);
    }
}

// ---- Both ---------------------------------------------------------------------------------------------------------

DEVICE void init_barriers(u32 smem) {
    for (int s = 0; s < STAGES; s++) {
        bar_init(smem + FULL + 8 * s, 1);
        bar_init(smem + EMPTY + 8 * s, 4 * CONSUMERS * CLUSTER);
    }
    for (int s = 0; s < A_STAGES; s++) {
        for (int g = 0; g < CONSUMERS; g++) bar_init(smem + A_FULL + 8 * (g * A_STAGES + s), 1);
        bar_init(smem + A_EMPTY + 8 * s, 4);
    }
    for (int g = 0; g < CONSUMERS; g++) {
        bar_init(smem + READY + 8 * g, 1);
        bar_init(smem + STAGED + 8 * g, 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
fused_mlp_narrow(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                 const __grid_constant__ TensorMap b_more_map, const __grid_constant__ TensorMap pre_map,
                 const __grid_constant__ TensorMap gate_map, const __grid_constant__ TensorMap first_map,
                 const __grid_constant__ TensorMap second_map, const __grid_constant__ TensorMap third_map,
                 const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) char shared[];
    const u32 smem = (u32)__cvta_generic_to_shared(shared);
    if (threadIdx.x == 0) init_barriers(smem);
    __syncthreads();
    cluster_sync();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(40));
        const Maps maps{&a_map, &b_map, &b_more_map, {&pre_map, &gate_map}, {&first_map, &second_map, &third_map}};
        if (threadIdx.x % 32 == 0) {
            if (warp == 0) produce_b(p, maps, smem);
            else if (warp == 1) produce_a(p, maps, smem);
            else carry_tiles(p, maps, smem, warp - 2);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(232));
        if (group == 2) named_arrive(1);  // the first consumer issues its main loop first
        if (EPILOGUE == ACT || EPILOGUE == GATE) copy_weight(p);
        consume(p, shared, smem, group - 1);
        if (group == 1) named_wait(1);  // consumes the second consumer's last arrival
    }
    __syncwarp();
    cluster_sync();
}
