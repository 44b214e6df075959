"""clip_scale: the norm of all gradients, and the scale by which a step divides."""

from __future__ import annotations

import math

import pytest
import torch

from . import PointerTables, adamw, clip_scale, configs, op_clip

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALVES = (torch.float16, torch.bfloat16) if DEVICE == "cuda" else (torch.float16,)


def gradients(*shapes: tuple[int, ...], dtypes=(torch.float32,)) -> list[torch.Tensor]:
    return [torch.randn(s, device=DEVICE).to(dtypes[i % len(dtypes)]) for i, s in enumerate(shapes)]


def norm_of(grads: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in grads))


def number(x: float) -> torch.Tensor:
    return torch.tensor(x, device=DEVICE)


@pytest.mark.parametrize("block", [64, None])
def test_many_sizes_dtypes_and_alignments(block, monkeypatch):
    if block is not None:
        monkeypatch.setattr(configs, "NORM", configs.Config(block, 1, ""))
        monkeypatch.setattr(configs, "SUMS_BLOCK", 16)
    shapes = ((5, 37), (0, 3), (1,), (8, 512), (), (1025,), (64,), (16384 + 8,))
    grads = gradients(*shapes, dtypes=(torch.float32, *HALVES))
    room = torch.randn(400, device=DEVICE)
    grads += [room[1:100], room[104:232], torch.randn(6, 7, device=DEVICE).t()]
    norm, scale = clip_scale(grads, 2.0)
    assert (norm.dtype, norm.shape, scale.dtype, scale.shape) == (torch.float32, (), torch.float32, ())
    assert float(norm) == pytest.approx(norm_of(grads), rel=1e-6)
    assert float(scale) == pytest.approx((norm_of(grads) + 1e-6) / 2, rel=1e-6)


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e3, math.inf])
def test_as_clip_grad_norm(max_norm):
    grads = gradients((7, 9), (33,))
    params = [torch.zeros_like(g).requires_grad_() for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    theirs = torch.nn.utils.clip_grad_norm_(params, max_norm)
    norm, scale = clip_scale(grads, max_norm)
    torch.testing.assert_close(norm, theirs, rtol=1e-6, atol=0)
    for p, g in zip(params, grads, strict=True):
        torch.testing.assert_close(g / scale, p.grad, rtol=1e-6, atol=0)


def test_a_scale_that_the_gradients_have_already():
    grads = gradients((40,), (3, 3))
    norm, scale = clip_scale([g * 1024 for g in grads], 0.5, grad_scale=number(1024.0))
    expected, clips = clip_scale(grads, 0.5)
    torch.testing.assert_close((norm, scale), (expected, clips * 1024), rtol=1e-6, atol=0)
    assert float(clip_scale([g * 4 for g in grads], 1e9, grad_scale=number(4.0))[1]) == 4


@pytest.mark.parametrize(
    "value, norm, scale", [(math.nan, math.nan, math.nan), (math.inf,) * 3, (1e30,) + (math.inf,) * 2]
)
def test_what_is_not_finite_shows(value, norm, scale):
    grads = gradients((5, 7), (64,))
    grads[1][3] = value
    found = clip_scale(grads, 1.0)
    torch.testing.assert_close(found, (number(norm), number(scale)), equal_nan=True)


@pytest.mark.parametrize("value", [1.0, math.nan, math.inf])
def test_without_a_limit_the_scale_is_the_given_one(value):
    grads = [torch.full((5,), value, device=DEVICE)]
    assert float(clip_scale(grads, math.inf)[1]) == 1
    assert float(clip_scale(grads, math.inf, grad_scale=number(8.0))[1]) == 8


def test_nothing_but_empty_gradients():
    assert [float(x) for x in clip_scale([torch.empty(0, 3, device=DEVICE)], 1.0)] == [0, 1]


def test_strided_and_expanded_gradients_are_copied():
    base = torch.randn(6, 8, device=DEVICE)
    for grad in (base[:, ::2], base[::2, :3], base[:1].expand(5, 8)):
        assert float(clip_scale([grad], 1.0)[0]) == pytest.approx(norm_of([grad]), rel=1e-6)


def test_gradients_stay_as_they_are_and_results_repeat():
    grads = [g.requires_grad_() for g in gradients((3000,), (17, 5))]
    before = [g.detach().clone() for g in grads]
    first = clip_scale(grads, 1.0)
    for again in (clip_scale(grads, 1.0), clip_scale(grads, 1.0, tables=PointerTables())):
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, grads, strict=True))
    assert not any(x.requires_grad for x in first)


