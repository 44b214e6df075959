// The gradient of the hidden of K feed-forward layers of one input for Hopper (sm_90a), in the epilogue of the GEMM
// that computes pre:
//
//   pre = x · w1[g]ᵀ
//   dpre[r, g, h] = act'(pre) · Σ_o dy[r, g, o] · w2[g, o, h]              16 bits, [rows, heads, pitch]
//   dw2[part, g, o, h] (+)= Σ_r dy[r, g, o] · act(pre)                     fp32, or 16 bits where there is one part
//
// Back-of-the-envelope estimate for 128 rows and 128 columns of the hidden, D = 512, SiLU, in cycles of an SM:
//   tensor cores   2 · 128 · 128 · 512 FLOP at 4096 a cycle                4096, and some 250 for dh and dw2
//   activation     2 special functions for each of 16384, 16 a cycle       2048, and 1500 to issue
//   shared memory  128 KiB of x written once and read by two warpgroups    3072
//                  dpre written once and read once, dy read by each warp    768
//   L2             128 KiB of x, by two CTAs                               16 bytes a cycle
//   HBM            32 KiB of dpre                                          8 bytes a cycle: 1.7 TB/s by all SMs
//
// The main loop is the forward's (heads_loop.cuh) with its operands exchanged: 128 rows of w1, columns of the hidden,
// stay in registers, and x streams. The accumulators of a warpgroup are then preᵀ of 64 columns of the hidden and 128
// rows of x, and
//   - act(pre) has the layout of the first operand of mma.sync in act(preᵀ) · dy, whose 8 columns are those of y: dw2
//     stays in 4 registers for all rows, accumulated in the order of rows, without shuffles;
//   - w2ᵀ · dyᵀ, an mma with K = 8, has the layout of the accumulators; its first operand is 2 registers for all rows;
//   - dpre is transposed by stmatrix as it is written to shared memory, and stored by TMA in rows of 128 bytes.
// With x in registers dw2 would be a sum across lanes: 192 multiplications and 84 shuffles a thread for each tile.
//
// A unit of work is CLUSTER consecutive blocks of 128 columns of the hidden and a part of the rows, `tiles` tiles of 128,
// which is a split-K partition of dw2. CTAs are persistent and process every gridDim-th unit; units of the same rows
// follow each other, so that x comes from L2. Where blocks do not fill the last cluster, its last CTA has a head that is
// out of bounds: TMA reads zeros, and stores nothing.
//
// Warp 0 of the producer warpgroup fills the circular buffer. Warps 1 and 2 copy dy, of any strides, into a second one,
// of 128 rows of 8 columns a stage. Barriers, in addition to those of heads_loop.cuh: dy_full[s] 64 arrivals,
// dy_empty[s] 8; named barriers 1 and 2 order the warpgroups' main loops; 3 and 4 synchronise a warpgroup before it
// writes its tile of dpre, which TMA has read, 5 and 6 after.
#include "heads_loop.cuh"

constexpr int DY_SLOTS = 4, DY_BYTES = BLOCK_M * BLOCK_O * 2, DY_WARPS = 2, DY = BEHIND_RING;
constexpr int DY_FULL = DY + DY_SLOTS * DY_BYTES, DY_EMPTY = DY_FULL + 8 * DY_SLOTS;
// One tile of dpre per warpgroup: 128 rows of 64 columns, in TMA's 128-byte swizzle.
constexpr int DPRE = (DY_EMPTY + 8 * DY_SLOTS + 1023) / 1024 * 1024, DPRE_BYTES = BLOCK_M * ROWS * 2;

struct Hidden {
    const u16* dy;
    u64 stride_dym, stride_dyg, stride_dyo;  // in elements
    const u16* w2;
    u64 stride_g, stride_o, stride_h;        // of w2, in elements
    void* dw2;                               // [parts, heads, dim_out, hidden], or null
    int rows, heads, hidden, dim_out;
    int tiles;                               // of 128 rows in a part
    int write;                               // whether dpre is
    int added;                               // parts of dw2 that the chunks before have written, to add to
    int rounded;                             // whether dw2 is of 16 bits: of one part, to which nothing is added
};

// ---- Units of work ------------------------------------------------------------------------------------------------

struct Unit {
    int head, column, first, last;  // this CTA's head and first column of the hidden; the part's tiles of rows
};

DEVICE int blocks_of(const Hidden& p) { return (p.hidden + BLOCK_H - 1) / BLOCK_H; }
DEVICE int tiles_of(const Hidden& p) { return (int)(((u32)p.rows + BLOCK_M - 1) / BLOCK_M); }
DEVICE int places_of(const Hidden& p) { return (p.heads * blocks_of(p) + CLUSTER - 1) / CLUSTER; }
DEVICE int units_of(const Hidden& p) { return places_of(p) * ((tiles_of(p) + p.tiles - 1) / p.tiles); }

