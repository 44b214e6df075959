// A copy of parts/sm90/wgmma.cuh, made by `nox -s vendor`: change it there.
// Ordering of warpgroup matrix products (wgmma). The products themselves are each kernel's, for their shapes are.
#pragma once

#include "types.cuh"

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
