// Block-sparse attention forward for Hopper (sm_90a): TMA, wgmma, warp specialisation. forward.py launches it.
//
// Estimate for one warp group of 64 query rows and 128 keys, in cycles of an SM's tensor cores (4096 FLOP a cycle,
// dense), of its exponential units (16 exp2 a cycle) and of each of its warp schedulers (one instruction a cycle):
//   D = 128   tensor 1024   exp2 512   issue about 300
//   D =  64   tensor  512   exp2 512   issue about 270
// A tile is one row of the mask: BLOCK queries. It reads 2 * BLOCK * D * 2 bytes for each kept block of keys. With
// BLOCK = 128 and D = 128 that is 64 KB in 2048 cycles of tensor cores, 32 bytes a cycle from L2; with BLOCK = 64 it is
// 64 bytes a cycle, about L2's bandwidth. With 10 % of 64 blocks kept, the main loop of a tile has 6 iterations. The
// first S = Q K^T and the last P V are not overlapped with a softmax. So the queries of a tile, and its list, are
// loaded during the tile before.
//
// A team is an independent pipeline: a producer, and one consumer warp group for each 64 query rows of a block. A CTA
// has TEAMS teams, as many as registers allow. They share no data, and two to four consumers hide each other's
// latencies. CTAs are persistent, and each team takes tiles from the tile scheduler's counter. The producer, one
// thread, reads the tile's list and loads the key and value blocks that it names, from its end to its beginning, into
// circular buffers of STAGES pipeline stages. Through shared memory it passes the consumers the head, the row of the
// mask, the number of steps and how many of these need no mask for each tile, and the first key and the bias of the
// block for each step. Consumers never read the table.
//  - A step is one main-loop iteration, on one pipeline stage of BLOCK_N keys: a block, or half of one. A list is in
//    ascending order, so the blocks that the diagonal or the last key cuts are at its end: the first steps are those
//    that need a mask.
//  - A row of the mask that keeps nothing has no step: its consumers write 0 and -inf, and no stage is used.
//  - Heads are scheduled in sections of as many as have keys and values that fit in L2 together. Within a section the
//    longest lists come first.
//
// A consumer issues S = Q K^T of one step together with O += P V of the step before, and overlaps the softmax of the
// former with the latter (Shah et al. 2024, FlashAttention-3, arXiv:2407.08608, sections 3.1, 3.2). S, P and O stay in
// registers.
//  - The running maximum of a row is not updated while no score exceeds it by more than SLACK (a base-2 logarithm).
//    Probabilities are then at most 2^SLACK, and neither the accumulator nor the row sum needs rescaling. A warp vote
//    decides.
//  - The test compares the bits of scores as integers, three at a time: nonnegative floats are ordered as their bits
//    are. With 0 among them, negative scores count as 0, which only makes the test stricter. A NaN with positive sign
//    is the largest of all and fails the test; one with negative sign reaches the row sum in any case.
//  - The bias is the same for all scores of a block: it is subtracted from the maximum, and from the test's bound.
//
// mbarriers, with their arrivals per phase. The n-th wait on a full barrier has parity n & 1, on an empty one the
// opposite, so that the first wait for each empty stage returns at once. One lane of each warp arrives on the empty
// barriers, because wgmma.wait_group covers only the wgmmas of the calling warp.
//   q_full[c] 1, q_empty[c] 4                the 64 query rows of consumer c, once a tile with steps; Q_BUFFERS of each
//   k_full[s] 1, k_empty[s] 4 * CONSUMERS    a step's keys, its first key and bias; v_full, v_empty: its values
//   tile_full 1, tile_empty 4 * CONSUMERS    the head, row and steps of a tile
// With PING_PONG, the first (second) consumer of team t waits on named barrier 1 + 2 t (2 + 2 t) before it issues its
// wgmmas.
//
// Defined by the launcher, see CudaConfig in configs.py: HEAD_DIM (64, 128), BLOCK (64, 128), BLOCK_N, STAGES,
// PING_PONG (0, or 1 where BLOCK is 128), Q_REGISTERS, Q_BUFFERS, TEAMS, CAUSAL, BIAS, FP16.

#include "forward_ptx.cuh"

