// Schedule ROLES: each CTA of one launch preprocesses, multiplies (runs the main kernel) or postprocesses. Included by
// backward.cu.
//
// The launch is a software pipeline over spans of KV heads, in rounds. In round r, CTAs preprocess span r, multiply
// span r - 1 and postprocess span r - 3, interleaved, so that memory traffic is overlapped with GEMMs: separate
// launches would leave the tensor cores or the memory idle. The CTAs that preprocess, and then those that postprocess,
// are spread evenly among those that multiply, which have the order of a separate launch. So a CTA waits only for CTAs
// that started long before.
//
// Deadlock freedom. When it starts, a CTA takes its logical index from a counter, as with a persistent tile scheduler:
// CUDA does not guarantee that thread blocks start in the order of blockIdx. A CTA that preprocesses waits for none.
// One that multiplies waits for those that preprocess its span, one that postprocesses for those that multiply in its
// span. All of these have lower logical indices, so they have started. Of the CTAs that have started and are not done,
// the one with the lowest index waits for nothing that is not done. So the launch ends whatever the order in which CTAs
// start, the number of SMs, and what else runs on them.
//
// Data that one CTA writes and another reads, each through a counter in global memory that is initially 0:
//   lse2, delta  written by threads, read by bulk copies. Every writer executes a proxy fence before the CTA's barrier;
//                one thread increments `ready` with release. The producer of a CTA that multiplies reads it with
//                acquire, executes a proxy fence, and only then issues the first of these copies.
//   zeros of dq  written by bulk stores of one thread, which waits until they are complete, not only read, before it
//                increments `ready`. Consumers add to them after they have waited for dout's barrier, on which the
//                producer arrives after its acquire: release and acquire at each step from the zeros to the reductions.
//   sums of dq   added to by bulk reductions of one thread of each consumer warp. It waits until its own are complete
//                and increments `done` with release: so `done` counts warps. A CTA that postprocesses reads it with
//                acquire, executes a proxy fence, and reads the sums by bulk copies, which bypass L1 and any stale
//                lines in it.
//
// The shared memory of a CTA fills its SM, so a CTA that preprocesses or postprocesses must keep memory busy alone: TMA
// loads out and dout into a circular buffer of 160 KB, and the accumulator into one of 192 KB (200 with 80 queries). A
// chunk of tiles is large enough to amortise the start of a CTA. The first span to be preprocessed and the last two to
// be postprocessed, which no GEMMs overlap, have shorter chunks, so that all SMs take part.
#pragma once

#if SCHEDULE == ROLES
enum Role { PREPROCESS, MULTIPLY, POSTPROCESS };

constexpr int LAG = 3;         // rounds from the one that preprocesses a span to the one that postprocesses it
constexpr int LAST = LAG - 1;  // spans that are postprocessed when no CTA multiplies any more
constexpr int MOST_ROUNDS = 64;

// The CTAs of a round, from logical index `start` on. All but `others` multiply, items from `multiplies_from` on. The
// others are every `stride`-th CTA; the first `preprocesses` of them preprocess, the rest postprocess. A CTA that
// multiplies waits until `ready` is `preprocessed`, one that postprocesses until `done` is `multiplied`.
struct Round { int start, preprocesses, others, stride, multiplies_from, preprocessed, multiplied; };

struct Roles {
    const float *lse, *dlse;  // [B * Hq, queries]; dlse may be null
    u32 *ready, *done;        // per span: CTAs that have preprocessed, and consumer warps that have multiplied
    int* drawn;               // the next logical index; as `ready` and `done` it is 0 before the launch
    int span, spans;          // KV heads per span, number of spans
    int chunk, chunks, end_chunk, end_chunks;  // tiles per CTA, CTAs per query head; the same for first and last span
    Round round[MOST_ROUNDS];  // computed by the host, as it would delay each CTA
};

constexpr u32 PLACE_AT = SHARED_END;
static_assert(PLACE_AT + 4 <= 232448, "the logical index of a CTA fits behind all else");

// The logical index of this CTA: how many have started before it. All threads must call it. START_DELAY is for a test,
// in which CTAs start in another order than that of blockIdx.
#ifndef START_DELAY
#define START_DELAY 0
#endif
DEVICE int logical_index(const Roles& r, u32 base) {
    // The thread index is read only here: were it live from here on, the compiler would recompute the consumers'
    // addresses in their main loop, 15 instructions a tile and 3 % of the time under a mask.
    u32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    if (START_DELAY && thread == 0) doze((127 - blockIdx.x % 128) * 4096);
    if (thread == 0) store_shared(base + PLACE_AT, draw(r.drawn));
    __syncthreads();
    return __shfl_sync(~0u, load_shared(base + PLACE_AT), 0);  // warp-uniform, for the compiler
}

// The role of the CTA with logical index i, and its item: its index among all CTAs that multiply, or in its role and
// span.
struct Place {
    Role role;
    int span, item, awaited;

