// The backward of attention on Hopper in its fused form: the probabilities are computed once, five products a tile.
//
//   delta = rowsum(dout * out) - dlse    p = exp(scale * q k^T - lse)     ds = p * (dout v^T - delta)
//   dv = p^T dout                        dk = scale * ds^T q              dq = scale * ds k
//
// Three kernels: `prepare` (delta, lse in base 2, zeros in dq's fp32 sum), `backward`, `finish` (dq = scale * sum);
// and `finish_keys` where CTAs shared the keys of a last round.
// A single block of keys (SINGLE) has all of a query's work in one CTA. `backward` then does without the first and the
// last: two warps that would be idle compute lse and delta from tiles of out, and dq is written scaled and cast. What
// belongs to an element of q crosses memory in 8 bytes (q, dout, out, dq), not in 18 (dout twice, the sum in and out).
// Where a CTA has all blocks of keys of a head, one after the other (WHOLE, backward_kv_head.cuh), it knows the first
// and the last visit to a tile of queries: `prepare` zeros nothing, and `finish` is not called.
// Many short blocks of keys (CHAINED, backward_persistent.cuh): a CTA stays on each SM and does one after another.
// With ROLES (backward_roles.cuh) CTAs of `backward` itself do the work of the first and of the last.
//
// `backward`: a CTA owns 128 keys and goes over the queries that see them, 128 (D = 64), 64 or 80 (D = 128) at a time.
// One warp loads by TMA; two warp groups own 64 keys each: dk and dv stay in their registers.
//   S^T = K Q^T and dP^T = V dO^T have the keys as rows. So P^T and dS^T come out as the register operand of
//   dV += P^T dO and dK += dS^T Q; dS alone goes through shared memory, for dQ = dS K, which needs both groups' keys.
//   A group computes dQ for half of the tile (64 queries x 64 columns; of 80 queries dQ^T, whose 64 rows are columns of
//   the head) and each of its warps adds an eighth of the tile to the fp32 sum in the order of its registers, which
//   `finish` knows.
//
// A tile of 128 x 128 x 64 or 64 x 128 x 128 (10 * 2^20 FLOP) or 80 x 128 x 128 (12.5 * 2^20) in clocks of one SM:
//                                      D = 64   D = 128, 64   D = 128, 80
//   tensor cores, 4096 FLOP/clk           2560          2560          3200
//   shared memory, 128 B/clk              3072          3072          3648   operands of wgmma, dS, TMA, lse and delta;
//                                                                            dq in and out
//   exponentials, 16/clk                  1024           512           640
//   instructions, 4/clk                  ~1000          ~900         ~1050
// So none may wait for the others: the two groups run apart. dQ of a tile is computed one tile later, when the other
// group's dS has long arrived, with two buffers of dS; and the next S is issued before the exponentials of anything.
// With 80 queries keys are read from shared memory a fifth less often for each query, at two prices. Registers: dQ is
// added before the next S begins, beside dK, for there is no room for both. Shared memory: q has two stages, not three.
//
// The order in which CTAs add to dq is not fixed: dq is not repeatable bit for bit, but for SINGLE and WHOLE;
// dk and dv are.

#include "backward_ptx.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#ifndef IS_CAUSAL
#define IS_CAUSAL 0
#endif

