// The consumer warp groups of backward.cu: a prologue, a main loop over the tiles of queries of a key block, and an
// epilogue. A tile is in registers first as s and dp, then as pt and dst, the A operands of dV and dK.
#pragma once

// A warp's index among the consumers and its addresses in shared memory, computed once.
struct Consumer {
    u32 base;
    int lane, warp, wg;   // warp: of the warp group wg
    u32 k_rows, v_rows;   // addresses of the 64 keys of the warp group
    u32 pairs;            // offset of this lane's columns in a row of lse or delta
    u32 ds_store;         // where this lane stores dS^T, transposed
    u32 ds_rows, dq_keys;  // wgmma operands of dQ
    u32 dq_fragment;      // the warp's staging buffer for its part of dQ

    DEVICE explicit Consumer(u32 base) : base(base), lane(threadIdx.x % 32), warp(threadIdx.x / 32 % 4) {
        wg = __shfl_sync(~0u, (int)threadIdx.x / 128 - 1, 0);  // warp-uniform, for the compiler
        k_rows = base + K_AT + wg * 64 * 128, v_rows = base + V_AT + wg * 64 * 128;
        pairs = lane % 4 * 8;
        // dS in shared memory is [group][query][64 keys]. Matrix i of a transposing stmatrix has keys 8 (i % 2) ... and
        // queries 8 (i / 2) ...
        ds_store = base + DS_AT + wg * (BM * 128) + (lane / 16 * 8 + lane % 8) * 128 +
                   (((2 * warp + lane / 8 % 2) ^ (lane % 8)) * 16);
        ds_rows = base + DS_AT + (D == 64 ? wg * 64 * 128 : 0);
        dq_keys = base + K_AT + (D == 64 ? 0 : wg * K_SLAB);
        dq_fragment = base + DQ_AT + (wg * 4 + warp) * FRAGMENT_BYTES;
    }
    // Address, for ldmatrix or stmatrix, of the four 8x8 matrices in this warp's 16 keys x columns 16 k ... 16 k + 15.
    DEVICE u32 matrices(int k) const {
        u32 row = warp * 16 + lane / 8 % 2 * 8 + lane % 8;
        return k / 4 * K_SLAB + row * 128 + (((k % 4 * 2 + lane / 16) ^ (lane % 8)) * 16);
    }
    DEVICE void release(u32 bar) const {
        if (lane == 0) bar_arrive(base + bar);
    }
};

// Masks S^T of the tile in stage `slot` of the queries. The warp group's keys begin at `first_key`.
DEVICE void hide(const Consumer& me, const Problem& p, float (&s)[BM / 2], int first_key, bool diagonal, u32 slot) {
    bool tail = first_key + 64 > p.keys;
    if (tail || diagonal) {
        const int key = first_key + me.warp * 16 + me.lane / 4;  // and key + 8
        int shift = CAUSAL ? key - p.shift - tile_index(me.base, slot) * BM : 0;
        int pair = me.lane % 4 * 2;
        float hidden = p.scale > 0 ? -INFINITE : INFINITE;  // scores are multiplied by the scale later
        int limit0 = key < p.keys ? shift : BM, limit1 = key + 8 < p.keys ? shift + (CAUSAL ? 8 : 0) : BM;
        mask(s, limit0 - pair, limit1 - pair, hidden);
    }
}

// Stores dS^T of tile t in shared memory for both groups, once its buffer is empty.
DEVICE void store_score_gradients(const Consumer& me, const u32 (&dst)[BM / 4], int t) {
    bar_wait(me.base + DS_EMPTY + (t & 1) * 8, ((t - 1) >> 1) & 1);
#pragma unroll
    for (int k = 0; k < BM / 16; k++)
        store_transposed(me.ds_store + (t & 1) * DS_BYTES + k * 16 * 128, dst[4 * k], dst[4 * k + 1], dst[4 * k + 2],
                         dst[4 * k + 3]);
    fence_async();
    __syncwarp();
    me.release(DS_FULL + (t & 1) * 8);
}

// Starts dQ = dS K of tile t, once both groups have stored dS. `keys`: the address of dQ's keys.
DEVICE void start_query_gradient(const Consumer& me, float (&dq)[DQ_REGISTERS], int t, u32 keys) {
    bar_wait(me.base + DS_FULL + (t & 1) * 8, (t >> 1) & 1);
    wgmma_fence();
    query_gradient(dq, (me.ds_rows + (t & 1) * DS_BYTES) / 16, keys / 16);
}

