// The gradient of layers_forward.cu in one launch, by the same clusters: for each layer from the last to the first
//
//     dpre = (dx W_down) silu'(pre)             dn = dpre W_up          dx += norm'(dn)
//     do = dx W_out    dq, dk, dv = attention'(do)     dn = dq W_q + dk W_k + dv W_v    dx += norm'(dn)
//
// and partial sums of the gradients of the norms' weights. Those of the other weights are products over all rows, for
// which everything that they need is written: dx after attention and after the MLP, dpre, dq, dk and dv.
//
// CTA c of a cluster has 64 columns of dx in registers, and four times a layer panels of all 8 CTAs are exchanged, as
// in the forward: dx, dpre, dx, and dq with, for the context's rows, dk and dv. The gradient of a norm
//
//     dx += rstd (dn gamma - xhat mean(dn gamma xhat)),   xhat = x rstd
//
// needs a mean over all columns before they are there: sum(dn n) is sum(dy y) for a product y = n W^T, so that each CTA
// sends what it has of that with its panel.
//
// dk and dv are sums over the rows of all clusters. CTA c of a targets' cluster waits for those of head c of the cluster
// before, adds its own, and writes the sums; the context's adds the last of these. So here targets come first in the grid,
// in whose order clusters are to start where not all run at once.
//
// Shared memory: panels as in the forward.
//   0 to 5    k, v, q, p, ds, do of this CTA's head         6 to 13   dq, and then dv
//   14 to 21  dx after the MLP, then after attention; dk    0 to 21   dpre
// Barriers count the CTAs that have multiplied by what is to be written over. k, v and q come when dpre was used; dq
// follows dx after attention, for which all CTAs had used dpre; dpre of the next layer follows dx after the MLP of all
// CTAs, after their attention. Of the last layer nobody waits for LAYER_DONE, so that nobody arrives: it could be too
// late for a CTA that has ended.

#include "layers.cuh"

constexpr int KEYS = 0, VALUES = 1, QUERIES = 2, WEIGHTS = 3, DSCORES = 4, DOUT = 5, DQ = 6, DX = PANELS - WIDTH_PANELS;
// Each counts, once a layer, the CTAs that are done with their products with: dx in the MLP; dpre; dx in attention; dq;
// anything of the layer. The third and fourth are used by the context alone.
constexpr int MLP_DX_DONE = DONE, DPRE_DONE = DONE + 8, DX_DONE = DONE + 16, DQ_DONE = DONE + 24, LAYER_DONE = DONE + 32;

struct Problem {
    const Gamma *attention_gamma, *mlp_gamma;  // a layer's are gamma_pitch elements apart
    const u16* h;                              // [2, layers, sequences, rows, WIDTH]; the first is x
    const u16* x;                              // [sequences, rows, WIDTH]
    const float* rstd;                         // [2, layers, sequences, rows]
    const u16 *qkv, *attended;                 // [layers, sequences, rows, 3 WIDTH], [..., WIDTH]
    const float* lse;                          // [layers, sequences, CLUSTER, rows]
    const u16* pre;                            // [layers, sequences, rows, HIDDEN_PITCH]
    const u16* dy;                             // [sequences, rows, WIDTH]
    u16* dx;                                   // [sequences, rows, WIDTH]
    u16* dx_at;                                // [2, layers, sequences, rows, WIDTH]: after attention, after the MLP
    u16 *dpre, *dqkv;                          // like pre and qkv
    float* dgamma;                             // [layers, 2, clusters, 4, WIDTH]
    float* sums;                               // [layers, sequences, CLUSTER, 2, 8, 128, 4]: dk and dv of targets
    u32* written;                              // [layers, sequences, CLUSTER], zeros: clusters added to the sums
    long long gamma_pitch;
    Shape shape;
};

struct Maps {
    const TensorMap *qkv, *out, *up, *down, *keys, *queries, *dx, *dpre, *dqkv;
};

// Targets first.
DEVICE Tile find_tile_backward(const Shape& a) {
    const int cluster = blockIdx.x / CLUSTER, of_targets = targets_tiles(a), t = cluster - a.sequences * of_targets;
    if (t >= 0) return {t, 0, a.context, true};
    const int first = a.context + cluster % of_targets * ROWS, left = a.rows - first;
    return {cluster / of_targets, first, left < ROWS ? left : ROWS, false};
}

