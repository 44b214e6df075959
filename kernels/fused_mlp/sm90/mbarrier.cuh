// A copy of parts/sm90/mbarrier.cuh, made by `nox -s vendor`: change it there.
// mbarriers in shared memory. A phase completes when all its arrivals have been made and all expected bytes are there.
#pragma once

#include "types.cuh"

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

// Waits until the whole warp's reads of shared memory are in registers. Without this, ptxas lets an arrival follow a
// read that is still in flight, and whoever sees the arrival, in another CTA or in this one, may have TMA overwrite
// what is still to be read: this was measured, with several processes that shared one GPU.
DEVICE void fence_reads() {
    asm volatile("fence.acq_rel.cta;" ::: "memory");
    __syncwarp();
}
