"""Tests specific to linear_cross_entropy; `tests/test_specs.py` checks the rest from SPEC."""

from __future__ import annotations

import itertools
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from . import configs, launches, layout, library, linear_cross_entropy, op
from .reference import linear_cross_entropy_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LLAMA3 = dict(rows=8192, dim=4096, vocab=128256, dtype=torch.bfloat16)


def problem(rows=21, dim=12, vocab=50, dtype=torch.float32, grad=True, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    hidden = torch.randn(rows, dim, generator=generator, device=DEVICE).to(dtype).requires_grad_(grad)
    weight = torch.randn(vocab, dim, generator=generator, device=DEVICE).to(dtype).requires_grad_(grad)
    target = torch.randint(0, vocab, (rows,), generator=generator, device=DEVICE)
    return hidden, weight, target.index_fill_(0, torch.arange(0, rows, 7, device=DEVICE), -100)


def equal(mine, other, **options):
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a, b, **(options or dict(rtol=1e-4, atol=1e-5)))


@pytest.mark.parametrize("scratch", [0, None])
def test_equals_pytorch(scratch):
    hidden, weight, target = problem()
    mine = linear_cross_entropy(hidden, weight, target, label_smoothing=0.1, scratch_bytes=scratch)
    other = F.cross_entropy(F.linear(hidden, weight), target, label_smoothing=0.1)
    torch.testing.assert_close(mine, other)
    equal(torch.autograd.grad(mine, (hidden, weight)), torch.autograd.grad(other, (hidden, weight)))


def test_rows_with_a_workspace_of_their_own_and_rows_in_the_gradient_together():
    """The logits' gradients of both are copied for the weight's gradient, from buffers with different strides."""
    rows, dim, vocab, scratch = 200, 64, 5000, 4_900_000
    config = configs.pick_config(rows, dim, vocab, torch.float32, True, scratch)
    assert [(c.start, c.stop, c.spare, c.kept) for c in config.chunks(rows)] == [
        (0, 192, True, True),
        (192, 200, False, True),
    ]
    hidden, weight, target = problem(rows, dim, vocab)
    mine = linear_cross_entropy(hidden, weight, target, scratch_bytes=scratch)
    other = F.cross_entropy(F.linear(hidden, weight), target)
    equal(torch.autograd.grad(mine, (hidden, weight)), torch.autograd.grad(other, (hidden, weight)))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_retained_graph_gives_the_same_again_and_what_was_handed_out_stays(reduction):
    hidden, weight, target = problem()
    loss = linear_cross_entropy(hidden, weight, target, reduction=reduction, scratch_bytes=0)
    dloss = torch.full_like(loss, 2.5)
    first = torch.autograd.grad(loss, (hidden, weight), dloss, retain_graph=True)
    copies = [t.clone() for t in first]
    second = torch.autograd.grad(loss, (hidden, weight), dloss)
    equal(second, copies)
    equal(first, copies, rtol=0, atol=0)


def test_products_are_only_those_that_are_needed(monkeypatch):
    """Counts in units of one GEMM over all rows. rows is twice dim, so half of the logits are computed twice."""
    flops = []
    product = torch.mm

    def counting(a, b, **options):
        flops.append(a.shape[0] * a.shape[1] * b.shape[1])
        return product(a, b, **options)

    monkeypatch.setattr(torch, "mm", counting)
    rows, dim, vocab = 32, 16, 60

    def products(*wanted, **options):
        hidden, weight, target = problem(rows, dim, vocab, grad=False)
        leaves = [t.requires_grad_() for n, t in (("hidden", hidden), ("weight", weight)) if n in wanted]
        flops.clear()
        loss = linear_cross_entropy(hidden, weight, target, **options)
        if leaves:
            torch.autograd.grad(loss, leaves)
        return sum(flops) / (rows * dim * vocab)

    assert products() == 1
    assert products("hidden") == 2
    assert products("hidden", "weight") == 3
    assert products("hidden", scratch_bytes=0) == 2
    assert products("hidden", "weight", scratch_bytes=0) == 3.5
    assert products("weight", scratch_bytes=0) == 2.5
    assert products("hidden", "weight", scratch_bytes=0, label_smoothing=0.5, z_loss=0.1) == 3.5
    hidden, weight, target = problem(rows, dim, vocab)
    with torch.no_grad():
        flops.clear()
        linear_cross_entropy(hidden, weight, target)
    assert sum(flops) == rows * dim * vocab


