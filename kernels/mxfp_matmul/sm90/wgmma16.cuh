// A copy of parts/sm90/wgmma16.cuh, made by `nox -s vendor`: change it there.
// wgmma of 64 x N x 16 for N of 128 and 256, and the matrix descriptor of its operands.
#pragma once

#include "numbers.cuh"
#include "types.cuh"

#define D8(b) "+f"(d[b]), "+f"(d[b + 1]), "+f"(d[b + 2]), "+f"(d[b + 3]), \
              "+f"(d[b + 4]), "+f"(d[b + 5]), "+f"(d[b + 6]), "+f"(d[b + 7])
#define D64(b) D8(b), D8(b + 8), D8(b + 16), D8(b + 24), D8(b + 32), D8(b + 40), D8(b + 48), D8(b + 56)
#define N8(a, b, c, d, e, f, g, h) "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h
#define N64                                                                                                           \
    N8(0, 1, 2, 3, 4, 5, 6, 7) "," N8(8, 9, 10, 11, 12, 13, 14, 15) "," N8(16, 17, 18, 19, 20, 21, 22, 23) ","        \
    N8(24, 25, 26, 27, 28, 29, 30, 31) "," N8(32, 33, 34, 35, 36, 37, 38, 39) ","                                     \
    N8(40, 41, 42, 43, 44, 45, 46, 47) "," N8(48, 49, 50, 51, 52, 53, 54, 55) "," N8(56, 57, 58, 59, 60, 61, 62, 63)
#define N128                                                                                                          \
    N64 "," N8(64, 65, 66, 67, 68, 69, 70, 71) "," N8(72, 73, 74, 75, 76, 77, 78, 79) ","                             \
    N8(80, 81, 82, 83, 84, 85, 86, 87) "," N8(88, 89, 90, 91, 92, 93, 94, 95) ","                                     \
    N8(96, 97, 98, 99, 100, 101, 102, 103) "," N8(104, 105, 106, 107, 108, 109, 110, 111) ","                         \
    N8(112, 113, 114, 115, 116, 117, 118, 119) "," N8(120, 121, 122, 123, 124, 125, 126, 127)

// d (64 x N, fp32) += a b, each operand K-major or, if transposed (A_ROWS, B_ROWS), MN-major. Accumulators are
// initialised with zeros, so that d is always read.
template <int A_ROWS, int B_ROWS> DEVICE void wgmma(float (&d)[64], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" N64 "}, %64, %65, 1, 1, 1, %66, %67;"
                 : D64(0) : "l"(a), "l"(b), "n"(A_ROWS), "n"(B_ROWS));
}
template <int A_ROWS, int B_ROWS> DEVICE void wgmma(float (&d)[128], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE
                 " {" N128 "}, %128, %129, 1, 1, 1, %130, %131;"
                 : D64(0), D64(64) : "l"(a), "l"(b), "n"(A_ROWS), "n"(B_ROWS));
}

// wgmma's matrix descriptor of an operand with 128-byte swizzle: groups of 8 rows of 128 bytes lie 1024 bytes apart
// and, if it is transposed, panels of 64 columns `panel` bytes apart.
DEVICE u64 describe(u32 address, u32 panel) {
    return (u64)(1u << 30 | 1024 >> 4) << 32 | panel >> 4 << 16 | (address & 0x3ffff) >> 4;
}
