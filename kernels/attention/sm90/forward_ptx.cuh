// PTX of forward.cu beyond the shared headers: its wgmma instructions.
#pragma once

#include "mbarrier.cuh"
#include "numbers.cuh"
#include "scheduler.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

#define ROW8(b) "+f"(d[b]), "+f"(d[b + 1]), "+f"(d[b + 2]), "+f"(d[b + 3]), \
                "+f"(d[b + 4]), "+f"(d[b + 5]), "+f"(d[b + 6]), "+f"(d[b + 7])
#define ROW32(b) ROW8(b), ROW8(b + 8), ROW8(b + 16), ROW8(b + 24)
#define L8(a, b, c, d, e, f, g, h) "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h
#define L16 L8(0, 1, 2, 3, 4, 5, 6, 7) "," L8(8, 9, 10, 11, 12, 13, 14, 15)
#define L32 L16 "," L8(16, 17, 18, 19, 20, 21, 22, 23) "," L8(24, 25, 26, 27, 28, 29, 30, 31)
#define L40 L32 "," L8(32, 33, 34, 35, 36, 37, 38, 39)
#define L56 L40 "," L8(40, 41, 42, 43, 44, 45, 46, 47) "," L8(48, 49, 50, 51, 52, 53, 54, 55)
#define L64 L56 "," L8(56, 57, 58, 59, 60, 61, 62, 63)

// d (64 x N, fp32) = a b, or d + a b if `add`, with K = 16. _ss: a from shared memory; _rs: a from registers. b is
// K-major, or MN-major if TRANSPOSED. I0 ... I6: indices of the asm operands that follow d.
#define DEFINE_WGMMA(N, LIST, I0, I1, I2, I3, I4, I5, I6, ...)                                                        \
    DEVICE void wgmma_ss(float (&d)[N / 2], u64 a, u64 b, int add) {                                                  \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #I2 ", 0;\n"                                                  \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                                  \
                     " {" LIST "}, %" #I0 ", %" #I1 ", p, 1, 1, 0, 0; }"                                              \
                     : __VA_ARGS__ : "l"(a), "l"(b), "r"(add));                                                       \
    }                                                                                                                 \
    template <int TRANSPOSED> DEVICE void wgmma_rs(float (&d)[N / 2], const u32* a, u64 b, int add) {                 \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #I5 ", 0;\n"                                                  \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                                  \
                     " {" LIST "}, {%" #I0 ",%" #I1 ",%" #I2 ",%" #I3 "}, %" #I4 ", p, 1, 1, %" #I6 "; }"             \
                     : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANSPOSED));  \
    }
DEFINE_WGMMA(64, L32, 32, 33, 34, 35, 36, 37, 38, ROW32(0))
DEFINE_WGMMA(80, L40, 40, 41, 42, 43, 44, 45, 46, ROW32(0), ROW8(32))
DEFINE_WGMMA(112, L56, 56, 57, 58, 59, 60, 61, 62, ROW32(0), ROW8(32), ROW8(40), ROW8(48))
DEFINE_WGMMA(128, L64, 64, 65, 66, 67, 68, 69, 70, ROW32(0), ROW32(32))

// wgmma's matrix descriptor of an operand in shared memory with 128-byte swizzle: groups of 8 rows are 1024 bytes apart
// and, for an MN-major operand, panels of 64 columns are `panel` bytes apart.
DEVICE u64 make_descriptor(u32 address, u32 panel) {
    return (u64)(1u << 30 | 1024 >> 4) << 32 | panel >> 4 << 16 | (address & 0x3ffff) >> 4;
}

// One 16-byte store. ptxas would split it for lack of four consecutive registers.
DEVICE void store_global4(void* to, uint4 x) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
