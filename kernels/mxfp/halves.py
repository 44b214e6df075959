"""sm_90 instructions on the two 16-bit halves of a register, and conversions of them, in inline PTX.

The tests emulate them for the interpreter, which has no PTX.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def both(bits: tl.constexpr):
    """The same 16 bits in both halves of a register, as int32."""
    return bits * 0x10001 - (bits >> 15) * 0x100000000


@triton.jit
def larger(a, b):
    """The maximum of each half, unsigned."""
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def larger_signed(a, b):
    return tl.inline_asm_elementwise("max.s16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def smaller(a, b):
    return tl.inline_asm_elementwise("min.u16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def product(a, b):
    """a · b in each half, in bf16."""
    return tl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def product_and_sum(a, b, c):
    """a · b + c in each half, in bf16, rounded once, to nearest, ties to even."""
    return tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.int32, is_pure=True, pack=1
    )


@triton.jit
def product_fp16(a, b):
    """a · b in each half, in fp16."""
    return tl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def bytes_of(a, b, selector):
    """Selects four of the eight bytes of a (0 to 3) and b (4 to 7), one per hexadecimal digit of the selector; the last
    digit selects the lowest byte."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, selector], tl.int32, is_pure=True, pack=1
    )


@triton.jit
def from_e4m3(a):
    """Converts the two e4m3 values in the lower half of a to fp16."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 l, u; mov.b32 {l, u}, $1; cvt.rn.f16x2.e4m3x2 $0, l; }",
        "=r,r",
        [a],
        tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def scaled(a, factor, BF16: tl.constexpr):
    """Two fp16 values times an fp32 factor, rounded to fp32 and then to bf16 (BF16) or fp16."""
    if BF16:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 l, u; .reg .f32 a, b; mov.b32 {l, u}, $1; cvt.f32.f16 a, l; cvt.f32.f16 b, u; "
            "mul.rn.f32 a, a, $2; mul.rn.f32 b, b, $2; cvt.rn.bf16x2.f32 $0, b, a; }",
            "=r,r,f",
            [a, factor],
            tl.int32,
            is_pure=True,
            pack=1,
        )
    return tl.inline_asm_elementwise(
        "{ .reg .b16 l, u; .reg .f32 a, b; mov.b32 {l, u}, $1; cvt.f32.f16 a, l; cvt.f32.f16 b, u; "
        "mul.rn.f32 a, a, $2; mul.rn.f32 b, b, $2; cvt.rn.f16x2.f32 $0, b, a; }",
        "=r,r,f",
        [a, factor],
        tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def to_eight_bits(a, b, factor, MANTISSA: tl.constexpr):
    """Four bf16 values times an fp32 factor, rounded to e4m3 (MANTISSA 3) or e5m2: to nearest, ties to even,
    saturating. Results of a are in the lower half."""
    if MANTISSA == 3:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .f32 x, y; .reg .b16 l, u; "
            "shl.b32 t, $1, 16; mov.b32 x, t; and.b32 t, $1, 0xFFFF0000; mov.b32 y, t; "
            "mul.rn.f32 x, x, $3; mul.rn.f32 y, y, $3; cvt.rn.satfinite.e4m3x2.f32 l, y, x; "
            "shl.b32 t, $2, 16; mov.b32 x, t; and.b32 t, $2, 0xFFFF0000; mov.b32 y, t; "
            "mul.rn.f32 x, x, $3; mul.rn.f32 y, y, $3; cvt.rn.satfinite.e4m3x2.f32 u, y, x; mov.b32 $0, {l, u}; }",
            "=r,r,r,f",
            [a, b, factor],
            tl.int32,
            is_pure=True,
            pack=1,
        )
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; .reg .f32 x, y; .reg .b16 l, u; "
        "shl.b32 t, $1, 16; mov.b32 x, t; and.b32 t, $1, 0xFFFF0000; mov.b32 y, t; "
        "mul.rn.f32 x, x, $3; mul.rn.f32 y, y, $3; cvt.rn.satfinite.e5m2x2.f32 l, y, x; "
        "shl.b32 t, $2, 16; mov.b32 x, t; and.b32 t, $2, 0xFFFF0000; mov.b32 y, t; "
        "mul.rn.f32 x, x, $3; mul.rn.f32 y, y, $3; cvt.rn.satfinite.e5m2x2.f32 u, y, x; mov.b32 $0, {l, u}; }",
        "=r,r,r,f",
        [a, b, factor],
        tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def truncated_product(a, b):
    """a · b in fp32, rounded towards zero, saturated to 0 .. 1."""
    return tl.inline_asm_elementwise("mul.rz.sat.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, is_pure=True, pack=1)


@triton.jit
def products_of_magnitudes(a, factor):
    """The magnitudes of two bf16 values times an fp32 factor, as two fp32 values."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; .reg .f32 x; shl.b32 t, $2, 16; mov.b32 x, t; abs.f32 x, x; mul.rn.f32 $0, x, $3; "
        "and.b32 t, $2, 0x7FFF0000; mov.b32 x, t; mul.rn.f32 $1, x, $3; }",
        "=f,=f,r,f",
        [a, factor],
        (tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def to_e4m3(a):
    """The e4m3 code of an fp32 value >= 0, rounded to nearest, ties to even, saturating."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 t; cvt.rn.satfinite.e4m3x2.f32 t, 0f00000000, $1; cvt.u32.u16 $0, t; }",
        "=r,f",
        [a],
        tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def reciprocal(a):
    """1 / a in fp32, correctly rounded."""
    return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [a], tl.float32, is_pure=True, pack=1)
