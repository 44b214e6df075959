"""Tests specific to cross_entropy; `tests/test_specs.py` checks the rest from SPEC."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from harness.correctness import addresses

from . import calls, configs, cross_entropy, cross_entropy_and_grad, layout, library, plans
from .loss import Loss, check
from .reference import cross_entropy_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def batch(*shape: int, ignored: bool = True, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [*shape] and their targets; some targets are ignore_index."""
    logits = 2 * torch.randn(shape, device=DEVICE, **options)
    target = torch.randint(0, shape[-1], shape[:-1], device=DEVICE)
    if ignored and target.numel() > 2:
        target.view(-1)[1::4] = -100
    return logits, target


def with_grad(loss, logits, target, **options):
    """(loss, gradient) for an incoming gradient that is not 1."""
    logits = logits.detach().requires_grad_()
    value = loss(logits, target, **options)
    generator = torch.Generator(DEVICE).manual_seed(1)
    incoming = torch.rand(value.shape, generator=generator, device=DEVICE).to(value.dtype)
    return value.detach(), *torch.autograd.grad(value, logits, incoming)


def through(logits: torch.Tensor) -> torch.Tensor:
    """The logits as the result of an op that does not save them: not a leaf."""
    return logits.detach().requires_grad_() * 1


def assert_close(ours, theirs, **tolerance) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, **tolerance)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
@pytest.mark.parametrize("vocab", [50, 5003])
def test_equals_pytorch(reduction, weighted, label_smoothing, vocab):
    logits, target = batch(7, vocab)
    weight = torch.rand(vocab, device=DEVICE) if weighted else None
    options = dict(weight=weight, label_smoothing=label_smoothing, reduction=reduction)
    ours, theirs = (with_grad(loss, logits, target, **options) for loss in (cross_entropy, F.cross_entropy))
    assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_any_leading_dimensions_and_an_ignore_index_of_ones_own():
    logits, target = batch(2, 3, 40)
    target = torch.where(target == -100, 7, target).int()
    ours = with_grad(cross_entropy, logits, target, ignore_index=7, reduction="none")
    flat = with_grad(F.cross_entropy, logits.view(6, 40), target.view(6).long(), ignore_index=7, reduction="none")
    assert_close(ours, [t.view(s) for t, s in zip(flat, ((2, 3), (2, 3, 40)), strict=True)], rtol=1e-5, atol=1e-6)
    assert cross_entropy(logits[0, 0], target[0, 0] * 0).shape == ()


