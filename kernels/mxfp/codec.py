"""Device functions: fp32 to the bits of an element and back, several elements to a byte or word and back.

Rounding uses integer arithmetic on the bits of fp32, or an addition whose sum has the element's unit in the last place.
Both are right on every GPU and in Triton's interpreter, which rounds fp8 wrongly. Factors are powers of two, so that
contraction to a fused multiply-add does not change the result. All instructions exist on sm_80.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOT_FINITE = tl.constexpr(0x7F800000)  # the smallest fp32 bits of a magnitude that is not finite
E4M3_LARGEST = tl.constexpr(448.0)
SMALLEST_TENSOR_SCALE = tl.constexpr(2.0**-117)  # times 2^-9 it is normal, and so is its inverse


@triton.jit
def encode(y, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """The element bits, without sign, of fp32 y >= 0, rounded to nearest, ties to even, saturating; int32."""
    SHIFT: tl.constexpr = 23 - MANTISSA
    y = tl.minimum(y, LARGEST)
    # The power of two at or below y, at least the smallest normal value, whose spacing the subnormals share.
    exponent = tl.maximum(y.to(tl.int32, bitcast=True) & 0x7F800000, (128 - BIAS) << 23)
    # The unit in the last place of `anchor` is that of the element at this exponent, so the addition rounds to it.
    anchor = exponent.to(tl.float32, bitcast=True) * (2.0**SHIFT)
    rounded = (y + anchor) - anchor
    # Scaled so that the element's smallest exponent becomes that of fp32, the bits are the code, subnormals included.
    return (rounded * (2.0 ** (BIAS - 127))).to(tl.int32, bitcast=True) >> SHIFT


@triton.jit
def encode_at_random(y, random, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """As `encode`, but rounds up with the probability of the discarded fraction, truncated to 16 bits. `random` has 16
    random bits."""
    SHIFT: tl.constexpr = 23 - MANTISSA
    y = tl.minimum(y, LARGEST)
    below_a_step = random << (SHIFT - 16)
    normal = y.to(tl.int32, bitcast=True) - ((127 - BIAS) << 23)
    # Subnormal elements in fixed point, with SHIFT fraction bits.
    subnormal = (tl.minimum(y, 2.0 ** (1 - BIAS)) * (2.0 ** (22 + BIAS))).to(tl.int32)
    return (tl.where(normal < (1 << 23), subnormal, normal) + below_a_step) >> SHIFT


@triton.jit
def decode(code, WIDTH: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Converts the bits of an element, in an int32, to fp32, exactly."""
    SIGN: tl.constexpr = 1 << (WIDTH - 1)
    magnitude = code & (SIGN - 1)
    # As fp32 bits the value is too small by a constant power of two; subnormals remain subnormal.
    bits = ((code & SIGN) << (32 - WIDTH)) | (magnitude << (23 - MANTISSA))
    value = bits.to(tl.float32, bitcast=True) * (2.0 ** (127 - BIAS))
    if WIDTH == 8 and MANTISSA == 3:
        value = tl.where(magnitude == 0x7F, float("nan"), value)
    if WIDTH == 8 and MANTISSA == 2:
        value = tl.where(magnitude >= 0x7C, (bits | 0x7F800000).to(tl.float32, bitcast=True), value)
    return value


@triton.jit
def decode_scale(code, E8M0: tl.constexpr):
    """Converts the byte of a block's scale, in an int32, to fp32."""
    if not E8M0:
        return decode(code, 8, 3, 7)
    bits = tl.where(code == 0, 1 << 22, tl.where(code == 255, 0x7FC00000, code << 23))  # 2^-127, NaN
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def mx_scale(amax, EMAX: tl.constexpr):
    """The E8M0 byte of a block whose largest magnitude has the fp32 bits `amax`, and the inverse of its scale. The
    exponent is that of amax minus EMAX (the exponent of the format's largest value), but at least -127."""
    code = tl.maximum((amax >> 23) - EMAX, 0)
    return code, ((254 - code) << 23).to(tl.float32, bitcast=True)