constexpr int D = HEAD_DIM;
constexpr bool CAUSAL = IS_CAUSAL;
#ifndef QUERIES
#define QUERIES (HEAD_DIM == 64 ? 128 : 64)
#endif
constexpr int BM = QUERIES;             // queries of a tile: S and dP need BM registers beside dk's and dv's D
constexpr bool TIGHT = BM == 80;        // S, dP, dk and dv leave no registers for dQ beside them
constexpr bool TURNED = BM % 64 != 0;   // dQ^T = K^T dS: the rows of a wgmma are 64
constexpr int DQ_REGISTERS = TURNED ? BM / 2 : 32;
constexpr int BN = 128;                 // keys of a CTA
constexpr int SLABS = D / 64;           // a row of 64 columns is the 128 bytes that TMA and wgmma swizzle
#ifndef SINGLE  // 1: there is one block of keys, and its CTA alone sees its queries
#define SINGLE 0
#endif
#ifndef WHOLE  // 1: a CTA has all blocks of keys of a head
#define WHOLE 0
#endif
#ifndef CHAINED  // 1: a CTA does blocks of keys one after the other
#define CHAINED 0
#endif
#ifndef ROLES  // 1: CTAs of the same launch do what `prepare` and `finish` do
#define ROLES 0
#endif
#define V_IN_REGISTERS (HEAD_DIM == 64 && !SINGLE && !IS_CAUSAL)  // where there is room: it is read once
constexpr int Q_STAGES = TIGHT || SINGLE || (CHAINED && D == 128) ? 2 : 3, DO_STAGES = 2;
constexpr int CONSUMER_WARPS = 8;
constexpr int KEYS_DONE = 1, ROWS_WRITTEN = 2, FIRST_TURN = 4;  // named barriers; the last two have one for each group
constexpr int PIECE = BM * D / CONSUMER_WARPS;  // values of dq that one warp makes of one tile
constexpr u32 PIECE_BYTES = PIECE * (SINGLE ? 2 : 4);

constexpr u32 Q_SLAB = BM * 128, K_SLAB = BN * 128;
constexpr u32 Q_BYTES = SLABS * Q_SLAB, K_BYTES = SLABS * K_SLAB, DS_BYTES = 2 * BM * 128;
constexpr u32 K_AT = 0, V_AT = K_AT + (CHAINED ? 2 : 1) * K_BYTES, Q_AT = V_AT + K_BYTES;
constexpr u32 DO_AT = Q_AT + Q_STAGES * Q_BYTES, DS_AT = DO_AT + DO_STAGES * Q_BYTES, DQ_AT = DS_AT + 2 * DS_BYTES;
constexpr u32 OUT_AT = DQ_AT + CONSUMER_WARPS * PIECE_BYTES;  // beside dout, where SINGLE
constexpr u32 ROWS_BYTES = 16 * 128, CAST_AT = OUT_AT;  // of 16 rows of a slab; for each warp, where WHOLE
constexpr u32 LSE_AT = OUT_AT + (SINGLE ? DO_STAGES * Q_BYTES : WHOLE ? CONSUMER_WARPS * ROWS_BYTES : 0);
constexpr u32 DELTA_AT = LSE_AT + Q_STAGES * BM * 4;
constexpr u32 BAR_AT = DELTA_AT + DO_STAGES * BM * 4;
constexpr u32 K_FULL = BAR_AT, V_FULL = K_FULL + 8, Q_FULL = V_FULL + 8, Q_EMPTY = Q_FULL + 8 * Q_STAGES;
constexpr u32 DO_FULL = Q_EMPTY + 8 * Q_STAGES, DO_EMPTY = DO_FULL + 8 * DO_STAGES;
constexpr u32 DS_FULL = DO_EMPTY + 8 * DO_STAGES, DS_EMPTY = DS_FULL + 16;
constexpr u32 ROWS_FULL = DS_EMPTY + 16, K_EMPTY = ROWS_FULL + (SINGLE ? 8 * DO_STAGES : 0), V_EMPTY = K_EMPTY + 8;
constexpr u32 SUM_FULL = V_EMPTY + 8, TOLD_AT = WHOLE ? SUM_FULL + 8 * CONSUMER_WARPS : K_EMPTY;
constexpr u32 SHARED_END = TOLD_AT + 8 * Q_STAGES;
static_assert(BM == 128 ? D == 64 : D == 128 && (BM == 64 || BM == 80), "64 by 128, 128 by 64 or 80");
static_assert(!SINGLE || PIECE == 16 * 64, "a warp's part of dq is a box of rows that TMA swizzles");
static_assert(!WHOLE || (BM == 64 && !SINGLE), "a warp's part of dq is a box of rows, and an fp32 sum");
static_assert(!ROLES || (D == 128 && !SINGLE && !WHOLE), "tiles of 64 or 80 queries, summed by all");
static_assert(SHARED_END <= 232448, "a CTA has 227 KB of shared memory");

