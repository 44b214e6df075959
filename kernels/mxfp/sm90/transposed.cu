// Quantisation of x bf16 [rows, columns] in blocks along the first dimension, for Hopper (sm_90a). Data and scales are
// transposed: [columns, ...]. transposed.py compiles and launches it.
//
// A thread has two adjacent columns, one in each half of a register, and 32 rows of them, which are whole blocks. So a
// warp loads segments of 128 bytes, and the scale, rounding and packing need no other thread. Only the packed codes are
// transposed: a warp writes STEPS iterations of 32 rows of its 64 columns to shared memory, and from there stores
// segments of the result's rows.
//
// Back-of-the-envelope estimate, 8192 x 8192, one NVIDIA H200 (132 SMs, 4254 GB/s), bytes read and written: mxfp8
// 134 + 69 MB, 48 us; mxfp6 134 + 52 MB, 44 us; mxfp4 134 + 36 MB, 40 us; nvfp4 134 + 38 MB, 40 us. An SM processes
// 508000 elements, 3970 per lane of its four schedulers. An element takes 7 SASS instructions with mxfp8 and 10 with
// mxfp4, addresses included: issued in 15 and 21 us at 1.85 GHz. With mxfp4 6.5 of these use the integer pipe, 28 us at
// 64 a cycle and SM. Little's law requires 3 MB in flight, 23 KB per SM: six warps that wait for their 32 loads of 128
// bytes. 28 or 32 warps are resident.
//
// Defined by the launcher: the definitions of elements.cuh, STEPS (iterations of 32 rows), WARPS (of a CTA, with
// adjacent columns), SHARED (bytes).

#include "elements.cuh"

constexpr int RESIDENT = WIDTH == 8 || NVFP4 ? 28 : 32;  // warps per SM: 72 or 64 registers per thread
constexpr int PAIRS = 32, COLUMNS = 2 * PAIRS;  // per warp
constexpr int SCALES = STEPS * STEP / BLOCK;    // bytes per column
#if WIDTH == 6
typedef uint2 Unit;  // rows of the result are 8-byte aligned
#else
typedef uint4 Unit;
#endif
constexpr int STEP_UNITS = 4 * WIDTH / sizeof(Unit), UNITS = STEPS * STEP_UNITS;
constexpr int SLOTS = UNITS > 16 ? 1 : UNITS > 8 ? 2 : UNITS > 4 ? 4 : UNITS > 2 ? 8 : 32 / UNITS;  // a power of two
constexpr int PITCH = UNITS | 1;  // odd: threads that store units of adjacent slots access different banks

struct Problem {
    const char* x;
    Unit* data;
    unsigned char* scales;
    float* tensor_scale;       // NVFP4: read, or computed from `amax` and written
    const u32* amax;           // null, or the fp32 bits of the largest finite magnitude of x
    u64 pitch;                 // bytes between rows of x
    int rows, columns, tiles;  // of x; tiles of its columns
};

// The staging buffer of a warp. Column 2 i is in slot i, column 2 i + 1 in slot 32 + i.
struct Staged {
    Unit data[COLUMNS * PITCH];
    alignas(8) unsigned char scales[COLUMNS * SCALES];
};

// Loads 32 rows of two columns, with zeros past the last of the `rows` that remain.
DEVICE void load_step(u32 (&x)[STEP], const char* at, u64 pitch, int rows) {
    if (rows >= STEP) {
#pragma unroll
        for (int i = 0; i < STEP; i++, at += pitch) x[i] = load(at);
    } else {
#pragma unroll
        for (int i = 0; i < STEP; i++, at += pitch) x[i] = i < rows ? load(at) : 0;
    }
}

DEVICE Unit unit_of(const u32* words) {
#if WIDTH == 6
    return make_uint2(words[0], words[1]);
#else
    return make_uint4(words[0], words[1], words[2], words[3]);
#endif
}

// Quantises both columns of a thread and writes them to shared memory.
DEVICE void quantize_step(u32 (&x)[STEP], Staged& to, int step, float tensor_scale, bool usable) {
    const int lane = threadIdx.x % 32;
    unsigned char* const scales = to.scales + lane * SCALES + step * (STEP / BLOCK);
    Factor factor;
    u32 left[WIDTH], right[WIDTH], codes = find_scales<0>(x, tensor_scale, usable, factor);
    scales[0] = codes, scales[PAIRS * SCALES] = codes >> 16;
#if WIDTH == 8
    round_and_pack(x, factor, left, right);
#else
    round<0>(x, factor);
#if NVFP4
    codes = find_scales<BLOCK>(x, tensor_scale, usable, factor);
    scales[1] = codes, scales[PAIRS * SCALES + 1] = codes >> 16;
    round<BLOCK>(x, factor);
#endif
    pack(x, left, right);
#endif
    Unit* const data = to.data + lane * PITCH + step * STEP_UNITS;
#pragma unroll
    for (int i = 0; i < STEP_UNITS; i++) {
        data[i] = unit_of(left + i * (sizeof(Unit) / 4));
        data[PAIRS * PITCH + i] = unit_of(right + i * (sizeof(Unit) / 4));
    }
}

