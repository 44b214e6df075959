// Cross entropy and its gradient in one pass for Hopper (sm_90a): a thread block cluster for each row, which holds the
// row in registers from load to store. cluster.py compiles and launches it; terms.py has the arithmetic in Triton.
//
// Back-of-the-envelope estimate, 8192 x 128256 bf16 on one NVIDIA H200 (132 SMs, a copy at 4254 GB/s, 1980 MHz):
//   floor      2.1 GB read and 2.1 GB written, 988 us: 16 KB in and 16 KB out a microsecond and SM.
//   in flight  8 CTAs a row, 256 threads, 8 vectors of 16 bytes each: a CTA has 32 KB of a row. With 64 registers a
//              thread, 4 CTAs are resident, so a CTA may take 8 us from its first load to its last store. Of these the
//              latency of the target is 0.5 us, of the logits 1 us, of the exchange 0.5 to 1 us.
//   issue      an element costs 0.4 instructions for the maximum, 4 for the sum and 4.5 for the gradient, a thread 320
//              more: 1800 of the 4000 cycles that a CTA has.
//   special    an exponential for the sum and one for the gradient: 8.2 of the 16 a cycle that the special function
//              units compute. Keeping the first one would take the registers of another resident CTA.
//
// The kernel is not persistent: CTAs of several rows are resident on an SM and overlap loads, waits and stores. A CTA:
//   1 arrives on the cluster barrier, loads the target and then, unless the row is ignored, its slice of the row
//   2 waits on the cluster barrier: all CTAs of the cluster then run, and their shared memory may be written
//   3 each warp computes its maximum m and then s = sum of exp(x - m), and writes both into every CTA of the cluster by
//     st.async, which completes transaction bytes of the receiver's mbarrier
//   4 waits for the parts of all warps of the cluster. No more writes to its shared memory follow, so it may exit.
// In place: a thread overwrites only what it has read itself, so no further synchronisation is needed.
//
// Loads are ld.global, not ld.global.nc: nothing orders the latter, and ptxas would move them after the wait of step 2.
//
// Defined by the launcher, see ClusterConfig in configs.py: CLUSTER (CTAs of a row), THREADS, VECTORS (of a thread),
// RESIDENT (minimum CTAs of an SM, for __launch_bounds__), TYPE of the logits and LOSS of the loss (0: bf16, 1: fp16,
// 2: fp32), TARGET (bits of a target), SMOOTH and Z (there is label smoothing, z-loss).

#include "vectors.cuh"

constexpr int WARPS = THREADS / 32, PARTS = CLUSTER * WARPS;
constexpr int PER_WORD = ELEMENTS_PER_WORD<TYPE>, PER_VECTOR = 4 * PER_WORD;  // elements of 32 bits, of 16 bytes
constexpr u32 LOWEST = TYPE == 2 ? 0xff800000u : TYPE == 1 ? 0xfc00fc00u : 0xff80ff80u;  // a word of -inf
constexpr float LOG2_E = 1.4426950408889634f;

// Statistics of a warp, or of the row: maximum m, sum of exp(x - m); with SMOOTH sum of x - m, and number of elements.
struct alignas(16) Part {
    float m, s, sum, count;
};
struct Exchange {
    Part parts[PARTS];
    u64 full;      // the mbarrier that counts the bytes of `parts`
    float target;  // the logit at the row's target, then its gradient; one thread's, in shared memory to save registers
};

extern "C" __device__ __attribute__((noreturn)) void __assertfail(const char*, const char*, u32, const char*, size_t);

__device__ u32 at(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// Loads a vector if `inside`. L1::no_allocate, as logits are used once; evict_last in L2, so that the gradient is
// evicted first (EXPERIMENTS.md). Predicated: after a branch ptxas would compute each address again.
__device__ void load(Vector& v, const Vector* from, bool inside, u64 policy) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
        "@p ld.global.L1::no_allocate.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %6;\n}"
        : "+r"(v.words[0]), "+r"(v.words[1]), "+r"(v.words[2]), "+r"(v.words[3])
        : "l"(from), "r"(static_cast<int>(inside)), "l"(policy));
}
// One element by its index.
__device__ float element(const void* from, i64 i) {
    u32 word;
    float out[PER_WORD];
    if constexpr (TYPE == 2)
        asm volatile("ld.global.b32 %0, [%1];" : "=r"(word) : "l"(static_cast<const u32*>(from) + i));
    else
        asm volatile("{\n.reg .b16 a;\nld.global.b16 a, [%1];\nmov.b32 %0, {a, a};\n}"
            : "=r"(word) : "l"(static_cast<const unsigned short*>(from) + i));
    unpack<TYPE>(word, out);
    return out[0];
}
template <int KIND> __device__ void put(void* to, i64 i, float x) {
    if constexpr (KIND == 2)
        static_cast<float*>(to)[i] = x;
    else
        static_cast<unsigned short*>(to)[i] = static_cast<unsigned short>(pack<KIND>(x, x));
}

