// PTX instructions of the kernel: on the two 16-bit halves of a register, conversions to 8 bits, a load.
#pragma once

#include "types.cuh"

DEVICE u32 both(u32 bits) { return bits * 0x10001; }

DEVICE u32 larger(u32 a, u32 b) {
    u32 y;
    asm("max.u16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
DEVICE u32 smaller(u32 a, u32 b) {
    u32 y;
    asm("min.u16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
// In bf16, subnormal numbers included.
DEVICE u32 product(u32 a, u32 b) {
    u32 y;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
DEVICE u32 added(u32 a, u32 b) {
    u32 y;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
// The lower halves of a and b, and the upper ones; a's is the lower of the result.
DEVICE u32 lower(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
DEVICE u32 upper(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }

// Hides from the compiler what it knows about x.
DEVICE void pin(u32& x) { asm volatile("" : "+r"(x)); }

// Two bytes, `low` in the lower one: rounded to nearest, ties to even, saturating.
DEVICE u32 to_e4m3(float low, float high) {
    u16 y;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
    return y;
}
DEVICE u32 to_e5m2(float low, float high) {
    u16 y;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
    return y;
}

// For data that is read once: no line of L1 is allocated.
DEVICE u32 load(const char* at) {
    u32 x;
    asm("ld.global.nc.L1::no_allocate.b32 %0, [%1];" : "=r"(x) : "l"(at));
    return x;
}
