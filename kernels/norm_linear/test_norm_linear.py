"""What is special to norm_linear. The rest follows from SPEC: tests/test_specs.py."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.overrides import BaseTorchFunctionMode

from . import norm_linear, norm_linear_backward, norm_linear_forward
from .activation import ACTIVATIONS
from .configs import pick_bwd_config, pick_fwd_config
from .reference import norm_linear_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _inputs(dtype: torch.dtype, rows: tuple[int, ...], dim: int, cols: int) -> dict[str, torch.Tensor]:
    source = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE, generator=source).to(dtype)

    shapes = {"x": (*rows, dim), "residual": (*rows, dim), "dy": (*rows, cols), "dh": (*rows, dim)}
    made = {name: normal(*shape) for name, shape in shapes.items()}
    return {**made, "norm_weight": normal(dim).float(), "weight": normal(cols, dim) * dim**-0.5}


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_activations(activation: str | None) -> None:
    given = _inputs(torch.float32, (2, 7), 24, 37)
    leaves = [given[name].requires_grad_() for name in ("x", "norm_weight", "weight", "residual")]
    results = [op(*leaves, activation=activation) for op in (norm_linear, norm_linear_reference)]
    incoming = [given["dy"], given["dh"]]
    grads = [torch.autograd.grad(made, leaves, incoming) for made in results]
    for found, expected in zip((*results[0], *grads[0]), (*results[1], *grads[1]), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_fp16_whose_product_with_the_weight_overflows() -> None:
    """h · g is beyond 65504, n is not: the statistics come first."""
    x = torch.full((3, 24), 3e4, device=DEVICE, dtype=torch.float16)
    gain, weight = (torch.full(shape, 4.0, device=DEVICE, dtype=torch.float16) for shape in ((24,), (8, 24)))
    torch.testing.assert_close(norm_linear(x, gain, weight), norm_linear_reference(x, gain, weight))
    assert pick_fwd_config(3, 8, 24, True, torch.float16, (9, 0)).stats_first
    assert not pick_fwd_config(3, 8, 24, True, torch.bfloat16, (9, 0)).stats_first


def test_a_gradient_of_one_result_alone() -> None:
    given = _inputs(torch.float32, (5,), 24, 18)
    x, residual = (given[name].requires_grad_() for name in ("x", "residual"))
    for index in (0, 1):
        grads = []
        for op in (norm_linear, norm_linear_reference):
            made = op(x, given["norm_weight"], given["weight"], residual)[index]
            grads.append(torch.autograd.grad(made, (x, residual), given["dh" if index else "dy"]))
        for found, expected in zip(*grads, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [(37,), (2, 5), (1,), (0,)], ids=str)
@pytest.mark.parametrize(("residual", "activation"), [(True, "silu"), (True, None), (False, "gelu"), (False, None)])
def test_both_directions_are_norm_linears(
    dtype: torch.dtype, rows: tuple[int, ...], residual: bool, activation: str | None
) -> None:
    given = _inputs(dtype, rows, 24, 40)
    x, gain, weight, dy, dh = (given[name] for name in ("x", "norm_weight", "weight", "dy", "dh"))
    other = given["residual"] if residual else None
    leaves = [t.clone().requires_grad_() for t in (x, gain, weight)]
    made = norm_linear(*leaves, other, eps=1e-5, activation=activation)
    results, incoming = (made, (dy, dh)) if residual else ((made,), (dy,))
    expected = torch.autograd.grad(results, leaves, incoming)
    y, normed = torch.full_like(dy, torch.nan), torch.full_like(x, torch.nan)
    found = norm_linear_forward(x, gain, weight, other, eps=1e-5, activation=activation, y=y, normed=normed)
    assert found[0] is y and found[3] is normed and torch.equal(y, results[0])
    _, pre, h, _, rstd = found
    assert torch.equal(h, results[1] if residual else x) and (activation is not None or pre is y)
    dpre = torch.full_like(dy, torch.nan) if activation else None
    options = dict(activation=activation, dpre=dpre)
    dx, got, partial = norm_linear_backward(dy, pre, h, rstd, gain, weight, dh if residual else None, **options)
    assert got is (dpre if activation else dy) and torch.equal(dx, expected[0])
    assert partial.dtype == torch.float32 and partial.shape[1:] == gain.shape
    torch.testing.assert_close(partial.sum(0), expected[1], rtol=1e-5, atol=1e-5)
    dw = got.flatten(0, -2).float().t() @ normed.flatten(0, -2).float()
    torch.testing.assert_close(dw.to(dtype), expected[2], rtol=1e-2 if dtype == torch.float16 else 1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("activation", ["silu", "relu_sq", None])
@pytest.mark.parametrize(("rows", "dim", "cols", "out"), [(37, 72, 200, 40), (5, 131, 67, 19), (0, 24, 40, 8)])
def test_through_the_layer_that_follows(
    dtype: torch.dtype, activation: str | None, rows: int, dim: int, cols: int, out: int
) -> None:
    """As with its gradient by a product of its own, which is rounded. Of more columns than a tile has."""
    given = _inputs(dtype, (rows,), dim, cols)
    x, gain, weight, dh = (given[name] for name in ("x", "norm_weight", "weight", "dh"))
    source = torch.Generator(DEVICE).manual_seed(1)
    dz = torch.randn(rows, out, device=DEVICE, generator=source).to(dtype)
    through = torch.randn(cols, out, device=DEVICE, generator=source).mul_(out**-0.5).to(dtype).t()
    _, pre, h, _, rstd = norm_linear_forward(x, gain, weight, activation=activation)
    tensors, options = (pre, h, rstd, gain, weight, dh), dict(activation=activation)
    expected = norm_linear_backward(dz @ through, *tensors, **options)
    dpre = torch.full_like(pre, torch.nan)
    found = norm_linear_backward(dz, *tensors, **options, through=through, dpre=dpre)
    assert found[1] is dpre
    tolerance = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else dict(rtol=1e-2, atol=1e-2)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def test_results_on_any_boundary() -> None:
    """What does not begin on 16 bytes is written by a copy, also where a plan for aligned results is there."""
    given = _inputs(torch.float16, (5,), 23, 19)
    x, gain, weight, dy = (given[name] for name in ("x", "norm_weight", "weight", "dy"))
    y, pre, h, normed, rstd = norm_linear_forward(x, gain, weight, activation="silu")
    _, dpre, _ = norm_linear_backward(dy, pre, h, rstd, gain, weight, activation="silu")
    odd_y, odd_normed, odd_dpre = (torch.empty(t.numel() + 1, dtype=t.dtype, device=DEVICE)[1:].view(t.shape)
                                   for t in (y, normed, dpre))  # fmt: skip
    norm_linear_forward(x, gain, weight, activation="silu", y=odd_y, normed=odd_normed)
    norm_linear_backward(dy, pre, h, rstd, gain, weight, activation="silu", dpre=odd_dpre)
    assert torch.equal(odd_y, y) and torch.equal(odd_normed, normed) and torch.equal(odd_dpre, dpre)


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("follows", [True, False])
def test_traced_calls_are_the_same(activation: str | None, follows: bool) -> None:
    given = _inputs(torch.float32, (7,), 24, 40)
    given["through"] = torch.randn(40, 40, device=DEVICE) if follows else None

    def both(x, residual, dy, dh, norm_weight, weight, through):
        y, pre, h, normed, rstd = norm_linear_forward(x, norm_weight, weight, residual, activation=activation)
        options = dict(activation=activation, through=through)
        return y, h, normed, *norm_linear_backward(dy, pre, h, rstd, norm_weight, weight, dh, **options)

    traced = torch.compile(both, backend="aot_eager", fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(both(**given), traced(**given), strict=True))


@pytest.mark.parametrize("eager", [True, False])
def test_wrong_arguments(eager: bool) -> None:
    """In the lean call and, as under a mode that sees every function, in that of torch.library."""
    made = _inputs(torch.float32, (7,), 24, 40)
    x, dy, gain, weight = made["x"], made["dy"], made["norm_weight"], made["weight"]
    _, pre, h, _, rstd = norm_linear_forward(x, gain, weight, activation="silu")
    given = dict(dy=dy, pre=pre, h=h, rstd=rstd, norm_weight=gain, weight=weight, activation="silu")
    for name, value, error, message in (
        ("dy", dy.half(), TypeError, "dy must be a tensor of torch.float32"),
        ("dy", dy[1:], ValueError, r"dy must be \(7, 40\)"),
        ("pre", pre[:, 1:], ValueError, r"pre must be \(7, 40\)"),
        ("pre", pre.repeat_interleave(2, 0)[::2], ValueError, "pre must be contiguous"),
        ("h", h.long(), TypeError, "h must be a tensor of float32, float16 or bfloat16"),
        ("rstd", rstd.double(), TypeError, "rstd must be a tensor of torch.float32"),
        ("rstd", rstd[1:], ValueError, r"rstd must be \(7,\)"),
        ("norm_weight", gain[1:], ValueError, r"norm_weight must be \(24,\)"),
        ("norm_weight", None, TypeError, "norm_weight must be a tensor of float32, float16 or bfloat16"),
        ("weight", weight.half(), TypeError, "weight must be a tensor of h's dtype"),
        ("weight", weight[:, 1:], ValueError, r"weight must be \[N, 24\]"),
        ("dh", h.half(), TypeError, "dh must be a tensor of torch.float32"),
        ("activation", "tanh", ValueError, "activation must be None or one of silu"),
        ("activation", None, ValueError, "dpre must be None without an activation and through"),
        ("dpre", dy[1:], ValueError, r"dpre must be \(7, 40\) on"),
        ("dpre", dy.half(), TypeError, "dpre must be a tensor of torch.float32"),
        ("through", weight.half(), TypeError, "through must be a tensor of h's dtype"),
        ("through", weight, ValueError, r"through must be \[M, 40\]"),
        ("through", torch.zeros(5, 40, device=DEVICE), ValueError, r"dy must be \(7, 5\)"),
        ("weight", weight.clone().requires_grad_(), RuntimeError, "weight must not require grad"),
    ):
        changed = {**given, "dpre": torch.empty_like(pre), name: value}
        with pytest.raises(error, match=message), nullcontext() if eager else BaseTorchFunctionMode():
            norm_linear_backward(**changed)
    for name, value, error, message in (
        ("x", x.clone().requires_grad_(), RuntimeError, "x must not require grad"),
        ("y", dy.half(), TypeError, "y must be a tensor of torch.float32"),
        ("normed", x.t().contiguous().t(), ValueError, "normed must be .* contiguous"),
    ):
        with pytest.raises(error, match=message), nullcontext() if eager else BaseTorchFunctionMode():
            norm_linear_forward(**{"x": x, "norm_weight": gain, "weight": weight, name: value})


def test_plans_are_told_apart() -> None:
    """By stride, alignment, dtype and options: each call has its own result, whatever was called before."""
    wide = torch.randn(6, 40, device=DEVICE)
    for x in (wide, wide[:, :32], wide[:, 1:33], wide.half(), wide[::2], wide.half().t()[:, :5]):
        gain, weight = (torch.ones(shape, device=DEVICE, dtype=x.dtype) for shape in (x.shape[1:], (9, x.shape[1])))
        for options in ({}, {"eps": 1.0}, {"activation": "relu"}):
            found, expected = (op(x, gain, weight, **options) for op in (norm_linear, norm_linear_reference))
            torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_height_of_a_tile_is_that_of_any_alignment(dtype: torch.dtype) -> None:
    """`partial_sums` counts on it."""
    for rows in (1, 17, 564, 4096):
        configs = [pick_bwd_config(rows, 512, 1536, s, a, dtype, (9, 0)) for s in (False, True) for a in (False, True)]
        assert len({config.block_m for config in configs}) == 1


@pytest.mark.slow
def test_the_product_of_the_derivative_compiles_and_does_not_spill() -> None:
    """No case of SPEC launches it: the build does not see it."""
    script = """
import torch
from harness.compiling import ahead, launches
from kernels.norm_linear import norm_linear_backward
from kernels.norm_linear.bench import SPEC

for capability in SPEC.compile_targets:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rows, dim, cols, out in ((564, 512, 1408, 512), (37, 131, 67, 19)):
            with launches.record(capability) as seen:
                dy, pre, h, weight, through = (
                    torch.empty(shape, device="cuda", dtype=dtype)
                    for shape in ((rows, out), (rows, cols), (rows, dim), (cols, dim), (out, cols))
                )
                rstd, gain = (torch.empty(n, device="cuda") for n in (rows, dim))
                norm_linear_backward(dy, pre, h, rstd, gain, weight, h, activation="silu", through=through)
            rows_of = [ahead.describe(SPEC, launch, capability) for launch in seen]
            assert [row["jit"] for row in rows_of] == ["_norm_linear_dpre_kernel", "_norm_linear_bwd_kernel"]
            for row in rows_of:
                assert not ahead.faults({**row, "uses": []}, capability)
                assert dtype == torch.float32 or row["mma"]
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
