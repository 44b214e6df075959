// FP8 attention forward for Hopper (sm_90a): e4m3 operands with scales, fp32 accumulation, bf16 or fp16 output. fp8.py
// compiles and launches it, quantise.py quantises its operands. The structure is that of forward.cu.
//
// Estimate for one block of 128 keys and one warp group of 64 query rows, in cycles of an SM's tensor cores (8192 FLOP
// a cycle in e4m3), of its exponential units (16 exp2 a cycle) and of each of its four schedulers (one instruction a
// cycle):
//   D = 128   tensor 528   exp2 512   issue about 375
//   D =  64   tensor 272   exp2 512   issue about 365
// Exponentials are the bottleneck at D = 64, and take as long as the GEMMs at D = 128. POLYNOMIAL computes some of them
// on the FMA units, which are idle for part of the time: 8 more instructions save 8 cycles of the exponential unit.
//
// Operands. q and k are row-major, with a scale for each 64 queries and for each BLOCK_N keys. Both are multiplied into
// the softmax scale, at no cost. For e4m3, wgmma supports only K-major operands in shared memory, so values are stored
// transposed, [D, keys]. A thread's accumulator fragment of the scores has columns 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t of
// each 16 (t: its lane within a quad). As the A operand of P V the same registers are columns 4 t ... 4 t + 3. To need
// no shuffle, the keys of the values are permuted: column 4 t + 2 h + e holds key 8 h + 2 t + e of each 16. Scores, and
// so masks, have keys in their original order.
//
// Probabilities are 2^(score - row maximum + offset). The maximum is not updated while no score exceeds it by more than
// `slack` (see update), and offset + slack is just under log2 448, where 448 is e4m3's largest value. The smallest
// normal probability is then 2^-(6 + offset) times that of the maximum.
//
// Tensor cores accumulate e4m3 products with about 14 bits (DeepSeek-AI 2024, DeepSeek-V3, section 3.3.2), too few for
// many keys. So the wgmma accumulator covers at most SECTION blocks of values, which share one scale. It is then
// multiplied by that scale and added to an fp32 total in shared memory.
//
// In shared memory 8 rows of ones follow the values of a block. P V then has 8 more columns, which contain the row sums
// of the rounded probabilities, accumulated with the same error as the other columns. Where values have a nonzero mean,
// both errors cancel in the quotient. lse comes from the probabilities before rounding (EXACT_LSE), or from that
// column.
//
// A CTA is one producer warp and CONSUMERS warp groups with 64 query rows each, which run the same code. The producer
// loads key and value blocks into circular buffers of STAGES pipeline stages. A consumer issues S = Q K^T of key block
// j together with O += P V of block j - 1, and overlaps the softmax of block j with the latter (Shah et al. 2024,
// FlashAttention-3, sections 3.1 to 3.3). S, P and O stay in registers.
//
// The main loop goes from the last key block to the first. Only the last blocks need masks: those that the diagonal
// crosses, and the partial block at the end of the keys. A consumer skips blocks in which its 64 rows see no key.
//
// mbarriers, with their arrivals per phase. The n-th wait on a full barrier has parity n & 1, on an empty one the
// opposite, so that the first wait for each empty stage returns at once. One lane of each warp arrives on the empty
// barriers, because wgmma.wait_group covers only the wgmmas of the calling warp.
//   q_full[c] 1, q_empty[c] 4                  the 64 query rows of consumer c, once a tile
//   k_full[s] 1, k_empty[s] 4 * CONSUMERS      a block of keys; v_full, v_empty: of values
//   tile_full 1, tile_empty 4 * CONSUMERS      the index of the next tile
// With PING_PONG, consumer c waits on named barrier 1 + c before it issues its wgmmas.
//
// Defined by the launcher: HEAD_DIM (64, 128), BLOCK_N, STAGES, CONSUMERS (2, 3), CAUSAL, FP16 (the type of out),
// PING_PONG (1: the next consumer may issue once this one has issued; 2: once the scores of this one are complete),
// Q_REGISTERS (queries in registers), SECTION (blocks of keys), POLYNOMIAL (one exponential in so many; 0: none),
// EXACT_LSE.

#include "mbarrier.cuh"
#include "numbers.cuh"
#include "scheduler.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

