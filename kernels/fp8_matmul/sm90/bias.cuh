// A bias whose dtype BIAS selects: 0 none, 1 bf16, 2 fp16, 3 fp32.
#pragma once

#include "types.cuh"

DEVICE float load_bias(const void* bias, u64 at) {
    if (BIAS == 3) return ((const float*)bias)[at];
    const u16 bits = ((const u16*)bias)[at];
    float x = __uint_as_float((u32)bits << 16);
    if (BIAS == 2) asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
