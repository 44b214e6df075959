"""Configurations of the Triton kernels, and the assignment of rows and columns to programs."""

from __future__ import annotations

import pytest
import torch

from . import configs, cross_entropy, cross_entropy_and_grad, plans, rows
from .reference import cross_entropy_reference
from .test_cross_entropy import DEVICE, assert_close, batch


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("spread", [False, True])
def test_every_vocabulary_has_a_configuration(dtype, capability, grad, spread):
    for vocab in (1, 2, 3, 8, 10, 17, 64, 131, 512, 1000, 1024, 2048, 4096, 4097, 32000, 50257, 128256, 262144):
        for aligned in {False, vocab % (16 // dtype.itemsize) == 0}:
            fwd = configs.pick_fwd_config(vocab, dtype, aligned, grad, spread, False, capability)
            bwd = configs.pick_bwd_config(vocab, dtype, aligned, capability)
            if vocab > configs.NARROW:
                assert isinstance(fwd, configs.WideFwdConfig)
                assert isinstance(bwd, configs.WideBwdConfig)
                assert bool(fwd.grad_unroll) == grad
                continue
            for config in (fwd, bwd):
                # Keeps a row within one warp wherever it fits. Otherwise several warps would hold it and need barriers.
                assert config.block_m * config.lanes >= 32 * config.num_warps
                assert config.lanes * config.vector <= 2 ** (vocab - 1).bit_length()
            assert fwd.programs_per_sm * fwd.num_warps * 32 * fwd.registers == 65536


def test_the_narrow_forward_of_plain_rows_is_as_measured():
    fwd = configs.pick_fwd_config(512, torch.bfloat16, True, False, False, False, (9, 0))
    assert (fwd.lanes, fwd.block_m, fwd.num_warps, fwd.programs_per_sm) == (16, 8, 4, 8)
    bwd = configs.pick_bwd_config(512, torch.bfloat16, True, (9, 0))
    assert (bwd.lanes, bwd.block_m, bwd.num_warps) == (32, 4, 4)


@pytest.mark.parametrize("vocab", [5, 24, *(pytest.param(n, marks=pytest.mark.slow) for n in (512, 2500))])
@pytest.mark.parametrize("options", [dict(), dict(label_smoothing=0.1, z_loss=1e-2, softcap=5.0, return_lse=True)])
def test_programs_of_the_narrow_forward_go_from_tile_to_tile(monkeypatch, vocab, options):
    """With so few programs that each has several tiles, and that some have one tile fewer than the others."""
    monkeypatch.setattr(plans, "_device", lambda tensor: ((8, 0), 1))
    count = (
        5 * 8 * configs.pick_fwd_config(vocab, torch.float32, vocab % 4 == 0, False, False, False, (9, 0)).block_m // 2
        + 1
    )
    logits, target = batch(count, vocab)
    for reduction in ("none", "mean"):
        ours, theirs = (
            loss(logits, target, reduction=reduction, **options) for loss in (cross_entropy, cross_entropy_reference)
        )
        assert_close(*(t if isinstance(t, tuple) else (t,) for t in (ours, theirs)), rtol=1e-5, atol=1e-5)
        found = cross_entropy_and_grad(logits.clone(), target, inplace=True, reduction=reduction, **options)
        assert_close(
            found[:2],
            cross_entropy_reference(logits, target, with_grad=True, reduction=reduction, **options)[:2],
            rtol=1e-4,
            atol=1e-6,
        )


def test_so_few_programs_are_resident_that_no_tile_has_a_number_beyond_32_bits():
    for tiles in (1, 1055, 2**31 - 2000, 2**31 - 3, 2**31 + 5):
        programs = plans._persistent(tiles, 8 * 132)
        assert 1 <= programs <= min(tiles, 1056)
        assert tiles - 1 + programs < 2**31 or tiles > 2**31


def test_a_row_of_the_fringe_is_covered_once():
    """`body` and `fringe` together cover each column of a row once, wherever the row begins."""
    import triton
    import triton.language as tl

    @triton.jit
    def _cover_kernel(out_ptr, base, vocab, VECTOR: tl.constexpr, BLOCK: tl.constexpr):
        base += tl.zeros([], tl.int64)  # Triton specialises an argument of 1 to a constant
        first, head, length = rows.body(base, vocab, "fringed", VECTOR)
        at = tl.arange(0, BLOCK)
        tl.store(out_ptr + head + at, 1, mask=at < length)
        tl.store(out_ptr + 64 + (first - base), (first % VECTOR).to(tl.int32))
        beyond = rows.fringe(head, length, vocab, VECTOR)
        tl.store(out_ptr + beyond, 1 + tl.load(out_ptr + beyond, mask=beyond < vocab), mask=beyond < vocab)

    for base in range(8):
        for vocab in range(15, 33):
            out = torch.zeros(80, dtype=torch.int32, device=DEVICE)
            _cover_kernel[(1,)](out, base, vocab, VECTOR=8, BLOCK=64)
            assert out[:vocab].tolist() == [1] * vocab
            assert not out[vocab:].any()
