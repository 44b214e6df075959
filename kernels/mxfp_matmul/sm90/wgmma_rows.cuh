// wgmmas of 64 x N x 16 for N rows of x, with A in registers, and the shared memory descriptor of B.
#pragma once

#include "numbers.cuh"
#include "wgmma.cuh"

#define ROW4(b) "+f"(d[b]), "+f"(d[b + 1]), "+f"(d[b + 2]), "+f"(d[b + 3])
#define ROW8(b) ROW4(b), ROW4(b + 4)
#define ROW64(b) ROW8(b), ROW8(b + 8), ROW8(b + 16), ROW8(b + 24), ROW8(b + 32), ROW8(b + 40), ROW8(b + 48), ROW8(b + 56)
#define L4(a, b, c, d) "%" #a ",%" #b ",%" #c ",%" #d
#define L8F(a, b, c, d, e, f, g, h) L4(a, b, c, d) "," L4(e, f, g, h)
#define L8 L4(0, 1, 2, 3) "," L4(4, 5, 6, 7)
#define L16 L8 "," L4(8, 9, 10, 11) "," L4(12, 13, 14, 15)
#define L32 L16 "," L4(16, 17, 18, 19) "," L4(20, 21, 22, 23) "," L4(24, 25, 26, 27) "," L4(28, 29, 30, 31)
#define L64                                                                                                           \
    L32 "," L8F(32, 33, 34, 35, 36, 37, 38, 39) "," L8F(40, 41, 42, 43, 44, 45, 46, 47) ","                           \
    L8F(48, 49, 50, 51, 52, 53, 54, 55) "," L8F(56, 57, 58, 59, 60, 61, 62, 63)
#define L128                                                                                                          \
    L64 "," L8F(64, 65, 66, 67, 68, 69, 70, 71) "," L8F(72, 73, 74, 75, 76, 77, 78, 79) ","                           \
    L8F(80, 81, 82, 83, 84, 85, 86, 87) "," L8F(88, 89, 90, 91, 92, 93, 94, 95) ","                                   \
    L8F(96, 97, 98, 99, 100, 101, 102, 103) "," L8F(104, 105, 106, 107, 108, 109, 110, 111) ","                       \
    L8F(112, 113, 114, 115, 116, 117, 118, 119) "," L8F(120, 121, 122, 123, 124, 125, 126, 127)

// d (64 x N, fp32) += a b over 16 columns of a; b is K-major. I0 ... I4 are the numbers of the asm operands after d.
#define DEFINE_WGMMA(N, LIST, I0, I1, I2, I3, I4, ...)                                                                \
    DEVICE void wgmma(float (&d)[N / 2], const u32* a, u64 b) {                                                       \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                                  \
                     " {" LIST "}, {%" #I0 ",%" #I1 ",%" #I2 ",%" #I3 "}, %" #I4 ", 1, 1, 1, 0;"                      \
                     : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                             \
    }
DEFINE_WGMMA(8, L4(0, 1, 2, 3), 4, 5, 6, 7, 8, ROW4(0))
DEFINE_WGMMA(16, L8, 8, 9, 10, 11, 12, ROW8(0))
DEFINE_WGMMA(32, L16, 16, 17, 18, 19, 20, ROW8(0), ROW8(8))
DEFINE_WGMMA(64, L32, 32, 33, 34, 35, 36, ROW8(0), ROW8(8), ROW8(16), ROW8(24))
DEFINE_WGMMA(256, L128, 128, 129, 130, 131, 132, ROW64(0), ROW64(64))

// The shared memory descriptor of an operand with 128-byte swizzle; its groups of 8 rows of 128 bytes are contiguous.
DEVICE u64 describe(u32 address) { return (u64)(1u << 30 | 1024 >> 4) << 32 | (address & 0x3ffff) >> 4; }
