// Attention forward for Hopper (sm_90a): TMA, wgmma, warp specialisation. forward.py launches it.
//
// Estimate for one warp group of 64 query rows and 128 keys, in cycles of an SM's tensor cores (4096 FLOP a cycle,
// dense), of its exponential units (16 exp2 a cycle) and of each of its warp schedulers (one instruction a cycle):
//   D = 128   tensor 1024   exp2 512   issue about 300
//   D =  64   tensor  512   exp2 512   issue about 270
// How close the tensor cores get to their peak depends on the other instructions of the main loop, so these are few:
// for 128 keys a thread issues 64 FFMA, 64 MUFU, 64 FADD, 32 F2FP and 32 VIMNMX3, and hardly any others.
//  - The running maximum of a row is not updated while no score exceeds it by more than SLACK (a base-2 logarithm).
//    Probabilities are then at most 2^SLACK, and neither the accumulator nor the row sum needs rescaling. A warp vote
//    decides.
//  - The test compares the bits of scores as integers, three at a time: nonnegative floats are ordered as their bits
//    are. With 0 among them, negative scores count as 0, which only makes the test stricter. A NaN with positive sign
//    is the largest of all and fails the test; one with negative sign reaches the row sum in any case.
//
// A CTA is one producer warp and CONSUMERS warp groups with 64 query rows each, which run the same code. The producer
// loads key and value blocks into circular buffers of STAGES pipeline stages. A consumer issues S = Q K^T of key block
// j together with O += P V of block j - 1, and overlaps the softmax of block j with the latter (Shah et al. 2024,
// FlashAttention-3, sections 3.1, 3.2). S, P and O stay in registers.
//
// The main loop goes from the last key block to the first. Only the last blocks need masks: those that the diagonal
// crosses, and the partial block at the end of the keys. A consumer skips blocks in which its 64 rows see no key.
//
// mbarriers, with their arrivals per phase. The n-th wait on a full barrier has parity n & 1, on an empty one the
// opposite, so that the first wait for each empty stage returns at once. One lane of each warp arrives on the empty
// barriers, because wgmma.wait_group covers only the wgmmas of the calling warp.
//   q_full[c] 1, q_empty[c] 4                  the 64 query rows of consumer c, once a tile; Q_BUFFERS of each
//   k_full[s] 1, k_empty[s] 4 * CONSUMERS      a block of keys; v_full, v_empty: of values
//   tile_full 1, tile_empty 4 * CONSUMERS      the index of the next tile
// With PING_PONG, consumer c waits on named barrier 1 + c before it issues its wgmmas.
//
// Defined by the launcher, see CudaConfig in configs/forward.py: HEAD_DIM (64, 128), BLOCK_N, STAGES, CONSUMERS (2, 3),
// CAUSAL, FP16, PING_PONG, Q_REGISTERS, Q_BUFFERS. Also CARRY: 0 for attention alone; with 1 and 2 the epilogue merges
// the tile with a running attention over other keys, and writes fp32 or the 16-bit type (forward_carry.cuh).

#include "forward_ptx.cuh"

constexpr int ROWS = 64;                       // queries per consumer: M of a wgmma is 64
constexpr int PANELS = HEAD_DIM / 64;          // 64 elements are a row of TMA's 128-byte swizzle
constexpr int BLOCK_M = ROWS * CONSUMERS;
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int Q_BYTES = ROWS * HEAD_DIM * 2;   // of one consumer
constexpr int KV_BYTES = BLOCK_N * HEAD_DIM * 2;
constexpr int S_REGS = BLOCK_N / 2, O_REGS = HEAD_DIM / 2, P_REGS = BLOCK_N / 4;
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 24 : 32;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 240 : 160;
#define NEGATIVE_INFINITY __int_as_float(0xff800000)