constexpr int ROWS = 64;                       // queries per consumer: M of a wgmma is 64
constexpr int BLOCK_M = ROWS * CONSUMERS;
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int Q_BYTES = ROWS * HEAD_DIM;       // of one consumer
constexpr int KV_BYTES = BLOCK_N * HEAD_DIM;
constexpr int V_ROWS = HEAD_DIM + 8;           // a block of values is transposed, with 8 rows of ones
constexpr int V_BYTES = BLOCK_N * V_ROWS;
constexpr int PANEL = BLOCK_N % 128 == 0 ? 128 : BLOCK_N % 64 == 0 ? 64 : 32;  // keys of a swizzled row of values
constexpr int TOTAL_BYTES = ROWS * HEAD_DIM * 4;
constexpr int S_REGS = BLOCK_N / 2, O_REGS = HEAD_DIM / 2, SUM = O_REGS, P_REGS = BLOCK_N / 8;
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 24 : 32;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 240 : 160;
#define NEGATIVE_INFINITY __int_as_float(0xff800000)

constexpr int K_OFFSET = CONSUMERS * Q_BYTES;
constexpr int V_OFFSET = K_OFFSET + STAGES * KV_BYTES;
constexpr int TOTAL_OFFSET = V_OFFSET + STAGES * V_BYTES;
constexpr int BARRIER_OFFSET = TOTAL_OFFSET + CONSUMERS * TOTAL_BYTES;
enum Barrier {
    Q_FULL = 0, Q_EMPTY = Q_FULL + CONSUMERS, K_FULL = Q_EMPTY + CONSUMERS, K_EMPTY = K_FULL + STAGES,
    V_FULL = K_EMPTY + STAGES, V_EMPTY = V_FULL + STAGES, TILE_FULL = V_EMPTY + STAGES, TILE_EMPTY, BARRIERS
};
constexpr int TILE_OFFSET = BARRIER_OFFSET + 8 * BARRIERS;  // the index of the next tile

struct Problem {
    float* lse;
    u16* out;
    const float *q_scale, *k_scale, *v_scale;  // [batches * heads, blocks of 64 rows / BLOCK_N keys / sections]
    u64 out_batch, out_head, out_row;          // strides in elements
    int* next_tile;                            // tile scheduler's counter, initially 0; null: each CTA has one tile
    float scale_log2, slack, offset;           // slack and offset are logarithms to base 2
    int num_tiles, num_m, section, heads, q_heads, group, num_q, num_keys, q_blocks, k_blocks, v_blocks, dim;
};

// ---- PTX ----------------------------------------------------------------------------------------------------------

#define ROW4(b) "+f"(d[b]), "+f"(d[b + 1]), "+f"(d[b + 2]), "+f"(d[b + 3])
#define ROW8(b) ROW4(b), ROW4(b + 4)
#define ROW32(b) ROW8(b), ROW8(b + 8), ROW8(b + 16), ROW8(b + 24)
#define L32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27," \
            "%28,%29,%30,%31"
#define L36 L32 ",%32,%33,%34,%35"
#define L48 L32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define L64 L48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define L68 L64 ",%64,%65,%66,%67"
#define L80 L64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define L96 L80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"

// d (64 x N, fp32) = a b, or d + a b if `add`, with K = 32. _ss: a from shared memory; _rs: a from registers. I0 ...
// I5: indices of the asm operands that follow d.
#define DEFINE_WGMMA(N, LIST, I0, I1, I2, I3, I4, I5, ...)                                                           \
    DEVICE void wgmma_ss(float (&d)[N / 2], u64 a, u64 b, int add) {                             \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #I2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N              \
                     "k32.f32.e4m3.e4m3 {" LIST "}, %" #I0 ", %" #I1 ", p, 1, 1; }"                                  \
                     : __VA_ARGS__ : "l"(a), "l"(b), "r"(add));                                                      \
    }                                                                                                                \
    DEVICE void wgmma_rs(float (&d)[N / 2], const u32* a, u64 b, int add) {                      \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #I5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N              \
                     "k32.f32.e4m3.e4m3 {" LIST "}, {%" #I0 ",%" #I1 ",%" #I2 ",%" #I3 "}, %" #I4 ", p, 1, 1; }"     \
                     : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                  \
    }
DEFINE_WGMMA(64, L32, 32, 33, 34, 35, 36, 37, ROW32(0))
DEFINE_WGMMA(72, L36, 36, 37, 38, 39, 40, 41, ROW32(0), ROW4(32))
DEFINE_WGMMA(96, L48, 48, 49, 50, 51, 52, 53, ROW32(0), ROW8(32), ROW8(40))
DEFINE_WGMMA(128, L64, 64, 65, 66, 67, 68, 69, ROW32(0), ROW32(32))
DEFINE_WGMMA(136, L68, 68, 69, 70, 71, 72, 73, ROW32(0), ROW32(32), ROW4(64))
DEFINE_WGMMA(160, L80, 80, 81, 82, 83, 84, 85, ROW32(0), ROW32(32), ROW8(64), ROW8(72))
DEFINE_WGMMA(192, L96, 96, 97, 98, 99, 100, 101, ROW32(0), ROW32(32), ROW32(64))

