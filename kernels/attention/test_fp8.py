"""The forward in e4m3: its operands, its reference, its memory."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from . import attention
from .configs.forward import pick_fp8_config
from .reference import attention_reference
from .sm90 import fp8, quantise
from .test_attention import normal, tensors


def e4m3(x: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the bits of x [S, D] in e4m3, with one scale per `rows` rows, and the scales."""
    blocks = x.float().split(rows)
    scales = [2.0 ** math.ceil(math.log2(b.abs().max().item() / 448)) if b.abs().max() > 0 else 1.0 for b in blocks]
    bits = [(b / s).to(torch.float8_e4m3fn).view(torch.uint8) for b, s in zip(blocks, scales, strict=True)]
    return torch.cat(bits), torch.tensor(scales)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("queries", "keys", "dim"), [(70, 300, 64), (1, 129, 24), (130, 2100, 80)])
def test_operands_of_the_forward_in_e4m3(queries, keys, dim, dtype):
    q, k, v = (normal(2, heads, rows, dim, dtype=dtype) for heads, rows in ((4, queries), (2, keys + 5), (2, keys + 5)))
    k[0, 0, :128] = 0
    v[1, 1, 7] *= 300
    made = quantise.quantise(q, k, v, keys, 128, 8)
    place = torch.arange(16)
    order = place // 8 * 2 + place % 8 // 2 * 4 + place % 2  # the column of each of 16 keys
    for b, h in itertools.product(range(2), range(2)):
        for x, y, scales, rows in (
            (q[b, 2 * h], made.q[b, 2 * h], made.q_scale[b, 2 * h], 64),
            (k[b, h, :keys], made.k[b, h], made.k_scale[b, h], 128),
        ):
            bits, wanted = e4m3(x.cpu(), rows)
            assert torch.equal(scales.cpu(), wanted)
            assert torch.equal(y[:, :dim].cpu(), bits) and not y[:, dim:].any()
        bits, wanted = e4m3(v[b, h, :keys].cpu(), 1024)
        assert torch.equal(made.v_scale[b, h].cpu(), wanted)
        columns = torch.arange(keys) // 16 * 16 + order[torch.arange(keys) % 16]
        values = made.v[b, h].cpu()
        assert torch.equal(values[:dim, columns].T, bits)
        values[:, columns] = 0
        assert not values.any()  # the padding of keys and of D is zero


def test_the_reference_in_e4m3_rounds_but_in_fp64():
    q, k, v = (t.cpu() for t in tensors(70, 150, dim=32))
    exact = attention_reference(q.double(), k.double(), v.double(), fp8=True)
    assert torch.equal(exact, attention_reference(q.double(), k.double(), v.double()))
    rounded = attention_reference(q, k, v, fp8=True)
    error = (rounded - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0.005 < error < 0.1


def test_the_forward_in_e4m3_fits():
    for dim in (32, 64, 80, 128):
        width, config = 64 if dim <= 64 else 128, pick_fp8_config(dim, exact_lse=True)
        assert fp8.shared_bytes(width, config) <= 232_448


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_equal_keys_give_the_mean_of_their_values(dim):
    """With one key that is its value rounded to e4m3. With many keys, an error in a row's sum could pass for
    rounding."""
    q, k, v = (normal(2, heads, 300, dim, dtype=torch.bfloat16) for heads in (4, 2, 2))
    k[:] = k[:, :, :1]
    out = attention(q, k, v, causal=True, fp8=True)
    for b, h in itertools.product(range(2), range(4)):
        bits, scales = e4m3(v[b, h // 2].cpu(), 1024)
        values = bits.view(torch.float8_e4m3fn).double() * scales[0]
        means = values.cumsum(0) / torch.arange(1, 301)[:, None]
        found = out[b, h].double().cpu()
        assert torch.equal(found[0], values[0])
        torch.testing.assert_close(found, means, rtol=2**-8, atol=2e-3)


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_maxima_that_rise_after_a_section(dim, return_lse):
    """Where a maximum rises, the totals of earlier sections and their row sums shrink by 2^-4: in the second section,
    and once more in it or in the third, before either is added to the totals. Scores are whole numbers to base 2, so
    that rounding changes all probabilities by the same factor."""
    q, k, v = (normal(1, heads, rows, dim, dtype=torch.bfloat16) for heads, rows in ((4, 70), (2, 2600), (2, 2600)))
    key = torch.arange(2600, device=v.device)  # the main loop goes from the last to the first
    level = 4 * ((key < 1700).int() + (key < 900).int())
    q[:], k[:] = 0, 0
    q[..., 0], k[..., 0], v[:] = 1, level, v + 2
    found = attention(q, k, v, scale=math.log(2), fp8=True, return_lse=return_lse)
    out, lse = found if return_lse else (found, None)
    weights = torch.exp2(level.double().cpu())
    rows = 1024 if dim == 64 else 768
    for h in range(4):
        bits, scales = e4m3(v[0, h // 2].cpu(), rows)
        values = bits.view(torch.float8_e4m3fn).double() * scales.repeat_interleave(rows)[:2600, None]
        wanted = (weights / weights.sum()) @ values
        # The tensor core truncates the addends of a sum to 13 bits below its leading bit. Here this is 1.3 % of out:
        # products with values have up to 8 bits, those with the ones that give the row sum have 4.
        torch.testing.assert_close(out[0, h].double().cpu(), wanted.expand(70, dim), rtol=0.025, atol=0)
    if lse is not None:
        torch.testing.assert_close(lse, torch.full_like(lse, weights.sum().log().item()), rtol=1e-5, atol=1e-4)
