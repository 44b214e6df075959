"""rmsnorm_forward and rmsnorm_backward: the results of rmsnorm, and its gradients from partial sums."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.overrides import BaseTorchFunctionMode

from . import rmsnorm, rmsnorm_backward, rmsnorm_forward, rmsnorm_fp8
from .plans import MAX_ROWS, bwd_plan
from .reference import rmsnorm_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _inputs(dtype: torch.dtype, *shape: int) -> tuple[torch.Tensor, ...]:
    source = torch.Generator(DEVICE).manual_seed(0)
    x, residual, dy, dh = (torch.randn(shape, device=DEVICE, generator=source).to(dtype) for _ in range(4))
    weight = torch.randn(shape[-1], device=DEVICE, generator=source)
    return x, residual, dy, dh, weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(37, 24), (2, 5, 64), (1, 8), (3, 20000), (0, 16)], ids=str)
@pytest.mark.parametrize("residual", [True, False])
def test_both_directions_are_rmsnorms(dtype: torch.dtype, shape: tuple[int, ...], residual: bool) -> None:
    x, other, dy, dh, weight = _inputs(dtype, *shape)
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    other = other if residual else None
    results = rmsnorm(*leaves, 1e-5, other, 0.5)
    y, h = results if residual else (results, x)
    expected = torch.autograd.grad([y, h] if residual else [y], leaves, [dy, dh] if residual else [dy])
    found_y, found_h, rstd = rmsnorm_forward(x, weight, 1e-5, other, 0.5)
    assert torch.equal(found_y, y) and torch.equal(found_h, h)
    dx, partial = rmsnorm_backward(dy, found_h, rstd, weight, dh if residual else None, 0.5)
    assert torch.equal(dx, expected[0]) and partial.dtype == torch.float32 and partial.shape[1:] == weight.shape
    torch.testing.assert_close(partial.sum(0), expected[1], rtol=1e-5, atol=1e-5)


def test_traced_calls_are_the_same() -> None:
    x, residual, dy, dh, weight = _inputs(torch.float32, 7, 24)

    def both(x, residual, dy, dh, weight):
        _, h, rstd = rmsnorm_forward(x, weight, residual=residual)
        return rmsnorm_backward(dy, h, rstd, weight, dh)

    traced = torch.compile(both, backend="aot_eager", fullgraph=True)
    given = (x, residual, dy, dh, weight)
    assert all(torch.equal(a, b) for a, b in zip(both(*given), traced(*given), strict=True))


@pytest.mark.parametrize("eager", [True, False])
def test_wrong_arguments(eager: bool) -> None:
    """Checked in the fast path of eager calls and, under a torch function mode, in the path through torch.library."""
    x, _, dy, _, weight = _inputs(torch.float32, 7, 24)
    _, h, rstd = rmsnorm_forward(x, weight)
    given = dict(dy=dy, h=h, rstd=rstd, weight=weight)
    for name, value, error, message in (
        ("dy", dy.half(), TypeError, "dy must be a tensor of torch.float32"),
        ("dy", dy[1:], ValueError, r"dy must be \(7, 24\)"),
        ("h", h.long(), TypeError, "h must be a tensor of float32, float16 or bfloat16"),
        ("rstd", rstd.double(), TypeError, "rstd must be a tensor of torch.float32"),
        ("rstd", rstd[1:], ValueError, r"rstd must be \(7,\)"),
        ("rstd", rstd.repeat_interleave(2)[::2], ValueError, "rstd must be contiguous"),
        ("weight", weight[1:], ValueError, r"weight must be \(24,\)"),
        ("weight", None, TypeError, "weight must be a tensor of float32, float16 or bfloat16"),
        ("dh", dy.half(), TypeError, "dh must be a tensor of torch.float32"),
        ("weight_offset", "1", TypeError, "weight_offset must be a number"),
        ("weight", weight.clone().requires_grad_(), RuntimeError, "weight must not require grad"),
    ):
        with pytest.raises(error, match=message), nullcontext() if eager else BaseTorchFunctionMode():
            rmsnorm_backward(**{**given, name: value})
    with pytest.raises(RuntimeError, match="x must not require grad"):
        rmsnorm_forward(x.clone().requires_grad_(), weight)


def test_saved_tensors_may_come_back_at_other_addresses() -> None:
    """A hook, as one that offloads activations, may return rstd off 16-byte boundaries: that is another plan."""
    x, _, dy, _, weight = _inputs(torch.float32, 40, 24)
    leaves, gradients = [t.requires_grad_() for t in (x, weight)], []
    for start in (0, 1):

        def unpacked(t: torch.Tensor, start: int = start) -> torch.Tensor:
            buffer = torch.empty(t.numel() + start, dtype=t.dtype, device=t.device)
            return buffer[start:].view(t.shape).copy_(t) if t.shape == (40,) else t

        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpacked):
            y = rmsnorm(*leaves)
        gradients.append(torch.autograd.grad(y, leaves, dy))
    for aligned, other in zip(*gradients, strict=True):
        torch.testing.assert_close(aligned, other)


def test_rows_that_tiles_cannot_count_are_errors() -> None:
    """Above 2^31 the index of a row, and just below it the number of tiles, would be negative in 32 bits."""
    x, rstd = torch.ones(1, 1, device=DEVICE).expand(MAX_ROWS + 1, 1), torch.ones(1, device=DEVICE)
    for call in (rmsnorm, rmsnorm_forward, rmsnorm_fp8):
        with pytest.raises(ValueError, match=f"x must have at most {MAX_ROWS} rows"):
            call(x)
    with pytest.raises(ValueError, match=f"x must have at most {MAX_ROWS} rows"):
        bwd_plan(x, None, x, rstd, 0.0, True, True)


@pytest.mark.gpu
def test_the_most_rows() -> None:
    """The number of tiles of the backward, rounded up in 32 bits, is not negative."""
    source = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(MAX_ROWS, 1, device="cuda", dtype=torch.bfloat16, generator=source).requires_grad_()
    y = rmsnorm(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones(1, 1, device="cuda", dtype=x.dtype).expand(x.shape))
    for part in (slice(0, 5000), slice(-5000, None)):
        few = x.detach()[part].clone().requires_grad_()
        expected = rmsnorm_reference(few)
        torch.testing.assert_close(y[part], expected)
        torch.testing.assert_close(dx[part], torch.autograd.grad(expected.sum(), few)[0], rtol=2e-2, atol=1e-3)
