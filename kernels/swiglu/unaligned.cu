// Gated linear units on rows with any alignment, for Hopper (sm_90a): memory is read and written by aligned
// vectors of 16 bytes, which are shifted into place in registers. unaligned.py compiles and launches it.
//
// Back-of-the-envelope estimate, 205000 x 1365 packed in bf16 on one NVIDIA H200 (132 SMs, a copy at 4254 GB/s,
// 1980 MHz). Rows of the packed tensor are 5460 bytes apart, up begins 2730 bytes after gate, rows of y are 2730 bytes.
//   floor      forward 1.68 GB, 395 us; backward 2.80 GB, 658 us.
//   requests   a warp accesses 64 bytes by elements and 512 by vectors. So stores need an eighth of the requests, and
//              loads a quarter, since each vector is loaded twice (below).
//   issue      in the time that the bytes of 8 elements take, an SM can issue 380 instructions of a thread for them in
//              the forward, 630 in the backward. The SASS of silu has some 240 and 400. An input takes 35 of them (two
//              loads, 15 to shift), the indices 40 to 60, divided by the share of active lanes, 0.9.
//   in flight  a thread issues all of its loads before it uses one: 32 bytes that no other lane loads forward, 48
//              backward. With 32 and 48 registers 64 and 40 warps are resident: 64 and 60 KB an SM. Little's law needs
//              17 and 16 KB: 2836 and 2552 GB/s are read, at a latency of 0.8 us.
//
// Mapping: a slot is the 8 elements of one aligned vector of the output, and a lane computes SLOTS of them. A piece is
// the part of one row that a warp computes. In an input the elements of a slot begin at the same byte offset from a
// 16-byte boundary in the whole row, so they lie in two adjacent aligned vectors, and the second of these is the first
// of the next lane. Each lane loads both: the second comes from L1, costs no more than four shuffles, and the last lane
// needs no special case. In the backward with both gradients there are two outputs, whose alignments usually differ.
// Slots are those of dgate. A vector of dup is assembled from the values of a lane and of the next one by shuffles. The
// last lane of a warp writes nothing: its slot is the first of the next piece, and its values of dup complete the
// vector of the previous lane. Separate slots for dup would take some 200 instructions more. The first and the last
// slot of a row are stored by elements.
//
// Bounds: an aligned vector is loaded only where it lies between the first byte of the first row and the last byte of
// the last row of its tensor; elsewhere elements are loaded. Only elements of the output's rows are written.
//
// Defined by the launcher, see UnalignedConfig in configs.py: THREADS, SLOTS (of a lane), RESIDENT (CTAs resident on an
// SM, which limits registers), TYPE of all tensors (0: bf16, 1: fp16), ACTIVATION (its place in
// ACTIVATIONS), EVICT_LAST (the L2 policy of the loads), NEED_DGATE, NEED_DUP (0 both: the forward).

#include "vectors.cuh"

typedef unsigned short u16;

constexpr int ELEMENTS = 8;  // elements of a vector
constexpr bool EXCHANGE = NEED_DGATE && NEED_DUP;
constexpr int SLOTS_WRITTEN = EXCHANGE ? 31 : 32;  // slots that a warp writes per iteration
enum { SILU, GELU, GELU_TANH, RELU, SIGMOID, IDENTITY };

