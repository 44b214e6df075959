"""Properties specific to fp8: codes and zeros, the order of the metadata, scales, and errors. The rest follows from
SPEC: tests/test_specs.py. In the interpreter the kernels decode the bytes themselves."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from . import Compressed, compress, configs, decompress, op_fp8, plans_fp8, prune, sparse_matmul
from .activation import ACTIVATIONS
from .bench import SPEC
from .formats import metadata_shape
from .kernel_fp8 import _numbers
from .reference import decompressed, kept, sparse_matmul_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = pytest.mark.parametrize("dtype", [E4M3, E5M2])


def codes(rows: int, depth: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.randn(rows, depth, device=DEVICE).mul(8).to(dtype)


def problem(m: int, k: int, n: int, formats=(E4M3, E4M3), rows: bool = True):
    """x, a compressed weight, and scales per row or per tensor."""
    compressed = compress(prune(codes(n, k, formats[1]))[0])
    shapes = ((m,), (n, 1)) if rows else ((), ())
    scales = (torch.rand(shape, device=DEVICE) / 64 + 1 / 64 for shape in shapes)
    return codes(m, k, formats[0]), compressed, dict(zip(("scale_x", "scale_w"), scales, strict=True))


def agrees(y: torch.Tensor, x, compressed, bias=None, activation=None, rtol: float = 2e-3, **scales) -> None:
    """Compares with the reference in fp64. Hopper's fp8 accumulators have 14 bits, so the error is relative to the
    largest result."""
    wide = {name: scale.double() for name, scale in scales.items()}
    want = sparse_matmul_reference(x, compressed, bias, activation, **wide)
    assert want.dtype == torch.float64 and torch.equal(y.isnan(), want.isnan())
    y, want = (torch.where(want.isnan(), 0.0, t.double()) for t in (y, want))
    limit = rtol * want.abs().max().item() if want.numel() else 0.0
    torch.testing.assert_close(y, want, rtol=0, atol=limit + 1e-6)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@FORMATS
def test_compress_and_back_with_every_pattern(dtype: torch.dtype) -> None:
    """Up to two non-zeros, in every row of a block of metadata and every chunk of several blocks; zeros of both
    signs."""
    patterns = [p for p in itertools.product((0, 1), repeat=4) if sum(p) <= 2]
    mask = torch.tensor([patterns[(7 * n + 3 * c) % 11] for n in range(37) for c in range(48)], device=DEVICE)
    numbers = torch.randint(1, 127, mask.shape, device=DEVICE) + 128 * torch.randint(2, mask.shape, device=DEVICE)
    w = (mask * numbers).view(37, 192).to(torch.uint8).view(dtype)
    negative = torch.where(w.view(torch.uint8) == 0, 0x80, w.view(torch.uint8)).view(dtype)
    compressed = compress(w, check=True)
    assert compressed.shape == w.shape and compressed.metadata.shape == metadata_shape(37, 192)
    assert compressed.values.dtype == dtype
    assert same(decompress(compressed), w) and same(decompressed(*compressed), w)
    assert torch.equal(compress(negative, check=True).metadata, compressed.metadata)
    columns = kept(compressed.metadata, 37, 192, eight=True).view(37, 48, 2)
    assert (columns[..., 0] < columns[..., 1]).all()  # the order that the sparse tensor cores require


def test_a_weight_in_the_instructions_order() -> None:
    """Decodes each lane's word as wgmma.mma_async.sp does for 8 bits: lanes 0 and 2 of each four have the first and the
    second 32 of K of row lane / 4, lanes 1 and 3 those of row lane / 4 + 8, from the lowest bits on."""
    w = prune(codes(64, 128))[0]
    values, metadata = (t.cpu() for t in compress(w))
    words = metadata.view(torch.int32).view(2, 4, 32)  # blocks of 64 of K, warps, lanes
    dense, values = torch.zeros(64, 128, dtype=torch.uint8), values.view(torch.uint8)
    for block, warp, lane, position in itertools.product(range(2), range(4), range(32), range(16)):
        row = 16 * warp + lane // 4 + 8 * (lane % 2)
        first = 64 * block + 32 * (lane % 4 // 2) + position // 2 * 4
        index = int(words[block, warp, lane]) >> 2 * position & 3
        dense[row, first + index] = values[row, first // 2 + position % 2]
    assert torch.equal(dense, w.cpu().view(torch.uint8))


@FORMATS
def test_prune_goes_by_the_magnitudes_of_codes(dtype: torch.dtype) -> None:
    w = torch.randint(256, (64, 64), device=DEVICE).to(torch.uint8).view(dtype)
    pruned, mask = prune(w)
    wide = torch.where(w.float().isfinite(), w.float(), 0.0)
    finite = torch.where(w.float().isfinite(), w.view(torch.uint8), 0).view(dtype)
    assert torch.equal(prune(finite)[1], prune(wide)[1])
    assert same(pruned, torch.where(mask, w.view(torch.uint8), 0).view(dtype))
    assert same(prune(w, mask)[0], pruned)
    with pytest.raises(RuntimeError, match="prune: w must not require grad"):
        prune(w.requires_grad_())


def test_what_is_no_24_weight_is_an_error_when_asked() -> None:
    w = torch.full((2, 64), 0x01, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match="w must have at most two non-zeros"):
        compress(w.view(E4M3), check=True)
    assert same(decompress(compress(w.view(E4M3))), prune(w.view(E4M3))[0])


@FORMATS
def test_every_code_counts_as_what_it_is(dtype: torch.dtype) -> None:
    """Rows of the identity select columns of the weight, exactly. Elements that are not finite make their row NaN or
    infinite."""
    numbers = torch.arange(256, device=DEVICE).to(torch.uint8).view(dtype)
    usable = torch.where(numbers.double().isfinite(), numbers.view(torch.uint8), 0)
    w = torch.zeros(8, 32, 2, dtype=torch.uint8, device=DEVICE)
    w[..., 1] = usable.view(8, 32)
    compressed, one = compress(w.view(8, 64).view(dtype), check=True), torch.tensor(1.0, device=DEVICE)
    eye = torch.eye(64, device=DEVICE).to(E4M3)
    y = sparse_matmul(eye, compressed, scale_x=one, scale_w=one, out_dtype=torch.float32)
    assert torch.equal(y, w.view(8, 64).view(dtype).float().t())


@triton.jit
def _sparse_matmul_numbers_kernel(code_ptr, bits_ptr, E4M3: tl.constexpr):
    at = tl.arange(0, 256)
    x = _numbers(tl.load(code_ptr + at), E4M3, False)
    tl.static_assert(x.dtype == (tl.float8e4nv if E4M3 else tl.float8e5))
    tl.store(bits_ptr + at, x.to(tl.uint8, bitcast=True))


@FORMATS
def test_a_gpu_multiplies_bytes_as_numbers_of_their_format(dtype: torch.dtype) -> None:
    code = torch.arange(256, device=DEVICE).to(torch.uint8)
    bits = torch.zeros_like(code)
    _sparse_matmul_numbers_kernel[(1,)](code, bits, dtype == E4M3)
    assert torch.equal(bits, code)


@pytest.mark.parametrize("rows", [False, True])
def test_every_pair_of_formats_and_every_dtype(rows: bool) -> None:
    for formats in itertools.product((E4M3, E5M2), repeat=2):
        x, compressed, scales = problem(35, 192, 48, formats, rows)
        for out_dtype in (torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])):
            y = sparse_matmul(x, compressed, **scales, out_dtype=out_dtype)
            assert y.dtype == out_dtype
            agrees(y, x, compressed, **scales, rtol=1e-2 if out_dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_a_bias_and_an_activation(activation: str | None) -> None:
    x, compressed, scales = problem(19, 128, 24)
    for dtype in (torch.float32, torch.float16):
        bias = torch.randn(48, device=DEVICE).to(dtype)[::2]
        y = sparse_matmul(x, compressed, bias, activation, **scales, out_dtype=torch.float16)
        agrees(y, x, compressed, bias, activation, **scales)


def test_scales_at_strides_and_one_scale() -> None:
    x, compressed, scales = problem(9, 64, 24)
    want = sparse_matmul(x, compressed, **scales, out_dtype=torch.float32)
    wide = {name: torch.stack([s.flatten(), -s.flatten()], 1)[:, :1] for name, s in scales.items()}
    assert torch.equal(sparse_matmul(x, compressed, **wide, out_dtype=torch.float32), want)
    one = torch.tensor(0.25, device=DEVICE)
    of_all = {"scale_x": one.expand(9), "scale_w": one.expand(24)}
    want = sparse_matmul(x, compressed, **of_all, out_dtype=torch.float32)
    assert torch.equal(sparse_matmul(x, compressed, scale_x=one, scale_w=one, out_dtype=torch.float32), want)


def test_a_weight_of_several_tiles() -> None:
    x, compressed, scales = problem(5, 64, 328)
    agrees(sparse_matmul(x, compressed, **scales, out_dtype=torch.float32), x, compressed, **scales)


def test_the_default_is_bfloat16() -> None:
    x, compressed, scales = problem(0, 64, 24)
    assert sparse_matmul(x, compressed, **scales).dtype == torch.bfloat16


def test_rows_that_are_not_on_boundaries_are_copied_and_the_others_are_not() -> None:
    x, compressed, scales = problem(20, 64, 24)
    assert plans_fp8._in_place(x) and plans_fp8._in_place(x[::2])
    want = sparse_matmul(x, compressed, **scales, out_dtype=torch.float32)
    wide, values = codes(20, 99), codes(24, 45)
    wide[:, 3:67], values[:, 7:39] = x, compressed.values
    assert not plans_fp8._in_place(wide[:, 3:67])
    shifted = Compressed(values[:, 7:39], compressed.metadata.transpose(0, 1).contiguous().transpose(0, 1))
    assert torch.equal(sparse_matmul(wide[:, 3:67], shifted, **scales, out_dtype=torch.float32), want)
    assert torch.equal(sparse_matmul(x.t().contiguous().t(), compressed, **scales, out_dtype=torch.float32), want)


@pytest.mark.parametrize("grad", ["x", "values", "scale_x", "scale_w", "bias"])
def test_a_gradient_is_refused_and_never_zero(grad: str) -> None:
    x, (values, metadata), scales = problem(3, 64, 8)
    inputs = {"x": x, "values": values, **scales, "bias": torch.randn(8, device=DEVICE)}
    inputs[grad] = inputs[grad].requires_grad_()

    def call() -> torch.Tensor:
        compressed, bias = Compressed(inputs["values"], metadata), inputs["bias"]
        of = {name: inputs[name] for name in ("scale_x", "scale_w")}
        return sparse_matmul(inputs["x"], compressed, bias, **of, out_dtype=torch.float16)

    with pytest.raises(RuntimeError, match=f"{grad} must not require grad"):
        call()
    with torch.no_grad():
        assert not call().requires_grad


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(x=torch.ones(3, 128).to(E4M3)), ValueError, r"x must be \[M, 64\] like fp8 values"),
        (dict(x=torch.ones(2, 3, 64).to(E4M3)), ValueError, r"x must be \[M, 64\]"),
        (dict(x=torch.ones(3, 64)), TypeError, "values must be a tensor of x's dtype"),
        (
            dict(values=torch.ones(8, 32)),
            TypeError,
            "values must be a tensor of float8_e4m3fn or float8_e5m2 with fp8 x",
        ),
        (dict(values=torch.ones(8, 30).to(E4M3)), ValueError, r"values must be \[N, K / 2\] with K a multiple of 64"),
        (dict(metadata=torch.ones(2, 1, 64).short()), ValueError, r"metadata must be \[1, 1, 64\]"),
        (dict(scale_x=None), TypeError, "scale_x must be a tensor of float32 with fp8 x, got NoneType"),
        (dict(scale_w=torch.ones(8).half()), TypeError, "scale_w must be a tensor of float32"),
        (dict(scale_x=torch.ones(())), ValueError, r"scale_x and scale_w must be .*; got \[\] and \[8\]"),
        (dict(scale_w=torch.ones(9)), ValueError, "scale_x and scale_w must be"),
        (dict(out_dtype=torch.float64), TypeError, "out_dtype must be"),
        (dict(bias=torch.ones(8).half()), TypeError, "bias must be a tensor of float32 or of out_dtype torch.bfloat16"),
        (dict(bias=torch.ones(9)), ValueError, r"bias must be \[8\]"),
        (dict(activation="tanh"), ValueError, "activation must be None or one of"),
        (dict(backend="gluon"), ValueError, "backend must be one of"),
    ],
)
def test_bad_input_raises_an_error_that_names_it(change, error, words) -> None:
    good = dict(zip(("values", "metadata"), problem(3, 64, 8)[1], strict=True)) | {"x": codes(3, 64)}
    good |= {"scale_x": torch.ones(3), "scale_w": torch.ones(8)}
    given = {n: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for n, t in {**good, **change}.items()}
    with pytest.raises(error, match=words):
        scales = {} if given["x"].dtype == torch.float32 else {n: given.pop(n) for n in ("scale_x", "scale_w")}
        given = {n: t for n, t in given.items() if not n.startswith("scale")}
        sparse_matmul(compressed=Compressed(given.pop("values"), given.pop("metadata")), **given, **scales)


def test_what_goes_with_8_bits_alone() -> None:
    compressed = compress(prune(torch.randn(8, 16, device=DEVICE))[0])
    x, one = torch.randn(3, 16, device=DEVICE), torch.ones((), device=DEVICE)
    with pytest.raises(ValueError, match="scale_x must be None unless x is fp8"):
        sparse_matmul(x, compressed, scale_x=one)
    with pytest.raises(ValueError, match="out_dtype must be None or x's dtype"):
        sparse_matmul(x, compressed, out_dtype=torch.float16)
    assert sparse_matmul(x, compressed, out_dtype=torch.float32).dtype == torch.float32
    with pytest.raises(ValueError, match=r"w must be \[N, K\] with K a multiple of 64 in torch.float8_e4m3fn"):
        compress(codes(8, 32))


def test_an_older_gpu_is_an_error_that_names_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnAGpu(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(op_fp8, "capability", lambda tensor: (8, 0))
    with pytest.raises(
        RuntimeError, match=r"x must be on a GPU of compute capability 8\.9 or later with fp8 x, got 8\.0"
    ):
        op_fp8._check_options(codes(3, 64).as_subclass(OnAGpu), None, "auto")


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_goes_through_compile(dynamic: bool) -> None:
    torch.compiler.reset()
    x, compressed, scales = problem(5, 64, 16)
    function = torch.compile(sparse_matmul, fullgraph=True, backend="eager", dynamic=dynamic)
    want = sparse_matmul(x, compressed, **scales, out_dtype=torch.float16)
    assert torch.equal(function(x, compressed, **scales, out_dtype=torch.float16), want)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)])
def test_every_size_has_a_configuration(capability: tuple[int, int]) -> None:
    for sizes in itertools.product((1, 17, 300, 70000), (1, 100, 8192), (0, 64, 8192)):
        config = configs.pick_fp8_config(*sizes, capability)
        assert 16 <= config.block_m <= 128 and 16 <= config.block_n <= 128
        assert config.block_k == 64  # K is a multiple of 64


@pytest.mark.slow
def test_it_compiles_for_ada() -> None:
    """sm_89 is supported, but not in SPEC.compile_targets, which are columns of docs/SUPPORT.md for every kernel."""
    script = """
from harness.compiling import ahead
from kernels.sparse_matmul.bench import FP8_CASES, SPEC
outcome = ahead.compile_spec(SPEC, (8, 9), FP8_CASES, ("fwd",), ("auto",))
assert not outcome.failures, outcome.failures
assert outcome.rows and all("QMMA" in row["mma"] for row in outcome.rows), outcome.rows
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(op_fp8.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_cases_name_the_sizes_that_they_have() -> None:
    for case in SPEC.cases:
        inputs = SPEC.make_inputs(case, "meta", None)
        if function := case.params.get("function"):
            assert case.name.startswith("{}-{}x{}-".format(function, *inputs["w"].shape))
            continue
        m, k, n = *inputs["x"].shape, inputs["values"].shape[0]
        assert case.name.startswith(f"{m}x{k}x{n}-")
