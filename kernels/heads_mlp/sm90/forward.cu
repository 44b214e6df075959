// The forward of heads_mlp for Hopper (sm_90a). heads.cuh documents the algorithm and the definitions; forward.py
// compiles and launches it.

#include "heads.cuh"

struct Output {
    u16* y;  // [rows, heads, dim_out]
};

struct StoreHead {
    const Heads& p;
    u16* y;

    DEVICE void operator()(const Unit&, int head, int row, const float (&out)[4]) const {
        const int column = threadIdx.x % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 words = pack(out[2 * half], out[2 * half + 1]);
            u16* to = y + ((u64)(row + 8 * half) * p.heads + head) * p.dim_out + column;
            if (row + 8 * half < p.rows && column < p.dim_out) to[0] = (u16)words;
            if (row + 8 * half < p.rows && column + 1 < p.dim_out) to[1] = (u16)(words >> 16);
        }
    }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
heads_mlp_forward(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w1_map,
                  const __grid_constant__ Heads heads, const __grid_constant__ Output output) {
    heads_forward(heads, &x_map, &w1_map, StoreHead{heads, output.y});
}
