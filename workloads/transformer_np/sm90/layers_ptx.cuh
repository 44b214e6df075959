// PTX that the other headers do not have: a product of one panel, sums sent to another CTA, memory that CTAs share.
#pragma once

#include "cluster.cuh"
#include "heads_ptx.cuh"
#include "numbers.cuh"
#include "types.cuh"
#include "wgmma.cuh"

// d (64 x 64, fp32) += a b, each operand K-major or, with A_ROWS or B_ROWS, contiguous along its other dimension.
template <int A_ROWS, int B_ROWS> DEVICE void wgmma_64(float (&d)[32], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" N32 "}, %32, %33, 1, 1, 1, %34, %35;"
                 : D8(0), D8(8), D8(16), D8(24) : "l"(a), "l"(b), "n"(A_ROWS), "n"(B_ROWS));
}

// Stores x at the same place of another CTA of the cluster, whose barrier at the same place counts its 4 bytes.
DEVICE void send(u32 address, u32 bar, int rank, float x) {
    asm volatile("{ .reg .b32 to, counts;\n"
                 "mapa.shared::cluster.u32 to, %0, %2; mapa.shared::cluster.u32 counts, %1, %2;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [to], %3, [counts]; }"
                 ::"r"(address), "r"(bar), "r"(rank), "f"(x) : "memory");
}
DEVICE float shared_float(u32 address) {
    float x;
    asm volatile("ld.shared::cta.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}

DEVICE void store_word(u32 address, u32 x) {
    asm volatile("st.shared::cta.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

// Has the L2 read a box of a tensor.
DEVICE void tma_prefetch(const TensorMap* map, int column, int row, int head) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1,%2,%3,%4}];"
                 ::"l"(map), "r"(column), "r"(row), "r"(head), "r"(0) : "memory");
}

// Between accesses to memory, this thread's and those of others that it has waited for, and TMA's to the same memory.
DEVICE void fence_for_tma_loads() { asm volatile("fence.proxy.async;" ::: "memory"); }

// A counter of CTAs that wrote what others are to read.
DEVICE void add_release(u32* at, u32 x) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}
DEVICE void wait_for_count(const u32* at, u32 count) {
    u32 x;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
    while (x < count);
}

// Loads that stay where they are written, so that they are under way during a product.
DEVICE float load_early(const float* at) {
    float x;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(x) : "l"(at) : "memory");
    return x;
}
DEVICE float load_early(const u16* at) {
    u16 x;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(x) : "l"(at) : "memory");
    return widen(x);
}
DEVICE u32 load_early(const u32* at) {
    u32 x;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
    return x;
}
// What other CTAs wrote during this launch.
DEVICE float4 load_shared_by_gpu(const float4* at) {
    float4 x;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(at) : "memory");
    return x;
}
DEVICE float2 unpack(u32 x) { return {widen((u16)x), widen((u16)(x >> 16))}; }
DEVICE void store_vector_global(u16* to, const u32 (&x)[4]) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"l"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