constexpr int ROWS = 64;                       // queries per consumer: M of a wgmma is 64
constexpr int CONSUMERS = BLOCK / ROWS;
constexpr int SPLIT = BLOCK / BLOCK_N;         // steps of a block
constexpr int PANELS = HEAD_DIM / 64;          // 64 elements are a row of TMA's 128-byte swizzle
constexpr int GROUPS = CONSUMERS * TEAMS;
constexpr int THREADS = 128 * (GROUPS + 1);    // producers: the first thread of each warp of the last warp group
constexpr int Q_BYTES = ROWS * HEAD_DIM * 2;   // of one consumer
constexpr int KV_BYTES = BLOCK_N * HEAD_DIM * 2;
constexpr int S_REGS = BLOCK_N / 2, O_REGS = HEAD_DIM / 2, P_REGS = BLOCK_N / 4;
constexpr int PRODUCER_REGISTERS = GROUPS == 2 ? 40 : 32;
constexpr int CONSUMER_REGISTERS = GROUPS == 2 ? 232 : GROUPS == 3 ? 160 : 112;
constexpr int HEADER = 3;                      // a line of the table: count, whole, order, then blocks (index.py)
#define NEGATIVE_INFINITY __int_as_float(0xff800000)
static_assert(!PING_PONG || CONSUMERS == 2, "ping-pong is between two consumers");
static_assert(GROUPS >= 2 && GROUPS <= 4, "registers for two to four groups of consumers");

constexpr int K_OFFSET = Q_BUFFERS * CONSUMERS * Q_BYTES;
constexpr int V_OFFSET = K_OFFSET + STAGES * KV_BYTES;
constexpr int TILE_OFFSET = V_OFFSET + STAGES * KV_BYTES;  // a struct Tile
constexpr int STEP_OFFSET = TILE_OFFSET + 16;              // per stage: its first key and the bias of its block
constexpr int BARRIER_OFFSET = STEP_OFFSET + 8 * STAGES;
enum Barrier {
    Q_FULL = 0, Q_EMPTY = Q_BUFFERS * CONSUMERS, K_FULL = 2 * Q_EMPTY, K_EMPTY = K_FULL + STAGES,
    V_FULL = K_EMPTY + STAGES, V_EMPTY = V_FULL + STAGES, TILE_FULL = V_EMPTY + STAGES, TILE_EMPTY, BARRIERS
};
constexpr int TEAM_BYTES = (BARRIER_OFFSET + 8 * BARRIERS + 1023) / 1024 * 1024;  // alignment of swizzled tiles

struct Problem {
    float* lse;
    unsigned short* out;
    u64 out_batch, out_head, out_row;                        // strides in elements
    const int* table;
    u64 table_batch, table_head;                             // 0 where batches or heads share their lists
    const float* bias;
    u64 bias_batch, bias_head, bias_row, bias_column;
    int* next_tile;  // tile scheduler's counter, initially the number of teams; null: static schedule
    float scale_log2, per_scale_log2, slack;                 // slack: SLACK in units of raw scores
    int num_tiles, rows, columns, section, heads, q_heads, group, num_q, num_keys;
};

struct Tile {
    int head, row, steps, whole;  // head: over all batches; whole: steps that need no mask; steps -1: no more tiles
};

DEVICE void ping_pong_wait(int group) { named_wait(1 + group); }
DEVICE void ping_pong_arrive(int group) { named_arrive(1 + (group ^ 1)); }

template <int SLOTS> struct Position {  // stage and phase of a circular buffer
    int slot = 0;
    u32 phase = 0;
    DEVICE void next() {
        if (++slot == SLOTS) { slot = 0; phase ^= 1; }
    }
};
using Ring = Position<STAGES>;  // of keys, and of values

// ---- Producer -----------------------------------------------------------------------------------------------------

// Tile order: sections of `section` heads; within a section the longest list of each head comes first, then the second
// longest ...
DEVICE Tile find_tile(const Problem& a, int index, const int*& list) {
    int first = index / (a.section * a.rows) * a.section;
    int inside = index - first * a.rows;
    int width = min(a.section, a.heads - first);
    int rank = inside / width;
    Tile tile;
    tile.head = first + inside - rank * width;
    const int batch = tile.head / a.q_heads, width_of_line = HEADER + a.columns;
    const int* table = a.table + batch * a.table_batch + (tile.head - batch * a.q_heads) * a.table_head;
    tile.row = table[rank * width_of_line + 2];
    const int* line = table + tile.row * width_of_line;
    list = line + HEADER;
    tile.steps = line[0] * SPLIT;
    tile.whole = line[1] * SPLIT;
    return tile;
}