// The maximum, of each half for 16-bit elements. max ignores a NaN, which then makes s NaN.
__device__ u32 larger(u32 a, u32 b) {
    if constexpr (TYPE == 2) return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
    u32 c = 0;
    if constexpr (TYPE == 1) asm("max.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    if constexpr (TYPE == 0) asm("max.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}
__device__ float two_to(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ float warp_max(float x) {
#pragma unroll
    for (int lane = 16; lane; lane /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
    return x;
}
__device__ float warp_sum(float x) {
#pragma unroll
    for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
    return x;
}
// m, or 0 for -inf: what to subtract where all elements are -inf, so that -inf - m is -inf and not NaN.
__device__ float finite_or_zero(float m) { return __float_as_uint(m) == 0xff800000u ? 0 : m; }

// exp(x - m) = two_to(x * by + plus) * back: one fma before the exponential. The fma does not round the product, but
// plus is rounded: `back` corrects that, so that x - m is exact however large both are. From 2^29 on, different numbers
// are so far apart that the exponential is 0 to any base, and the rounding error of plus could overflow: there
// `by` is 1.
struct Exponent {
    float by, plus, back;
};
__device__ Exponent relative_to(float m) {
    Exponent e;
    e.by = fabsf(m) < 536870912.0f ? LOG2_E : 1;
    e.plus = __fmul_rn(-m, e.by);
    e.back = two_to(-fmaf(m, e.by, e.plus));
    return e;
}

__device__ void init_and_arrive(Exchange& e) {
    constexpr int BYTES = PARTS * (SMOOTH ? 16 : 8);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(at(&e.full)) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at(&e.full)), "r"(BYTES) : "memory");
    }
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

__device__ u32 in_cta(u32 address, int rank) {  // the same variable in another CTA of the cluster
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
// Sends a warp's part to all CTAs of the cluster: lane i to CTA i.
__device__ void send(Exchange& e, const Part& mine, int slot) {
    const int lane = threadIdx.x % 32;
    if (lane >= CLUSTER) return;
    const u32 to = in_cta(at(&e.parts[slot]), lane), full = in_cta(at(&e.full), lane);
    if constexpr (SMOOTH)
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];"
            ::"r"(to), "r"(full), "f"(mine.m), "f"(mine.s), "f"(mine.sum), "f"(mine.count) : "memory");
    else
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%2, %3}, [%1];"
            ::"r"(to), "r"(full), "f"(mine.m), "f"(mine.s) : "memory");
}
__device__ void wait(Exchange& e) {
    asm volatile(
        "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared.b64 p, [%0], 0;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}"
        ::"r"(at(&e.full)) : "memory");
}
// Statistics of the row. All warps combine the parts in the same order, so that all get the same, deterministic result.
__device__ Part receive(Exchange& e) {
    constexpr int EACH = (PARTS + 31) / 32;  // parts of a lane
    const int lane = threadIdx.x % 32;
    const volatile Part* const parts = e.parts;  // volatile, read twice: no registers are left to hold them
    Part row = {-__int_as_float(0x7f800000), 0, 0, 0};
    wait(e);
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (PARTS % 32 == 0 || i * 32 + lane < PARTS) row.m = fmaxf(row.m, parts[i * 32 + lane].m);
    row.m = warp_max(row.m);
    const float m = finite_or_zero(row.m);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        if (PARTS % 32 && i * 32 + lane >= PARTS) break;
        const volatile Part& part = parts[i * 32 + lane];
        const float its = part.m;
        row.s += part.s * two_to((its - m) * LOG2_E);
        if (SMOOTH) row.sum += part.sum + part.count * (finite_or_zero(its) - m);
    }
    row.s = warp_sum(row.s);
    if (SMOOTH) row.sum = warp_sum(row.sum);
    return row;
}

// A row is vocab / PER_VECTOR vectors of 16 bytes, of which each CTA has `slice` and the last CTA the rest; stride and
// stride_grad are in vectors. partial not null: reduction sum or mean, and the loss of each row goes there; else it
// goes to loss_ptr, and the z-loss to z_ptr if that is not null. counts not null: reduction mean; `shares` partial
// counts, whose sum is the number of rows that are not ignored. lse_ptr may be null. spread = smoothing / vocab.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, RESIDENT)
cross_entropy_cluster_fwd_grad(const Vector* logits, const void* targets, const float* counts, void* loss_ptr,
                               void* z_ptr, float* lse_ptr, float* partial, Vector* grad, int rows, int vocab,
                               int slice, int shares, i64 stride, i64 stride_target, i64 stride_grad, i64 ignore_index,
                               float smoothing, float spread, float z_loss) {
    __shared__ Exchange exchange;
    const int thread = threadIdx.x, lane = thread % 32, part = blockIdx.x % CLUSTER, row = blockIdx.x / CLUSTER;
    const int start = part * slice, count = min(slice, vocab / PER_VECTOR - start);  // vectors of this CTA
    const Vector* const from = logits + row * stride + start;
    Vector* const to = grad + row * stride_grad + start;
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(policy));
    Vector v[VECTORS];

    init_and_arrive(exchange);
