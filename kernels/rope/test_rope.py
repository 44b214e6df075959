"""Properties specific to rope; `tests/test_specs.py` checks the rest from SPEC."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import configs, plans, rope
from .reference import rope_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape: int, **options) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, **options)


def tables(positions: int, half: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of θ_i · p with θ_i = 10000^(−i / half), as in the paper."""
    theta = 10000.0 ** (-torch.arange(half, device=DEVICE, dtype=torch.float64) / half)
    angles = torch.arange(positions, device=DEVICE, dtype=torch.float64)[:, None] * theta
    return angles.cos().to(dtype), angles.sin().to(dtype)


def test_equals_hugging_face() -> None:
    """`apply_rotary_pos_emb` of Hugging Face's Llama: [B, heads, S, D], tables [B, S, D] with repeated halves."""
    q, k, (cos, sin) = normal(2, 4, 5, 16), normal(2, 2, 5, 16), tables(5, 8)
    cos, sin = (torch.cat((t, t), -1).expand(2, 5, 16) for t in (cos, sin))

    def rotate(x):
        a, b = x.chunk(2, -1)
        return x * cos.unsqueeze(1) + torch.cat((-b, a), -1) * sin.unsqueeze(1)

    torch.testing.assert_close(rope(q, k, cos, sin, layout="bhsd"), (rotate(q), rotate(k)))


