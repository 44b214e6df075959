// Schedule SINGLE_BLOCK: there is a single block of keys. Included by backward.cu.
#pragma once

constexpr int ROW_WARPS = 2;  // of `preprocess_tiles`
constexpr float LOG2_E = 1.4426950408889634f;

// Dot product of 8 elements.
DEVICE float dot(const Uint4& a, const Uint4& b) {
    const u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        Float2 u = unpack(x[j]), v = unpack(y[j]);
        sum += u.x * v.x + u.y * v.y;
    }
    return sum;
}

#if SCHEDULE == SINGLE_BLOCK
static_assert(Q_STAGES == DO_STAGES);

// As `produce`, but loads out too, and neither lse nor delta, which `preprocess_tiles` computes.
DEVICE void produce_single(const TensorMap& q_map, const TensorMap& do_map, const TensorMap& k_map,
                           const TensorMap& v_map, const TensorMap& out_map, const Problem& p, const Work& w,
                           u32 base) {
    load_block(k_map, w, base + K_AT, base + K_FULL);
    load_block(v_map, w, base + V_AT, base + V_FULL);
    auto load = [&](const TensorMap& map, u32 at, int row, int head, u32 bar) {
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++)
            tma_load(at + slab * Q_SLAB, &map, slab * 64, row, head, w.batch, bar);
    };
#pragma unroll 1
    for (int t = 0; t < w.tiles; t++) {
        int i = w.begin + t, row = (w.low + i / p.group) * BM, head = w.head * p.group + i % p.group;
        u32 slot = t % DO_STAGES, to = base + slot * Q_BYTES, bar = base + 8 * slot, open = t / DO_STAGES & 1 ^ 1;
        bar_wait(bar + Q_EMPTY, open);
        publish_tile(base, slot, (w.batch * p.kv_heads * p.group + head) * p.m_tiles + row / BM, row / BM);
        bar_expect(bar + Q_FULL, Q_BYTES);
        load(q_map, to + Q_AT, row, head, bar + Q_FULL);
        bar_wait(bar + DO_EMPTY, open);
        bar_expect(bar + DO_FULL, 2 * Q_BYTES);
        load(do_map, to + DO_AT, row, head, bar + DO_FULL);
        load(out_map, to + OUT_AT, row, head, bar + DO_FULL);
    }
}

// Computes lse to base 2 and delta of each tile, as `preprocess` does with other schedules, by two warps that would be
// idle, one row a lane. As rows are swizzled, eight lanes that read the same column of eight rows use all banks. out,
// lse and delta have the same stages as dout: consumers release a stage after they have read lse and delta, which were
// written after out was read. So the empty barrier of a stage of dout covers the other three.
DEVICE void preprocess_tiles(const Problem& p, const Work& w, u32 base) {
    const int first_head = (w.batch * p.kv_heads + w.head) * p.group, end = w.begin + w.tiles;
    u32 count = 0;
    auto slot = [&] {  // recomputed at each use, as is the address in of_query: a thread has 24 registers
        u32 x = count;
        anew(x);
        return x % DO_STAGES;
    };
#pragma unroll 1
    for (int i = w.begin; i < end; i++, count++) {
        bar_wait(base + DO_FULL + 8 * slot(), count / DO_STAGES & 1);
#pragma unroll 1
        for (u32 row = threadIdx.x - 32; row < BM; row += 32 * ROW_WARPS) {
            auto of_query = [&](const float* x, float otherwise) {
                u32 tile = i;
                anew(tile);
                int query = (w.low + (int)tile / p.group) * BM + row;
                long long head = first_head + (int)tile % p.group;
                return query < p.queries ? x[head * p.queries + query] : otherwise;
            };
            float line = of_query(p.lse2, -INFINITE), sum = 0;  // the load is overlapped with the sum
            u32 at = base + slot() * Q_BYTES + row * 128 + row % 8 * 16;
#pragma unroll 1
            for (int slab = 0; slab < SLABS; slab++, at += Q_SLAB)
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    u32 chunk = at ^ (k * 16);
                    sum += dot(shared_chunk(chunk + OUT_AT), shared_chunk(chunk + DO_AT));
                }
            if (p.delta != nullptr) sum -= of_query(p.delta, 0);
            bool empty = line == -INFINITE;
            u32 to = base + (slot() * BM + row) * 4;
            store_one(to + LSE_AT, empty ? INFINITE : line * LOG2_E);
            store_one(to + DELTA_AT, empty ? 0 : sum);
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) bar_arrive(base + ROWS_FULL + 8 * slot());
    }
}
#endif
