// One sparse wgmma of 64 x 256 x 32 (in 8 bits 64 x 256 x 64), and its shared memory descriptors.
#pragma once

#include "numbers.cuh"
#include "types.cuh"

#if FP8  // K of the instruction, types of w and x; fp8 operands are always K-major
#define STEP "k64"
#define MAJOR ""
#if W_E4M3
#define W_TYPE "e4m3"
#else
#define W_TYPE "e5m2"
#endif
#if X_E4M3
#define X_TYPE "e4m3"
#else
#define X_TYPE "e5m2"
#endif
#else
#define STEP "k32"
#define W_TYPE TYPE
#define X_TYPE TYPE
#define MAJOR ", 0, 0"
#endif

#define ROW8(b) "+f"(d[b]), "+f"(d[b + 1]), "+f"(d[b + 2]), "+f"(d[b + 3]), \
                "+f"(d[b + 4]), "+f"(d[b + 5]), "+f"(d[b + 6]), "+f"(d[b + 7])
#define ROW32(b) ROW8(b), ROW8(b + 8), ROW8(b + 16), ROW8(b + 24)
#define L8(a, b, c, d, e, f, g, h) "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h
#define L32 L8(0, 1, 2, 3, 4, 5, 6, 7) "," L8(8, 9, 10, 11, 12, 13, 14, 15) ","                                       \
            L8(16, 17, 18, 19, 20, 21, 22, 23) "," L8(24, 25, 26, 27, 28, 29, 30, 31)
#define L64 L32 "," L8(32, 33, 34, 35, 36, 37, 38, 39) "," L8(40, 41, 42, 43, 44, 45, 46, 47) ","                     \
            L8(48, 49, 50, 51, 52, 53, 54, 55) "," L8(56, 57, 58, 59, 60, 61, 62, 63)
#define L128 L64 "," L8(64, 65, 66, 67, 68, 69, 70, 71) "," L8(72, 73, 74, 75, 76, 77, 78, 79) ","                    \
             L8(80, 81, 82, 83, 84, 85, 86, 87) "," L8(88, 89, 90, 91, 92, 93, 94, 95) ","                            \
             L8(96, 97, 98, 99, 100, 101, 102, 103) "," L8(104, 105, 106, 107, 108, 109, 110, 111) ","                \
             L8(112, 113, 114, 115, 116, 117, 118, 119) "," L8(120, 121, 122, 123, 124, 125, 126, 127)

// d (64 x 256, fp32) += a b. a is sparse: 64 x 16 values that represent 64 x 32. Its metadata is in two of each four
// lanes, which SELECTOR selects (0: lanes 0 and 1; 1: lanes 2 and 3). In 8 bits 64 x 32 values represent 64 x 64, their
// metadata is in all lanes, and SELECTOR is 0. Both operands are K-major. The predicate is scale-d: d is always added
// to, and starts as zeros.
template <int SELECTOR> DEVICE void wgmma_sparse(float (&d)[128], u64 a, u64 b, u32 metadata) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %131, 0;\n"
                 "wgmma.mma_async.sp.sync.aligned.m64n256" STEP ".f32." W_TYPE "." X_TYPE
                 " {" L128 "}, %128, %129, %130, %132, p, 1, 1" MAJOR "; }"
                 : ROW32(0), ROW32(32), ROW32(64), ROW32(96)
                 : "l"(a), "l"(b), "r"(metadata), "r"(1), "n"(SELECTOR));
}

// Shared memory descriptors of operands whose rows have 128 bytes with the 128-byte swizzle, or 64 bytes with the
// 64-byte swizzle. Groups of 8 rows are contiguous.
DEVICE u64 describe128(u32 address) { return (u64)(1u << 30 | 1024 >> 4) << 32 | (address & 0x3ffff) >> 4; }
DEVICE u64 describe64(u32 address) { return (u64)(2u << 30 | 512 >> 4) << 32 | (address & 0x3ffff) >> 4; }