DEVICE void ping_pong_wait(int consumer) {
    asm volatile("bar.sync %0, 256;" ::"r"(1 + consumer) : "memory");
}
DEVICE void ping_pong_arrive(int consumer) {
    asm volatile("bar.arrive %0, 256;" ::"r"(consumer + 1 == CONSUMERS ? 1 : consumer + 2) : "memory");
}
// 2^x on the FMA units: x = n + f with n the nearest integer. Adding 1.5 * 2^23 leaves n in the low bits of the result.
// 2^f on [-1/2, 1/2] is a cubic, minimax in relative error (7.5e-5), and n is added to its exponent. Below -126 that
// would wrap, hence the maximum, which propagates NaN. It is one volatile asm: from C++, the compiler interleaves so
// many of these that ptxas runs out of registers and serialises all wgmma (its remark C7511).
DEVICE float exp2_polynomial(float x) {
    float y;
    asm volatile("{ .reg .f32 c, t, f, r; .reg .b32 n, i;"
                 " max.NaN.f32 c, %1, 0fC2FC0000; add.f32 t, c, 0f4B400000; sub.f32 f, t, 0f4B400000; sub.f32 f, c, f;"
                 " fma.rn.f32 r, f, 0f3D61FBB0, 0f3E786F0D; fma.rn.f32 r, r, f, 0f3F31798E;"
                 " fma.rn.f32 r, r, f, 0f3F7FFB49;"
                 " mov.b32 n, t; mov.b32 i, r; shl.b32 n, n, 23; add.s32 i, i, n; mov.b32 %0, i; }" : "=f"(y) : "f"(x));
    return y;
}
// Converts four values to e4m3, the first in the lowest byte; 448 if larger, NaN if NaN.
DEVICE u32 pack_e4m3(float x0, float x1, float x2, float x3) {
    u32 y;
    asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;"
        " mov.b32 %0, {low, high}; }" : "=r"(y) : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
    return y;
}
DEVICE float load_scale(const float* x) {
    float y;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(y) : "l"(x));
    return y;
}
DEVICE float4 load_total(u32 address) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(address) : "memory");
    return x;
}
DEVICE void store_total(u32 address, float4 x) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}
// Four matrices of 8 rows of 16 bytes; lane l has the address of row l % 8 of matrix l / 8.
DEVICE void load_matrices(u32* x, u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
}
DEVICE void fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
template <int COUNT> DEVICE void dec_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> DEVICE void inc_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- Tiles --------------------------------------------------------------------------------------------------------

// Head (over all batches) and row block of a tile. CAUSAL: heads are scheduled in sections of `section` heads, as many
// as have keys and values that fit in L2 together. Within a section the row blocks with the most keys come first. Not
// CAUSAL: head by head, and after all heads the partial row blocks: they take less time, and fill SMs that are idle in
// the last wave.
DEVICE void find_tile(const Problem& a, int index, int& head, int& block) {
    if (CAUSAL) {
        int first = index / (a.section * a.num_m) * a.section;
        int inside = index - first * a.num_m;
        int width = min(a.section, a.heads - first);
        int step = inside / width;
        head = first + inside - step * width;
        block = a.num_m - 1 - step;
    } else {
        int full = a.num_q / BLOCK_M;
        bool partial = index >= full * a.heads;
        head = partial ? index - full * a.heads : index / full;
        block = partial ? full : index - head * full;
    }
}

// Rows first_row ... first_row + rows - 1 see key blocks 0 ... end - 1, and blocks 0 ... full - 1 need no mask. `end`
// is at least 1, also where no row sees a key: the masked block gives such rows out 0 and lse -inf without a branch.
DEVICE void find_blocks(const Problem& a, int first_row, int rows, int& end, int& full) {
    int shift = a.num_keys - a.num_q + first_row;
    int last = CAUSAL ? min(a.num_keys, shift + rows) : a.num_keys;
    int first = CAUSAL ? min(a.num_keys, max(shift + 1, 0)) : a.num_keys;
    end = max((last + BLOCK_N - 1) / BLOCK_N, 1);
    full = first / BLOCK_N;
}

struct Ring {  // stage and phase of the circular buffers of keys and of values
    int slot = 0;
    u32 phase = 0;
    DEVICE void next() {
        if (++slot == STAGES) { slot = 0; phase ^= 1; }
    }
};