// Stores partial dV and dK, unscaled, in the order of accumulator fragments.
DEVICE void store_partial(const Consumer& me, const Problem& p, int part, const float (&dk)[D / 2],
                        const float (&dv)[D / 2]) {
    float* to = p.parts + (long long)part * (2 * BN * D) + (me.wg * 4 + me.warp) * (16 * D) + me.lane * 4;
#pragma unroll
    for (int j = 0; j < D / 8; j++) {
        *(Float4*)(to + j * 128) = {dv[4 * j], dv[4 * j + 1], dv[4 * j + 2], dv[4 * j + 3]};
        *(Float4*)(to + j * 128 + BN * D) = {dk[4 * j], dk[4 * j + 1], dk[4 * j + 2], dk[4 * j + 3]};
    }
}

#if SCHEDULE != PERSISTENT  // else the main loop is in backward_persistent.cuh
#if ACCUMULATE
// Writes two rows of a warp's accumulator fragment `c` to the fp32 tensor `to`, or adds them: 8 bytes a lane, 32 a row.
// No other CTA writes these keys.
DEVICE void write_rows(const Rows& to, int batch, int head, int row, int keys, const float (&c)[D / 2], float scale,
                       bool add) {
    const float* first = (const float*)to.at + batch * to.batch + head * to.head + threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (row + 8 * half >= keys) continue;
        Float2* at = (Float2*)(first + (row + 8 * half) * to.row);
        Float2 x[D / 8];
#pragma unroll
        for (int j = 0; j < D / 8; j++) {
            x[j] = {0, 0};
            if (add) x[j] = at[4 * j];
        }
#pragma unroll
        for (int j = 0; j < D / 8; j++)
            at[4 * j] = {x[j].x + c[4 * j + 2 * half] * scale, x[j].y + c[4 * j + 2 * half + 1] * scale};
    }
}
DEVICE void store_keys(const Consumer& me, const Rows& dk_rows, const Rows& dv_rows, const Problem& p, const Work& w,
                       const float (&dk)[D / 2], const float (&dv)[D / 2]) {
    const int row = w.first_key + me.wg * 64 + me.warp * 16 + me.lane / 4;
    write_rows(dv_rows, w.batch, w.head, row, p.keys, dv, 1, p.add_keys);
    write_rows(dk_rows, w.batch, w.head, row, p.keys, dk, p.scale, p.add_keys);
    if (me.lane == 0) bulk_wait_read();
}
#else
// Stores dk and dv through the shared memory of K and V, once both groups have read these. TMA omits rows past the last
// key.
DEVICE void store_keys(const Consumer& me, const KeyGradients& dk_map, const KeyGradients& dv_map, const Problem& p,
                       const Work& w, const float (&dk)[D / 2], const float (&dv)[D / 2]) {
    named_sync(KEYS_DONE, 256);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        u32 to = me.matrices(k);
        const float *a = dv + 8 * k, *b = dk + 8 * k;
        store_matrices(me.v_rows + to, pack(a[0], a[1]), pack(a[2], a[3]), pack(a[4], a[5]), pack(a[6], a[7]));
        store_matrices(me.k_rows + to, pack(b[0] * p.scale, b[1] * p.scale), pack(b[2] * p.scale, b[3] * p.scale),
                       pack(b[4] * p.scale, b[5] * p.scale), pack(b[6] * p.scale, b[7] * p.scale));
    }
    fence_async();
    named_sync(ROWS_WRITTEN + me.wg, 128);
    if (threadIdx.x % 128 == 0) {
        for (int slab = 0; slab < SLABS; slab++) {
            store_box(dv_map, me.v_rows + slab * K_SLAB, slab * 64, w.first_key + me.wg * 64, w.head, w.batch);
            store_box(dk_map, me.k_rows + slab * K_SLAB, slab * 64, w.first_key + me.wg * 64, w.head, w.batch);
        }
        bulk_commit();
    }
    if (me.lane == 0) bulk_wait_read();
}
#endif

