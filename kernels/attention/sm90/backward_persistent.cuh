// Schedule PERSISTENT: CTAs are persistent. Included by backward.cu.
//
// With few queries a key block has few tiles, and the prologue and epilogue of a CTA (loading K and V, filling the
// pipeline, draining it, storing dK and dV) take a large part of its time. Here there is one CTA per SM, which computes
// one item (a key block or a split of one) after the other. The tiles of all its items are one main loop. In the
// iteration from the last tile of an item to the first of the next, S and dP use the new K and V, and dQ, which is one
// tile late, the old K. The stores of dK and dV from registers are overlapped with the new S.
//
// Without a mask all items take the same time, and the schedule is static: a CTA computes every gridDim.x-th item.
// Under a causal mask they do not, and the longest of a section come first. A dynamic tile scheduler then gives the
// next item to the CTA that is done: the producer takes an index from the tile scheduler's counter when it has issued
// the last loads of an item. Not earlier: a CTA that takes an item long before it can begin keeps it from one that
// could begin it.
//
// K has two buffers, as dQ of the following iteration still reads the old K. V has one. At D = 64 without a mask the
// consumers hold V in registers, so that the next V can be loaded as soon as they have begun an item. Otherwise it is
// loaded when the last dP of an item is complete.
#pragma once

#if SCHEDULE == PERSISTENT
static_assert(BM == (D == 64 ? 128 : 64), "shared memory has room for two blocks of keys");

constexpr u32 K_OTHER = K_BYTES;  // offset between the two buffers of K
constexpr u32 ITEMS = 4;          // the producer is up to three ahead of the one whose dK and dV are stored
constexpr u32 K2_FULL = (SHARED_END + 15) / 16 * 16, K2_EMPTY = K2_FULL + 16, V1_EMPTY = K2_EMPTY + 16;
constexpr u32 ITEM_FULL = V1_EMPTY + 16, ITEM_AT = ITEM_FULL + 8 * ITEMS;
static_assert(K_AT == 0 && ITEM_AT + 32 * ITEMS <= 232448, "the barriers for two blocks of keys fit behind all else");

// Descriptor of an item: first key, tiles, part, head; batch. The producer alone computes it, as that takes many
// divisions.
DEVICE u32 item_slot(u32 base, u32 n) { return base + ITEM_AT + n % ITEMS * 32; }

// `counter`: the tile scheduler's, the next item that no CTA has taken; null without a mask. A CTA's first item is its
// blockIdx.x. One thread runs this, but the index is shuffled: ptxas then knows that everything that depends on it is
// warp-uniform, and keeps it in uniform registers, as there are too few others.
DEVICE void produce_persistent(const TensorMap& q_map, const TensorMap& do_map, const TensorMap& k_map,
                            const TensorMap& v_map, const Problem& p, int* counter, int items, u32 base) {
    Ring<Q_STAGES> q;
    Ring<DO_STAGES> g;
    u32 n = 0;  // items before this one
    auto publish_item = [&] { bar_arrive(base + ITEM_FULL + n % ITEMS * 8); };
#pragma unroll 1
    for (u32 item = blockIdx.x; item < items; item = CAUSAL ? __shfl_sync(1u, draw(counter), 0) : item + gridDim.x) {
        const Work w(p, item);
        store_words(item_slot(base, n), w.first_key, w.tiles, w.part, w.head);
        store_pair(item_slot(base, n) + 16, w.batch, 0);
        publish_item();
        Tile tile(w, p);
#pragma unroll 1
        for (int t = 0; t < w.tiles; t++) {
            const int head = tile.all_heads - w.batch * p.kv_heads * p.group, row = tile.m * BM;
            const int place = tile.all_heads * p.m_tiles + tile.m;
            const long long at = (long long)place * BM;
            if (t == 0) {
                bar_wait(base + K2_EMPTY + n % 2 * 8, n / 2 & 1 ^ 1);
                load_block(k_map, w, base + n % 2 * K_OTHER, base + K2_FULL + n % 2 * 8);
            }
            u32 bar = base + Q_FULL + 8 * q.slot;
            bar_wait(base + Q_EMPTY + 8 * q.slot, q.parity ^ 1);
            publish_tile(base, q.slot, place, tile.m);
            bar_expect(bar, Q_BYTES + BM * 4);
            for (int slab = 0; slab < SLABS; slab++)
                tma_load(base + Q_AT + q.slot * Q_BYTES + slab * Q_SLAB, &q_map, slab * 64, row, head, w.batch, bar);
            load_row(p.lse2 + at, base + LSE_AT + q.slot * BM * 4, bar, BM * 4);
            if (t == 0) {
                bar_wait(base + V1_EMPTY, n & 1 ^ 1);
                load_block(v_map, w, base + V_AT, base + V_FULL);
            }
            bar = base + DO_FULL + 8 * g.slot;
            bar_wait(base + DO_EMPTY + 8 * g.slot, g.parity ^ 1);
            bar_expect(bar, Q_BYTES + BM * 4);
            for (int slab = 0; slab < SLABS; slab++)
                tma_load(base + DO_AT + g.slot * Q_BYTES + slab * Q_SLAB, &do_map, slab * 64, row, head, w.batch, bar);
            load_row(p.delta + at, base + DELTA_AT + g.slot * BM * 4, bar, BM * 4);
            q.next(), g.next(), tile.next(w, p);
        }
        n++;
    }
    store_words(item_slot(base, n), 0, 0, 0, 0);  // an item without tiles marks the end
    publish_item();
}