    DEVICE Place(const Roles& r, int i) {
        int rounds = r.spans + LAG, at = -1;
        for (int first = 0; first < rounds; first += 32) {  // a round for each lane
            int mine = first + (int)threadIdx.x % 32;
            at += __popc(__ballot_sync(~0u, mine < rounds && r.round[mine].start <= i));
        }
        const Round& round = r.round[at];
        i -= round.start;
        int other = (u32)i / (u32)round.stride;
        if (other >= round.others || i != other * round.stride) {
            role = MULTIPLY, span = at - 1, item = round.multiplies_from + i - min(other + 1, round.others);
            awaited = round.preprocessed;
        } else if (other < round.preprocesses) {
            role = PREPROCESS, span = at, item = other, awaited = 0;
        } else {
            role = POSTPROCESS, span = at - LAG, item = other - round.preprocesses, awaited = round.multiplied;
        }
    }
};

// Waits until the counter is `count`. Bulk copies of this thread then see what was written before the counter was
// incremented.
DEVICE void wait_for(const u32* counter, u32 count) {
    while (load_acquire(counter) < count) doze(64);
    fence_async_global();
}
// Increments the counter with release once this thread's bulk operations are complete, not only done reading shared
// memory.
DEVICE void increment_release(u32* counter) {
    bulk_wait();
    fence_async_global();
    add_release(counter, 1);
}

// The tiles of a CTA that preprocesses or postprocesses. head: a query head, over all batches.
struct Chunk {
    int head, first, tiles;

