// A copy of parts/sm90/scheduler.cuh, made by `nox -s vendor`: change it there.
// For tile schedulers: exchange of indices between warps through shared memory, and the counter in global memory from
// which persistent CTAs take the index of their next tile.
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
// Takes an index from the tile scheduler's counter. ptxas would turn atomicAdd into a warp-aggregated add, with a
// shuffle that waits; not this bounded increment.
DEVICE int draw(int* counter) {
    int number;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7fffffff;" : "=r"(number) : "l"(counter) : "memory");
    return number;
}
