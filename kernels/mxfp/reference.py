"""The formats in plain PyTorch: the oracle. It is slow. Values are looked up in fp64 tables and never computed from
bits, so that it shares no algorithm with the kernels."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

# Bits of the exponent, bits of the mantissa, exponent bias, elements of a block.
FORMATS = {
    "mxfp8_e4m3": (4, 3, 7, 32),
    "mxfp8_e5m2": (5, 2, 15, 32),
    "mxfp6_e3m2": (3, 2, 3, 32),
    "mxfp6_e2m3": (2, 3, 1, 32),
    "mxfp4": (2, 1, 1, 32),
    "nvfp4": (2, 1, 1, 16),
}


def values(exponent_bits: int, mantissa_bits: int, bias: int) -> list[float]:
    """The value of each code without a sign (OCP MX 1.0, section 5.3, and OFP8 for the 8-bit formats)."""
    found = []
    for code in range(1 << (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, 1 << mantissa_bits)
        fraction = mantissa / (1 << mantissa_bits)
        number = math.ldexp(1 + fraction, exponent - bias) if exponent else math.ldexp(fraction, 1 - bias)
        if (exponent_bits, exponent, mantissa) == (4, 15, 7):
            number = math.nan
        if (exponent_bits, exponent) == (5, 31):
            number = math.nan if mantissa else math.inf
        found.append(number)
    return found


def mxfp_reference(
    x: torch.Tensor,
    format: str = "mxfp8_e4m3",
    *,
    stochastic: bool = False,
    seed: int = 0,
    dim: int = -1,
    tensor_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    exponent_bits, mantissa_bits, bias, block = FORMATS[format]
    finite_values = [v for v in values(exponent_bits, mantissa_bits, bias) if math.isfinite(v)]
    table = torch.tensor(finite_values, dtype=torch.float64, device=x.device)
    wide = x.movedim(dim, -1).double()
    wide = F.pad(wide, (0, -wide.shape[-1] % block))
    blocks = wide.reshape(*wide.shape[:-1], wide.shape[-1] // block, block)
    finite = blocks.isfinite().all(-1)
    if format == "nvfp4":
        found = _tensor_scale(wide) if tensor_scale is None else tensor_scale
        defined = (found >= 2.0**-117) & (found < math.inf)
        finite = finite & defined
    kept = torch.where(finite[..., None], blocks, 0)
    amax = kept.abs().amax(-1)
    if format == "nvfp4":
        scale, inverse = _nv_scale(amax, torch.where(defined, found, 1).float())
        scaled = (kept.float() * inverse[..., None]).double()
    else:
        # floor(log2 amax), of amax = mantissa · 2^exponent with 0.5 <= mantissa < 1.
        exponent = torch.frexp(amax).exponent - 1 - int(math.log2(finite_values[-1]))
        exponent = torch.where(amax > 0, exponent, -127).clamp(-127, 127)
        scale = exponent + 127
        scaled = kept * _power_of_two(-exponent)[..., None]
    scale = torch.where(finite, scale, 127 if format == "nvfp4" else 255).to(torch.uint8)
    magnitude = scaled.abs().clamp(max=finite_values[-1])
    code = _stochastic(magnitude, table, seed) if stochastic else _nearest(magnitude, table)
    width = 1 + exponent_bits + mantissa_bits
    code = torch.where(kept.signbit(), code + (1 << (width - 1)), code)
    data = _pack(code.reshape(wide.shape), width)
    return (data, scale, found) if format == "nvfp4" else (data, scale)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent in fp64, exact, for exponents from -127 to 127."""
    powers = [math.ldexp(1.0, e) for e in range(-127, 128)]
    return torch.tensor(powers, dtype=torch.float64, device=exponent.device)[exponent.long() + 127]


