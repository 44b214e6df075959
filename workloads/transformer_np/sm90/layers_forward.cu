// The layers of TransformerNP in one launch, for Hopper (sm_90a): few rows, of which all attend to the first `context`.
//
//     n = norm(x, attention_gamma)     q, k, v = n W_qkv^T     x = x + softmax(q k^T / 8) v W_out^T
//     n = norm(x, mlp_gamma)           x = x + silu(n W_up^T) W_down^T                    for each layer in turn
//
// A cluster of 8 CTAs takes 64 rows through all layers. CTA c has columns 64 c to 64 c + 63 of the residual stream, in
// registers, as sums of wgmma that the products add to; head c; and of the hidden the panels c, c + 8 and c + 16. Every
// product needs whole rows, of which each CTA made a panel of 64 columns: its consumers write the panel to memory and
// report it to a warp that waits for the stores, and has TMA load the panel into the shared memory of all 8, at the
// panel's place. That happens four times a layer: x, what the heads made, x, the hidden.
//
// A norm needs no exchange of its own: rows of x gamma are exchanged, each CTA sends the sums of squares of its columns
// along, and the products are scaled by 1 / rms of the row afterwards.
//
// Targets' rows need the context's keys and values. The clusters of the context come first in the grid, and wait for no
// other; CTA c of the targets' waits until CTA c of their sequence's context has written a layer's keys and values of
// head c. Where not all clusters run at once, this needs them to start in the order of the grid.
//
// Napkin maths, a layer: weights are 0.48 MB for each CTA (with keys and values 0.6), and what is exchanged 0.37 MB,
// together 850 KB at the 64 bytes a cycle that an SM gets from L2: 13 thousand cycles, 8 us. The tensor cores take 8
// thousand. An exchange is a store, a fence, a load: 1 us and more. EXPERIMENTS.md has what was measured, 34 thousand.
//
// Shared memory: 22 panels of 64 rows by 64 columns, the ring of the weights' panels, sums of squares, barriers.
//   panels 0 to 7   what the heads made         14 to 21   x gamma
//   panels 8, 9     keys, values                0 to 21    the hidden
// Nobody may load into a panel that some CTA still reads. What the heads made follows x of this layer, whose senders had
// all done with the hidden; x gamma before the MLP follows what all heads made, after their products with x gamma; the
// first 8 panels of the hidden follow x gamma before the MLP, after all products with what the heads made. The rest of
// the hidden would overwrite x gamma, and x gamma the hidden: barriers count the CTAs that have multiplied by them. The
// next keys and values are loaded when this CTA has multiplied by the hidden, whose panels 8 and 9 follow every CTA's
// attention. Of the last layer nobody waits for these barriers, so that nobody arrives: it could be too late for a CTA
// that has ended.
//
// Defined by the launcher: SAVE (whether what the backward needs is written), and what layers.cuh says.

#include "layers.cuh"

constexpr int HEADS = 0, KEYS = 8, VALUES = 9, SCALED = PANELS - WIDTH_PANELS;  // panels
constexpr int SCALED_DONE = DONE, HIDDEN_DONE = DONE + 8;                       // barriers used once per layer

struct Problem {
    const u16* x;                              // [sequences, rows, WIDTH]
    const Gamma *attention_gamma, *mlp_gamma;  // a layer's are gamma_pitch elements apart
    u16 *h, *n;                                // [2, layers, sequences, rows, WIDTH]; after h the last x
    u16* scaled;                               // [2, sequences, rows, WIDTH]
    float* rstd;                               // [2, layers, sequences, rows]
    u16 *qkv, *attended;                       // [layers, sequences, rows, 3 WIDTH], [..., WIDTH]
    float* lse;                                // [layers, sequences, CLUSTER, rows]
    u16 *pre, *hidden;                         // [layers, sequences, rows, HIDDEN_PITCH]
    u32* written;                              // [layers, sequences, CLUSTER], zeros: set when keys, values are written
    long long gamma_pitch;
    Shape shape;
};

struct Maps {
    const TensorMap *qkv, *out, *up, *down, *keys, *scaled, *attended, *hidden;
};