// The panels of a layer's weights in the order in which this CTA multiplies by them.
template <class Each> DEVICE void each_weight(const Maps& maps, bool keys, Each each) {
    const int own = 64 * cluster_rank();
    for (int column = own; column < HIDDEN_PITCH; column += WIDTH)
        each(Panels{maps.down, 0, column, 64, WIDTH_PANELS});
    each(Panels{maps.up, 0, own, 64, HIDDEN_PANELS});
    each(Panels{maps.out, 0, own, 64, WIDTH_PANELS});
    each(Panels{maps.qkv, 0, own, 64, (keys ? 3 : 1) * WIDTH_PANELS});
}

DEVICE void load_weights(const Shape& a, const Maps& maps, const Tile& tile, u32 smem) {
    Weights to{smem};
    Ahead ahead;
    each_weight(maps, true, [&](const Panels& p) { ahead.ask(p, a.layers - 1); });
    for (int layer = a.layers - 1; layer >= 0; layer--) {
        if (layer) each_weight(maps, true, [&](const Panels& p) { ahead.ask(p, layer - 1); });
        each_weight(maps, tile.context, [&](const Panels& p) { to.load(p, layer); });
    }
}

DEVICE void load_keys(const Problem& a, const Maps& maps, const Tile& tile, u32 smem) {
    const int column = 64 * cluster_rank();
    for (int layer = a.shape.layers - 1, i = 0; layer >= 0; layer--, i++) {
        const int at = layer * a.shape.sequences + tile.sequence;
        bar_wait(smem + KEYS_FREE, i & 1);
        bar_expect(smem + KEYS_FULL, 3 * PANEL);
        tma_load(smem + KEYS * PANEL, maps.keys, WIDTH + column, 0, at, 0, smem + KEYS_FULL);
        tma_load(smem + VALUES * PANEL, maps.keys, 2 * WIDTH + column, 0, at, 0, smem + KEYS_FULL);
        tma_load(smem + QUERIES * PANEL, maps.queries, column, tile.first, at, 0, smem + KEYS_FULL);
    }
}

// What the consumers report, in their order.
DEVICE void send_panels(const Problem& a, const Maps& maps, const Tile& tile, u32 smem) {
    const Messenger to{a.shape, tile, smem, cluster_rank()};
    u32 phase = 0;
    for (int layer = a.shape.layers - 1; layer >= 0; layer--, phase ^= 1) {
        to.wait(ROWS_WRITTEN, 0);
        if (layer < a.shape.layers - 1) to.wait(LAYER_DONE, phase ^ 1);
        to.spread_one_each(maps.dx, DX, 0, a.shape.layers + layer, ROWS_FULL);
        to.spread_hidden(maps.dpre, layer, MLP_DX_DONE, phase);
        to.wait(ROWS_WRITTEN, 1);
        to.wait(DPRE_DONE, phase);
        to.spread_one_each(maps.dx, DX, 0, layer, ROWS_FULL);
        to.wait(HEADS_WRITTEN, phase);
        to.spread_one_each(maps.dqkv, DQ, 0, layer, HEADS_FULL);
        to.wait(KEYS_WRITTEN, phase);
        if (tile.context) {
            to.wait(DX_DONE, phase);
            to.spread_one_each(maps.dqkv, DX, WIDTH, layer, DK_FULL);
            to.wait(DQ_DONE, phase);
            to.spread_one_each(maps.dqkv, DQ, 2 * WIDTH, layer, DV_FULL);
        } else {
            add_release(a.written + to.head_of(layer), 1);
        }
    }
}

// Writes a panel into shared memory, in TMA's 128-byte swizzle.
DEVICE void write_panel(u32 to, const u32 (&x)[16]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = first_row() + 8 * half;
#pragma unroll
        for (int j = 0; j < 8; j++)
            store_word(to + row * 128 + (j ^ row % 8) * 16 + 2 * first_column(), x[2 * j + half]);
    }
}

struct Backward : Exchange {
    const Problem& a;
    u32 phase;  // of mbarriers that are used once per layer

    DEVICE bool there(int i) const { return first_row() + i / 2 % 2 * 8 < tile.count; }

    // Writes this CTA's columns of dx, which all of the cluster get. `place` is 1 after the MLP, 0 after attention.
    DEVICE void exchange_dx(const float (&dx)[32], int place, int layer) {
        u32 packed[16];
        pack_all(packed, dx);
        store_panel(a.dx_at + row_of(place * shape.layers + layer) * WIDTH + 64 * rank, WIDTH, tile.count, packed);
        report(ROWS_WRITTEN);
    }