__device__ u64 policy_of_loads() {
    u64 policy = 0;
    if (EVICT_LAST) asm volatile("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(policy));
    return policy;
}
__device__ Vector load(u64 from, u64 policy) {
    Vector v;
    if (EVICT_LAST)
        asm volatile("ld.global.nc.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
            : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3]) : "l"(from), "l"(policy));
    else
        asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
            : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3]) : "l"(from));
    return v;
}
__device__ u32 load_element(u64 from) {
    u16 element;
    asm volatile("ld.global.nc.b16 %0, [%1];" : "=h"(element) : "l"(from));
    return element;
}
__device__ void store_element(u64 to, u32 element) {
    asm volatile("st.global.b16 [%0], %1;" ::"l"(to), "h"(u16(element)) : "memory");
}
__device__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ float rsqrt_of(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The formulas of activation.py for dtypes of 16 bits, in the same order.
constexpr float LOG2_E = 1.4426950408889634f, INV_SQRT_2PI = 0.3989422804014327f;
constexpr double SLOPE = 1.5957691216057308, CUBIC = 0.044715;
constexpr float MAX_SQUARE = 1024;

struct Activated {
    float value, derivative;
};

__device__ float reciprocal(float d) {
    const float root = rsqrt_of(d);
    return root * root;
}
__device__ float logistic(float x) { return reciprocal(1 + exp2_of(x * -LOG2_E)); }

// The derivative is dead code in the forward.
__device__ Activated activation(float x) {
    constexpr bool NEED_DERIVATIVE = NEED_DGATE || NEED_DUP;
    if constexpr (ACTIVATION == SILU) {
        const float s = logistic(x), y = x * s;
        return {y, s + y * (1 - s)};
    } else if constexpr (ACTIVATION == GELU) {
        const float exponential = exp2_of(x * (x * (-0.5f * LOG2_E))), t = reciprocal(1 + 0.36f * fabsf(x));
        float p = t * -0.0992293074f + 0.255988448f;
        p = p * t + 0.0338312376f;
        p = p * t + 0.169156352f;
        p = p * t + 0.140050482f;
        p = p * t + 0.000195486907f;
        const float tail = p * exponential, cdf = x > 0 ? 1 - tail : tail;
        return {x * cdf, cdf + x * (exponential * INV_SQRT_2PI)};
    } else if constexpr (ACTIVATION == GELU_TANH) {
        const float square = NEED_DERIVATIVE ? fminf(x * x, MAX_SQUARE) : x * x;
        constexpr float linear = -1.4426950408889634 * SLOPE, cubic = -1.4426950408889634 * SLOPE * CUBIC;
        const float s = reciprocal(1 + exp2_of(x * (linear + cubic * square))), y = x * s;
        return {y, s + y * ((1 - s) * (float(SLOPE) + float(3 * SLOPE * CUBIC) * square))};
    } else if constexpr (ACTIVATION == RELU) {
        return {x <= 0 ? 0 : x, x <= 0 ? 0.0f : 1.0f};  // NaN remains NaN
    } else if constexpr (ACTIVATION == SIGMOID) {
        const float s = logistic(x);
        return {s, s * (1 - s)};
    } else {
        return {x, 1};
    }
}

// A row of an input, by addresses. All bytes from `low` to `high` may be read: they belong to rows of the tensor or lie
// between two rows. `interior`: so may be 48 bytes before and after this row.
struct Row {
    u64 start, low, high;
    bool interior;
};
__device__ Row row_of(const u16* tensor, i64 stride, i64 row, i64 rows, int cols) {
    const u64 low = reinterpret_cast<u64>(tensor);
    return {low + 2 * row * stride, low, low + 2 * ((rows - 1) * stride + cols),
            row > 0 && row + 1 < rows && stride >= 24};
}

struct Pair {  // two aligned vectors, and the byte offset of the 8 elements in them
    Vector first, second;
    u32 skip;
};
// Loads elements start … start + 7 of a row. For those outside the row anything may be returned: it is not used.
__device__ Pair load_pair(const Row& row, int start, int cols, u64 policy) {
    Pair pair = {};
    if (start <= -ELEMENTS || start >= cols) return pair;
    const u64 from = row.start + 2 * i64(start), first = from & ~u64(15), second = (from + 15) & ~u64(15);
    if (row.interior || (first >= row.low && second + 16 <= row.high)) {
        pair.first = load(first, policy), pair.second = load(second, policy), pair.skip = u32(from) & 15;
    } else {
#pragma unroll
        for (int k = 0; k < ELEMENTS; ++k)
            if (u32(start + k) < u32(cols))
                pair.first.words[k / 2] |= load_element(from + 2 * k) << k % 2 * 16;
    }
    return pair;
}
// 16 bytes from byte `skip` on, an even number below 16.
__device__ Vector shifted(const Vector& first, const Vector& second, u32 skip) {
    u32 by_two[6], by_one[5];
    Vector out;
#pragma unroll
    for (int i = 0; i < 6; ++i) {
        const u32 near = i < 4 ? first.words[i & 3] : second.words[i & 3];
        const u32 far = i < 2 ? first.words[(i + 2) & 3] : second.words[(i + 2) & 3];
        by_two[i] = skip & 8 ? far : near;
    }
#pragma unroll
    for (int i = 0; i < 5; ++i) by_one[i] = skip & 4 ? by_two[i + 1] : by_two[i];
#pragma unroll
    for (int i = 0; i < 4; ++i) out.words[i] = __funnelshift_r(by_one[i], by_one[i + 1], skip * 8);  // shifts modulo 32
    return out;
}
__device__ Vector shifted(const Pair& pair) { return shifted(pair.first, pair.second, pair.skip); }

// Stores elements start … start + 7 of a row of an output, except those outside the row.
__device__ void store_slot(u64 row, int start, int cols, const Vector& v) {
    const u64 to = row + 2 * i64(start);
    if (start >= 0 && start + ELEMENTS <= cols) return store(reinterpret_cast<Vector*>(to), v);
#pragma unroll
    for (int k = 0; k < ELEMENTS; ++k)
        if (u32(start + k) < u32(cols)) store_element(to + 2 * k, v.words[k / 2] >> k % 2 * 16);
}
__device__ int past_boundary(u64 row) { return int(row >> 1) & 7; }  // elements

// The row of this warp and its piece of the row: the slots that it writes.
struct Piece {
    i64 row;
    int slot;  // the first slot of the lane
};
__device__ Piece piece_of_warp(u32 warps_per_row) {
    const u32 warp = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, row = warp / warps_per_row;
    return {i64(row), int((warp - row * warps_per_row) * (SLOTS_WRITTEN * SLOTS) + threadIdx.x % 32)};
}

#if !NEED_DGATE && !NEED_DUP

// y = act(gate) · up. Strides are in elements.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
swiglu_unaligned_fwd(const u16* gate, const u16* up, u16* y, i64 rows, int cols, u32 warps_per_row, i64 stride_g,
                     i64 stride_u, i64 stride_y) {
    const Piece piece = piece_of_warp(warps_per_row);
    if (piece.row >= rows) return;
    const Row gates = row_of(gate, stride_g, piece.row, rows, cols), ups = row_of(up, stride_u, piece.row, rows, cols);
    const u64 out = reinterpret_cast<u64>(y) + 2 * piece.row * stride_y, policy = policy_of_loads();
    const int first = piece.slot * ELEMENTS - past_boundary(out);
    Pair pairs[SLOTS][2];
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
        pairs[i][0] = load_pair(gates, first + i * SLOTS_WRITTEN * ELEMENTS, cols, policy);
        pairs[i][1] = load_pair(ups, first + i * SLOTS_WRITTEN * ELEMENTS, cols, policy);
    }
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
        const Vector g = shifted(pairs[i][0]), u = shifted(pairs[i][1]);
        Vector result;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float a[2], b[2];
            unpack<TYPE>(g.words[j], a), unpack<TYPE>(u.words[j], b);
            for (int k = 0; k < 2; ++k) a[k] = activation(a[k]).value * b[k];
            result.words[j] = pack<TYPE>(a[0], a[1]);
        }
        store_slot(out, first + i * SLOTS_WRITTEN * ELEMENTS, cols, result);
    }
}

