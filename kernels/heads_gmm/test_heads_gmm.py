"""Tests that are specific to heads_gmm. tests/test_specs.py derives the rest from SPEC."""

from __future__ import annotations

import math

import pytest
import torch

from harness.correctness import addresses

from . import configs, plans
from .configs import heads_backward
from .heads_backward import products
from .heads_backward.plan import sum_launch
from .op import heads_gmm
from .reference import heads_gmm_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _inputs(rows: int = 5, dim: int = 4, heads: int = 3, hidden: int = 7) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (rows, dim), (heads, hidden, dim), (heads, 3, hidden), (rows,), (heads, 3)
    return [(0.5 * torch.randn(shape, generator=generator)).to(DEVICE).requires_grad_() for shape in shapes]


def _both(inputs: list[torch.Tensor], save: str = "input", reduction: str = "none", activation: str = "silu") -> None:
    """Checks values and gradients against the reference in fp64."""
    wide = [t.detach().double().requires_grad_() for t in inputs]
    loss = heads_gmm(*inputs, activation, reduction, save=save)
    expected = heads_gmm_reference(*wide, activation, reduction)
    dloss = torch.randn(loss.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    grads = torch.autograd.grad(loss, inputs, dloss)
    expected_grads = torch.autograd.grad(expected, wide, dloss.double())
    for got, want in zip((loss, *grads), (expected, *expected_grads), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_what_is_kept_by_default() -> None:
    """The parameters are saved if they need at most an eighth of the bytes of x: 12 bytes a row with 96 of x, but not
    with 92."""
    assert configs.pick_save("auto", 10, 512, torch.bfloat16) and not configs.pick_save("auto", 10, 472, torch.bfloat16)
    for dim, kept in ((24, True), (23, False)):
        loss = heads_gmm(*_inputs(dim=dim, heads=1))
        saved = loss.grad_fn.saved_tensors
        assert (saved[-1] is not None) == kept
        loss.backward()
    assert not configs.pick_save("input", 1, 512, torch.float32) and configs.pick_save("parameters", 10, 1, torch.half)


@pytest.mark.parametrize("rows", [1, 300, 1024, 1025])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ctas_that_join_statistics(reduction: str, rows: int) -> None:
    """There is one CTA for up to 1024 rows, else several, whose sums are added up."""
    block = configs.pick_loss_block(rows)
    assert block >= rows if rows <= 1024 else block == configs.LOSS_BLOCK
    _both(_inputs(rows=rows), reduction=reduction)


def test_a_backward_that_computes_the_parameters_again_in_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the forward in CUDA C++, which is called for the parameters of each chunk, without statistics."""
    asked = []

    def launch(x, w1, w2, y, bias, activation, config, first=0):
        asked.append((len(x), y.shape, activation, first))
        assert (w1.shape, w2.shape, bias.shape, config) == ((3, 7, 4), (3, 3, 7), (3, 3), "config")
        count, rows = len(x), slice(first, first + len(x))

        def run(x, w1, w2, bias, y, statistics, parameters):
            assert statistics is None
            hidden = torch.relu(torch.einsum("rd,khd->rkh", x[rows], w1))
            parameters[:count] = torch.einsum("rkh,kch->rkc", hidden, w2) + bias

        return run

    monkeypatch.setattr(plans, "in_cuda", lambda *operands: True)
    monkeypatch.setattr(plans.forward, "launch", launch)
    monkeypatch.setattr(plans.heads_forward, "pick_cuda_config", lambda *problem: "config")
    monkeypatch.setattr(heads_backward, "pick_chunk_rows", lambda rows, heads, hidden: 8)
    _both(_inputs(rows=19), "input", "sum", "relu")
    assert asked == [(8, (19,), "relu", 0), (8, (19,), "relu", 8), (3, (19,), "relu", 16)]


@pytest.mark.parametrize("save", ["input", "parameters"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
def test_activations(activation: str, save: str) -> None:
    _both(_inputs(), save, activation=activation)


@pytest.mark.parametrize("save", ["input", "parameters"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_chunks_of_rows_add_up(save: str, reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three chunks, the last of another size."""
    monkeypatch.setattr(heads_backward, "pick_chunk_rows", lambda rows, heads, hidden: 8)
    _both(_inputs(rows=19), save, reduction)


@pytest.mark.parametrize("heads", [1, 2, 5])
def test_groups_of_heads_are_joined(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five heads: one per CTA, in groups of two with a last one of one, and all in one CTA."""
    config = configs.FwdConfig(16, 16, 16, heads, stages=1, num_warps=4)
    monkeypatch.setattr(configs, "pick_fwd_config", lambda *problem: config)
    _both(_inputs(rows=37, heads=5))


@pytest.mark.parametrize("save", ["input", "parameters"])
def test_products_of_the_library(save: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three chunks. add_dw1 is replaced, because on a CPU PyTorch's matmul does not support out_dtype."""

    def add(dpre: torch.Tensor, x: torch.Tensor, sums: torch.Tensor | None) -> torch.Tensor:
        new = dpre.flatten(1).mT @ x
        return new if sums is None else sums + new

    monkeypatch.setattr(products, "add_dw1", add)
    monkeypatch.setattr(heads_backward, "pick_library", lambda *problem: True)
    monkeypatch.setattr(heads_backward, "pick_chunk_rows", lambda *problem: 20)
    _both(_inputs(rows=47, hidden=19), save)


@pytest.mark.parametrize("save", ["input", "parameters"])
@pytest.mark.parametrize("needed", range(5))
def test_only_what_is_needed(needed: int, save: str) -> None:
    inputs = _inputs()
    grads = torch.autograd.grad(heads_gmm(*inputs, save=save), inputs)
    alone = [t.detach().requires_grad_(index == needed) for index, t in enumerate(inputs)]
    heads_gmm(*alone, save=save).backward()
    assert [t.grad is not None for t in alone] == [index == needed for index in range(5)]
    assert torch.equal(alone[needed].grad, grads[needed])


@pytest.mark.parametrize("sizes", [dict(rows=0), dict(hidden=0), dict(dim=0), dict(heads=1), dict(heads=128)])
def test_sizes_at_the_edge(sizes: dict[str, int]) -> None:
    _both(_inputs(**sizes))


def test_no_rows() -> None:
    inputs = _inputs(rows=0)
    assert heads_gmm(*inputs).isnan() and heads_gmm(*inputs, reduction="sum") == 0
    grads = torch.autograd.grad(heads_gmm(*inputs, reduction="sum"), inputs)
    assert all(not grad.any() for grad in grads)


def test_y_and_bias_in_fp32_beside_fp16() -> None:
    """y, bias and their gradients are not rounded to fp16."""
    x, w1, w2, y, bias = (t.detach() for t in _inputs())
    x, w1, w2 = x.half(), w1.half(), w2.half()
    wide = [y.requires_grad_(), bias.requires_grad_()]
    loss = heads_gmm(x, w1, w2, *wide, reduction="none")
    assert loss.dtype == torch.float32
    found = torch.autograd.grad(loss.sum(), wide)
    exact = [t.detach().double().requires_grad_() for t in wide]
    oracle = heads_gmm_reference(x.double(), w1.double(), w2.double(), *exact, "silu", "sum")
    for got, want in zip(found, torch.autograd.grad(oracle, exact), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3)  # act(...) is rounded to fp16


def test_a_component_that_is_off() -> None:
    """A logit of −inf in the first head, before any other component, in the last, and in all."""
    x, w1, w2, y, bias = (t.detach() for t in _inputs(heads=3))
    for off in ([0], [2], [0, 2]):
        masked = bias.clone()
        masked[off, 0] = -math.inf
        kept = [head for head in range(3) if head not in off]
        loss = heads_gmm(x, w1, w2, y, masked, reduction="none")
        alone = heads_gmm(x, w1[kept], w2[kept], y, bias[kept], reduction="none")
        torch.testing.assert_close(loss, alone)
    bias[:, 0] = -math.inf
    assert heads_gmm(x, w1, w2, y, bias, reduction="none").isnan().all()


def test_far_from_every_component() -> None:
    """Densities underflow to 0 in fp32, but log p is finite as long as z² is."""
    x, w1, w2, y, bias = _inputs()
    _both([x, w1, w2, (1e6 * y.detach()).requires_grad_(), bias])


def test_leading_dimensions_and_strides() -> None:
    x, w1, w2, y, bias = (t.detach() for t in _inputs(rows=6))
    loss = heads_gmm(x, w1, w2, y, bias, reduction="none")
    assert torch.equal(heads_gmm(x.view(2, 3, 4), w1, w2, y.view(2, 3), bias, reduction="none"), loss.view(2, 3))
    assert torch.equal(heads_gmm(x[0], w1, w2, y[0], bias, reduction="none"), loss[0])
    w1_turned, w2_turned, bias_turned = (t.mT.contiguous().mT for t in (w1, w2, bias))
    assert torch.equal(heads_gmm(x, w1_turned, w2_turned, y, bias_turned, reduction="none"), loss)
    assert torch.equal(heads_gmm(x, w1, w2, y[:1].expand(6), bias, reduction="none")[0], loss[0])


def test_says_what_is_wrong() -> None:
    x, w1, w2, y, bias = _inputs()
    with pytest.raises(ValueError, match=r"w1 must be \[K, H, 4\]"):
        heads_gmm(x, w1[:, :, :3], w2, y, bias)
    with pytest.raises(ValueError, match=r"1 <= K <= 128"):
        heads_gmm(x, w1[:0], w2[:0], y, bias[:0])
    with pytest.raises(ValueError, match=r"w2 must be \(3, 3, 7\)"):
        heads_gmm(x, w1, w2[:, :2], y, bias)
    with pytest.raises(ValueError, match=r"y must be \(5,\), got \(4,\)"):
        heads_gmm(x, w1, w2, y[:4], bias)
    with pytest.raises(TypeError, match=r"y must be a tensor of x's dtype torch.float32 or float32, got torch.float64"):
        heads_gmm(x, w1, w2, y.double(), bias)
    with pytest.raises(ValueError, match=r"x must be \[\.\.\., D\] with less than 2\^31 rows"):
        heads_gmm(x[:1].expand(2**31, 4), w1, w2, y[:1].expand(2**31), bias)
    with pytest.raises(ValueError, match="save must be one of input, parameters, auto, got 'all'"):
        heads_gmm(x, w1, w2, y, bias, save="all")
    for index, name in enumerate(("x", "w1", "w2", "y")):
        given = [t.detach() for t in (x, w1, w2, y)]
        given[index] = None
        with pytest.raises(TypeError, match=f"{name} must be a tensor of .*, got NoneType"):
            heads_gmm(*given)


def test_columns_beyond_the_hiddens_end_add_nothing() -> None:
    """A row of x has inf: all columns of the hidden are −inf before the ReLU and 0 after it, so that the loss is that
    of the bias. Columns past the last one must not give 0 · inf = NaN."""
    x, w1, w2, y, bias = (t.detach() for t in _inputs())
    x[1, 2] = math.inf
    loss = heads_gmm(x, -w1.abs(), w2, y, bias, "relu", "none")
    want = heads_gmm_reference(x, -w1.abs(), w2, y, bias, "relu", "none")
    assert want.isfinite().all()
    torch.testing.assert_close(loss, want)


def test_a_bias_whose_columns_are_far_apart() -> None:
    """The last column is 2^31 elements after the first; few elements are accessed. The offset overflows an int32, with
    which the column would be read 2^31 elements before the first."""
    x, w1, w2, y, bias = (t.detach() for t in _inputs())
    far = torch.empty(2**31 + 8, dtype=torch.float16, device=DEVICE).as_strided((3, 3), (2, 2**30))
    far.copy_(bias)
    halves = [t.half() for t in (x, w1, w2, y)]
    with addresses.checked():
        assert torch.equal(heads_gmm(*halves, far), heads_gmm(*halves, bias.half()))


@pytest.mark.gpu
@pytest.mark.parametrize("save", ["input", "parameters"])
def test_memory_of_the_backward(save: str) -> None:
    """Neither the hidden nor, unless requested, the parameters of all rows are in memory: 5.5 GB and 24 MB here. The
    statistics of a row are 16 bytes for each group of heads."""
    rows = 200_000
    shapes = {"x": (rows, 128), "w1": (10, 1365, 128), "w2": (10, 3, 1365), "y": (rows,), "bias": (10, 3)}
    inputs = {n: torch.randn(s, device="cuda").mul(0.05).bfloat16().requires_grad_() for n, s in shapes.items()}
    before = torch.cuda.memory_allocated()
    loss = heads_gmm(**inputs, save=save)
    kept = torch.cuda.memory_allocated() - before
    assert kept < 2**20 if save == "input" else rows * 120 <= kept < rows * 120 + 2**20
    torch.cuda.reset_peak_memory_stats()
    loss.backward()
    assert torch.cuda.max_memory_allocated() - before < 2 * rows * 128 * 2 + 400 * 2**20


@pytest.mark.parametrize("parts", [1, 16, 17, 37, 313])
def test_parts_of_a_sum(parts: int) -> None:
    """Few and many parts, of few and many elements, of two tensors in one launch. Repeated runs agree bit for bit."""
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(shape, generator=generator).to(DEVICE) for shape in ((parts, 10, 3), (5, 1100)))
    found = []
    for _ in range(2):
        sums = first.new_empty(10, 3), second.new_empty(1100).half()
        sum_launch((sums[0], parts), (sums[1], 5))(first, sums[0], second, sums[1])
        found.append(sums)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    torch.testing.assert_close(found[0][0], first.double().sum(0).float(), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(found[0][1], second.double().sum(0).half(), rtol=2e-3, atol=1e-3)