// dV or dK as in backward_products.cuh, but the first tile of an item initialises them.
DEVICE void gradient(float (&c)[D / 2], const u32 (&a)[BM / 4], u32 columns, bool first) {
#pragma unroll
    for (int k = 0; k < BM / 16; k++) mma<1>(c, a + 4 * k, across<Q_SLAB>(columns + k * 128), k != 0 || !first);
    wgmma_commit();
}

// Transposes 4 x 4 words within a quad: x[i] of lane j becomes x[j] of lane i.
DEVICE void transpose_quad(u32 (&x)[4], int own) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & step) continue;
            bool upper = own & step;
            u32 other = __shfl_xor_sync(~0u, upper ? x[i] : x[i + step], step);
            (upper ? x[i] : x[i + step]) = other;
        }
}
// Stores 16 rows of dK or dV from a warp's accumulator fragment, except those past the last key: this lane has `row`
// and the row 8 below it. The four lanes of a row exchange their pairs of columns, so that each stores 16 bytes.
DEVICE void store_rows(const Rows& to, int batch, int head, int row, int keys, const float (&c)[D / 2], float scale) {
    const int own = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int key = row + 8 * half;
#pragma unroll
        for (int j = 0; j < D / 8; j += 4) {
            u32 x[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* a = c + 4 * (j + i) + 2 * half;
                x[i] = pack(a[0] * scale, a[1] * scale);
            }
            transpose_quad(x, own);
            if (key < keys) store_global(chunk(to, batch, head, key, (j + own) * 8), x);
        }
    }
}

DEVICE void consume_persistent(const Rows& dk_rows, const Rows& dv_rows, const Problem& p, u32 base) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int wg = __shfl_sync(~0u, (int)threadIdx.x / 128 - 1, 0);  // warp-uniform, for the compiler
    const u32 rows = base + wg * 64 * 128, pairs = lane % 4 * 8;
    const u32 ds_store = base + DS_AT + wg * (BM * 128) + (lane / 16 * 8 + lane % 8) * 128 +
                         (((2 * warp + lane / 8 % 2) ^ (lane % 8)) * 16);
    const u32 ds_rows = base + DS_AT + (D == 64 ? wg * 64 * 128 : 0), dq_keys = base + (D == 64 ? 0 : wg * K_SLAB);
    const u32 dq_fragment = base + DQ_AT + (wg * 4 + warp) * FRAGMENT_BYTES;

    float dk[D / 2], dv[D / 2], s[BM / 2], dp[BM / 2], dq[DQ_REGISTERS];
    u32 pt[BM / 4], dst[BM / 4];
#if V_IN_REGISTERS
    u32 v_own[D / 4];
