"""Tests that are specific to heads_mlp. tests/test_specs.py derives the rest from SPEC."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from harness.correctness import addresses, guard

from . import configs, plans
from .configs import heads_backward
from .heads_backward import plan, products
from .op import _bwd_op, heads_mlp
from .reference import heads_mlp_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _inputs(rows: int = 5, dim: int = 4, heads: int = 2, hidden: int = 7, dim_out: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (rows, dim), (heads, hidden, dim), (heads, dim_out, hidden)
    return [torch.randn(shape, generator=generator).to(DEVICE).requires_grad_() for shape in shapes]


def _both(inputs: list[torch.Tensor], activation: str = "silu") -> None:
    """Checks values and gradients against the reference in fp64."""
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
    """Three chunks, the last of another size. w1's gradient is accumulated in fp32 over the chunks."""
    monkeypatch.setattr(heads_backward, "pick_chunk_rows", lambda rows, heads, hidden: 8)
    _both(_inputs(rows=19))


def test_parts_of_a_chunk_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts with two tiles of rows each. x is read again for each block of columns."""
    config = heads_backward.DhiddenConfig(16, 16, 16, tiles=2, stages=1, num_warps=4)
    monkeypatch.setattr(heads_backward, "pick_dhidden_config", lambda *problem: config)
    again = configs.FwdConfig(16, 16, 16, heads=2, resident=False, stages=1, num_warps=4)
    monkeypatch.setattr(configs, "pick_fwd_config", lambda *problem: again)
    _both(_inputs(rows=37, dim=17, heads=3, hidden=18))


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
    """Zeros are written, because the memory of the results is uninitialised."""
    with guard.poisoned():
        _both(_inputs(**sizes))


def test_infinite_gradient_stays_in_its_row() -> None:
    """Columns past the last one of the hidden must not give 0 · inf = NaN."""
    x, w1, w2 = _inputs()
    dy = torch.ones(5, 2, 3, device=DEVICE)
    dy[1] = torch.inf
    dx = torch.autograd.grad(heads_mlp(x, w1, w2.detach().abs(), "relu"), x, dy)[0]
    assert dx[[0, 2, 3, 4]].isfinite().all()
    positive = [t.detach().abs().requires_grad_() for t in (x, w1, w2)]
    assert torch.autograd.grad(heads_mlp(*positive, "relu"), positive[0], dy)[0][1].isposinf().all()


def test_an_infinite_row_is_no_nan() -> None:
    """Columns past the last one of the hidden must not give 0 · inf = NaN. The result is inf, or 0 if the activation is
    0 in all columns."""
    x, w1, w2 = (t.detach().abs() for t in _inputs())
    x[1, 2] = torch.inf
    assert heads_mlp(x, w1, w2, "relu")[1].isposinf().all()
    assert not heads_mlp(x, -w1, w2, "relu")[1].any()


def test_an_infinite_weight_reaches_no_row_beyond_the_last() -> None:
    """w2's gradient is a sum of infinities of one sign. Padding rows of a tile would add 0 · inf = NaN."""
    x, w1, w2 = (t.detach().abs() for t in _inputs())
    w1[0, 3, 1] = torch.inf
    w2.requires_grad_()
    (dw2,) = torch.autograd.grad(heads_mlp(x, w1, w2, "relu").sum(), w2)
    assert dw2[0, :, 3].isposinf().all() and dw2.isfinite().sum() == dw2.numel() - 3