DEVICE Unit find_unit(const Hidden& p, int index) {
    const int places = places_of(p), blocks = blocks_of(p), first = index / places * p.tiles;
    const int block = index % places * CLUSTER + cluster_rank();
    return {block / blocks, block % blocks * BLOCK_H, first, min(first + p.tiles, tiles_of(p))};
}

// ---- Producers ----------------------------------------------------------------------------------------------------

// By one thread: loads w1 and x.
DEVICE void produce(const Hidden& p, const TensorMap* w1_map, const TensorMap* x_map, u32 smem) {
    const int units = units_of(p);
    Ring<STAGES> ring;
    for (int index = blockIdx.x / CLUSTER; index < units; index += gridDim.x / CLUSTER) {
        const Unit unit = find_unit(p, index);
        load_rows<false>(ring, w1_map, unit.column, unit.head, smem);
        for (int tile = unit.first; tile < unit.last; tile++) load_rows<true>(ring, x_map, tile * BLOCK_M, 0, smem);
    }
}

// By two warps: copies dy, with zeros past O and the last row.
DEVICE void produce_dy(const Hidden& p, u32 smem) {
    const int units = units_of(p), thread = threadIdx.x - 32;
    Ring<DY_SLOTS> ring;
    for (int index = blockIdx.x / CLUSTER; index < units; index += gridDim.x / CLUSTER) {
        const Unit unit = find_unit(p, index);
        for (int tile = unit.first; tile < unit.last; tile++, ring.next()) {
            bar_wait(smem + DY_EMPTY + 8 * ring.slot, ring.phase ^ 1);
#pragma unroll 1
            for (int at = thread; at < BLOCK_M; at += 32 * DY_WARPS) {
                const int row = tile * BLOCK_M + at, columns = row < p.rows && unit.head < p.heads ? p.dim_out : 0;
                const u16* from = p.dy + row * p.stride_dym + unit.head * p.stride_dyg;
                u32 words[BLOCK_O / 2];
#pragma unroll
                for (int i = 0; i < BLOCK_O / 2; i++) {
                    const u32 low = 2 * i < columns ? from[2 * i * p.stride_dyo] : 0;
                    const u32 high = 2 * i + 1 < columns ? from[(2 * i + 1) * p.stride_dyo] : 0;
                    words[i] = low | high << 16;
                }
                store_vector(smem + DY + ring.slot * DY_BYTES + at * 16, words);
            }
            bar_arrive(smem + DY_FULL + 8 * ring.slot);
        }
    }
}

// ---- Consumers ----------------------------------------------------------------------------------------------------

// What a thread has of a unit: columns `column` and the eighth after it of the hidden.
struct Columns {
    u32 w2[2];      // columns 2 (lane % 4) and the next of y
    bool there[2];  // whether it is before the hidden's end
    float dw2[4];   // {column, column, column + 8, column + 8} by those two columns of y
};

// Two rows of w2 in a column of the hidden.
DEVICE u32 load_w2(const Hidden& p, int head, int column, int out) {
    if (head >= p.heads || column >= p.hidden) return 0;
    const u16* from = p.w2 + head * p.stride_g + column * p.stride_h;
    const u32 low = out < p.dim_out ? from[out * p.stride_o] : 0;
    const u32 high = out + 1 < p.dim_out ? from[(out + 1) * p.stride_o] : 0;
    return low | high << 16;
}

DEVICE void store_dw2(const Hidden& p, const Unit& unit, int column, int out, const float (&sums)[4]) {
    const int part = (unit.last - 1) / p.tiles;
    const u64 first = (((u64)part * p.heads + unit.head) * p.dim_out + out) * p.hidden + column;
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (unit.head < p.heads && column + i / 2 * 8 < p.hidden && out + i % 2 < p.dim_out) {
            const u64 at = first + (u64)(i % 2) * p.hidden + i / 2 * 8;
            float* to = (float*)p.dw2 + at;
            if (p.rounded) ((u16*)p.dw2)[at] = (u16)pack(sums[i], 0);
            else *to = part < p.added ? *to + sums[i] : sums[i];
        }
}

// Zeroes the accumulators of rows from `left` on, which are past the last row of x. TMA filled these rows with zeros,
// but a w1 that is not finite turns them into NaN, and NaN times the zeros of dy would reach dw2.
DEVICE void clear_rows(float (&d)[64], int left) {
#pragma unroll
    for (int i = 0; i < 64; i++)
        if (i / 4 * 8 + i % 2 + threadIdx.x % 4 * 2 >= left) d[i] = 0;
}

