// What cuda_backward.cu, which includes this, does otherwise where a CTA takes many blocks of keys (CHAINED).
//
// With few queries a block of keys has few tiles, and starting a CTA, loading K and V, filling the pipeline, draining
// it and storing dK and dV count beside them. Here there is a CTA to a multiprocessor. It does the items (a block of
// keys or a share of one) blockIdx.x, blockIdx.x + gridDim.x and so on, and their tiles, counted through, are one loop:
// in the step from the last tile of an item to the first of the next, S and dP are of the new keys and values, dQ, a
// tile late, of the old keys, and dK and dV leave from registers while the new S is under way.
//
// K has two buffers, for in the step after that dQ is of the old keys still. V has one: consumers hold it in registers,
// so that the next can come as soon as they have begun an item.
#pragma once

#if CHAINED
static_assert(D == 64 && !CAUSAL && !SINGLE, "without a mask all items take as long, so none is handed out");

constexpr u32 K_OTHER = K_BYTES;  // from one buffer of K to the other
constexpr u32 K2_FULL = SHARED_END, K2_EMPTY = K2_FULL + 16, V1_EMPTY = K2_EMPTY + 16;
static_assert(K_AT == 0 && V1_EMPTY + 16 <= 232448, "the barriers for two blocks of keys fit behind all else");

DEVICE void produce_chained(const TensorMap& q_map, const TensorMap& do_map, const TensorMap& k_map,
                            const TensorMap& v_map, const Problem& p, int items, u32 base) {
    Ring<Q_STAGES> q;
    Ring<DO_STAGES> g;
#pragma unroll 1
    for (u32 n = 0, item = blockIdx.x; item < items; n++, item += gridDim.x) {
        const Work w(p, item);
        Tile tile(w, p);
        auto load_keys = [&](const TensorMap& map, u32 to, u32 bar) {
            bar_expect(bar, K_BYTES);
            for (int half = 0; half < 2; half++)
                tma_load(to + half * 64 * 128, &map, 0, w.first_key + half * 64, w.head, w.batch, bar);
        };
#pragma unroll 1
        for (int t = 0; t < w.tiles; t++) {
            int head = tile.all_heads - w.batch * p.kv_heads * p.group, row = tile.m * BM;
            long long at = (long long)tile.all_heads * p.m_tiles * BM + row;
            if (t == 0) {
                bar_wait(base + K2_EMPTY + n % 2 * 8, n / 2 & 1 ^ 1);
                w.store(item_slot(base, n));
                load_keys(k_map, base + n % 2 * K_OTHER, base + K2_FULL + n % 2 * 8);
            }
            u32 bar = base + Q_FULL + 8 * q.slot;
            bar_wait(base + Q_EMPTY + 8 * q.slot, q.parity ^ 1);
            tell(base, q.slot, tile.all_heads * p.m_tiles + tile.m, tile.m);
            bar_expect(bar, Q_BYTES + BM * 4);
            tma_load(base + Q_AT + q.slot * Q_BYTES, &q_map, 0, row, head, w.batch, bar);
            load_row(p.lse2 + at, base + LSE_AT + q.slot * BM * 4, bar, BM * 4);
            if (t == 0) {
                bar_wait(base + V1_EMPTY, n & 1 ^ 1);
                load_keys(v_map, base + V_AT, base + V_FULL);
            }
            bar = base + DO_FULL + 8 * g.slot;
            bar_wait(base + DO_EMPTY + 8 * g.slot, g.parity ^ 1);
            bar_expect(bar, Q_BYTES + BM * 4);
            tma_load(base + DO_AT + g.slot * Q_BYTES, &do_map, 0, row, head, w.batch, bar);
            load_row(p.delta + at, base + DELTA_AT + g.slot * BM * 4, bar, BM * 4);
            q.next(), g.next(), tile.next(w, p);
        }
    }
}

// dV or dK as in cuda_backward.cu, but begun anew at the first tile of an item.
DEVICE void gradient(float (&c)[D / 2], const u32 (&a)[BM / 4], u32 columns, bool first) {
#pragma unroll
    for (int k = 0; k < BM / 16; k++) mma<1>(c, a + 4 * k, across<Q_SLAB>(columns + k * 128), k != 0 || !first);
    wgmma_commit();
}