@pytest.mark.parametrize("ignore_index", [2**31, 2**32 + 3, -(2**63)])
@pytest.mark.parametrize("vocab", [40, 5003])
@pytest.mark.parametrize("fused", [False, True])
def test_an_ignore_index_that_no_target_can_hold(fused, vocab, ignore_index):
    """Rows past the last one do not count either."""
    logits, target = batch(5, vocab, ignored=False)
    options = dict(weight=torch.rand(vocab, device=DEVICE), ignore_index=ignore_index)
    ours = with_grad(cross_entropy, logits, target.int(), grad_in_forward=fused, **options)
    assert_close(ours, with_grad(F.cross_entropy, logits, target, **options), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize("vocab", [40, 5003])
def test_an_ignored_row_has_no_gradient_whatever_comes_in(vocab, index, fused, inplace):
    """Not even where the incoming gradient is NaN or inf, as of a mean over no rows."""
    logits, target = batch(9, vocab)
    incoming = torch.linspace(0.5, 2.0, 9, device=DEVICE)
    incoming[1::4] = torch.tensor([math.nan, math.inf], device=DEVICE)
    leaf = through(logits)
    options = dict(reduction="none", grad_in_forward=fused, inplace=inplace)
    (ours,) = torch.autograd.grad(cross_entropy(leaf, target.to(index), **options), leaf, incoming)
    other = logits.requires_grad_()
    (theirs,) = torch.autograd.grad(F.cross_entropy(other, target, reduction="none"), other, incoming)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_without_a_row_that_counts(fused):
    """As in PyTorch, the sum is 0, the mean is 0 / 0 and the gradient is 0."""
    logits, target = batch(3, 24)
    target.fill_(-100)
    for reduction in ("none", "sum", "mean"):
        options = dict(reduction=reduction, z_loss=0.1, grad_in_forward=fused)
        value, gradient = with_grad(cross_entropy, logits, target, **options)
        expected = torch.full_like(value, math.nan if reduction == "mean" else 0.0)
        torch.testing.assert_close(value, expected, equal_nan=True)
        assert not gradient.any()
    assert math.isnan(cross_entropy(logits[:0], target[:0]).item())
    assert cross_entropy(logits[:0], target[:0], reduction="sum").item() == 0


@pytest.mark.parametrize("vocab", [40, 4100])
@pytest.mark.parametrize("fused", [False, True])
def test_what_is_in_ignored_rows_does_not_matter(vocab, fused):
    """PyTorch multiplies ignored rows by 0, so that a NaN in them reaches the gradient."""
    logits, target = batch(6, vocab)
    clean = with_grad(cross_entropy, logits, target, grad_in_forward=fused)
    logits[target == -100] = math.nan
    assert_close(with_grad(cross_entropy, logits, target, grad_in_forward=fused), clean, rtol=0, atol=0)


@pytest.mark.parametrize("vocab", [40, 12301])
@pytest.mark.parametrize("fused", [False, True])
def test_masked_and_huge_logits(vocab, fused):
    """Runs of −inf longer than any chunk, rows of −inf only, and values at both ends of fp32's range."""
    logits, target = batch(6, vocab, ignored=False)
    third = vocab // 3
    logits[0, : 2 * third], target[0] = -math.inf, vocab - 1
    logits[1, third:], target[1] = -math.inf, 0
    logits[2, :] = torch.finfo(torch.float32).min
    logits[3, third] = torch.finfo(torch.float32).max
    logits[4] *= 1e4
    target[5] = third
    logits[5, third] = -math.inf
    options = dict(reduction="none")
    ours = with_grad(cross_entropy, logits, target, grad_in_forward=fused, **options)
    assert_close(ours, with_grad(F.cross_entropy, logits, target, **options), rtol=1e-5, atol=1e-5, equal_nan=True)
    logits[:] = -math.inf
    value, gradient = with_grad(cross_entropy, logits, target, grad_in_forward=fused, **options)
    assert value.isnan().all()
    assert gradient.isnan().all()


def test_z_loss_and_softcap_by_their_definitions():
    logits, target = batch(5, 33)
    y = 4 * torch.tanh(logits / 4)
    lse, live = torch.logsumexp(y, -1), target != -100
    z = 1e-2 * lse[live].square().mean()
    value, z_in_it, found = cross_entropy(logits, target, z_loss=1e-2, softcap=4.0, return_z_loss=True, return_lse=True)
    assert_close((value, z_in_it, found), (F.cross_entropy(y, target) + z, z, lse), rtol=1e-5, atol=1e-6)


def test_gradients_of_all_outputs_and_of_one_alone():
    logits, target = batch(5, 33)
    options = dict(z_loss=1e-2, softcap=4.0, return_z_loss=True, return_lse=True, label_smoothing=0.1)

    def gradient(loss, factors):
        leaf = logits.detach().requires_grad_()
        outputs = loss(leaf, target, **options)
        return torch.autograd.grad(sum(f * t.sum() for f, t in zip(factors, outputs, strict=True) if f), leaf)

    for factors in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (2, -3, 0.5)):
        ours, theirs = (gradient(loss, factors) for loss in (cross_entropy, cross_entropy_reference))
        assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_result_without_a_gradient_costs_no_gradient_of_zeros(monkeypatch):
    incoming = []

    def noted(g_loss, g_z, g_lse, *rest):
        incoming.append([g is not None for g in (g_loss, g_z, g_lse)])
        return gradient(g_loss, g_z, g_lse, *rest)

    gradient = library.gradient
    monkeypatch.setattr(library, "gradient", noted)
    logits, target = batch(3, 32)
    loss, z, lse = cross_entropy(logits.requires_grad_(), target, z_loss=1e-2, return_z_loss=True, return_lse=True)
    torch.autograd.grad(loss, logits, retain_graph=True)
    torch.autograd.grad(lse.sum() + z, logits)
    assert incoming == [[True, False, False], [False, True, True]]


@pytest.mark.parametrize(("fused", "reduction"), [(False, "none"), (False, "mean"), (True, "mean")])
def test_programs_that_take_several_tiles_each(fused, reduction, monkeypatch):
    monkeypatch.setattr(plans, "_persistent", lambda tiles, resident: min(tiles, 3))
    monkeypatch.setattr(plans, "COUNT_BLOCK", 8)
    logits, target = batch(301, 40)
    weight = torch.rand(40, device=DEVICE)
    options = dict(weight=weight, reduction=reduction)
    ours = with_grad(cross_entropy, logits, target, grad_in_forward=fused, **options)
    assert_close(ours, with_grad(F.cross_entropy, logits, target, **options), rtol=1e-5, atol=1e-6)