def test_an_incoming_gradient_of_one_changes_nothing():
    """For each of the gradients. A gradient that is not needed, or is empty, is skipped."""
    for sizes in ((70_001, 9, 131_073), (None, 70_001, None), (5, None, 7), (0, 3, 0)):
        grads = [None if n is None else torch.randn(n, device=DEVICE) for n in sizes]
        before = [None if g is None else g.clone() for g in grads]
        scale = launches.scale_launch(torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device("cpu"), *grads)
        for factor in (1.0, -3.0):
            scale(torch.full((), factor, device=DEVICE), *grads)
            assert all(g is None or torch.equal(g, b * factor) for g, b in zip(grads, before, strict=True))
    assert launches.scale_launch(torch.device("cpu"), torch.empty(0), None, None) is None


def test_half_precision_gradients_survive_a_loss_scale():
    """The gradients of a mean over many rows underflow in float16 unless the loss is scaled first."""
    hidden, weight, target = problem(60, 8, 700, torch.float16)
    weight.data.mul_(0.01)
    loss = linear_cross_entropy(hidden, weight, target) * 2.0**15
    other = linear_cross_entropy_reference(hidden.float(), weight.float(), target) * 2.0**15
    mine, theirs = (torch.autograd.grad(t, (hidden, weight)) for t in (loss, other))
    equal(mine, theirs, rtol=1e-2, atol=2e-2)


def test_autocast_casts_like_a_linear_layer():
    hidden, weight, target = problem()
    with torch.autocast(DEVICE, dtype=torch.float16):
        loss = linear_cross_entropy(hidden, weight, target)
        other = F.cross_entropy(F.linear(hidden, weight), target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, other.float(), rtol=1e-3, atol=1e-3)
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert [g.dtype for g in grads] == [torch.float32, torch.float32]


def test_three_dimensions_and_a_gradient_that_comes_in_strided():
    hidden, weight, target = problem(24, 12, 50)
    cube, square = hidden.view(4, 6, 12), target.view(4, 6)
    dloss = torch.randn(6, 4, device=DEVICE).t()
    mine, other = (
        torch.autograd.grad(fn(cube, weight, square, reduction="none"), (hidden, weight), dloss)
        for fn in (linear_cross_entropy, linear_cross_entropy_reference)
    )
    equal(mine, other)


def test_no_target_at_all():
    hidden, weight, _ = problem()
    target = torch.full((21,), 3, device=DEVICE)
    loss = linear_cross_entropy(hidden, weight, target, ignore_index=3)
    assert loss.isnan()
    assert not any(g.any() for g in torch.autograd.grad(loss, (hidden, weight)))
    assert linear_cross_entropy(hidden, weight, target, ignore_index=3, reduction="sum") == 0


@pytest.mark.parametrize("options", [{}, dict(label_smoothing=0.1, z_loss=1e-2, softcap=3.0), dict(reduction="none")])
def test_ignored_rows_of_logits_that_are_not_finite_have_no_gradient(options):
    """Logits that overflow, of finite hidden: 0 · NaN would reach all of weight's gradient."""
    hidden, weight, target = problem()
    target[[2, 9]] = -100
    spoiled = hidden.detach().clone()
    spoiled[2], spoiled[9] = 3e38, -3e38
    spoiled.requires_grad_()
    dloss = torch.ones(len(target), device=DEVICE) if options.get("reduction") == "none" else None
    if dloss is not None:
        dloss[2] = torch.inf
    loss, want = (linear_cross_entropy(x, weight, target, **options) for x in (spoiled, hidden))
    equal([loss], [want])
    mine = torch.autograd.grad(loss, (spoiled, weight), dloss)
    assert not mine[0][[2, 9]].any()
    other = hidden.detach().clone()
    other[[2, 9]] = 0
    other.requires_grad_()
    equal(mine, torch.autograd.grad(linear_cross_entropy(other, weight, target, **options), (other, weight), dloss))