// x[i] of lane j of four becomes x[j] of lane i.
DEVICE void turn_quad(u32 (&x)[4], int own) {
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
// 16 rows of dK or dV as a warp's products have them: this lane's are `row` and the one 8 rows on, if there are so many
// keys. The four lanes of a row exchange their pairs of columns, so that each stores 16 bytes.
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
            turn_quad(x, own);
            if (key < keys) store_global(chunk(to, batch, head, key, (j + own) * 8), x);
        }
    }
}

DEVICE void consume_chained(const Rows& dk_rows, const Rows& dv_rows, const Problem& p, int items, u32 base) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int wg = __shfl_sync(~0u, (int)threadIdx.x / 128 - 1, 0);  // known to be one to the warp
    const u32 rows = base + wg * 64 * 128, pairs = lane % 4 * 8;
    const u32 ds_store = base + DS_AT + wg * (BM * 128) + (lane / 16 * 8 + lane % 8) * 128 +
                         (((2 * warp + lane / 8 % 2) ^ (lane % 8)) * 16);
    const u32 ds_rows = base + DS_AT + wg * 64 * 128, dq_piece = base + DQ_AT + (wg * 4 + warp) * PIECE_BYTES;

    float dk[D / 2], dv[D / 2], s[BM / 2], dp[BM / 2], dq[DQ_REGISTERS];
    u32 pt[BM / 4], dst[BM / 4], v_own[D / 4];
    Ring<Q_STAGES> q;
    Ring<DO_STAGES> g;
    u32 n = 0;                         // the item of the scores, counted from this CTA's first
    int item = blockIdx.x;             // the same, counted over all CTAs
    int first_key, left;               // of it; tiles that are left with this one

    auto release = [&](u32 bar) {
        if (lane == 0) bar_arrive(base + bar);
    };
    auto enter = [&] {
        bar_wait(base + K2_FULL + n % 2 * 8, n / 2 & 1);
        Uint4 x = shared_chunk(item_slot(base, n));
        first_key = __shfl_sync(~0u, (int)x.x, 0), left = __shfl_sync(~0u, (int)x.y, 0);
    };
    auto place = [&] { return told_place(base, q.slot); };
    auto begin_scores = [&] {
        bar_wait(base + Q_FULL + 8 * q.slot, q.parity);
        wgmma_fence();
        scores(s, (rows + n % 2 * K_OTHER) / 16, (base + Q_AT + q.slot * Q_BYTES) / 16);
    };
    auto load_values = [&] {
        bar_wait(base + V_FULL, n & 1);
        u32 row = warp * 16 + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
        for (int k = 0; k < D / 16; k++)
            load_matrices(v_own + 4 * k, rows + V_AT + row * 128 + (((k * 2 + lane / 16) ^ (lane % 8)) * 16));
    };
    auto begin_dp = [&] {
        bar_wait(base + DO_FULL + 8 * g.slot, g.parity);
        wgmma_fence();
        scores(dp, v_own, (base + DO_AT + g.slot * Q_BYTES) / 16);
    };
    auto softmax = [&](int t) {
        wgmma_wait<1>();
        pin(s);
        if (first_key + wg * 64 + 64 > p.keys) {
            int key = first_key + wg * 64 + warp * 16 + lane / 4;
            mask(s, key < p.keys ? 0 : BM, key + 8 < p.keys ? 0 : BM, p.scale > 0 ? -INFINITE : INFINITE);
        }
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
    auto multiply_ds = [&](int t, u32 of_item) {
        bar_wait(base + DS_FULL + (t & 1) * 8, (t >> 1) & 1);
        wgmma_fence();
        query_gradient(dq, (ds_rows + (t & 1) * DS_BYTES) / 16, (base + of_item % 2 * K_OTHER) / 16);
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
            int row = (int)x.x + wg * 64 + warp * 16 + lane / 4, batch = shared_word(item_slot(base, of_item) + 16);
            store_rows(dv_rows, batch, x.w, row, p.keys, dv, 1);
            store_rows(dk_rows, batch, x.w, row, p.keys, dk, p.scale);
        }
    };
    auto last_of_all = [&] { return left == 1 && item + (int)gridDim.x >= items; };

    enter();
    begin_scores();
    load_values();
    begin_dp();
    release(V1_EMPTY);
    softmax(0);
    bool more = !last_of_all(), fresh = true;  // fresh: tile t is the first of its item
    if (wg == 1 && more) named_arrive(FIRST_TURN, 256);
    int at = place(), at_before = at, t = 0;
    // As the loop of `consume`, of which this is the order of products; t counts the tiles of all items.
    for (; more; t++) {
        const bool ends = left == 1, freed = fresh && t > 0;  // freed: after this step nobody reads the keys before
        const bool alone = ends && freed;  // an item of one tile: the next one's keys come where those before it lie
        named_sync(FIRST_TURN + wg, 256);
        pin(pt), pin(dst), pin(dk), pin(dv);
        wgmma_fence();
        gradient(dv, pt, (base + DO_AT + g.slot * Q_BYTES) / 16, fresh);
        gradient(dk, dst, (base + Q_AT + q.slot * Q_BYTES) / 16, fresh);
        multiply_ds(t - 1, n ^ (u32)fresh);  // before tile 0 it is open: of nothing, and thrown away
        if (alone) {
            // They come when the other group's dQ is done too: it has its turn before they are waited for.
            wgmma_wait<0>();
            release(K2_EMPTY + (n ^ 1) % 2 * 8);
            if (wg == 0) named_arrive(FIRST_TURN + 1, 256);
        }
        u32 old_q = q.slot;
        q.next();
        if (ends) {
            n++, item += gridDim.x;
            enter();
        } else {
            left--;
        }
        more = !last_of_all();
        wgmma_wait<2>();
        pin(pt), pin(dv);
        release(DO_EMPTY + 8 * g.slot);
        g.next();
        begin_scores();
        if (wg == 0 ? !alone : more) named_arrive(FIRST_TURN + (wg ^ 1), 256);
        wgmma_wait<2>();
        pin(dst), pin(dk);
        release(Q_EMPTY + 8 * old_q);
        wgmma_wait<1>();
        pin(dq);
        release(DS_EMPTY + (~t & 1) * 8);
        if (freed && !alone) release(K2_EMPTY + (n ^ 1) % 2 * 8);
        add_to_sum(p, dq, at_before, t > 0, dq_piece, wg * 4 + warp);
        at_before = at, at = place();
        if (ends) store_keys(n - 1), load_values();  // in registers that dP takes next
        begin_dp();
        if (ends) release(V1_EMPTY);
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
    add_to_sum(p, dq, at_before, t > 0, dq_piece, wg * 4 + warp);
    multiply_ds(t, n);
    store_keys(n);
    wgmma_wait<0>();
    pin(dq);
    add_to_sum(p, dq, at, true, dq_piece, wg * 4 + warp);
    if (lane == 0) bulk_wait();
}

