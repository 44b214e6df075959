// PTX of backward.cu beyond the shared headers: bulk reductions, ldmatrix and stmatrix, wgmma instructions.
#pragma once

#include "mbarrier.cuh"
#include "numbers.cuh"
#include "scheduler.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

#define INFINITE __int_as_float(0x7f800000)

struct alignas(16) Float4 { float x, y, z, w; };
struct alignas(16) Uint4 { u32 x, y, z, w; };
struct alignas(8) Float2 { float x, y; };

// Hides from the compiler that x is loop-invariant. Most addresses are, and it would hoist everything that is computed
// from them out of the loop, and spill.
DEVICE void anew(u32& x) { asm volatile("" : "+r"(x)); }
DEVICE u32 shared_address(const void* p) {
    u32 a;
    asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(a) : "l"(p));
    return a;
}
// The dynamic shared memory, aligned to 1024 bytes as swizzled tiles must be.
DEVICE u32 shared_memory() {
    extern __shared__ __align__(1024) char memory[];
    return shared_address(memory);
}
DEVICE void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

DEVICE void load_row(const float* from, u32 to, u32 bar, u32 bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %3, [%2];"
                 ::"r"(to), "l"(from), "r"(bar), "r"(bytes) : "memory");
}
// As tma_load and store_box, with the L2 policy evict_first.
#define EVICT_FIRST "{ .reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0; "
DEVICE void tma_load_once(u32 to, const TensorMap* map, int column, int row, int head, int batch, u32 bar) {
    asm volatile(EVICT_FIRST "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2,%3,%4,%5}], [%6], policy; }"
                 ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(bar) : "memory");
}
DEVICE void store_box_once(const TensorMap& map, u32 from, int column, int row, int head, int batch) {
    asm volatile(EVICT_FIRST "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint "
                 "[%0, {%2, %3, %4, %5}], [%1], policy; }"
                 ::"l"(&map), "r"(from), "r"(column), "r"(row), "r"(head), "r"(batch) : "memory");
}
DEVICE void store_box(const TensorMap& map, u32 from, int column, int row, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
                 ::"l"(&map), "r"(from), "r"(column), "r"(row), "r"(head), "r"(batch) : "memory");
}
DEVICE void store_bulk(float* to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
DEVICE void reduce_bulk(float* to, u32 from, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                 ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
// One 16-byte store, which the compiler might otherwise split.
DEVICE void store_global(const Uint4* to, const u32 (&x)[4]) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"l"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Counters that CTAs share.
DEVICE u32 load_acquire(const u32* at) {
    u32 x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
    return x;
}
DEVICE void add_release(u32* at, u32 x) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}
DEVICE void doze(u32 nanoseconds) { asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds) : "memory"); }

DEVICE Float2 unpack(u32 x) {
#if FP16
    Float2 y;
    asm("{ .reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
        : "=f"(y.x), "=f"(y.y) : "r"(x));
    return y;
#else
    return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
#endif
}
DEVICE float shared_one(u32 at) {
    float y;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(y) : "r"(at) : "memory");
    return y;
}
DEVICE Float2 shared_pair(u32 at) {
    Float2 y;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(y.x), "=f"(y.y) : "r"(at));
    return y;
}
DEVICE Uint4 shared_chunk(u32 at) {
    Uint4 y;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(y.x), "=r"(y.y), "=r"(y.z), "=r"(y.w) : "r"(at)
                 : "memory");
    return y;
}
DEVICE Float4 shared_four(u32 at) {
    Float4 y;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(y.x), "=f"(y.y), "=f"(y.z), "=f"(y.w) : "r"(at)
                 : "memory");
    return y;
}
DEVICE void store_one(u32 at, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory"); }
DEVICE void store_four(u32 at, float a, float b, float c, float d) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
DEVICE void store_pair(u32 at, int x, int y) {
    asm volatile("st.shared.v2.s32 [%0], {%1, %2};" ::"r"(at), "r"(x), "r"(y) : "memory");
}
DEVICE void store_words(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
DEVICE void load_matrices(u32* x, u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}
DEVICE void store_matrices(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
DEVICE void store_transposed(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// --------------------------------------------------------------------------------------------- wgmma

// Matrix descriptors of tiles with 128-byte swizzle; groups of 8 rows are 1024 bytes apart. `along`: a K-major operand.
// `across`: an MN-major one, whose columns from 64 on are in the next slab, `slab` bytes further on. `at`, like all
// operand addresses below, is in units of 16 bytes.
DEVICE u64 descriptor(u32 low) {
    u64 y;
    asm("mov.b64 %0, {%1, %2};" : "=l"(y) : "r"(low), "n"((1 << 30) | 64));
    return y;
}
DEVICE u64 along(u32 at) { return descriptor(at); }
template <u32 slab>
DEVICE u64 across(u32 at) { return descriptor(at + ((slab >> 4) << 16)); }

#define R4(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define R16(c, i) R4(c, i), R4(c, i + 4), R4(c, i + 8), R4(c, i + 12)
#define R32(c, i) R16(c, i), R16(c, i + 16)
#define R40(c) R32(c, 0), R4(c, 32), R4(c, 36)
#define D32 \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define D40 D32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define D64 D32 \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define MMA(N) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " "

// c (64 x 64, 80 or 128) = a b^T, or c + a b^T if `add`; both from shared memory. across_a, across_b: MN-major
// operands.
template <int across_b, int across_a = 0>
DEVICE void mma(float (&c)[32], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;\n" MMA(64) D32 "}, %32, %33, p, 1, 1, %36, %35; }"
                 : R32(c, 0) : "l"(a), "l"(b), "r"(add), "n"(across_b), "n"(across_a));
}
template <int across_b, int across_a = 0>
DEVICE void mma(float (&c)[40], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %42, 0;\n" MMA(80) D40 "}, %40, %41, p, 1, 1, %44, %43; }"
                 : R40(c) : "l"(a), "l"(b), "r"(add), "n"(across_b), "n"(across_a));
}
template <int across_b>
DEVICE void mma(float (&c)[64], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0;\n" MMA(128) D64 "}, %64, %65, p, 1, 1, 0, %67; }"
                 : R32(c, 0), R32(c, 32) : "l"(a), "l"(b), "r"(add), "n"(across_b));
}
// The same with a from registers.
template <int across_b>
DEVICE void mma(float (&c)[32], const u32* a, u64 b, int add) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0;\n" MMA(64) D32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38; }"
                 : R32(c, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(across_b));
}
template <int across_b>
DEVICE void mma(float (&c)[64], const u32* a, u64 b, int add) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0;\n" MMA(128) D64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70; }"
                 : R32(c, 0), R32(c, 32) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(across_b));
}
