// Attention backward for Hopper (sm_90a) in its fused form: one main kernel computes the probabilities once, and dQ, dK
// and dV by five GEMMs per tile.
//
//   delta = rowsum(dout * out) - dlse    p = exp(scale * q k^T - lse)     ds = p * (dout v^T - delta)
//   dv = p^T dout                        dk = scale * ds^T q              dq = scale * ds k
//
// Kernels: `preprocess` (delta, lse to base 2, zeros for the fp32 accumulator of dq), `backward`, `postprocess` (dq =
// scale * accumulator), and `sum_shares` (adds up partial dK and dV) where the key blocks of the last wave are split
// over CTAs. SCHEDULE says which CTA computes which key blocks:
//   CTA_PER_BLOCK    one CTA for each block
//   SINGLE_BLOCK     there is one block, so one CTA does all the work of a query. `backward` is the only kernel: two
//                    warps that would be idle compute lse and delta from tiles of out, and dq is written scaled and
//                    cast. For an element of q it moves 8 bytes (q, dout, out, dq), not 18
//   CTA_PER_KV_HEAD  one CTA computes all blocks of a head and knows its first and last visit to a tile of queries:
//                    `preprocess` zeros nothing, and `postprocess` is not launched
//   PERSISTENT       one CTA per SM, which computes one block after the other
//   ROLES            CTAs of `backward` itself do the work of `preprocess` and `postprocess`
// With ACCUMULATE the keys are one block of several, as in ring attention: lse and delta are those over all keys, and
// dq, dk and dv are fp32 and are added to (backward_accumulate.cuh).
//
// `backward`: a CTA owns 128 keys and loops over the queries that see them, in tiles of 128 (D = 64), 64 or 80 (D =
// 128). One producer warp loads by TMA. Two consumer warp groups own 64 keys each, whose dk and dv stay in registers.
//  - S^T = K Q^T and dP^T = V dO^T have keys as rows, so that P^T and dS^T are A operands in registers for dV += P^T dO
//    and dK += dS^T Q. Only dS goes through shared memory, for dQ = dS K, which reduces over the keys of both groups.
//  - A group computes dQ for half of the tile: 64 queries x 64 columns. With 80 queries it computes dQ^T, whose 64 rows
//    are columns of the head. Each of its warps adds its eighth of the tile to the fp32 accumulator in global memory by
//    a bulk reduction. The accumulator has the element order of wgmma fragments, which `postprocess` undoes.
//
// Clocks of one SM for a tile of 128 x 128 x 64 or 64 x 128 x 128 (10 * 2^20 FLOP) or 80 x 128 x 128 (12.5 * 2^20):
//                                      D = 64   D = 128, 64   D = 128, 80
//   tensor cores, 4096 FLOP/clk           2560          2560          3200
//   shared memory, 128 B/clk              3072          3072          3648   operands of wgmma, dS, TMA, lse and delta;
//                                                                            dq in and out
//   exponentials, 16/clk                  1024           512           640
//   instructions, 4/clk                  ~1000          ~900         ~1050
// All four must overlap, so the two groups alternate (ping-pong). dS has two buffers and dQ of a tile is computed one
// tile later, so that no group waits for the other's dS. The next S is issued before the exponentials. With 80 queries,
// K is read from shared memory a fifth less often for each query, at two costs. Registers: there is no room for dQ and
// the next S at once, so dQ is added to its accumulator before the next S is issued, while dK is in flight. Shared
// memory: q has two stages, not three.
//
// The order in which CTAs add to dq is not fixed: dq is deterministic only with SINGLE_BLOCK and CTA_PER_KV_HEAD; dk
// and dv always are.

#include "backward_ptx.cuh"

#include "backward_layout.cuh"
#include "backward_work.cuh"

#if ACCUMULATE
using KeyGradients = Rows;
#else
using KeyGradients = TensorMap;
#endif

// The producer passes consumers two integers for each stage of q: the tile's index over all query heads (with
// CTA_PER_KV_HEAD twice that, plus 1 at the last visit), and its index within its head.
DEVICE void publish_tile(u32 base, u32 slot, int place, int m) { store_pair(base + TILE_AT + 8 * slot, place, m); }
DEVICE int tile_place(u32 base, u32 slot) { return load_shared(base + TILE_AT + 8 * slot); }
DEVICE int tile_index(u32 base, u32 slot) { return load_shared(base + TILE_AT + 8 * slot + 4); }

