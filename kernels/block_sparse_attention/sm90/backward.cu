// Block-sparse attention backward for Hopper (sm_90a), blocks of 128 x 128: one main kernel computes the probabilities
// once, and dQ, dK and dV by five GEMMs a tile.
//
//   delta = rowsum(dout * out) - dlse    p = exp(scale * q k^T - lse)     ds = p * (dout v^T - delta)
//   dv = p^T dout                        dk = scale * ds^T q              dq = scale * ds k
//
// Three kernels: preprocess (delta, lse to base 2, zeros for the fp32 accumulator of dq), the main one, and postprocess
// (dq = scale * accumulator).
//
// Main kernel: a CTA owns the 128 keys of a column of the mask. It loops over the blocks of queries in that column's
// list, for each query head of the KV head, in tiles of 128 (D = 64) or 64 (D = 128) queries. One thread, the producer,
// reads the lists, loads by TMA, and passes the index of each tile to the two consumer warp groups. Each of these owns
// 64 keys: their dk and dv stay in registers.
//  - S^T = K Q^T and dP^T = V dO^T have keys as rows, so that P^T and dS^T are A operands in registers for dV += P^T dO
//    and dK += dS^T Q. Only dS goes through shared memory, for dQ = dS K, which reduces over the keys of both groups.
//  - A group computes dQ of 64 queries x 64 columns. Each of its warps adds its eighth of the tile to the fp32
//    accumulator in global memory by a bulk reduction. The accumulator has the element order of wgmma fragments, which
//    postprocess undoes.
//
// Clocks of one SM for a tile of 128 x 128 x 64 or 64 x 128 x 128 (10 * 2^20 FLOP):
//                                      D = 64   D = 128
//   tensor cores, 4096 FLOP/clk           2560      2560
//   shared memory, 128 B/clk              3072      3072   operands of wgmma, dS, TMA, lse, delta; dq in and out
//   exponentials, 16/clk                  1024       512
//   instructions, 4/clk                  ~1000      ~900
// All four must overlap, so the two groups alternate (ping-pong). dS has two buffers and dQ of a tile is computed one
// tile later, so that no group waits for the other's dS. The next S is issued before the exponentials. A column with 6
// of 64 blocks kept has 12 tiles at D = 128, and its prologue and epilogue, which overlap nothing, are a large part. So
// block indices are loaded one block ahead.
//
// The order in which CTAs add to dq is not fixed: dq is not deterministic; dk and dv are.
//
// mbarriers, with their arrivals per phase. One lane of each warp arrives on the empty ones and on those of dS.
//   k_full 1, v_full 1                  the CTA's keys and values, once
//   q_full[s] 1, q_empty[s] 8           queries with their lse, and the index of the tile; do_full, do_empty: dout
//                                       with delta
//   ds_full[b] 8, ds_empty[b] 8         dS of both groups, double-buffered
// Named barriers: KEYS_DONE, ROWS_WRITTEN + group; PING_PONG + group: the group may issue its GEMMs of a tile.
//
// Defined by the launcher: HEAD_DIM (64, 128), IS_CAUSAL, FP16.

#include "backward_ptx.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef IS_CAUSAL
#define IS_CAUSAL 0
#endif

constexpr int D = HEAD_DIM;
constexpr bool CAUSAL = IS_CAUSAL;
constexpr int BM = D == 64 ? 128 : 64;  // queries of a tile: S and dP take BM registers, and dk and dv take D
constexpr int BN = 128;                 // keys of a CTA, and queries of a block of the mask
constexpr int SPLIT = BN / BM;          // tiles of a block
constexpr int SLABS = D / 64;           // 64 columns are a row of the 128-byte swizzle
constexpr int HEADER = 3;               // a line of the table: count, whole, order, then blocks (index.py)
#define V_IN_REGISTERS (HEAD_DIM == 64)  // where registers allow: V is then read from shared memory once
constexpr int Q_STAGES = 3, DO_STAGES = 2;
constexpr int CONSUMER_WARPS = 8, PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
constexpr int KEYS_DONE = 1, ROWS_WRITTEN = 2, PING_PONG = 4;  // named barriers; the last two have one for each group
constexpr int FRAGMENT = BM * D / CONSUMER_WARPS;               // elements of a tile of dq that one warp computes
constexpr u32 FRAGMENT_BYTES = FRAGMENT * 4;