def test_rows_and_columns_that_are_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of rows, or of columns, spans 2^31 elements, few of which are accessed. Its stride overflows an int32,
    with which it would be read 2^31 elements before the first."""
    monkeypatch.setattr(
        configs, "pick_fwd_config", lambda *problem: configs.FwdConfig(16, 16, 16, 1, False, stages=1, num_warps=4)
    )
    monkeypatch.setattr(
        heads_backward, "pick_dhidden_config", lambda *problem: heads_backward.DhiddenConfig(16, 16, 16, 2, 1, 4)
    )
    monkeypatch.setattr(
        heads_backward, "pick_dw1_config", lambda *problem: heads_backward.TileConfig(16, 16, 16, stages=1, num_warps=4)
    )
    memory = torch.empty(17 * 2**27, dtype=torch.float16, device=DEVICE)
    for sizes, strides in (((17, 16), (2**27, 1)), ((5, 17), (1, 2**27))):
        x, w1, w2 = (t.detach().half() for t in _inputs(*sizes))
        found = []
        for rows in (x, memory.as_strided(sizes, strides).copy_(x)):
            leaves = [t.detach().requires_grad_() for t in (rows, w1, w2)]
            with addresses.checked():
                y = heads_mlp(*leaves)
                found.append((y, *torch.autograd.grad(y, leaves, torch.ones_like(y))))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


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
    with pytest.raises(TypeError, match="x must be a tensor of float32, float16 or bfloat16, got torch.float64"):
        heads_mlp(x.double(), w1.double(), w2.double())
    with pytest.raises(TypeError, match="x must be a tensor of float32, float16 or bfloat16, got list"):
        heads_mlp([1.0], w1, w2)
    with pytest.raises(ValueError, match=r"x must be \[\.\.\., D\] with less than 2\^31 rows"):
        heads_mlp(x[:1, None].expand(2**16, 2**15, 4), w1, w2)
    most = (t.to("meta") for t in (x[:1].expand(2**31 - 1, 4), w1, w2))
    with pytest.raises(RuntimeError, match="x must be on a GPU"):
        heads_mlp(*most)


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)))
def test_what_the_op_of_the_gradients_says_of_its_results(needs: tuple[bool, bool, bool]) -> None:
    x, w1, w2 = (t.detach() for t in _inputs())
    dy = torch.randn(5, 2, 3, device=DEVICE)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(_bwd_op, (dy, x, w1, w2, "silu", *needs), test_utils=tests)


def test_the_version_that_is_picked_gets_the_tensors_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the forward in CUDA C++ by the reference, and checks its arguments."""

    def launch(x, w1, w2, activation):
        assert (x.shape, w1.shape, w2.shape, activation) == ((5, 4), (2, 7, 4), (2, 3, 7), "relu")
        return lambda x, w1, w2, y: y.copy_(heads_mlp_reference(x, w1, w2, "relu"))

    x, w1, w2 = (t.detach() for t in _inputs())
    want = heads_mlp(x, w1, w2, "relu")
    monkeypatch.setattr(plans.sm90_heads, "unsupported_reason", lambda *_: None)
    monkeypatch.setattr(plans.forward, "launch", launch)
    asked = []
    monkeypatch.setattr(configs, "pick_backend", lambda *given, **told: asked.append((given, told)) or "cuda")
    torch.testing.assert_close(heads_mlp(x, w1, w2, "relu"), want)
    assert asked == [(("auto", 5), {"possible": True})]


