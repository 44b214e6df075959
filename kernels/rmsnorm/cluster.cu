// RMSNorm forward of wide rows for Hopper (sm_90a): a thread block cluster processes one row, which stays in registers
// from load to store. cluster.py compiles and launches it.
//
// Back-of-the-envelope estimate, 2048 x 65536 bf16 on one NVIDIA H200 (132 SMs, a copy at 4254 GB/s, 1980 MHz):
//   floor      537 MB, 126 us: 16 KB of x and 16 KB of y a microsecond on each SM.
//   in flight  8 CTAs a row, 256 threads, 4 vectors of 16 bytes each: a CTA has 16 KB of a row. With 48 registers
//              a thread 5 CTAs are resident, 80 KB of x, so a CTA may take 5 us from its first load to its last
//              store. A load takes 1 us, the exchange of sums 0.5 to 1 us.
//   issue      8 elements cost 17 instructions of the sum and 46 of the result: 4000 cycles of 16000 a row.
//   weight     128 KB, the same for all rows, and yet each row reads it from L2: after barrier.cluster.wait the
//              compiler invalidates L1 (CCTL.IVALL), for all CTAs of the SM. So L2 delivers as many bytes of the weight
//              as device memory does of x. These loads overlap the exchange of sums.
//
// CTAs are not persistent: CTAs of several rows are resident on an SM and overlap loads, waits and stores. A CTA:
//   1 arrives on the cluster barrier and issues the loads of its whole slice
//   2 waits on the cluster barrier: all CTAs of the cluster then run, and their shared memory may be written
//   3 sums the squares; each warp writes its sum into every CTA of the cluster by st.async, which completes transaction
//     bytes of the receiver's mbarrier
//   4 waits for the sums of all warps of the cluster. No more writes to its shared memory follow, so it may exit.
//
// Loads are ld.global, not ld.global.nc: nothing orders the latter with the barrier, and ptxas moves them after the
// wait of step 2.
//
// Defined by the launcher, see ClusterConfig in configs.py: CLUSTER (CTAs of a row), THREADS, VECTORS (of a thread),
// RESIDENT (CTAs resident on an SM, which limits registers), EVEN (CLUSTER * THREADS * VECTORS is the whole
// row), TYPE of all tensors (0: bf16, 1: fp16, 2: fp32), RESIDUAL, WEIGHT.

#include "vectors.cuh"

constexpr int WARPS = THREADS / 32, SUMS = CLUSTER * WARPS;
constexpr int PER_WORD = ELEMENTS_PER_WORD<TYPE>;

struct Exchange {
    float sums[SUMS < 32 ? 32 : SUMS];  // the sum of squares of each warp of the cluster
    u64 full;                           // the mbarrier that counts the bytes of `sums`
};

__device__ u32 at(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// x and residual are used once: they are not allocated in L1. evict_last in L2, so that lines of y are evicted first
// (EXPERIMENTS.md).
__device__ Vector load(const Vector* from, u64 policy) {
    Vector v;
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
        : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3]) : "l"(from), "l"(policy));
    return v;
}
__device__ Vector load_weight(const Vector* from) {
    Vector v;
    asm volatile("ld.global.L1::evict_last.v4.b32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3]) : "l"(from));
    return v;
}

__device__ float warp_sum(float x) {
#pragma unroll
    for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
    return x;
}

// Initialises the mbarrier and arrives on the cluster barrier.
__device__ void begin(Exchange& e) {
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(at(&e.full)) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at(&e.full)), "r"(SUMS * 4) : "memory");
    }
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ void all_have_begun() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