#include "backward_work.cuh"

// What the producer tells consumers of each tile of queries, beside its stage of q: where its dq goes (of WHOLE twice
// that, and 1 more at the last visit), and which of the tiles it is.
DEVICE void tell(u32 base, u32 slot, int place, int m) { store_pair(base + TOLD_AT + 8 * slot, place, m); }
DEVICE int told_place(u32 base, u32 slot) { return load_shared(base + TOLD_AT + 8 * slot); }
DEVICE int told_tile(u32 base, u32 slot) { return load_shared(base + TOLD_AT + 8 * slot + 4); }

// The keys or values of a block.
DEVICE void load_block(const TensorMap& map, const Work& w, u32 to, u32 bar) {
    bar_expect(bar, K_BYTES);
    for (int part = 0; part < 2 * SLABS; part++)
        tma_load(to + part * 64 * 128, &map, part / 2 * 64, w.first_key + part % 2 * 64, w.head, w.batch, bar);
}
// `await` is called before the first of lse and delta is loaded.
template <class Await>
DEVICE void produce(const TensorMap& q_map, const TensorMap& do_map, const TensorMap& k_map, const TensorMap& v_map,
                    const Problem& p, const Work& w, u32 base, Await await) {
    Tile tile(w, p);
    Ring<Q_STAGES> q;
    Ring<DO_STAGES> g;
    int first_head = w.batch * p.kv_heads * p.group;
#pragma unroll 1
    for (int t = 0; t < w.tiles; t++) {
        anew(base);
        int head = tile.all_heads - first_head, row = tile.m * BM;
        long long at = (long long)tile.all_heads * p.m_tiles * BM + row;
        if (t == 0) load_block(k_map, w, base + K_AT, base + K_FULL);
        u32 bar = base + Q_FULL + 8 * q.slot;
        bar_wait(base + Q_EMPTY + 8 * q.slot, q.parity ^ 1);
        tell(base, q.slot, tile.all_heads * p.m_tiles + tile.m, tile.m);
        bar_expect(bar, Q_BYTES + BM * 4);
        for (int slab = 0; slab < SLABS; slab++)
            tma_load(base + Q_AT + q.slot * Q_BYTES + slab * Q_SLAB, &q_map, slab * 64, row, head, w.batch, bar);
        if (t == 0) await();
        load_row(p.lse2 + at, base + LSE_AT + q.slot * BM * 4, bar, BM * 4);
        if (t == 0) load_block(v_map, w, base + V_AT, base + V_FULL);
        bar = base + DO_FULL + 8 * g.slot;
        bar_wait(base + DO_EMPTY + 8 * g.slot, g.parity ^ 1);
        bar_expect(bar, Q_BYTES + BM * 4);
        for (int slab = 0; slab < SLABS; slab++)
            tma_load(base + DO_AT + g.slot * Q_BYTES + slab * Q_SLAB, &do_map, slab * 64, row, head, w.batch, bar);
        load_row(p.delta + at, base + DELTA_AT + g.slot * BM * 4, bar, BM * 4);
        q.next(), g.next(), tile.next(w, p);
    }
}

#include "backward_single_block.cuh"
#include "backward_kv_head.cuh"
#include "backward_roles.cuh"

// --------------------------------------------------------------------------------------------- consumers