def _nearest(magnitude: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The code of the nearest value in the table; the even code for a tie."""
    middles = (table[1:] + table[:-1]) / 2
    low = torch.searchsorted(middles, magnitude, right=False)
    high = torch.searchsorted(middles, magnitude, right=True)
    return torch.where(low % 2 == 0, low, high)


def _stochastic(magnitude: torch.Tensor, table: torch.Tensor, seed: int) -> torch.Tensor:
    """The code below or above: above where the fraction of the interval, truncated to 16 bits, plus a random 16-bit
    fraction is at least 1."""
    below = torch.searchsorted(table, magnitude, right=True) - 1
    above = (below + 1).clamp(max=len(table) - 1)
    step = torch.where(above > below, table[above] - table[below], 1)
    fraction = torch.floor((magnitude - table[below]) / step * 2.0**16)
    drawn = _philox(magnitude.numel(), seed, magnitude.device).reshape(magnitude.shape)
    return torch.where(fraction + drawn >= 2.0**16, above, below)


def _philox(count: int, seed: int, device: torch.device) -> torch.Tensor:
    """16 random bits for each of `count` elements. Those of element i are half i % 2, the lower one first, of word
    i // 2 % 4 of Philox-4x32-10 (Salmon et al. 2011) at counter i // 8. The key is the seed."""
    mask = 0xFFFFFFFF
    index = torch.arange((count + 7) // 8, device=device)
    zero = torch.zeros_like(index)
    c = [index & mask, index >> 32, zero, zero]
    key = [seed & mask, (seed >> 32) & mask]
    for _ in range(10):
        # Products of 32 by 32 bits wrap to negative int64, but keep all 64 bits.
        left, right = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        high_left, high_right = (left >> 32) & mask, (right >> 32) & mask
        c = [high_right ^ c[1] ^ key[0], right & mask, high_left ^ c[3] ^ key[1], left & mask]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    words = torch.stack(c, -1)
    return torch.stack([words & 0xFFFF, words >> 16], -1).reshape(-1)[:count]


def _tensor_scale(x: torch.Tensor) -> torch.Tensor:
    """amax / (448 · 6) of the finite elements, in fp32, so that the largest scale of a block is e4m3's 448."""
    amax = torch.where(x.isfinite(), x.abs(), 0).amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
    return torch.where(amax > 0, (amax * (1 / 2688)).clamp(min=2.0**-117), 1.0)


def _nv_scale(amax: torch.Tensor, tensor_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The e4m3 codes of the blocks' scales, and 1 / (scale · tensor_scale), each operation rounded to fp32."""
    table = torch.tensor(values(4, 3, 7)[:-1], dtype=torch.float64, device=amax.device)
    wanted = amax.float() / (tensor_scale * 6)
    code = _nearest(wanted.double(), table).clamp(min=1)
    return code, 1 / (table[code].float() * tensor_scale)


def _pack(code: torch.Tensor, width: int) -> torch.Tensor:
    """Packs codes of `width` bits into bytes along the last dimension, the first in the lowest bits."""
    if width == 8:
        return code.to(torch.uint8)
    if width == 4:
        low, high = code[..., 0::2], code[..., 1::2]
        return (low + 16 * high).to(torch.uint8)
    a, b, c, d = (code[..., i::4] for i in range(4))
    three = torch.stack([a + b % 4 * 64, b // 4 + c % 16 * 16, c // 16 + d * 4], -1)
    return three.flatten(-2).to(torch.uint8)


def _unpack(data: torch.Tensor, width: int) -> torch.Tensor:
    wide = data.long()
    if width == 8:
        return wide
    if width == 4:
        return torch.stack([wide % 16, wide // 16], -1).flatten(-2)
    x, y, z = (wide[..., i::3] for i in range(3))
    return torch.stack([x % 64, x // 64 + y % 16 * 4, y // 16 + z % 4 * 16, z // 4], -1).flatten(-2)


def mxfp_dequantize_reference(
    data: torch.Tensor,
    scales: torch.Tensor,
    format: str = "mxfp8_e4m3",
    dtype: torch.dtype = torch.float32,
    *,
    tensor_scale: torch.Tensor | None = None,
    size: int | None = None,
) -> torch.Tensor:
    """Computes in fp64 up to the last rounding, except that the product with the tensor scale is rounded to fp32."""
    exponent_bits, mantissa_bits, bias, block = FORMATS[format]
    positive = torch.tensor(values(exponent_bits, mantissa_bits, bias), dtype=torch.float64, device=data.device)
    table = torch.cat([positive, -positive])
    numbers = table[_unpack(data, 1 + exponent_bits + mantissa_bits)]
    if format == "nvfp4":
        positive = torch.tensor(values(4, 3, 7), dtype=torch.float64, device=data.device)
        scale = torch.cat([positive, -positive])[scales.long()]
    else:
        scale = torch.where(scales == 255, torch.nan, _power_of_two(scales.long().clamp(max=254) - 127))
    y = numbers.reshape(*scales.shape, block) * scale[..., None]
    y = y.reshape(*scales.shape[:-1], scales.shape[-1] * block)
    if tensor_scale is not None:
        y = y.to(tensor_scale.dtype) * tensor_scale
    return y[..., :size].to(dtype)