// Writes dpre of preᵀ = d to this warpgroup's tile, where `to` is the address for this lane, and dw2 += act(d) dy.
DEVICE void derive(const float (&d)[64], Columns& own, u32 dy, u32 to) {
#pragma unroll
    for (int part = 0; part < BLOCK_M / 32; part++) {
        u32 of_dh[4], of_dw2[4];  // dy of four times 8 rows, as these take it
        load_blocks(of_dh, dy + part * 512);
        load_blocks_transposed(of_dw2, dy + part * 512);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 h[4], dpre[4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float* pre = d + 4 * (4 * part + 2 * half + i);
                float dh[4] = {0, 0, 0, 0};
                mma_of_8(dh, own.w2, of_dh[2 * half + i]);
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const Both low = activate_and_derive(pre[2 * j], dh[2 * j]);
                    const Both high = activate_and_derive(pre[2 * j + 1], dh[2 * j + 1]);
                    h[2 * i + j] = pack(low.y, high.y);
                    dpre[2 * i + j] = own.there[j] ? pack(low.dx, high.dx) : 0;  // beyond, it is NaN where dy is inf
                }
            }
            mma(own.dw2, h, of_dw2[2 * half], of_dw2[2 * half + 1]);
            store_blocks_transposed(to + (2 * part + half) * 2048, dpre);
        }
    }
}

DEVICE void consume(const Hidden& p, const TensorMap* dpre_map, u32 smem, int group) {
    const int units = units_of(p), lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, out = lane % 4 * 2;
    const u32 tile_of_dpre = smem + DPRE + group * DPRE_BYTES;
    // Block i of four that a warp stores has columns 8 (i % 2) and rows 8 (i / 2) on.
    const u32 to = tile_of_dpre + (lane / 16 * 8 + lane % 8) * 128 + (2 * warp + lane / 8 % 2 ^ lane % 8) * 16;
    Consumer c{smem, group};
    u32 count = 0;  // of tiles
    for (int index = blockIdx.x / CLUSTER; index < units; index += gridDim.x / CLUSTER) {
        const Unit unit = find_unit(p, index);
        const int column = unit.column + group * ROWS + warp * 16 + lane / 4;
        Columns own{{load_w2(p, unit.head, column, out), load_w2(p, unit.head, column + 8, out)},
                    {column < p.hidden, column + 8 < p.hidden}, {0, 0, 0, 0}};
        u32 w1[16 * STEPS];
        keep_rows(w1, c);
#pragma unroll 1
        for (int tile = unit.first; tile < unit.last; tile++, count++) {
            const u32 slot = count % DY_SLOTS;
            float d[64];
            multiply(d, w1, c, [&] {
                if (threadIdx.x % 128 == 0) bulk_wait_read();
                warpgroup_sync(3 + group);
                bar_wait(smem + DY_FULL + 8 * slot, count / DY_SLOTS % 2);
            });
            if (p.rows - tile * BLOCK_M < BLOCK_M) clear_rows(d, p.rows - tile * BLOCK_M);
            derive(d, own, smem + DY + slot * DY_BYTES + lane * 16, to);
            fence_async();
            warpgroup_sync(5 + group);
            if (lane == 0) bar_arrive(smem + DY_EMPTY + 8 * slot);
            if (threadIdx.x % 128 == 0 && p.write) {
                tma_store(dpre_map, tile_of_dpre, unit.column + group * ROWS, tile * BLOCK_M, unit.head);
                bulk_commit();
            }
            __syncwarp();
        }
        if (p.dw2) store_dw2(p, unit, column, out, own.dw2);
    }
    if (threadIdx.x % 128 == 0) bulk_wait_read();
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
heads_dhidden(const __grid_constant__ TensorMap w1_map, const __grid_constant__ TensorMap x_map,
              const __grid_constant__ TensorMap dpre_map, const __grid_constant__ Hidden p) {
    extern __shared__ __align__(1024) char shared[];
    const u32 smem = (u32)__cvta_generic_to_shared(shared);
    if (threadIdx.x == 0) {
        init_ring(smem);
        for (int s = 0; s < DY_SLOTS; s++) {
            bar_init(smem + DY_FULL + 8 * s, 32 * DY_WARPS);
            bar_init(smem + DY_EMPTY + 8 * s, 4 * CONSUMERS);
        }
    }
    run_roles<40, 232>(
        [&](int warp) {
            if (threadIdx.x == 0) produce(p, &w1_map, &x_map, smem);
            else if (warp == 1 || warp == 2) produce_dy(p, smem);
        },
        [&](int group) { consume(p, &dpre_map, smem, group); });
}
