// A copy of parts/sm90/scheduler.cuh, made by `nox -s vendor`: change it there.
// What warps pass on through shared memory, and the counter from which persistent CTAs draw their tiles.
#pragma once

#include "types.cuh"

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