DEVICE float bias_of(const float* biases, u64 stride, int block) {
    return BIAS ? biases[block * stride] * 1.4426950408889634f : 0.0f;
}

DEVICE void produce(const Problem& a, const TensorMap* q_map, const TensorMap* k_map, const TensorMap* v_map,
                    int team, u32 smem) {
    const u32 bars = smem + BARRIER_OFFSET;
    const int own = team * gridDim.x + blockIdx.x, teams = TEAMS * gridDim.x;  // index of this team; number of teams
    Ring ring;
    Position<Q_BUFFERS> queries;
    int index = own;
    for (int wave = 1;; wave++) {
        const int* list;
        Tile tile = {0, 0, -1, 0};
        if (index < a.num_tiles) tile = find_tile(a, index, list);
        bar_wait(bars + 8 * TILE_EMPTY, wave & 1);
        store_shared4(smem + TILE_OFFSET, make_int4(tile.head, tile.row, tile.steps, tile.whole));
        bar_arrive(bars + 8 * TILE_FULL);
        if (tile.steps < 0) break;
        // Static schedule: every second wave is in reverse order, which balances lists of decreasing length.
        index = wave * teams + (wave % 2 ? teams - 1 - own : own);
        if (a.next_tile) index = draw(a.next_tile);  // the latency is overlapped with the loads of this tile
        if (tile.steps == 0) continue;
        const int batch = tile.head / a.q_heads, head = tile.head - batch * a.q_heads, kv_head = head / a.group;
#pragma unroll 1
        for (int c = 0; c < CONSUMERS; c++) {
            const int buffer = queries.slot * CONSUMERS + c;
            bar_wait(bars + 8 * (Q_EMPTY + buffer), queries.phase ^ 1);
            bar_expect(bars + 8 * (Q_FULL + buffer), Q_BYTES);
            for (int p = 0; p < PANELS; p++)
                tma_load(smem + buffer * Q_BYTES + p * ROWS * 128, q_map, p * 64, tile.row * BLOCK + c * ROWS, head,
                         batch, bars + 8 * (Q_FULL + buffer));
        }
        queries.next();
        // Prefetch: block indices are loaded two steps ahead, and biases, whose addresses depend on them, one.
        const float* biases = a.bias + batch * a.bias_batch + head * a.bias_head + tile.row * a.bias_row;
        int block = list[(tile.steps - 1) / SPLIT], following = list[max(tile.steps - 2, 0) / SPLIT];
        float bias = bias_of(biases, a.bias_column, block);
#pragma unroll 1
        for (int step = tile.steps - 1; step >= 0; step--, ring.next()) {
            const int first_key = block * BLOCK + step % SPLIT * BLOCK_N;
            const float own_bias = bias;
            block = following;
            bias = bias_of(biases, a.bias_column, block);
            following = list[max(step - 2, 0) / SPLIT];
#pragma unroll
            for (int which = 0; which < 2; which++) {
                const u32 arrived = bars + 8 * ((which ? V_FULL : K_FULL) + ring.slot);
                const u32 to = smem + (which ? V_OFFSET : K_OFFSET) + ring.slot * KV_BYTES;
                bar_wait(bars + 8 * ((which ? V_EMPTY : K_EMPTY) + ring.slot), ring.phase ^ 1);
                if (!which) store_shared(smem + STEP_OFFSET + 8 * ring.slot, first_key);
                if (!which && BIAS) store_shared(smem + STEP_OFFSET + 8 * ring.slot + 4, __float_as_int(own_bias));
                bar_expect(arrived, KV_BYTES);
                for (int p = 0; p < PANELS; p++)
                    tma_load(to + p * BLOCK_N * 128, which ? v_map : k_map, p * 64, first_key, kv_head, batch, arrived);
            }
        }
    }
}

// ---- Consumers ----------------------------------------------------------------------------------------------------

// Issues S = Q K^T.
DEVICE void start_scores(float (&s)[S_REGS], const u32* q, u64 q_desc, u64 k_desc) {
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++) {
        u64 k_step = k_desc + (k / 4 * BLOCK_N * 128 + k % 4 * 32) / 16;
        if (Q_REGISTERS) wgmma_rs<0>(s, q + 4 * k, k_step, k > 0);
        else wgmma_ss(s, q_desc + (k / 4 * ROWS * 128 + k % 4 * 32) / 16, k_step, k > 0);
    }
    wgmma_commit();
}

