// Copies of scales to shared memory, and loads from there.
#pragma once

#include "types.cuh"

// Copies one fp32 value, or writes zero and reads nothing.
DEVICE void copy_scale(u32 to, const float* from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(there ? 4 : 0) : "memory");
}

DEVICE float load_float(u32 address) {
    float x;
    asm volatile("ld.shared::cta.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}

DEVICE float4 load_four(u32 address) {
    float4 x;
    asm volatile("ld.shared::cta.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(address) : "memory");
    return x;
}

DEVICE float2 load_two(u32 address) {
    float2 x;
    asm volatile("ld.shared::cta.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
    return x;
}