// Stores the first `units` units of each column of the warp, from `column` on; a row of the result has `width` units. A
// store instruction of the warp covers SLOTS columns. Their offsets from a thread's first one are compile-time
// constants.
DEVICE void store_data(const Problem& p, const Staged& from, u32 column, u32 unit, u32 units, u32 width) {
    const u32 lane = threadIdx.x % 32, first = lane / UNITS, place = lane % UNITS, left = p.columns - column;
    if (first >= SLOTS || place >= units) return;
    Unit* const to = p.data + (u64)(column + 2 * first) * width + unit + place;
    const Unit* const at = from.data + first * PITCH + place;
#pragma unroll 8
    for (u32 slot = 0; slot < COLUMNS; slot += SLOTS) {
        const u32 more = slot % PAIRS * 2 + slot / PAIRS;
        if (2 * first + more < left) to[(u64)more * width] = at[slot * PITCH];
    }
}

// Stores the scales of a thread's two columns, which it wrote itself: as one word if that is complete and aligned.
DEVICE void store_scales(const Problem& p, const Staged& from, u32 column, u32 first, u32 count, u32 width) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 at = column + 2 * lane + half;
        if (at >= p.columns) break;
        unsigned char* const to = p.scales + (u64)at * width + first;
        const unsigned char* const scales = from.scales + (lane + half * PAIRS) * SCALES;
        if (SCALES <= 8 && count == SCALES && width % SCALES == 0) {
            if (SCALES == 1) *to = *scales;
            if (SCALES == 2) *(u16*)to = *(const u16*)scales;
            if (SCALES == 4) *(u32*)to = *(const u32*)scales;
            if (SCALES == 8) *(u64*)to = *(const u64*)scales;
        } else {
#pragma unroll 1
            for (u32 i = 0; i < count; i++) to[i] = scales[i];
        }
    }
}

// The same as in kernel.py: amax / (448 * 6), at least 2^-117.
DEVICE float find_tensor_scale(const Problem& p, bool& usable) {
    if (p.amax == nullptr) {
        const float given = *p.tensor_scale;
        usable = given >= 0x1p-117f && __float_as_uint(given) < 0x7F800000;
        return usable ? given : 1;
    }
    const float amax = __uint_as_float(*p.amax);
    const float found = amax > 0 ? fmaxf(amax * (float)(1.0 / 2688), 0x1p-117f) : 1;
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.tensor_scale = found;
    usable = true;
    return found;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT / WARPS)
mxfp_quantize_transposed(const __grid_constant__ Problem p) {
    extern __shared__ __align__(16) char shared[];
    static_assert(sizeof(Staged) * WARPS == SHARED, "transposed.py has another size");
    Staged& staged = ((Staged*)shared)[threadIdx.x / 32];
    // After the pass that computed `amax` the last rows of x are in L2, so tiles are processed in reverse order.
    const u32 tile = NVFP4 && p.amax ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int column = (tile % p.tiles * WARPS + threadIdx.x / 32) * COLUMNS, row = tile / p.tiles * (STEPS * STEP);
    if (column >= p.columns) return;
    bool usable = true;
    const float tensor_scale = NVFP4 ? find_tensor_scale(p, usable) : 1;
    // Threads past the last columns load these again, and store nothing.
    const int mine = min(column + 2 * (int)(threadIdx.x % 32), p.columns - 2);
    const char* at = p.x + row * p.pitch + mine * 2ull;
    const int rows = min(STEPS * STEP, p.rows - row), steps = (rows + STEP - 1) / STEP;
#pragma unroll 1
    for (int step = 0; step < steps; step++, at += STEP * p.pitch) {
        u32 x[STEP];
        load_step(x, at, p.pitch, rows - step * STEP);
        quantize_step(x, staged, step, tensor_scale, usable);
    }
    __syncwarp();
    const int all = (p.rows + STEP - 1) / STEP;  // iterations for all rows of x
    store_data(p, staged, column, row / STEP * STEP_UNITS, steps * STEP_UNITS, all * STEP_UNITS);
    store_scales(p, staged, column, row / BLOCK, steps * (STEP / BLOCK), all * (STEP / BLOCK));
}