constexpr u32 Q_SLAB = BM * 128, K_SLAB = BN * 128;
constexpr u32 Q_BYTES = SLABS * Q_SLAB, K_BYTES = SLABS * K_SLAB, DS_BYTES = 2 * BM * 128;
constexpr u32 K_AT = 0, V_AT = K_AT + K_BYTES, Q_AT = V_AT + K_BYTES, DO_AT = Q_AT + Q_STAGES * Q_BYTES;
constexpr u32 DS_AT = DO_AT + DO_STAGES * Q_BYTES, DQ_AT = DS_AT + 2 * DS_BYTES;
constexpr u32 LSE_AT = DQ_AT + CONSUMER_WARPS * FRAGMENT_BYTES, DELTA_AT = LSE_AT + Q_STAGES * BM * 4;
constexpr u32 TILE_AT = DELTA_AT + DO_STAGES * BM * 4;  // per stage of queries: first query and index of the tile
constexpr u32 K_FULL = TILE_AT + 8 * Q_STAGES, V_FULL = K_FULL + 8, Q_FULL = V_FULL + 8;
constexpr u32 Q_EMPTY = Q_FULL + 8 * Q_STAGES, DO_FULL = Q_EMPTY + 8 * Q_STAGES, DO_EMPTY = DO_FULL + 8 * DO_STAGES;
constexpr u32 DS_FULL = DO_EMPTY + 8 * DO_STAGES, DS_EMPTY = DS_FULL + 16, SHARED_END = DS_EMPTY + 16;
static_assert(D == 64 || D == 128, "tiles of 128 x 128 x 64 and 64 x 128 x 128");
static_assert(SHARED_END + 1024 <= 232448, "a CTA has 227 KB of shared memory, and 1 KB goes to the alignment");

struct Problem {
    float* dq_sum;       // [B * Hq, m_tiles, BM * D], in the order of the consumers' accumulator fragments
    const float* lse2;   // [B * Hq, m_tiles * BM], log2(e) * lse; +inf for queries that see no key, and for padding
    const float* delta;  // same shape; 0 for those
    const int* table;    // the lines of the columns of the mask
    long long table_batch, table_head;  // 0 where batches or heads share their lists
    int queries, keys, rows, columns, kv_heads, group, all_kv_heads, section, early;
    float scale, scale_log2;
};

// --------------------------------------------------------------------------------------------- the work of a CTA

// The 128 keys of this CTA, and the lists of the query heads that share them.
struct Work {
    int head, batch, first_key, tiles;
    const int* line;  // line of the table for the first of these heads

    DEVICE explicit Work(const Problem& p) {
        // First the `early` longest columns of every head: the list of a global block may be much longer than others.
        // Then sections of heads whose queries, gradients and accumulators fit in L2; within a section the longest
        // lists come first.
        int index = blockIdx.x, first = 0, heads = p.all_kv_heads, before = 0;
        if (index >= p.early * heads) {
            index -= p.early * heads, before = p.early;
            int of_section = p.section * (p.columns - p.early);
            first = index / of_section * p.section, index %= of_section;
            heads = min(p.section, heads - first);
        }
        int all = first + index % heads, rank = before + index / heads, width = HEADER + p.rows;
        batch = all / p.kv_heads, head = all % p.kv_heads;
        const int* table = p.table + batch * p.table_batch + head * p.group * p.table_head;
        int block = table[rank * width + 2];  // the order of lines is that of the first head of a group
        line = table + block * width;
        int kept = 0;
        for (int g = 0; g < p.group; g++) kept += line[g * p.table_head];
        // Shuffles make these warp-uniform for the compiler, which then keeps them in uniform registers.
        first_key = __shfl_sync(~0u, block, 0) * BN, tiles = __shfl_sync(~0u, kept, 0) * SPLIT;
    }
};
template <int stages>
struct Ring {
    int slot = 0;
    u32 parity = 0;
    DEVICE void next() {
        if (++slot == stages) slot = 0, parity ^= 1;
    }
};

