"""Tests that are specific to fused_mlp. tests/test_specs.py derives the rest from SPEC."""

from __future__ import annotations

import itertools
from dataclasses import astuple
from typing import Any
from unittest import mock

import pytest
import torch

from harness.correctness import addresses

from . import bench, configs
from .activation import ACTIVATIONS
from .op import fused_mlp
from .reference import fused_mlp_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Operands = dict[str, torch.Tensor]


def operands(
    rows: int,
    dim: int,
    hidden: int,
    dim_out: int,
    names: str = "x w1 w2 b1 b2 w_gate",
    dtype: torch.dtype = torch.float32,
) -> Operands:
    shapes = dict(
        x=(rows, dim), w1=(hidden, dim), w2=(dim_out, hidden), b1=(hidden,), b2=(dim_out,), w_gate=(hidden, dim)
    )
    made = {n: torch.randn(shapes[n], device=DEVICE) * (shapes[n][-1] or 1) ** -0.5 for n in names.split()}
    return {name: tensor.to(dtype) for name, tensor in made.items()}


def gradients(op: Any, tensors: Operands, dtype: torch.dtype | None = None, **options: Any) -> list[torch.Tensor]:
    """y and the gradients of all tensors, for the same incoming gradient in each call."""
    leaves = {n: t.detach().to(dtype or t.dtype).requires_grad_() for n, t in tensors.items()}
    y = op(**leaves, **options)
    dy = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(tensors["x"].dtype).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, list(leaves.values()), dy)]


def agrees(tensors: Operands, **options: Any) -> None:
    """Checks result and gradients against the reference in fp64: the error is at most 1.2 times that of PyTorch in the
    same dtype, or 2 times for a bias's gradient. Its rounded terms nearly cancel over the rows, and PyTorch rounds them
    differently: five of 200 random inputs had an error of more than 1.2 times PyTorch's."""
    names = {k: v for k, v in options.items() if k != "backend"}
    exact = gradients(fused_mlp_reference, tensors, torch.float64, **names)
    half = tensors["x"].dtype != torch.float32
    eager = gradients(fused_mlp_reference, tensors, **names) if half else exact
    ours_of = gradients(fused_mlp, tensors, **options)
    for name, ours, want, theirs in zip(("y", *tensors), ours_of, exact, eager, strict=True):
        if not want.numel():
            assert ours.shape == want.shape
            continue
        worse = 2.0 if name in ("b1", "b2") else 1.2
        bound = max((1e-2 if half else 1e-5) * want.abs().max().item(), worse * (theirs - want).abs().max().item())
        torch.testing.assert_close(ours.double(), want, rtol=0, atol=bound)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("names", ["x w1 w2", "x w1 w2 b1 b2 w_gate"], ids=["plain", "gated"])
def test_activations(activation: str, names: str) -> None:
    agrees(operands(9, 7, 18, 5, names), activation=activation)


@pytest.mark.parametrize("backend", ["fused", "two_gemms"])
@pytest.mark.parametrize("save", ["activations", "input"])
def test_versions(backend: str, save: str) -> None:
    agrees(operands(19, 5, 37, 18), backend=backend, save=save)


@pytest.mark.parametrize(("rows", "dim", "hidden", "dim_out"), [(3, 0, 5, 4), (3, 5, 0, 4), (3, 5, 4, 0), (0, 3, 5, 4)])
def test_nothing_to_multiply(rows: int, dim: int, hidden: int, dim_out: int) -> None:
    for backend, save in itertools.product(("fused", "two_gemms"), ("activations", "input")):
        agrees(operands(rows, dim, hidden, dim_out), backend=backend, save=save)


@pytest.mark.parametrize("save", ["activations", "input"])
def test_no_rows_give_gradients_of_zero(save: str) -> None:
    """Also if each gradient alone is needed."""
    tensors = operands(0, 3, 5, 4)
    for name in tensors:
        leaf = tensors[name].clone().requires_grad_()
        fused_mlp(**{**tensors, name: leaf}, save=save).sum().backward()
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_both_ways_to_save_give_the_same_bits() -> None:
    tensors = operands(21, 16, 36, 24, dtype=torch.float16)
    kept, again = (gradients(fused_mlp, tensors, save=save, backend="two_gemms") for save in ("activations", "input"))
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def test_what_is_saved() -> None:
    """With "activations", pre in rows of a multiple of 16 elements; with "input", only the arguments."""
    tensors = {n: t.requires_grad_() for n, t in operands(6, 7, 18, 5).items()}
    sizes: dict[str, list[tuple[int, ...]]] = {}
    for save in ("activations", "input"):
        kept: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
            fused_mlp(**tensors, save=save)
        given = {t.data_ptr() for t in tensors.values()}
        sizes[save] = [tuple(t.shape) for t in kept if t.data_ptr() not in given]
    assert sizes == {"activations": [(6, 32), (6, 32)], "input": []}