// Loads the keys or the values of a block.
DEVICE void load_block(const TensorMap& map, const Work& w, u32 to, u32 bar) {
    bar_expect(bar, K_BYTES);
    for (int part = 0; part < 2 * SLABS; part++)
        tma_load(to + part * 64 * 128, &map, part / 2 * 64, w.first_key + part % 2 * 64, w.head, w.batch, bar);
}
// `await` is called before the first load of lse and delta.
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
        publish_tile(base, q.slot, tile.all_heads * p.m_tiles + tile.m, tile.m);
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
#include "backward_products.cuh"
#include "backward_consumer.cuh"

#if SCHEDULE != PERSISTENT  // else the kernel is in backward_persistent.cuh
extern "C" __global__ void __launch_bounds__(384, 1)
attention_cuda_bwd(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap do_map,
         const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
         const __grid_constant__ KeyGradients dk_map, const __grid_constant__ KeyGradients dv_map, const Problem p,
         const __grid_constant__ TensorMap dq_map, const __grid_constant__ TensorMap out_map  // not CTA_PER_BLOCK
#if SCHEDULE == ROLES
         , const __grid_constant__ Roles roles) {
#else
         ) {
#endif
    const u32 base = shared_memory();
#if SCHEDULE == ROLES
    const Place place(roles, logical_index(roles, base));
    if (place.role == PREPROCESS) return preprocess_span(out_map, do_map, p, roles, place, base);
    if (place.role == POSTPROCESS) return postprocess_span(dq_map, p, roles, place, base);
#endif
    if (threadIdx.x == 0) {
        auto init = [&](u32 bar, int slots, u32 arrivals) {
            for (int i = 0; i < slots; i++) bar_init(base + bar + 8 * i, arrivals);
        };
        init(K_FULL, 1, 1), init(V_FULL, 1, 1), init(Q_FULL, Q_STAGES, 1), init(DO_FULL, DO_STAGES, 1);
        init(Q_EMPTY, Q_STAGES, CONSUMER_WARPS), init(DO_EMPTY, DO_STAGES, CONSUMER_WARPS);
        init(DS_FULL, 2, CONSUMER_WARPS), init(DS_EMPTY, 2, CONSUMER_WARPS);
        if (SCHEDULE == SINGLE_BLOCK) init(ROWS_FULL, DO_STAGES, ROW_WARPS);
        if (SCHEDULE == CTA_PER_KV_HEAD) init(K_EMPTY, 2, CONSUMER_WARPS), init(SUM_FULL, CONSUMER_WARPS, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
#if SCHEDULE == ROLES
    Work w(p, place.item);
#else
    Work w(p);
#endif
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
#if SCHEDULE == SINGLE_BLOCK
        if (threadIdx.x == 0) produce_single(q_map, do_map, k_map, v_map, out_map, p, w, base);
        if (threadIdx.x >= 32 && threadIdx.x < 32 + 32 * ROW_WARPS) preprocess_tiles(p, w, base);
#elif SCHEDULE == CTA_PER_KV_HEAD
        if (threadIdx.x == 0) produce_kv_head(q_map, do_map, k_map, v_map, p, w, base);
#else
        auto await = [&] {
#if SCHEDULE == ROLES
            wait_for(roles.ready + place.span, place.awaited);
#endif
        };
        if (threadIdx.x == 0) produce(q_map, do_map, k_map, v_map, p, w, base, await);
#endif
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        Progress now;
        do consume(dk_map, dv_map, dq_map, p, w, now, base);
        while (SCHEDULE == CTA_PER_KV_HEAD && next_block(w, p));
        if (SCHEDULE == CTA_PER_KV_HEAD && threadIdx.x % 32 == 0) bulk_wait();
#if SCHEDULE == ROLES
        if (threadIdx.x % 32 == 0) increment_release(roles.done + place.span);
#endif
    }
}

#endif

#if ACCUMULATE
#include "backward_accumulate.cuh"
#else
#include "backward_ends.cuh"
#include "backward_persistent.cuh"
#endif
