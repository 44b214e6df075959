"""Properties specific to sparse_matmul: pruning, the compressed form and its order, other sparsity, activations.
The rest follows from SPEC: tests/test_specs.py."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils._pytree import tree_leaves

from harness.correctness import addresses

from . import Compressed, compress, configs, decompress, library, op_compress, prune, sparse_matmul
from .activation import ACTIVATIONS
from .formats import metadata_shape
from .op import _fwd_op
from .op_compress import _pruned
from .plans import bwd_plan
from .reference import decompressed, kept, sparse_matmul_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def pruned(rows: int, depth: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return prune(torch.randn(rows, depth, device=DEVICE, dtype=dtype))[0]


def test_prune_keeps_the_largest_two_and_of_equals_the_first():
    nan = float("nan")
    w = torch.tensor([[1.0, -3, 2, 0, 5, 5, -5, 5], [0, 0, 0, 0, nan, 1, 2, -9]], device=DEVICE)
    want = torch.tensor([[0, 1, 1, 0, 1, 1, 0, 0], [1, 1, 0, 0, 1, 0, 0, 1]], device=DEVICE).bool()
    kept_w, mask = prune(w)
    assert torch.equal(mask, want)
    torch.testing.assert_close(kept_w, torch.where(want, w, 0.0), equal_nan=True, rtol=0, atol=0)
    assert prune(torch.randn(2, 3, 0))[0].shape == (2, 3, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_prune_in_one_pass_has_the_bits_of_pytorch(dtype):
    """The kernel compares integers, so that the interpreter is right for bf16 too."""
    values = [0.0, -0.0, 1.0, -1.0, 1.5, -2.0, torch.inf, -torch.inf, torch.nan, 1e-40]
    w = torch.tensor([values[i] for i in torch.randint(len(values), (37 * 132,)).tolist()], dtype=dtype, device=DEVICE)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[w.itemsize]
    for given in (w.view(37, 132), w.view(132, 37)[:, 4:32], torch.randn(3, 2, 700, device=DEVICE, dtype=dtype)):
        (found, mask), (expected, wanted) = prune(given), _pruned(given, None)
        assert torch.equal(mask, wanted)
        assert torch.equal(found.view(bits), expected.contiguous().view(bits))
    leaf = torch.randn(5, 2, 12, device=DEVICE, dtype=dtype, requires_grad=True)
    dy = torch.randn_like(leaf)
    found, mask = prune(leaf)
    assert torch.equal(torch.autograd.grad(found, leaf, dy)[0], torch.where(mask, dy, 0)) and not mask.requires_grad


def test_prune_reads_nothing_beyond_the_end():
    with addresses.checked():
        prune(torch.randn(3, 20, device=DEVICE))


@pytest.mark.parametrize(("rows", "depth"), [(20, 24), (3, 68), (33, 132)])
def test_a_product_reads_nothing_beyond_the_end(rows: int, depth: int):
    """Rows and columns of the weight that fill no tile, and its metadata no block."""
    w = compress(pruned(rows, depth))
    with addresses.checked():
        sparse_matmul(torch.randn(5, depth, device=DEVICE), w)
        decompress(w)


def test_prune_is_traced_transformed_and_derived_twice():
    w = torch.randn(3, 5, 12, device=DEVICE, dtype=torch.float32)
    expected, mask = _pruned(w, None)
    for found in (
        torch.compile(prune, fullgraph=True, backend="aot_eager")(w),
        torch.func.vmap(prune)(w),
        torch.func.vmap(prune, in_dims=1, out_dims=1)(w),
    ):
        assert torch.equal(found[0], expected) and torch.equal(found[1], mask)
    tangent = torch.ones_like(w)
    assert torch.equal(torch.func.jvp(lambda w: prune(w)[0], (w,), (tangent,))[1], mask.float())
    assert torch.equal(torch.func.grad(lambda w: prune(w)[0].sum())(w), mask.float())
    leaf = w.clone().requires_grad_()
    (once,) = torch.autograd.grad(prune(leaf)[0].square().sum(), leaf, create_graph=True)
    assert torch.equal(torch.autograd.grad(once.sum(), leaf)[0], 2 * mask.float())


def test_prune_by_a_mask_and_its_gradient():
    w = torch.randn(3, 8, device=DEVICE, requires_grad=True)
    mask = torch.tensor([True, False, False, True, False, False, False, True], device=DEVICE).expand(3, 8)
    result, same = prune(w, mask)
    assert same is mask and torch.equal(result, w * mask)
    assert torch.equal(torch.autograd.grad(result.sum(), w)[0], mask.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_compress_and_back_with_every_pattern(dtype):
    """Every pattern of up to two non-zeros, in every row of a block of metadata and every chunk of several blocks."""
    patterns = [p for p in itertools.product((0, 1), repeat=4) if sum(p) <= 2]
    mask = torch.tensor([patterns[(7 * n + 3 * c) % 11] for n in range(37) for c in range(33)], device=DEVICE)
    w = (mask * torch.randn(37 * 33, 4, device=DEVICE)).view(37, 132).to(dtype)
    compressed = compress(w, check=True)
    assert compressed.shape == w.shape and compressed.metadata.shape == metadata_shape(37, 132)
    assert torch.equal(decompress(compressed), w)
    assert torch.equal(decompressed(*compressed), w)
    columns = kept(compressed.metadata, 37, 132).view(37, 33, 2)
    assert (columns[..., 0] < columns[..., 1]).all()  # the order that the sparse tensor cores require


@pytest.mark.parametrize("blocks", [(16, 64), (32, 64), (32, 128)])
def test_a_weight_of_several_tiles(blocks, monkeypatch):
    """Nothing is written out of bounds of values and metadata."""
    w = [pruned(rows, depth) for rows, depth in ((5, 64), (21, 200), (32, 192), (49, 452))]
    expected = [compress(t) for t in w]
    monkeypatch.setattr(configs, "pick_compress_config", lambda *_: configs.CompressConfig(*blocks, 4))
    for weight, want in zip(w, expected, strict=True):
        with addresses.checked():
            found = compress(weight)
        assert torch.equal(found.values, want.values) and torch.equal(found.metadata, want.metadata)
        assert torch.equal(decompress(found), weight)


def test_prune_is_one_launch(monkeypatch):
    calls = []
    monkeypatch.setattr(op_compress, "_prune_op", lambda w: calls.append(w.shape) or _pruned(w, None))
    prune(torch.randn(3, 8, device=DEVICE))
    prune(torch.randn(3, 8, device=DEVICE), torch.zeros(3, 8, dtype=torch.bool, device=DEVICE))
    assert calls == [(3, 8)]


def test_padding_has_a_valid_code():
    metadata = compress(pruned(3, 8)).metadata.view(1, 1, 8, 4, 2)
    assert (metadata[:, :, 3:] == 0x4444).all() and (metadata[:, :, :, 1:] == 0x4444).all()


def test_a_weight_in_the_instructions_order():
    """Decodes each lane's word as wgmma.mma_async.sp does: the sparsity selector chooses two of four lanes."""
    w = pruned(64, 128)
    values, metadata = compress(w)
    words = metadata.view(torch.int32).view(2, 4, 32)  # blocks of 64 of K, warps, lanes
    dense = torch.zeros_like(w)
    for block, warp, lane, half, position in itertools.product(range(2), range(4), range(32), range(2), range(8)):
        code = int(words[block, warp, lane]) >> (16 * half + 2 * position)
        row = 16 * warp + lane // 4 + 8 * half
        selector, of_pair = lane % 4 // 2, lane % 2
        first = 64 * block + 32 * selector + 16 * of_pair + position // 2 * 4
        dense[row, first + (code & 3)] = values[row, first // 2 + position % 2]
    assert torch.equal(dense, w)


def test_what_is_no_24_weight_is_an_error_when_asked():
    w = torch.ones(2, 8, device=DEVICE)
    with pytest.raises(ValueError, match="w must have at most two non-zeros"):
        compress(w, check=True)
    assert torch.equal(decompress(compress(w)), prune(w)[0])


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_every_activation_and_all_gradients(activation):
    compressed = compress(pruned(20, 24))
    x, bias = torch.randn(2, 3, 24, device=DEVICE), torch.randn(20, device=DEVICE)
    wanted = [t.requires_grad_() for t in (x, compressed.values, bias)]
    y, expected = (f(x, compressed, bias, activation) for f in (sparse_matmul, sparse_matmul_reference))
    dy = torch.randn_like(y)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    for got, want in zip(*(torch.autograd.grad(one, wanted, dy) for one in (y, expected)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_gradients_only_of_what_needs_one():
    compressed = compress(pruned(8, 8))
    x = torch.randn(3, 8, device=DEVICE, requires_grad=True)
    sparse_matmul(x, compressed, activation="relu").sum().backward()
    assert x.grad is not None and compressed.values.grad is None
    assert not sparse_matmul(x.detach(), compressed).requires_grad


@pytest.mark.parametrize("biased", [False, True])
def test_a_plan_computes_what_is_needed_alone(biased):
    x, (values, metadata) = torch.randn(3, 16, device=DEVICE), compress(pruned(8, 16))
    dy = torch.randn(3, 8, device=DEVICE)
    for needs in itertools.product([False, True], repeat=3):
        given = bwd_plan(dy, x, values, metadata, biased, None, needs, "triton")(dy, x, values, metadata, None)
        assert [g is not None for g in given] == [*needs[:2], needs[2] and biased]


@pytest.mark.parametrize("cols", [0, 8])
def test_triton_alone_where_it_is_asked_for(cols, monkeypatch):
    for name in ("fwd_launch", "dx_launch", "dvalues_launch"):
        monkeypatch.setattr(library, name, lambda *_: pytest.fail("the library was asked"))
    x, (values, metadata) = torch.randn(3, 16, device=DEVICE), compress(pruned(8, 16))
    leaves = [x.requires_grad_(), values[:cols].requires_grad_()]
    y = sparse_matmul(x, Compressed(leaves[1], metadata[:, : (cols + 15) // 16]), backend="triton")
    dx, dvalues = torch.autograd.grad(y, leaves, torch.ones_like(y))
    assert (dx.shape, dvalues.shape) == (x.shape, (cols, 8))


def test_the_library_where_it_is_asked_for(monkeypatch):
    asked = []
    for name in ("dx_launch", "dvalues_launch"):
        launch = getattr(library, name)
        monkeypatch.setattr(library, name, lambda *given, name=name, to=launch: asked.append(name) or to(*given))
    monkeypatch.setattr(configs, "pick_backend", lambda *_, **__: "library")
    leaves = [torch.randn(3, 16, device=DEVICE).requires_grad_(), compress(pruned(8, 16)).values.requires_grad_()]
    compressed = Compressed(leaves[1], compress(pruned(8, 16)).metadata)
    torch.autograd.grad(sparse_matmul(leaves[0], compressed).sum(), leaves)
    assert asked == ["dx_launch", "dvalues_launch"]


def test_autocast_does_not_change_gradients_of_the_library(monkeypatch):
    """The backward inside of autocast to another dtype, after the same plan has run outside of it."""
    monkeypatch.setattr(configs, "pick_backend", lambda *_, **__: "library")
    values, metadata = compress(pruned(8, 16, torch.float16))
    x = torch.randn(3, 16, device=DEVICE, dtype=torch.float16)

    def gradients(enabled: bool) -> tuple[torch.Tensor, ...]:
        leaves = [x.clone().requires_grad_(), values.clone().requires_grad_()]
        y = sparse_matmul(leaves[0], Compressed(leaves[1], metadata))
        with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
            return torch.autograd.grad(y, leaves, torch.ones_like(y))

    wanted, found = gradients(False), gradients(True)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("save", [False, True])
def test_what_the_op_says_of_its_results(save):
    x, (values, metadata) = torch.randn(2, 3, 16, device=DEVICE), compress(pruned(8, 16))
    given = (x, values, metadata, None, "silu", save, "triton")
    torch.library.opcheck(_fwd_op, given, test_utils=("test_schema", "test_faketensor"))


def test_a_compressed_weight_goes_through_compile():
    compressed = compress(pruned(16, 16))
    x = torch.randn(4, 16, device=DEVICE)
    function = torch.compile(sparse_matmul, fullgraph=True, backend="eager")
    assert torch.equal(function(x, compressed), sparse_matmul(x, compressed))
    assert [id(t) for t in tree_leaves(compressed)] == [id(t) for t in compressed]


def test_an_incoming_gradient_that_is_expanded():
    compressed = compress(pruned(20, 12))
    x = torch.randn(5, 12, device=DEVICE, requires_grad=True)
    (got,) = torch.autograd.grad(sparse_matmul(x, compressed).sum(), x)
    torch.testing.assert_close(got, decompress(compressed).sum(0).expand(5, 12))


def _bad(**change):
    values, metadata = Compressed(torch.randn(8, 8, device=DEVICE), torch.ones(1, 1, 64, device=DEVICE).short())
    good = {"x": torch.randn(3, 16, device=DEVICE), "compressed": Compressed(values, metadata)}
    # Tensors on the device are made by functions: collecting the tests allocates no memory there.
    return {**good, **{name: made() if callable(made) else made for name, made in change.items()}}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(x=torch.arange(16)), TypeError, "x must be a tensor of float32"),
        (dict(x=lambda: torch.randn(3, 20, device=DEVICE)), ValueError, r"x must be \[..., 16\]"),
        (dict(x=lambda: torch.randn(3, 16, device=DEVICE).half()), TypeError, "values must be a tensor of x's dtype"),
        (dict(compressed=torch.randn(8, 16)), TypeError, "compressed must be a Compressed"),
        (dict(compressed=Compressed(None, None)), TypeError, "values must be a tensor"),
        (dict(compressed=Compressed(torch.randn(8, 8), torch.ones(1, 64))), TypeError, "metadata must be .* int16"),
        (dict(compressed=Compressed(torch.randn(8, 8), torch.ones(1, 64).short())), ValueError, r"\[1, 1, 64\]"),
        (
            dict(compressed=Compressed(torch.randn(8, 8, device="meta"), torch.ones(1, 1, 64, device="meta").short())),
            ValueError,
            "values must be on x's device",
        ),
        (dict(bias=lambda: torch.randn(9, device=DEVICE)), ValueError, r"bias must be \[8\]"),
        (dict(activation="tanh"), ValueError, "activation must be None or one of"),
        (dict(backend="gluon"), ValueError, "backend must be one of"),
    ],
)
def test_bad_input_raises_an_error_that_names_it(change, error, words):
    with pytest.raises(error, match=words):
        sparse_matmul(**_bad(**change))


def test_sizes_that_tiles_cannot_count_are_errors():
    one, most = torch.ones(1, 1, device=DEVICE), 2**31 - 512
    compressed = compress(torch.ones(8, 64, device=DEVICE).tril())
    with pytest.raises(ValueError, match=f"x must be .* at most {most} rows"):
        sparse_matmul(one.expand(most + 1, 64), compressed)
    code, codes = one.to(torch.float8_e4m3fn), compress(torch.zeros(8, 64, device=DEVICE).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=f"x must be .* M at most {most}"):
        sparse_matmul(code.expand(most + 1, 64), codes, scale_x=one[0, 0], scale_w=one[0, 0])
    for shape in ((most + 1, 4), (4, most + 4)):
        with pytest.raises(ValueError, match=f"w must be .* at most {most}"):
            compress(one.expand(shape))
        with pytest.raises(ValueError, match=f"values must be .* at most {most}"):
            decompress(Compressed(one.expand(shape[0], shape[1] // 2), compressed.metadata))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: prune(torch.ones(4).int()), TypeError, "w must be a floating-point"),
        (lambda: prune(torch.ones(2, 6)), ValueError, "w must be .* multiple of 4"),
        (lambda: prune(torch.ones(4), torch.ones(4)), TypeError, "mask must be a boolean"),
        (lambda: prune(torch.ones(4), torch.ones(8) > 0), ValueError, r"mask must be \[4\]"),
        (lambda: prune(torch.ones(4), torch.ones(4) > 0), ValueError, "mask must have at most two"),
        (lambda: compress(torch.ones(4, 4).double()), TypeError, "w must be a tensor of float32"),
        (lambda: compress(torch.ones(4, 6)), ValueError, "w must be .* multiple of 4"),
        (lambda: decompress(Compressed(torch.ones(4, 3), torch.ones(1))), ValueError, "values must be"),
    ],
)
def test_bad_input_of_the_other_functions(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_size_has_a_configuration(dtype, capability):
    picks = configs.pick_fwd_config, configs.pick_dx_config, configs.pick_dvalues_config
    for pick, sizes in itertools.product(picks, itertools.product((1, 17, 300), (1, 100, 8192), (4, 64, 1000))):
        config = pick(*sizes, dtype, capability)
        for block in (config.block_m, config.block_n, config.block_k):
            assert block >= 16 and block & (block - 1) == 0


def test_tiles_in_groups_of_rows_are_each_computed_once(monkeypatch):
    """The forward and both gradients, with a partial last group in the tile order."""
    for name in ("pick_fwd_config", "pick_dx_config", "pick_dvalues_config"):
        monkeypatch.setattr(configs, name, lambda *_: configs.Config(16, 16, 16, group=3, num_warps=4, num_stages=2))
    compressed = compress(pruned(67, 72))
    leaves = [t.requires_grad_() for t in (torch.randn(67, 72, device=DEVICE), compressed.values)]
    found = []
    for op in (sparse_matmul, sparse_matmul_reference):
        y = op(leaves[0], compressed)
        found.append((y, *torch.autograd.grad(y, leaves, torch.ones_like(y))))
    for ours, want in zip(*found, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("bias", "activation"), [(True, None), (False, "relu"), (True, "silu")])
def test_products_of_the_library(bias, activation, monkeypatch):
    """The weight and its gradient go through memory. Leading dimensions, an incoming gradient of stride 0, and more
    elements than one CTA of the activation kernel."""
    pick = configs.pick_backend
    monkeypatch.setattr(configs, "pick_backend", lambda backend, rows, *_, **__: pick(backend, 65, torch.float16, True))
    compressed = compress(pruned(24, 36))
    tensors = [torch.randn(2, 25, 36, device=DEVICE), compressed.values, *([torch.randn(24, device=DEVICE)] * bias)]
    dy, found = torch.randn(24, device=DEVICE).expand(2, 25, 24), []
    for op, dtype in ((sparse_matmul, torch.float32), (sparse_matmul_reference, torch.float64)):
        x, values, *rest = leaves = [t.to(dtype).requires_grad_() for t in tensors]
        y = op(x, Compressed(values, compressed.metadata), *(rest or [None]), activation)
        found.append((y, *torch.autograd.grad(y, leaves, dy.to(dtype))))
    for ours, want in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), want, rtol=1e-4, atol=1e-4)
