// Schedule CTA_PER_KV_HEAD: a CTA computes all key blocks of a head. Included by backward.cu.
//
// Each consumer warp computes the same eighth of every tile of dq, and the same lane always adds it to the fp32
// accumulator. So no CTA or warp waits for another because of the accumulator. The first key block stores, later ones
// add. At the last visit to a tile (under a causal mask, at the diagonal) the warp prefetches its part of the
// accumulator to shared memory, adds its registers, and stores dq by rows, scaled and cast. An element's additions are
// in the order of the key blocks, so dq is deterministic. Bulk operations of a thread may be reordered. But a key block
// visits a tile only once, so a thread must wait only for the additions of the previous key blocks: once a block, after
// its first tile's softmax.
//
// The next K and V are loaded once both groups have read the old ones; V is released before the last tile's dV, dK and
// dQ, K after them. The next tiles of q and dout have been loaded by then. dv and dk are stored meanwhile.
//
// All heads that run at the same time loop over all of their queries for each key block. A visit to a tile reads 32 KB
// of q and dout, and reads and writes 32 KB of the accumulator. The accumulators should stay in L2, where a line saves
// a read and a write of device memory, so everything else is loaded with evict_first. Where L2 does not hold all of
// them, the order of queries alternates direction from block to block, so that each block begins with what is still in
// L2.
//
// Estimated clocks of a key block in addition to its tiles: the first scores and probabilities ~1500 and the last dq
// ~1000, which overlap nothing, and the load of K ~1500, overlapped with the stores of dv and dk.
#pragma once

// Whether no later key block than this one visits tile m.
DEVICE bool last_visit(const Problem& p, int first_key, int m) {
    return first_key + BN >= p.keys || m < first_tile(p, first_key + BN);
}
// Advances to the head's next key block; false if there is none.
DEVICE bool next_block(Work& w, const Problem& p) {
    w.first_key += BN;
    if (w.first_key >= p.keys) return false;
    w.low = first_tile(p, w.first_key);
    w.tiles = (p.m_tiles - w.low) * p.group;
    return true;
}

// As `produce`. K of later blocks is loaded last, as consumers release it last.
DEVICE void produce_kv_head(const TensorMap& q_map, const TensorMap& do_map, const TensorMap& k_map,
                          const TensorMap& v_map, const Problem& p, const Work& w, u32 base) {
    Ring<Q_STAGES> q;
    Ring<DO_STAGES> g;
#pragma unroll 1
    for (int first_key = 0; first_key < p.keys; first_key += BN) {
        const int low = first_tile(p, first_key);
        auto load_keys = [&](const TensorMap& map, u32 at, u32 full, u32 empty) {
            bar_wait(base + empty, first_key / BN & 1 ^ 1);
            bar_expect(base + full, K_BYTES);
#pragma unroll
            for (int part = 0; part < 2 * SLABS; part++)
                tma_load_once(base + at + part * 64 * 128, &map, part / 2 * 64, first_key + part % 2 * 64, w.head,
                              w.batch, base + full);
        };
        if (first_key == 0) load_keys(k_map, K_AT, K_FULL, K_EMPTY);
#pragma unroll 1
        for (int i = low * p.group; i < p.m_tiles * p.group; i++) {
            const int up = i / p.group, head = i % p.group, m = first_key / BN & 1 ? p.m_tiles - 1 + low - up : up;
            const int row = m * BM;
            auto load = [&](const TensorMap& map, u32 to, const float* line, u32 line_to, u32 bar) {
                bar_expect(bar, Q_BYTES + BM * 4);
                for (int slab = 0; slab < SLABS; slab++)
                    tma_load_once(to + slab * Q_SLAB, &map, slab * 64, row, w.head * p.group + head, w.batch, bar);
                load_row(line + ((long long)blockIdx.x * p.group + head) * p.m_tiles * BM + row, line_to, bar, BM * 4);
            };
            bar_wait(base + Q_EMPTY + 8 * q.slot, q.parity ^ 1);
            int place = (blockIdx.x * p.group + head) * p.m_tiles + m;
            publish_tile(base, q.slot, place * 2 + last_visit(p, first_key, m), m);
            load(q_map, base + Q_AT + q.slot * Q_BYTES, p.lse2, base + LSE_AT + q.slot * BM * 4,
                 base + Q_FULL + 8 * q.slot);
            bar_wait(base + DO_EMPTY + 8 * g.slot, g.parity ^ 1);
            load(do_map, base + DO_AT + g.slot * Q_BYTES, p.delta, base + DELTA_AT + g.slot * BM * 4,
                 base + DO_FULL + 8 * g.slot);
            if (i == low * p.group) load_keys(v_map, V_AT, V_FULL, V_EMPTY);
            if (i == low * p.group && first_key) load_keys(k_map, K_AT, K_FULL, K_EMPTY);
            q.next(), g.next();
        }
    }
}