// The panels of a layer's weights in the order in which this CTA multiplies by them.
template <class Each> DEVICE void each_weight(const Maps& maps, bool keys, Each each) {
    const int own = 64 * cluster_rank();
    if (keys) {
        each(Panels{maps.qkv, WIDTH + own, 0, 0, WIDTH_PANELS});
        each(Panels{maps.qkv, 2 * WIDTH + own, 0, 0, WIDTH_PANELS});
    }
    each(Panels{maps.qkv, own, 0, 0, WIDTH_PANELS});
    each(Panels{maps.out, own, 0, 0, WIDTH_PANELS});
    for (int row = own; row < HIDDEN_PITCH; row += WIDTH) each(Panels{maps.up, row, 0, 0, WIDTH_PANELS});
    each(Panels{maps.down, own, 0, 0, HIDDEN_PANELS});
}

DEVICE void load_weights(const Shape& a, const Maps& maps, const Tile& tile, u32 smem) {
    Weights to{smem};
    Ahead ahead;
    each_weight(maps, true, [&](const Panels& p) { ahead.ask(p, 0); });
    for (int layer = 0; layer < a.layers; layer++) {
        if (layer + 1 < a.layers) each_weight(maps, true, [&](const Panels& p) { ahead.ask(p, layer + 1); });
        each_weight(maps, tile.context, [&](const Panels& p) { to.load(p, layer); });
    }
}

DEVICE void load_keys(const Problem& a, const Maps& maps, const Tile& tile, u32 smem) {
    const int rank = cluster_rank();
    for (int layer = 0; layer < a.shape.layers; layer++) {
        const int at = layer * a.shape.sequences + tile.sequence;
        bar_wait(smem + KEYS_FREE, layer & 1 ^ 1);
        wait_for_count(a.written + at * CLUSTER + rank, 1);
        fence_for_tma_loads();
        bar_expect(smem + KEYS_FULL, 2 * PANEL);
        tma_load(smem + KEYS * PANEL, maps.keys, WIDTH + 64 * rank, 0, at, 0, smem + KEYS_FULL);
        tma_load(smem + VALUES * PANEL, maps.keys, 2 * WIDTH + 64 * rank, 0, at, 0, smem + KEYS_FULL);
    }
}

// What the consumers report, in their order.
DEVICE void send_panels(const Problem& a, const Maps& maps, const Tile& tile, u32 smem) {
    const Messenger to{a.shape, tile, smem, cluster_rank()};
    for (int layer = 0; layer < a.shape.layers; layer++) {
        const u32 phase = layer & 1;
        to.wait(ROWS_WRITTEN, 0);
        if (layer) to.wait(HIDDEN_DONE, phase ^ 1);
        to.spread_one_each(maps.scaled, SCALED, 0, 0, ROWS_FULL);
        if (tile.context) {
            to.wait(KEYS_WRITTEN, phase);
            add_release(a.written + to.head_of(layer), 1);
        }
        to.wait(HEADS_WRITTEN, phase);
        to.spread_one_each(maps.attended, HEADS, 0, layer, HEADS_FULL);
        to.wait(ROWS_WRITTEN, 1);
        to.spread_one_each(maps.scaled, SCALED, 0, 1, ROWS_FULL);
        to.spread_hidden(maps.hidden, layer, SCALED_DONE, phase);
    }
}

struct Forward : Exchange {
    const Problem& a;
    float rstd[2];  // of this thread's rows