DEVICE void produce(const TensorMap& q_map, const TensorMap& do_map, const TensorMap& k_map, const TensorMap& v_map,
                    const Problem& p, const Work& w, u32 base) {
    auto load_keys = [&](const TensorMap& map, u32 at, u32 bar) {
        bar_expect(base + bar, K_BYTES);
        for (int slab = 0; slab < SLABS; slab++)
            for (int half = 0; half < 2; half++)
                tma_load(base + at + slab * K_SLAB + half * 64 * 128, &map, slab * 64, w.first_key + half * 64, w.head,
                         w.batch, base + bar);
    };
    Ring<Q_STAGES> q;
    Ring<DO_STAGES> g;
    bool first = true;
    const int m_tiles = p.rows * SPLIT;
#pragma unroll 1
    for (int member = 0; member < p.group; member++) {
        const int head = w.head * p.group + member;
        const int* line = w.line + member * p.table_head;
        const int count = line[0];
        int block = line[HEADER];
#pragma unroll 1
        for (int step = 0; step < count * SPLIT; step++) {
            const int m = block * SPLIT + step % SPLIT, row = m * BM;
            // Loaded one block ahead: a tile's address depends on it, so its latency would delay the tile's load.
            if (step % SPLIT == SPLIT - 1) block = line[HEADER + min(step / SPLIT + 1, count - 1)];
            const int place = (w.batch * p.kv_heads * p.group + head) * m_tiles + m;
            const long long at = (long long)place * BM;
            if (first) load_keys(k_map, K_AT, K_FULL);
            u32 bar = base + Q_FULL + 8 * q.slot;
            bar_wait(base + Q_EMPTY + 8 * q.slot, q.parity ^ 1);
            store_pair(base + TILE_AT + 8 * q.slot, row, place);
            bar_expect(bar, Q_BYTES + BM * 4);
            for (int slab = 0; slab < SLABS; slab++)
                tma_load(base + Q_AT + q.slot * Q_BYTES + slab * Q_SLAB, &q_map, slab * 64, row, head, w.batch, bar);
            load_row(p.lse2 + at, base + LSE_AT + q.slot * BM * 4, bar, BM * 4);
            if (first) load_keys(v_map, V_AT, V_FULL);
            first = false;
            bar = base + DO_FULL + 8 * g.slot;
            bar_wait(base + DO_EMPTY + 8 * g.slot, g.parity ^ 1);
            bar_expect(bar, Q_BYTES + BM * 4);
            for (int slab = 0; slab < SLABS; slab++)
                tma_load(base + DO_AT + g.slot * Q_BYTES + slab * Q_SLAB, &do_map, slab * 64, row, head, w.batch, bar);
            load_row(p.delta + at, base + DELTA_AT + g.slot * BM * 4, bar, BM * 4);
            q.next(), g.next();
        }
    }
}

// --------------------------------------------------------------------------------------------- consumers

#include "backward_tile.cuh"