#else

// dgate = dy · up · act'(gate), dup = dy · act(gate). Without NEED_DGATE up and dgate are null, without NEED_DUP dup.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
swiglu_unaligned_bwd(const u16* dy, const u16* gate, const u16* up, u16* dgate, u16* dup, i64 rows, int cols,
                     u32 warps_per_row, i64 stride_dy, i64 stride_g, i64 stride_u, i64 stride_dg, i64 stride_du) {
    const Piece piece = piece_of_warp(warps_per_row);
    if (piece.row >= rows) return;
    const Row dys = row_of(dy, stride_dy, piece.row, rows, cols), gates = row_of(gate, stride_g, piece.row, rows, cols);
    const Row ups = row_of(up, stride_u, piece.row, rows, cols);
    const u64 policy = policy_of_loads();
    const u64 dgates = reinterpret_cast<u64>(dgate) + 2 * piece.row * stride_dg;
    const u64 dups = reinterpret_cast<u64>(dup) + 2 * piece.row * stride_du;
    // A vector of dup begins `dup_offset` elements after the slot of dgate. Where the vector of the row's first slot
    // begins after the row's first element of dup, slots begin one earlier, and that one gives the vector before.
    const int past = past_boundary(NEED_DGATE ? dgates : dups);
    const int dup_offset = EXCHANGE ? (past - past_boundary(dups)) & 7 : 0;
    const int first = (piece.slot - (dup_offset > past)) * ELEMENTS - past;
    Pair pairs[SLOTS][3];
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
        pairs[i][0] = load_pair(dys, first + i * SLOTS_WRITTEN * ELEMENTS, cols, policy);
        pairs[i][1] = load_pair(gates, first + i * SLOTS_WRITTEN * ELEMENTS, cols, policy);
        if (NEED_DGATE) pairs[i][2] = load_pair(ups, first + i * SLOTS_WRITTEN * ELEMENTS, cols, policy);
    }
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
        const int start = first + i * SLOTS_WRITTEN * ELEMENTS;
        const Vector d = shifted(pairs[i][0]), g = shifted(pairs[i][1]);
        const Vector u = NEED_DGATE ? shifted(pairs[i][2]) : Vector{};
        Vector dgate_vector, dup_vector;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float a[2], b[2], c[2], value[2];
            unpack<TYPE>(d.words[j], a), unpack<TYPE>(g.words[j], b), unpack<TYPE>(u.words[j], c);
            for (int k = 0; k < 2; ++k) {
                const Activated act = activation(b[k]);
                value[k] = a[k] * act.value;
                c[k] = a[k] * c[k] * act.derivative;
                if (ACTIVATION == RELU && act.derivative == 0) c[k] = 0;  // also where dy or up is inf or NaN
            }
            dgate_vector.words[j] = pack<TYPE>(c[0], c[1]), dup_vector.words[j] = pack<TYPE>(value[0], value[1]);
        }
        if (EXCHANGE) {
            Vector next;
#pragma unroll
            for (int j = 0; j < 4; ++j) next.words[j] = __shfl_down_sync(~0u, dup_vector.words[j], 1);
            dup_vector = shifted(dup_vector, next, 2 * dup_offset);
            if (threadIdx.x % 32 == SLOTS_WRITTEN) continue;
        }
        if (NEED_DGATE) store_slot(dgates, start, cols, dgate_vector);
        if (NEED_DUP) store_slot(dups, start + dup_offset, cols, dup_vector);
    }
}

#endif