constexpr int K_OFFSET = Q_BUFFERS * CONSUMERS * Q_BYTES;
constexpr int V_OFFSET = K_OFFSET + STAGES * KV_BYTES;
constexpr int BARRIER_OFFSET = V_OFFSET + STAGES * KV_BYTES;
enum Barrier {
    Q_FULL = 0, Q_EMPTY = Q_BUFFERS * CONSUMERS, K_FULL = 2 * Q_EMPTY, K_EMPTY = K_FULL + STAGES,
    V_FULL = K_EMPTY + STAGES, V_EMPTY = V_FULL + STAGES, TILE_FULL = V_EMPTY + STAGES, TILE_EMPTY, BARRIERS
};
constexpr int TILE_OFFSET = BARRIER_OFFSET + 8 * BARRIERS;  // the index of the next tile

struct Problem {
    float* lse;
    unsigned short* out;
    u64 out_batch, out_head, out_row;  // strides in elements
    int* next_tile;                    // tile scheduler's counter, initially 0; null: static schedule
    float scale_log2, slack;           // slack: SLACK in units of raw scores
    int num_tiles, num_m, section, heads, q_heads, group, num_q, num_keys;
    int shift;                         // with CAUSAL, query i sees keys up to i + shift
#if CARRY
    const float* running;              // attention over other keys, [B, Hq, queries, D]; not read where lse is -inf
    u64 running_batch, running_head, running_row, lse_head;  // strides in elements
#endif
};

DEVICE void ping_pong_wait(int consumer) { asm volatile("bar.sync %0, 256;" ::"r"(1 + consumer) : "memory"); }
DEVICE void ping_pong_arrive(int consumer) {
    asm volatile("bar.arrive %0, 256;" ::"r"(consumer + 1 == CONSUMERS ? 1 : consumer + 2) : "memory");
}

// ---- Tiles --------------------------------------------------------------------------------------------------------

// Head (over all batches) and first row of a tile. CAUSAL: heads are scheduled in sections of `section` heads, as many
// as have keys and values that fit in L2 together. Within a section the row blocks with the most keys come first. Row
// blocks are counted from the end: the partial one has the fewest keys, and may begin before row 0. Not CAUSAL: head by
// head. The partial row blocks of the heads from `section` on come after all heads: they take less time, and fill SMs
// that are idle in the last wave. Those of the other heads stay with their head: moved to the end, each would read keys
// and values that no other tile reads at the time.
DEVICE void find_tile(const Problem& a, int index, int& head, int& first_row) {
    if (CAUSAL) {
        int first = index / (a.section * a.num_m) * a.section;
        int inside = index - first * a.num_m;
        int width = min(a.section, a.heads - first);
        int step = inside / width;
        head = first + inside - step * width;
        first_row = a.num_q - (step + 1) * BLOCK_M;
    } else {
        const int all = a.section * a.num_m, later = index - all, full = a.num_q / BLOCK_M;
        const bool ragged = later >= (a.heads - a.section) * full;
        int block;
        if (later < 0) head = index / a.num_m, block = index - head * a.num_m;
        else if (ragged) head = later - (a.heads - a.section) * full + a.section, block = full;
        else head = later / full, block = later - head * full, head += a.section;
        first_row = block * BLOCK_M;
    }
}

// Rows first_row ... first_row + rows - 1 see key blocks 0 ... end - 1, and blocks 0 ... full - 1 need no mask. `end`
// is at least 1, also where no row sees a key: the masked block gives such rows out 0 and lse -inf without a branch.
DEVICE void find_blocks(const Problem& a, int first_row, int rows, int& end, int& full) {
    int shift = a.shift + first_row;
    int last = CAUSAL ? min(a.num_keys, shift + rows) : a.num_keys;
    int first = CAUSAL ? min(a.num_keys, max(shift + 1, 0)) : a.num_keys;
    end = max((last + BLOCK_N - 1) / BLOCK_N, 1);
    full = first / BLOCK_N;
}

template <int SLOTS> struct Position {  // stage and phase of a circular buffer
    int slot = 0;
    u32 phase = 0;
    DEVICE void next() {
        if (++slot == SLOTS) { slot = 0; phase ^= 1; }
    }
};
using Ring = Position<STAGES>;  // of keys, and of values

