// Unpacks 4-bit weights into fragments of wgmma's A operand: fp16 if FP16 is 1, otherwise bf16; NVFP4 or MXFP4.
//
// A word q is a thread's fragment of 16 rows by 16 columns: four registers of two weights each. `pairs` moves sign and
// magnitude to their bit positions in bf16. The value is then 2^126 too small, subnormals included. One packed
// multiplication of two weights corrects this and applies the scale.
//
// Instructions for the 8 weights of a word in bf16: 4 LOP3, 5 shifts (of which 4 are IMAD) and 4 HMUL2. A factor takes
// a PRMT and an LEA; two words need two factors with MXFP4, four with NVFP4. In fp16 there are 4 LOP3 and 4 IMAD more.
#pragma once

#include "numbers.cuh"

constexpr u32 SIGNS_AND_MAGNITUDES = 0x81c081c0, MAGNITUDES = 0x01c001c0;

// Two weights of a row in each register: bits 15 and 8 to 6 of both halves. Shifts are arithmetic, as in formats.py.
DEVICE void pairs(int q, u32 (&v)[4]) {
    v[0] = q & SIGNS_AND_MAGNITUDES;
    v[1] = (q << 6) & SIGNS_AND_MAGNITUDES;
    v[2] = ((q << 3) ^ (q << 5)) & SIGNS_AND_MAGNITUDES;
    v[3] = ((q >> 6) ^ (q << 4)) & SIGNS_AND_MAGNITUDES;
}

// The factor for the weights of `pairs`, in both halves of a register: the scale times
//             bf16      fp16 (where the value is 2^14 too small)
//   MXFP4     2^126     2^14     for scales that are `plain`
//   NVFP4     2^119     2^7      weights become 2^-7 of their value, which the epilogue corrects
DEVICE u32 factor(u32 scales, int byte) {
    const u32 twice = __byte_perm(scales, 0, 0x4040 | byte | byte << 8);
    if (NVFP4) return FP16 ? twice << 7 : twice * 16 + 0x70007000u;
    return FP16 ? twice * 1024 - 98 * 1024 * 0x00010001u : twice * 128 + 126 * 128 * 0x00010001u;
}

// Whether the factors of these scales can be represented in the dtype: E8M0 up to 1, in fp16 also at least 2^-15.
DEVICE bool plain(u32 scales, u32 more) {
    if (NVFP4) return true;
    const u32 outside = FP16 ? ((scales ^ 0x70707070u) | (more ^ 0x70707070u)) & 0xf0f0f0f0u
                             : (scales | more) & 0x80808080u;
    return __all_sync(~0u, outside == 0);
}

DEVICE u32 times(u32 v, u32 by) {
    if (FP16) v += (v & MAGNITUDES) * 7;  // shifts the magnitude left by three bits
    u32 y;
    asm("mul.rn." TYPE "x2 %0, %1, %2;" : "=r"(y) : "r"(v), "r"(by));
    return y;
}

// The same as `times` for any E8M0 scale: in fp32, rounded once.
DEVICE u32 times_any(u32 v, u32 scales, int byte) {
    const u32 code = scales >> 8 * byte & 255;
    const float scale = __uint_as_float(code == 0 ? 1u << 22 : code == 255 ? 0x7fc00000u : code << 23);
    const float up = __uint_as_float((126u + 127u) << 23);
    return pack(__uint_as_float(v << 16) * up * scale, __uint_as_float(v & 0xffff0000u) * up * scale);
}

// Unpacks four words, with the scales of the thread's two rows, into the A registers of four wgmmas; `half` of a chunk.
DEVICE void unpack(u32 (&a)[16], const int4& words, const uint2& low, const uint2& high, int half, bool is_plain) {
    const int q[4] = {words.x, words.y, words.z, words.w};
    const u32 scales[2] = {NVFP4 && half ? low.y : low.x, NVFP4 && half ? high.y : high.x};
    if (is_plain) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int byte = NVFP4 ? j : 2 * half + j / 2;
            const u32 by[2] = {factor(scales[0], byte), factor(scales[1], byte)};
            u32 v[4];
            pairs(q[j], v);
#pragma unroll
            for (int i = 0; i < 4; i++) a[4 * j + i] = times(v[i], by[i % 2]);
        }
    } else {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 v[4];
            pairs(q[j], v);
#pragma unroll
            for (int i = 0; i < 4; i++) a[4 * j + i] = times_any(v[i], scales[i % 2], 2 * half + j / 2);
        }
    }
}
