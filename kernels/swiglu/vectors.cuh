// A copy of parts/sm90/vectors.cuh, made by `nox -s vendor`: change it there.
// Vectors of 16 bytes of bf16 (KIND 0), fp16 (1) or fp32 (2), and conversion of their elements to and from fp32.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

template <int KIND> constexpr int ELEMENTS_PER_WORD = KIND == 2 ? 1 : 2;  // of 32 bits

struct alignas(16) Vector {
    u32 words[4];
};

__device__ void store(Vector* to, const Vector& v) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
        ::"l"(to), "r"(v.words[0]), "r"(v.words[1]), "r"(v.words[2]), "r"(v.words[3]) : "memory");
}

template <int KIND> __device__ void unpack(u32 word, float (&out)[ELEMENTS_PER_WORD<KIND>]) {
    constexpr int last = ELEMENTS_PER_WORD<KIND> - 1;
    if constexpr (KIND == 2) {
        out[0] = __uint_as_float(word);
    } else if constexpr (KIND == 1) {
        asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}"
            : "=f"(out[0]), "=f"(out[last]) : "r"(word));
    } else {
        out[0] = __uint_as_float(word << 16), out[last] = __uint_as_float(word & 0xffff0000u);
    }
}

// Rounds to nearest, ties to even. `second` is not used where a word has one element.
template <int KIND> __device__ u32 pack(float first, float second) {
    u32 word = 0;
    if constexpr (KIND == 2) return __float_as_uint(first);
    if constexpr (KIND == 1) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    if constexpr (KIND == 0) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}

// A copy that the compiler cannot see through. It then converts the word to fp32 again at its second use; keeping the
// fp32 values from the first would take twice the registers.
__device__ u32 opaque(u32 word) {
    asm volatile("" : "+r"(word));
    return word;
}