#if SCHEDULE == SINGLE_BLOCK
// Stores the warp's part of dq of the tile with index `place`, scaled and cast: no other CTA adds to it.
DEVICE void store_query_gradient(const Consumer& me, const TensorMap& dq_map, const Problem& p, const Work& w,
                                 const float (&dq)[DQ_REGISTERS], int place, bool real) {
    if (me.lane == 0) bulk_wait_read();
    __syncwarp();
    u32 to = me.dq_fragment + (me.matrices(0) - me.warp * FRAGMENT_BYTES);  // of lane 0: the fragment itself
    anew(to);
#pragma unroll
    for (int k = 0; k < DQ_REGISTERS / 8; k++) {
        const float* a = dq + 8 * k;
        store_matrices(to ^ (k * 32), pack(a[0] * p.scale, a[1] * p.scale), pack(a[2] * p.scale, a[3] * p.scale),
                       pack(a[4] * p.scale, a[5] * p.scale), pack(a[6] * p.scale, a[7] * p.scale));
    }
    fence_async();
    __syncwarp();
    if (me.lane == 0 && real) {
        int head = place / p.m_tiles - w.batch * p.kv_heads * p.group, row = place % p.m_tiles * BM;
        if (D == 64) store_box(dq_map, to, 0, row + me.wg * 64 + me.warp * 16, head, w.batch);
        else store_box(dq_map, to, me.wg * 64, row + me.warp * 16, head, w.batch);
        bulk_commit();
    }
}
#endif

// Adds the warp's part of dq of the tile with index `place` to the fp32 accumulator, or stores it as dq. The result is
// discarded unless `real`.
DEVICE void add_query_gradient(const Consumer& me, const TensorMap& dq_map, const Problem& p, const Work& w,
                               Progress& now, float (&dq)[DQ_REGISTERS], int place, bool real) {
#if SCHEDULE == CTA_PER_KV_HEAD
    if (place >= 0) add_kv_head(dq_map, p, w, now, dq, place, me.base);
#elif SCHEDULE == SINGLE_BLOCK
    store_query_gradient(me, dq_map, p, w, dq, place, real);
#else
    add_to_sum(p, dq, place, real, me.dq_fragment, me.wg * 4 + me.warp);
#endif
}