// Stores dv and dk of a group by TMA, which omits rows past the last key, from the shared memory of its V and K.
DEVICE void write_keys(const TensorMap& dk_map, const TensorMap& dv_map, const Work& w, int wg, u32 base) {
    fence_async();
    named_sync(ROWS_WRITTEN + wg, 128);
    if (threadIdx.x % 128 == 0) {
        for (int slab = 0; slab < SLABS; slab++) {
            u32 at = base + wg * 64 * 128 + slab * K_SLAB;
            store_box(dv_map, at + V_AT, slab * 64, w.first_key + wg * 64, w.head, w.batch);
            store_box(dk_map, at + K_AT, slab * 64, w.first_key + wg * 64, w.head, w.batch);
        }
        bulk_commit();
    }
    if (threadIdx.x % 32 == 0) bulk_wait();
}
// Writes zeros as dv and dk of keys that no query keeps.
DEVICE void write_zeros(const TensorMap& dk_map, const TensorMap& dv_map, const Work& w, int wg, u32 base) {
    for (int i = threadIdx.x % 128; i < 64 * 128 / 16; i += 128)
        for (int slab = 0; slab < 2 * SLABS; slab++)  // those of K, then those of V
            store_four(base + K_AT + slab * K_SLAB + wg * 64 * 128 + i * 16, 0, 0, 0, 0);
    write_keys(dk_map, dv_map, w, wg, base);
}

DEVICE void consume(const TensorMap& dk_map, const TensorMap& dv_map, const Problem& p, const Work& w, u32 base) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int wg = __shfl_sync(~0u, (int)threadIdx.x / 128 - 1, 0);  // warp-uniform
    if (w.tiles == 0) return write_zeros(dk_map, dv_map, w, wg, base);
    const u32 k_rows = base + K_AT + wg * 64 * 128, v_rows = base + V_AT + wg * 64 * 128;
    const u32 pairs = lane % 4 * 8;
    // dS in shared memory is [group][query][64 keys]. Matrix i of a transposing stmatrix has keys 8 (i % 2) ... and
    // queries 8 (i / 2) ...
    const u32 ds_store = base + DS_AT + wg * (BM * 128) + (lane / 16 * 8 + lane % 8) * 128 +
                         (((2 * warp + lane / 8 % 2) ^ (lane % 8)) * 16);
    const u32 ds_rows = base + DS_AT + (D == 64 ? wg * 64 * 128 : 0);
    const u32 dq_keys = base + K_AT + (D == 64 ? 0 : wg * K_SLAB);
    const u32 dq_fragment = base + DQ_AT + (wg * 4 + warp) * FRAGMENT_BYTES;
    const int offset = p.keys - p.queries;

    float dk[D / 2], dv[D / 2], s[BM / 2], dp[BM / 2], dq[32];
    u32 pt[BM / 4], dst[BM / 4];