// Issues O += P V.
DEVICE void start_values(float (&o)[O_REGS], const u32 (&p)[P_REGS], u64 v_desc) {
#pragma unroll
    for (int k = 0; k < BLOCK_N / 16; k++) wgmma_rs<1>(o, p + 4 * k, v_desc + k * 16 * 128 / 16, 1);
    wgmma_commit();
}

struct Rows {  // state of the two rows of which a thread has elements, 8 apart
    float scaled[2];  // row maximum of (score * scale + bias) * log2(e); 0 before the first key
    float limit[2];   // raw scores without a bias up to this need no new maximum; -inf before the first key
    float sum[2];     // of the probabilities of this thread's columns
    float alpha[2];   // rescaling factor of the accumulator; valid only where update() has just returned true
};

DEVICE int max3(int a, int b, int c) { return max(max(a, b), c); }
DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Updates the maxima of the warp's 16 rows if a score exceeds one of them by more than SLACK. Returns whether the
// accumulator must be rescaled; warp-uniform.
DEVICE bool update(const float (&s)[S_REGS], Rows& rows, const Problem& a, float bias) {
    int top[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < S_REGS; i += 8) {
        top[0] = max3(top[0], __float_as_int(s[i]), __float_as_int(s[i + 1]));
        top[1] = max3(top[1], __float_as_int(s[i + 2]), __float_as_int(s[i + 3]));
        top[2] = max3(top[2], __float_as_int(s[i + 4]), __float_as_int(s[i + 5]));
        top[3] = max3(top[3], __float_as_int(s[i + 6]), __float_as_int(s[i + 7]));
    }
    const float raw_bias = BIAS ? bias * a.per_scale_log2 : 0.0f;
    bool fits = __int_as_float(max(top[0], top[2])) <= (BIAS ? rows.limit[0] - raw_bias : rows.limit[0]) &&
                __int_as_float(max(top[1], top[3])) <= (BIAS ? rows.limit[1] - raw_bias : rows.limit[1]);
    if (__all_sync(~0u, fits)) return false;
    bool risen = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float most = NEGATIVE_INFINITY;
#pragma unroll
        for (int i = 2 * r; i < S_REGS; i += 4) most = fmaxf(most, fmaxf(s[i], s[i + 1]));
        const float old = rows.limit[r] == NEGATIVE_INFINITY ? NEGATIVE_INFINITY : rows.scaled[r];
        most = fmaxf(old, quad_max(most) * a.scale_log2 + (BIAS ? bias : 0.0f));
        const bool none = most == NEGATIVE_INFINITY;  // -inf - -inf would be NaN
        risen |= most > old;
        rows.scaled[r] = none ? 0.0f : most;
        rows.limit[r] = none ? most : most * a.per_scale_log2 + a.slack;
        rows.alpha[r] = exp2_(old - rows.scaled[r]);
        rows.sum[r] *= rows.alpha[r];
    }
    return __any_sync(~0u, risen);
}

// Replaces scores by probabilities, and adds these to the row sums.
DEVICE void exponentials(float (&s)[S_REGS], Rows& rows, const Problem& a, float bias) {
    float odd[2] = {0.0f, 0.0f}, shift[2];
#pragma unroll
    for (int r = 0; r < 2; r++) shift[r] = BIAS ? rows.scaled[r] - bias : rows.scaled[r];
#pragma unroll
    for (int i = 0; i < S_REGS; i += 4) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float x = exp2_(s[i + 2 * r] * a.scale_log2 - shift[r]);
            float y = exp2_(s[i + 2 * r + 1] * a.scale_log2 - shift[r]);
            s[i + 2 * r] = x;
            s[i + 2 * r + 1] = y;
            rows.sum[r] += x;
            odd[r] += y;
        }
    }
    rows.sum[0] += odd[0];
    rows.sum[1] += odd[1];
}

