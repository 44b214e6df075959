// A copy of parts/sm90/wgmma.cuh, made by `nox -s vendor`: change it there.
// Fences and commit groups of wgmma. The wgmma.mma_async instructions are in each kernel, since their shapes differ.
#pragma once

#include "types.cuh"

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// A compiler barrier for these registers, which a wgmma in flight reads or writes: no use of them moves across it.
template <int N> DEVICE void pin(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}
template <int N> DEVICE void pin(u32 (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(x[i])::"memory");
}