// ---- Producer -----------------------------------------------------------------------------------------------------

DEVICE void produce(const Problem& a, const TensorMap* q_map, const TensorMap* k_map,
                                        const TensorMap* v_map, u32 smem) {
    const u32 bars = smem + BARRIER_OFFSET;
    Ring ring;
    u32 tile_phase = 0;
    for (int tile = blockIdx.x; tile < a.num_tiles; tile_phase ^= 1) {
        int following = a.num_tiles, head, block, end, full;
        if (a.next_tile) following = draw(a.next_tile) + (int)gridDim.x;
        find_tile(a, tile, head, block);
        find_blocks(a, block * BLOCK_M, BLOCK_M, end, full);
        int batch = head / a.q_heads;
        head -= batch * a.q_heads;
#pragma unroll 1
        for (int c = 0; c < CONSUMERS; c++) {
            bar_wait(bars + 8 * (Q_EMPTY + c), tile_phase ^ 1);
            bar_expect(bars + 8 * (Q_FULL + c), Q_BYTES);
            tma_load(smem + c * Q_BYTES, q_map, 0, block * BLOCK_M + c * ROWS, head, batch, bars + 8 * (Q_FULL + c));
        }
        head /= a.group;
#pragma unroll 1
        for (int j = end - 1; j >= 0; j--, ring.next()) {
            bar_wait(bars + 8 * (K_EMPTY + ring.slot), ring.phase ^ 1);
            bar_expect(bars + 8 * (K_FULL + ring.slot), KV_BYTES);
            tma_load(smem + K_OFFSET + ring.slot * KV_BYTES, k_map, 0, j * BLOCK_N, head, batch,
                     bars + 8 * (K_FULL + ring.slot));
            bar_wait(bars + 8 * (V_EMPTY + ring.slot), ring.phase ^ 1);
            bar_expect(bars + 8 * (V_FULL + ring.slot), KV_BYTES);
            for (int p = 0; p < BLOCK_N; p += PANEL)
                tma_load(smem + V_OFFSET + ring.slot * V_BYTES + p * V_ROWS, v_map, j * BLOCK_N + p, 0, head, batch,
                         bars + 8 * (V_FULL + ring.slot));
        }
        bar_wait(bars + 8 * TILE_EMPTY, tile_phase ^ 1);
        store_shared(smem + TILE_OFFSET, following);
        bar_arrive(bars + 8 * TILE_FULL);
        tile = following;
    }
}

// ---- Consumers ----------------------------------------------------------------------------------------------------

// wgmma's matrix descriptor of a K-major operand in shared memory with rows of `width` bytes (128, 64 or 32), swizzled.
DEVICE u64 make_descriptor(u32 address, int width) {
    u64 swizzle = width == 128 ? 1 : width == 64 ? 2 : 3;
    return swizzle << 62 | (u64)(8 * width >> 4) << 32 | 1u << 16 | address >> 4;
}

// Issues S = Q K^T.
DEVICE void start_scores(float (&s)[S_REGS], const u32* q, u64 q_desc, u64 k_desc) {
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 32; k++) {
        if (Q_REGISTERS) wgmma_rs(s, q + 4 * k, k_desc + k * 32 / 16, k > 0);
        else wgmma_ss(s, q_desc + k * 32 / 16, k_desc + k * 32 / 16, k > 0);
    }
    wgmma_commit();
}

// Issues O = P V, or O += P V if `add`.
DEVICE void start_values(float (&o)[O_REGS + 4], const u32 (&p)[P_REGS], u64 v_desc, int add) {
#pragma unroll
    for (int k = 0; k < BLOCK_N / 32; k++)
        wgmma_rs(o, p + 4 * k, v_desc + (k * 32 / PANEL * PANEL * V_ROWS + k * 32 % PANEL) / 16, k ? 1 : add);
    wgmma_commit();
}

struct Rows {  // state of the two rows of which a thread has elements, 8 apart; scores are logarithms to base 2
    float max[2];      // row maximum; not updated while no score exceeds it by more than slack
    float shift[2];    // max - offset; 0 where no key has been seen (-inf - -inf would be NaN)
    float sum[2];      // of the probabilities of this thread's columns, before rounding
    float total[2];    // row sum of the rounded probabilities in the sections before this one
    float alpha[2];    // rescaling factor of the accumulator, where update() returned true
    float pending[2];  // rescaling factor, not yet applied, of the totals here and in shared memory
};