def test_a_table_is_made_once_for_the_same_addresses():
    tables, grads = PointerTables(), gradients((9,), (5, 5))
    for _ in range(3):
        found = clip_scale(grads, 1.0, tables=tables)
        grads[0] += 1
    assert tables.built == 1
    assert float(clip_scale(grads, 1.0, tables=tables)[0]) == pytest.approx(norm_of(grads), rel=1e-6)
    assert float(found[0]) != pytest.approx(norm_of(grads), rel=1e-6)
    clip_scale(gradients((9,), (5, 5)), 1.0, tables=tables)
    assert tables.built == 2


@pytest.mark.parametrize("tables", [False, True])
def test_behind_torch_library(tables, monkeypatch):
    grads, kept = gradients((9,), (5, 5), dtypes=(torch.float32, torch.float16)), PointerTables() if tables else None
    expected = clip_scale(grads, 0.1, grad_scale=number(2.0), tables=kept)
    torch.library.opcheck(op_clip._clip_op, (grads, 0.1, number(2.0), 0), test_utils=("test_schema", "test_faketensor"))
    monkeypatch.setattr(op_clip, "lean", lambda *_: False)
    found = clip_scale(grads, 0.1, grad_scale=number(2.0), tables=kept)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_step_of_adamw_divides_by_it():
    params, grads = gradients((30,), (4, 5)), gradients((30,), (4, 5))
    states = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    adamw(params, grads, *states, step=1, lr=0.1, grad_scale=clip_scale(grads, 0.25)[1])
    # After one step m is (1 - β₁) g.
    assert norm_of(states[0]) == pytest.approx(0.1 * 0.25, rel=1e-5)


@pytest.mark.gpu
def test_in_a_cuda_graph():
    grads = gradients((3000,), (17, 5), dtypes=(torch.bfloat16,))
    clip_scale(grads, 1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm, scale = clip_scale(grads, 1.0)
    for factor in (1, 3):
        for g in grads:
            g.mul_(factor)
        graph.replay()
        assert float(norm) == pytest.approx(norm_of(grads), rel=1e-5)
        assert float(scale) == pytest.approx(norm_of(grads) + 1e-6, rel=1e-5)


ONES = torch.ones(3, device=DEVICE)


@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(grads=ONES), TypeError, "grads must be a list of tensors, got Tensor"),
        (dict(grads=[]), ValueError, "grads must not be empty"),
        (dict(grads=[None]), TypeError, r"grads\[0\] must be a tensor of float32, float16 or bfloat16, got NoneType"),
        (dict(grads=[ONES.double()]), TypeError, r"grads\[0\] must be a tensor of .*, got torch.float64"),
        (dict(grads=[ONES.to_sparse()]), TypeError, r"grads\[0\] must be a dense tensor"),
        (dict(grads=[ONES, ONES.to("meta")]), ValueError, r"grads\[1\] must be on the device of"),
        (dict(max_norm=0.0), ValueError, "max_norm must be positive, got 0.0"),
        (dict(max_norm=math.nan), ValueError, "max_norm must be positive, got nan"),
        (dict(max_norm="1"), TypeError, "max_norm must be a number, got str"),
        (dict(grad_scale=2.0), TypeError, "grad_scale must be a tensor of float32, got float"),
        (dict(grad_scale=ONES[:2]), ValueError, r"grad_scale must have one element, got shape \(2,\)"),
        (
            dict(grad_scale=torch.ones((), device="meta")),
            ValueError,
            "grad_scale must be on the device of the gradients",
        ),
        (dict(tables={}), TypeError, "tables must be a PointerTables, got dict"),
    ],
)
def test_bad_input_is_refused_by_name(change, error, words):
    given = dict(grads=[ONES], max_norm=1.0) | change
    with pytest.raises(error, match=f"clip_scale: {words}"):
        clip_scale(given.pop("grads"), given.pop("max_norm"), **given)


@pytest.mark.gpu
@pytest.mark.parametrize("same", [True, False], ids=["the-table", "its-order"])
def test_a_table_that_another_stream_has_not_copied_yet(same):
    """Both streams only read the gradients, so that nothing else orders them. Until the copy, the memory of the table
    holds an older one."""
    old, grads = gradients((16384,), (1,)), gradients((1,), (16384,))
    read = grads if same else [g.clone() for g in grads]  # at other addresses, with the same CTAs
    first, second, tables = torch.cuda.Stream(), torch.cuda.Stream(), PointerTables()
    torch.cuda.synchronize()
    for stream in (second, first):  # later allocations, which might wait for the GPU, then come from the caches
        with torch.cuda.stream(stream):
            clip_scale(old, 1.0)
    [torch.empty(size, dtype=torch.int32, pin_memory=True) for size in (3, 40) for _ in range(8)]
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        torch.cuda._sleep(200_000_000)
        clip_scale(grads, 1.0, tables=tables)
    with torch.cuda.stream(second):
        norm, _ = clip_scale(read, 1.0, tables=tables)
    torch.cuda.synchronize()
    assert float(norm) == pytest.approx(norm_of(read), rel=1e-5)
