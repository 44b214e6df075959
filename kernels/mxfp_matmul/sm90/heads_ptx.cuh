// A copy of parts/sm90/heads_ptx.cuh, made by `nox -s vendor`: change it there.
// PTX for kernels that keep operand a in registers: wgmma with a register operand, ldmatrix, stmatrix, mma, named
// barriers.
#pragma once

#include "numbers.cuh"
#include "tma_store.cuh"
#include "types.cuh"
#include "wgmma16.cuh"

#define WGMMA_FROM_REGISTERS(N, LIST, A0, A1, A2, A3, B, ADD, ROWS, ...)                                              \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #ADD ", 0;\n"                                                     \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                                      \
                 " {" LIST "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1, %" #ROWS "; }"             \
                 : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(B_ROWS))

#define N16 N8(0, 1, 2, 3, 4, 5, 6, 7) "," N8(8, 9, 10, 11, 12, 13, 14, 15)
#define N32 N16 "," N8(16, 17, 18, 19, 20, 21, 22, 23) "," N8(24, 25, 26, 27, 28, 29, 30, 31)
#define N48 N32 "," N8(32, 33, 34, 35, 36, 37, 38, 39) "," N8(40, 41, 42, 43, 44, 45, 46, 47)

// d (64 x 2 SUMS, fp32) = a b, or d + a b if `add`: a of 64 x 16 in registers, b in shared memory, K-major or, with
// B_ROWS, N-major.
template <int SUMS, int B_ROWS = 0> DEVICE void wgmma_from_registers(float (&d)[SUMS], const u32* a, u64 b, int add) {
    if constexpr (SUMS == 16) {
        WGMMA_FROM_REGISTERS(32, N16, 16, 17, 18, 19, 20, 21, 22, D8(0), D8(8));
    } else if constexpr (SUMS == 32) {
        WGMMA_FROM_REGISTERS(64, N32, 32, 33, 34, 35, 36, 37, 38, D8(0), D8(8), D8(16), D8(24));
    } else if constexpr (SUMS == 48) {
        WGMMA_FROM_REGISTERS(96, N48, 48, 49, 50, 51, 52, 53, 54, D8(0), D8(8), D8(16), D8(24), D8(32), D8(40));
    } else {
        static_assert(SUMS == 64);
        WGMMA_FROM_REGISTERS(128, N64, 64, 65, 66, 67, 68, 69, 70, D64(0));
    }
}

// d (16 x 8, fp32, of a warp) += a b.
DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b_low, u32 b_high) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
}

// d (16 x 8, fp32, of a warp) += a b, with K = 8.
DEVICE void mma_of_8(float (&d)[4], const u32 (&a)[2], u32 b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." TYPE "." TYPE ".f32 "
                 "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(b));
}

// Four 8 x 8 blocks of 16-bit elements: lane i has the address of row i % 8 of block i / 8.
DEVICE void load_blocks(u32* x, u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
}
DEVICE void load_blocks_transposed(u32* x, u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
}
DEVICE void store_blocks_transposed(u32 address, const u32 (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
DEVICE void load_vector(u32 (&x)[4], u32 address) {
    asm volatile("ld.shared::cta.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
}
DEVICE void store_vector(u32 address, const u32 (&x)[4]) {
    asm volatile("st.shared::cta.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}

// Named barriers of two warpgroups, of which one waits until the other has arrived.
DEVICE void named_wait(int barrier) { asm volatile("bar.sync %0, 256;" ::"r"(barrier) : "memory"); }
DEVICE void named_arrive(int barrier) { asm volatile("bar.arrive %0, 256;" ::"r"(barrier) : "memory"); }