#pragma unroll
    for (int i = 0; i < D / 2; i++) dk[i] = dv[i] = 0;

    Ring<Q_STAGES> q;
    Ring<DO_STAGES> g;
    // Address, for ldmatrix or stmatrix, of the four 8x8 matrices in this warp's 16 keys x columns 16 k ... 16 k + 15.
    auto matrices = [&](int k) {
        u32 row = warp * 16 + lane / 8 % 2 * 8 + lane % 8;
        return k / 4 * K_SLAB + row * 128 + (((k % 4 * 2 + lane / 16) ^ (lane % 8)) * 16);
    };
    auto release = [&](u32 bar) {
        if (lane == 0) bar_arrive(base + bar);
    };
    // The tile's first query and its index among all tiles, which the producer has stored, are read where they are
    // needed, to save registers. A leader may arrive on an empty barrier while the read of the index is pending. That
    // is no race: a later store by a thread, unlike one by TMA, is ordered after the read.
    auto place = [&] { return __shfl_sync(~0u, load_one(base + TILE_AT + 8 * q.slot + 4), 0); };
    auto hide = [&](int first_query) {
        bool tail = w.first_key + wg * 64 + 64 > p.keys;
        bool diagonal = CAUSAL && first_query < w.first_key + wg * 64 + 63 - offset;
        if (tail || diagonal) {
            const int lane = lane_number(), key = w.first_key + wg * 64 + warp * 16 + lane / 4;  // and key + 8
            int shift = CAUSAL ? key - offset - first_query : 0, pair = lane % 4 * 2;
            int limit0 = key < p.keys ? shift : BM, limit1 = key + 8 < p.keys ? shift + (CAUSAL ? 8 : 0) : BM;
            mask(s, limit0 - pair, limit1 - pair);
        }
        const int end = p.queries - first_query;
        if (end < BM) mask_end(s, end - lane_number() % 4 * 2);
    };
    // Once S is complete: probabilities, overlapped with the GEMM of dP. Then dS, to registers and to shared memory.
    auto softmax = [&](int t) {
        const int first_query = load_one(base + TILE_AT + 8 * q.slot);
        wgmma_wait<1>();
        pin(s);
        hide(first_query);
        probabilities(s, base + LSE_AT + q.slot * BM * 4 + pairs, p.scale_log2);
        wgmma_wait<0>();
        pin(dp);
        score_gradients(s, dp, pt, dst, base + DELTA_AT + g.slot * BM * 4 + pairs);
        bar_wait(base + DS_EMPTY + (t & 1) * 8, ((t - 1) >> 1) & 1);
#pragma unroll
        for (int k = 0; k < BM / 16; k++)
            store_transposed(ds_store + (t & 1) * DS_BYTES + k * 16 * 128, dst[4 * k], dst[4 * k + 1], dst[4 * k + 2],
                             dst[4 * k + 3]);
        fence_async();
        __syncwarp();
        release(DS_FULL + (t & 1) * 8);
    };
    // Adds one warp's dq, 16 queries x 64 columns, to the fp32 accumulator. Discarded unless `real`.
    auto add_dq = [&](int place, bool real) {
        float* to = p.dq_sum + (long long)place * (BM * D) + (wg * 4 + warp) * FRAGMENT;
        if (lane == 0) bulk_wait_read();
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 8; j++)
            store_four(dq_fragment + j * 512 + lane * 16, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
        fence_async();
        __syncwarp();
        if (lane == 0 && real) reduce_bulk(to, dq_fragment, FRAGMENT_BYTES), bulk_commit();
    };
    auto add_to_dv = [&] { gradient(dv, pt, (base + DO_AT + g.slot * Q_BYTES) / 16); };
    auto add_to_dk = [&] { gradient(dk, dst, (base + Q_AT + q.slot * Q_BYTES) / 16); };
    auto multiply_ds = [&](int t) {
        bar_wait(base + DS_FULL + (t & 1) * 8, (t >> 1) & 1);
        wgmma_fence();
        query_gradient(dq, (ds_rows + (t & 1) * DS_BYTES) / 16, dq_keys / 16);
    };

    bar_wait(base + K_FULL, 0);
    bar_wait(base + Q_FULL, 0);
    wgmma_fence();
    scores(s, k_rows / 16, (base + Q_AT) / 16);
    bar_wait(base + V_FULL, 0);
#if V_IN_REGISTERS
    u32 v_own[D / 4];
#pragma unroll
    for (int k = 0; k < D / 16; k++) load_matrices(v_own + 4 * k, v_rows + matrices(k));
#else
    const u32 v_own = v_rows / 16;
