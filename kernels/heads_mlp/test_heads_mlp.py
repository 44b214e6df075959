"""What is special to heads_mlp. The rest follows from SPEC: tests/test_specs.py."""

from __future__ import annotations

import pytest
import torch

from . import configs
from .configs import heads_backward
from .heads_backward import plan, products
from .launch import forget
from .op import heads_mlp
from .reference import heads_mlp_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _inputs(rows: int = 5, dim: int = 4, heads: int = 2, hidden: int = 7, dim_out: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (rows, dim), (heads, hidden, dim), (heads, dim_out, hidden)
    return [torch.randn(shape, generator=generator).to(DEVICE).requires_grad_() for shape in shapes]


def _both(inputs: list[torch.Tensor], activation: str = "silu") -> None:
    """Values and gradients are those of the reference in fp64."""
    wide = [t.detach().double().requires_grad_() for t in inputs]
    y, expected = heads_mlp(*inputs, activation), heads_mlp_reference(*wide, activation)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    grads, expected_grads = torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, wide, dy.double())
    for got, want in zip((y, *grads), (expected, *expected_grads), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_activations(activation: str) -> None:
    _both(_inputs(), activation)


def test_chunks_of_rows_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three chunks, the last of another size; w1's gradient passes through the fp32 sums."""
    monkeypatch.setattr(heads_backward, "pick_chunk_rows", lambda rows, heads, hidden: 8)
    forget()
    _both(_inputs(rows=19))
    forget()


def test_parts_of_a_chunk_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tiles of rows in a part, and two parts; x read again for each block of columns."""
    config = heads_backward.DhiddenConfig(16, 16, 16, tiles=2, stages=1, num_warps=4)
    monkeypatch.setattr(heads_backward, "pick_dhidden_config", lambda *problem: config)
    again = configs.FwdConfig(16, 16, 16, heads=2, resident=False, stages=1, num_warps=4)
    monkeypatch.setattr(configs, "pick_fwd_config", lambda *problem: again)
    forget()
    _both(_inputs(rows=37, dim=17, heads=3, hidden=18))
    forget()


@pytest.mark.parametrize("needed", [0, 1, 2])
def test_only_what_is_needed(needed: int) -> None:
    inputs = _inputs()
    _, *grads = heads_mlp(*inputs).sum(), *torch.autograd.grad(heads_mlp(*inputs).sum(), inputs)
    alone = [t.detach().requires_grad_(index == needed) for index, t in enumerate(inputs)]
    heads_mlp(*alone).sum().backward()
    assert [t.grad is not None for t in alone] == [index == needed for index in range(3)]
    assert torch.equal(alone[needed].grad, grads[needed])


@pytest.mark.parametrize("sizes", [dict(rows=0), dict(hidden=0), dict(heads=0), dict(dim_out=0), dict(dim=0)])
def test_empty_sums_are_zero(sizes: dict[str, int]) -> None:
    _both(_inputs(**sizes))


def test_infinite_gradient_stays_in_its_row() -> None:
    """Columns beyond the hidden's end are no 0 · inf."""
    x, w1, w2 = _inputs()
    dy = torch.ones(5, 2, 3, device=DEVICE)
    dy[1] = torch.inf
    dx = torch.autograd.grad(heads_mlp(x, w1, w2.detach().abs(), "relu"), x, dy)[0]
    assert dx[[0, 2, 3, 4]].isfinite().all()
    positive = [t.detach().abs().requires_grad_() for t in (x, w1, w2)]
    assert torch.autograd.grad(heads_mlp(*positive, "relu"), positive[0], dy)[0][1].isposinf().all()


def test_leading_dimensions_and_strides() -> None:
    x, w1, w2 = _inputs(rows=6)
    y = heads_mlp(x, w1, w2)
    assert torch.equal(heads_mlp(x.reshape(2, 3, 4), w1, w2), y.reshape(2, 3, 2, 3))
    assert torch.equal(heads_mlp(x[0], w1, w2), y[0])
    assert torch.equal(heads_mlp(x, w1.mT.contiguous().mT, w2.mT.contiguous().mT), y)


def test_says_what_is_wrong() -> None:
    x, w1, w2 = _inputs()
    with pytest.raises(ValueError, match=r"w1 must be \[K, H, 4\]"):
        heads_mlp(x, w1[:, :, :3], w2)
    with pytest.raises(ValueError, match=r"w2 must be \[2, O, 7\] like w1"):
        heads_mlp(x, w1, w2[:1])
    with pytest.raises(ValueError, match="at most 64 rows a head, got 65"):
        heads_mlp(x, w1, w2.new_zeros(2, 65, 7))
    with pytest.raises(ValueError, match="activation must be one of"):
        heads_mlp(x, w1, w2, "tanh")


@pytest.mark.parametrize("rows", [1, 564, 5000, 205_000])
def test_heads_of_a_cta_fill_the_gpu(rows: int) -> None:
    config = configs.pick_fwd_config(rows, 512, 10, 1365, True, torch.bfloat16, (9, 0), 132)
    ctas = -(-rows // config.block_m) * -(-10 // config.heads)
    assert ctas >= min(132, -(-rows // 64) * 10)
    assert plan.block_o(3) == 16


@pytest.mark.gpu
@pytest.mark.parametrize(
    "needs", [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
)
def test_sums_by_the_library(needs: tuple[bool, bool, bool]) -> None:
    """Two chunks, the second of another size; a hidden whose rows are padded; an incoming gradient of stride 0."""
    shapes = ((9001, 96), (3, 37, 96), (3, 3, 37))
    made = [torch.randn(shape, device="cuda").mul(shape[-1] ** -0.5).bfloat16() for shape in shapes]
    assert heads_backward.pick_library(9001, 3, torch.bfloat16, on_gpu=True)
    dy = torch.randn(3, 3, device="cuda").bfloat16().expand(9001, 3, 3)
    found = []
    for op, dtype in (
        (heads_mlp, torch.bfloat16),
        (heads_mlp_reference, torch.bfloat16),
        (heads_mlp_reference, torch.float64),
    ):
        leaves = [t.to(dtype).requires_grad_(need) for t, need in zip(made, needs, strict=True)]
        found.append(torch.autograd.grad(op(*leaves), [t for t in leaves if t.requires_grad], dy.to(dtype)))
    for ours, eager, want in zip(*found, strict=True):
        assert ours.is_contiguous() and (ours - want).abs().max() <= 1.5 * (eager - want).abs().max()


@pytest.mark.parametrize("dim_out", [1, 2, 3, 4])
def test_the_pass_between_products_of_the_library(dim_out: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three chunks, two parts each. On a CPU no product of PyTorch has another dtype for its result."""

    def add(dpre: torch.Tensor, x: torch.Tensor, sums: torch.Tensor | None) -> torch.Tensor:
        new = dpre.flatten(1).mT @ x
        return new if sums is None else sums + new

    monkeypatch.setattr(products, "add_dw1", add)
    monkeypatch.setattr(heads_backward, "pick_library", lambda *problem: True)
    monkeypatch.setattr(heads_backward, "pick_chunk_rows", lambda *problem: 20)
    monkeypatch.setattr(
        heads_backward, "pick_pass_config", lambda *problem: heads_backward.DhiddenConfig(16, 16, 16, 1, 1, 4)
    )
    forget()
    _both(_inputs(rows=47, hidden=19, dim_out=dim_out))
    forget()
