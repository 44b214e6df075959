"""Tests that the embedding's kernels agree with PyTorch's layers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from . import embedding
from .layers import Linear
from .model import TransformerNP

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter computes bf16 wrongly
#: batch, context, targets, columns of x, hidden, width
SHAPES = {
    "one row": (1, 1, 1, 1, 8, 8),
    "no context": (2, 0, 3, 1, 8, 24),
    "no targets": (2, 5, 0, 2, 16, 16),
    "several tasks": (3, 21, 14, 1, 136, 40),
    "wide points": (1, 9, 30, 13, 64, 72),
    "wider points": (2, 4, 5, 14, 24, 300),
    "more rows than parts": (1, 1000, 1100, 1, 16, 8),
}


def made(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[torch.Tensor], list[Linear]]:
    batch, context, targets, columns, hidden, width = shape
    generator = torch.Generator().manual_seed(0)
    points = [
        torch.randn(*size, generator=generator).to(DEVICE)
        for size in ((batch, context, columns), (batch, context), (batch, targets, columns))
    ]
    torch.manual_seed(1)
    return points, [Linear(*size).to(DEVICE, dtype) for size in ((columns + 2, hidden), (hidden, width))]


def plain(points: list[torch.Tensor], layers: list[Linear], dtype: torch.dtype) -> torch.Tensor:
    """The embedding in plain PyTorch, in fp64 except for the points, which are rounded."""
    x_context, y_context, x_target = points
    context = torch.cat((x_context, y_context[..., None], torch.ones_like(y_context)[..., None]), -1)
    rows = torch.cat((context, F.pad(x_target, (0, 2))), 1).to(dtype).double()
    first, second = layers
    hidden = F.silu(F.linear(rows, first.weight.double(), first.bias.double()))
    return F.linear(hidden, second.weight.double(), second.bias.double())


def results(rows: torch.Tensor, layers: list[Linear], dy: torch.Tensor) -> list[torch.Tensor]:
    return [rows.detach(), *torch.autograd.grad(rows, [p for layer in layers for p in layer.parameters()], dy)]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rows_and_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    points, layers = made(shape, dtype)
    assert embedding.takes(*layers, *points)
    rows = embedding.embedded(*points, *layers, dtype)
    dy = torch.randn(rows.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    found, expected = results(rows, layers, dy.to(dtype)), results(plain(points, layers, dtype), layers, dy.double())
    for ours, want in zip(found, expected, strict=True):
        assert ours.dtype == dtype and ours.shape == want.shape
        error = 3e-6 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(ours.double(), want.double(), rtol=0, atol=error * max(1, want.abs().max().item()))
    again = results(embedding.embedded(*points, *layers, dtype), layers, dy.to(dtype))
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_layouts_and_rounding() -> None:
    """Points with any strides; fp32 weights are rounded to the rows' dtype, and their gradients are fp32."""
    points, layers = made((3, 21, 14, 2, 40, 24), torch.float32)
    strided = [torch.stack((t, t), -1)[..., 0] for t in points]
    assert not any(t.is_contiguous() for t in strided)
    found = embedding.embedded(*strided, *layers, HALF)
    halves = [layer.to(HALF) for layer in made((3, 21, 14, 2, 40, 24), torch.float32)[1]]
    assert torch.equal(found, embedding.embedded(*points, *halves, HALF))
    found.backward(torch.ones_like(found))
    assert all(p.grad.dtype == torch.float32 for layer in layers for p in layer.parameters())


def test_only_wanted_gradients() -> None:
    points, layers = made((2, 5, 6, 1, 16, 8), torch.float32)
    layers[0].requires_grad_(False)
    layers[1].weight.requires_grad_(False)
    rows = embedding.embedded(*points, *layers, torch.float32)
    rows.backward(torch.ones_like(rows))
    assert torch.allclose(layers[1].bias.grad, torch.full_like(layers[1].bias, 22.0))
    assert layers[1].weight.grad is layers[0].weight.grad is None


@pytest.mark.parametrize("which", ["y_context", "bias", "gradient"])
def test_tensors_on_other_boundaries(which: str) -> None:
    """After a call with aligned tensors, one of the same sizes with a tensor on no 16-byte boundary."""

    def moved(t: torch.Tensor, name: str) -> torch.Tensor:
        return torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape) if name == which else t

    points, layers = made((2, 5, 6, 1, 16, 32), torch.float32)
    dy = torch.randn(2, 11, 32, device=DEVICE)
    expected = results(embedding.embedded(*points, *layers, torch.float32), layers, dy)
    points[1], dy = moved(points[1], "y_context"), moved(dy, "gradient")
    layers[0].bias.data = moved(layers[0].bias.data, "bias")
    found = results(embedding.embedded(*points, *layers, torch.float32), layers, dy)
    for ours, want in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 5, 1), (2, 4), (2, 6, 1)),
        ((2, 5, 1), (2, 5, 1), (2, 6, 1)),
        ((2, 5, 1), (2, 5), (1, 6, 1)),
        ((2, 5, 1), (2, 5), (2, 6, 2)),
        ((2, 5, 2), (2, 5), (2, 6, 2)),
    ],
)
def test_sizes_that_disagree_are_an_error(shapes: tuple[tuple[int, ...], ...]) -> None:
    model = TransformerNP(1, 16, 2, 12, 3, padding=8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with pytest.raises(RuntimeError):
        model.embedded(*(torch.zeros(shape, device=DEVICE) for shape in shapes))


@pytest.mark.parametrize("shapes", [((0, 5, 1), (0, 5), (0, 6, 1)), ((2, 0, 1), (2, 0), (2, 0, 1))])
def test_no_rows(shapes: tuple[tuple[int, ...], ...]) -> None:
    model = TransformerNP(1, 16, 2, 12, 3, padding=8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    rows = model.embedded(*(torch.zeros(shape, device=DEVICE) for shape in shapes))
    assert rows.shape == (shapes[0][0], shapes[0][1] + shapes[2][1], 16)
    assert not any(gradient.any() for gradient in torch.autograd.grad(rows.sum(), list(model.embed.parameters())))


def test_a_call_it_does_not_take_is_pytorchs() -> None:
    """Transforms, autocast, points with a gradient or of another dtype use PyTorch; the model's rows are the same."""
    model = TransformerNP(1, 16, 2, 12, 3, padding=8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    points, _ = made((2, 5, 6, 1, 16, 16), torch.float32)
    first, _, second = model.embed
    assert embedding.takes(first, second, *points) and model.fused_embedding
    rows = model.embedded(*points)
    asked = [points[0].clone().requires_grad_(), *points[1:]]
    assert not embedding.takes(first, second, *asked)
    torch.testing.assert_close(model.embedded(*asked), rows)
    assert torch.autograd.grad(model.embedded(*asked).sum(), asked[0])[0].abs().sum() > 0
    with torch.no_grad():
        assert embedding.takes(first, second, *asked)
    assert not embedding.takes(first, second, *(t.double() for t in points))
    with torch.autocast(DEVICE, torch.bfloat16):
        assert not embedding.takes(first, second, *points)
    seen = []
    torch.func.vmap(lambda x: (seen.append(embedding.takes(first, second, x, *points[1:])), x)[1])(points[0][None])
    assert seen == [False]
    assert not TransformerNP(1, 16, 2, 12, 3, padding=8, mlp="torch").fused_embedding
