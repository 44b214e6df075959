// PTX of forward.cu beyond the shared headers: its wgmma instructions, and communication between warps.
#pragma once

#include "mbarrier.cuh"
#include "numbers.cuh"
#include "scheduler.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

#define ROW8(b) "+f"(d[b]), "+f"(d[b + 1]), "+f"(d[b + 2]), "+f"(d[b + 3]), \
                "+f"(d[b + 4]), "+f"(d[b + 5]), "+f"(d[b + 6]), "+f"(d[b + 7])
#define ROW32(b) ROW8(b), ROW8(b + 8), ROW8(b + 16), ROW8(b + 24)
#define L8(a, b, c, d, e, f, g, h) "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h
#define L16 L8(0, 1, 2, 3, 4, 5, 6, 7) "," L8(8, 9, 10, 11, 12, 13, 14, 15)
#define L32 L16 "," L8(16, 17, 18, 19, 20, 21, 22, 23) "," L8(24, 25, 26, 27, 28, 29, 30, 31)
#define L64 L32 "," L8(32, 33, 34, 35, 36, 37, 38, 39) "," L8(40, 41, 42, 43, 44, 45, 46, 47) "," \
            L8(48, 49, 50, 51, 52, 53, 54, 55) "," L8(56, 57, 58, 59, 60, 61, 62, 63)

// d (64 x N, fp32) = a b, or d + a b if `add`, with K = 16. _ss: a from shared memory; _rs: a from registers. b is
// K-major, or MN-major if TRANSPOSED. I0 ... I6: indices of the asm operands that follow d.
#define DEFINE_WGMMA(N, LIST, I0, I1, I2, I3, I4, I5, I6, ...)                                                        \
    DEVICE void wgmma_ss(float (&d)[N / 2], u64 a, u64 b, int add) {                                                  \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #I2 ", 0;\n"                                                  \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                                  \
                     " {" LIST "}, %" #I0 ", %" #I1 ", p, 1, 1, 0, 0; }"                                              \
                     : __VA_ARGS__ : "l"(a), "l"(b), "r"(add));                                                       \
    }                                                                                                                 \
    template <int TRANSPOSED> DEVICE void wgmma_rs(float (&d)[N / 2], const u32* a, u64 b, int add) {                 \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #I5 ", 0;\n"                                                  \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                                  \
                     " {" LIST "}, {%" #I0 ",%" #I1 ",%" #I2 ",%" #I3 "}, %" #I4 ", p, 1, 1, %" #I6 "; }"             \
                     : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANSPOSED));  \
    }
DEFINE_WGMMA(64, L32, 32, 33, 34, 35, 36, 37, 38, ROW32(0))
DEFINE_WGMMA(128, L64, 64, 65, 66, 67, 68, 69, 70, ROW32(0), ROW32(32))

// wgmma's matrix descriptor of an operand in shared memory with 128-byte swizzle: groups of 8 rows are 1024 bytes apart
// and, for an MN-major operand, panels of 64 columns are `panel` bytes apart.
DEVICE u64 make_descriptor(u32 address, u32 panel) {
    return (u64)(1u << 30 | 1024 >> 4) << 32 | panel >> 4 << 16 | (address & 0x3ffff) >> 4;
}

// ---- Communication between warps ------------------------------------------------------------------------------------

DEVICE int4 load_shared4(u32 address) {
    int4 x;
    asm volatile("ld.shared::cta.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
    return x;
}
DEVICE void store_shared4(u32 address, int4 x) {
    asm volatile("st.shared::cta.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}
DEVICE void fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Named barriers of two warp groups: one waits, the other arrives.
DEVICE void named_wait(int name) { asm volatile("bar.sync %0, 256;" ::"r"(name) : "memory"); }
DEVICE void named_arrive(int name) { asm volatile("bar.arrive %0, 256;" ::"r"(name) : "memory"); }

// ---- Registers and memory -------------------------------------------------------------------------------------------

// Four 8 x 8 matrices of 16-bit elements. Lane i gives the address of row i % 8 of matrix i / 8.
DEVICE void load_matrices(u32* x, u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
}
template <int COUNT> DEVICE void dec_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEVICE void inc_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
// One 16-byte store. ptxas would split it for lack of four consecutive registers.
DEVICE void store_global4(void* to, uint4 x) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
// Volatile: read at each call, never hoisted.
DEVICE int lane_number() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}
// x becomes -inf where column >= limit. Predicated and in place, because for a branch ptxas allocates the registers
// twice.
DEVICE void hide_from(float& x, int column, int limit) {
    asm volatile("{ .reg .pred p; setp.ge.s32 p, %1, %2; @p mov.b32 %0, 0xff800000; }"
                 : "+f"(x) : "r"(column), "r"(limit));
}