// S^T or dP^T of 64 keys x BM queries; `rows` and `columns` in shared memory.
DEVICE void scores(float (&c)[BM / 2], u32 rows, u32 columns) {
    anew(rows);
#pragma unroll
    for (int k = 0; k < D / 16; k++)
        mma<0>(c, along(rows + k / 4 * (K_SLAB / 16) + k % 4 * 2), along(columns + k / 4 * (Q_SLAB / 16) + k % 4 * 2),
               k != 0);
    wgmma_commit();
}
#if V_IN_REGISTERS
// The same with V from registers.
DEVICE void scores(float (&c)[BM / 2], const u32 (&rows)[D / 4], u32 columns) {
#pragma unroll
    for (int k = 0; k < D / 16; k++)
        mma<0>(c, rows + 4 * k, along(columns + k / 4 * (Q_SLAB / 16) + k % 4 * 2), k != 0);
    wgmma_commit();
}
#endif
// dV += P^T dO or dK += dS^T Q
DEVICE void gradient(float (&c)[D / 2], const u32 (&a)[BM / 4], u32 columns) {
#pragma unroll
    for (int k = 0; k < BM / 16; k++) mma<1>(c, a + 4 * k, across<Q_SLAB>(columns + k * 128), 1);
    wgmma_commit();
}
// dQ = dS K of 64 queries x 64 columns, or dQ^T = K^T dS of 64 columns x BM queries, over all 128 keys.
DEVICE void query_gradient(float (&c)[DQ_REGISTERS], u32 ds, u32 keys) {
    anew(keys);
#pragma unroll
    for (int k = 0; k < BN / 16; k++) {
        u64 a = along(ds + k / 4 * (BM * 8) + k % 4 * 2), b = across<K_SLAB>(keys + k * 128);
        if constexpr (TURNED) mma<0, 1>(c, b, a, k != 0);
        else mma<1>(c, a, b, k != 0);
    }
    wgmma_commit();
}

// The piece of dq of this warp of 8, 16 queries x 64 columns or 80 queries x 16, is added to the sum of the tile at
// `place`, by a reduction of its own from `piece` of shared memory, its own. Unless it is `real`, it is thrown away.
// Callers know both: worked out here, for every tile, they cost 1 to 2 % of the backward under a mask.
DEVICE void add_to_sum(const Problem& p, const float (&dq)[DQ_REGISTERS], int place, bool real, u32 piece, int warp) {
    const int lane = threadIdx.x % 32;
    float* to = p.dq_sum + (long long)place * (BM * D) + warp * PIECE;
    if (lane == 0) bulk_wait_read();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < DQ_REGISTERS / 4; j++)
        store_four(piece + j * 512 + lane * 16, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
    fence_async();
    __syncwarp();
    if (lane == 0 && real) reduce_bulk(to, piece, PIECE_BYTES), bulk_commit();
}

// Two keys' bounds: query column c of the tile sees key `row` when c >= limit.
DEVICE void mask(float (&s)[BM / 2], int limit0, int limit1, float hidden) {
#pragma unroll
    for (int j = 0; j < BM / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (8 * j + (e & 1) < (e < 2 ? limit0 : limit1)) s[4 * j + e] = hidden;
}
DEVICE void probabilities(float (&s)[BM / 2], u32 lse, float scale_log2) {
#pragma unroll
    for (int j = 0; j < BM / 8; j++) {
        Float2 l = shared_pair(lse + j * 32);
#pragma unroll
        for (int e = 0; e < 4; e++) s[4 * j + e] = exp2_(s[4 * j + e] * scale_log2 - (e & 1 ? l.y : l.x));
    }
}
// The probabilities are computed before what follows. `pin` binds the front end alone: ptxas sinks exponentials, but for
// a few, behind the wait for dP, where nothing runs beside them. It moves nothing over a branch, so here is one that
// depends on each of them. None is negative; were the sign of a NaN set, it would wait for a barrier that is open.
DEVICE void settle(float (&p)[BM / 2], u32 open) {
    pin(p);
    int bits = 0;
#pragma unroll
    for (int i = 0; i < BM / 2; i++) bits |= __float_as_int(p[i]);
    if (bits < 0) bar_wait(open, 0);
}
DEVICE void score_gradients(const float (&s)[BM / 2], const float (&dp)[BM / 2], u32 (&p)[BM / 4],
                                                u32 (&ds)[BM / 4], u32 delta) {
#pragma unroll
    for (int j = 0; j < BM / 8; j++) {
        Float2 d = shared_pair(delta + j * 32);
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int i = 4 * j + 2 * e;
            p[i / 2] = pack(s[i], s[i + 1]);
            ds[i / 2] = pack(s[i] * (dp[i] - d.x), s[i + 1] * (dp[i + 1] - d.y));
        }
    }
}

