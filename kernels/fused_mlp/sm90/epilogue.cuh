// Words of two 16-bit elements, and 16-byte loads and stores in the layout of the accumulators.
#pragma once

#include "activation.cuh"
#include "numbers.cuh"
#include "types.cuh"

DEVICE float low(u32 word) { return widen(word & 0xffff); }
DEVICE float high(u32 word) { return widen(word >> 16); }

DEVICE void exchange(u32& kept_low, u32& kept_high, int bit) {
    const bool upper = threadIdx.x & bit;
    const u32 got = __shfl_xor_sync(~0u, upper ? kept_low : kept_high, bit);
    if (upper) kept_low = got;
    else kept_high = got;
}

// Transposes 4 x 4 words of four adjacent lanes: word i of lane q becomes word q of lane i. A thread has two columns of
// each of four blocks of 8 columns, but loads or stores all of one block: 16 bytes.
DEVICE void transpose(u32 (&w)[4]) {
    exchange(w[0], w[1], 1);
    exchange(w[2], w[3], 1);
    exchange(w[0], w[2], 2);
    exchange(w[1], w[3], 2);
}
DEVICE void store_words(u16* to, bool inside, u32 (&w)[4]) {
    transpose(w);
    if (inside)
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                     ::"l"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
}
DEVICE void load_words(const u16* from, bool inside, u32 (&w)[4]) {
    w[0] = w[1] = w[2] = w[3] = 0;
    if (inside)
        asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(from));
    transpose(w);
}