    // Sends x gamma and the sums of squares to all CTAs, and waits for theirs.
    DEVICE void exchange_rows(const float (&x)[32], const float (&gamma)[16], int norm, int layer) {
        u32 packed[16];
        float squares[2] = {0, 0}, sums[2];
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float low = x[4 * j + 2 * half], high = x[4 * j + 2 * half + 1];
                squares[half] += low * low + high * high;
                packed[2 * j + half] = pack(low * gamma[2 * j], high * gamma[2 * j + 1]);
            }
        store_panel(a.scaled + row_of(norm) * WIDTH + 64 * rank, WIDTH, tile.count, packed);
        report(ROWS_WRITTEN);
        send_sums(squares);
        if (SAVE && norm + layer) {
            pack_all(packed, x);
            store_panel(a.h + row_of(norm * shape.layers + layer) * WIDTH + 64 * rank, WIDTH, tile.count, packed);
        }
        wait_for_sums(sums);
        bar_wait(smem + ROWS_FULL, norm);
#pragma unroll
        for (int half = 0; half < 2; half++) rstd[half] = rsqrtf(sums[half] * (1.0f / WIDTH) + shape.eps);
    }

    // What the backward needs of a norm.
    DEVICE void save_norm(const float (&x)[32], const float (&gamma)[16], int norm, int layer) {
        if (!SAVE) return;
        u32 packed[16];
        const u64 row = row_of(norm * shape.layers + layer);
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                packed[2 * j + half] = pack(x[4 * j + 2 * half] * rstd[half] * gamma[2 * j],
                                            x[4 * j + 2 * half + 1] * rstd[half] * gamma[2 * j + 1]);
        store_panel(a.n + row * WIDTH + 64 * rank, WIDTH, tile.count, packed);
        if (rank == 0 && first_column() == 0)
            for (int half = 0; half < 2; half++)
                if (first_row() + 8 * half < tile.count) a.rstd[row + first_row() + 8 * half] = rstd[half];
    }

    // 64 columns of n W^T, of the weights' next panels.
    DEVICE void project(float (&d)[32]) {
        clear(d);
        multiply<0>(d, SCALED, WIDTH_PANELS);
#pragma unroll
        for (int i = 0; i < 32; i++) d[i] *= rstd[i / 2 % 2];
    }

    DEVICE void write_keys(int layer) {
        u32 packed[16];
        float d[32];
        for (int part = 1; part < 3; part++) {
            project(d);
            pack_all(packed, d);
            store_panel(a.qkv + (row_of(layer) * 3 + part) * WIDTH + 64 * rank, 3 * WIDTH, tile.count, packed);
        }
        report(KEYS_WRITTEN);
    }

    // softmax(q k^T scale) v of this CTA's head, packed.
    DEVICE void attend(u32 (&out)[16], const u32 (&q)[16], int layer) {
        float s[32], o[32];
        const u64 keys = describe(smem + KEYS * PANEL, PANEL), values = describe(smem + VALUES * PANEL, PANEL);
        bar_wait(smem + KEYS_FULL, layer & 1);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) wgmma_from_registers(s, q + 4 * i, keys + 2 * i, i > 0);
        wgmma_commit();
        wgmma_wait<0>();
        pin(s);
        float most[2] = {-3.4e38f, -3.4e38f}, sum[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < 32; i++) {
            if (i / 4 * 8 + first_column() + i % 2 >= shape.context) s[i] = -3.4e38f;
            most[i / 2 % 2] = fmaxf(most[i / 2 % 2], s[i]);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            most[half] = fmaxf(most[half], __shfl_xor_sync(~0u, most[half], 1));
            most[half] = fmaxf(most[half], __shfl_xor_sync(~0u, most[half], 2));
        }
        u32 weights[16];
#pragma unroll
        for (int i = 0; i < 32; i++) {
            s[i] = exp2_((s[i] - most[i / 2 % 2]) * (shape.scale * LOG2_E));
            sum[i / 2 % 2] += s[i];
        }
        pack_all(weights, s);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) wgmma_from_registers<32, 1>(o, weights + 4 * i, values + 128 * i, i > 0);
        wgmma_commit();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = first_row() + 8 * half;
            sum[half] = sum_of_row(sum[half]);
            if (SAVE && first_column() == 0 && row < tile.count)
                a.lse[head_of(layer) * shape.rows + tile.first + row] = most[half] * shape.scale + logf(sum[half]);
            sum[half] = 1.0f / sum[half];
        }
        wgmma_wait<0>();
        pin(o);