// ---- Producer -----------------------------------------------------------------------------------------------------

DEVICE void produce(const Problem& a, const TensorMap* q_map, const TensorMap* k_map, const TensorMap* v_map,
                    u32 smem) {
    const u32 bars = smem + BARRIER_OFFSET;
    const int cta = blockIdx.x, ctas = gridDim.x;
    Ring ring;
    Position<Q_BUFFERS> queries;
    u32 tile_phase = 0;
    int tile = cta;
    for (int wave = 1; tile < a.num_tiles; wave++, tile_phase ^= 1, queries.next()) {
        int head, first_row, end, full;
        // Static schedule: every second wave is in reverse order, which balances tiles of decreasing length. `ctas` is
        // added only where the index is needed, because an addition here would wait for the counter's value.
        int following = wave % 2 ? ctas - 1 - cta : cta;
        if (a.next_tile) following = draw(a.next_tile);
        find_tile(a, tile, head, first_row);
        find_blocks(a, first_row, BLOCK_M, end, full);
        int batch = head / a.q_heads;
        head -= batch * a.q_heads;
#pragma unroll 1
        for (int c = 0; c < CONSUMERS; c++) {
            const int buffer = queries.slot * CONSUMERS + c;
            bar_wait(bars + 8 * (Q_EMPTY + buffer), queries.phase ^ 1);
            bar_expect(bars + 8 * (Q_FULL + buffer), Q_BYTES);
            for (int p = 0; p < PANELS; p++)
                tma_load(smem + buffer * Q_BYTES + p * ROWS * 128, q_map, p * 64, first_row + c * ROWS, head, batch,
                         bars + 8 * (Q_FULL + buffer));
        }
        head /= a.group;
#pragma unroll 1
        for (int j = end - 1; j >= 0; j--, ring.next()) {
#pragma unroll
            for (int which = 0; which < 2; which++) {
                const u32 arrived = bars + 8 * ((which ? V_FULL : K_FULL) + ring.slot);
                const u32 to = smem + (which ? V_OFFSET : K_OFFSET) + ring.slot * KV_BYTES;
                bar_wait(bars + 8 * ((which ? V_EMPTY : K_EMPTY) + ring.slot), ring.phase ^ 1);
                bar_expect(arrived, KV_BYTES);
                for (int p = 0; p < PANELS; p++)
                    tma_load(to + p * BLOCK_N * 128, which ? v_map : k_map, p * 64, j * BLOCK_N, head, batch, arrived);
            }
        }
        following += (a.next_tile ? 1 : wave) * ctas;
        bar_wait(bars + 8 * TILE_EMPTY, tile_phase ^ 1);
        store_shared(smem + TILE_OFFSET, following);
        bar_arrive(bars + 8 * TILE_FULL);
        tile = following;
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
    float max[2];     // row maximum, raw; not updated while no score exceeds it by more than SLACK
    float scaled[2];  // the same as a logarithm to base 2; 0 where no key has been seen (-inf - -inf would be NaN)
    float sum[2];     // of the probabilities of this thread's columns
    float alpha[2];   // rescaling factor of the accumulator, where update() returned true
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
DEVICE bool update(const float (&s)[S_REGS], Rows& rows, const Problem& a) {
    int top[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < S_REGS; i += 8) {
        top[0] = max3(top[0], __float_as_int(s[i]), __float_as_int(s[i + 1]));
        top[1] = max3(top[1], __float_as_int(s[i + 2]), __float_as_int(s[i + 3]));
        top[2] = max3(top[2], __float_as_int(s[i + 4]), __float_as_int(s[i + 5]));
        top[3] = max3(top[3], __float_as_int(s[i + 6]), __float_as_int(s[i + 7]));
    }
    bool fits = __int_as_float(max(top[0], top[2])) <= rows.max[0] + a.slack &&
                __int_as_float(max(top[1], top[3])) <= rows.max[1] + a.slack;
    if (__all_sync(~0u, fits)) return false;
    bool risen = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float most = NEGATIVE_INFINITY;
#pragma unroll
        for (int i = 2 * r; i < S_REGS; i += 4) most = fmaxf(most, fmaxf(s[i], s[i + 1]));
        most = fmaxf(rows.max[r], quad_max(most));
        risen |= most > rows.max[r];
        // From the rounded products, so that alpha is 1 where the maximum stays: max * scale_log2 - scaled would be an
        // FMA, i.e. the product's rounding error. The row sum is multiplied by alpha also where nothing has risen.
        const float old = rows.max[r] == NEGATIVE_INFINITY ? NEGATIVE_INFINITY : rows.scaled[r];
        rows.scaled[r] = most == NEGATIVE_INFINITY ? 0.0f : most * a.scale_log2;
        rows.alpha[r] = exp2_(old - rows.scaled[r]);
        rows.max[r] = most;
        rows.sum[r] *= rows.alpha[r];
    }
    return __any_sync(~0u, risen);
}

// Replaces scores by probabilities, and adds these to the row sums.
DEVICE void exponentials(float (&s)[S_REGS], Rows& rows, const Problem& a) {
    float odd[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < S_REGS; i += 4) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float x = exp2_(s[i + 2 * r] * a.scale_log2 - rows.scaled[r]);
            float y = exp2_(s[i + 2 * r + 1] * a.scale_log2 - rows.scaled[r]);
            s[i + 2 * r] = x;
            s[i + 2 * r + 1] = y;
            rows.sum[r] += x;
            odd[r] += y;
        }
    }
    rows.sum[0] += odd[0];
    rows.sum[1] += odd[1];
}