@triton.jit
def nv_scale(amax, tensor_scale, LARGEST: tl.constexpr):
    """The e4m3 byte of a block whose largest magnitude has the fp32 bits `amax`, and 1 / (scale · tensor_scale), both
    correctly rounded. A scale is at least e4m3's smallest positive value, so that it has an inverse."""
    wanted = tl.div_rn(amax.to(tl.float32, bitcast=True), tensor_scale * LARGEST)
    code = tl.maximum(encode(wanted, 3, 7, E4M3_LARGEST), 1)
    return code, tl.div_rn(1.0, decode(code, 8, 3, 7) * tensor_scale)


@triton.jit
def four_random(seed_low, seed_high, index):
    """128 random bits for each int64 index, as four int32: Philox-4x32 with ten rounds (Salmon et al. 2011)."""
    key_a, key_b = seed_low.to(tl.uint32, bitcast=True), seed_high.to(tl.uint32, bitcast=True)
    a, b = (index & 0xFFFFFFFF).to(tl.uint32), (index >> 32).to(tl.uint32)
    c, d = a * 0, a * 0
    for _ in tl.static_range(10):
        # One wide multiplication for both halves of a product, where tl.philox uses two instructions.
        left, right = a.to(tl.uint64) * 0xD2511F53, c.to(tl.uint64) * 0xCD9E8D57
        a, c = (right >> 32).to(tl.uint32) ^ b ^ key_a, (left >> 32).to(tl.uint32) ^ d ^ key_b
        b, d = right.to(tl.uint32), left.to(tl.uint32)
        key_a = tl.add(key_a, 0x9E3779B9, sanitize_overflow=False)
        key_b = tl.add(key_b, 0xBB67AE85, sanitize_overflow=False)
    a, b = a.to(tl.int32, bitcast=True), b.to(tl.int32, bitcast=True)
    return a, b, c.to(tl.int32, bitcast=True), d.to(tl.int32, bitcast=True)


@triton.jit
def pairs(codes, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The even and the odd columns of a tile."""
    return tl.split(tl.reshape(codes, [BLOCK_M, BLOCK_N // 2, 2]))


@triton.jit
def interleave(even, odd, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The tile with these even and odd columns."""
    return tl.reshape(tl.join(even, odd), [BLOCK_M, BLOCK_N])


@triton.jit
def interleave_four(a, b, c, d):
    """Joins four tensors in order, along two new dimensions of size two."""
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def pack_six(codes, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Packs each sixteen columns of 6 bits into three words."""
    even, odd = pairs(codes, BLOCK_M, BLOCK_N)
    return pack_twelve(even | (odd << 6), BLOCK_M, BLOCK_N // 2)


@triton.jit
def pack_twelve(codes, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Packs each eight columns of 12 bits into three words."""
    even, odd = pairs(codes, BLOCK_M, BLOCK_N)
    a, b = pairs(even | (odd << 12), BLOCK_M, BLOCK_N // 2)  # 24 bits in each column
    a, c = pairs(a, BLOCK_M, BLOCK_N // 4)
    b, d = pairs(b, BLOCK_M, BLOCK_N // 4)
    return a | (b << 24), (b >> 8) | (c << 16), (c >> 16) | (d << 8)


@triton.jit
def unpack_six(first, second, third, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Unpacks three words into sixteen columns of 6 bits."""
    a, b = first & 0xFFFFFF, ((first >> 24) & 0xFF) | ((second & 0xFFFF) << 8)
    c, d = ((second >> 16) & 0xFFFF) | ((third & 0xFF) << 16), (third >> 8) & 0xFFFFFF
    a = interleave(a, c, BLOCK_M, BLOCK_N // 8)
    b = interleave(b, d, BLOCK_M, BLOCK_N // 8)
    four = interleave(a, b, BLOCK_M, BLOCK_N // 4)
    two = interleave(four & 0xFFF, four >> 12, BLOCK_M, BLOCK_N // 2)
    return interleave(two & 0x3F, two >> 6, BLOCK_M, BLOCK_N)