#endif
    bar_wait(base + DO_FULL, 0);
    wgmma_fence();
    scores(dp, v_own, (base + DO_AT) / 16);
    softmax(0);
    if (wg == 1 && w.tiles > 1) named_arrive(PING_PONG, 256);
    int at_before = 0;
    // Main loop. Tile t is in registers as pt and dst. No wgmma is in flight at the end of an iteration. The wgmma
    // groups in flight during it, oldest first:
    //   dV | dV dK dQ | dK dQ | dK dQ S | dQ S | S | S dP
    for (int t = 0; t + 1 < w.tiles; t++) {
        named_sync(PING_PONG + wg, 256);
        pin(pt), pin(dst), pin(dk), pin(dv);
        wgmma_fence();
        add_to_dv();
        add_to_dk();
        multiply_ds(t - 1);  // for t = 0 the buffer is not initialised, and add_dq discards the result
        u32 old_q = q.slot;
        const int at = place();
        q.next();
        bar_wait(base + Q_FULL + 8 * q.slot, q.parity);
        wgmma_wait<2>();
        pin(pt), pin(dv);
        release(DO_EMPTY + 8 * g.slot);
        g.next();
        wgmma_fence();
        scores(s, k_rows / 16, (base + Q_AT + q.slot * Q_BYTES) / 16);
        if (wg == 0 || t + 2 < w.tiles) named_arrive(PING_PONG + (wg ^ 1), 256);
        wgmma_wait<2>();
        pin(dst), pin(dk);
        release(Q_EMPTY + 8 * old_q);
        wgmma_wait<1>();
        pin(dq);
        release(DS_EMPTY + (~t & 1) * 8);
        add_dq(at_before, t > 0);
        at_before = at;
        bar_wait(base + DO_FULL + 8 * g.slot, g.parity);
        wgmma_fence();
        scores(dp, v_own, (base + DO_AT + g.slot * Q_BYTES) / 16);
        softmax(t + 1);
    }
    const int last = w.tiles - 1;
    pin(pt), pin(dst), pin(dk), pin(dv);
    wgmma_fence();
    add_to_dv(), add_to_dk(), multiply_ds(last - 1);
    wgmma_wait<0>();
    pin(pt), pin(dst), pin(dk), pin(dv), pin(dq);
    add_dq(at_before, last > 0);
    multiply_ds(last);
    wgmma_wait<0>();
    pin(dq);
    add_dq(place(), true);

    named_sync(KEYS_DONE, 256);  // both groups have read K and V: dk and dv reuse their shared memory
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        u32 to = matrices(k);
        const float *a = dv + 8 * k, *b = dk + 8 * k;
        store_matrices(v_rows + to, pack(a[0], a[1]), pack(a[2], a[3]), pack(a[4], a[5]), pack(a[6], a[7]));
        store_matrices(k_rows + to, pack(b[0] * p.scale, b[1] * p.scale), pack(b[2] * p.scale, b[3] * p.scale),
                       pack(b[4] * p.scale, b[5] * p.scale), pack(b[6] * p.scale, b[7] * p.scale));
    }
    write_keys(dk_map, dv_map, w, wg, base);
}

extern "C" __global__ void __launch_bounds__(384, 1)
block_sparse_attention_cuda_bwd(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap do_map,
                                const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
                                const __grid_constant__ TensorMap dk_map, const __grid_constant__ TensorMap dv_map,
                                const Problem p) {
    extern __shared__ char memory[];
    const u32 base = (shared_address(memory) + 1023) & ~1023u;
    if (threadIdx.x == 0) {
        auto init = [&](u32 bar, int slots, u32 arrivals) {
            for (int i = 0; i < slots; i++) bar_init(base + bar + 8 * i, arrivals);
        };
        init(K_FULL, 1, 1), init(V_FULL, 1, 1), init(Q_FULL, Q_STAGES, 1), init(DO_FULL, DO_STAGES, 1);
        init(Q_EMPTY, Q_STAGES, CONSUMER_WARPS), init(DO_EMPTY, DO_STAGES, CONSUMER_WARPS);
        init(DS_FULL, 2, CONSUMER_WARPS), init(DS_EMPTY, 2, CONSUMER_WARPS);
        fence_init();
    }
    __syncthreads();
    const Work w(p);
    if (threadIdx.x < 128) {
        dec_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) produce(q_map, do_map, k_map, v_map, p, w, base);
    } else {
        inc_registers<CONSUMER_REGISTERS>();
        consume(dk_map, dv_map, p, w, base);
    }
}

#include "backward_ends.cuh"