DEVICE int max3(int a, int b, int c) { return max(max(a, b), c); }
DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Updates the maxima of the warp's 16 rows if a score exceeds one of them by more than slack. Returns whether the
// accumulator must be rescaled; warp-uniform. The test compares the bits of scores as integers, three at a time:
// nonnegative floats are ordered as their bits are. With 0 among them, negative scores count as 0, which only makes the
// test stricter. NaN fails the test.
DEVICE bool update(const float (&s)[S_REGS], Rows& rows, float factor, const Problem& a) {
    int top[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < S_REGS; i += 8) {
        top[0] = max3(top[0], __float_as_int(s[i]), __float_as_int(s[i + 1]));
        top[1] = max3(top[1], __float_as_int(s[i + 2]), __float_as_int(s[i + 3]));
        top[2] = max3(top[2], __float_as_int(s[i + 4]), __float_as_int(s[i + 5]));
        top[3] = max3(top[3], __float_as_int(s[i + 6]), __float_as_int(s[i + 7]));
    }
    bool fits0 = __int_as_float(max(top[0], top[2])) * factor <= rows.max[0] + a.slack;
    bool fits1 = __int_as_float(max(top[1], top[3])) * factor <= rows.max[1] + a.slack;
    if (__all_sync(~0u, fits0 & fits1)) return false;  // & and not &&, for which the compiler emits a branch
    bool risen = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float most = NEGATIVE_INFINITY;
#pragma unroll
        for (int i = 2 * r; i < S_REGS; i += 4) most = fmaxf(most, fmaxf(s[i], s[i + 1]));
        most = fmaxf(rows.max[r], quad_max(most) * factor);
        risen |= most > rows.max[r];
        rows.shift[r] = most == NEGATIVE_INFINITY ? 0.0f : most - a.offset;
        rows.alpha[r] = exp2_(rows.max[r] - a.offset - rows.shift[r]);
        rows.max[r] = most;
        rows.sum[r] *= rows.alpha[r];
        rows.pending[r] *= rows.alpha[r];
    }
    return __any_sync(~0u, risen);
}

// Replaces scores by probabilities. EXACT_LSE adds them to the row sums before they are rounded.
DEVICE void exponentials(float (&s)[S_REGS], Rows& rows, float factor) {
    float odd[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < S_REGS; i += 4) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float x = exp2_(s[i + 2 * r] * factor - rows.shift[r]);
            float y = s[i + 2 * r + 1] * factor - rows.shift[r];
            y = POLYNOMIAL && (i / 2 + r) % (POLYNOMIAL / 2 + !POLYNOMIAL) == 0 ? exp2_polynomial(y) : exp2_(y);
            s[i + 2 * r] = x;
            s[i + 2 * r + 1] = y;
            if (EXACT_LSE) rows.sum[r] += x;
            if (EXACT_LSE) odd[r] += y;
        }
    }
    rows.sum[0] += odd[0];
    rows.sum[1] += odd[1];
}

// Packs probabilities into registers of wgmma's A operand, four for 32 keys, in the key order of the values.
DEVICE void pack_probabilities(const float (&s)[S_REGS], u32 (&p)[P_REGS]) {
#pragma unroll
    for (int i = 0; i < S_REGS; i += 8) {  // this thread's columns 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t of 16, of both rows
        p[i / 4] = pack_e4m3(s[i], s[i + 1], s[i + 4], s[i + 5]);
        p[i / 4 + 1] = pack_e4m3(s[i + 2], s[i + 3], s[i + 6], s[i + 7]);
    }
}

// Adds the accumulator of a section to the totals of this thread's elements in shared memory. `written`: earlier
// sections have written totals.
DEVICE void flush(const float (&o)[O_REGS + 4], Rows& rows, float v_scale, u32 total,
                                      bool written) {
#pragma unroll
    for (int i = 0; i < O_REGS; i += 4) {
        float4 x = written ? load_total(total + i * 512) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        x.x = o[i] * v_scale + x.x * rows.pending[0];
        x.y = o[i + 1] * v_scale + x.y * rows.pending[0];
        x.z = o[i + 2] * v_scale + x.z * rows.pending[1];
        x.w = o[i + 3] * v_scale + x.w * rows.pending[1];
        store_total(total + i * 512, x);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        rows.total[r] = o[SUM + 2 * r] + rows.total[r] * rows.pending[r];
        rows.pending[r] = 1.0f;
    }
}

// Scores in columns >= `limit`, counted from this thread's first column, become -inf.
DEVICE void mask(float (&s)[S_REGS], int limit0, int limit1) {
#pragma unroll
    for (int i = 0; i < S_REGS; i++) {
        int column = i / 4 * 8 + i % 2;
        if (column >= (i & 2 ? limit1 : limit0)) s[i] = NEGATIVE_INFINITY;
    }
}