def test_each_gradient_alone() -> None:
    tensors = operands(9, 7, 18, 5)
    together = dict(zip(tensors, gradients(fused_mlp, tensors)[1:], strict=True))
    for save, name in itertools.product(("activations", "input"), tensors):
        leaf = tensors[name].clone().requires_grad_()
        y = fused_mlp(**{**tensors, name: leaf}, save=save)
        dy = torch.linspace(-1, 1, y.numel(), device=DEVICE).view(y.shape)
        torch.testing.assert_close(torch.autograd.grad(y, leaf, dy)[0], together[name])


def test_operands_are_read_in_place_by_their_strides() -> None:
    tensors = operands(7, 10, 18, 6)
    for start, step in ((3, 1), (0, 2)):
        wide = {n: torch.randn(*t.shape[:-1], 40, device=DEVICE) for n, t in tensors.items()}
        agrees({n: wide[n][..., start : start + step * t.shape[-1] : step] for n, t in tensors.items()})
    agrees({n: t.mT.contiguous().mT if t.dim() > 1 else t for n, t in tensors.items()})
    for x in (torch.randn(4, 2, 10, device=DEVICE).transpose(0, 1), torch.randn(10, device=DEVICE)):
        agrees({**tensors, "x": x})


def test_an_update_of_w2_in_place_is_seen() -> None:
    """w2's rows are not whole vectors, so that it is copied. Each call copies it again and sees changes in place."""
    tensors = operands(5, 16, 37, 20, "x w1 w2", torch.float16)
    assert configs.pick_copy(20, 37, False, torch.float16)
    for change in (lambda w: w.mul_(-2), lambda w: w.data.add_(1), lambda w: w.view(-1)[3:].zero_()):
        agrees(tensors)
        change(tensors["w2"])
    agrees(tensors, backend="two_gemms")


def test_values_beyond_the_last_column_do_not_matter() -> None:
    """A row of x that is not finite gives NaN in the padding of the hidden, which must not reach other rows."""
    tensors = {n: t.requires_grad_() for n, t in operands(9, 7, 18, 20, dtype=torch.float16).items()}
    with torch.no_grad():
        tensors["x"][4] = torch.inf
    y = fused_mlp(**tensors, backend="two_gemms")
    others = torch.arange(9, device=DEVICE) != 4
    assert y[others].isfinite().all()
    dy = torch.ones_like(y)
    dy[4] = 0
    assert torch.autograd.grad(y, tensors["x"], dy)[0][others].isfinite().all()


def same_places(tensors: Operands, activation: str, **options: Any) -> None:
    """Checks that y and the gradients have NaN and inf in the same places as PyTorch's, where a row of x and one of dy
    have inf. Operands of one sign give no inf - inf. With relu w1 is below 0 and the hidden 0, else y has inf."""
    made = {n: -t.abs() if n == "w1" and activation == "relu" else t.abs() for n, t in tensors.items()}
    made["x"][1, 2] = torch.inf
    found = []
    for op, more in ((fused_mlp, options), (fused_mlp_reference, {})):
        leaves = {n: t.detach().requires_grad_() for n, t in made.items()}
        y = op(**leaves, activation=activation, **more)
        dy = torch.ones_like(y)
        dy[3, 0] = torch.inf
        found.append((y.detach(), *torch.autograd.grad(y, list(leaves.values()), dy)))
    for name, ours, want in zip(("y", *made), *found, strict=True):
        assert torch.equal(ours.isnan(), want.isnan()) and torch.equal(ours.isinf(), want.isinf()), name


@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("version", ["triton", "library", "passes"])
def test_what_is_not_finite_is_where_pytorch_has_it(
    version: str, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns past the last one of the hidden must not give 0 · inf = NaN."""
    use = configs.Versions(cuda=False, library=version != "triton", passes=version == "passes", narrow=False)
    monkeypatch.setattr(configs, "pick_versions", mock.Mock(return_value=use))
    for names in ("x w1 w2 b1", "x w1 w2 w_gate"):
        for save in ("activations", "input"):
            same_places(operands(70, 16, 37, 24, names), activation, save=save)


def test_autocast_does_not_change_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """w2's gradient is a part of a larger product by the library, since the rows of the hidden are padded."""
    use = configs.Versions(cuda=False, library=True, passes=True, narrow=False)
    monkeypatch.setattr(configs, "pick_versions", mock.Mock(return_value=use))
    tensors = operands(21, 16, 37, 24, dtype=torch.float16)
    want = gradients(fused_mlp, tensors)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(gradients(fused_mlp, tensors), want, strict=True))