    DEVICE Chunk(const Problem& p, const Roles& r, const Place& place, bool at_end) {
        int size = at_end ? r.end_chunk : r.chunk, number = at_end ? r.end_chunks : r.chunks;
        head = place.span * r.span * p.group + place.item / number;
        first = place.item % number * size;
        tiles = min(size, p.m_tiles - first);
    }
};
// mbarriers of a circular buffer of `stages` stages, in place of those of CTAs that multiply.
template <int stages>
DEVICE void init_stages(u32 base) {
    for (int i = 0; i < stages; i++) bar_init(base + BAR_AT + 8 * i, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

constexpr int THREADS = 384;
constexpr u32 SUM_BYTES = BM * D * 4;  // of a tile of fp32 dQ
constexpr u32 ZEROS_AT = DQ_AT;
constexpr int PAIR_STAGES = ZEROS_AT / (2 * Q_BYTES), SUM_STAGES = LSE_AT / SUM_BYTES;
constexpr u32 DELTAS_AT = PAIR_STAGES * 2 * Q_BYTES;
constexpr int ROWS_EACH = 3, MOST_ROWS = ROWS_EACH * THREADS;  // rows of a chunk, per thread and in all
static_assert(DELTAS_AT + MOST_ROWS * 4 <= ZEROS_AT && ZEROS_AT + SUM_BYTES <= BAR_AT, "buffers, deltas and zeros");
static_assert(SUM_STAGES * SUM_BYTES <= BAR_AT && SUM_STAGES <= 16 && PAIR_STAGES <= 16, "the circular buffer of sums");

// As `preprocess`: computes lse2 and delta of a chunk of tiles, and zeros their accumulators.
DEVICE void preprocess_span(const TensorMap& out_map, const TensorMap& do_map, const Problem& p, const Roles& r,
                         const Place& place, u32 base) {
    const Chunk chunk(p, r, place, place.span == 0);
    const int thread = threadIdx.x, heads = p.kv_heads * p.group, batch = chunk.head / heads, head = chunk.head % heads;
    const int rows = chunk.tiles * BM;
    auto load = [&](int i) {
        u32 slot = i % PAIR_STAGES, to = base + slot * 2 * Q_BYTES, bar = base + BAR_AT + 8 * slot;
        bar_expect(bar, 2 * Q_BYTES);
        for (int slab = 0; slab < SLABS; slab++) {
            int row = (chunk.first + i) * BM;
            tma_load(to + slab * Q_SLAB, &out_map, slab * 64, row, head, batch, bar);
            tma_load(to + Q_BYTES + slab * Q_SLAB, &do_map, slab * 64, row, head, batch, bar);
        }
    };
    if (thread == 0) {
        init_stages<PAIR_STAGES>(base);
        for (int i = 0; i < min(PAIR_STAGES, chunk.tiles); i++) load(i);
    }
    float line[ROWS_EACH], minus[ROWS_EACH];
#pragma unroll
    for (int e = 0; e < ROWS_EACH; e++) {
        int row = e * THREADS + thread, query = chunk.first * BM + row;
        bool real = row < rows && query < p.queries;
        long long from = (long long)chunk.head * p.queries + query;
        line[e] = real ? r.lse[from] : -INFINITE;
        minus[e] = real && r.dlse != nullptr ? r.dlse[from] : 0;
    }
    for (u32 i = thread; i < SUM_BYTES / 16; i += THREADS) store_four(base + ZEROS_AT + i * 16, 0, 0, 0, 0);
    fence_async();
    __syncthreads();

    float* sums = p.dq_sum + ((long long)chunk.head * p.m_tiles + chunk.first) * (BM * D);
    for (int i = 0; i < chunk.tiles; i++) {
        u32 slot = i % PAIR_STAGES;
        if (thread == 0) store_bulk(sums + (long long)i * (BM * D), base + ZEROS_AT, SUM_BYTES), bulk_commit();
        bar_wait(base + BAR_AT + 8 * slot, i / PAIR_STAGES & 1);
#pragma unroll
        for (int row = thread / 8; row < BM; row += THREADS / 8) {  // eight lanes read a swizzled row from all banks
            u32 at = base + slot * 2 * Q_BYTES + row * 128 + ((thread ^ row) % 8) * 16;
            float sum = 0;
#pragma unroll
            for (int slab = 0; slab < SLABS; slab++, at += Q_SLAB)
                sum += dot(shared_chunk(at), shared_chunk(at + Q_BYTES));
#pragma unroll
            for (int step = 4; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
            if (thread % 8 == 0) store_one(base + DELTAS_AT + (i * BM + row) * 4, sum);
        }
        __syncthreads();
        if (thread == 0 && i + PAIR_STAGES < chunk.tiles) load(i + PAIR_STAGES);
    }
#pragma unroll
    for (int e = 0; e < ROWS_EACH; e++) {
        int row = e * THREADS + thread;
        if (row >= rows) continue;
        long long to = ((long long)chunk.head * p.m_tiles + chunk.first) * BM + row;
        bool empty = line[e] == -INFINITE;
        // As in `preprocess`: an empty row has delta 0 even where its incoming gradients are not finite.
        ((float*)p.lse2)[to] = empty ? INFINITE : line[e] * LOG2_E;
        ((float*)p.delta)[to] = empty ? 0 : shared_one(base + DELTAS_AT + row * 4) - minus[e];
    }
    fence_async_global();
    __syncthreads();
    if (thread == 0) increment_release(r.ready + place.span);
}

// As `postprocess`: dq of a chunk of tiles. A tile of the accumulator is cast in place; TMA stores the result from
// there.
DEVICE void postprocess_span(const TensorMap& dq_map, const Problem& p, const Roles& r, const Place& place, u32 base) {
    const Chunk chunk(p, r, place, place.span >= r.spans - LAST);
    const int heads = p.kv_heads * p.group, batch = chunk.head / heads, head = chunk.head % heads;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, eighth = lane % 8;
    const float* sums = p.dq_sum + ((long long)chunk.head * p.m_tiles + chunk.first) * (BM * D);
    auto load = [&](int i) {
        u32 slot = i % SUM_STAGES, bar = base + BAR_AT + 8 * slot;
        bar_expect(bar, SUM_BYTES);
        load_row(sums + (long long)i * (BM * D), base + slot * SUM_BYTES, bar, SUM_BYTES);
    };
    if (threadIdx.x == 0) {
        init_stages<SUM_STAGES>(base);
        wait_for(r.done + place.span, place.awaited);
        for (int i = 0; i < min(SUM_STAGES, chunk.tiles); i++) load(i);
    }
    __syncthreads();
    for (int i = 0; i < chunk.tiles; i++) {
        const u32 tile = base + i % SUM_STAGES * SUM_BYTES;
        bar_wait(base + BAR_AT + 8 * (i % SUM_STAGES), i / SUM_STAGES & 1);
        u32 x[DQ_REGISTERS / 2];  // the fragment of one consumer warp
        if (warp < CONSUMER_WARPS) {
#pragma unroll
            for (int j = 0; j < DQ_REGISTERS / 4; j++) {
                Float4 four = shared_four(tile + warp * FRAGMENT_BYTES + j * 512 + lane * 16);
                x[2 * j] = pack(four.x * p.scale, four.y * p.scale);
                x[2 * j + 1] = pack(four.z * p.scale, four.w * p.scale);
            }
        }
        __syncthreads();
        if (warp < CONSUMER_WARPS) {
            const u32 slab = tile + warp / 4 * Q_SLAB;
#pragma unroll
            for (int k = 0; k < DQ_REGISTERS / 8; k++) {
                const u32* four = x + 4 * k;
                // Four 8x8 matrices. With 64 queries a tile: 16 rows of queries and 16 columns; with 80 the same,
                // transposed.
                u32 row = DQ_TRANSPOSED ? k * 16 + lane / 16 * 8 + eighth : warp % 4 * 16 + lane % 16;
                u32 column = DQ_TRANSPOSED ? warp % 4 * 2 + lane / 8 % 2 : k * 2 + lane / 16;
                u32 to = slab + row * 128 + (column ^ eighth) * 16;
                if constexpr (DQ_TRANSPOSED) store_transposed(to, four[0], four[1], four[2], four[3]);
                else store_matrices(to, four[0], four[1], four[2], four[3]);
            }
        }
        fence_async();
        __syncthreads();
        if (threadIdx.x == 0) {
            bulk_wait_read();  // for the store of the previous tile, whose stage is free then
            if (i > 0 && i - 1 + SUM_STAGES < chunk.tiles) load(i - 1 + SUM_STAGES);
            for (int part = 0; part < SLABS; part++)
                store_box(dq_map, tile + part * Q_SLAB, part * 64, (chunk.first + i) * BM, head, batch);
            bulk_commit();
        }
    }
    if (threadIdx.x == 0) bulk_wait();
}
#endif
