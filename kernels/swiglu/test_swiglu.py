"""Properties specific to swiglu; `tests/test_specs.py` checks the rest from SPEC."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from . import configs, plans, swiglu
from .activation import ACTIVATIONS
from .layout import coalesce
from .reference import swiglu_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape: int, **options) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, **options)


def everything(op, *leaves: torch.Tensor, **options) -> tuple[torch.Tensor, ...]:
    """Returns the output and the gradients of the leaves."""
    leaves = tuple(t.detach().requires_grad_() for t in leaves)
    y = op(*leaves, **options)
    dy = torch.linspace(-2, 2, y.numel(), device=DEVICE).view(y.shape).to(y.dtype)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


PYTORCH = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_equals_pytorch(activation):
    gate, up = 3 * normal(3, 5, 96), normal(3, 5, 96)
    mine = everything(lambda g, u: swiglu(g, u, activation=activation), gate, up)
    other = everything(lambda g, u: PYTORCH[activation](g) * u, gate, up)
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ("gelu", "gelu_tanh"))
def test_the_oracle_equals_pytorch_where_that_does_not_cancel(activation):
    gate, up = torch.linspace(-4, 6, 1001, dtype=torch.float64), torch.ones(1001, dtype=torch.float64)
    leaf = gate.clone().requires_grad_()
    (expected,) = torch.autograd.grad(PYTORCH[activation](leaf).sum(), leaf)
    gate.requires_grad_()
    y = swiglu_reference(gate, up, activation=activation)
    torch.testing.assert_close(y.detach(), PYTORCH[activation](gate.detach()), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), gate)[0], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dim", [1, 17, 64, 1365])
def test_packed_halves_and_pair_agree_bit_for_bit(dim):
    packed = normal(2, 5, 2 * dim)
    gate, up = packed.chunk(2, dim=-1)
    y, dgate, dup = everything(swiglu, gate.contiguous(), up.contiguous())
    halves = everything(swiglu, gate, up)
    whole = everything(swiglu, packed)
    assert all(torch.equal(a, b) for a, b in zip((y, dgate, dup), halves, strict=True))
    assert torch.equal(whole[0], y)
    assert torch.equal(whole[1], torch.cat((dgate, dup), dim=-1))


def test_halves_of_a_projection_are_read_in_place_and_so_is_a_packed_tensor(monkeypatch):
    launched: list[tuple] = []
    for name in ("_swiglu_fwd_kernel", "_swiglu_bwd_kernel"):
        monkeypatch.setattr(plans, name, _spy(getattr(plans, name), launched))
    packed = normal(2, 5, 48)
    home = packed.untyped_storage().data_ptr()

    def storages() -> list[list[int]]:
        pointers = [[t for t in arguments if isinstance(t, torch.Tensor)] for arguments, _ in launched]
        return [[t.untyped_storage().data_ptr() for t in tensors] for tensors in pointers]

    everything(swiglu, *packed.chunk(2, dim=-1))
    assert [read.count(home) for read in storages()] == [2, 2]
    launched.clear()
    _, dpacked = everything(swiglu, packed)
    assert [read.count(home) for read in storages()] == [2, 2]
    assert storages()[1].count(dpacked.untyped_storage().data_ptr()) == 2  # both halves of the gradient, no copy


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1), (2, 1, 0), (1, 2, 0)])
def test_any_order_of_dimensions(order):
    """Also where the dimension that is halved is not the innermost in memory."""
    packed = normal(4, 6, 10).permute(order)
    for a, b in zip(everything(swiglu, packed), everything(swiglu_reference, packed), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert swiglu(packed).stride() == torch.empty_like(packed.chunk(2, dim=-1)[0]).stride()


def test_gate_and_up_in_different_orders():
    gate, up = normal(4, 6, 10), normal(10, 6, 4).permute(2, 1, 0)
    for a, b in zip(everything(swiglu, gate, up), everything(swiglu_reference, gate, up), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("needed", ["gate", "up"])
def test_no_work_for_a_gradient_that_nobody_wants(needed, monkeypatch):
    launched = []
    monkeypatch.setattr(plans, "_swiglu_bwd_kernel", _spy(plans._swiglu_bwd_kernel, launched))
    tensors = {"gate": normal(3, 32), "up": normal(3, 32)}
    tensors[needed].requires_grad_()
    swiglu(**tensors).sum().backward()
    (arguments, options), *others = launched
    assert not others
    assert (options["NEED_DGATE"], options["NEED_DUP"]) == (needed == "gate", needed == "up")
    _, _, up, dgate, dup = arguments[:5]
    assert (up is None) == (dgate is None) == (needed == "up")  # dup does not depend on up
    assert (dup is None) == (needed == "gate")
    assert all((tensors[n].grad is not None) == (n == needed) for n in tensors)


class _spy:
    """Replaces a JIT kernel and records the arguments of each launch. Its hooks, which are never called, make every
    launch go through Triton."""

    def __init__(self, jit, launched):
        self.jit, self.launched = jit, launched
        self.arg_names, self.pre_run_hooks = jit.arg_names, [None]

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.launched.append((args, options))
            return self.jit[grid](*args, **options)

        return launch


@pytest.mark.parametrize("packed", [False, True])
def test_gate_and_up_are_all_that_is_saved(packed):
    saved = []
    tensors = [normal(3, 32, requires_grad=True) for _ in range(1 if packed else 2)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        swiglu(*tensors)
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in tensors]


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_the_mean_relative_error_in_fp32_is_that_of_a_few_roundings(activation):
    """It is 9e-8. With the exponent shifted by 64 everywhere, and not only for subnormal results, gelu has 4e-7."""
    gate = torch.linspace(-4, 4, 8000, device=DEVICE)
    y, oracle = (
        op(gate.to(dtype), torch.ones_like(gate, dtype=dtype), activation=activation).double()
        for op, dtype in ((swiglu, torch.float32), (swiglu_reference, torch.float64))
    )
    assert float(((y - oracle).abs() / oracle.abs()).mean()) < 2.5e-7


def test_gelu_of_a_gate_whose_density_is_subnormal_is_next_to_nothing():
    gate = torch.linspace(-14.3, -13.3, 101, device=DEVICE)
    y, dgate, _ = everything(lambda g, u: swiglu(g, u, activation="gelu"), gate, torch.ones_like(gate))
    assert float(torch.maximum(y.abs(), dgate.abs()).max()) < 1e-36


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_the_derivative_keeps_its_relative_accuracy_around_its_zero(activation):
    """The derivative is a difference of two terms of 0.2 to 0.4, so an error of 1e-5 in either would show."""
    zero = {"silu": -1.27846, "gelu": -0.75179, "gelu_tanh": -0.75246}[activation]
    gate = torch.linspace(zero - 0.1, zero + 0.1, 4001, device=DEVICE).half().requires_grad_()
    exact = gate.detach().double().requires_grad_()
    # A gradient of 1024 keeps the results above the subnormal numbers of fp16.
    for op, leaf in ((swiglu, gate), (swiglu_reference, exact)):
        op(leaf, torch.ones_like(leaf), activation=activation).backward(torch.full_like(leaf, 1024.0))
    torch.testing.assert_close(gate.grad.double(), exact.grad, rtol=2**-11 + 5e-5, atol=1024 * 2e-7)


def test_the_tail_of_silu_keeps_its_relative_accuracy():
    gate = torch.linspace(-80, 2, 4001, device=DEVICE)
    y = swiglu(gate, torch.ones_like(gate))
    # The interpreter has no fused multiply-add, which the correction of the exponent needs.
    torch.testing.assert_close(y.double(), F.silu(gate.double()), rtol=1e-6 if DEVICE == "cuda" else 1e-5, atol=0)


def test_the_tail_of_silu_has_no_bias():
    """Without the correction, the rounding error of log2(e) in the exponent is 8e-7 of the result here. That is less
    than the error of one result in the interpreter, so the test compares the mean."""
    gate = torch.linspace(-70, -50, 4096, device=DEVICE)
    y, exact = swiglu(gate, torch.ones_like(gate)).double(), F.silu(gate.double())
    assert abs(float((y / exact - 1).mean())) < 4e-7


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_huge_gates(activation):
    gate = torch.tensor([-3e38, 3e38, -100.0, 100.0], device=DEVICE)
    y, dgate, _ = everything(lambda g, u: swiglu(g, u, activation=activation), gate, torch.ones_like(gate))
    if activation == "identity":
        return
    assert [abs(v) for v in y.tolist()[::2]] == [0.0, 0.0]
    assert y.tolist()[1::2] == ([1.0, 1.0] if activation == "sigmoid" else [pytest.approx(3e38), 100.0])
    slopes = dgate / torch.linspace(-2, 2, 4, device=DEVICE)
    assert [abs(v) for v in slopes.tolist()] == ([0.0] * 4 if activation == "sigmoid" else [0.0, 1.0, 0.0, 1.0])


def test_relu_hides_what_is_behind_a_closed_gate():
    gate = torch.tensor([-1.0, 0.0, 1.0, math.nan], device=DEVICE)
    up = torch.tensor([math.nan, math.inf, 2.0, 1.0], device=DEVICE)
    y, dgate, _ = everything(lambda g, u: swiglu(g, u, activation="relu"), gate, up)
    assert dgate.tolist()[:2] == [0.0, 0.0]
    assert math.isnan(y[3])


def test_autocast():
    """It accepts the dtype that a GEMM under autocast returns, and returns the same dtype."""
    weight, x = normal(2 * 24, 16, requires_grad=True), normal(4, 16)
    with torch.autocast(DEVICE, dtype=torch.float16):
        y = swiglu(F.linear(x, weight))
    assert y.dtype == torch.float16
    assert y.shape == (4, 24)
    y.float().sum().backward()
    assert weight.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda g, u: swiglu(g.double(), u), TypeError, "gate must be a tensor of .*, got torch.float64"),
        (lambda g, u: swiglu(None, u), TypeError, "gate must be a tensor of .*, got NoneType"),
        (lambda g, u: swiglu(g, u.half()), TypeError, "up must be a tensor of gate's dtype torch.float32"),
        (lambda g, u: swiglu(g, u[:, :1]), ValueError, r"up must have gate's shape \(3, 8\), got \(3, 1\)"),
        (lambda g, u: swiglu(g, u.to("meta")), ValueError, "up must be on gate's device"),
        (lambda g, u: swiglu(g[:, :7]), ValueError, r"gate must be \[..., 2·D\]"),
        (lambda g, u: swiglu(g[0, 0]), ValueError, r"gate must be \[..., 2·D\]"),
        (lambda g, u: swiglu(g, u, activation="swish"), ValueError, "activation must be one of silu, .*, got 'swish'"),
        (lambda g, u: swiglu(g, u, backend="hip"), ValueError, "backend must be one of auto, triton, cuda, got 'hip'"),
        (lambda g, u: swiglu(g.to("meta"), u.to("meta")), RuntimeError, "gate must be on a GPU"),
    ],
)
def test_says_what_is_wrong(call, error, words):
    with pytest.raises(error, match=words):
        call(normal(3, 8), normal(3, 8))


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (10, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 100_000])
@pytest.mark.parametrize("cols", [1, 7, 16, 100, 1365, 2048, 11008, 10**9])
def test_a_tile_narrower_than_16_columns_has_a_whole_row(rows, cols, dtype, capability):
    """The kernel splits rows at a multiple of 16 columns, so a tile must end at one."""
    for aligned in (False, True):
        for transposed in (False, True):
            config = configs.pick_config(rows, cols, dtype, aligned, transposed, capability)
            assert config.block_n >= min(cols, 16)
            assert 8 <= config.block_m * config.block_n // (32 * config.num_warps) <= 32


def test_rows_that_do_not_begin_on_a_boundary_are_known():
    packed = normal(3, 2 * 1365)
    gate, up = packed.chunk(2, dim=-1)
    y = torch.empty(3, 1365, device=DEVICE)
    assert not coalesce((y,), (gate, up)).aligned
    assert coalesce((y,), (y, y)).aligned
    assert coalesce((y[:, :1024],), (torch.empty(3, 2048, device=DEVICE)[:, 1024:],)).rows == 3


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_more_than_two_to_the_31_elements(packed):
    """Offsets have 64 bits: those of the last rows exceed 32."""
    rows, dim = 2**31 // 8192 + 3, 8192 // (2 if packed else 1)
    shape = (rows, 2 * dim) if packed else (rows, dim)
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(1 if packed else 2)]
    leaves = [t.requires_grad_() for t in tensors]
    y = swiglu(*leaves)
    grads = torch.autograd.grad(y, leaves, torch.ones((), device="cuda", dtype=y.dtype).expand(y.shape))
    for part in (slice(0, 2), slice(-3, None)):
        few = [t.detach()[part].clone().requires_grad_() for t in leaves]
        expected = swiglu_reference(*few)
        torch.testing.assert_close(y[part], expected)
        for mine, other in zip(grads, torch.autograd.grad(expected.sum(), few), strict=True):
            torch.testing.assert_close(mine[part], other)


@pytest.mark.gpu
def test_rows_that_end_just_below_two_to_the_31_elements():
    """The number of tiles of a row, rounded up in 32 bits, would be negative."""
    cols = 2**31 - 100
    x = torch.randn(2, cols + 12, device="cuda", dtype=torch.bfloat16)[:, :cols].requires_grad_()
    y = swiglu(x, x.detach())
    (dx,) = torch.autograd.grad(y, x, torch.ones((), device="cuda", dtype=y.dtype).expand(y.shape))
    for part in (slice(0, 5000), slice(-5000, None)):
        few = x.detach()[:, part].clone().requires_grad_()
        expected = swiglu_reference(few, few.detach())
        torch.testing.assert_close(y[:, part], expected)
        torch.testing.assert_close(dx[:, part], torch.autograd.grad(expected.sum(), few)[0])