def test_several_tiles_and_parts() -> None:
    """There are more tiles than persistent CTAs, and gradients use split-K."""
    tensors = operands(40, 20, 50, 24)
    small = configs.ProductConfig(16, 16, 16, raster=2, stages=1, num_warps=4, ctas=1)
    parts = configs.WeightsConfig(16, 16, 16, splits=3, raster=2, stages=1, num_warps=4)
    bias = configs.BiasConfig(16, 16, splits=3, num_warps=4)
    with mock.patch.multiple(
        configs,
        pick_hidden_config=lambda *_: small,
        pick_rows_config=lambda *_: small,
        pick_dhidden_config=lambda *_: small,
        pick_weights_config=lambda *_: parts,
        pick_bias_config=lambda *_: bias,
    ):
        agrees(tensors, backend="two_gemms")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "hidden"), [(150, 70), (33, 205), (1, 17)])
def test_gradients_of_few_rows_in_one_launch(
    rows: int, hidden: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several tiles each, with remainders in all dimensions. The gradients equal those of separate launches, bit for
    bit if the blocks are equal."""
    tensors = operands(rows, 96, hidden, 48, "x w1 w2 b1 b2", dtype)
    seen = mock.Mock(wraps=configs.pick_gradients_config)
    monkeypatch.setattr(configs, "pick_gradients_config", lambda *sizes: seen(*sizes[:-1], 100))
    agrees(tensors)
    together = gradients(fused_mlp, tensors)
    assert seen.call_count
    monkeypatch.setattr(configs, "pick_gradients_config", lambda *_: None)
    for ours, apart in zip(together, gradients(fused_mlp, tensors), strict=True):
        torch.testing.assert_close(ours, apart, rtol=2e-3, atol=1e-3 if dtype == torch.float16 else 1e-5)


def test_which_gradients_are_in_one_launch() -> None:
    """One launch computes all gradients if none of them fills the GPU alone."""
    hopper = True, torch.bfloat16, (9, 0), 132
    few = configs.pick_gradients_config(564, 512, 1365, 512, *hopper)
    assert few is not None and (few.block_n, few.block_k, few.num_warps) == (128, 64, 4)
    assert configs.pick_gradients_config(4096, 512, 1365, 512, *hopper) is not None
    for sizes in ((5000, 512, 1365, 512), (64, 4096, 1365, 512), (64, 512, 1365, 2000)):
        assert configs.pick_gradients_config(*sizes, *hopper) is None
    plain = configs.pick_gradients_config(564, 512, 1365, 512, False, torch.float16, (8, 0), 108)
    assert plain is not None and (plain.block_h, plain.stages) == (32, 2)


def test_repeated_backward() -> None:
    """The backward does not overwrite saved tensors."""
    tensors = {n: t.requires_grad_() for n, t in operands(9, 7, 18, 5).items()}
    y = fused_mlp(**tensors)
    first, second = (torch.autograd.grad(y.sum(), list(tensors.values()), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated", [False, True])
def test_real_widths(dtype: torch.dtype, gated: bool) -> None:
    names = "x w1 w2 b1 b2" + " w_gate" * gated
    for rows, dim, hidden, dim_out in ((1111, 512, 1365, 512), (564, 512, 1365, 512), (300, 1024, 2752, 1024)):
        tensors = operands(rows, dim, hidden, dim_out, names, dtype)
        for backend in ("fused", "two_gemms") if dim_out <= configs.MAX_FUSED_OUT else ("two_gemms",):
            agrees(tensors, backend=backend, activation="gelu")


def test_a_stride_times_a_block_may_exceed_32_bits() -> None:
    """In a transposed view a K-block advances by 2^31 + 16 elements, which would be negative in 32 bits. Little of the
    memory is accessed."""
    far = 2**27 + 1
    memory = torch.empty(16 * far + 3, dtype=torch.float16, device=DEVICE)
    x = memory.as_strided((3, 17), (1, far)).copy_(torch.randn(3, 17))
    rest = operands(3, 17, 5, 4, "w1 w2", torch.float16)
    assert configs.pick_hidden_config(3, 16, 17, False, False, x.dtype, (9, 0), 132).block_k == 16
    for backend in ("fused", "two_gemms"):
        torch.testing.assert_close(
            fused_mlp(x, **rest, backend=backend), fused_mlp(x.contiguous(), **rest, backend=backend)
        )


@pytest.mark.parametrize("backend", ["fused", "two_gemms"])
def test_rows_of_w2_may_be_far_apart(backend: str) -> None:
    """The last row of w2, and of b2, is 2^31 elements after the first, which would be before it in 32 bits."""
    rest = operands(3, 17, 5, 3, "x w1 w2 b2", torch.float16)
    want = fused_mlp(**rest, backend=backend)
    memory = torch.empty(2**31 + 8, dtype=torch.float16, device=DEVICE)
    for name, sizes, strides, start in (("w2", (3, 5), (2**30, 1), 0), ("b2", (3,), (2**30,), 7)):
        rest[name] = memory.as_strided(sizes, strides, start).copy_(rest[name])
    with addresses.checked():
        torch.testing.assert_close(fused_mlp(**rest, backend=backend), want)


def test_sizes_that_tiles_cannot_count_are_errors() -> None:
    one, most = torch.ones(1, 1, device=DEVICE), 2**31 - 512
    for wrong, x, w1, w2 in (
        ("x must be", one.expand(most + 1, 1), one, one),
        ("x must be", one.expand(1, most + 1), one, one),
        ("w1 must be", one, one.expand(most + 1, 1), one),
        ("w2 must be", one, one, one.expand(most + 1, 1)),
    ):
        with pytest.raises(ValueError, match=f"{wrong} .* at most {most}"):
            fused_mlp(x, w1, w2)


def test_says_what_is_wrong() -> None:
    tensors = operands(4, 6, 8, 5)
    w1, w2 = tensors["w1"], tensors["w2"]
    wrong: tuple[tuple[type[Exception], str, dict[str, Any]], ...] = (
        (TypeError, "x must be a tensor of float32", dict(x=tensors["x"].int())),
        (ValueError, r"x must be \[..., D\]", dict(x=tensors["x"][0, 0])),
        (TypeError, "w1 must be a tensor of x's dtype", dict(w1=w1.half())),
        (ValueError, r"w1 must be \[H, 6\]", dict(w1=w1.mT)),
        (TypeError, "w2 must be a tensor of x's dtype torch.float32, got list", dict(w2=[1.0])),
        (TypeError, "w1 must be a tensor of x.s dtype torch.float32, got NoneType", dict(w1=None)),
        (TypeError, "w2 must be a tensor of x.s dtype torch.float32, got NoneType", dict(w2=None)),
        (ValueError, r"w2 must be \[D_out, 8\]", dict(w2=w2.mT)),
        (ValueError, r"b1 must be \[8\]", dict(b1=tensors["b2"])),
        (TypeError, "b2 must be a tensor of x's dtype", dict(b2=tensors["b2"].half())),
        (ValueError, r"w_gate must be \[8, 6\]", dict(w_gate=w1[:3])),
        (ValueError, "w2 must be on x's device", dict(w2=w2.to("meta"))),
        (ValueError, "activation must be one of silu, gelu", dict(activation="tanh")),
        (ValueError, "save must be one of activations, input", dict(save="nothing")),
        (ValueError, "backend must be one of auto", dict(backend="fast")),
    )
    for error, message, change in wrong:
        with pytest.raises(error, match=message):
            fused_mlp(**{**tensors, **change})
    with pytest.raises(
        RuntimeError, match='backend="fused" cannot run here: it supports at most 512 rows of w2, got 513'
    ):
        fused_mlp(**operands(2, 3, 4, 513), backend="fused")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_configs_fit_into_shared_memory(capability: tuple[int, int], dtype: torch.dtype) -> None:
    room, size = {(8, 0): 163 << 10, (9, 0): 227 << 10}[capability], dtype.itemsize
    sizes = (1, 37, 564, 1376, 205000)
    for rows, cols, aligned in itertools.product(sizes, sizes, (False, True)):
        for epilogue in ("", "act", "gate", "dact", "dgate"):
            c = configs._product_config(rows, cols, 4096, epilogue, aligned, dtype, capability, 132)
            columns = c.block_n * (1 + (epilogue == "gate"))
            assert (c.block_m + columns) * c.block_k * c.stages * size * c.ctas <= room
        w = configs.pick_weights_config(rows, cols, 512, aligned, dtype, capability, 132)
        assert (w.block_n + w.block_k) * w.block_r * w.stages * size <= room
        g = configs.pick_gradients_config(rows, 512, cols, 512, aligned, dtype, capability, 132)
        if g is not None:
            steps = (g.block_m + g.block_c) * g.block_h, (g.block_n + g.block_k) * g.block_r
            assert max(steps) * g.stages * size <= room // 2
        for gated in (False, True):
            f = configs.pick_fused_config(rows, 1365, 512, 512, gated, aligned, dtype, 132)
            ring = (f.block_m + f.block_h * (1 + gated)) * f.block_k * f.stages
            assert (ring + f.block_h * (512 + f.block_m)) * size <= room


def test_auto() -> None:
    def auto(rows, dim=512, hidden=1408, dtype=torch.bfloat16, hopper=True) -> tuple[bool, ...]:
        return astuple(configs.pick_versions("auto", rows, dim, hidden, dtype, hopper))

    assert auto(11_000) == (False, True, True, True, False) and auto(564, dim=4096) == (True, True, False, False, True)
    assert auto(564) == (False, True, False, False, False)
    assert auto(4096, hidden=1365) == (False, True, True, True, False)
    assert auto(2048) == auto(11_000, dim=128) == (False, True, True, False, False)
    triton = (False, False, False, False, False)
    assert auto(564, hidden=1365) == auto(564, dtype=torch.float32) == auto(205_000, hopper=False) == triton


@pytest.mark.parametrize("names", ["x w1 w2", "x w1 w2 b1 b2 w_gate"], ids=["plain", "gated"])
def test_products_of_the_library(names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with weights that are not contiguous, a hidden with padded rows, and each gradient alone."""
    tensors = operands(21, 16, 37, 24, names)
    tensors["x"] = tensors["x"].view(3, 7, 16)
    strided = {n: t.mT.contiguous().mT if n in ("w1", "w_gate", "w2") else t for n, t in tensors.items()}
    for passes in (False, True):
        use = configs.Versions(cuda=False, library=True, passes=passes, narrow=False)
        monkeypatch.setattr(configs, "pick_versions", mock.Mock(return_value=use))
        for given, save in itertools.product((tensors, strided), ("activations", "input")):
            agrees(given, save=save)
            exact = gradients(fused_mlp_reference, given, torch.float64)[1:]
            for name, want in zip(given, exact, strict=True):
                leaf = given[name].detach().requires_grad_()
                y = fused_mlp(**{**given, name: leaf}, save=save)
                dy = torch.linspace(-1, 1, y.numel(), device=DEVICE).view(y.shape)
                torch.testing.assert_close(torch.autograd.grad(y, leaf, dy)[0].double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("odd", ["x", "w1", "w2", "w_gate"])
def test_one_operand_that_is_not_aligned(odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch used for several tensors must not treat one as aligned because another is: `Launch` rejects that."""
    tensors = operands(21, 16, 37, 24, dtype=torch.float16)
    elsewhere = tensors[odd].new_empty(tensors[odd].numel() + 1)[1:].view_as(tensors[odd]).copy_(tensors[odd])
    assert elsewhere.data_ptr() % 16 and tensors["w1"].data_ptr() % 16 == 0
    for library in (False, True):
        use = configs.Versions(cuda=False, library=library, passes=library, narrow=False)
        monkeypatch.setattr(configs, "pick_versions", mock.Mock(return_value=use))
        agrees({**tensors, odd: elsewhere})


@pytest.mark.skipif(torch.cuda.is_available(), reason="compute-sanitizer does this on a GPU")
def test_a_copied_weight_is_read_within_its_bounds() -> None:
    """The last block of w2's copy is partial, in rows and in columns."""
    tensors = operands(5, 16, 37, 21, "x w1 w2", torch.float16)
    assert configs.pick_copy(21, 37, False, torch.float16) and 21 % configs.pick_copy_config(48).block_n
    dy = torch.ones(5, 21, dtype=torch.float16)
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}
    with addresses.checked(*leaves.values(), dy):
        torch.autograd.grad(fused_mlp(**leaves), list(leaves.values()), dy)


def test_weights_that_a_peer_lays_out_beforehand() -> None:
    """The gradients have the layout of the given weights, and new weights are laid out again."""
    peer = bench._padded(fused_mlp_reference)
    for _ in range(2):
        tensors = operands(5, 6, 7, 4, "x w1 w2 w_gate")
        for ours, want in zip(gradients(peer, tensors), gradients(fused_mlp_reference, tensors), strict=True):
            torch.testing.assert_close(ours, want)
