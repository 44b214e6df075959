"""Tests specific to rmsnorm; `tests/test_specs.py` checks the rest from SPEC."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from . import configs, plans, rmsnorm
from .reference import rmsnorm_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape: int, **options) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, **options)


def test_equals_pytorch():
    x, weight = normal(3, 5, 96), normal(96)
    torch.testing.assert_close(rmsnorm(x, weight, eps=1e-5), F.rms_norm(x, (96,), weight, 1e-5))


@pytest.mark.parametrize("dim", [96, 40000])
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_squares_may_be_subnormal_without_eps(dim: int, backend: str) -> None:
    x, weight = 1e-20 * normal(3, dim).sign(), normal(dim)
    torch.testing.assert_close(rmsnorm(x, weight, eps=0.0, backend=backend), 1e20 * x * weight, rtol=1e-4, atol=0)


def test_gemma_convention_adds_one_to_the_weight():
    x, weight = normal(4, 64), normal(64)
    torch.testing.assert_close(rmsnorm(x, weight, weight_offset=1.0), rmsnorm(x, weight + 1))


def test_a_chain_of_residual_layers_equals_the_unfused_one():
    """As in a transformer: each layer's h is the next one's residual, and both outputs are used."""
    x, r, weight = (
        normal(6, 40, requires_grad=True),
        normal(6, 40, requires_grad=True),
        normal(40, requires_grad=True),
    )

    def chain(norm):
        y, h = norm(x, weight, residual=r)
        for _ in range(3):
            y, h = norm(torch.tanh(y), weight, residual=h)
        return (y * y + h).sum()

    ours = torch.autograd.grad(chain(rmsnorm), (x, r, weight))
    theirs = torch.autograd.grad(chain(rmsnorm_reference), (x, r, weight))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_h_is_rounded_to_the_dtype_before_it_is_normalised():
    x, r = normal(4, 512, dtype=torch.float16) * 300, normal(4, 512, dtype=torch.float16)
    y, h = rmsnorm(x, residual=r)
    assert torch.equal(h, x + r)
    torch.testing.assert_close(y, rmsnorm(h), rtol=0, atol=0)


@pytest.mark.parametrize("frozen", ["", "x", "weight", "both"])
def test_h_without_a_residual_is_x_and_its_gradient_is_added(frozen):
    x, weight = normal(5, 33), normal(33)
    leaves = [t.requires_grad_() for name, t in (("x", x), ("weight", weight)) if frozen not in (name, "both")]
    y, h = rmsnorm(x, weight, return_h=True)
    assert torch.equal(y, rmsnorm(x, weight)) and torch.equal(h, x) and h.data_ptr() == x.data_ptr()
    if not leaves:
        return
    dy, dh = normal(5, 33), normal(5, 33)
    found = torch.autograd.grad((y * dy).sum() + (h * dh).sum(), leaves)
    want = torch.autograd.grad((rmsnorm(x, weight) * dy).sum() + (x * dh).sum(), leaves)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b)
    if frozen != "x":  # a gradient of h alone passes through
        assert torch.equal(torch.autograd.grad(rmsnorm(x, weight, return_h=True)[1], x, dh)[0], dh)
        by_library = torch.vmap(lambda x: torch.stack(rmsnorm(x, weight, return_h=True)))(x[None])
        torch.testing.assert_close(by_library[0], torch.stack((y, x)))


@pytest.mark.parametrize("needed", ["x", "weight", "residual"])
def test_no_work_for_a_gradient_that_nobody_wants(needed, monkeypatch):
    launched = []
    monkeypatch.setattr(plans, "_rmsnorm_dw_kernel", _spy(plans._rmsnorm_dw_kernel, launched, "dw"))
    monkeypatch.setattr(plans, "_rmsnorm_bwd_kernel", _spy(plans._rmsnorm_bwd_kernel, launched, "bwd"))
    tensors = {"x": normal(300, 32), "weight": normal(32), "residual": normal(300, 32)}  # more rows than one CTA's tile
    tensors[needed].requires_grad_()
    y, h = rmsnorm(**tensors)
    (y.sum() + h.sum()).backward()
    options = next(options for name, options in launched if name == "bwd")
    assert options["NEED_DW"] == (needed == "weight")
    assert options["NEED_DX"] == (needed != "weight")
    assert ("dw" in [name for name, _ in launched]) == (needed == "weight")
    assert all((tensors[n].grad is not None) == (n == needed) for n in tensors)


@pytest.mark.parametrize("used", [0, 1])
def test_one_output_alone_may_be_used(used):
    tensors = [normal(3, 32, requires_grad=True), normal(32, requires_grad=True), normal(3, 32, requires_grad=True)]

    def grads(norm):
        x, weight, residual = tensors
        loss = norm(x, weight, residual=residual)[used].square().sum()
        return torch.autograd.grad(loss, tensors, allow_unused=True)

    for mine, other in zip(grads(rmsnorm), grads(rmsnorm_reference), strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_inference_saves_nothing(monkeypatch):
    launched = []
    monkeypatch.setattr(plans, "_rmsnorm_fwd_kernel", _spy(plans._rmsnorm_fwd_kernel, launched, "fwd"))
    x = normal(3, 32, requires_grad=True)
    rmsnorm(x)
    with torch.no_grad():
        rmsnorm(x)
    assert [options["SAVE_RSTD"] for _, options in launched] == [True, False]


class _spy:
    """Replaces a JIT kernel and records the options of each launch. Its hooks, which are never called, make every
    launch go through Triton."""

    def __init__(self, jit, launched, name):
        self.jit, self.launched, self.name = jit, launched, name
        self.arg_names, self.pre_run_hooks = jit.arg_names, [None]

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.launched.append((self.name, options))
            return self.jit[grid](*args, **options)

        return launch


def test_the_ops_keep_the_rules_of_torch_library_where_nothing_is_saved():
    ops, x, weight = getattr(torch.ops, __package__.replace(".", "_")), normal(4, 64), normal(64)
    torch.library.opcheck(ops.rmsnorm_fwd, (x, weight, 1e-6, 0.0, False, "auto"))
    torch.library.opcheck(ops.rmsnorm_add_fwd, (x, normal(4, 64), weight, 1e-6, 0.0, False, "auto"))


def test_row_stride_is_read_in_place(monkeypatch):
    """A column slice, such as a part of a fused projection's output, is not copied first."""
    packed = normal(10, 96)
    x = packed[:, 32:64]
    assert plans._rows(x).data_ptr() == x.data_ptr()
    torch.testing.assert_close(rmsnorm(x), rmsnorm(x.contiguous()), rtol=0, atol=0)