def test_a_plan_is_made_once_behind_torch_library(monkeypatch):
    made = []
    fwd_plan = calls.fwd_plan
    monkeypatch.setattr(calls, "fwd_plan", lambda *given: made.append(given) or fwd_plan(*given))
    logits, target = batch(3, 32)
    loss = calls.loss_of(logits, -100, (0.0, "mean", 0.0, None, False, False, False))
    for _ in range(2):
        calls.forward(logits, target, None, loss, False, None, "auto")
    assert len(made) == 1


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_the_gradient_that_the_reference_writes_out_is_that_of_autograd(reduction):
    logits, target = batch(6, 17)
    options = dict(
        weight=torch.rand(17, device=DEVICE), label_smoothing=0.2, z_loss=1e-2, softcap=3.0, reduction=reduction
    )
    leaf = logits.detach().requires_grad_()
    expected = torch.autograd.grad(cross_entropy_reference(leaf, target, **options).sum(), leaf)[0]
    torch.testing.assert_close(cross_entropy_reference(logits, target, with_grad=True, **options)[1], expected)


class _spy:
    """Replaces a JIT kernel and records the options of each launch. Its hooks, which are never called, make every
    launch go through Triton."""

    def __init__(self, jit, launched):
        self.jit, self.launched = jit, launched
        self.arg_names, self.pre_run_hooks = jit.arg_names, [None]

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.launched.append(options)
            return self.jit[grid](*args, **options)

        return launch


def test_inference_saves_nothing(monkeypatch):
    launched: list[dict] = []
    monkeypatch.setattr(plans, "_cross_entropy_narrow_kernel", _spy(plans._cross_entropy_narrow_kernel, launched))
    logits, target = batch(3, 32)
    cross_entropy(logits, target)
    cross_entropy(logits.requires_grad_(), target)
    with torch.no_grad():
        cross_entropy(logits, target, grad_in_forward=True)
    assert [(o["SAVE"], o["GRAD"]) for o in launched] == [(False, False), (True, False), (False, False)]


