"""PyTorch's flash attention by these kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import op_sdpa
from .reference import attention_reference

registry = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "activate_flash_attention_impl"), reason="this PyTorch has no such registry"
)


@registry
def test_the_name_is_in_pytorchs_registry():
    assert op_sdpa.NAME in torch.nn.attention.list_flash_attention_impls()


@pytest.mark.parametrize("causal", (False, True))
def test_both_directions(causal):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, dout = (torch.randn(1, 4, 33, 16, device=device, dtype=torch.float16) for _ in range(2))
    k, v = (torch.randn(1, 2, 33, 16, device=device, dtype=torch.float16) for _ in range(2))
    out, lse, *_, state, offset, _ = op_sdpa.flash_forward(q, k, v, 0.0, causal)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    want, want_lse = attention_reference(*leaves, causal=causal, return_lse=True)
    torch.testing.assert_close(out.double(), want.detach(), atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse.double(), want_lse.detach().double(), atol=2e-3, rtol=1e-3)
    rest = None, None, 33, 33, 0.0, causal, state, offset
    gradients = op_sdpa.flash_backward(dout, q, k, v, out, lse, *rest)
    for mine, right in zip(gradients, torch.autograd.grad(want, leaves, dout.double()), strict=True):
        torch.testing.assert_close(mine.double(), right, atol=6e-3, rtol=6e-3)


@pytest.mark.parametrize(
    ("options", "keys", "words"),
    (
        (dict(dropout_p=0.1), 8, "dropout_p must be 0"),
        (dict(is_causal=True), 9, "as many queries as keys, got 8 queries and 9 keys"),
        (dict(return_debug_mask=True), 8, "return_debug_mask must be False"),
        *((dict(scale=scale), 8, "scale must be positive") for scale in (0.0, -0.25, float("nan"))),
    ),
)
def test_what_is_not_taken(options, keys, words):
    q, k = torch.zeros(1, 1, 8, 16, dtype=torch.float16), torch.zeros(1, 1, keys, 16, dtype=torch.float16)
    with pytest.raises(RuntimeError, match=words):
        op_sdpa.flash_forward(q, k, k, **options)
    with pytest.raises(RuntimeError, match="query must be float16 or bfloat16"):
        op_sdpa.flash_forward(q.float(), k.float(), k.float())


@registry
@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("causal", (False, True))
def test_activated(causal):
    """SDPA with the flash backend equals `attention` bitwise, and PyTorch's own result after `restore`."""
    from .op import attention

    q, k, v, dout = (torch.randn(2, 8, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))

    def run(attend):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves)
        return out, *torch.autograd.grad(out, leaves, dout)

    def sdpa(q, k, v):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    before = run(sdpa)
    torch.nn.attention.activate_flash_attention_impl(op_sdpa.NAME)
    try:
        activated = run(sdpa)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    ours = run(lambda q, k, v: attention(q, k, v, causal=causal))
    assert torch.equal(activated[0], ours[0]) and not torch.equal(activated[0], before[0])
    for mine, right in zip(activated, before, strict=True):
        torch.testing.assert_close(mine, right, atol=2e-2, rtol=2e-2)
    assert torch.equal(run(sdpa)[0], before[0])