// Scores of keys that a query does not see become -inf. first_row: the warp's. The bounds are computed from a lane
// number that the compiler cannot hoist, so that no register holds them in steps without a mask.
DEVICE void mask(float (&s)[S_REGS], const Problem& a, int first_row, int first_key) {
    const int lane = lane_number();
    const int seen = CAUSAL ? first_row + lane / 4 + 1 + a.num_keys - a.num_q : a.num_keys;
    const int first_column = first_key + lane % 4 * 2;
    const int limit0 = min(seen, a.num_keys) - first_column;
    const int limit1 = min(seen + (CAUSAL ? 8 : 0), a.num_keys) - first_column;
#pragma unroll
    for (int i = 0; i < S_REGS; i++) {
        hide_from(s[i], i / 4 * 8 + i % 2, i & 2 ? limit1 : limit0);
    }
}

// Loads the queries of a tile into registers, as wgmma's A operand.
DEVICE void load_queries(u32* q, u32 address, int warp, int lane) {
    int row = warp * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++) {
        int chunk = (k % 4 * 2 + lane / 16) ^ (row % 8);
        load_matrices(q + 4 * k, address + k / 4 * ROWS * 128 + row * 128 + chunk * 16);
    }
}

// Transposes within a quad: lane t has columns 8 i + 2 t and 8 i + 2 t + 1 in wi, and returns columns 8 t ... 8 t + 7.
DEVICE uint4 transpose(u32 w0, u32 w1, u32 w2, u32 w3, int t) {
    bool odd = t & 1, upper = t & 2;
    u32 x = __shfl_xor_sync(~0u, odd ? w0 : w1, 1), y = __shfl_xor_sync(~0u, odd ? w2 : w3, 1);
    if (odd) { w0 = x; w2 = y; } else { w1 = x; w3 = y; }
    x = __shfl_xor_sync(~0u, upper ? w0 : w2, 2), y = __shfl_xor_sync(~0u, upper ? w1 : w3, 2);
    if (upper) { w0 = x; w1 = y; } else { w2 = x; w3 = y; }
    return make_uint4(w0, w1, w2, w3);
}

DEVICE unsigned short* out_of(const Problem& a, int all_head) {
    const int batch = all_head / a.q_heads;
    return a.out + batch * a.out_batch + (all_head - batch * a.q_heads) * a.out_head;
}

// The sum of a row's probabilities: 0 where no key was seen. NaN where keys were seen and all probabilities are 0, because
// scaled scores exceed the range of fp32: the FMA s * scale_log2 - inf is -inf where s is finite.
DEVICE float row_sum(const Rows& rows, int r) {
    const float sum = quad_sum(rows.sum[r]);
    return sum == 0.0f && rows.limit[r] != NEGATIVE_INFINITY ? __int_as_float(0x7fffffff) : sum;
}

// Writes rows first_row ... first_row + 15 of out and lse, except those past the last query.
DEVICE void epilogue(const float (&o)[O_REGS], const Rows& rows, const Problem& a, int all_head, int first_row,
                     int lane) {
    unsigned short* out = out_of(a, all_head);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = first_row + lane / 4 + 8 * r;
        float sum = row_sum(rows, r);
        bool none = sum == 0.0f;  // no key was seen (a NaN sum is not 0)
        float factor = none ? 0.0f : 1.0f / sum;
        const bool inside = row < a.num_q;
        float lse = none ? NEGATIVE_INFINITY : (rows.scaled[r] + __log2f(sum)) * 0.6931471805599453f;
        if (lane % 4 == 0 && inside) a.lse[(u64)all_head * a.num_q + row] = lse;
#pragma unroll
        for (int i = 2 * r; i < O_REGS; i += 16) {
            u32 w[4];
#pragma unroll
            for (int g = 0; g < 4; g++) w[g] = none ? 0 : pack(o[i + 4 * g] * factor, o[i + 4 * g + 1] * factor);
            uint4 vector = transpose(w[0], w[1], w[2], w[3], lane % 4);
            if (inside) store_global4(out + row * a.out_row + i / 4 * 8 + lane % 4 * 8, vector);
        }
    }
}

// The epilogue of rows that keep no block.
DEVICE void store_empty_rows(const Problem& a, int all_head, int first_row, int lane) {
    constexpr int VECTORS = HEAD_DIM / 8;
    unsigned short* out = out_of(a, all_head);
    for (int i = lane; i < 16 * VECTORS; i += 32) {
        const int row = first_row + i / VECTORS;
        if (row < a.num_q) store_global4(out + row * a.out_row + i % VECTORS * 8, make_uint4(0, 0, 0, 0));
    }
    if (lane < 16 && first_row + lane < a.num_q) a.lse[(u64)all_head * a.num_q + first_row + lane] = NEGATIVE_INFINITY;
}