// Loads the queries of a tile into registers, as wgmma's A operand. TMA's 128-byte swizzle XORs the index of a row's
// 16-byte chunk with row % 8, or with row / 2 % 4 where rows have 64 bytes.
DEVICE void load_queries(u32* q, u32 address, int warp, int lane) {
    int row = warp * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 32; k++) {
        int chunk = (k * 2 + lane / 16) ^ (HEAD_DIM == 128 ? row % 8 : row / 2 % 4);
        load_matrices(q + 4 * k, address + row * HEAD_DIM + chunk * 16);
    }
}

// Transposes within a quad: lane t has columns 8 i + 2 t and 8 i + 2 t + 1 in wi, and returns columns 8 t ... 8 t + 7.
DEVICE uint4 transpose(u32 w0, u32 w1, u32 w2, u32 w3, int t) {
    bool odd = t & 1, upper = t & 2;
    u32 x = __shfl_xor_sync(~0u, odd ? w0 : w1, 1), y = __shfl_xor_sync(~0u, odd ? w2 : w3, 1);
    if (odd) { w0 = x; w2 = y; } else { w1 = x; w3 = y; }
    x = __shfl_xor_sync(~0u, upper ? w0 : w2, 2), y = __shfl_xor_sync(~0u, upper ? w1 : w3, 2);
    if (upper) { w0 = x; w1 = y; } else { w2 = x; w3 = y; }
    return make_uint4(w0, w1, w2, w3);
}