    // dx += the gradient of a norm: dn is that of its result, and `dots` are the sums of dn n over all columns.
    DEVICE void add_norm(float (&dx)[32], const float (&dn)[32], const u32 (&h)[16], const float (&gamma)[16],
                         const float (&rstd)[2], const float (&dots)[2], int norm, int layer) {
        float dgamma[16];
        const int clusters = gridDim.x / CLUSTER, cluster = blockIdx.x / CLUSTER;
#pragma unroll
        for (int j = 0; j < 16; j++) dgamma[j] = 0;
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const int half = i / 2 % 2, column = i / 4 * 2 + i % 2;
            const float2 pair = unpack(h[i / 2]);
            const float xhat = (i % 2 ? pair.y : pair.x) * rstd[half];
            dx[i] += rstd[half] * (dn[i] * gamma[column] - xhat * (dots[half] * (1.0f / WIDTH)));
            dgamma[column] += there(i) ? dn[i] * xhat : 0;
        }
        float* const to = a.dgamma + (((u64)(layer * 2 + norm) * clusters + cluster) * 4 + threadIdx.x / 32) * WIDTH;
#pragma unroll
        for (int j = 0; j < 16; j++) {
#pragma unroll
            for (int bit = 4; bit < 32; bit *= 2) dgamma[j] += __shfl_xor_sync(~0u, dgamma[j], bit);
            if (threadIdx.x % 32 < 4) to[64 * rank + j / 2 * 8 + first_column() + j % 2] = dgamma[j];
        }
    }

    // What a norm's gradient needs, loaded before a product.
    struct OfNorm {
        u32 h[16];
        float gamma[16], rstd[2];
    };
    DEVICE void load_norm(OfNorm& to, int norm, int layer) {
        const u64 row = row_of(norm * shape.layers + layer);
        const u16* const h = norm + layer ? a.h + row * WIDTH : a.x + row_of(0) * WIDTH;
        load_panel(to.h, h + 64 * rank, WIDTH, tile.count);
        load_gamma(to.gamma, (norm ? a.mlp_gamma : a.attention_gamma) + layer * a.gamma_pitch + 64 * rank);
#pragma unroll
        for (int half = 0; half < 2; half++)
            to.rstd[half] = there(2 * half) ? load_early(a.rstd + row + first_row() + 8 * half) : 0;
    }

    DEVICE void mlp(float (&dx)[32], int layer) {
        float d[32], dots[2] = {0, 0};
        u32 packed[16];
        bar_wait(smem + ROWS_FULL, 0);
        for (int panel = rank; panel < HIDDEN_PANELS; panel += 8) {
            const u64 at = row_of(layer) * HIDDEN_PITCH + 64 * panel;
            u32 pre[16];
            load_panel(pre, a.pre + at, HIDDEN_PITCH, tile.count);
            clear(d);
            multiply<1>(d, DX, WIDTH_PANELS);
#pragma unroll
            for (int i = 0; i < 32; i++) {
                const float2 pair = unpack(pre[i / 2]);
                const float x = i % 2 ? pair.y : pair.x, s = __fdividef(1.0f, 1.0f + exp2_(x * -LOG2_E));
                d[i] *= s * (1.0f + x * (1.0f - s));
                dots[i / 2 % 2] += d[i] * x;
            }
            pack_all(packed, d);
            store_panel(a.dpre + at, HIDDEN_PITCH, tile.count, packed);
            report(HIDDEN_WRITTEN + panel / 8 * 8);
        }
        send_sums(dots);
        if (GROUPS > 1) say_done(MLP_DX_DONE);
        OfNorm norm;
        load_norm(norm, 1, layer);
        clear(d);
        multiply<1, true>(d, 0, HIDDEN_PANELS, phase);
        say_done(DPRE_DONE);
        if (threadIdx.x == 0) bar_arrive(smem + KEYS_FREE);
        wait_for_sums(dots);
        add_norm(dx, d, norm.h, norm.gamma, norm.rstd, dots, 1, layer);
    }

    // 64 keys by 64 columns of a x^T b over this tile's rows, of two panels.
    DEVICE void over_rows(float (&d)[32], int of_keys, int of_columns) {
        const u64 x = describe(smem + of_keys * PANEL, PANEL), y = describe(smem + of_columns * PANEL, PANEL);
        clear(d);
        pin(d);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) wgmma_64<1, 1>(d, x + 128 * i, y + 128 * i);
        wgmma_commit();
        wgmma_wait<0>();
        pin(d);
    }

    // The sums of dk (0) or dv (1) of this CTA's head over the targets of the clusters so far.
    DEVICE float4* sums_of(int layer, int which) const {
        return (float4*)a.sums + (head_of(layer) * 2 + which) * 8 * 128 + threadIdx.x;
    }
    DEVICE void write_sums(const float (&d)[32], int layer, int which) {
        float4* const to = sums_of(layer, which);
#pragma unroll
        for (int j = 0; j < 8; j++) to[128 * j] = {d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]};
    }
    // Waits until so many clusters are in the sums, and adds them.
    DEVICE void add_sums(float (&dk)[32], float (&dv)[32], int layer, int clusters) {
        float4 sums[2][8];
        if (threadIdx.x == 0) wait_for_count(a.written + head_of(layer), clusters);
        warpgroup_sync(1);
#pragma unroll
        for (int which = 0; which < 2; which++)
#pragma unroll
            for (int j = 0; j < 8; j++) sums[which][j] = load_shared_by_gpu(sums_of(layer, which) + 128 * j);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            add(dk, j, sums[0][j]);
            add(dv, j, sums[1][j]);
        }
    }
    DEVICE static void add(float (&d)[32], int j, const float4& x) {
        d[4 * j] += x.x, d[4 * j + 1] += x.y, d[4 * j + 2] += x.z, d[4 * j + 3] += x.w;
    }

    // Sum of x y over this CTA's columns of a row.
    DEVICE void add_dots(float (&dots)[2], const float (&x)[32], const u32 (&y)[16]) {
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const float2 pair = unpack(y[i / 2]);
            dots[i / 2 % 2] += x[i] * (i % 2 ? pair.y : pair.x);
        }
    }

    DEVICE void attention(float (&dx)[32], int layer) {
        float d[32], s[32], dots[2] = {0, 0}, of_rows[2], lse[2];
        u32 q[16], packed[16], dout[16];
        const float* const all_lse = a.lse + head_of(layer) * shape.rows + tile.first;
        u16* const dqkv = a.dqkv + row_of(layer) * 3 * WIDTH + 64 * rank;
        const u16* const qkv = a.qkv + row_of(layer) * 3 * WIDTH + 64 * rank;
        load_panel(q, qkv, 3 * WIDTH, tile.count);
        load_panel(packed, a.attended + row_of(layer) * WIDTH + 64 * rank, WIDTH, tile.count);
#pragma unroll
        for (int half = 0; half < 2; half++)
            lse[half] = there(2 * half) ? load_early(all_lse + first_row() + 8 * half) : 0;
        bar_wait(smem + ROWS_FULL, 1);
        clear(d);
        multiply<1>(d, DX, WIDTH_PANELS);
        if (tile.context) say_done(DX_DONE);
#pragma unroll
        for (int i = 0; i < 32; i++) d[i] = there(i) ? d[i] : 0;
        add_dots(dots, d, packed);
#pragma unroll
        for (int half = 0; half < 2; half++) of_rows[half] = sum_of_row(dots[half]), dots[half] = 0;
        pack_all(dout, d);
        write_panel(smem + DOUT * PANEL, dout);

        // p = exp(s - lse), of which dv = p^T do.
        const u64 keys = describe(smem + KEYS * PANEL, PANEL), values = describe(smem + VALUES * PANEL, PANEL);
        bar_wait(smem + KEYS_FULL, phase);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) wgmma_from_registers(s, q + 4 * i, keys + 2 * i, i > 0);