DEVICE u32 consumer() { return threadIdx.x / 32 - 4; }  // index of this warp among the 8 consumer warps
DEVICE u32 dq_fragment(u32 base) { return base + DQ_AT + consumer() * FRAGMENT_BYTES; }
DEVICE float* sum_fragment(const Problem& p, int place) {
    return p.dq_sum + (long long)(place >> 1) * (BM * D) + consumer() * FRAGMENT;
}
// A lane's address for storing four 8x8 matrices of 16 rows of a slab. For columns 16 k ... it is XORed with k * 32.
DEVICE u32 matrices_of_rows() { return threadIdx.x % 16 * 128 + ((threadIdx.x % 32 / 16) ^ (threadIdx.x % 8)) * 16; }

// `place` is twice the tile's index over all query heads, plus 1 at the last visit. At a last visit this prefetches the
// warp's part of the accumulator to the warp's buffer of dq, which nothing else uses meanwhile.
DEVICE void load_sum(const Problem& p, const Work& w, int place, u32 base) {
    if (w.first_key == 0 || place < 0 || !(place & 1)) return;
    if (threadIdx.x % 32 == 0) {
        bulk_wait_read();
        fence_async_global();
        const u32 bar = base + SUM_FULL + 8 * consumer();
        bar_expect(bar, FRAGMENT_BYTES);
        load_row(sum_fragment(p, place), dq_fragment(base), bar, FRAGMENT_BYTES);
    }
    __syncwarp();
}

// Adds one warp's part of dq, 16 queries x 64 columns, to the accumulator. At the last visit it adds the accumulator to
// the registers instead, and stores dq.
DEVICE void add_kv_head(const TensorMap& dq_map, const Problem& p, const Work& w, Progress& now,
                      float (&dq)[DQ_REGISTERS], int place, u32 base) {
    const u32 lane = threadIdx.x % 32, fragment = dq_fragment(base) + lane * 16;
    if (lane == 0) bulk_wait_read();
    __syncwarp();
    if (!(place & 1)) {
#pragma unroll
        for (int j = 0; j < DQ_REGISTERS / 4; j++)
            store_four(fragment + j * 512, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
        fence_async();
        __syncwarp();
        if (lane == 0) {
            if (w.first_key == 0) store_bulk(sum_fragment(p, place), fragment, FRAGMENT_BYTES);
            else reduce_bulk(sum_fragment(p, place), fragment, FRAGMENT_BYTES);
            bulk_commit();
        }
        return;
    }
    if (w.first_key) {
        bar_wait(base + SUM_FULL + 8 * consumer(), now.sums++ & 1);
#pragma unroll
        for (int j = 0; j < DQ_REGISTERS / 4; j++) {
            Float4 x = shared_four(fragment + j * 512);
            dq[4 * j] += x.x, dq[4 * j + 1] += x.y, dq[4 * j + 2] += x.z, dq[4 * j + 3] += x.w;
        }
    }
    u32 to = base + CAST_AT + consumer() * ROWS_BYTES + matrices_of_rows();
    anew(to);
#pragma unroll
    for (int k = 0; k < DQ_REGISTERS / 8; k++) {
        const float* a = dq + 8 * k;
        store_matrices(to ^ (k * 32), pack(a[0] * p.scale, a[1] * p.scale), pack(a[2] * p.scale, a[3] * p.scale),
                       pack(a[4] * p.scale, a[5] * p.scale), pack(a[6] * p.scale, a[7] * p.scale));
    }
    fence_async();
    __syncwarp();
    if (lane == 0) {
        const int i = place >> 1, head = i / p.m_tiles - w.batch * p.kv_heads * p.group, row = i % p.m_tiles * BM;
        // For lane 0 `to` is the address of the box.
        store_box_once(dq_map, to, consumer() / 4 * 64, row + consumer() % 4 * 16, head, w.batch);
        bulk_commit();
    }
}

// Stores a warp's 16 rows of dv or dk, scaled.
DEVICE void store_rows(const TensorMap& map, const Work& w, const float (&c)[D / 2], float scale, u32 base) {
    u32 to = dq_fragment(base) + matrices_of_rows();
    anew(to);
    if (threadIdx.x % 32 == 0) bulk_wait_read();
    __syncwarp();
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        const float* a = c + 8 * k;
        store_matrices((to ^ (k % 4 * 32)) + k / 4 * ROWS_BYTES, pack(a[0] * scale, a[1] * scale),
                       pack(a[2] * scale, a[3] * scale), pack(a[4] * scale, a[5] * scale),
                       pack(a[6] * scale, a[7] * scale));
    }
    fence_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        for (int slab = 0; slab < SLABS; slab++)
            store_box_once(map, to + slab * ROWS_BYTES, slab * 64, w.first_key + consumer() * 16, w.head, w.batch);
        bulk_commit();
    }
}
