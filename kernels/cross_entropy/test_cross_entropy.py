"""What is special to cross_entropy; `tests/test_specs.py` checks the rest from SPEC."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from . import configs, cross_entropy, cross_entropy_and_grad, forward, kernel, layout
from .reference import cross_entropy_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def batch(*shape: int, ignored: bool = True, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [*shape] and targets, of which some are ignored."""
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
    """The logits as an op made them: not a leaf, and not kept by the op."""
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


@pytest.mark.parametrize("fused", [False, True])
def test_without_a_row_that_counts(fused):
    """As in PyTorch: a sum of 0, a mean of 0 / 0, and no gradient."""
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
    """PyTorch multiplies it by 0, which lets NaN through to the gradient."""
    logits, target = batch(6, vocab)
    clean = with_grad(cross_entropy, logits, target, grad_in_forward=fused)
    logits[target == -100] = math.nan
    assert_close(with_grad(cross_entropy, logits, target, grad_in_forward=fused), clean, rtol=0, atol=0)


@pytest.mark.parametrize("vocab", [40, 12301])
@pytest.mark.parametrize("fused", [False, True])
def test_masked_and_huge_logits(vocab, fused):
    """Stretches of −inf longer than any chunk, rows of nothing else, and numbers at both ends of fp32."""
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


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_the_gradient_that_the_reference_writes_out_is_that_of_autograd(reduction):
    logits, target = batch(6, 17)
    options = dict(
        weight=torch.rand(17, device=DEVICE), label_smoothing=0.2, z_loss=1e-2, softcap=3.0, reduction=reduction
    )
    leaf = logits.detach().requires_grad_()
    expected = torch.autograd.grad(cross_entropy_reference(leaf, target, **options).sum(), leaf)[0]
    torch.testing.assert_close(cross_entropy_reference(logits, target, with_grad=True, **options)[1], expected)


