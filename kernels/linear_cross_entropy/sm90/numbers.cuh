// A copy of parts/sm90/numbers.cuh, made by `nox -s vendor`: change it there.
// exp2, and conversion between fp32 and the 16-bit dtype of a kernel: fp16 where FP16 is 1, otherwise bf16.
#pragma once

#include "types.cuh"

#if FP16
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif

DEVICE float exp2_(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE u32 pack(float low, float high) {
    u32 y;
    asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
DEVICE float widen(u16 x) {
#if FP16
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
#else
    return __uint_as_float((u32)x << 16);
#endif
}