// Scores in columns >= `limit`, counted from this thread's first column, become -inf.
DEVICE void mask(float (&s)[S_REGS], int limit0, int limit1) {
#pragma unroll
    for (int i = 0; i < S_REGS; i++) {
        int column = i / 4 * 8 + i % 2;
        if (column >= (i & 2 ? limit1 : limit0)) s[i] = NEGATIVE_INFINITY;
    }
}

// Loads the queries of a tile into registers, as wgmma's A operand.
DEVICE void load_queries(u32* q, u32 address, int warp, int lane) {
    int row = warp * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++) {
        int chunk = (k % 4 * 2 + lane / 16) ^ (row % 8);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(q[4 * k]), "=r"(q[4 * k + 1]), "=r"(q[4 * k + 2]), "=r"(q[4 * k + 3])
                     : "r"(address + k / 4 * ROWS * 128 + row * 128 + chunk * 16) : "memory");
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

// The sum of a row's probabilities: 0 where no key was seen. NaN where keys were seen and all probabilities are 0, because
// scaled scores exceed the range of fp32: the FMA s * scale_log2 - inf is -inf where s is finite.
DEVICE float row_sum(const Rows& rows, int r) {
    const float sum = quad_sum(rows.sum[r]);
    return sum == 0.0f && rows.max[r] != NEGATIVE_INFINITY ? __int_as_float(0x7fffffff) : sum;
}

