// What the kernels for Hopper need of PTX: barriers, TMA, wgmma's own instructions, conversions. FP16 says which 16-bit
// type matrices have. The products themselves are each kernel's, for their shapes are.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define DEVICE __device__ __forceinline__

struct alignas(64) TensorMap { char bytes[128]; };  // CUtensorMap

#if FP16
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif

// ---- wgmma --------------------------------------------------------------------------------------------------------

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Nothing is computed from these registers before this point, nor moved behind it: a wgmma is reading or writing them.
template <int N> DEVICE void pin(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}
template <int N> DEVICE void pin(u32 (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(x[i])::"memory");
}

// ---- Barriers -----------------------------------------------------------------------------------------------------

DEVICE void bar_init(u32 bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
DEVICE void bar_wait(u32 bar, u32 parity) {
    asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again; }"
                 ::"r"(bar), "r"(parity) : "memory");
}
DEVICE void bar_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
DEVICE void bar_expect(u32 bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

// ---- What warps and CTAs tell each other --------------------------------------------------------------------------

DEVICE int load_shared(u32 address) {
    int x;
    asm volatile("ld.shared::cta.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}
DEVICE void store_shared(u32 address, int x) {
    asm volatile("st.shared::cta.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
// Takes a number from a counter. Of an addition ptxas may make one for all active threads, with a shuffle that waits;
// of this, which counts up to a bound, it does not.
DEVICE int draw(int* counter) {
    int number;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7fffffff;" : "=r"(number) : "l"(counter) : "memory");
    return number;
}

// ---- TMA and numbers ----------------------------------------------------------------------------------------------

DEVICE void tma_load(u32 to, const TensorMap* map, int column, int row, int head, int batch, u32 bar) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2,%3,%4,%5}], [%6];"
                 ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(bar) : "memory");
}
DEVICE float exp2_(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE u32 pack(float low, float high) {
    u32 y;
    asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
