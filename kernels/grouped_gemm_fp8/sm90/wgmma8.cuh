// A copy of parts/sm90/wgmma8.cuh, made by `nox -s vendor`: change it there.
// One wgmma of 64 x N x 32 of fp8, and the matrix descriptor of its operands. The launcher defines A_E4M3 and B_E4M3.
#pragma once

#include "types.cuh"

#if A_E4M3
#define A_TYPE "e4m3"
#else
#define A_TYPE "e5m2"
#endif
#if B_E4M3
#define B_TYPE "e4m3"
#else
#define B_TYPE "e5m2"
#endif

#define ROW8(b) "+f"(d[b]), "+f"(d[b + 1]), "+f"(d[b + 2]), "+f"(d[b + 3]), \
                "+f"(d[b + 4]), "+f"(d[b + 5]), "+f"(d[b + 6]), "+f"(d[b + 7])
#define ROW4(b) "+f"(d[b]), "+f"(d[b + 1]), "+f"(d[b + 2]), "+f"(d[b + 3])
#define ROW32(b) ROW8(b), ROW8(b + 8), ROW8(b + 16), ROW8(b + 24)
#define L8(a, b, c, d, e, f, g, h) "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h
#define L16 L8(0, 1, 2, 3, 4, 5, 6, 7) "," L8(8, 9, 10, 11, 12, 13, 14, 15)
#define L32 L16 "," L8(16, 17, 18, 19, 20, 21, 22, 23) "," L8(24, 25, 26, 27, 28, 29, 30, 31)
#define L64 L32 "," L8(32, 33, 34, 35, 36, 37, 38, 39) "," L8(40, 41, 42, 43, 44, 45, 46, 47) ","                     \
            L8(48, 49, 50, 51, 52, 53, 54, 55) "," L8(56, 57, 58, 59, 60, 61, 62, 63)
#define L96 L64 "," L8(64, 65, 66, 67, 68, 69, 70, 71) "," L8(72, 73, 74, 75, 76, 77, 78, 79) ","                     \
            L8(80, 81, 82, 83, 84, 85, 86, 87) "," L8(88, 89, 90, 91, 92, 93, 94, 95)
#define L128 L96 "," L8(96, 97, 98, 99, 100, 101, 102, 103) "," L8(104, 105, 106, 107, 108, 109, 110, 111) ","                \
             L8(112, 113, 114, 115, 116, 117, 118, 119) "," L8(120, 121, 122, 123, 124, 125, 126, 127)

// d (64 x N, fp32) = a b, or with `add` d += a b. Both operands are K-major, as wgmma requires of 8-bit types. I0, I1,
// I2 are the numbers of the asm operands after d.
#define DEFINE_WGMMA(N, LIST, I0, I1, I2, ...)                                                                        \
    DEVICE void wgmma(float (&d)[N / 2], u64 a, u64 b, int add) {                                                     \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #I2 ", 0;\n"                                                  \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." A_TYPE "." B_TYPE                              \
                     " {" LIST "}, %" #I0 ", %" #I1 ", p, 1, 1; }"                                                    \
                     : __VA_ARGS__ : "l"(a), "l"(b), "r"(add));                                                       \
    }
DEFINE_WGMMA(8, "%0,%1,%2,%3", 4, 5, 6, ROW4(0))
DEFINE_WGMMA(16, L8(0, 1, 2, 3, 4, 5, 6, 7), 8, 9, 10, ROW8(0))
DEFINE_WGMMA(32, L16, 16, 17, 18, ROW8(0), ROW8(8))
DEFINE_WGMMA(64, L32, 32, 33, 34, ROW32(0))
DEFINE_WGMMA(128, L64, 64, 65, 66, ROW32(0), ROW32(32))
DEFINE_WGMMA(192, L96, 96, 97, 98, ROW32(0), ROW32(32), ROW32(64))
DEFINE_WGMMA(256, L128, 128, 129, 130, ROW32(0), ROW32(32), ROW32(64), ROW32(96))

// wgmma's matrix descriptor of an operand with 128-byte swizzle: groups of 8 rows of 128 bytes lie 1024 bytes apart.
DEVICE u64 describe(u32 address) { return (u64)(1u << 30 | 1024 >> 4) << 32 | (address & 0x3ffff) >> 4; }