#if !CHAINED  // else backward_persistent.cuh has a loop and a kernel of its own
DEVICE void consume(const TensorMap& dk_map, const TensorMap& dv_map, const TensorMap& dq_map, const Problem& p,
                    const Work& w, Progress& now, u32 base) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int wg = __shfl_sync(~0u, (int)threadIdx.x / 128 - 1, 0);  // known to be one to the warp
    const u32 k_rows = base + K_AT + wg * 64 * 128, v_rows = base + V_AT + wg * 64 * 128;
    const u32 pairs = lane % 4 * 8;
    // dS is kept as [group][query][64 keys]: matrix i of a transposed store is keys 8 (i % 2) .., queries 8 (i / 2) ..
    const u32 ds_store = base + DS_AT + wg * (BM * 128) + (lane / 16 * 8 + lane % 8) * 128 +
                         (((2 * warp + lane / 8 % 2) ^ (lane % 8)) * 16);
    const u32 ds_rows = base + DS_AT + (D == 64 ? wg * 64 * 128 : 0);
    const u32 dq_keys = base + K_AT + (D == 64 ? 0 : wg * K_SLAB);
    [[maybe_unused]] const u32 dq_piece = base + DQ_AT + (wg * 4 + warp) * PIECE_BYTES;
    const int offset = p.keys - p.queries;

    float dk[D / 2], dv[D / 2], s[BM / 2], dp[BM / 2], dq[DQ_REGISTERS];
    u32 pt[BM / 4], dst[BM / 4];