@pytest.mark.parametrize("ignore_index", [2**31, 2**32 + 3, -(2**63)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_an_ignore_index_that_no_target_can_hold(reduction, ignore_index):
    """Rows past the last one do not count either."""
    hidden, weight, target = problem()
    target.clamp_(min=0)
    options = dict(ignore_index=ignore_index, reduction=reduction)
    loss = linear_cross_entropy(hidden, weight, target.int(), **options)
    other = F.cross_entropy(F.linear(hidden, weight), target, **options)
    torch.testing.assert_close(loss, other)
    equal(*(torch.autograd.grad(value.sum(), (hidden, weight)) for value in (loss, other)))


@pytest.mark.parametrize("logit", [-2e38, -3.4028234663852886e38])
def test_logits_as_low_as_they_can_be(logit):
    """Rows whose logits are all equal, near the lowest number of the dtype or at it."""
    hidden = torch.ones(3, 1, device=DEVICE, requires_grad=True)
    weight, target = torch.full((5, 1), logit, device=DEVICE), torch.tensor([0, 1, 4], device=DEVICE)
    loss = linear_cross_entropy(hidden, weight, target, reduction="none")
    torch.testing.assert_close(loss, torch.full((3,), 5.0, device=DEVICE).log())


def test_an_odd_vocabulary_and_a_column_major_weight_are_read_in_place(monkeypatch):
    hidden, weight, target = problem(20, 16, 51, grad=False)
    transposed = weight.t().contiguous().t()
    assert layout.operand(transposed).data_ptr() == transposed.data_ptr()
    assert layout.operand(weight[3:, 2:]).data_ptr() == weight[3:, 2:].data_ptr()
    torch.testing.assert_close(
        linear_cross_entropy(hidden, transposed, target), linear_cross_entropy(hidden, weight, target)
    )


@pytest.mark.parametrize("stride, stride_to, start, moved", [(32, 40, 8, 16), (31, 40, 8, 13), (32, 40, 3, 13)])
def test_rows_of_a_gradient_are_moved_in_whole_vectors_where_they_can(stride, stride_to, start, moved):
    p = SimpleNamespace(dtype=torch.float32, device=torch.device(DEVICE, 0), capability=(8, 0))
    source, to = torch.randn(20, stride, device=DEVICE), torch.zeros(12, stride_to, device=DEVICE)
    chunk = SimpleNamespace(count=13, start=start)
    launches.move_launch(p, chunk, slice(5, 17), stride, stride_to)(source, to)
    expected = torch.zeros_like(to)
    expected[:, start : start + moved] = source[5:17, :moved]
    assert torch.equal(to, expected)


def test_a_gradient_that_the_forward_has_is_not_computed_again_behind_torch_library(monkeypatch):
    monkeypatch.setattr(op, "lean", lambda *_: False)
    hidden, weight, target = problem()
    loss = linear_cross_entropy(hidden, weight, target)
    with monkeypatch.context() as within:
        within.setattr(library, "gradients", lambda *_: pytest.fail("computed again"))
        mine = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    other = torch.autograd.grad(F.cross_entropy(F.linear(hidden, weight), target), (hidden, weight))
    equal(mine, other)
    equal(torch.autograd.grad(loss, (hidden, weight)), other)  # the forward's gradients can be used only once


@pytest.mark.parametrize("parts, rows", [(1, 16), (3, 5), (7, 48)])
@pytest.mark.parametrize("smoothing", [False, True])
def test_the_statistics_begin_at_whole_vectors_and_do_not_overlap(parts, rows, smoothing):
    stats = layout.Stats(parts, rows, smoothing)
    begins = (0, *stats.offsets, stats.size)
    rooms = [after - before for before, after in itertools.pairwise(begins)]
    wanted = [parts * rows, parts * rows, parts * rows if smoothing else 0, rows]
    assert all(begin % 16 == 0 for begin in begins[:-1])
    assert all(want <= room < want + 16 for want, room in zip(wanted, rooms, strict=True))


def test_the_scratch_keeps_to_its_bound():
    def scratch(rows, dim, vocab, dtype, weight_too, bound):
        config = configs.pick_config(rows, dim, vocab, dtype, weight_too, bound)
        chunks = list(config.chunks(rows))
        assert [c.start for c in chunks] == [0, *(c.stop for c in chunks[:-1])]
        assert chunks[-1].stop == rows
        if not config.in_gradient:
            return config, vocab * -(-max(c.count for c in chunks) // 64) * 64 * dtype.itemsize
        assert all(c.count <= dim for c in chunks if not c.spare)
        assert all(c.kept for c in chunks if c.spare) and chunks[-1].kept
        spare = sum(-(-c.count // 64) * 64 for c in chunks if c.spare)
        return config, (spare * vocab + config.slice * -(-rows // 64) * 64) * dtype.itemsize

    for rows, dim, vocab in ((8192, 4096, 128256), (8192, 4096, 32000), (3001, 1000, 50257), (70_000, 8192, 262_144)):
        for dtype in (torch.bfloat16, torch.float32):
            for weight_too in (True, False):
                for bound in (None, 300 << 20, 1 << 30, 1 << 36):
                    config, used = scratch(rows, dim, vocab, dtype, weight_too, bound)
                    results = (vocab * weight_too + rows) * dim * dtype.itemsize
                    limit = bound or max((640 << 20) - results, results // 16, 1024 * (rows + 64) * dtype.itemsize)
                    assert used <= limit, (rows, dim, vocab, dtype, weight_too, bound, config)


def test_the_large_case_stays_below_a_gigabyte_and_a_fifth():
    config = configs.pick_config(**LLAMA3, weight_too=True)
    assert config == configs.Config(chunk=4096, slice=2048, in_gradient=True, spare=0, unit=64)
    gradients = (128256 + 8192) * 4096 * 2
    stats = configs.pick_stats_config(4096, 128256, torch.bfloat16, (9, 0))
    parts = 2 * 4 * 4096 * -(-128256 // stats.span)
    assert gradients + max(config.slice * 8192 * 2, parts) < 1.2e9


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(hidden=lambda t: t.double()), TypeError, "hidden must be"),
        (dict(hidden=lambda t: t[0, 0]), ValueError, "hidden must be"),
        (dict(weight=lambda t: t.half()), TypeError, "weight must be"),
        (dict(weight=lambda t: t[:, 1:]), ValueError, "weight must be"),
        (dict(weight=lambda t: t[:1].expand(2**31, -1)), ValueError, "must have at most"),
        (dict(hidden=lambda t: t[:1].expand(2**31, -1)), ValueError, "must have at most"),
        (dict(weight=lambda t: t.to("meta")), ValueError, "weight must be on"),
        (dict(target=lambda t: t.float()), TypeError, "target must be"),
        (dict(target=lambda t: t[1:]), ValueError, "target must be"),
        (dict(bias=lambda t: t[1:]), ValueError, "bias must be"),
        (dict(reduction=lambda t: "avg"), ValueError, "reduction must be"),
        (dict(softcap=lambda t: 0.0), ValueError, "softcap must be"),
        (dict(label_smoothing=lambda t: 1.5), ValueError, "label_smoothing must be"),
        (dict(scratch_bytes=lambda t: -1), ValueError, "scratch_bytes must"),
    ],
)
def test_bad_input_is_refused_by_name(change, error, words):
    hidden, weight, target = problem(grad=False)
    inputs = dict(hidden=hidden, weight=weight, target=target, bias=weight[:, 0].contiguous())
    inputs |= {n: make(inputs.get(n)) for n, make in change.items()}
    with pytest.raises(error, match=words):
        linear_cross_entropy(**inputs)


@pytest.mark.skipif(DEVICE == "cuda", reason="there it is an assertion of the GPU")
@pytest.mark.parametrize("wrong", [-1, 50, 2**40])
def test_a_target_out_of_range_is_an_error(wrong):
    hidden, weight, target = problem()
    target[5] = wrong
    with pytest.raises(ValueError, match="target must be in"):
        linear_cross_entropy(hidden, weight, target)


@pytest.mark.gpu
def test_a_target_out_of_range_is_an_assertion_of_the_gpu():
    """Runs in a separate process, because the assertion destroys the CUDA context."""
    package = __package__
    code = f"""
import torch, importlib
fn = importlib.import_module({package!r}).linear_cross_entropy
hidden, weight = torch.randn(8, 16, device="cuda"), torch.randn(50, 16, device="cuda")
print(float(fn(hidden, weight, torch.full((8,), 49, device="cuda"))))
fn(hidden, weight, torch.full((8,), 50, device="cuda"))
torch.cuda.synchronize()
print("survived")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0 and "survived" not in done.stdout, done.stdout + done.stderr
    assert "assert" in done.stderr, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("scratch", [0, None])
def test_peak_memory(scratch):
    rows, dim, vocab = 4096, 2048, 50257
    hidden, weight, target = problem(rows, dim, vocab, torch.bfloat16)

    def run():
        return torch.autograd.grad(
            linear_cross_entropy(hidden, weight, target, scratch_bytes=scratch), (hidden, weight)
        )

    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    gradients = 2 * (rows + vocab) * dim
    bound = gradients + 8 * 2**20 if scratch == 0 else 640 * 2**20 + 8 * 2**20
    assert torch.cuda.max_memory_allocated() - before <= bound


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    """Offsets are 64 bits wide: the weight's gradient has entries out of reach of 32-bit offsets."""
    rows, dim, vocab = 200, 8192, 2**31 // 8192 + 3
    hidden = torch.randn(rows, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, dim, device="cuda", dtype=torch.bfloat16).mul_(dim**-0.5).requires_grad_()
    target = torch.randint(vocab - 2, vocab, (rows,), device="cuda")
    loss = linear_cross_entropy(hidden, weight, target, scratch_bytes=1 << 20, reduction="sum")
    dhidden, dweight = torch.autograd.grad(loss, (hidden, weight))
    with torch.no_grad():
        logits = F.linear(hidden, weight).float()
        torch.testing.assert_close(loss, F.cross_entropy(logits, target, reduction="sum"), rtol=1e-4, atol=1e-2)
        g = torch.softmax(logits, -1)
        g[torch.arange(rows), target] -= 1
        for part in (slice(0, 3), slice(-3, None)):
            torch.testing.assert_close(dweight[part].float(), g[:, part].T @ hidden.float(), rtol=2e-2, atol=1e-2)
        torch.testing.assert_close(dhidden.float(), g @ weight.float(), rtol=2e-2, atol=1e-2)