#pragma unroll
    for (int i = 0; i < 4 * VECTORS; ++i) v[i / 4].words[i % 4] = LOWEST;
    const i64 target = TARGET == 64 ? static_cast<const i64*>(targets)[row * stride_target]
                                    : static_cast<const int*>(targets)[row * stride_target];
    const bool live = target != ignore_index;
    if (live && (target < 0 || target >= vocab) && part == 0 && thread == 0)
        __assertfail("cross_entropy: target must be ignore_index or in [0, vocabulary)", "cluster.cu", __LINE__,
                     "cross_entropy_cluster_fwd_grad", 1);
    const int wanted = live || lse_ptr ? count - thread : 0;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) load(v[i], from + thread + i * THREADS, i * THREADS < wanted, policy);
    // The row's loss is computed by the thread that has the target's column; in an ignored row, column 0.
    const u32 column = (live ? static_cast<u32>(target) : 0) - start * PER_VECTOR;
    const bool owner = column < count * PER_VECTOR && column / PER_VECTOR % THREADS == thread;
    if (owner && live) exchange.target = element(from, column);
    cluster_wait();

    u32 best[4] = {LOWEST, LOWEST, LOWEST, LOWEST};
#pragma unroll
    for (int i = 0; i < 4 * VECTORS; ++i) best[i % 4] = larger(best[i % 4], v[i / 4].words[i % 4]);
    float pair[PER_WORD], s[4] = {}, sum[4] = {}, n = 0;
    unpack<TYPE>(larger(larger(best[0], best[1]), larger(best[2], best[3])), pair);
    const float m_warp = warp_max(fmaxf(pair[0], pair[PER_WORD - 1])), shift = finite_or_zero(m_warp);
    const Exponent to_warp = relative_to(shift);
    // Without a branch for each vector ptxas would unpack all of them first, and spill.
    int end = opaque(count - thread);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (i * THREADS >= end) break;
        n += PER_VECTOR;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float x[PER_WORD];
            unpack<TYPE>(v[i].words[j], x);
            for (int k = 0; k < PER_WORD; ++k) {
                s[j] += two_to(fmaf(x[k], to_warp.by, to_warp.plus));
                if (SMOOTH) sum[j] += x[k] - shift;
            }
        }
    }
    Part found = {m_warp, warp_sum((s[0] + s[1]) + (s[2] + s[3])) * to_warp.back, 0, 0};
    if (SMOOTH) found.sum = warp_sum((sum[0] + sum[1]) + (sum[2] + sum[3])), found.count = warp_sum(n);
    send(exchange, found, part * WARPS + thread / 32);

    float g = 1;  // the incoming gradient of the row's loss
    if (counts)
        g = __fdividef(1, warp_sum((lane < shares ? counts[lane] : 0) + (lane + 32 < shares ? counts[lane + 32] : 0)));
    found = receive(exchange);

    // The gradient is (p - [this is the target]) * at_target + p * rest - each, with p = exp(x - m) / s.
    const Exponent to_row = relative_to(found.m);
    const float scale = to_row.back * __fdividef(1, found.s);
    const float at_target = SMOOTH ? g * (1 - smoothing) : g, each = SMOOTH ? g * spread : 0;
    float rest = SMOOTH ? each * vocab : 0;
    if (Z) rest += g * 2 * z_loss * (found.m + logf(found.s));
    if (owner) {
        const float log_s = logf(found.s), lse = found.m == __int_as_float(0x7f800000) ? found.m : found.m + log_s;
        float loss = 0, z = 0;
        if (live) {
            const float x = exchange.target, p = two_to(fmaf(x, to_row.by, to_row.plus)) * scale;
            exchange.target = (p - 1) * at_target + p * rest - each;
            loss = (found.m - x) + log_s;
            if (SMOOTH) loss = (1 - smoothing) * loss + spread * (vocab * log_s - found.sum);
            if (Z) z = z_loss * lse * lse;
        }
        if (lse_ptr) lse_ptr[row] = lse;
        if (partial) {
            partial[row] = loss;
            if (Z) partial[rows + row] = z;
            if (counts) partial[2 * static_cast<i64>(rows) + row] = live;
        } else {
            put<LOSS>(loss_ptr, row, loss + z);
            if (z_ptr) put<LOSS>(z_ptr, row, z);
        }
    }
    end = opaque(end);
    if (!live) {
        const Vector zeros = {};
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            if (i * THREADS >= end) break;
            store(to + thread + i * THREADS, zeros);
        }
        return;
    }
    const float factor = scale * (at_target + rest);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (i * THREADS >= end) break;
        Vector out;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float x[PER_WORD];
            unpack<TYPE>(opaque(v[i].words[j]), x);
            for (int k = 0; k < PER_WORD; ++k)
                x[k] = two_to(fmaf(x[k], to_row.by, to_row.plus)) * factor - each;
            out.words[j] = pack<TYPE>(x[0], x[PER_WORD - 1]);
        }
        store(to + thread + i * THREADS, out);
    }
    if (owner) put<TYPE>(to, column, exchange.target);
}