// Writes rows first_row ... first_row + 15 of out and lse, from the totals and the last section's accumulator.
DEVICE void epilogue(float (&o)[O_REGS + 4], const Rows& rows, float v_scale, u32 total, bool written,
                                         const Problem& a, int all_head, int first_row, int lane) {
    int batch = all_head / a.q_heads;
    u16* out = a.out + batch * a.out_batch + (all_head - batch * a.q_heads) * a.out_head;
#pragma unroll
    for (int i = 0; i < O_REGS; i++) o[i] *= v_scale;
    if (written) {
#pragma unroll
        for (int i = 0; i < O_REGS; i += 4) {
            float4 x = load_total(total + i * 512);
            o[i] += x.x * rows.pending[0];
            o[i + 1] += x.y * rows.pending[0];
            o[i + 2] += x.z * rows.pending[1];
            o[i + 3] += x.w * rows.pending[1];
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = first_row + lane / 4 + 8 * r;
        float sum = o[SUM + 2 * r] + rows.total[r] * rows.pending[r];
        float exact = EXACT_LSE ? quad_sum(rows.sum[r]) : sum;
        bool none = rows.max[r] == NEGATIVE_INFINITY && sum == sum;  // no key was seen
        float factor = none ? 0.0f : 1.0f / sum;
        float lse = none ? NEGATIVE_INFINITY : (rows.shift[r] + __log2f(exact)) * 0.6931471805599453f;
        if (lane % 4 == 0 && row < a.num_q) a.lse[(u64)all_head * a.num_q + row] = lse;
#pragma unroll
        for (int i = 2 * r; i < O_REGS; i += 16) {
            u32 w[4];
#pragma unroll
            for (int g = 0; g < 4; g++) w[g] = none ? 0 : pack(o[i + 4 * g] * factor, o[i + 4 * g + 1] * factor);
            uint4 vector = transpose(w[0], w[1], w[2], w[3], lane % 4);
            int column = i / 4 * 8 + lane % 4 * 8;
            if (row < a.num_q && column < a.dim) *(uint4*)(out + row * a.out_row + column) = vector;
        }
    }
}

DEVICE void consume(const Problem& a, int c, u32 smem) {
    const u32 bars = smem + BARRIER_OFFSET;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const bool leader = lane == 0;  // the lane that arrives on mbarriers for its warp
    const u64 q_desc = make_descriptor(smem + c * Q_BYTES, HEAD_DIM);
    const u64 k_base = make_descriptor(smem + K_OFFSET, HEAD_DIM), v_base = make_descriptor(smem + V_OFFSET, PANEL);
    const u32 total = smem + TOTAL_OFFSET + c * TOTAL_BYTES + threadIdx.x % 128 * 16;
    float s[S_REGS], o[O_REGS + 4];
    u32 p[P_REGS], q[Q_REGISTERS ? HEAD_DIM / 8 : 1];
    Ring ring;
    u32 tile_phase = 0;
#pragma unroll
    for (int i = 0; i < O_REGS + 4; i++) o[i] = 0.0f;
    if (PING_PONG && c == CONSUMERS - 1) ping_pong_arrive(c);
    for (int tile = blockIdx.x; tile < a.num_tiles; tile_phase ^= 1) {
        int head, block, end, full, all_blocks;
        find_tile(a, tile, head, block);
        find_blocks(a, block * BLOCK_M, BLOCK_M, all_blocks, full);
        const int first_row = block * BLOCK_M + c * ROWS;
        find_blocks(a, first_row, ROWS, end, full);
        end = __shfl_sync(~0u, first_row < a.num_q ? end : 0, 0);
        all_blocks = __shfl_sync(~0u, all_blocks, 0);
        bar_wait(bars + 8 * (Q_FULL + c), tile_phase);
#pragma unroll 1
        for (int j = all_blocks; j > end; j--, ring.next()) {
            if (PING_PONG && j > 1) { ping_pong_wait(c); ping_pong_arrive(c); }
            bar_wait(bars + 8 * (K_FULL + ring.slot), ring.phase);
            bar_wait(bars + 8 * (V_FULL + ring.slot), ring.phase);
            __syncwarp();  // a lane that still waits would miss this phase once the stage is released
            if (leader) bar_arrive(bars + 8 * (K_EMPTY + ring.slot));
            if (leader) bar_arrive(bars + 8 * (V_EMPTY + ring.slot));
        }
        if (end > 0) {
            const int row = first_row + warp * 16 + lane / 4;
            const int seen = CAUSAL ? row + 1 + a.num_keys - a.num_q : a.num_keys;
            int limit0 = min(seen, a.num_keys) - lane % 4 * 2;
            int limit1 = min(seen + (CAUSAL ? 8 : 0), a.num_keys) - lane % 4 * 2;
            // Otherwise the compiler hoists the last block's mask out of the loop over tiles, and spills it.
            asm volatile("" : "+r"(limit0), "+r"(limit1));
            // Scales are loaded one block, or one section, before they are used.
            const int kv_head = head / a.group;  // over all batches, as group divides the heads of a batch
            const float* k_scale = a.k_scale + kv_head * a.k_blocks;
            const float* v_scale = a.v_scale + kv_head * a.v_blocks;
            const float q_factor = a.scale_log2 * load_scale(a.q_scale + head * a.q_blocks + first_row / ROWS);
            float k_next = load_scale(k_scale + end - 1);
            float v_now = load_scale(v_scale + (end - 1) / SECTION);
            float v_next = load_scale(v_scale + max((end - 1) / SECTION - 1, 0));
            Rows rows = {{NEGATIVE_INFINITY, NEGATIVE_INFINITY}, {0.0f, 0.0f}, {0.0f, 0.0f}, {0.0f, 0.0f}, {1.0f, 1.0f},
                         {1.0f, 1.0f}};
            if (Q_REGISTERS) {  // releases the queries early: the producer may load those of the next tile
                load_queries(q, smem + c * Q_BYTES, warp, lane);
                fence_async();
                fence_reads();
                if (leader) bar_arrive(bars + 8 * (Q_EMPTY + c));
            }
            // The last key block is peeled: there is no P V to overlap with yet.
            bar_wait(bars + 8 * (K_FULL + ring.slot), ring.phase);
            wgmma_fence();
            start_scores(s, q, q_desc, k_base + ring.slot * (KV_BYTES / 16));
            float factor = q_factor * k_next;
            k_next = load_scale(k_scale + max(end - 2, 0));
            wgmma_wait<0>();
            pin(s);
            if (leader) bar_arrive(bars + 8 * (K_EMPTY + ring.slot));
            mask(s, limit0 - (end - 1) * BLOCK_N, limit1 - (end - 1) * BLOCK_N);
            update(s, rows, factor, a);
            exponentials(s, rows, factor);
            pack_probabilities(s, p);
            int add = 0;           // whether the accumulator holds a sum of this section
            bool written = false;  // whether the totals hold earlier sections
            bar_wait(bars + 8 * (V_FULL + ring.slot), ring.phase);
            ring.next();
            for (int j = end - 2; j >= 0; j--, ring.next()) {
                const int slot = __shfl_sync(~0u, ring.slot, 0);  // warp-uniform, for the compiler
                const int last = slot ? slot - 1 : STAGES - 1;
                bar_wait(bars + 8 * (K_FULL + slot), ring.phase);
                if (PING_PONG) ping_pong_wait(c);
                pin(o);
                pin(p);
                wgmma_fence();
                start_scores(s, q, q_desc, k_base + slot * (KV_BYTES / 16));
                start_values(o, p, v_base + last * (V_BYTES / 16), add);
                if (PING_PONG == 1) ping_pong_arrive(c);
                factor = q_factor * k_next;
                k_next = load_scale(k_scale + max(j - 1, 0));
                wgmma_wait<1>();
                if (PING_PONG == 2) ping_pong_arrive(c);
                pin(s);
                if (leader) bar_arrive(bars + 8 * (K_EMPTY + slot));
                if (CAUSAL && j >= full) mask(s, limit0 - j * BLOCK_N, limit1 - j * BLOCK_N);
                bool rescale = update(s, rows, factor, a);
                exponentials(s, rows, factor);
                pin(s);
                // V of this block is needed only in the next iteration. The wait is here to fence the compiler: ptxas
                // would move the wait for P V before the softmax, as no register connects the two, but moves nothing
                // across the loop of this wait. It would also move the additions to the row sums after both waits,
                // where they overlap nothing. So the parity depends on the sums (without EXACT_LSE on probabilities),
                // which are never negative.
                const float hidden = EXACT_LSE ? rows.sum[0] + rows.sum[1] : s[S_REGS - 2] + s[S_REGS - 1];
                bar_wait(bars + 8 * (V_FULL + slot), ring.phase ^ (hidden < -1.0f));
                wgmma_wait<0>();
                pin(o);
                pin(p);
                pin(s);
                if (leader) bar_arrive(bars + 8 * (V_EMPTY + last));
                if (rescale) {
#pragma unroll
                    for (int i = 0; i < O_REGS + 4; i++) o[i] *= rows.alpha[i / 2 % 2];
                }
                add = 1;
                if (j % SECTION == SECTION - 1) {  // block j is the first of another section
                    flush(o, rows, v_now, total, written);
                    add = 0;
                    written = true;
                    v_now = v_next;
                    v_next = load_scale(v_scale + max(j / SECTION - 1, 0));
                }
                pack_probabilities(s, p);
            }
            const int last = ring.slot ? ring.slot - 1 : STAGES - 1;
            if (!Q_REGISTERS && leader) bar_arrive(bars + 8 * (Q_EMPTY + c));
            pin(o);
            pin(p);
            wgmma_fence();
            start_values(o, p, v_base + last * (V_BYTES / 16), add);
            wgmma_wait<0>();
            pin(o);
            if (leader) bar_arrive(bars + 8 * (V_EMPTY + last));
            epilogue(o, rows, v_now, total, written, a, head, first_row + warp * 16, lane);
        } else if (leader) {
            bar_arrive(bars + 8 * (Q_EMPTY + c));
        }
        bar_wait(bars + 8 * TILE_FULL, tile_phase);
        tile = __shfl_sync(~0u, load_shared(smem + TILE_OFFSET), 0);
        // The producer does not wait after the last tile. The comparison makes ptxas wait for the index.
        if (leader && tile < a.num_tiles) bar_arrive(bars + 8 * TILE_EMPTY);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_fp8_fwd(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                  const __grid_constant__ TensorMap v_map, const __grid_constant__ Problem problem) {
    extern __shared__ __align__(1024) char shared[];
    const u32 smem = (u32)__cvta_generic_to_shared(shared);
    if (threadIdx.x == 0) {
        for (int i = 0; i < BARRIERS; i++) {
            bool ring = (i >= K_EMPTY && i < V_FULL) || (i >= V_EMPTY && i < TILE_FULL) || i == TILE_EMPTY;
            bar_init(smem + BARRIER_OFFSET + 8 * i, ring ? 4 * CONSUMERS : i >= Q_EMPTY && i < K_FULL ? 4 : 1);
        }
        fence_init();
    }
    // The rows of ones, which TMA never overwrites. 0x38 is 1 in e4m3.
    for (int i = threadIdx.x; i < STAGES * BLOCK_N / PANEL * PANEL * 2; i += THREADS)
        store_shared(smem + V_OFFSET + i / (PANEL * 2) * PANEL * V_ROWS + PANEL * HEAD_DIM + i % (PANEL * 2) * 4,
                     0x38383838);
    fence_async();  // wgmma reads the ones through the async proxy
    __syncthreads();
    // The shuffle makes it warp-uniform for the compiler, which then keeps descriptors in uniform registers.
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (group == 0) {
        dec_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) produce(problem, &q_map, &k_map, &v_map, smem);
    } else {
        inc_registers<CONSUMER_REGISTERS>();
        consume(problem, group - 1, smem);
    }
}