#pragma unroll
        for (int i = 0; i < 32; i++) o[i] *= sum[i / 2 % 2];
        pack_all(out, o);
    }

    // x += attention of the rows' norm, through the output projection.
    DEVICE void attention(float (&x)[32], float (&gamma)[16], int layer) {
        if (tile.context) write_keys(layer);
        u32 q[16], out[16];
        float d[32];
        project(d);
        pack_all(q, d);
        attend(out, q, layer);
        store_panel(a.attended + row_of(layer) * WIDTH + 64 * rank, WIDTH, tile.count, out);
        report(HEADS_WRITTEN);
        if (SAVE) store_panel(a.qkv + row_of(layer) * 3 * WIDTH + 64 * rank, 3 * WIDTH, tile.count, q);
        save_norm(x, gamma, 0, layer);
        load_gamma(gamma, gamma_of(1, layer));
        bar_wait(smem + HEADS_FULL, layer & 1);
        multiply<0>(x, HEADS, WIDTH_PANELS);
    }

    // x += the MLP of the rows' norm.
    DEVICE void mlp(float (&x)[32], float (&gamma)[16], int layer) {
        u32 packed[16], before[16];
        float d[32];
        save_norm(x, gamma, 1, layer);
        if (layer + 1 < shape.layers) load_gamma(gamma, gamma_of(0, layer + 1));
        for (int panel = rank; panel < HIDDEN_PANELS; panel += 8) {
            const u64 at = row_of(layer) * HIDDEN_PITCH + 64 * panel;
            project(d);
            pack_all(before, d);
#pragma unroll
            for (int i = 0; i < 32; i++) d[i] = __fdividef(d[i], 1.0f + exp2_(d[i] * -LOG2_E));
            pack_all(packed, d);
            store_panel(a.hidden + at, HIDDEN_PITCH, tile.count, packed);
            report(HIDDEN_WRITTEN + panel / 8 * 8);
            if (SAVE) store_panel(a.pre + at, HIDDEN_PITCH, tile.count, before);
        }
        if (GROUPS > 1) say_done(SCALED_DONE);
        multiply<0, true>(x, 0, HIDDEN_PANELS, layer & 1);
        if (layer + 1 < shape.layers) {
            say_done(HIDDEN_DONE);
            if (threadIdx.x == 0) bar_arrive(smem + KEYS_FREE);
        }
    }

    // This CTA's columns of the weights of a norm, which are loaded as soon as those before are used.
    DEVICE const Gamma* gamma_of(int norm, int layer) const {
        return (norm ? a.mlp_gamma : a.attention_gamma) + layer * a.gamma_pitch + 64 * rank;
    }

    DEVICE void run() {
        float x[32], gamma[16];
        u32 packed[16];
        load_panel(packed, a.x + row_of(0) * WIDTH + 64 * rank, WIDTH, tile.count);
        unpack_all(x, packed);
        load_gamma(gamma, gamma_of(0, 0));
        for (int layer = 0; layer < shape.layers; layer++) {
            exchange_rows(x, gamma, 0, layer);
            attention(x, gamma, layer);
            exchange_rows(x, gamma, 1, layer);
            mlp(x, gamma, layer);
        }
        pack_all(packed, x);
        store_panel(a.h + row_of(SAVE ? 2 * shape.layers : 0) * WIDTH + 64 * rank, WIDTH, tile.count, packed);
    }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
transformer_np_layers_forward(const __grid_constant__ TensorMap qkv, const __grid_constant__ TensorMap out,
                              const __grid_constant__ TensorMap up, const __grid_constant__ TensorMap down,
                              const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap scaled,
                              const __grid_constant__ TensorMap attended, const __grid_constant__ TensorMap hidden,
                              const __grid_constant__ Problem problem) {
    extern __shared__ __align__(1024) char shared[];
    const u32 smem = (u32)__cvta_generic_to_shared(shared);
    begin(smem);
    const Maps maps{&qkv, &out, &up, &down, &keys, &scaled, &attended, &hidden};
    const Tile tile = find_tile(problem.shape);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp < CONSUMERS / 32) {
        Forward{{{problem.shape, tile, smem, cluster_rank()}}, problem}.run();
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