def test_rows_are_read_in_place():
    """A slice of a padded vocabulary is not copied first; its pointer is rounded down to 16 bytes."""
    padded, target = batch(5, 96)
    rows = layout.rows_of(padded[:, 33:90])
    assert rows.pointer(rows.of(padded[:, 33:90])).data_ptr() == padded.data_ptr() + 4 * 32
    assert rows == layout.Rows(stride=96, skip=1, aligned=True, copied=False)
    target %= 57
    ours = with_grad(cross_entropy, padded[:, 33:90], target)
    assert_close(ours, with_grad(F.cross_entropy, padded[:, 33:90].clone(), target), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("offset", range(4))
@pytest.mark.parametrize("extra", range(4))
def test_rows_off_alignment_have_a_body_and_a_fringe(offset, extra):
    """Reads and writes a row of fp32 at every offset from a 16-byte boundary, with its neighbouring rows."""
    vocab = configs.NARROW + 1 + extra
    packed, target = batch(3, vocab + offset, ignored=False)
    target %= vocab
    logits = packed[:, offset:]
    value, gradient = cross_entropy_and_grad(logits, target)
    assert_close((value, gradient), cross_entropy_reference(logits, target, with_grad=True), rtol=1e-5, atol=1e-7)
    before, inside = packed.clone(), cross_entropy_and_grad(logits, target, inplace=True)[1]
    torch.testing.assert_close(inside, gradient, rtol=0, atol=0)
    assert torch.equal(packed[:, :offset], before[:, :offset])


@pytest.mark.parametrize("vocab", [8, 40, 4100])
@pytest.mark.parametrize("target", [-1, "vocab", -101, 2**40])
def test_a_target_out_of_range_is_refused_by_name(vocab, target):
    if DEVICE == "cuda":
        pytest.skip("on a GPU it is an assertion that ends the process: see below")
    logits, targets = batch(5, vocab)
    targets[3] = vocab if target == "vocab" else target
    for loss in (cross_entropy, cross_entropy_and_grad):
        with pytest.raises(ValueError, match="target must be ignore_index"):
            loss(logits, targets)


@pytest.mark.skipif(DEVICE == "cuda", reason="the assertion ends the process on a GPU; the interpreter makes none")
@pytest.mark.parametrize("wrong", [-(10**9), 10**9])
def test_a_target_out_of_range_is_not_read_with(wrong, monkeypatch):
    """Rows of one CTA are asserted together at its end, so that no logit outside the tensor may be read before."""
    monkeypatch.setattr(plans, "_check_target", lambda *_: None)
    logits, target = batch(5, 40)
    loss = Loss(-100, 0.0, "none", 0.0, None, torch.float32, False, False)
    write = plans.fwd_plan(logits, target, None, loss, False, None, "auto")
    target[3] = wrong
    with addresses.checked():
        write(logits, target, None)


def test_the_most_rows_are_accepted():
    logits, target = torch.zeros(1, 8, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    most = 2**31 - 2**17
    check(logits.expand(most, 8), target.expand(most), None, -100, 0.0, "mean", 0.0, None, "auto")


PROGRAM = """
import torch
from {package} import cross_entropy, cross_entropy_and_grad
logits = torch.randn(64, {vocab}, device="cuda", requires_grad=True)
target = torch.randint(0, {vocab}, (64,), device="cuda")
def run():
    return {call}
for _ in range(2):
    run()
if {graph}:
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        run()
    run = captured.replay
run()
torch.cuda.synchronize()
print("right targets pass", flush=True)
target[7] = {target}
run()
torch.cuda.synchronize()
print("a wrong target passes too", flush=True)
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("vocab", "target", "graph", "call"),
    [
        (40, 40, False, "cross_entropy(logits, target)"),
        (32000, -1, False, "cross_entropy(logits, target, reduction='none')"),
        (32000, 2**31 + 5, True, "cross_entropy(logits.detach(), target)"),
        (32000, 32000, False, "cross_entropy_and_grad(logits, target)"),
    ],
)
def test_a_target_out_of_range_is_a_device_side_assertion(vocab, target, graph, call):
    """Runs in a separate process, because the assertion destroys the CUDA context."""
    program = PROGRAM.format(package=__package__, vocab=vocab, target=target, graph=graph, call=call)
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "right targets pass" in found.stdout, found.stderr
    assert "passes too" not in found.stdout
    assert "cross_entropy: target must be" in found.stderr
    assert "device-side assert" in found.stderr


def test_autocast_gives_fp32_like_pytorch():
    logits, target = batch(5, 64, dtype=torch.float16)
    assert cross_entropy(logits, target).dtype == torch.float16
    with torch.autocast(DEVICE, dtype=torch.float16 if DEVICE == "cuda" else torch.bfloat16):
        value, z = cross_entropy(logits, target, z_loss=1e-2, return_z_loss=True)
        leaf = logits.detach().requires_grad_()
        cross_entropy(leaf, target).backward()
    assert (value.dtype, z.dtype, leaf.grad.dtype) == (torch.float32, torch.float32, torch.float16)
    torch.testing.assert_close(value - z, F.cross_entropy(logits.float(), target), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(logits=lambda t: t.double()), TypeError, "logits must be"),
        (dict(logits=lambda t: t[0, 0]), ValueError, "logits must be"),
        (dict(logits=lambda t: t[:, :0]), ValueError, "logits must be"),
        (dict(logits=lambda t: t[:1].expand(2**31 - 2**17 + 1, 8)), ValueError, "logits must have at most"),
        (dict(target=lambda t: t.float()), TypeError, "target must be"),
        (dict(target=lambda t: t[:-1]), ValueError, "target must have"),
        (dict(target=lambda t: t.to("meta")), ValueError, "target must be on"),
        (dict(weight=lambda t: t[:-1]), ValueError, "weight must be"),
        (dict(weight=lambda t: t.int()), TypeError, "weight must be"),
        (dict(weight=lambda t: t.requires_grad_()), ValueError, "weight must not"),
        (dict(ignore_index=lambda t: 0.5), TypeError, "ignore_index must be"),
        (dict(reduction=lambda t: "batch"), ValueError, "reduction must be"),
        (dict(label_smoothing=lambda t: 1.5), ValueError, "label_smoothing must be"),
        (dict(z_loss=lambda t: -1.0), ValueError, "z_loss must be"),
        (dict(softcap=lambda t: 0.0), ValueError, "softcap must be"),
        (dict(backend=lambda t: "cutlass"), ValueError, "backend must be"),
    ],
)
def test_bad_input_is_refused_by_name(change, error, words):
    logits, target = batch(3, 8)
    given = dict(
        logits=logits,
        target=target,
        weight=torch.ones(8, device=DEVICE),
        ignore_index=-100,
        reduction="mean",
        label_smoothing=0.0,
        z_loss=0.0,
        softcap=None,
        backend="auto",
    )
    given = {n: change.get(n, lambda t: t)(t) for n, t in given.items()}
    with pytest.raises(error, match=words):
        cross_entropy(**given)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_more_than_two_to_the_31_logits(fused):
    """Offsets are 64 bits wide: the last rows are out of reach of 32-bit offsets."""
    rows, vocab = 2**31 // 50257 + 3, 50257
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free memory on the GPU")
    logits = torch.randn(rows, vocab, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(0, vocab, (rows,), device="cuda")
    value, gradient = with_grad(cross_entropy, logits, target, grad_in_forward=fused, reduction="none")
    for part in (slice(0, 2), slice(-3, None)):
        generator = torch.Generator("cuda").manual_seed(1)
        incoming = torch.rand(rows, generator=generator, device="cuda").bfloat16()[part]
        leaf = logits[part].float().requires_grad_()
        expected = F.cross_entropy(leaf, target[part], reduction="none")
        torch.testing.assert_close(value[part].float(), expected, rtol=1e-2, atol=1e-2)
        (wanted,) = torch.autograd.grad(expected, leaf, incoming.float())
        torch.testing.assert_close(gradient[part].float(), wanted, rtol=2e-2, atol=1e-6)