#endif
    Ring<Q_STAGES> q;
    Ring<DO_STAGES> g;
    u32 n = 0;      // the item of the scores, counted from this CTA's first
    int first_key;  // first key of that item
    int left;       // its remaining tiles, including this one
    bool diagonal;  // whether the diagonal crosses the tile that `place` returned

    auto release = [&](u32 bar) {
        if (lane == 0) bar_arrive(base + bar);
    };
    auto descriptor_word = [&](u32 item, int word) { return load_shared(item_slot(base, item) + 4 * word); };
    auto uniform_word = [&](u32 item, int word) { return __shfl_sync(~0u, descriptor_word(item, word), 0); };
    auto first_row = [&] { return first_key + wg * 64; };  // of this group's keys
    auto place = [&] {
        if (CAUSAL) diagonal = tile_index(base, q.slot) * BM < first_row() + 63 - p.shift;
        return tile_place(base, q.slot);
    };
    auto begin_scores = [&] {
        bar_wait(base + Q_FULL + 8 * q.slot, q.parity);
        wgmma_fence();
        scores(s, (rows + n % 2 * K_OTHER) / 16, (base + Q_AT + q.slot * Q_BYTES) / 16);
    };
    auto enter_values = [&] {
        bar_wait(base + V_FULL, n & 1);
#if V_IN_REGISTERS
        u32 row = warp * 16 + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
        for (int k = 0; k < D / 16; k++)
            load_matrices(v_own + 4 * k, rows + V_AT + row * 128 + (((k * 2 + lane / 16) ^ (lane % 8)) * 16));
#endif
    };
    auto begin_dp = [&] {
        bar_wait(base + DO_FULL + 8 * g.slot, g.parity);
        wgmma_fence();
#if !V_IN_REGISTERS
        const u32 v_own = (rows + V_AT) / 16;
#endif
        scores(dp, v_own, (base + DO_AT + g.slot * Q_BYTES) / 16);
    };
    auto hide = [&] {
        const int first = first_row();
        bool tail = first + 64 > p.keys;
        if (tail || (CAUSAL && diagonal)) {
            const int key = first + warp * 16 + lane / 4;  // and key + 8
            int shift = CAUSAL ? key - p.shift - tile_index(base, q.slot) * BM : 0, pair = CAUSAL ? lane % 4 * 2 : 0;
            float hidden = p.scale > 0 ? -INFINITE : INFINITE;  // scores are multiplied by the scale later
            int limit0 = key < p.keys ? shift : BM, limit1 = key + 8 < p.keys ? shift + (CAUSAL ? 8 : 0) : BM;
            mask(s, limit0 - pair, limit1 - pair, hidden);
        }
    };
    auto softmax = [&](int t) {
        const int end = p.queries - tile_index(base, q.slot) * BM;
        wgmma_wait<1>();
        pin(s);
        hide();
        if (end < BM) mask_end(s, end - lane % 4 * 2);
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
        if (!V_IN_REGISTERS && left == 1) release(V1_EMPTY);
    };
    auto multiply_ds = [&](int t, u32 of_item) {
        bar_wait(base + DS_FULL + (t & 1) * 8, (t >> 1) & 1);
        wgmma_fence();
        query_gradient(dq, (ds_rows + (t & 1) * DS_BYTES) / 16, (dq_keys + of_item % 2 * K_OTHER) / 16);
    };
    auto store_keys = [&](u32 of_item) {
        Uint4 x = shared_chunk(item_slot(base, of_item));
        if ((int)x.z >= 0) {
            float* to = p.parts + (long long)(int)x.z * (2 * BN * D) + (wg * 4 + warp) * (16 * D) + lane * 4;
#pragma unroll
            for (int j = 0; j < D / 8; j++) {
                *(Float4*)(to + j * 128) = {dv[4 * j], dv[4 * j + 1], dv[4 * j + 2], dv[4 * j + 3]};
                *(Float4*)(to + j * 128 + BN * D) = {dk[4 * j], dk[4 * j + 1], dk[4 * j + 2], dk[4 * j + 3]};
            }
        } else {
            int row = (int)x.x + wg * 64 + warp * 16 + lane / 4, batch = descriptor_word(of_item, 4);
            store_rows(dv_rows, batch, x.w, row, p.keys, dv, 1);
            store_rows(dk_rows, batch, x.w, row, p.keys, dk, p.scale);
        }
    };
    auto enter = [&] {
        bar_wait(base + K2_FULL + n % 2 * 8, n / 2 & 1);
        first_key = uniform_word(n, 0), left = uniform_word(n, 1);
    };
    // Whether no tile follows this one. The negated form makes ptxas recompute addresses in each tile.
    auto is_last = [&] {
        if (left > 1) return false;
        bar_wait(base + ITEM_FULL + (n + 1) % ITEMS * 8, (n + 1) / ITEMS & 1);
        return uniform_word(n + 1, 1) == 0;
    };

    enter();
    begin_scores();
    enter_values();
    begin_dp();
    if (V_IN_REGISTERS) release(V1_EMPTY);
    int at = place(), at_before = at, t = 0;
    softmax(0);
    bool last = is_last(), fresh = true;  // fresh: tile t is the first of its item
    if (wg == 1 && !last) named_arrive(PING_PONG, 256);
    // The order of GEMMs is that of `consume`; t counts the tiles of all items.
    for (; !last; t++) {
        const bool ends = left == 1, freed = fresh && t > 0;  // freed: after this no warp reads the previous keys
        const bool alone = ends && freed;  // an item of one tile: the next keys replace the previous ones
        named_sync(PING_PONG + wg, 256);
        pin(pt), pin(dst), pin(dk), pin(dv);
        wgmma_fence();
        gradient(dv, pt, (base + DO_AT + g.slot * Q_BYTES) / 16, fresh);
        gradient(dk, dst, (base + Q_AT + q.slot * Q_BYTES) / 16, fresh);
        multiply_ds(t - 1, n ^ (u32)fresh);  // for tile 0 the buffer is not initialised, and the result is discarded
        if (alone) {
            // The next keys are loaded only when the other group too has computed its dQ from the previous keys. So it
            // may issue its GEMMs before this group waits for the next keys.
            wgmma_wait<0>();
            release(K2_EMPTY + (n ^ 1) % 2 * 8);
            if (wg == 0) named_arrive(PING_PONG + 1, 256);
        }
        u32 old_q = q.slot;
        q.next();
        if (ends) n++, enter();
        else left--;
        last = is_last();
        wgmma_wait<2>();
        pin(pt), pin(dv);
        release(DO_EMPTY + 8 * g.slot);
        g.next();
        begin_scores();
        if (wg == 0 ? !alone : !last) named_arrive(PING_PONG + (wg ^ 1), 256);
        wgmma_wait<2>();
        pin(dst), pin(dk);
        release(Q_EMPTY + 8 * old_q);
        wgmma_wait<1>();
        pin(dq);
        release(DS_EMPTY + (~t & 1) * 8);
        if (freed && !alone) release(K2_EMPTY + (n ^ 1) % 2 * 8);
        add_to_sum(p, dq, at_before, t > 0, dq_fragment, wg * 4 + warp);
        at_before = at, at = place();
        if (ends) store_keys(n - 1), enter_values();  // stores free the registers of the next dP
        begin_dp();
        if (V_IN_REGISTERS && ends) release(V1_EMPTY);
        softmax(t + 1);
        fresh = ends;
    }
    pin(pt), pin(dst), pin(dk), pin(dv);
    wgmma_fence();
    gradient(dv, pt, (base + DO_AT + g.slot * Q_BYTES) / 16, fresh);
    gradient(dk, dst, (base + Q_AT + q.slot * Q_BYTES) / 16, fresh);
    multiply_ds(t - 1, n ^ (u32)fresh);
    wgmma_wait<0>();
    pin(pt), pin(dst), pin(dk), pin(dv), pin(dq);
    add_to_sum(p, dq, at_before, t > 0, dq_fragment, wg * 4 + warp);
    multiply_ds(t, n);
    store_keys(n);
    wgmma_wait<0>();
    pin(dq);
    add_to_sum(p, dq, at, true, dq_fragment, wg * 4 + warp);
    if (lane == 0) bulk_wait_read();
}

extern "C" __global__ void __launch_bounds__(384, 1)
attention_cuda_bwd(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap do_map,
         const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map, const Rows dk, const Rows dv,
         const Problem p, int* counter, int items) {
    const u32 base = shared_memory();
    if (threadIdx.x == 0) {
        auto init = [&](u32 bar, int slots, u32 arrivals) {
            for (int i = 0; i < slots; i++) bar_init(base + bar + 8 * i, arrivals);
        };
        init(K2_FULL, 2, 1), init(V_FULL, 1, 1), init(Q_FULL, Q_STAGES, 1), init(DO_FULL, DO_STAGES, 1);
        init(K2_EMPTY, 2, CONSUMER_WARPS), init(V1_EMPTY, 1, CONSUMER_WARPS), init(ITEM_FULL, ITEMS, 1);
        init(Q_EMPTY, Q_STAGES, CONSUMER_WARPS), init(DO_EMPTY, DO_STAGES, CONSUMER_WARPS);
        init(DS_FULL, 2, CONSUMER_WARPS), init(DS_EMPTY, 2, CONSUMER_WARPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) produce_persistent(q_map, do_map, k_map, v_map, p, counter, items, base);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        consume_persistent(dk, dv, p, base);
    }
}
#endif
