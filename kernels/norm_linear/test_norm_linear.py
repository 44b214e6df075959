"""What is special to norm_linear. The rest follows from SPEC: tests/test_specs.py."""

from __future__ import annotations

import pytest
import torch

from .configs import pick_config
from .op import norm_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_linear_in_alpha() -> None:
    x = torch.randn(5, 33, device=DEVICE)
    torch.testing.assert_close(norm_linear(x, 3.0), 3 * norm_linear(x, 1.0))


def test_gradient_is_alpha() -> None:
    x = torch.randn(4, 7, device=DEVICE, requires_grad=True)
    norm_linear(x, -2.0).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, -2.0))


def test_rows_are_read_in_place() -> None:
    wide = torch.randn(6, 40, device=DEVICE)
    torch.testing.assert_close(norm_linear(wide[:, 3:20], 2.0), 2 * wide[:, 3:20])


@pytest.mark.parametrize("dim", [1, 127, 2048, 100_000])
def test_config_covers_a_tile(dim: int) -> None:
    config = pick_config(rows=1000, dim=dim, dtype=torch.float32, capability=(9, 0))
    assert config.block_m * config.block_n >= 2048
    assert config.block_n <= 2048


def test_says_what_is_wrong() -> None:
    with pytest.raises(TypeError, match="x must be float32, float16 or bfloat16, got torch.int64"):
        norm_linear(torch.arange(4, device=DEVICE))
    with pytest.raises(ValueError, match=r"x must be \[..., D\]"):
        norm_linear(torch.tensor(1.0, device=DEVICE))


def test_plans_are_told_apart() -> None:
    """By stride, alignment, dtype and alpha: each call has its own result, whatever was called before."""
    wide = torch.randn(6, 40, device=DEVICE)
    for x in (wide, wide[:, :32], wide[:, 1:33], wide.half(), wide.t(), wide[:3]):
        for alpha in (2.0, 3.0):
            torch.testing.assert_close(norm_linear(x, alpha), x * alpha)