extern "C" __global__ void __launch_bounds__(384, 1)
attention_cuda_bwd(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap do_map,
         const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map, const Rows dk, const Rows dv,
         const Problem p) {
    const u32 base = shared_memory();
    if (threadIdx.x == 0) {
        auto init = [&](u32 bar, int slots, u32 arrivals) {
            for (int i = 0; i < slots; i++) bar_init(base + bar + 8 * i, arrivals);
        };
        init(K2_FULL, 2, 1), init(V_FULL, 1, 1), init(Q_FULL, Q_STAGES, 1), init(DO_FULL, DO_STAGES, 1);
        init(K2_EMPTY, 2, CONSUMER_WARPS), init(V1_EMPTY, 1, CONSUMER_WARPS);
        init(Q_EMPTY, Q_STAGES, CONSUMER_WARPS), init(DO_EMPTY, DO_STAGES, CONSUMER_WARPS);
        init(DS_FULL, 2, CONSUMER_WARPS), init(DS_EMPTY, 2, CONSUMER_WARPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const int items = p.whole + (p.all_kv_heads * p.n_blocks - p.whole) * p.splits;
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) produce_chained(q_map, do_map, k_map, v_map, p, items, base);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        consume_chained(dk, dv, p, items, base);
    }
}
#endif