struct Consumer {
    u32 smem, bars;         // of the team
    int group, warp, lane;  // group: index of the warp group among the consumers of all teams
    bool leader;            // the lane that arrives on mbarriers
};

// A value that the producer has stored, warp-uniform. The leader may arrive on K_EMPTY while the read is pending. That
// is no race: a later store by a thread, unlike one by TMA, is ordered after the read.
DEVICE int stored(u32 address) { return __shfl_sync(~0u, load_shared(address), 0); }

DEVICE void attend(const Problem& a, const Consumer& me, Ring& ring, int buffer, const Tile& tile, int first_row) {
    const u64 q_desc = make_descriptor(me.smem + buffer * Q_BYTES, 16);
    const u64 k_base = make_descriptor(me.smem + K_OFFSET, 16);
    const u64 v_base = make_descriptor(me.smem + V_OFFSET, BLOCK_N * 128);
    float s[S_REGS], o[O_REGS];
    u32 p[P_REGS], q[Q_REGISTERS ? HEAD_DIM / 4 : 1];
    Rows rows;  // alpha is not initialised: a value that lives across steps would take registers
#pragma unroll
    for (int r = 0; r < 2; r++) { rows.scaled[r] = rows.sum[r] = 0.0f; rows.limit[r] = NEGATIVE_INFINITY; }
    if (Q_REGISTERS) {  // releases the queries early: the producer may load those of the next tile
        load_queries(q, me.smem + buffer * Q_BYTES, me.warp, me.lane);
        fence_async();
        fence_reads();
        if (me.leader) bar_arrive(me.bars + 8 * (Q_EMPTY + buffer));
    }
    // The first step is peeled: there is no P V to overlap with yet. It is always masked.
    bar_wait(me.bars + 8 * (K_FULL + ring.slot), ring.phase);
    wgmma_fence();
    start_scores(s, q, q_desc, k_base + ring.slot * (KV_BYTES / 16));
    int first_key = stored(me.smem + STEP_OFFSET + 8 * ring.slot);
    float bias = BIAS ? __int_as_float(stored(me.smem + STEP_OFFSET + 8 * ring.slot + 4)) : 0.0f;
    wgmma_wait<0>();
    pin(s);
    if (me.leader) bar_arrive(me.bars + 8 * (K_EMPTY + ring.slot));
    mask(s, a, first_row, first_key);
    update(s, rows, a, bias);
    exponentials(s, rows, a, bias);
#pragma unroll
    for (int i = 0; i < P_REGS; i++) p[i] = pack(s[2 * i], s[2 * i + 1]);
#pragma unroll
    for (int i = 0; i < O_REGS; i++) o[i] = 0.0f;
    bar_wait(me.bars + 8 * (V_FULL + ring.slot), ring.phase);
    ring.next();
    for (int step = tile.steps - 2; step >= 0; step--, ring.next()) {
        const int slot = __shfl_sync(~0u, ring.slot, 0);  // warp-uniform, for the compiler
        const int last = slot ? slot - 1 : STAGES - 1;
        bar_wait(me.bars + 8 * (K_FULL + slot), ring.phase);
        if (PING_PONG) ping_pong_wait(me.group);
        pin(o);
        pin(p);
        wgmma_fence();
        start_scores(s, q, q_desc, k_base + slot * (KV_BYTES / 16));
        start_values(o, p, v_base + last * (KV_BYTES / 16));
        if (PING_PONG) ping_pong_arrive(me.group);
        const bool cut = (CAUSAL || SPLIT > 1) && step >= tile.whole;  // otherwise only the first step needs a mask
        if (cut) first_key = stored(me.smem + STEP_OFFSET + 8 * slot);
        if (BIAS) bias = __int_as_float(stored(me.smem + STEP_OFFSET + 8 * slot + 4));
        wgmma_wait<1>();
        pin(s);
        if (me.leader) bar_arrive(me.bars + 8 * (K_EMPTY + slot));
        if (cut) mask(s, a, first_row, first_key);
        const bool rescale = update(s, rows, a, bias);
        exponentials(s, rows, a, bias);
        pin(s);
        // V of this step is needed only in the next step. The wait is here to fence the compiler: ptxas would move the
        // wait for P V before the softmax, as no register connects the two, but moves nothing across the loop of this
        // wait. It would also move the additions to the row sums after both waits, where they overlap nothing. So the
        // parity depends on the sums, which are never negative.
        bar_wait(me.bars + 8 * (V_FULL + slot), ring.phase ^ (rows.sum[0] + rows.sum[1] < -1.0f));
        wgmma_wait<0>();
        pin(o);
        pin(p);
        pin(s);
        if (me.leader) bar_arrive(me.bars + 8 * (V_EMPTY + last));
        if (rescale) {
#pragma unroll
            for (int i = 0; i < O_REGS; i++) o[i] *= rows.alpha[i / 2 % 2];
        }
#pragma unroll
        for (int i = 0; i < P_REGS; i++) p[i] = pack(s[2 * i], s[2 * i + 1]);
    }
    const int last = ring.slot ? ring.slot - 1 : STAGES - 1;
    if (!Q_REGISTERS && me.leader) bar_arrive(me.bars + 8 * (Q_EMPTY + buffer));
    pin(o);
    pin(p);
    wgmma_fence();
    start_values(o, p, v_base + last * (KV_BYTES / 16));
    wgmma_wait<0>();
    pin(o);
    if (me.leader) bar_arrive(me.bars + 8 * (V_EMPTY + last));
    epilogue(o, rows, a, tile.head, first_row, me.lane);
}