@pytest.mark.parametrize("rows", [1, 564, 5000, 205_000])
def test_heads_of_a_cta_fill_the_gpu(rows: int) -> None:
    config = configs.pick_fwd_config(rows, 512, 10, 1365, True, torch.bfloat16, (9, 0), 132)
    ctas = -(-rows // config.block_m) * -(-10 // config.heads)
    assert ctas >= min(132, -(-rows // 64) * 10)
    assert plan.block_o(3) == 16


NEEDS = [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]


def _on_a_cpu(dpre: torch.Tensor, x: torch.Tensor, sums: torch.Tensor | None) -> torch.Tensor:
    """products.add_dw1 for a CPU, on which PyTorch's matmul does not support out_dtype."""
    new = dpre.flatten(1).mT @ x
    return new if sums is None else sums + new


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [heads_backward.CHUNK_ROWS + 1, 9001])
@pytest.mark.parametrize("cuda", [True, False])
@pytest.mark.parametrize("needs", NEEDS)
def test_sums_by_the_library(
    needs: tuple[bool, bool, bool], cuda: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two chunks, the second of one row or of some; a hidden whose rows are padded; an incoming gradient of stride 0.
    The gradient of the hidden is computed in CUDA C++, if that is possible, and in Triton."""
    if not cuda:
        monkeypatch.setattr(heads_backward, "pick_cuda", lambda rows, possible: False)
    shapes = ((rows, 96), (3, 37, 96), (3, 3, 37))
    made = [torch.randn(shape, device="cuda").mul(shape[-1] ** -0.5).bfloat16() for shape in shapes]
    assert heads_backward.pick_library(rows, torch.bfloat16, on_gpu=True)
    dy = torch.randn(3, 3, device="cuda").bfloat16().expand(rows, 3, 3)
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


def test_triton_beside_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three chunks, the last of another size."""
    monkeypatch.setattr(products, "add_dw1", _on_a_cpu)
    monkeypatch.setattr(heads_backward, "pick_library", lambda *problem: True)
    monkeypatch.setattr(heads_backward, "pick_chunk_rows", lambda *problem: 20)
    _both(_inputs(rows=47, hidden=19, dim_out=5))


@pytest.mark.parametrize("chunk", [32, pytest.param(16, marks=pytest.mark.gpu)])
def test_autocast_does_not_change_gradients(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """w1's gradient of a single chunk, and of two, is by the library, for whose operands autocast has a dtype."""
    monkeypatch.setattr(heads_backward, "pick_library", lambda *problem: True)
    monkeypatch.setattr(heads_backward, "pick_chunk_rows", lambda *problem: chunk)
    made, found = [t.detach().half() for t in _inputs(rows=30, hidden=19)], []
    for enabled in (False, True):
        leaves = [t.detach().requires_grad_() for t in made]
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=enabled):
            y = heads_mlp(*leaves)
            found.append((y, *torch.autograd.grad(y, leaves, torch.ones_like(y))))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def _dhidden_in_pytorch(start, rows, x, w1, w2, dy_strides, activation, config, added):
    """The equivalent of sm90/heads_dhidden.cu, with the same parts. `dy_strides` are its launch's strides."""

    def run(dy, x, w1, w2, dpre, dw2) -> None:
        assert dy.stride() == dy_strides and dy.shape[0] >= rows
        pre = torch.einsum("rd,ghd->rgh", x[start : start + rows], w1).requires_grad_()
        with torch.enable_grad():
            h = torch.nn.functional.silu(pre)
        if dpre is not None:
            dpre[:rows] = 0
            dh = torch.einsum("rgo,goh->rgh", dy[:rows], w2)
            dpre[:rows, :, : w2.shape[2]] = torch.autograd.grad(h, pre, dh)[0]
        for part, first in enumerate(range(0, rows, 128 * config.tiles)):
            these = slice(first, min(first + 128 * config.tiles, rows))
            if dw2 is not None:
                new, to = torch.einsum("rgo,rgh->goh", dy[these], h.detach()[these]), dw2.view(-1, *w2.shape)[part]
                to.copy_(to + new if part < added else new)

    return run


def _products_in_pytorch(start, rows, x, w1, config):
    """The equivalent of sm90/heads_products.cu, with the same parts."""

    def run(dpre, x, w1, parts, dx, sums, dw1, add) -> None:
        own = dpre[:rows, :, : w1.shape[1]]
        if config.dx_heads:
            firsts = range(0, w1.shape[0], config.dx_heads)
            found = [
                torch.einsum("rgh,ghd->rd", own[:, at : at + config.dx_heads], w1[at : at + config.dx_heads])
                for at in firsts
            ]
            for index, part in enumerate(found):
                (dx if parts is None else parts[index * part.numel() :][: part.numel()].view_as(part)).copy_(part)
            assert (parts is None) == (len(found) == 1)
        if config.dw1:
            new = torch.einsum("rgh,rd->ghd", own, x[start : start + rows]) + (sums if add else 0)
            (sums if dw1 is None else dw1).copy_(new)

    return run


@pytest.mark.parametrize(("heads", "chunk"), [(0, 300), (1, 300), (3, 300), (2, 700)])
@pytest.mark.parametrize("needs", [*NEEDS, (True, True, False), (False, True, True)])
def test_the_plan_around_cuda(
    needs: tuple[bool, bool, bool], heads: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three chunks of three, three and one tiles, in parts of two: the last chunk adds only to the first part. A single
    chunk, whose parts are not added to others. x's gradient in parts of `heads` heads; with 0, cuBLAS computes the
    GEMMs."""
    products_config = heads_backward.ProductsConfig(heads, True, cluster=2, beside=False, ahead=0, stages=4)
    monkeypatch.setattr(heads_backward, "pick_products", lambda *problem, possible: possible and heads > 0)
    monkeypatch.setattr(
        heads_backward,
        "pick_products_config",
        lambda *problem: replace(products_config, dx_heads=heads if problem[-2] else 0, dw1=problem[-1]),
    )
    monkeypatch.setattr(plan.heads_products, "launch", _products_in_pytorch)
    monkeypatch.setattr(products, "add_dw1", _on_a_cpu)
    monkeypatch.setattr(plan, "in_cuda", lambda *tensors: True)
    monkeypatch.setattr(plan.heads_dhidden, "launch", _dhidden_in_pytorch)
    monkeypatch.setattr(heads_backward, "pick_chunk_rows", lambda *problem: chunk)
    monkeypatch.setattr(
        heads_backward, "pick_cuda_config", lambda *problem: heads_backward.CudaConfig(2, cluster=2, stages=11)
    )
    inputs = _inputs(rows=700, heads=3, hidden=19)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    dy = torch.randn(700, 3, 3, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    wanted = torch.autograd.grad(heads_mlp_reference(*wide), wide, dy.double())
    leaves = [t.detach().requires_grad_(need) for t, need in zip(inputs, needs, strict=True)]
    for _ in range(2):  # the cached plan allocates new parts in each call
        for t in leaves:
            t.grad = None
        heads_mlp(*leaves).backward(dy)
        for t, want, need in zip(leaves, wanted, needs, strict=True):
            assert (t.grad is not None) == need
            if need:
                torch.testing.assert_close(t.grad.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("version", ["triton", "library", "cuda"])
@pytest.mark.parametrize("needs", NEEDS)
def test_something_else_is_added_up(
    needs: tuple[bool, bool, bool], version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one launch with x's gradient, with w2's, which has two parts, with neither, or in a launch of its own."""
    monkeypatch.setattr(plan, "in_cuda", lambda *tensors: version != "triton")
    monkeypatch.setattr(heads_backward, "pick_products", lambda *problem, possible: version == "cuda")
    monkeypatch.setattr(heads_backward, "pick_cuda_config", lambda *problem: heads_backward.CudaConfig(1, 2, stages=11))
    monkeypatch.setattr(plan.heads_dhidden, "launch", _dhidden_in_pytorch)
    monkeypatch.setattr(plan.heads_products, "launch", _products_in_pytorch)
    x, w1, w2 = (t.detach() for t in _inputs(rows=200, hidden=19, dim=8))
    dy, found = torch.randn(200, 2, 3, device=DEVICE), torch.empty(5, 7, device=DEVICE)
    parts = torch.randn(3, 5, 7, device=DEVICE)
    arguments = x, dy.stride(), w1, w2, "silu", needs
    grads = plan.backward_plan(*arguments, also=(found, 3))(lambda *chunk: dy, x, w1, w2, parts, found)
    assert torch.equal(found, parts[0] + parts[1] + parts[2])
    alone = plan.backward_plan(*arguments)(lambda *chunk: dy, x, w1, w2)
    assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(grads, alone, strict=True))


def test_one_chunk_in_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel itself writes w2's gradient, in w2's dtype, and the library w1's."""
    monkeypatch.setattr(plan, "in_cuda", lambda *tensors: True)
    monkeypatch.setattr(plan.heads_dhidden, "launch", _dhidden_in_pytorch)
    monkeypatch.setattr(plan, "sum_launch", lambda *problem: pytest.fail("there is nothing to add up"))
    _both(_inputs(rows=100, hidden=19))


def test_when_the_gradient_is_in_cuda() -> None:
    picked = heads_backward.pick_cuda
    assert picked(129, possible=True) and not picked(128, possible=True) and not picked(5000, possible=False)
    taken = heads_backward.pick_products
    assert taken(8448, 512, possible=True) and not taken(8448, 512, possible=False)
    assert not taken(8449, 512, possible=True) and not taken(564, 508, possible=True)


@pytest.mark.parametrize(("rows", "dx_heads", "units"), [(564, 2, (50, 220)), (5000, 10, (80, 220))])
def test_units_of_the_products(rows: int, dx_heads: int, units: tuple[int, int]) -> None:
    """x's gradient of few rows is split by heads into parts, that of many rows is not."""
    config = heads_backward.pick_products_config(rows, 512, 10, 1365, 132, True, True)
    assert (config.dx_heads, config.cluster) == (dx_heads, 1)
    assert heads_backward.products_units(rows, 512, 10, 1365, config) == units
    for need_x, need_w1 in ((True, False), (False, True)):
        config = heads_backward.pick_products_config(rows, 512, 10, 1365, 132, need_x, need_w1)
        found = heads_backward.products_units(rows, 512, 10, 1365, config)
        assert [count > 0 for count in found] == [need_x, need_w1]
    pair = heads_backward.ProductsConfig(1, True, 2, True, 2, 4)  # five tiles of rows are three pairs
    assert heads_backward.products_units(564, 512, 10, 1365, pair) == (50, 110)


@pytest.mark.parametrize(
    ("rows", "heads", "hidden", "tiles", "rounds"),
    [(8448, 10, 1365, 11, 5), (5000, 10, 1365, 7, 5), (564, 10, 1365, 5, 1)],
)
def test_units_of_the_hiddens_gradient(rows: int, heads: int, hidden: int, tiles: int, rounds: int) -> None:
    config = heads_backward.pick_cuda_config(rows, heads, hidden, 132)
    assert (config.tiles, config.cluster) == (tiles, 2)
    units = -(-heads * -(-hidden // 128) // 2) * -(-rows // (128 * tiles))
    assert -(-units // 66) == rounds
    assert heads_backward.pick_cuda_config(100, 1, 128, 132).cluster == 1  # there is only one block