#pragma unroll
        for (int i = 0; i < 4; i++) wgmma_from_registers(d, dout + 4 * i, values + 2 * i, i > 0);
        wgmma_commit();
        wgmma_wait<0>();
        pin(s);
        pin(d);
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const bool counts = there(i) && i / 4 * 8 + first_column() + i % 2 < shape.context;
            s[i] = counts ? exp2_((s[i] * shape.scale - lse[i / 2 % 2]) * LOG2_E) : 0;
            d[i] = counts ? s[i] * (d[i] - of_rows[i / 2 % 2]) * shape.scale : 0;
        }
        pack_all(packed, s);
        write_panel(smem + WEIGHTS * PANEL, packed);
        pack_all(packed, d);
        write_panel(smem + DSCORES * PANEL, packed);
        fence_async();
        warpgroup_sync(1);

        // dq first, which all CTAs of the cluster wait for.
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) wgmma_from_registers<32, 1>(s, packed + 4 * i, keys + 128 * i, i > 0);
        wgmma_commit();
        wgmma_wait<0>();
        pin(s);
        add_dots(dots, s, q);
        pack_all(packed, s);
        store_panel(dqkv, 3 * WIDTH, tile.count, packed);
        report(HEADS_WRITTEN);
        if (!tile.context) send_sums(dots);

        over_rows(s, DSCORES, QUERIES);
        over_rows(d, WEIGHTS, DOUT);
        if (tile.context) {
            finish_keys(s, d, dots, dqkv, qkv, layer);
        } else {
            const int before = (tile.first - shape.context) / ROWS;
            if (before) add_sums(s, d, layer, before);
            write_sums(s, layer, 0);
            write_sums(d, layer, 1);
            report(KEYS_WRITTEN);
#pragma unroll
            for (int i = 0; i < 16; i++) packed[i] = 0;  // unused keys and values have a gradient of 0
            store_panel(dqkv + WIDTH, 3 * WIDTH, tile.count, packed);
            store_panel(dqkv + 2 * WIDTH, 3 * WIDTH, tile.count, packed);
        }

        OfNorm norm;
        load_norm(norm, 0, layer);
        clear(d);
        bar_wait(smem + HEADS_FULL, phase);
        multiply<1>(d, DQ, WIDTH_PANELS);
        if (tile.context) multiply_keys(d);
        if (layer) say_done(LAYER_DONE);
        wait_for_sums(dots);
        add_norm(dx, d, norm.h, norm.gamma, norm.rstd, dots, 0, layer);
    }

    // In the context's cluster: adds the targets' sums to dk and dv, and writes both.
    DEVICE void finish_keys(float (&dk)[32], float (&dv)[32], float (&dots)[2], u16* dqkv, const u16* qkv, int layer) {
        u32 packed[16], keys[16], values[16];
        load_panel(keys, qkv + WIDTH, 3 * WIDTH, tile.count);
        load_panel(values, qkv + 2 * WIDTH, 3 * WIDTH, tile.count);
        add_sums(dk, dv, layer, targets_tiles(shape));
        add_dots(dots, dk, keys);
        add_dots(dots, dv, values);
        pack_all(packed, dk);
        store_panel(dqkv + WIDTH, 3 * WIDTH, tile.count, packed);
        pack_all(packed, dv);
        store_panel(dqkv + 2 * WIDTH, 3 * WIDTH, tile.count, packed);
        report(KEYS_WRITTEN);
        send_sums(dots);
    }

    // d += dk W_k + dv W_v.
    DEVICE void multiply_keys(float (&d)[32]) {
        say_done(DQ_DONE);
        bar_wait(smem + DK_FULL, phase);
        multiply<1>(d, DX, WIDTH_PANELS);
        bar_wait(smem + DV_FULL, phase);
        multiply<1>(d, DQ, WIDTH_PANELS);
    }

    DEVICE void run() {
        float dx[32];
        u32 packed[16];
        load_panel(packed, a.dy + row_of(0) * WIDTH + 64 * rank, WIDTH, tile.count);
        unpack_all(dx, packed);
        phase = 0;
        for (int layer = shape.layers - 1; layer >= 0; layer--, phase ^= 1) {
            exchange_dx(dx, 1, layer);
            mlp(dx, layer);
            exchange_dx(dx, 0, layer);
            attention(dx, layer);
        }
        pack_all(packed, dx);
        store_panel(a.dx + row_of(0) * WIDTH + 64 * rank, WIDTH, tile.count, packed);
    }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
transformer_np_layers_backward(const __grid_constant__ TensorMap qkv, const __grid_constant__ TensorMap out,
                               const __grid_constant__ TensorMap up, const __grid_constant__ TensorMap down,
                               const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap queries,
                               const __grid_constant__ TensorMap dx, const __grid_constant__ TensorMap dpre,
                               const __grid_constant__ TensorMap dqkv, const __grid_constant__ Problem problem) {
    extern __shared__ __align__(1024) char shared[];
    const u32 smem = (u32)__cvta_generic_to_shared(shared);
    begin(smem);
    const Maps maps{&qkv, &out, &up, &down, &keys, &queries, &dx, &dpre, &dqkv};
    const Tile tile = find_tile_backward(problem.shape);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp < CONSUMERS / 32) {
        Backward{{{problem.shape, tile, smem, cluster_rank()}}, problem}.run();
    } else if (threadIdx.x == CONSUMERS) {
        load_weights(problem.shape, maps, tile, smem);
    } else if (threadIdx.x == CONSUMERS + 32) {
        load_keys(problem, maps, tile, smem);
    } else if (threadIdx.x == CONSUMERS + 64) {
        send_panels(problem, maps, tile, smem);
    }
    __syncwarp();
    cluster_leave();
}
