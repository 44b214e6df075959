// The forward of heads_gmm for Hopper (sm_90a). heads.cuh documents the algorithm and the definitions; forward.py
// compiles and launches it. The epilogue is that of kernel.py: it computes the parameters of the mixture, and for each
// row and group of heads the statistics top, weights, m and density.

#include "heads.cuh"

struct Output {
    const void* bias;         // [heads, 3], fp32 if `wide_bias`, else 16 bits; or null
    u64 stride_bg, stride_bo;
    const void* y;            // [rows], fp32 if `wide_y`, else 16 bits
    u64 stride_y;
    float* statistics;        // [groups, rows, 4], or null
    float* parameters;        // [rows, heads, 3], or null
    int wide_bias, wide_y;
};

// Loads an element of fp32 or of 16 bits.
DEVICE float load_number(const void* from, u64 at, int wide) {
    return wide ? ((const float*)from)[at] : widen(((const u16*)from)[at]);
}

#define INFINITE __int_as_float(0x7f800000)

DEVICE float or_zero(float x) { return x == -INFINITE ? 0.0f : x; }

struct Statistics {
    float top, weights, m, density;
};

// The statistics with one more component.
DEVICE Statistics add(const Statistics& s, float logit, float mu, float log_sigma, float y) {
    Statistics t;
    t.top = fmaxf(s.top, logit);
    const float a = (logit - or_zero(t.top)) * LOG2_E;
    // Before the first component there is nothing to rescale: weights is 0, and m -inf.
    const float shift = s.top == -INFINITE ? 0.0f : (s.top - or_zero(t.top)) * LOG2_E, before = s.m + shift;
    const float z = (y - mu) * exp2_(log_sigma * -LOG2_E);
    const float joint = fmaf(z * (-0.5f * LOG2_E), z, fmaf(log_sigma, -LOG2_E, a));
    t.m = fmaxf(before, joint);
    t.weights = s.weights * exp2_(shift) + exp2_(a);
    t.density = s.density * exp2_(before - or_zero(t.m)) + exp2_(joint - or_zero(t.m));
    return t;
}

// Four lanes hold the parameters of a row and of the row 8 below it. The first lane processes one of these rows and the
// second the other. Statistics are kept in global memory (L2) between heads: the main loop has no registers for them.
struct AddComponent {
    const Heads& p;
    const Output& o;

    DEVICE void operator()(const Unit& unit, int head, int first_row, const float (&out)[4]) const {
        const bool second = threadIdx.x % 2;
        const float other = __shfl_xor_sync(~0u, second ? out[0] : out[2], 1), last = __shfl_xor_sync(~0u, out[3], 1);
        float logit = second ? other : out[0], mu = second ? last : out[1], log_sigma = second ? out[2] : other;
        const int row = first_row + 8 * second;
        if (row >= p.rows || threadIdx.x % 4 > 1) return;
        if (o.bias) {
            const u64 at = head * o.stride_bg;
            logit += load_number(o.bias, at, o.wide_bias), mu += load_number(o.bias, at + o.stride_bo, o.wide_bias);
            log_sigma += load_number(o.bias, at + 2 * o.stride_bo, o.wide_bias);
        }
        if (o.parameters) {
            float* to = o.parameters + ((u64)row * p.heads + head) * 3;
            to[0] = logit, to[1] = mu, to[2] = log_sigma;
        }
        if (!o.statistics) return;
        const float y = load_number(o.y, row * o.stride_y, o.wide_y);
        float4* to = (float4*)o.statistics + (u64)unit.group * p.rows + row;
        Statistics before = {-INFINITE, 0, -INFINITE, 0};
        if (head > unit.first) before = {to->x, to->y, to->z, to->w};
        const Statistics now = add(before, logit, mu, log_sigma, y);
        *to = make_float4(now.top, now.weights, now.m, now.density);
    }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
heads_gmm_forward(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w1_map,
                  const __grid_constant__ Heads heads, const __grid_constant__ Output output) {
    heads_forward(heads, &x_map, &w1_map, AddComponent{heads, output});
}
