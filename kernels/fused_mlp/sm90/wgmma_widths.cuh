// A copy of parts/sm90/wgmma_widths.cuh, made by `nox -s vendor`: change it there.
// wgmma of 64 x N x 16 for N of 160, 176 and 192, beside those of wgmma16.cuh.
#pragma once

#include "wgmma16.cuh"

#define N80 N64 "," N8(64, 65, 66, 67, 68, 69, 70, 71) "," N8(72, 73, 74, 75, 76, 77, 78, 79)
#define N88 N80 "," N8(80, 81, 82, 83, 84, 85, 86, 87)
#define N96 N88 "," N8(88, 89, 90, 91, 92, 93, 94, 95)

// I0 to I3 are the numbers of the asm operands after d.
#define DEFINE_WGMMA(N, LIST, I0, I1, I2, I3, ...)                                                                    \
    template <int A_ROWS, int B_ROWS> DEVICE void wgmma(float (&d)[N / 2], u64 a, u64 b) {                            \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                                  \
                     " {" LIST "}, %" #I0 ", %" #I1 ", 1, 1, 1, %" #I2 ", %" #I3 ";"                                  \
                     : __VA_ARGS__ : "l"(a), "l"(b), "n"(A_ROWS), "n"(B_ROWS));                                       \
    }
DEFINE_WGMMA(160, N80, 80, 81, 82, 83, D64(0), D8(64), D8(72))
DEFINE_WGMMA(176, N88, 88, 89, 90, 91, D64(0), D8(64), D8(72), D8(80))
DEFINE_WGMMA(192, N96, 96, 97, 98, 99, D64(0), D8(64), D8(72), D8(80), D8(88))