#if CARRY
#include "forward_carry.cuh"
#else
// Writes rows first_row ... first_row + 15 of out and lse, except those outside the queries.
DEVICE void epilogue(const float (&o)[O_REGS], const Rows& rows, const Problem& a, int all_head, int first_row,
                   int lane) {
    int batch = all_head / a.q_heads;
    unsigned short* out = a.out + batch * a.out_batch + (all_head - batch * a.q_heads) * a.out_head;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = first_row + lane / 4 + 8 * r;
        float sum = row_sum(rows, r);
        bool none = sum == 0.0f;  // no key was seen (a NaN sum is not 0)
        float factor = none ? 0.0f : 1.0f / sum;
        const bool inside = (u32)row < (u32)a.num_q;
        const float lse = none ? NEGATIVE_INFINITY : (rows.scaled[r] + __log2f(sum)) * 0.6931471805599453f;
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
#endif

struct Consumer {  // state of a consumer warp
    u32 smem, bars;
    int number, warp, lane;
    bool leader;  // the lane that arrives on mbarriers
};

// Skips blocks: their stages are released unread. The first `turns` of them take part in the ping-pong.
DEVICE void skip(const Consumer& me, Ring& ring, int blocks, int turns) {
    for (int j = 0; j < blocks; j++, ring.next()) {
        if (PING_PONG && j < turns) { ping_pong_wait(me.number); ping_pong_arrive(me.number); }
        bar_wait(me.bars + 8 * (K_FULL + ring.slot), ring.phase);
        bar_wait(me.bars + 8 * (V_FULL + ring.slot), ring.phase);
        __syncwarp();  // a lane that still waits would miss this phase once the stage is released
        if (me.leader) bar_arrive(me.bars + 8 * (K_EMPTY + ring.slot));
        if (me.leader) bar_arrive(me.bars + 8 * (V_EMPTY + ring.slot));
    }
}

// One consumer's rows of a tile: main loop over key blocks end - 1 ... 0, and epilogue.
DEVICE void attend(const Problem& a, const Consumer& me, Ring& ring, int buffer, int head, int first_row, int end,
                   int full) {
    const u64 q_desc = make_descriptor(me.smem + buffer * Q_BYTES, 16);
    const u64 k_base = make_descriptor(me.smem + K_OFFSET, 16);
    const u64 v_base = make_descriptor(me.smem + V_OFFSET, BLOCK_N * 128);
    float s[S_REGS], o[O_REGS];
    u32 p[P_REGS], q[Q_REGISTERS ? HEAD_DIM / 4 : 1];
    const int row = first_row + me.warp * 16 + me.lane / 4;
    const int seen = CAUSAL ? row + 1 + a.shift : a.num_keys;
    int limit0 = min(seen, a.num_keys) - me.lane % 4 * 2;
    int limit1 = min(seen + (CAUSAL ? 8 : 0), a.num_keys) - me.lane % 4 * 2;
    // Otherwise the compiler hoists the last block's mask out of the loop over tiles, and spills it.
    asm volatile("" : "+r"(limit0), "+r"(limit1));
    Rows rows = {{NEGATIVE_INFINITY, NEGATIVE_INFINITY}, {0.0f, 0.0f}, {0.0f, 0.0f}, {1.0f, 1.0f}};
    if (Q_REGISTERS) {  // releases the queries early: the producer may load those of the next tile
        load_queries(q, me.smem + buffer * Q_BYTES, me.warp, me.lane);
        fence_async();
        fence_reads();
        if (me.leader) bar_arrive(me.bars + 8 * (Q_EMPTY + buffer));
    }
    // The last key block is peeled: there is no P V to overlap with yet.
    bar_wait(me.bars + 8 * (K_FULL + ring.slot), ring.phase);
    wgmma_fence();
    start_scores(s, q, q_desc, k_base + ring.slot * (KV_BYTES / 16));
    wgmma_wait<0>();
    pin(s);
    if (me.leader) bar_arrive(me.bars + 8 * (K_EMPTY + ring.slot));
    mask(s, limit0 - (end - 1) * BLOCK_N, limit1 - (end - 1) * BLOCK_N);
    update(s, rows, a);
    exponentials(s, rows, a);
#pragma unroll
    for (int i = 0; i < P_REGS; i++) p[i] = pack(s[2 * i], s[2 * i + 1]);
#pragma unroll
    for (int i = 0; i < O_REGS; i++) o[i] = 0.0f;
    bar_wait(me.bars + 8 * (V_FULL + ring.slot), ring.phase);
    ring.next();
    for (int j = end - 2; j >= 0; j--, ring.next()) {
        const int slot = __shfl_sync(~0u, ring.slot, 0);  // warp-uniform, for the compiler
        const int last = slot ? slot - 1 : STAGES - 1;
        bar_wait(me.bars + 8 * (K_FULL + slot), ring.phase);
        if (PING_PONG) ping_pong_wait(me.number);
        pin(o);
        pin(p);
        wgmma_fence();
        start_scores(s, q, q_desc, k_base + slot * (KV_BYTES / 16));
        start_values(o, p, v_base + last * (KV_BYTES / 16));
        if (PING_PONG) ping_pong_arrive(me.number);
        wgmma_wait<1>();
        pin(s);
        if (me.leader) bar_arrive(me.bars + 8 * (K_EMPTY + slot));
        if (CAUSAL && j >= full) mask(s, limit0 - j * BLOCK_N, limit1 - j * BLOCK_N);
        const bool rescale = update(s, rows, a);
        exponentials(s, rows, a);
        pin(s);
        // V of this block is needed only in the next iteration. The wait is here to fence the compiler: ptxas would
        // move the wait for P V before the softmax, as no register connects the two, but moves nothing across the loop
        // of this wait. It would also move the additions to the row sums after both waits, where they overlap nothing.
        // So the parity depends on the sums, which are never negative.
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
    epilogue(o, rows, a, head, first_row + me.warp * 16, me.lane);
}

DEVICE void consume(const Problem& a, int number, u32 smem) {
    const u32 bars = smem + BARRIER_OFFSET;
    const int lane = threadIdx.x % 32;
    const Consumer me = {smem, bars, number, (int)threadIdx.x / 32 % 4, lane, lane == 0};
    Ring ring;
    Position<Q_BUFFERS> queries;
    u32 tile_phase = 0;
    if (PING_PONG && number == CONSUMERS - 1) ping_pong_arrive(number);
    for (int tile = blockIdx.x; tile < a.num_tiles; tile_phase ^= 1, queries.next()) {
        int head, first_row, end, full, all_blocks;
        find_tile(a, tile, head, first_row);
        find_blocks(a, first_row, BLOCK_M, all_blocks, full);
        first_row += number * ROWS;
        find_blocks(a, first_row, ROWS, end, full);
        end = __shfl_sync(~0u, first_row < a.num_q && first_row + ROWS > 0 ? end : 0, 0);
        all_blocks = __shfl_sync(~0u, all_blocks, 0);
        const int buffer = __shfl_sync(~0u, queries.slot, 0) * CONSUMERS + number;
        bar_wait(bars + 8 * (Q_FULL + buffer), queries.phase);
        skip(me, ring, all_blocks - end, all_blocks - 1);  // the first block of a tile is issued without ping-pong
        if (end > 0) attend(a, me, ring, buffer, head, first_row, end, full);
        else if (me.leader) bar_arrive(bars + 8 * (Q_EMPTY + buffer));
        bar_wait(bars + 8 * TILE_FULL, tile_phase);
        tile = __shfl_sync(~0u, load_shared(smem + TILE_OFFSET), 0);
        // The producer does not wait after the last tile. The comparison makes ptxas wait for the index.
        if (me.leader && tile < a.num_tiles) bar_arrive(bars + 8 * TILE_EMPTY);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_cuda_fwd(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
              const __grid_constant__ TensorMap v_map, const __grid_constant__ Problem problem) {
    extern __shared__ __align__(1024) char shared[];
    const u32 smem = (u32)__cvta_generic_to_shared(shared);
    if (threadIdx.x == 0) {
        for (int i = 0; i < BARRIERS; i++) {
            bool by_all = (i >= K_EMPTY && i < V_FULL) || (i >= V_EMPTY && i < TILE_FULL) || i == TILE_EMPTY;
            bar_init(smem + BARRIER_OFFSET + 8 * i, by_all ? 4 * CONSUMERS : i >= Q_EMPTY && i < K_FULL ? 4 : 1);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    // The shuffle makes it warp-uniform for the compiler, which then keeps descriptors in uniform registers.
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (threadIdx.x == 0) produce(problem, &q_map, &k_map, &v_map, smem);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        consume(problem, group - 1, smem);
    }
}