#pragma unroll
    for (int i = 0; i < D / 2; i++) dk[i] = dv[i] = 0;

    Ring<Q_STAGES>& q = now.q;
    Ring<DO_STAGES>& g = now.g;
    // Four 8x8 matrices of 16 rows x columns 16 k .. of this warp's part of a tile of keys, as the products have them.
    auto matrices = [&](int k) {
        u32 row = warp * 16 + lane / 8 % 2 * 8 + lane % 8;
        return k / 4 * K_SLAB + row * 128 + (((k % 4 * 2 + lane / 16) ^ (lane % 8)) * 16);
    };
    bool diagonal = false;  // whether the mask cuts through the tile of which `place` was
    auto place = [&] {
        if (CAUSAL) diagonal = told_tile(base, q.slot) * BM < w.first_key + wg * 64 + 63 - offset;
        return told_place(base, q.slot);
    };
    auto release = [&](u32 bar) {
        if (lane == 0) bar_arrive(base + bar);
    };
    auto hide = [&] {
        bool tail = w.first_key + wg * 64 + 64 > p.keys;
        if (tail || diagonal) {
            const int key = w.first_key + wg * 64 + warp * 16 + lane / 4;  // and key + 8
            int shift = CAUSAL ? key - offset - told_tile(base, q.slot) * BM : 0, pair = lane % 4 * 2;
            float hidden = p.scale > 0 ? -INFINITE : INFINITE;  // the scale comes after
            int limit0 = key < p.keys ? shift : BM, limit1 = key + 8 < p.keys ? shift + (CAUSAL ? 8 : 0) : BM;
            mask(s, limit0 - pair, limit1 - pair, hidden);
        }
    };
    // S done: the probabilities, while dP is under way; then dS, kept in registers and written for both groups.
    auto softmax = [&](int t) {
        wgmma_wait<1>();
        pin(s);
        hide();
        if (SINGLE) bar_wait(base + ROWS_FULL + 8 * g.slot, g.parity);
        probabilities(s, base + LSE_AT + (SINGLE ? g.slot : q.slot) * BM * 4 + pairs, p.scale_log2);
        if (TIGHT) settle(s, base + K_FULL);
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
    auto add_dq = [&](int tile_place, bool real) {
#if WHOLE
        if (tile_place >= 0) add_whole(dq_map, p, w, now, dq, tile_place, base);
#elif SINGLE
        if (lane == 0) bulk_wait_read();
        __syncwarp();
        u32 to = dq_piece + (matrices(0) - warp * PIECE_BYTES);  // of lane 0: the piece itself
        anew(to);
#pragma unroll
        for (int k = 0; k < DQ_REGISTERS / 8; k++) {
            const float* a = dq + 8 * k;
            store_matrices(to ^ (k * 32), pack(a[0] * p.scale, a[1] * p.scale), pack(a[2] * p.scale, a[3] * p.scale),
                           pack(a[4] * p.scale, a[5] * p.scale), pack(a[6] * p.scale, a[7] * p.scale));
        }
        fence_async();
        __syncwarp();
        if (lane == 0 && real) {
            int head = tile_place / p.m_tiles - w.batch * p.kv_heads * p.group, row = tile_place % p.m_tiles * BM;
            if (D == 64) store_box(dq_map, to, 0, row + wg * 64 + warp * 16, head, w.batch);
            else store_box(dq_map, to, wg * 64, row + warp * 16, head, w.batch);
            bulk_commit();
        }
#else
        add_to_sum(p, dq, tile_place, real, dq_piece, wg * 4 + warp);
#endif
    };
    auto wait_ds = [&](int t) { bar_wait(base + DS_FULL + (t & 1) * 8, (t >> 1) & 1); };

    const u32 keys_parity = WHOLE ? w.first_key / BN & 1 : 0;
    bar_wait(base + K_FULL, keys_parity);
    bar_wait(base + Q_FULL + 8 * q.slot, q.parity);
    wgmma_fence();
    scores(s, k_rows / 16, (base + Q_AT + q.slot * Q_BYTES) / 16);
    bar_wait(base + V_FULL, keys_parity);
#if V_IN_REGISTERS
    u32 v_own[D / 4];
#pragma unroll
    for (int k = 0; k < D / 16; k++) load_matrices(v_own + 4 * k, v_rows + matrices(k));
#else
    const u32 v_own = v_rows / 16;
#endif
    bar_wait(base + DO_FULL + 8 * g.slot, g.parity);
    wgmma_fence();
    scores(dp, v_own, (base + DO_AT + g.slot * Q_BYTES) / 16);
    auto add_to_dv = [&] { gradient(dv, pt, (base + DO_AT + g.slot * Q_BYTES) / 16); };
    auto add_to_dk = [&] { gradient(dk, dst, (base + Q_AT + q.slot * Q_BYTES) / 16); };
    auto multiply_ds = [&](int t) {
        wait_ds(t);
        wgmma_fence();
        query_gradient(dq, (ds_rows + (t & 1) * DS_BYTES) / 16, dq_keys / 16);
    };

    const int first = now.tiles, end = first + w.tiles;
    int at = place(), at_before = WHOLE ? -1 : at;
    softmax(first);
    if (WHOLE) {  // what the block before has added to sums is there
        if (lane == 0) bulk_wait();
        __syncwarp();
    }
    if (wg == 1 && end - first > 1) named_arrive(FIRST_TURN, 256);
    // Tile t is in registers as pt and dst. Nothing is in flight where the loop closes. In flight, oldest first:
    //   dV | dV dK dQ | dK dQ | dK dQ S | dQ S | S | S dP            and where registers are tight
    //   dV | dV dQ dK | dQ dK | dK | dK S | S | S dP
    for (int t = first; t + 1 < end; t++) {
        auto finish_dq = [&] {
            wgmma_wait<1>();
            pin(dq);
            release(DS_EMPTY + (~t & 1) * 8);
            add_dq(at_before, t > first);
        };
        if (WHOLE) load_sum(p, w, at_before, base);
        named_sync(FIRST_TURN + wg, 256);
        pin(pt), pin(dst), pin(dk), pin(dv);
        wgmma_fence();
        add_to_dv();
        if (!TIGHT) add_to_dk();
        multiply_ds(t - 1);  // before tile 0 it is open: dq of nothing is computed there and thrown away
        if (TIGHT) add_to_dk();
        u32 old_q = q.slot;
        q.next();
        bar_wait(base + Q_FULL + 8 * q.slot, q.parity);
        wgmma_wait<2>();
        pin(pt), pin(dv);
        release(DO_EMPTY + 8 * g.slot);
        g.next();
        if (TIGHT) finish_dq();
        wgmma_fence();
        scores(s, k_rows / 16, (base + Q_AT + q.slot * Q_BYTES) / 16);
        if (wg == 0 || t + 2 < end) named_arrive(FIRST_TURN + (wg ^ 1), 256);
        wgmma_wait<TIGHT ? 1 : 2>();
        pin(dst), pin(dk);
        release(Q_EMPTY + 8 * old_q);
        if (!TIGHT) finish_dq();
        at_before = at, at = place();
        bar_wait(base + DO_FULL + 8 * g.slot, g.parity);
        wgmma_fence();
        scores(dp, v_own, (base + DO_AT + g.slot * Q_BYTES) / 16);
        softmax(t + 1);
    }
    const int last = end - 1;
    if (WHOLE) {
        release(V_EMPTY);
        load_sum(p, w, at_before, base);
    }
    pin(pt), pin(dst), pin(dk), pin(dv);
    wgmma_fence();
    add_to_dv(), add_to_dk(), multiply_ds(last - 1);
    wgmma_wait<0>();
    pin(pt), pin(dst), pin(dk), pin(dv), pin(dq);
    if (WHOLE) {
        release(DS_EMPTY + (~last & 1) * 8), release(Q_EMPTY + 8 * q.slot);
        release(DO_EMPTY + 8 * g.slot);
    }
    add_dq(at_before, last > first);
    if (WHOLE) load_sum(p, w, at, base);
    multiply_ds(last);
    wgmma_wait<0>();
    pin(dq);
    if (WHOLE) release(K_EMPTY);
    add_dq(at, true);
    if (WHOLE) {  // the next block's K and V are on their way to where these were: dv and dk leave as dq does
        store_rows(dv_map, w, dv, 1, base), store_rows(dk_map, w, dk, p.scale, base);
        q.next(), g.next(), now.tiles = end;
        return;
    }

    if (w.part >= 0) {
        if (lane == 0) bulk_wait_read();
        float* to = p.parts + (long long)w.part * (2 * BN * D) + (wg * 4 + warp) * (16 * D) + lane * 4;
#pragma unroll
        for (int j = 0; j < D / 8; j++) {
            *(Float4*)(to + j * 128) = {dv[4 * j], dv[4 * j + 1], dv[4 * j + 2], dv[4 * j + 3]};
            *(Float4*)(to + j * 128 + BN * D) = {dk[4 * j], dk[4 * j + 1], dk[4 * j + 2], dk[4 * j + 3]};
        }
        return;
    }
    // Both groups are done with K and V: dk and dv take their places, and TMA leaves out the rows that do not exist.
    named_sync(KEYS_DONE, 256);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        u32 to = matrices(k);
        const float *a = dv + 8 * k, *b = dk + 8 * k;
        store_matrices(v_rows + to, pack(a[0], a[1]), pack(a[2], a[3]), pack(a[4], a[5]), pack(a[6], a[7]));
        store_matrices(k_rows + to, pack(b[0] * p.scale, b[1] * p.scale), pack(b[2] * p.scale, b[3] * p.scale),
                       pack(b[4] * p.scale, b[5] * p.scale), pack(b[6] * p.scale, b[7] * p.scale));
    }
    fence_async();
    named_sync(ROWS_WRITTEN + wg, 128);
    if (threadIdx.x % 128 == 0) {
        for (int slab = 0; slab < SLABS; slab++) {
            store_box(dv_map, v_rows + slab * K_SLAB, slab * 64, w.first_key + wg * 64, w.head, w.batch);
            store_box(dk_map, k_rows + slab * K_SLAB, slab * 64, w.first_key + wg * 64, w.head, w.batch);
        }
        bulk_commit();
    }
    if (lane == 0) {
        if (ROLES) bulk_wait();  // others are told that dq is there
        else bulk_wait_read();
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
attention_cuda_bwd(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap do_map,
         const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
         const __grid_constant__ TensorMap dk_map, const __grid_constant__ TensorMap dv_map, const Problem p,
         const __grid_constant__ TensorMap dq_map, const __grid_constant__ TensorMap out_map  // SINGLE, WHOLE, ROLES
#if ROLES
         , const __grid_constant__ Roles roles) {
#else
         ) {
#endif
    const u32 base = shared_memory();
#if ROLES
    const Place place(roles);
    if (place.role == PREPARE) return prepare_span(out_map, do_map, p, roles, place, base);
    if (place.role == FINISH) return finish_span(dq_map, p, roles, place, base);
#endif
    if (threadIdx.x == 0) {
        auto init = [&](u32 bar, int slots, u32 arrivals) {
            for (int i = 0; i < slots; i++) bar_init(base + bar + 8 * i, arrivals);
        };
        init(K_FULL, 1, 1), init(V_FULL, 1, 1), init(Q_FULL, Q_STAGES, 1), init(DO_FULL, DO_STAGES, 1);
        init(Q_EMPTY, Q_STAGES, CONSUMER_WARPS), init(DO_EMPTY, DO_STAGES, CONSUMER_WARPS);
        init(DS_FULL, 2, CONSUMER_WARPS), init(DS_EMPTY, 2, CONSUMER_WARPS);
        if (SINGLE) init(ROWS_FULL, DO_STAGES, ROW_WARPS);
        if (WHOLE) init(K_EMPTY, 2, CONSUMER_WARPS), init(SUM_FULL, CONSUMER_WARPS, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
#if ROLES
    Work w(p, place.item);
#else
    Work w(p);
#endif
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
#if SINGLE
        if (threadIdx.x == 0) produce_single(q_map, do_map, k_map, v_map, out_map, p, w, base);
        if (threadIdx.x >= 32 && threadIdx.x < 32 + 32 * ROW_WARPS) prepare_tiles(p, w, base);
#elif WHOLE
        if (threadIdx.x == 0) produce_whole(q_map, do_map, k_map, v_map, p, w, base);
#else
        auto await = [&] {
#if ROLES
            wait_for(roles.ready + place.span, place.awaited);
#endif
        };
        if (threadIdx.x == 0) produce(q_map, do_map, k_map, v_map, p, w, base, await);
#endif
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        Progress now;
        do consume(dk_map, dv_map, dq_map, p, w, now, base);
        while (WHOLE && next_block(w, p));
        if (WHOLE && threadIdx.x % 32 == 0) bulk_wait();
#if ROLES
        if (threadIdx.x % 32 == 0) announce(roles.done + place.span);
#endif
    }
}

#endif

#include "backward_ends.cuh"
#include "backward_persistent.cuh"
