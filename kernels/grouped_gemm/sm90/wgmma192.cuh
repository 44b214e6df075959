// wgmma of 64 x 192 x 16, beside those of wgmma16.cuh.
#pragma once

#include "wgmma16.cuh"

#define N96                                                                                                           \
    N64 "," N8(64, 65, 66, 67, 68, 69, 70, 71) "," N8(72, 73, 74, 75, 76, 77, 78, 79) ","                             \
    N8(80, 81, 82, 83, 84, 85, 86, 87) "," N8(88, 89, 90, 91, 92, 93, 94, 95)

template <int A_ROWS, int B_ROWS> DEVICE void wgmma(float (&d)[96], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32." TYPE "." TYPE " {" N96 "}, %96, %97, 1, 1, 1, %98, %99;"
                 : D64(0), D8(64), D8(72), D8(80), D8(88) : "l"(a), "l"(b), "n"(A_ROWS), "n"(B_ROWS));
}