DEVICE void consume(const Problem& a, int group, u32 smem) {
    const u32 bars = smem + BARRIER_OFFSET;
    const int lane = threadIdx.x % 32, number = group % CONSUMERS;  // index of the consumer in its team
    const Consumer me = {smem, bars, group, (int)threadIdx.x / 32 % 4, lane, lane == 0};
    Ring ring;
    Position<Q_BUFFERS> queries;
    if (PING_PONG && number == CONSUMERS - 1) ping_pong_arrive(group);
    for (u32 phase = 0;; phase ^= 1) {
        bar_wait(bars + 8 * TILE_FULL, phase);
        const int4 x = load_shared4(smem + TILE_OFFSET);
        // Shuffles make the tile warp-uniform for the compiler, and order every lane's read before the arrival.
        const Tile tile = {__shfl_sync(~0u, x.x, 0), __shfl_sync(~0u, x.y, 0), __shfl_sync(~0u, x.z, 0),
                           __shfl_sync(~0u, x.w, 0)};
        if (tile.steps < 0) break;
        if (me.leader) bar_arrive(bars + 8 * TILE_EMPTY);
        const int first_row = tile.row * BLOCK + number * ROWS + me.warp * 16;
        if (tile.steps == 0) {
            store_empty_rows(a, tile.head, first_row, lane);
            continue;
        }
        const int buffer = __shfl_sync(~0u, queries.slot, 0) * CONSUMERS + number;
        bar_wait(bars + 8 * (Q_FULL + buffer), queries.phase);
        attend(a, me, ring, buffer, tile, first_row);
        queries.next();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
block_sparse_attention_cuda_fwd(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                                const __grid_constant__ TensorMap v_map, const __grid_constant__ Problem problem) {
    extern __shared__ __align__(1024) char shared[];
    const u32 smem = (u32)__cvta_generic_to_shared(shared);
    if (threadIdx.x < TEAMS) {
        for (int i = 0; i < BARRIERS; i++) {
            const bool by_all = (i >= K_EMPTY && i < V_FULL) || (i >= V_EMPTY && i < TILE_FULL) || i == TILE_EMPTY;
            bar_init(smem + threadIdx.x * TEAM_BYTES + BARRIER_OFFSET + 8 * i,
                     by_all ? 4 * CONSUMERS : i >= Q_EMPTY && i < K_FULL ? 4 : 1);
        }
        fence_init();
    }
    __syncthreads();
    // The shuffle makes it warp-uniform for the compiler, which then keeps descriptors in uniform registers.
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x / 32 % 4;
    if (group == GROUPS) {
        dec_registers<PRODUCER_REGISTERS>();
        if (warp < TEAMS && threadIdx.x % 32 == 0)
            produce(problem, &q_map, &k_map, &v_map, warp, smem + warp * TEAM_BYTES);
    } else {
        inc_registers<CONSUMER_REGISTERS>();
        consume(problem, group, smem + group / CONSUMERS * TEAM_BYTES);
    }
}