@pytest.mark.parametrize("vocab", [40, 4100, 4101])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_the_gradient_of_the_forward_is_that_of_the_backward(vocab, reduction):
    logits, target = batch(6, vocab)
    options = dict(reduction=reduction, label_smoothing=0.1, z_loss=1e-3)
    leaf = logits.detach().requires_grad_()
    value = cross_entropy(leaf, target, **options)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    for inplace in (False, True):
        given = logits.clone()
        found = cross_entropy_and_grad(given, target, inplace=inplace, **options)
        assert_close(found, (value.detach(), gradient), rtol=1e-5, atol=1e-7)
        assert (found[1] is given) == inplace
        assert torch.equal(given, logits) != inplace
    scaled = (with_grad(cross_entropy, logits, target, grad_in_forward=fused, **options) for fused in (True, False))
    assert_close(*scaled, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("grad_in_forward", [False, True])
@pytest.mark.parametrize("columns", [slice(0, 40), slice(3, 36), slice(0, 80, 2)])
def test_in_place_the_gradient_takes_the_memory_of_the_logits(grad_in_forward, columns):
    """Also of a slice of rows, and of logits without a unit stride, which are copied to and fro."""
    stored, target = batch(6, 80)
    target %= 33
    given = stored.detach().requires_grad_()
    logits = (given * 1)[:, columns]
    before = logits.detach().clone()
    loss = cross_entropy(logits, target, grad_in_forward=grad_in_forward, inplace=True)
    assert torch.equal(logits, before) != grad_in_forward
    loss.backward()
    expected = torch.zeros_like(stored)
    expected[:, columns] = with_grad_of_one(before, target)
    torch.testing.assert_close(given.grad, expected)
    torch.testing.assert_close(logits, expected[:, columns])


def with_grad_of_one(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    leaf = logits.detach().requires_grad_()
    return torch.autograd.grad(F.cross_entropy(leaf, target), leaf)[0]


def test_an_incoming_gradient_of_one_costs_nothing(monkeypatch):
    """The kernel finds it out by itself: the host does not wait to see."""
    logits, target = batch(5, 30)
    made = through(logits)
    loss = cross_entropy(made, target, grad_in_forward=True, inplace=True)
    written = made.detach().clone()
    made_by_hand = torch.autograd.grad(loss, made, torch.ones_like(loss))[0]
    assert made_by_hand.data_ptr() == made.data_ptr()
    assert torch.equal(made_by_hand, written)


@pytest.mark.parametrize("grad_in_forward", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_retained_graph_may_be_run_again(grad_in_forward, inplace):
    logits, target = batch(5, 30)
    made = through(logits)
    loss = cross_entropy(made, target, grad_in_forward=grad_in_forward, inplace=inplace)
    expected = with_grad_of_one(logits, target)
    for factor in (3.0, 1.0, 0.5):
        incoming = torch.full_like(loss, factor)
        (gradient,) = torch.autograd.grad(loss, made, incoming, retain_graph=factor != 0.5)
        torch.testing.assert_close(gradient, factor * expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("grad_in_forward", [False, True])
def test_autograd_notices_that_logits_were_overwritten_which_it_needs(grad_in_forward):
    """exp keeps its output."""
    logits, target = batch(5, 30)
    loss = cross_entropy(logits.requires_grad_().exp(), target, grad_in_forward=grad_in_forward, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inplace_leaves_logits_alone_where_no_gradient_is_wanted():
    logits, target = batch(5, 30)
    before = logits.clone()
    cross_entropy(logits, target, grad_in_forward=True, inplace=True)
    with torch.no_grad():
        cross_entropy(through(logits), target, grad_in_forward=True, inplace=True)
    assert torch.equal(logits, before)


class _spy:
    """Stands in for a JIT kernel and notes the options of each launch."""

    def __init__(self, jit, launched):
        self.jit, self.launched = jit, launched

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.launched.append(options)
            return self.jit[grid](*args, **options)

        return launch


def test_inference_saves_nothing(monkeypatch):
    launched: list[dict] = []
    monkeypatch.setattr(kernel, "_cross_entropy_narrow_kernel", _spy(kernel._cross_entropy_narrow_kernel, launched))
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
    assert rows.pointer.data_ptr() == padded.data_ptr() + 4 * 32
    assert (rows.stride, rows.skip, rows.aligned) == (96, 1, True)
    target %= 57
    ours = with_grad(cross_entropy, padded[:, 33:90], target)
    assert_close(ours, with_grad(F.cross_entropy, padded[:, 33:90].clone(), target), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("offset", range(4))
@pytest.mark.parametrize("extra", range(4))
def test_rows_off_alignment_have_a_body_and_a_fringe(offset, extra):
    """Every way in which a row of fp32 may lie between 16-byte boundaries, read and written, with its neighbours."""
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
    """In a process of its own, because it makes an end of the CUDA context."""
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


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_the_gradient_in_the_forward_compiles(inplace, reduction):
    """Where torch.compile looks after memory, inplace asks for nothing."""
    logits, target = batch(5, 30)

    def step(x):
        made = x * 2
        loss = cross_entropy(made, target, grad_in_forward=True, inplace=inplace, reduction=reduction)
        return (loss.sum() * 3, made.sum())

    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    results = []
    for fn in (step, torch.compile(step, fullgraph=True, backend=backend)):
        leaf = logits.detach().requires_grad_()
        loss, _ = fn(leaf)
        loss.backward()
        results.append((loss.detach(), leaf.grad))
    assert_close(*results, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(logits=lambda t: t.double()), TypeError, "logits must be"),
        (dict(logits=lambda t: t[0, 0]), ValueError, "logits must be"),
        (dict(logits=lambda t: t[:, :0]), ValueError, "logits must be"),
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
    )
    given = {n: change.get(n, lambda t: t)(t) for n, t in given.items()}
    with pytest.raises(error, match=words):
        cross_entropy(**given)


def test_what_cannot_be_overwritten_is_refused():
    logits, target = batch(3, 8)
    with pytest.raises(ValueError, match="inplace needs logits that are not a leaf"):
        cross_entropy(logits.requires_grad_(), target, inplace=True)
    with pytest.raises(ValueError, match="inplace needs logits whose elements do not share memory"):
        cross_entropy_and_grad(logits.detach()[:1].expand(3, 8), target, inplace=True)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("spread", [False, True])
def test_every_vocabulary_has_a_configuration(dtype, capability, grad, spread):
    for vocab in (1, 2, 3, 8, 10, 17, 64, 131, 512, 1000, 1024, 2048, 4096, 4097, 32000, 50257, 128256, 262144):
        for aligned in {False, vocab % (16 // dtype.itemsize) == 0}:
            fwd = configs.pick_fwd_config(vocab, dtype, aligned, grad, spread, False, capability)
            bwd = configs.pick_bwd_config(vocab, dtype, aligned, capability)
            if vocab > configs.NARROW:
                assert isinstance(fwd, configs.WideFwdConfig)
                assert isinstance(bwd, configs.WideBwdConfig)
                assert bool(fwd.grad_unroll) == grad
                continue
            for config in (fwd, bwd):
                # What keeps a row within a warp wherever it fits into one: else warps would share it, and wait.
                assert config.block_m * config.lanes >= 32 * config.num_warps
                assert config.lanes * config.vector <= 2 ** (vocab - 1).bit_length()
            assert fwd.programs_per_sm * fwd.num_warps * 32 * fwd.registers == 65536


def test_the_narrow_forward_of_plain_rows_is_as_measured():
    fwd = configs.pick_fwd_config(512, torch.bfloat16, True, False, False, False, (9, 0))
    assert (fwd.lanes, fwd.block_m, fwd.num_warps, fwd.programs_per_sm) == (16, 8, 4, 8)
    bwd = configs.pick_bwd_config(512, torch.bfloat16, True, (9, 0))
    assert (bwd.lanes, bwd.block_m, bwd.num_warps) == (32, 4, 4)


@pytest.mark.parametrize("vocab", [5, 24, 512, 2500])
@pytest.mark.parametrize("options", [dict(), dict(label_smoothing=0.1, z_loss=1e-2, softcap=5.0, return_lse=True)])
def test_programs_of_the_narrow_forward_go_from_tile_to_tile(monkeypatch, vocab, options):
    """So few programs that each has several tiles, and that of the last round not all have one."""
    monkeypatch.setattr(kernel, "_multiprocessors", lambda tensor: 1)
    rows = (
        5 * 8 * configs.pick_fwd_config(vocab, torch.float32, vocab % 4 == 0, False, False, False, (9, 0)).block_m // 2
        + 1
    )
    logits, target = batch(rows, vocab)
    for reduction in ("none", "mean"):
        ours, theirs = (
            loss(logits, target, reduction=reduction, **options) for loss in (cross_entropy, cross_entropy_reference)
        )
        assert_close(*(t if isinstance(t, tuple) else (t,) for t in (ours, theirs)), rtol=1e-5, atol=1e-5)
        found = cross_entropy_and_grad(logits.clone(), target, inplace=True, reduction=reduction, **options)
        assert_close(
            found[:2],
            cross_entropy_reference(logits, target, with_grad=True, reduction=reduction, **options)[:2],
            rtol=1e-4,
            atol=1e-6,
        )


def test_so_few_programs_stay_that_no_tile_has_a_number_beyond_32_bits(monkeypatch):
    monkeypatch.setattr(kernel, "_multiprocessors", lambda tensor: 132)
    tensor = torch.empty(0)
    for tiles in (1, 1055, 2**31 - 2000, 2**31 - 3, 2**31 + 5):
        programs = kernel._staying(tiles, 8, tensor)
        assert 1 <= programs <= min(tiles, 1056)
        assert tiles - 1 + programs < 2**31 or tiles > 2**31


def test_a_row_of_the_fringe_is_covered_once():
    """`body` and `fringe` share out the columns of a row wherever it begins."""
    import triton
    import triton.language as tl

    @triton.jit
    def _cover_kernel(out_ptr, base, vocab, VECTOR: tl.constexpr, BLOCK: tl.constexpr):
        base += tl.zeros([], tl.int64)  # an argument of 1 comes as a constant
        first, head, length = forward.body(base, vocab, "fringed", VECTOR)
        at = tl.arange(0, BLOCK)
        tl.store(out_ptr + head + at, 1, mask=at < length)
        tl.store(out_ptr + 64 + (first - base), (first % VECTOR).to(tl.int32))
        beyond = forward.fringe(head, length, vocab, VECTOR)
        tl.store(out_ptr + beyond, 1 + tl.load(out_ptr + beyond, mask=beyond < vocab), mask=beyond < vocab)

    for base in range(8):
        for vocab in range(15, 33):
            out = torch.zeros(80, dtype=torch.int32, device=DEVICE)
            _cover_kernel[(1,)](out, base, vocab, VECTOR=8, BLOCK=64)
            assert out[:vocab].tolist() == [1] * vocab
            assert not out[vocab:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_more_than_two_to_the_31_logits(fused):
    """Offsets are 64 bits wide: the last rows lie past what 32 reach."""
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


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_a_training_step_in_a_cuda_graph(fused):
    """Forward and backward captured together, on logits that are made anew and overwritten."""
    hidden, target = batch(64, 32, dtype=torch.bfloat16)
    head = torch.randn(5000, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, 5000, (64,), device="cuda")

    def step() -> torch.Tensor:
        head.grad = None
        loss = cross_entropy(hidden @ head.T, target, grad_in_forward=fused, inplace=True)
        loss.backward()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    captured = head.grad
    hidden.copy_(torch.randn_like(hidden))
    graph.replay()
    torch.cuda.synchronize()
    value, wanted = loss.clone(), captured.clone()
    torch.testing.assert_close(step(), value)
    torch.testing.assert_close(head.grad, wanted)