@pytest.mark.parametrize("dim", [2049, 2560, 3072, 5120, 6144, 10240])
def test_a_row_in_two_pieces_equals_pytorch(dim):
    """Widths that end one column past the first piece, inside the second, and at its end."""
    assert configs.pick_fwd_config(3, dim, torch.float32, (9, 0)).tail
    x, weight, residual = normal(3, dim), normal(dim), normal(3, dim)
    torch.testing.assert_close(rmsnorm(x, weight), F.rms_norm(x, (dim,), weight, 1e-6))
    y, h = rmsnorm(x, weight, residual=residual)
    assert torch.equal(h, x + residual)
    torch.testing.assert_close(y, F.rms_norm(h, (dim,), weight, 1e-6))


def test_weight_may_be_of_another_dtype():
    x, weight = normal(4, 64, dtype=torch.float16, requires_grad=True), normal(64, requires_grad=True)
    y = rmsnorm(x, weight)
    y.backward(torch.ones_like(y))
    assert (y.dtype, x.grad.dtype, weight.grad.dtype) == (torch.float16, torch.float16, torch.float32)


def test_zero_rows_give_zero_dw_and_a_zero_row_stays_finite():
    x, weight = normal(0, 16, requires_grad=True), normal(16, requires_grad=True)
    rmsnorm(x, weight).sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    assert torch.equal(rmsnorm(torch.zeros(2, 8, device=DEVICE)), torch.zeros(2, 8, device=DEVICE))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(x=lambda t: t.double()), TypeError, "x must be"),
        (dict(x=lambda t: t[0, 0]), ValueError, "x must be"),
        (
            dict(x=lambda t: t.new_zeros(1, 65537), weight=lambda t: None, residual=lambda t: None),
            ValueError,
            "D <= 65536",
        ),
        (dict(weight=lambda t: t[:-1]), ValueError, "weight must be"),
        (dict(weight=lambda t: t.int()), TypeError, "weight must be"),
        (dict(residual=lambda t: t.half()), TypeError, "residual must be"),
        (dict(residual=lambda t: t[:1]), ValueError, "residual must have"),
        (dict(weight=lambda t: t.to("meta")), ValueError, "weight must be on"),
    ],
)
def test_bad_input_is_refused_by_name(change, error, words):
    inputs = {"x": normal(3, 8), "weight": normal(8), "residual": normal(3, 8)}
    inputs = {n: change.get(n, lambda t: t)(t) for n, t in inputs.items()}
    with pytest.raises(error, match=words):
        rmsnorm(**inputs)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_width_has_a_configuration_that_fits_the_shared_memory(dtype, capability):
    for dim in (1, 7, 512, 4096, 5120, 8192, 11008, 16384, 16385, 28672, 65536):
        for tensors in (2, 3):
            config = configs.pick_bwd_config(10_000, dim, dtype, tensors, capability)
            if config.stages > 1:
                tile = config.block_m * config.block_n * dtype.itemsize * tensors
                assert tile * config.stages * config.programs_per_sm <= configs._shared_memory(capability)
            assert config.num_warps * config.programs_per_sm <= 64
        forward = configs.pick_fwd_config(10_000, dim, dtype, capability)
        assert forward.block_n + forward.tail >= min(dim, configs.MAX_BLOCK)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    """Offsets are 64 bits wide: the last rows are out of reach of 32-bit offsets."""
    x = torch.randn(2**31 // 8192 + 3, 8192, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(8192, device="cuda", dtype=torch.bfloat16)
    y = rmsnorm(x, weight)
    for part in (slice(0, 2), slice(-3, None)):
        torch.testing.assert_close(y[part], rmsnorm_reference(x[part], weight))