// Sends a warp's sum to CTA `lane` of the cluster.
__device__ void send(Exchange& e, float sum, int part) {
    const int lane = threadIdx.x % 32, slot = part * WARPS + threadIdx.x / 32;
    if (lane < CLUSTER)
        asm volatile(
            "{\n.reg .b32 a, b;\nmapa.shared::cluster.u32 a, %0, %3;\nmapa.shared::cluster.u32 b, %1, %3;\n"
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [a], %2, [b];\n}"
            ::"r"(at(&e.sums[slot])), "r"(at(&e.full)), "r"(__float_as_uint(sum)), "r"(lane) : "memory");
}
// The sum over the row. All warps add in the same order, so that all CTAs have the same bits, in every run.
__device__ float receive(Exchange& e) {
    asm volatile(
        "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared.b64 p, [%0], 0;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}"
        ::"r"(at(&e.full)) : "memory");
    const int lane = threadIdx.x % 32;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < (SUMS + 31) / 32; ++i)
        if (SUMS % 32 == 0 || i * 32 + lane < SUMS) sum += e.sums[i * 32 + lane];
    return warp_sum(sum);
}

// A row is `vectors` vectors of 16 bytes: `slice` for each CTA, the remainder for the last; strides are in vectors.
// residual and h are used with RESIDUAL, weight with WEIGHT; rstd_ptr may be null.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, RESIDENT)
rmsnorm_cluster_fwd(const Vector* x, const Vector* residual, const Vector* weight, Vector* y, Vector* h,
                    float* rstd_ptr, int vectors, int slice, i64 stride_x, i64 stride_residual, float inverse_dim,
                    float eps, float weight_offset) {
    extern __shared__ __align__(16) char shared[];
    Exchange& exchange = *reinterpret_cast<Exchange*>(shared);
    const int part = blockIdx.x % CLUSTER, thread = threadIdx.x;
    const i64 row = blockIdx.x / CLUSTER;
    const int start = part * (EVEN ? THREADS * VECTORS : slice);
    const int count = min(slice, vectors - start);  // vectors of this CTA
    const auto column = [&](int i) { return start + i * THREADS + thread; };
    const auto mine = [&](int i) { return EVEN || i * THREADS + thread < count; };
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(policy));
    Vector v[VECTORS] = {}, added[VECTORS] = {}, weights[VECTORS] = {};

    begin(exchange);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (!mine(i)) continue;
        v[i] = load(x + row * stride_x + column(i), policy);
        if (RESIDUAL) added[i] = load(residual + row * stride_residual + column(i), policy);
    }
    all_have_begun();

    float total[4] = {};
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float a[PER_WORD], b[PER_WORD];
            unpack<TYPE>(v[i].words[j], a);
            if (RESIDUAL) {  // y is computed from h as rounded for the store, so that the backward has the same values
                unpack<TYPE>(added[i].words[j], b);
                for (int k = 0; k < PER_WORD; ++k) a[k] += b[k];
                v[i].words[j] = pack<TYPE>(a[0], a[PER_WORD - 1]);
                unpack<TYPE>(v[i].words[j], a);
            }
            for (int k = 0; k < PER_WORD; ++k) total[j] += a[k] * a[k];
        }
        if (RESIDUAL && mine(i)) store(h + row * vectors + column(i), v[i]);
    }
    send(exchange, warp_sum((total[0] + total[1]) + (total[2] + total[3])), part);

    if (WEIGHT) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
            if (mine(i)) weights[i] = load_weight(weight + column(i));
    }
    const float rstd = rsqrtf(receive(exchange) * inverse_dim + eps);
    if (rstd_ptr && part == 0 && thread == 0) rstd_ptr[row] = rstd;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        Vector out;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float a[PER_WORD], w[PER_WORD];
            unpack<TYPE>(opaque(v[i].words[j]), a);
            if (WEIGHT) unpack<TYPE>(opaque(weights[i].words[j]), w);
            for (int k = 0; k < PER_WORD; ++k) a[k] *= rstd, a[k] *= WEIGHT ? w[k] + weight_offset : 1;
            out.words[j] = pack<TYPE>(a[0], a[PER_WORD - 1]);
        }
        if (mine(i)) store(y + row * vectors + column(i), out);
    }
}