DEVICE void consume(const KeyGradients& dk_map, const KeyGradients& dv_map, const TensorMap& dq_map, const Problem& p,
                    const Work& w, Progress& now, u32 base) {
    const Consumer me(base);
    float dk[D / 2], dv[D / 2], s[BM / 2], dp[BM / 2], dq[DQ_REGISTERS];
    u32 pt[BM / 4], dst[BM / 4];
#pragma unroll
    for (int i = 0; i < D / 2; i++) dk[i] = dv[i] = 0;
    Ring<Q_STAGES>& q = now.q;
    Ring<DO_STAGES>& g = now.g;
    bool diagonal = false;                           // whether the diagonal crosses the tile that `place` returned
    auto place = [&] {
        if (CAUSAL) diagonal = tile_index(base, q.slot) * BM < w.first_key + me.wg * 64 + 63 - p.shift;
        return tile_place(base, q.slot);
    };
    auto start_scores = [&] {
        wgmma_fence();
        scores(s, me.k_rows / 16, (base + Q_AT + q.slot * Q_BYTES) / 16);
    };
    // Once S is complete: probabilities, overlapped with the GEMM of dP. Then dS, to registers and to shared memory.
    auto softmax = [&](int t) {
        const int end = p.queries - tile_index(base, q.slot) * BM;
        wgmma_wait<1>();
        pin(s);
        hide(me, p, s, w.first_key + me.wg * 64, diagonal, q.slot);
        if (end < BM) mask_end(s, end - me.lane % 4 * 2);
        if (SCHEDULE == SINGLE_BLOCK) bar_wait(base + ROWS_FULL + 8 * g.slot, g.parity);
        probabilities(s, base + LSE_AT + (SCHEDULE == SINGLE_BLOCK ? g.slot : q.slot) * BM * 4 + me.pairs,
                      p.scale_log2);
        if (TIGHT) settle(s, base + K_FULL);
        wgmma_wait<0>();
        pin(dp);
        score_gradients(s, dp, pt, dst, base + DELTA_AT + g.slot * BM * 4 + me.pairs);
        store_score_gradients(me, dst, t);
    };
    auto add_to_dv = [&] { gradient(dv, pt, (base + DO_AT + g.slot * Q_BYTES) / 16); };
    auto add_to_dk = [&] { gradient(dk, dst, (base + Q_AT + q.slot * Q_BYTES) / 16); };
    auto multiply_ds = [&](int t) { start_query_gradient(me, dq, t, me.dq_keys); };
    auto add_dq = [&](int at, bool real) { add_query_gradient(me, dq_map, p, w, now, dq, at, real); };

    // Prologue: S and dP of the first tile.
    const u32 keys_parity = SCHEDULE == CTA_PER_KV_HEAD ? w.first_key / BN & 1 : 0;
    bar_wait(base + K_FULL, keys_parity);
    bar_wait(base + Q_FULL + 8 * q.slot, q.parity);
    start_scores();
    bar_wait(base + V_FULL, keys_parity);
#if V_IN_REGISTERS
    u32 v_own[D / 4];
#pragma unroll
    for (int k = 0; k < D / 16; k++) load_matrices(v_own + 4 * k, me.v_rows + me.matrices(k));
#else
    const u32 v_own = me.v_rows / 16;
#endif
    auto start_dp = [&] {
        bar_wait(base + DO_FULL + 8 * g.slot, g.parity);
        wgmma_fence();
        scores(dp, v_own, (base + DO_AT + g.slot * Q_BYTES) / 16);
    };
    start_dp();
    const int first = now.tiles, end = first + w.tiles;
    int at = place(), at_before = SCHEDULE == CTA_PER_KV_HEAD ? -1 : at;
    softmax(first);
    if (SCHEDULE == CTA_PER_KV_HEAD) {  // waits until dQ of the previous block has been added
        if (me.lane == 0) bulk_wait();
        __syncwarp();
    }
    if (me.wg == 1 && end - first > 1) named_arrive(PING_PONG, 256);

    // Main loop. Tile t is in registers as pt and dst. No wgmma is in flight at the end of an iteration. The wgmma
    // groups in flight during it, oldest first:
    //   dV | dV dK dQ | dK dQ | dK dQ S | dQ S | S | S dP            and with TIGHT
    //   dV | dV dQ dK | dQ dK | dK | dK S | S | S dP
    for (int t = first; t + 1 < end; t++) {
        auto add_previous_dq = [&] {
            wgmma_wait<1>();
            pin(dq);
            me.release(DS_EMPTY + (~t & 1) * 8);
            add_dq(at_before, t > first);
        };
#if SCHEDULE == CTA_PER_KV_HEAD
        load_sum(p, w, at_before, base);
#endif
        named_sync(PING_PONG + me.wg, 256);
        pin(pt), pin(dst), pin(dk), pin(dv);
        wgmma_fence();
        add_to_dv();
        if (!TIGHT) add_to_dk();
        multiply_ds(t - 1);  // for tile 0 the buffer is not initialised, and the result is discarded
        if (TIGHT) add_to_dk();
        u32 old_q = q.slot;
        q.next();
        bar_wait(base + Q_FULL + 8 * q.slot, q.parity);
        wgmma_wait<2>();
        pin(pt), pin(dv);
        me.release(DO_EMPTY + 8 * g.slot);
        g.next();
        if (TIGHT) add_previous_dq();
        start_scores();
        if (me.wg == 0 || t + 2 < end) named_arrive(PING_PONG + (me.wg ^ 1), 256);
        wgmma_wait<TIGHT ? 1 : 2>();
        pin(dst), pin(dk);
        me.release(Q_EMPTY + 8 * old_q);
        if (!TIGHT) add_previous_dq();
        at_before = at, at = place();
        start_dp();
        softmax(t + 1);
    }

    // Epilogue: dV and dK of the last tile, dQ of the last two.
    const int last = end - 1;
#if SCHEDULE == CTA_PER_KV_HEAD
    me.release(V_EMPTY);
    load_sum(p, w, at_before, base);
#endif
    pin(pt), pin(dst), pin(dk), pin(dv);
    wgmma_fence();
    add_to_dv(), add_to_dk(), multiply_ds(last - 1);
    wgmma_wait<0>();
    pin(pt), pin(dst), pin(dk), pin(dv), pin(dq);
#if SCHEDULE == CTA_PER_KV_HEAD
    me.release(DS_EMPTY + (~last & 1) * 8), me.release(Q_EMPTY + 8 * q.slot);
    me.release(DO_EMPTY + 8 * g.slot);
#endif
    add_dq(at_before, last > first);
#if SCHEDULE == CTA_PER_KV_HEAD
    load_sum(p, w, at, base);
#endif
    multiply_ds(last);
    wgmma_wait<0>();
    pin(dq);
#if SCHEDULE == CTA_PER_KV_HEAD
    me.release(K_EMPTY);
    add_dq(at, true);
    // The next block's K and V are being loaded into their buffers, so dv and dk are stored through the buffer of dq.
    store_rows(dv_map, w, dv, 1, base), store_rows(dk_map, w, dk, p.scale, base);
    q.next(), g.next(), now.tiles = end;
#else
    add_dq(at, true);
    if (w.part >= 0) {
        if (me.lane == 0) bulk_wait_read();
        store_partial(me, p, w.part, dk, dv);
        return;
    }
    store_keys(me, dk_map, dv_map, p, w, dk, dv);
#endif
}
#endif