def test_interleaved_equals_complex_multiplication() -> None:
    q, (cos, sin) = normal(2, 5, 3, 16), tables(5, 8)
    rotated = torch.view_as_complex(q.unflatten(-1, (8, 2))) * torch.complex(cos, sin)[:, None]
    expected = torch.view_as_real(rotated).flatten(-2)
    torch.testing.assert_close(rope(q, None, cos, sin, interleaved=True), expected)
    twice = (t.repeat_interleave(2, -1) for t in (cos, sin))
    torch.testing.assert_close(rope(q, None, *twice, interleaved=True), expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_products_depend_on_the_distance_alone(interleaved) -> None:
    """Equation 11 of the paper: (R_m q) · (R_n k) is a function of m − n."""
    q, k, (cos, sin) = normal(1, 1, 1, 32).expand(1, 9, 1, 32), normal(1, 1, 1, 32).expand(1, 9, 1, 32), tables(9, 16)
    q, k = rope(q, k, cos, sin, interleaved=interleaved)
    scores = q[0, :, 0] @ k[0, :, 0].T
    for distance in range(-8, 9):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


def test_width_of_the_tables_says_what_is_rotated() -> None:
    q, (cos, sin) = normal(1, 3, 2, 16), tables(3, 4)
    partial = rope(q, None, cos, sin)  # half tables of R = 8
    assert torch.equal(partial[..., 8:], q[..., 8:])
    torch.testing.assert_close(partial[..., :8], rope(q[..., :8], None, cos, sin))
    full = (torch.cat((t, t), -1) for t in (cos, sin))
    torch.testing.assert_close(rope(q, None, *full, rotary_dim=8), partial, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(2, 4, 3, 12), (2, 32, 4, 8)], ids=["masked", "whole-tiles"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_position_outside_the_table_gives_nan_and_nothing_else(dtype, shape) -> None:
    q, (cos, sin) = normal(*shape), tables(6, 4)
    p = torch.tensor([[0, 5, 6, 1], [-1, 2, 3, 2**31 - 1]], dtype=dtype, device=DEVICE).repeat(1, shape[1] // 4)
    rotated = rope(q, None, cos, sin, position_ids=p)
    outside = (p < 0) | (p >= 6)
    assert rotated[outside][..., :8].isnan().all()
    assert torch.equal(rotated[..., 8:], q[..., 8:])
    expected = rope_reference(q, None, cos, sin, position_ids=p.clamp(0, 5).long())
    torch.testing.assert_close(rotated[~outside], expected[~outside])


@pytest.mark.parametrize("width, dim, half, align", [(16, 16, 8, 8), (8, 8, 4, 4), (18, 16, 8, 2), (9, 8, 4, 1)])
def test_what_the_compiler_is_told_of_rows_divides_their_strides(width, dim, half, align, launched) -> None:
    q, (cos, sin) = normal(2, 3, 2, width)[..., :dim], tables(3, half)
    rope(q, None, cos, sin)
    ((args, options),) = launched
    strides = [n for each in args if isinstance(each, tuple) for n in each[:-1]]
    assert options["ALIGN"] == align and not any(n % align for n in strides)


def test_one_table_for_all_sequences() -> None:
    q, k, (cos, sin) = normal(2, 3, 4, 8), normal(2, 3, 2, 8), tables(3, 4)
    for a, b in zip(rope(q, k, cos[None], sin[None]), rope(q, k, cos, sin), strict=True):
        assert torch.equal(a, b)


def test_packed_tokens_have_no_batch() -> None:
    q, k, (cos, sin) = normal(7, 3, 16), normal(7, 1, 16), tables(9, 8)
    p = torch.tensor([0, 1, 2, 0, 1, 2, 3], device=DEVICE)
    expected = rope_reference(q[None], k[None], cos, sin, position_ids=p)
    torch.testing.assert_close(rope(q, k, cos, sin, position_ids=p), tuple(t[0] for t in expected))


@pytest.mark.parametrize("inplace", [False, True])
def test_slices_of_a_projection_are_read_and_written_in_place(inplace, launched) -> None:
    packed, (cos, sin) = normal(2, 5, 8 * 16), tables(5, 8)
    before = packed.clone()
    q, k, v = (t.unflatten(-1, (-1, 16)).transpose(1, 2) for t in packed.split((64, 32, 32), dim=-1))
    expected = rope_reference(q.clone(), k.clone(), cos, sin, layout="bhsd")
    rotated = rope(q, k, cos, sin, layout="bhsd", inplace=inplace)
    torch.testing.assert_close(rotated, expected)
    (args, _) = launched[0]
    assert (args[0].data_ptr(), args[2].data_ptr()) == (q.data_ptr(), k.data_ptr())
    if inplace:
        assert rotated[0] is q and rotated[1] is k
        assert torch.equal(v, before[..., 96:].unflatten(-1, (-1, 16)).transpose(1, 2))
    else:
        assert torch.equal(packed, before)
        assert rotated[0].transpose(1, 2).is_contiguous()  # tokens before heads, as q is in memory
        heads_first = rope(q.contiguous(), None, cos, sin, layout="bhsd")
        assert heads_first.is_contiguous()


def test_one_launch_forward_and_one_backward_which_saves_neither_q_nor_k(launched) -> None:
    q, k, (cos, sin) = normal(2, 5, 4, 16, requires_grad=True), normal(2, 5, 2, 16, requires_grad=True), tables(5, 8)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        rotated = rope(q, k, cos, sin)
    torch.autograd.backward(rotated, (normal(2, 5, 4, 16), normal(2, 5, 2, 16)))
    assert saved == [cos.shape, sin.shape]
    assert [options["HAS_K"] for _, options in launched] == [True, True]


@pytest.mark.parametrize("needed", ["q", "k"])
def test_no_work_for_a_gradient_that_nobody_wants(needed, launched) -> None:
    tensors, (cos, sin) = {"q": normal(2, 5, 4, 16), "k": normal(2, 5, 2, 16)}, tables(5, 8)
    tensors[needed].requires_grad_()
    q, k = rope(*tensors.values(), cos, sin)
    (q.sum() + k.sum()).backward()
    assert [options["HAS_K"] for _, options in launched] == [True, False]
    assert launched[1][0][0].shape == tensors[needed].shape
    expected = rope(torch.ones_like(tensors[needed]), None, cos, -sin)
    torch.testing.assert_close(tensors[needed].grad, expected)
    assert all((t.grad is None) == (n != needed) for n, t in tensors.items())


@pytest.mark.parametrize("full", [False, True])
def test_differentiable_twice(full) -> None:
    q, k, (cos, sin) = normal(1, 3, 2, 8, requires_grad=True), normal(1, 3, 1, 8, requires_grad=True), tables(3, 4)
    cos, sin = (torch.cat((t, t), -1) if full else t for t in (cos, sin))

    def second(op):
        y, z = op(q, k, cos, sin)
        first = torch.autograd.grad((y**3).sum() + (z**3).sum(), (q, k), create_graph=True)
        return torch.autograd.grad(sum((g**2).sum() for g in first), (q, k))

    torch.testing.assert_close(second(rope), second(rope_reference), rtol=1e-4, atol=1e-4)


class Library(TorchDispatchMode):
    """Changes nothing, but a call under this mode goes through the custom op."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("tables_of", ["half", "full", "pairs", "batched", "strided"])
def test_a_plan_gives_bits_and_strides_of_the_op(inplace, layout, tables_of) -> None:
    cos, sin = tables(5, 8)
    options: dict = dict(layout=layout, inplace=inplace, interleaved=tables_of == "pairs")
    if tables_of == "full":
        cos, sin = (torch.cat((t, t), -1) for t in (cos, sin))
    elif tables_of == "pairs":
        cos, sin = (t.repeat_interleave(2, -1) for t in (cos, sin))
    elif tables_of == "batched":
        cos, sin = (t.expand(2, 5, 8).clone() for t in (cos, sin))
    elif tables_of == "strided":
        sin = sin.t().contiguous().t()
        options["position_ids"] = torch.tensor([4, 0, 1, 2, 3], device=DEVICE)
    if tables_of != "batched":
        options["rotary_dim"] = 16
    dense = normal(2, 5, 3, 20)
    views = [dense, dense.transpose(1, 2).contiguous().transpose(1, 2), normal(2, 5, 4, 24)[:, :, 1:, :20]]
    views += [] if tables_of == "batched" else [dense[0], views[1][1]]
    for view in views:
        q = view if layout == "bshd" else view.transpose(-2, -3)
        given = [torch.empty_strided(q.shape, q.stride(), device=DEVICE).copy_(q) for _ in range(2)]
        eager = rope(given[0], None, cos, sin, **options)
        with Library():
            by_op = rope(given[1], None, cos, sin, **options)
        assert torch.equal(eager, by_op)
        assert eager.stride() == by_op.stride()
        assert torch.equal(given[0], given[1]) and given[0]._version == given[1]._version


def test_in_place_under_compile() -> None:
    x, (cos, sin) = normal(2, 5, 4, 16), tables(5, 8)

    def both(x):
        q, k = x * 2, x[:, :, :2]
        rope(q, k, cos, sin, inplace=True)
        return q, k

    expected = rope_reference(x * 2, x[:, :, :2].clone(), cos, sin)
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    given = x.clone()
    torch.testing.assert_close(torch.compile(both, fullgraph=True, backend=backend)(given), expected)
    torch.testing.assert_close(given[:, :, :2], expected[1])
    assert torch.equal(given[:, :, 2:], x[:, :, 2:])


def test_in_place_tells_autograd() -> None:
    q, (cos, sin) = normal(1, 3, 2, 8), tables(3, 4)
    version = q._version
    assert rope(q, None, cos, sin, inplace=True) is q
    assert q._version > version
    with torch.no_grad():
        rope(normal(1, 3, 2, 8, requires_grad=True), None, cos, sin, inplace=True)


def test_autocast_leaves_the_dtypes_alone() -> None:
    """q and k come from a projection in half precision, the tables remain fp32."""
    x, weight, (cos, sin) = normal(2, 5, 32), normal(32, 32), tables(5, 8)
    with torch.autocast(DEVICE, torch.float16):
        q = (x @ weight).unflatten(-1, (2, 16))
        rotated = rope(q, q[:, :, :1], cos, sin)
    assert q.dtype == rotated[0].dtype == rotated[1].dtype == torch.float16
    torch.testing.assert_close(rotated, rope_reference(q, q[:, :, :1], cos, sin))


Q, K, TABLE = (2, 3, 4, 8), (2, 3, 2, 8), (5, 4)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(q=lambda t: t.double()), TypeError, "q must be a tensor of"),
        (dict(q=lambda t: t[0, 0]), ValueError, r"q must be \[B, S, heads, D\]"),
        (dict(q=lambda t: t.new_zeros(2, 3, 4, 1025)), ValueError, "D <= 1024"),
        (dict(k=lambda t: t.half()), TypeError, "k must have q's dtype"),
        (dict(k=lambda t: t[:, :2]), ValueError, "k must have q's shape"),
        (dict(k=lambda t: t[0]), ValueError, "k must have q's shape"),
        (dict(k=lambda t: t.to("meta")), ValueError, "k must be on"),
        (dict(cos=lambda t: t.int()), TypeError, "cos must be a tensor of"),
        (dict(sin=lambda t: t.half()), TypeError, "sin must have cos's dtype"),
        (dict(sin=lambda t: t[:-1]), ValueError, "sin must have cos's shape"),
        (dict(cos=lambda t: t.to("meta")), ValueError, "cos must be on"),
        (dict(cos=lambda t: t[:2], sin=lambda t: t[:2]), ValueError, "a row for each of 3"),
        (dict(cos=lambda t: t[None], sin=lambda t: t[None]), ValueError, r"\[1, 3, W\]"),
        (dict(cos=lambda t: t.requires_grad_()), RuntimeError, "cos and sin must not require grad"),
        (dict(rotary_dim=7), ValueError, "R even"),
        (dict(rotary_dim=6), ValueError, "R / 2 or R wide"),
        (dict(rotary_dim=16), ValueError, "R <= D = 8"),
        (dict(layout="sbhd"), ValueError, "layout must be"),
        (dict(position_ids=torch.zeros(3)), TypeError, "position_ids must be a tensor of int32"),
        (dict(position_ids=torch.zeros(4, dtype=torch.int64)), ValueError, "position_ids must be"),
        (dict(position_ids=torch.zeros(3, dtype=torch.int64, device="meta")), ValueError, "position_ids must be on"),
        (dict(inplace=True, q=lambda t: t.requires_grad_()), RuntimeError, "q must not require grad"),
        (dict(inplace=True, k=lambda t: t.requires_grad_()), RuntimeError, "k must not require grad"),
        (dict(inplace=True, k=lambda t: t[:1].expand(2, 3, 2, 8)), ValueError, "k must not be expanded"),
    ],
)
def test_bad_input_raises_an_error_that_names_it(change, error, words) -> None:
    inputs = {"q": normal(*Q), "k": normal(*K), "cos": normal(*TABLE), "sin": normal(*TABLE)}
    for name, value in change.items():
        inputs[name] = value(inputs[name]) if callable(value) else value
    with pytest.raises(error, match=words):
        rope(**inputs)


def test_the_same_tensor_twice_raises_an_error_in_place() -> None:
    q, (cos, sin) = normal(*Q), tables(3, 4)
    with pytest.raises(ValueError, match="k must not be q itself"):
        rope(q, q, cos, sin, inplace=True)


@pytest.mark.parametrize("heads", [1, 2, 3, 7, 8, 12, 28, 32, 40, 64, 71, 128])
@pytest.mark.parametrize("dims", [(2, 0), (64, 0), (24, 72), (128, 0), (64, 192), (1024, 0), (2, 1022)])
def test_every_config_covers_its_rows_with_little_padding(heads, dims) -> None:
    for kv_heads in (0, 1, heads):
        outer = (heads % 2 == 0, kv_heads % 2 == 0)
        config = configs.pick_config(3, 777, (heads, kv_heads), outer, dims, torch.bfloat16, (9, 0))
        for block, count in ((config.q_heads, heads), (config.k_heads, kv_heads)):
            assert block <= config.rows and config.rows % block == 0
            assert math.ceil(count / block) * block <= count * 9 / 8


def test_a_step_of_decoding_needs_two_tiles_a_sequence() -> None:
    config = configs.pick_config(64, 1, (32, 1), (True, True), (128, 0), torch.bfloat16, (9, 0))
    assert config.q_heads == config.k_heads == config.rows


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_more_than_two_to_the_31_elements(layout) -> None:
    """Offsets have 64 bits: those of the last tokens, and of the second head of [B, heads, S, D], exceed 32."""
    seq, dim, (cos, sin) = 2**24 + 3, 128, tables(4096, 64, torch.bfloat16)
    shape = (1, seq, 2, dim) if layout == "bshd" else (1, 2, seq, dim)
    q = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    p = torch.randint(4096, (seq,), device="cuda", dtype=torch.int32)
    rotated = rope(q, None, cos, sin, position_ids=p, layout=layout)
    for part in (slice(0, 5), slice(seq - 5, seq)):
        piece = (slice(None), part) if layout == "bshd" else (slice(None), slice(None), part)
        expected = rope_reference(q[piece], None, cos, sin, position_ids=p[part], layout=layout)
        torch.testing.assert_close(rotated[piece], expected)
    assert rope(q, None, cos, sin, position_ids=p, layout=layout, inplace=True) is q
    torch.testing.assert_close(q, rotated, rtol=0, atol=0)


@pytest.mark.gpu
def test_a_sequence_just_below_two_to_the_31() -> None:
    """The number of groups of tiles, rounded up in 32 bits, would be negative."""
    seq, (cos, sin) = 2**31 - 5, tables(4096, 1, torch.bfloat16)
    q = torch.randn((1, seq, 1, 2), device="cuda", dtype=torch.bfloat16)
    p = torch.tensor([1234], device="cuda").expand(seq)
    rotated = rope(q, None, cos, sin, position_ids=p)
    for part in (slice(0, 500), slice(seq - 500, seq)):
        expected = rope_reference(q[:, part], None, cos, sin, position_ids=p[part])
        torch.testing.assert_close(rotated[:, part], expected)


@pytest.fixture
def launched(monkeypatch) -> list:
    """The arguments and options of each launch."""
    calls: list = []

    class Spy:
        def __getitem__(self, grid):
            def launch(*args, **options):
                calls.append((args, options))
                return jit[grid](*args, **options)

            return launch

        def __getattr__(self, name):
            return getattr(jit, name)

    jit = plans._rope_kernel
    monkeypatch.setattr(plans, "_rope_kernel", Spy())
    return calls


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("swapped", [False, True])
def test_results_have_the_memory_order_of_the_input(layout: str, swapped: bool) -> None:
    q, k = (torch.randn(2, 3, 5, 8, device=DEVICE) for _ in range(2))
    if swapped:
        q, k = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k))
    angles = torch.rand(5 if layout == "bhsd" else 3, 4, device=DEVICE)
    for result, given in zip(rope(q, k, angles.cos(), angles.sin(), layout=layout), (q, k), strict=True):
        assert result.stride() == given.stride()
